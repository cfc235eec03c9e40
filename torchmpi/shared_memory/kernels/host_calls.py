"""Short allreduces over hosts: the steps within a host, and the messages between hosts, without Python in between.

`allreduce_over_hosts` does the same as `ComparedAllreduce` and `ComparedHostAllreduce` of torchmpi.backends, with the
same messages, entries of call logs and bits, so that ranks of both paths meet. It ends at the first step that fails;
Python runs the rest of the call, or raises the error.
"""

from __future__ import annotations

from ..memory_layout import (
    CALL_NUMBER_BITS,
    LOG_ALGORITHM,
    LOG_SEQUENCE,
    LOG_WAITED,
    RECORD_IS_NUMBER,
    WITH_COMPARISON,
)
from .compilation import inner, kernel
from .intrinsics import call_sendrecv, copy, field_address, load_field, now, reduce, store_field
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
    BROADCAST_STEP,
    BYTE_TYPE,
    EXCHANGE_LOG,
    EXCHANGE_WAITED,
    FAILED_STEP,
    HOSTS,
    HOSTS_CODE,
    ITEM_BYTES,
    LOCAL_LOG,
    MESSAGE_TAG,
    MISMATCH,
    MOST_GATHERED,
    MPI_COMM,
    MPI_STATUS,
    NUM_HOSTS,
    NUM_ROUNDS,
    OPERANDS,
    OWN_HOST,
    RECEIVED,
    RECEIVED_BYTES,
    REDUCE_STEP,
    REDUCER,
    RELAYED_BLOCKS,
    RESULT,
    ROUND_FIELDS,
    ROUND_LENGTH,
    ROUND_ORIGIN,
    ROUND_POSITION,
    ROUND_TARGET,
    ROUNDS,
    SENDRECV,
    SENT,
    STEP_ACROSS,
    STEP_AFTER,
    STEP_BEFORE,
    STEP_CALL,
    STEP_CODE,
    STEP_SIGNED_CODE,
)
from .reduce_kernels import allreduce

_HEADER_BYTES = 16  # the lowest and the highest number of which the sender knows
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


@inner
def call_number(seq, code, shape_hash):
    """Return `Group.call_number` of a call; `shape_hash` is the hash of its shape."""
    total = hash_step(hash_step(hash_step(FIRST_HASH, seq), code), shape_hash)
    return hash_end(total, 3) & ((1 << CALL_NUMBER_BITS) - 1)


@inner
def set_operands(hosts, position, address, count, num_bytes):
    """Store the addresses of `count` vectors of hosts in cyclic order, from a position after the own one."""
    own, size = load_field(hosts, OWN_HOST), load_field(hosts, NUM_HOSTS)
    for index in range(count):
        store_field(load_field(hosts, OPERANDS), (own + position + index) % size, address + index * num_bytes)
    return 0


@inner
def begin_comparison(hosts, number):
    """Store a number as the only one that this host knows."""
    store_field(load_field(hosts, SENT), 0, number)
    store_field(load_field(hosts, SENT), 1, number)
    return 0


@inner
def swap(hosts, step, num_bytes):
    """Exchange the numbers that are known, with bytes behind them if those of this rank are equal.

    Returns 0, MISMATCH if not all numbers are equal, or the error of MPI.
    """
    known, heard = load_field(hosts, SENT), load_field(hosts, RECEIVED)
    byte, tag, lowest = load_field(hosts, BYTE_TYPE), load_field(hosts, MESSAGE_TAG), load_field(known, 0)
    is_equal = lowest == load_field(known, 1)
    error = call_sendrecv(
        load_field(hosts, SENDRECV),
        known, _HEADER_BYTES + (num_bytes if is_equal else 0), byte, load_field(step, ROUND_TARGET), tag,
        heard, load_field(hosts, RECEIVED_BYTES), byte, load_field(step, ROUND_ORIGIN), tag,
        load_field(hosts, MPI_COMM), load_field(hosts, MPI_STATUS),
    )  # fmt: skip
    if error != 0:
        return error
    if is_equal and load_field(heard, 0) == lowest and load_field(heard, 1) == lowest:
        return 0
    store_field(known, 0, _LOWEST)
    store_field(known, 1, _HIGHEST)
    return MISMATCH


