"""Short messages between two ranks: MPI_Sendrecv, called from machine code (see collectives/short_messages.py).

A message is the number of its dtype, the number of dimensions, the shape, and the values.
"""

from __future__ import annotations

from ..memory_layout import (
    LOG_ALGORITHM,
    LOG_WAITED,
    MESSAGE_BEGIN,
    MESSAGE_BEGUN,
    MESSAGE_BYTES,
    MESSAGE_DTYPE,
    MESSAGE_END,
    MESSAGE_ENDED,
    RUN_LOCK_ENTERED,
    RUN_LOCK_HELD,
    RUN_LOCK_PENDING,
)
from .compilation import inner, kernel
from .fast_path_code import begin_call, data, dim, num_dims, plain_numel
from .intrinsics import call_sendrecv, copy, load_field, now, store_field, store_field_release
from .records import (
    BYTE_TYPE,
    EXCHANGE_LOG,
    FIRST_ARGUMENT,
    ITEM_BYTES,
    MESSAGE_TAG,
    MISMATCH,
    MPI_COMM,
    MPI_STATUS,
    NOT_FAST,
    PREPARED_CALL,
    RECEIVE_CHANNEL,
    RECEIVE_FROM,
    RECEIVED,
    RECEIVED_BYTES,
    SEND_CHANNEL,
    SEND_LOCK,
    SEND_TO,
    SENDRECV,
    SENT,
    SENT_DTYPE,
    VALUE_BYTES,
)

_SHAPE = 2  # first field of the shape


@kernel
def enter_sendreceive(cached_call, tensor, _, arguments):
    """Enter an exchange if the queues of both directions are idle, and write the message to send."""
    call = load_field(cached_call, PREPARED_CALL)
    numel, send_lock = plain_numel(cached_call, tensor), load_field(call, SEND_LOCK)
    num_bytes = numel * load_field(call, ITEM_BYTES)
    if numel < 0 or num_bytes > load_field(call, VALUE_BYTES):
        return NOT_FAST
    for field in (RUN_LOCK_HELD, RUN_LOCK_ENTERED, RUN_LOCK_PENDING):
        if load_field(send_lock, field) != 0:
            return NOT_FAST
    status = begin_call(cached_call, tensor, num_bytes, arguments)
    if status != 0:
        return status
    store_field(send_lock, RUN_LOCK_ENTERED, 1)
    sent, length = load_field(call, SENT), num_dims(tensor)
    store_field(sent, 0, load_field(call, SENT_DTYPE))
    store_field(sent, 1, length)
    for index in range(length):
        store_field(sent, _SHAPE + index, dim(tensor, index))
    copy(sent + (_SHAPE + length) * 8, data(tensor), num_bytes)
    store_field(arguments, FIRST_ARGUMENT, data(tensor))
    store_field(arguments, FIRST_ARGUMENT + 1, _SHAPE + length)
    store_field(arguments, FIRST_ARGUMENT + 2, num_bytes)
    return 0


@inner
def begin_message(channel, time, dtype, num_bytes):
    """Count a message that begins; return its number."""
    number = load_field(channel, MESSAGE_BEGUN) + 1
    store_field(channel, MESSAGE_DTYPE, dtype)
    store_field(channel, MESSAGE_BYTES, num_bytes)
    store_field(channel, MESSAGE_BEGIN, time)
    store_field(channel, MESSAGE_BEGUN, number)
    return number


@inner
def end_message(channel, time):
    """Count a message that ends."""
    store_field(channel, MESSAGE_END, time)
    store_field(channel, MESSAGE_ENDED, load_field(channel, MESSAGE_ENDED) + 1)
    return 0


@kernel
def sendreceive(call, seq, signature, target, num_fields, num_bytes):
    """Send a message and receive one; copy its values to the target, unless its header differs from the sent one.

    Returns 0, MISMATCH, or the error of MPI.
    """
    byte, tag = load_field(call, BYTE_TYPE), load_field(call, MESSAGE_TAG)
    sent, received, begin = load_field(call, SENT), load_field(call, RECEIVED), now()
    to, source, log = load_field(call, SEND_CHANNEL), load_field(call, RECEIVE_CHANNEL), load_field(call, EXCHANGE_LOG)
    dtype = load_field(call, SENT_DTYPE)
    number = begin_message(to, begin, dtype, num_bytes) & 0x7FFFFFFF
    number |= (begin_message(source, begin, dtype, num_bytes) & 0x7FFFFFFF) << 32
    store_field(log, LOG_ALGORITHM, number)
    error = call_sendrecv(
        load_field(call, SENDRECV),
        sent, num_fields * 8 + num_bytes, byte, load_field(call, SEND_TO), tag,
        received, load_field(call, RECEIVED_BYTES), byte, load_field(call, RECEIVE_FROM), tag,
        load_field(call, MPI_COMM), load_field(call, MPI_STATUS),
    )  # fmt: skip
    end = now()
    store_field(log, LOG_WAITED, end - begin)
    if error == 0:
        end_message(to, end)
        end_message(source, end)
    store_field_release(load_field(call, SEND_LOCK), RUN_LOCK_ENTERED, 0)
    if error != 0:
        return error
    for field in range(num_fields):
        if load_field(received, field) != load_field(sent, field):
            return MISMATCH
    copy(target, received + num_fields * 8, num_bytes)
    return 0
