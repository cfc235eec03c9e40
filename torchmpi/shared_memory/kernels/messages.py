"""Messages of MPI between two ranks, from machine code (see collectives/short_messages.py).

A description is the number of the dtype, the number of dimensions, and the shape.
"""

from __future__ import annotations

from ..compiler.compilation import inner
from ..memory_layout import ChannelFields, LockFields
from .fast_path_code import begin_call, data, dim, is_free, num_dims, plain_numel
from .intrinsics import call_get_count, call_isend, call_test, copy, give_way, now, store, store_release
from .records import (
    DESCRIPTION,
    MISMATCH,
    NOT_FAST,
    OTHER,
    UNFINISHED,
    VALUES,
    Arguments,
    CachedCallRecord,
    DLTensor,
    MpiMessage,
    TensorMessage,
)

_POLLS_PER_LOOK = 32  # at the clock


@inner
def begin_message(channel: ChannelFields, time, dtype, num_bytes):
    """Count a message that begins."""
    channel.dtype = dtype
    channel.num_bytes = num_bytes
    channel.begin = time
    channel.begun += 1
    return 0


@inner
def end_message(channel: ChannelFields, time):
    """Count a message that ends."""
    channel.end = time
    channel.ended += 1
    return 0


@inner
def is_free_or_none(lock: LockFields):
    """Return whether there is no lock, or this thread may take it."""
    return True if not lock else is_free(lock)


@inner
def take_lock(lock: LockFields):
    """Take a lock, if there is one."""
    if lock:
        store(lock.entered, 1)
    return 0


@inner
def release_lock(lock: LockFields):
    """Release a lock, if there is one."""
    if lock:
        store_release(lock.entered, 0)
    return 0


@inner
def enter_message_of_mpi(cached_call: CachedCallRecord, tensor: DLTensor, arguments: Arguments):
    """Enter a message if the queues of its directions are idle, and write its description, and the values to send."""
    call = MpiMessage(cached_call.call)
    numel = plain_numel(cached_call, tensor)
    num_bytes = numel * call.item_bytes
    if numel < 0 or num_bytes > call.value_bytes:
        return NOT_FAST
    if not (is_free_or_none(call.send_lock) and is_free_or_none(call.receive_lock)):
        return NOT_FAST
    if call.lock.deferred != 0 and call.receive_lock and call.is_background == 0:
        return NOT_FAST
    status = begin_call(cached_call, tensor, num_bytes, arguments)
    if status != 0:
        return status
    take_lock(call.send_lock)
    take_lock(call.receive_lock)
    sent, length = TensorMessage(call.sent), num_dims(tensor)
    sent.dtype, sent.num_dims = call.sent_dtype, length
    for index in range(length):
        sent.shape[index] = dim(tensor, index)
    # The values of a long exchange are copied too, since the received ones take their place.
    if call.send_lock and call.has_tag == 0 and (num_bytes <= call.packed_bytes or call.receive_lock):
        copy(sent.shape + length * 8, data(tensor), num_bytes)
    arguments.rest[0] = data(tensor)
    arguments.rest[1] = num_bytes
    return 0


@inner
def await_until(call: MpiMessage, request, until):
    """Wait for a message: 0, the error of MPI, or -1 if it has not ended at this time."""
    test, status, num_polls = call.test, call.status, 0
    error = call_test(test, request, status)
    while error < 0:
        num_polls += 1
        if num_polls % _POLLS_PER_LOOK == 0 and now() >= until:
            return error
        if call.yields:
            give_way()
        error = call_test(test, request, status)
    return error


@inner
def begin_receive(call: MpiMessage, part):
    """Begin to receive a part; return the error of MPI."""
    irecv, byte, origin, comm, request = call.irecv, call.byte_type, call.receive_from, call.comm, call.receive
    call.receiving = part
    if part == DESCRIPTION:
        return call_isend(irecv, call.received, call.received_bytes, byte, origin, call.tag, comm, request)
    return call_isend(irecv, call.address, call.num_bytes, byte, origin, call.values_tag, comm, request)


