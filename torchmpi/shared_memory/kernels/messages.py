"""Short messages between two ranks: MPI_Sendrecv, called from machine code (see collectives/short_messages.py).

A message is the number of its dtype, the number of dimensions, the shape, and the values.
"""

from __future__ import annotations

from ..compiler.compilation import inner, kernel
from ..memory_layout import ChannelFields
from .fast_path_code import begin_call, data, dim, is_free, num_dims, plain_numel
from .intrinsics import call_sendrecv, copy, now, store, store_release
from .records import MISMATCH, NOT_FAST, Arguments, CachedCallRecord, DLTensor, SendReceive, TensorMessage


@kernel
def enter_sendreceive(cached_call: CachedCallRecord, tensor: DLTensor, _, arguments: Arguments):
    """Enter an exchange if the queues of both directions are idle, and write the message to send."""
    call = SendReceive(cached_call.call)
    numel, send_lock = plain_numel(cached_call, tensor), call.send_lock
    num_bytes = numel * call.item_bytes
    if numel < 0 or num_bytes > call.value_bytes:
        return NOT_FAST
    if not is_free(send_lock):
        return NOT_FAST
    status = begin_call(cached_call, tensor, num_bytes, arguments)
    if status != 0:
        return status
    store(send_lock.entered, 1)
    sent, length = TensorMessage(call.sent), num_dims(tensor)
    sent.dtype, sent.num_dims = call.sent_dtype, length
    for index in range(length):
        sent.shape[index] = dim(tensor, index)
    copy(sent.shape + length * 8, data(tensor), num_bytes)
    arguments.rest[0] = data(tensor)
    arguments.rest[1] = TensorMessage.shape + length
    arguments.rest[2] = num_bytes
    return 0


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


@kernel
def sendreceive(call: SendReceive, seq, signature, target, num_fields, num_bytes):
    """Send a message and receive one; copy its values to the target, unless its header differs from the sent one.

    Returns 0, MISMATCH, or the error of MPI.
    """
    byte, tag = call.byte_type, call.tag
    sent, received, begin = call.sent, call.received, now()
    to, source, log = call.send_channel, call.receive_channel, call.call_log
    dtype = call.sent_dtype
    begin_message(to, begin, dtype, num_bytes)
    begin_message(source, begin, dtype, num_bytes)
    error = call_sendrecv(
        call.sendrecv,
        sent, num_fields * 8 + num_bytes, byte, call.send_to, tag,
        received, call.received_bytes, byte, call.receive_from, tag,
        call.comm, call.status,
    )  # fmt: skip
    end = now()
    log.waited = end - begin
    if error == 0:
        end_message(to, end)
        end_message(source, end)
    store_release(call.send_lock.entered, 0)
    if error != 0:
        return error
    for field in range(num_fields):
        if received[field] != sent[field]:
            return MISMATCH
    copy(target, received + num_fields * 8, num_bytes)
    return 0
