"""Long messages in pieces, and allreduces of long vectors by them, without the GIL.

The same as `PieceQueue` of torchmpi.backends.pieces and `PipelinedReduction` of torchmpi.backends.p2p, with the same
messages, so that ranks of both paths meet.
"""

from __future__ import annotations

from .compilation import inner, kernel
from .intrinsics import call_isend, call_test, field_address, give_way, load_field, now, reduce, sleep, store_field
from .records import (
    BYTE_TYPE,
    BYTES_IN_PROGRESS,
    CHUNK_MEMORY,
    CHUNK_NUMEL,
    CHUNK_OPERANDS,
    CHUNK_PIECE_BYTES,
    CHUNK_QUEUE,
    CHUNK_RANK,
    CHUNK_RESULT,
    CHUNK_SIZE,
    CHUNK_TIMES,
    IRECV,
    ISEND,
    ITEM_BYTES,
    LEAST_TIME,
    LEAST_WINDOW,
    LONG_ADDRESS,
    LONG_BYTES,
    LONG_FIELDS,
    LONG_MESSAGES,
    LONG_PEER,
    MESSAGE_TAG,
    MOST_PIECES,
    MOST_WINDOW,
    MPI_COMM,
    MPI_STATUS,
    PIECE_ADDRESS,
    PIECE_BEGIN,
    PIECE_FIELDS,
    PIECE_PEER,
    PIECE_RECEIVE,
    PIECE_RECEIVED,
    PIECE_SEND,
    PIECE_SENT,
    PIECES,
    PIECES_ADDED,
    PIECES_BEGUN,
    PIECES_DONE,
    REDUCER,
    TEST,
    WINDOW_BYTES,
    WINDOW_STEP,
)

# A rank polls for a piece this long, and then sleeps between its polls, so that the program has the core. Between polls
# it yields to other ranks on its core, which may be those of other hosts, as in containers. So much is in progress that
# the links are busy for longer than it sleeps: pieces do not take as long on faster links.
_PATIENCE_NANOSECONDS, _SLEEP_MICROSECONDS = 500_000, 30


@inner
def piece_of(queue, number):
    """Return the address of a piece."""
    index = number & (load_field(queue, MOST_PIECES) - 1)
    return load_field(queue, PIECES) + index * (PIECE_FIELDS * 8)


@inner
def begin_transfer(queue, function, address, num_bytes, peer, request):
    """Begin to send or to receive; return the error of MPI."""
    return call_isend(
        load_field(queue, function), address, num_bytes, load_field(queue, BYTE_TYPE), peer,
        load_field(queue, MESSAGE_TAG), load_field(queue, MPI_COMM), request,
    )  # fmt: skip


@inner
def begin_pieces(queue):
    """Begin the next pieces, as many as the window allows; return the error of MPI."""
    for number in range(load_field(queue, PIECES_BEGUN), load_field(queue, PIECES_ADDED)):
        piece, in_progress = piece_of(queue, number), load_field(queue, BYTES_IN_PROGRESS)
        num_bytes = load_field(piece, PIECE_SENT)
        if in_progress != 0 and in_progress + num_bytes > load_field(queue, WINDOW_BYTES):
            break
        store_field(piece, PIECE_BEGIN, now())
        store_field(queue, PIECES_BEGUN, number + 1)
        store_field(queue, BYTES_IN_PROGRESS, in_progress + num_bytes)
        if num_bytes != 0:
            address, peer = load_field(piece, PIECE_ADDRESS), load_field(piece, PIECE_PEER)
            error = begin_transfer(queue, ISEND, address, num_bytes, peer, field_address(piece, PIECE_SEND))
            if error != 0:
                return error
    return 0


@inner
def message_at(messages, number):
    """Return the address of the record of a message."""
    return messages + number * (LONG_FIELDS * 8)


@inner
def piece_bytes(messages, count, number, offset, most_bytes):
    """Return the bytes of the piece of a message that begins at this offset; 0 if there is none."""
    if number >= count:
        return 0
    return max(0, min(most_bytes, load_field(message_at(messages, number), LONG_BYTES) - offset))


