"""Short allreduces over hosts: the steps within a host, and the messages between hosts, without Python in between.

`allreduce_over_hosts` does the same as `ComparedAllreduce` of torchmpi.backends, with the same messages, entries of
call logs and bits, so that ranks of both paths meet. It ends at the first step that fails; Python runs the rest of the
call, or raises the error.
"""

from __future__ import annotations

from ..compiler.compilation import inner, kernel
from ..memory_layout import CALL_NUMBER_BITS, RECORD_IS_NUMBER, WITH_COMPARISON
from .intrinsics import call_sendrecv, copy, now, reduce
from .logged_calls import (
    FIRST_HASH,
    close_entry,
    count_call,
    hash_end,
    hash_step,
    open_entry,
    set_dim,
)
from .movement import broadcast
from .records import (
    MISMATCH,
    STEP_ACROSS,
    STEP_AFTER,
    STEP_BEFORE,
    ComparedNumber,
    Hosts,
    KernelCall,
    RoundRecord,
    StepRecord,
)
from .reduce_kernels import allreduce

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


@inner
def call_number(seq, code, shape_hash):
    """Return `Group.call_number` of a call; `shape_hash` is the hash of its shape."""
    total = hash_step(hash_step(hash_step(FIRST_HASH, seq), code), shape_hash)
    return hash_end(total, 3) & ((1 << CALL_NUMBER_BITS) - 1)


@inner
def set_operands(hosts: Hosts, position, address, count, num_bytes):
    """Store the addresses of `count` vectors of hosts in cyclic order, from a position after the own one."""
    own, size = hosts.own_host, hosts.num_hosts
    for index in range(count):
        hosts.operands[(own + position + index) % size] = address + index * num_bytes
    return 0


@inner
def begin_comparison(hosts: Hosts, number):
    """Store a number as the only one that this host knows."""
    known = ComparedNumber(hosts.sent)
    known.lowest = known.highest = number
    return 0


@inner
def swap(hosts: Hosts, step: RoundRecord, num_bytes):
    """Exchange the numbers that are known, with bytes behind them if those of this rank are equal.

    Returns 0, MISMATCH if not all numbers are equal, or the error of MPI.
    """
    known, heard = ComparedNumber(hosts.sent), ComparedNumber(hosts.received)
    byte, tag, lowest = hosts.byte_type, hosts.tag, known.lowest
    is_equal = lowest == known.highest
    error = call_sendrecv(
        hosts.sendrecv,
        known, ComparedNumber.BYTES + (num_bytes if is_equal else 0), byte, step.target, tag,
        heard, hosts.received_bytes, byte, step.origin, tag,
        hosts.comm, hosts.status,
    )  # fmt: skip
    if error != 0:
        return error
    if is_equal and heard.lowest == lowest and heard.highest == lowest:
        return 0
    known.lowest = _LOWEST
    known.highest = _HIGHEST
    return MISMATCH


@inner
def gather(hosts: Hosts, number, num_bytes):
    """Compare a number and gather vectors (`NumberExchange.gather`): 0, MISMATCH, or the error of MPI."""
    memory, heard = hosts.sent + ComparedNumber.BYTES, hosts.received + ComparedNumber.BYTES
    status, num_rounds = begin_comparison(hosts, number), hosts.num_rounds
    set_operands(hosts, 0, memory, 1, num_bytes)
    for index in range(num_rounds):
        step = hosts.rounds[index]
        count, position = step.length, step.position
        status = swap(hosts, step, count * num_bytes)
        if status != 0 and status != MISMATCH:
            return status
        if status == 0 and index == num_rounds - 1:
            set_operands(hosts, position, heard, count, num_bytes)
        elif status == 0:
            copy(memory + position * num_bytes, heard, count * num_bytes)
            set_operands(hosts, position, memory + position * num_bytes, count, num_bytes)
    return status


@inner
def block_length(block, block_bytes, num_bytes):
    """Return the length of a block of a vector, without padding."""
    return max(0, min(block_bytes, num_bytes - block * block_bytes))


