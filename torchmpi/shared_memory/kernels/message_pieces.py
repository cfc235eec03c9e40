"""Long messages in pieces, and allreduces of long vectors by them, without the GIL.

The same as `PieceQueue` of torchmpi.backends.pieces and `PipelinedReduction` of torchmpi.backends.p2p, with the same
messages, so that ranks of both paths meet.
"""

from __future__ import annotations

from ..compiler.compilation import inner, kernel
from .intrinsics import call_isend, call_test, give_way, now, reduce, sleep
from .records import Chunks, LongMessage, Piece, Queue

# A rank polls for a piece this long, and then sleeps between its polls, so that the program has the core. Between polls
# it yields to other ranks on its core, which may be those of other hosts, as in containers. So much is in progress that
# the links are busy for longer than it sleeps: pieces do not take as long on faster links.
_PATIENCE_NANOSECONDS, _SLEEP_MICROSECONDS = 500_000, 30


@inner
def piece_of(queue: Queue, number) -> Piece:
    """Return the record of a piece."""
    return queue.pieces[number & (queue.most_pieces - 1)]


@inner
def begin_transfer(queue: Queue, function, address, num_bytes, peer, request):
    """Begin to send or to receive; return the error of MPI."""
    return call_isend(
        function, address, num_bytes, queue.byte_type, peer,
        queue.tag, queue.comm, request,
    )  # fmt: skip


@inner
def begin_pieces(queue: Queue):
    """Begin the next pieces, as many as the window allows; return the error of MPI."""
    for number in range(queue.begun, queue.added):
        piece, in_progress = piece_of(queue, number), queue.bytes_in_progress
        num_bytes = piece.sent
        if in_progress != 0 and in_progress + num_bytes > queue.window_bytes:
            break
        piece.begin = now()
        queue.begun = number + 1
        queue.bytes_in_progress = in_progress + num_bytes
        if num_bytes != 0:
            address, peer = piece.address, piece.peer
            error = begin_transfer(queue, queue.isend, address, num_bytes, peer, piece.send)
            if error != 0:
                return error
    return 0


@inner
def piece_bytes(messages: LongMessage, count, number, offset, most_bytes):
    """Return the bytes of the piece of a message that begins at this offset; 0 if there is none."""
    if number >= count:
        return 0
    return max(0, min(most_bytes, messages[number].num_bytes - offset))


@kernel
def add_pieces(queue: Queue, messages: LongMessage, num_received, num_sent, most_bytes):
    """Add the pieces of messages: of each the first piece, then of each the second. All receives begin.

    `messages`: address of those that are received, then of those that are sent; `most_bytes`: of a piece.
    Returns the error of MPI.
    """
    sent_messages, longest = messages[num_received], 0
    for number in range(num_received + num_sent):
        longest = max(longest, messages[number].num_bytes)
    if queue.begun == queue.done:
        queue.least_time = 0
    for offset in range(0, longest, most_bytes):
        for number in range(max(num_received, num_sent)):
            received = piece_bytes(messages, num_received, number, offset, most_bytes)
            sent = piece_bytes(sent_messages, num_sent, number, offset, most_bytes)
            if received == 0 and sent == 0:
                continue
            added = queue.added
            piece = piece_of(queue, added)
            queue.added = added + 1
            piece.received = received
            piece.sent = sent
            if sent != 0:
                message = sent_messages[number]
                piece.peer = message.peer
                piece.address = message.address + offset
            if received != 0:
                message = messages[number]
                address, peer = message.address + offset, message.peer
                error = begin_transfer(queue, queue.irecv, address, received, peer, piece.receive)
                if error != 0:
                    return error
    return begin_pieces(queue)


@inner
def note_time(queue: Queue, time):
    """Change the window by the time that a piece took."""
    least, window = queue.least_time, queue.window_bytes
    if least == 0 or time < least:
        least = time
        queue.least_time = least
    if 2 * time < 3 * least:
        window = min(window + queue.window_step, queue.most_window)
    elif time > 3 * least:
        window = max(window - queue.window_step, queue.least_window)
    queue.window_bytes = window
    return 0


@inner
def await_request(queue: Queue, request, since):
    """Wait for a message of a piece that began at this time; return the error of MPI."""
    test, status = queue.test, queue.status
    error = call_test(test, request, status)
    while error < 0:
        if now() - since > _PATIENCE_NANOSECONDS:
            sleep(_SLEEP_MICROSECONDS)
        else:
            give_way()
        error = call_test(test, request, status)
    return error