@kernel
def add_pieces(queue, messages, num_received, num_sent, most_bytes):
    """Add the pieces of messages: of each the first piece, then of each the second. All receives begin.

    `messages`: address of those that are received, then of those that are sent; `most_bytes`: of a piece.
    Returns the error of MPI.
    """
    sent_messages, longest = message_at(messages, num_received), 0
    for number in range(num_received + num_sent):
        longest = max(longest, load_field(message_at(messages, number), LONG_BYTES))
    if load_field(queue, PIECES_BEGUN) == load_field(queue, PIECES_DONE):
        store_field(queue, LEAST_TIME, 0)
    for offset in range(0, longest, most_bytes):
        for number in range(max(num_received, num_sent)):
            received = piece_bytes(messages, num_received, number, offset, most_bytes)
            sent = piece_bytes(sent_messages, num_sent, number, offset, most_bytes)
            if received == 0 and sent == 0:
                continue
            added = load_field(queue, PIECES_ADDED)
            piece = piece_of(queue, added)
            store_field(queue, PIECES_ADDED, added + 1)
            store_field(piece, PIECE_RECEIVED, received)
            store_field(piece, PIECE_SENT, sent)
            if sent != 0:
                message = message_at(sent_messages, number)
                store_field(piece, PIECE_PEER, load_field(message, LONG_PEER))
                store_field(piece, PIECE_ADDRESS, load_field(message, LONG_ADDRESS) + offset)
            if received != 0:
                message = message_at(messages, number)
                address, peer = load_field(message, LONG_ADDRESS) + offset, load_field(message, LONG_PEER)
                error = begin_transfer(queue, IRECV, address, received, peer, field_address(piece, PIECE_RECEIVE))
                if error != 0:
                    return error
    return begin_pieces(queue)


@inner
def note_time(queue, time):
    """Change the window by the time that a piece took."""
    least, window = load_field(queue, LEAST_TIME), load_field(queue, WINDOW_BYTES)
    if least == 0 or time < least:
        least = time
        store_field(queue, LEAST_TIME, least)
    if 2 * time < 3 * least:
        window = min(window + load_field(queue, WINDOW_STEP), load_field(queue, MOST_WINDOW))
    elif time > 3 * least:
        window = max(window - load_field(queue, WINDOW_STEP), load_field(queue, LEAST_WINDOW))
    store_field(queue, WINDOW_BYTES, window)
    return 0


@inner
def await_request(queue, request, since):
    """Wait for a message of a piece that began at this time; return the error of MPI."""
    test, status = load_field(queue, TEST), load_field(queue, MPI_STATUS)
    error = call_test(test, request, status)
    while error < 0:
        if now() - since > _PATIENCE_NANOSECONDS:
            sleep(_SLEEP_MICROSECONDS)
        else:
            give_way()
        error = call_test(test, request, status)
    return error


@kernel
def finish_pieces(queue, last):
    """Wait until the pieces up to a number have been received and sent; return the error of MPI."""
    for number in range(load_field(queue, PIECES_DONE), last):
        piece, error = piece_of(queue, number), 0
        since, sent = load_field(piece, PIECE_BEGIN), load_field(piece, PIECE_SENT)
        if load_field(piece, PIECE_RECEIVED) != 0:
            error = await_request(queue, field_address(piece, PIECE_RECEIVE), since)
        if error == 0 and sent != 0:
            error = await_request(queue, field_address(piece, PIECE_SEND), since)
        if error != 0:
            return error
        note_time(queue, now() - since)
        store_field(queue, PIECES_DONE, number + 1)
        store_field(queue, BYTES_IN_PROGRESS, load_field(queue, BYTES_IN_PROGRESS) - sent)
        error = begin_pieces(queue)
        if error != 0:
            return error
    return 0


# --- allreduce, chunk by chunk ----------------------------------------------------------------------------------


