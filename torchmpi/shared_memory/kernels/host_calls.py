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
    FAILED_STEP,
    HOSTS,
    HOSTS_CODE,
    ITEM_BYTES,
    LOCAL_LOG,
    MESSAGE_TAG,
    MISMATCH,
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
def gather(hosts, number, num_bytes):
    """Compare a number and gather vectors (`NumberExchange.gather`): 0, MISMATCH, or the error of MPI."""
    known, heard = load_field(hosts, SENT), load_field(hosts, RECEIVED)
    memory, num_rounds = known + _HEADER_BYTES, load_field(hosts, NUM_ROUNDS)
    byte, tag = load_field(hosts, BYTE_TYPE), load_field(hosts, MESSAGE_TAG)
    store_field(known, 0, number)
    store_field(known, 1, number)
    set_operands(hosts, 0, memory, 1, num_bytes)
    for index in range(num_rounds):
        step = load_field(hosts, ROUNDS) + index * (ROUND_FIELDS * 8)
        count, position, lowest = load_field(step, ROUND_LENGTH), load_field(step, ROUND_POSITION), load_field(known, 0)
        is_equal = lowest == load_field(known, 1)
        error = call_sendrecv(
            load_field(hosts, SENDRECV),
            known, _HEADER_BYTES + (count * num_bytes if is_equal else 0), byte, load_field(step, ROUND_TARGET), tag,
            heard, load_field(hosts, RECEIVED_BYTES), byte, load_field(step, ROUND_ORIGIN), tag,
            load_field(hosts, MPI_COMM), load_field(hosts, MPI_STATUS),
        )  # fmt: skip
        if error != 0:
            return error
        if not is_equal or load_field(heard, 0) != lowest or load_field(heard, 1) != lowest:
            store_field(known, 0, _LOWEST)
            store_field(known, 1, _HIGHEST)
        elif index == num_rounds - 1:
            set_operands(hosts, position, heard + _HEADER_BYTES, count, num_bytes)
        else:
            copy(memory + position * num_bytes, heard + _HEADER_BYTES, count * num_bytes)
            set_operands(hosts, position, memory + position * num_bytes, count, num_bytes)
    return 0 if load_field(known, 0) == load_field(known, 1) else MISMATCH


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
    log, begin, waited = load_field(hosts, EXCHANGE_LOG), now(), 0
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
        status = gather(hosts, number ^ num_bytes, num_bytes)
        if status != 0:
            store_field(hosts, FAILED_STEP, STEP_ACROSS)
            return status
        waited = now() - begin
        store_field(hosts, RESULT, address)
        result, operands = field_address(hosts, RESULT), load_field(hosts, OPERANDS)
        reduce(load_field(call, REDUCER), result, 1, operands, load_field(hosts, NUM_HOSTS), numel)
    if local != 0:
        step_seq, signed = begin_step(hosts, BROADCAST_STEP, number, num_bytes)
        status = broadcast(load_field(hosts, BROADCAST_STEP + STEP_CALL), step_seq, signed, address, num_bytes)
        if end_step(hosts, status, STEP_AFTER) != 0:
            return status
    # The other hosts have arrived when their messages have, or for ranks that receive none, when the result has.
    store_field(log, LOG_WAITED, waited if sends else now() - begin)
    return 0


@kernel
def any_allreduce(call, seq, signature, address, numel):
    """Reduce one tensor in place by the kernel of the call."""
    if load_field(call, HOSTS) != 0:
        return allreduce_over_hosts(call, seq, signature, address, numel)
    return allreduce(call, seq, signature, address, numel)