@kernel
def finish_pieces(queue: Queue, last):
    """Wait until the pieces up to a number have been received and sent; return the error of MPI."""
    for number in range(queue.done, last):
        piece, error = piece_of(queue, number), 0
        since, sent = piece.begin, piece.sent
        if piece.received != 0:
            error = await_request(queue, piece.receive, since)
        if error == 0 and sent != 0:
            error = await_request(queue, piece.send, since)
        if error != 0:
            return error
        note_time(queue, now() - since)
        queue.done = number + 1
        queue.bytes_in_progress -= sent
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
def set_message(message: LongMessage, peer, address, num_bytes):
    """Write the record of a message."""
    message.peer = peer
    message.address = address
    message.num_bytes = num_bytes
    return 0


@inner
def received_part(chunks: Chunks, number, peer, num_bytes):
    """Return the address for the part of a chunk that another rank sends."""
    memory, rank = chunks.memory[number & 1], chunks.rank
    return memory + (peer - 1 if peer > rank else peer) * num_bytes


@inner
def begin_round(chunks: Chunks):
    """Add the pieces of a message from each other rank, and to each; return the error of MPI."""
    queue, count = chunks.queue, chunks.size - 1
    return add_pieces(queue, queue.messages, count, count, chunks.piece_bytes)


@inner
def begin_exchange(chunks: Chunks, address, numel, number):
    """Send each rank its part of a chunk, and receive the own part from all; return the error of MPI."""
    rank, size = chunks.rank, chunks.size
    item_bytes = chunks.item_bytes
    messages = chunks.queue.messages
    own_bytes = (part_end(numel, size, rank) - part_begin(numel, size, rank)) * item_bytes
    for step in range(1, size):
        origin, target = (rank - step) % size, (rank + step) % size
        set_message(messages[step - 1], origin, received_part(chunks, number, origin, own_bytes), own_bytes)
        begin, end = part_begin(numel, size, target) * item_bytes, part_end(numel, size, target) * item_bytes
        set_message(messages[size + step - 2], target, address + begin, end - begin)
    return begin_round(chunks)


@inner
def combine_part(chunks: Chunks, address, numel, number):
    """Combine all versions of the own part of a chunk, in rank order, into the chunk."""
    rank, size = chunks.rank, chunks.size
    item_bytes = chunks.item_bytes
    begin = part_begin(numel, size, rank)
    own_numel, own = part_end(numel, size, rank) - begin, address + begin * item_bytes
    operands, times, since = chunks.operands, chunks.times, now()
    for peer in range(size):
        received = received_part(chunks, number, peer, own_numel * item_bytes)
        operands[peer] = own if peer == rank else received
    chunks.result[0] = own
    reduce(chunks.reducer, chunks.result, 1, operands, size, own_numel)
    if times:
        times[2 * number] = since
        times[2 * number + 1] = now()
    return 0


@inner
def begin_spread(chunks: Chunks, address, numel):
    """Send the own part of a result to all ranks, and receive theirs; return the error of MPI."""
    rank, size = chunks.rank, chunks.size
    item_bytes = chunks.item_bytes
    if size == 2:
        return 0
    messages = chunks.queue.messages
    own, own_end = part_begin(numel, size, rank) * item_bytes, part_end(numel, size, rank) * item_bytes
    for step in range(1, size):
        origin, target = (rank - step) % size, (rank + step) % size
        begin, end = part_begin(numel, size, origin) * item_bytes, part_end(numel, size, origin) * item_bytes
        set_message(messages[step - 1], origin, address + begin, end - begin)
        set_message(messages[size + step - 2], target, address + own, own_end - own)
    return begin_round(chunks)


@kernel
def allreduce_in_pieces(chunks: Chunks, address, numel):
    """Reduce a vector in place on all ranks; return the error of MPI.

    The exchange of a chunk begins before the chunk before it is combined, and the results of that one are sent while
    the chunk is combined.
    """
    queue, width = chunks.queue, chunks.numel
    width_bytes, spread = width * chunks.item_bytes, 0
    error = begin_exchange(chunks, address, min(width, numel), 0)
    exchange = queue.added
    for number in range((numel + width - 1) // width):
        chunk, remaining, expected = address + number * width_bytes, numel - number * width, exchange
        if error == 0 and remaining > width:
            error = begin_exchange(chunks, chunk + width_bytes, min(width, remaining - width), number + 1)
            exchange = queue.added
        if error == 0:
            error = finish_pieces(queue, expected)
        if error == 0:
            combine_part(chunks, chunk, min(width, remaining), number)
            error = begin_spread(chunks, chunk, min(width, remaining))
        expected, spread = spread, queue.added
        if error == 0:
            error = finish_pieces(queue, expected)
        if error != 0:
            return error
    return finish_pieces(queue, spread)