@inner
def part_begin(numel, size, index):
    """Return the offset of the part of a chunk that a rank combines: even parts, but two ranks combine all of it."""
    return 0 if size == 2 else index * (numel // size) + min(index, numel % size)


@inner
def part_end(numel, size, index):
    """Return the end of this part."""
    return numel if size == 2 else part_begin(numel, size, index + 1)


@inner
def set_message(message, peer, address, num_bytes):
    """Write the record of a message."""
    store_field(message, LONG_PEER, peer)
    store_field(message, LONG_ADDRESS, address)
    store_field(message, LONG_BYTES, num_bytes)
    return 0


@inner
def received_part(chunks, number, peer, num_bytes):
    """Return the address for the part of a chunk that another rank sends."""
    memory, rank = load_field(chunks, CHUNK_MEMORY + (number & 1)), load_field(chunks, CHUNK_RANK)
    return memory + (peer - 1 if peer > rank else peer) * num_bytes


@inner
def begin_round(chunks):
    """Add the pieces of a message from each other rank, and to each; return the error of MPI."""
    queue, count = load_field(chunks, CHUNK_QUEUE), load_field(chunks, CHUNK_SIZE) - 1
    return add_pieces(queue, load_field(queue, LONG_MESSAGES), count, count, load_field(chunks, CHUNK_PIECE_BYTES))


@inner
def begin_exchange(chunks, address, numel, number):
    """Send each rank its part of a chunk, and receive the own part from all; return the error of MPI."""
    rank, size = load_field(chunks, CHUNK_RANK), load_field(chunks, CHUNK_SIZE)
    item_bytes = load_field(chunks, ITEM_BYTES)
    messages = load_field(load_field(chunks, CHUNK_QUEUE), LONG_MESSAGES)
    own_bytes = (part_end(numel, size, rank) - part_begin(numel, size, rank)) * item_bytes
    for step in range(1, size):
        origin, target = (rank - step) % size, (rank + step) % size
        set_message(message_at(messages, step - 1), origin, received_part(chunks, number, origin, own_bytes), own_bytes)
        begin, end = part_begin(numel, size, target) * item_bytes, part_end(numel, size, target) * item_bytes
        set_message(message_at(messages, size + step - 2), target, address + begin, end - begin)
    return begin_round(chunks)


@inner
def combine_part(chunks, address, numel, number):
    """Combine all versions of the own part of a chunk, in rank order, into the chunk."""
    rank, size = load_field(chunks, CHUNK_RANK), load_field(chunks, CHUNK_SIZE)
    item_bytes = load_field(chunks, ITEM_BYTES)
    begin = part_begin(numel, size, rank)
    own_numel, own = part_end(numel, size, rank) - begin, address + begin * item_bytes
    operands, times, since = load_field(chunks, CHUNK_OPERANDS), load_field(chunks, CHUNK_TIMES), now()
    for peer in range(size):
        received = received_part(chunks, number, peer, own_numel * item_bytes)
        store_field(operands, peer, own if peer == rank else received)
    store_field(chunks, CHUNK_RESULT, own)
    reduce(load_field(chunks, REDUCER), field_address(chunks, CHUNK_RESULT), 1, operands, size, own_numel)
    if times != 0:
        store_field(times, 2 * number, since)
        store_field(times, 2 * number + 1, now())
    return 0


@inner
def begin_spread(chunks, address, numel):
    """Send the own part of a result to all ranks, and receive theirs; return the error of MPI."""
    rank, size = load_field(chunks, CHUNK_RANK), load_field(chunks, CHUNK_SIZE)
    item_bytes = load_field(chunks, ITEM_BYTES)
    if size == 2:
        return 0
    messages = load_field(load_field(chunks, CHUNK_QUEUE), LONG_MESSAGES)
    own, own_end = part_begin(numel, size, rank) * item_bytes, part_end(numel, size, rank) * item_bytes
    for step in range(1, size):
        origin, target = (rank - step) % size, (rank + step) % size
        begin, end = part_begin(numel, size, origin) * item_bytes, part_end(numel, size, origin) * item_bytes
        set_message(message_at(messages, step - 1), origin, address + begin, end - begin)
        set_message(message_at(messages, size + step - 2), target, address + own, own_end - own)
    return begin_round(chunks)


@kernel
def allreduce_in_pieces(chunks, address, numel):
    """Reduce a vector in place on all ranks; return the error of MPI.

    The exchange of a chunk begins before the chunk before it is combined, and the results of that one are sent while
    the chunk is combined.
    """
    queue, width = load_field(chunks, CHUNK_QUEUE), load_field(chunks, CHUNK_NUMEL)
    width_bytes, spread = width * load_field(chunks, ITEM_BYTES), 0
    error = begin_exchange(chunks, address, min(width, numel), 0)
    exchange = load_field(queue, PIECES_ADDED)
    for number in range((numel + width - 1) // width):
        chunk, remaining, expected = address + number * width_bytes, numel - number * width, exchange
        if error == 0 and remaining > width:
            error = begin_exchange(chunks, chunk + width_bytes, min(width, remaining - width), number + 1)
            exchange = load_field(queue, PIECES_ADDED)
        if error == 0:
            error = finish_pieces(queue, expected)
        if error == 0:
            combine_part(chunks, chunk, min(width, remaining), number)
            error = begin_spread(chunks, chunk, min(width, remaining))
        expected, spread = spread, load_field(queue, PIECES_ADDED)
        if error == 0:
            error = finish_pieces(queue, expected)
        if error != 0:
            return error
    return finish_pieces(queue, spread)
