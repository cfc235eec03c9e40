"""Short messages of MPI between two ranks, from machine code (see collectives/short_messages.py).

A message is the number of its dtype, the number of dimensions, the shape, and the values.
"""

from __future__ import annotations

from ..compiler.compilation import inner
from ..memory_layout import ChannelFields, LockFields
from .fast_path_code import begin_call, data, dim, is_free, num_dims, plain_numel
from .intrinsics import call_isend, call_test, copy, give_way, now, store, store_release
from .records import (
    MISMATCH,
    NOT_FAST,
    UNFINISHED,
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
    status = begin_call(cached_call, tensor, num_bytes, arguments)
    if status != 0:
        return status
    take_lock(call.send_lock)
    take_lock(call.receive_lock)
    sent, length = TensorMessage(call.sent), num_dims(tensor)
    sent.dtype, sent.num_dims = call.sent_dtype, length
    for index in range(length):
        sent.shape[index] = dim(tensor, index)
    if call.send_lock:
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
def begin_messages(call: MpiMessage, length, dtype, num_bytes):
    """Begin what is received and what is sent; return the error of MPI."""
    begin, error, byte, tag, comm = now(), 0, call.byte_type, call.tag, call.comm
    call.begun = begin
    sends, receives = call.send_lock != 0, call.receive_lock != 0
    call.is_sent, call.is_received, call.is_unfinished = not sends, not receives, 0
    if receives:
        begin_message(call.receive_channel, begin, dtype, num_bytes)
        received, room = call.received, call.received_bytes
        error = call_isend(call.irecv, received, room, byte, call.receive_from, tag, comm, call.receive)
    if sends and error == 0:
        begin_message(call.send_channel, begin, dtype, num_bytes)
        error = call_isend(call.isend, call.sent, length, byte, call.send_to, tag, comm, call.send)
        call.num_open += 1
    return error


@inner
def await_messages(call: MpiMessage):
    """Wait for both for a limited time: 0, the error of MPI, or -1."""
    until, error = call.begun + call.patience, 0
    if call.is_received == 0:
        error = await_until(call, call.receive, until)
        end = now()
        if error == 0:
            call.is_received = 1
            call.num_open -= 1
            call.call_log.waited = end - call.begun
            end_message(call.receive_channel, end)
    if call.is_sent == 0 and error <= 0:
        of_send = await_until(call, call.send, until)
        if of_send == 0:
            call.is_sent = 1
            end_message(call.send_channel, now())
        if error == 0 or of_send > 0:
            error = of_send
    return error


@inner
def pass_by_mpi(call: MpiMessage, address, num_bytes):
    """Send a message, receive one, or both; copy the received values, unless the description differs.

    Returns 0, MISMATCH, the error of MPI, or UNFINISHED, after which Python holds the locks.
    """
    expected = TensorMessage(call.sent)
    num_fields, dtype = TensorMessage.shape + expected.num_dims, expected.dtype
    error = begin_messages(call, num_fields * 8 + num_bytes, dtype, num_bytes)
    if error == 0:
        error = await_messages(call)
    if error < 0:
        call.is_unfinished = 1
        return UNFINISHED
    release_lock(call.send_lock)
    release_lock(call.receive_lock)
    if error != 0 or not call.receive_lock:
        return error
    received, sent = call.received, call.sent
    for field in range(num_fields):
        if received[field] != sent[field]:
            return MISMATCH
    copy(address, received + num_fields * 8, num_bytes)
    return 0