@inner
def begin_send(call: MpiMessage, parts, header_bytes):
    """Begin to send these parts; return the error of MPI."""
    isend, byte, target, comm, error = call.isend, call.byte_type, call.send_to, call.comm, 0
    if parts & DESCRIPTION:
        length = header_bytes if parts & VALUES else header_bytes + call.num_bytes
        error = call_isend(isend, call.sent, length, byte, target, call.tag, comm, call.send)
        call.sending = DESCRIPTION
        call.num_open += 1
    if parts & VALUES and error == 0:
        source = call.sent + header_bytes if call.receive_lock else call.address
        error = call_isend(isend, source, call.num_bytes, byte, target, call.values_tag, comm, call.send_values)
        call.sending |= VALUES
        call.num_open += 1
    return error


@inner
def is_expected(call: MpiMessage, header_bytes):
    """Return whether the description that has arrived is that of the tensor."""
    received, sent = call.received, call.sent
    for field in range(header_bytes // 8):
        if received[field] != sent[field]:
            return False
    return True


@inner
def await_receive(call: MpiMessage, parts, header_bytes, until):
    """Wait for what is received: 0, the error of MPI, or -1 if Python must continue."""
    error, first = 0, call.receiving
    while call.receiving != 0 and error == 0:
        error = await_until(call, call.receive, until)
        if error < 0:
            return error
        part = call.receiving
        if part == first:
            call.call_log.waited = now() - call.begun
        if error == 0 and part == DESCRIPTION and not is_expected(call, header_bytes):
            call.receiving = OTHER
            return -1
        call.num_open -= 1
        call.receiving = 0
        if error == 0 and part == DESCRIPTION and parts & VALUES:
            error = begin_receive(call, VALUES)
        elif error == 0:
            end_message(call.receive_channel, now())
            if call.has_tag:
                call.found_bytes = call_get_count(call.get_count, call.status, call.byte_type)
    return error


@inner
def await_send(call: MpiMessage, until):
    """Wait until what is sent has left: 0, the error of MPI, or -1."""
    error = 0
    if call.sending & DESCRIPTION:
        error = await_until(call, call.send, until)
        call.sending ^= DESCRIPTION if error >= 0 else 0
    if call.sending & VALUES and error == 0:
        error = await_until(call, call.send_values, until)
        call.sending ^= VALUES if error >= 0 else 0
    if call.send_lock and error == 0:
        end_message(call.send_channel, now())
    return error


@inner
def pass_by_mpi(call: MpiMessage, address, num_bytes):
    """Send a message, receive one, or both.

    Returns 0, MISMATCH if a message with a tag has another length, the error of MPI, or UNFINISHED, after which Python
    holds the locks: it waits on, or drops a message that has another description.
    """
    expected, begin = TensorMessage(call.sent), now()
    header_bytes, dtype, error = (TensorMessage.shape + expected.num_dims) * 8, expected.dtype, 0
    call.begun, call.sending, call.receiving, call.is_unfinished = begin, 0, 0, 0
    call.address, call.num_bytes = address, num_bytes
    parts = VALUES if call.has_tag else DESCRIPTION if num_bytes <= call.packed_bytes else DESCRIPTION | VALUES
    if call.receive_lock:
        begin_message(call.receive_channel, begin, dtype, num_bytes)
        error = begin_receive(call, DESCRIPTION if parts & DESCRIPTION else VALUES)
    if call.send_lock and error == 0:
        begin_message(call.send_channel, begin, dtype, num_bytes)
        error = begin_send(call, parts, header_bytes)
    if error == 0:
        until = begin + call.patience
        error = await_receive(call, parts, header_bytes, until)
        if error <= 0:
            of_send = await_send(call, until)
            error = of_send if error == 0 or of_send > 0 else error
    if error < 0:
        call.is_unfinished = 1
        return UNFINISHED
    release_lock(call.send_lock)
    release_lock(call.receive_lock)
    if error != 0 or not call.receive_lock:
        return error
    if call.has_tag:
        return 0 if call.found_bytes == num_bytes else MISMATCH
    if parts == DESCRIPTION:
        copy(address, call.received + header_bytes, num_bytes)
    return 0