@inner
def relay(hosts: Hosts, number, num_bytes, block_bytes):
    """Compare a number, and bring the blocks of all vectors to the hosts that combine them: status like `gather`.

    Position j has the block for the host j before this one; in the end, that of the host j after it.
    """
    memory, heard = hosts.sent + ComparedNumber.BYTES, hosts.received + ComparedNumber.BYTES
    blocks, own, size = hosts.relayed_blocks, hosts.own_host, hosts.num_hosts
    for position in range(size):
        block = (own - position + size) % size
        copy(
            blocks + position * block_bytes,
            memory + block * block_bytes,
            block_length(block, block_bytes, num_bytes),
        )
    status = begin_comparison(hosts, number)
    for index in range(hosts.num_rounds):
        step = hosts.rounds[index]
        distance, length = step.position, 0
        for position in range(distance, size):
            if position & distance:
                copy(memory + length, blocks + position * block_bytes, block_bytes)
                length += block_bytes
        status = swap(hosts, step, length)
        if status != 0 and status != MISMATCH:
            return status
        length = 0
        for position in range(distance, size if status == 0 else 0):
            if position & distance:
                copy(blocks + position * block_bytes, heard + length, block_bytes)
                length += block_bytes
    set_operands(hosts, 0, blocks, size, block_bytes)
    return status


@inner
def exchange(call: KernelCall, hosts: Hosts, number, address, numel, begin):
    """Combine the vectors of all hosts, and store the result: 0, MISMATCH, or the error of MPI."""
    num_bytes, size = numel * call.item_bytes, hosts.num_hosts
    operands, result = hosts.operands, hosts.result
    number ^= num_bytes
    if num_bytes <= hosts.most_gathered:
        status = gather(hosts, number, num_bytes)
        if status == 0:
            hosts.waited = now() - begin
            hosts.result[0] = address
            reduce(call.reducer, result, 1, operands, size, numel)
        return status
    width = (numel + size - 1) // size
    block_bytes = width * call.item_bytes
    status = relay(hosts, number, num_bytes, block_bytes)
    if status != 0:
        return status
    hosts.waited = now() - begin
    hosts.result[0] = hosts.sent + ComparedNumber.BYTES
    reduce(call.reducer, result, 1, operands, size, width)
    status = gather(hosts, number, block_bytes)
    for block in range(size if status == 0 else 0):
        copy(address + block * block_bytes, operands[block], block_length(block, block_bytes, num_bytes))
    return status


@inner
def begin_step(hosts: Hosts, step: StepRecord, number, num_bytes):
    """Enter a step within the host into the call log of its ranks; return the number of this call and the signature."""
    local = hosts.local_log
    seq = local.sequence + 1
    record = open_entry(local, seq)
    set_dim(record, 0, number)
    close_entry(local, record, seq, step.code, RECORD_IS_NUMBER + 1, num_bytes)
    return seq, step.signed_code ^ hash_end(hash_step(FIRST_HASH, number), 1)


@inner
def end_step(hosts: Hosts, status, step):
    """End a step within the host, unless it has failed; return its status."""
    if status != 0:
        hosts.failed_step = step
        return status
    return count_call(hosts.local_log)


@kernel
def allreduce_over_hosts(call: KernelCall, seq, signature, address, numel):
    """Reduce a short tensor in place on all ranks; `signature` is the hash of its shape.

    Returns 0, MISMATCH, the error of MPI, or the status of a kernel, with the step in `failed_step`.
    """
    hosts, num_bytes = call.hosts, numel * call.item_bytes
    log, begin = hosts.call_log, now()
    log.waited = -begin  # for Python, which ends a call that fails here
    log.algorithm = WITH_COMPARISON
    number = call_number(seq, hosts.code, signature)
    local, sends, work = hosts.local_log, hosts.sendrecv != 0, address
    if sends:  # a copy: the tensor of a call that differs stays as it is
        work = hosts.sent + ComparedNumber.BYTES
        copy(work, address, num_bytes)
    if local:
        step_seq, signed = begin_step(hosts, hosts.reduce_step, number, num_bytes)
        status = allreduce(hosts.reduce_step.call, step_seq, signed, work, numel)
        if end_step(hosts, status, STEP_BEFORE) != 0:
            return status
    if sends:
        status = exchange(call, hosts, number, address, numel, begin)
        if status != 0:
            hosts.failed_step = STEP_ACROSS
            return status
    if local:
        step_seq, signed = begin_step(hosts, hosts.broadcast_step, number, num_bytes)
        status = broadcast(hosts.broadcast_step.call, step_seq, signed, address, num_bytes)
        if end_step(hosts, status, STEP_AFTER) != 0:
            return status
    # The other hosts have arrived when their messages have, or for ranks that receive none, when the result has.
    log.waited = hosts.waited if sends else now() - begin
    return 0


@kernel
def any_allreduce(call: KernelCall, seq, signature, address, numel):
    """Reduce one tensor in place by the kernel of the call."""
    if call.hosts:
        return allreduce_over_hosts(call, seq, signature, address, numel)
    return allreduce(call, seq, signature, address, numel)