@inner
def gather(hosts, number, num_bytes):
    """Compare a number and gather vectors (`NumberExchange.gather`): 0, MISMATCH, or the error of MPI."""
    memory, heard = load_field(hosts, SENT) + _HEADER_BYTES, load_field(hosts, RECEIVED) + _HEADER_BYTES
    status, num_rounds = begin_comparison(hosts, number), load_field(hosts, NUM_ROUNDS)
    set_operands(hosts, 0, memory, 1, num_bytes)
    for index in range(num_rounds):
        step = load_field(hosts, ROUNDS) + index * (ROUND_FIELDS * 8)
        count, position = load_field(step, ROUND_LENGTH), load_field(step, ROUND_POSITION)
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
def relay(hosts, number, num_bytes, block_bytes):
    """Compare a number, and bring the blocks of all vectors to the hosts that combine them: status like `gather`.

    Position j has the block for the host j before this one; in the end, that of the host j after it.
    """
    memory, heard = load_field(hosts, SENT) + _HEADER_BYTES, load_field(hosts, RECEIVED) + _HEADER_BYTES
    blocks, own, size = load_field(hosts, RELAYED_BLOCKS), load_field(hosts, OWN_HOST), load_field(hosts, NUM_HOSTS)
    for position in range(size):
        block = (own - position + size) % size
        copy(
            blocks + position * block_bytes,
            memory + block * block_bytes,
            block_length(block, block_bytes, num_bytes),
        )
    status = begin_comparison(hosts, number)
    for index in range(load_field(hosts, NUM_ROUNDS)):
        step = load_field(hosts, ROUNDS) + index * (ROUND_FIELDS * 8)
        distance, length = load_field(step, ROUND_POSITION), 0
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
def exchange(call, hosts, number, address, numel, begin):
    """Combine the vectors of all hosts, and store the result: 0, MISMATCH, or the error of MPI."""
    num_bytes, size = numel * load_field(call, ITEM_BYTES), load_field(hosts, NUM_HOSTS)
    operands, result = load_field(hosts, OPERANDS), field_address(hosts, RESULT)
    number ^= num_bytes
    if num_bytes <= load_field(hosts, MOST_GATHERED):
        status = gather(hosts, number, num_bytes)
        if status == 0:
            store_field(hosts, EXCHANGE_WAITED, now() - begin)
            store_field(hosts, RESULT, address)
            reduce(load_field(call, REDUCER), result, 1, operands, size, numel)
        return status
    width = (numel + size - 1) // size
    block_bytes = width * load_field(call, ITEM_BYTES)
    status = relay(hosts, number, num_bytes, block_bytes)
    if status != 0:
        return status
    store_field(hosts, EXCHANGE_WAITED, now() - begin)
    store_field(hosts, RESULT, load_field(hosts, SENT) + _HEADER_BYTES)
    reduce(load_field(call, REDUCER), result, 1, operands, size, width)
    status = gather(hosts, number, block_bytes)
    for block in range(size if status == 0 else 0):
        copy(address + block * block_bytes, load_field(operands, block), block_length(block, block_bytes, num_bytes))
    return status


@inner
def begin_step(hosts, step, number, num_bytes):
    """Enter a step within the host into the call log of its ranks; return the number of this call and the signature."""
    local, code = load_field(hosts, LOCAL_LOG), load_field(hosts, step + STEP_CODE)
    seq = load_field(local, LOG_SEQUENCE) + 1
    record = open_entry(local, seq)
    set_dim(record, 0, number)
    close_entry(local, record, seq, code, RECORD_IS_NUMBER + 1, num_bytes)
    return seq, load_field(hosts, step + STEP_SIGNED_CODE) ^ hash_end(hash_step(FIRST_HASH, number), 1)


@inner
def end_step(hosts, status, step):
    """End a step within the host, unless it has failed; return its status."""
    if status != 0:
        store_field(hosts, FAILED_STEP, step)
        return status
    return count_call(load_field(hosts, LOCAL_LOG))


@kernel
def allreduce_over_hosts(call, seq, signature, address, numel):
    """Reduce a short tensor in place on all ranks; `signature` is the hash of its shape.

    Returns 0, MISMATCH, the error of MPI, or the status of a kernel, with the step in FAILED_STEP.
    """
    hosts, num_bytes = load_field(call, HOSTS), numel * load_field(call, ITEM_BYTES)
    log, begin = load_field(hosts, EXCHANGE_LOG), now()
    store_field(log, LOG_WAITED, -begin)  # for Python, which ends a call that fails here
    store_field(log, LOG_ALGORITHM, WITH_COMPARISON)
    number = call_number(seq, load_field(hosts, HOSTS_CODE), signature)
    local, sends, work = load_field(hosts, LOCAL_LOG), load_field(hosts, SENDRECV) != 0, address
    if sends:  # a copy: the tensor of a call that differs stays as it is
        work = load_field(hosts, SENT) + _HEADER_BYTES
        copy(work, address, num_bytes)
    if local != 0:
        step_seq, signed = begin_step(hosts, REDUCE_STEP, number, num_bytes)
        status = allreduce(load_field(hosts, REDUCE_STEP + STEP_CALL), step_seq, signed, work, numel)
        if end_step(hosts, status, STEP_BEFORE) != 0:
            return status
    if sends:
        status = exchange(call, hosts, number, address, numel, begin)
        if status != 0:
            store_field(hosts, FAILED_STEP, STEP_ACROSS)
            return status
    if local != 0:
        step_seq, signed = begin_step(hosts, BROADCAST_STEP, number, num_bytes)
        status = broadcast(load_field(hosts, BROADCAST_STEP + STEP_CALL), step_seq, signed, address, num_bytes)
        if end_step(hosts, status, STEP_AFTER) != 0:
            return status
    # The other hosts have arrived when their messages have, or for ranks that receive none, when the result has.
    store_field(log, LOG_WAITED, load_field(hosts, EXCHANGE_WAITED) if sends else now() - begin)
    return 0


@kernel
def any_allreduce(call, seq, signature, address, numel):
    """Reduce one tensor in place by the kernel of the call."""
    if load_field(call, HOSTS) != 0:
        return allreduce_over_hosts(call, seq, signature, address, numel)
    return allreduce(call, seq, signature, address, numel)
