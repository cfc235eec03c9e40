"""Messages between the ranks of a host, through a ring of shared memory for each ordered pair of ranks.

A message is a frame (:class:`.records.Frame`) and the values behind it; the next one begins at a multiple of a cache
line. A ring has one writer and one reader: `head` and `tail` only grow, the release store of `head` publishes what has
been written, that of `tail` frees what has been read.

A message that a rank sends or receives is a :class:`.records.MessageRequest`. Any thread that holds the lock of the
messages of the group can continue it: `send_on` and `receive_on` move its next part. Each part is published when it is
written, so that the copies of both ranks overlap. Parts that are not short are written past the caches: a core reads
lines that another core has just written slower than memory.

A rank that waits long sleeps in the kernel until another rank wakes it. It notes that in `asleep` and looks
once more; whoever has moved something looks at `asleep` then. Without a fence between these two steps, which each
message would pay, the other rank may not see the note: then the sleep lasts until its end.

- `advance` continues the messages of all directions, for as long as no message ends.
- `any_message` is a message that a program repeats, called by the fast path: through rings, or one of MPI
  (:mod:`.messages`). If the other rank is late, Python continues it (UNFINISHED).
"""

from __future__ import annotations

from ..compiler.compilation import inner, kernel
from ..memory_layout import FOR_ARRIVALS, FOR_ROOM, MessageRing
from .access import whole_lines
from .copying import copy_past
from .fast_path_code import begin_call, data, dim, is_free, num_dims, plain_numel
from .intrinsics import (
    copy,
    fence,
    give_way,
    load,
    load_acquire,
    now,
    pause,
    sleep_until_woken,
    store,
    store_release,
    wake,
)
from .messages import begin_message, end_message, enter_message_of_mpi, pass_by_mpi
from .records import (
    BEGUN,
    ENDED,
    MISMATCH,
    NOT_FAST,
    SOME_ENDED,
    UNEXPECTED,
    UNFINISHED,
    WAITING,
    AnyMessage,
    Arguments,
    CachedCallRecord,
    Direction,
    DLTensor,
    Frame,
    MessageCall,
    MessageRequest,
    MpiMessage,
)

_MOST_PART_BYTES = 64 << 10
_LEAST_BYPASSING = 16 << 10
_NO_LIMIT = 1 << 62

NOTHING, MOVED, OTHER_TAG = range(3)  # what receive_on returns


@inner
def part_bytes(capacity):
    """Return the length of the parts that are published together."""
    return min(capacity // 4, _MOST_PART_BYTES)


@inner
def put(ring: MessageRing, capacity, position, source, num_bytes):
    """Copy into a ring."""
    offset = position & (capacity - 1)
    first = min(num_bytes, capacity - offset)
    if num_bytes >= _LEAST_BYPASSING:
        copy_past(ring.data + offset, source, first)
        copy_past(ring.data + 0, source + first, num_bytes - first)
        fence()
    else:
        copy(ring.data + offset, source, first)
        copy(ring.data + 0, source + first, num_bytes - first)
    return 0


@inner
def get(ring: MessageRing, capacity, position, target, num_bytes):
    """Copy out of a ring."""
    offset = position & (capacity - 1)
    first = min(num_bytes, capacity - offset)
    copy(target, ring.data + offset, first)
    copy(target + first, ring.data + 0, num_bytes - first)
    return 0


@inner
def frame_bytes(frame: Frame):
    """Return the length of a frame with its shape."""
    return (Frame.shape + frame.num_dims) * 8


@inner
def wake_other(other: MessageRing, reason):
    """Wake a rank, given its ring to itself, if it sleeps for this reason."""
    if load_acquire(other.asleep) >= reason:
        store_release(other.asleep, 0)
        wake(other.asleep)
    return 0


@inner
def send_on(ring: MessageRing, other: MessageRing, capacity, request: MessageRequest):
    """Write the next part of a message if there is room for it; return whether there was."""
    head, part = load(ring.head), part_bytes(capacity)
    room, end = capacity - (head - load_acquire(ring.tail)), head
    frame, moved, num_bytes = request.frame, request.moved, request.num_bytes
    if request.state == WAITING:
        header = frame_bytes(frame)
        if room < min(header + num_bytes, part):
            return False
        put(ring, capacity, head, frame + 0, header)
        end, length = head + header, min(num_bytes, part - header)
        request.state = BEGUN
        request.begun = now()
    else:
        length = min(num_bytes - moved, part)
        if room < length:
            return False
    put(ring, capacity, end, request.address + moved, length)
    end, moved = end + length, moved + length
    request.moved = moved
    if moved == num_bytes:
        end = whole_lines(end)
        request.state = ENDED
    store_release(ring.head, end)
    wake_other(other, FOR_ARRIVALS)
    return True


@inner
def is_as_expected(request: MessageRequest):
    """Return whether a received frame is like the expected one."""
    found, frame = request.found, request.frame
    if found.num_bytes != frame.num_bytes:
        return False
    if request.compared > 1 and (found.dtype != frame.dtype or found.num_dims != frame.num_dims):
        return False
    for index in range(request.compared - 3):
        if found.shape[index] != frame.shape[index]:
            return False
    return True


@inner
def receive_on(ring: MessageRing, other: MessageRing, capacity, request: MessageRequest, most):
    """Read the next part of a message, at most so many bytes of values: NOTHING, MOVED, or OTHER_TAG."""
    tail = load(ring.tail)
    ready = load_acquire(ring.head) - tail
    if ready == 0:
        return NOTHING
    if request.state == WAITING:
        found = request.found
        get(ring, capacity, tail, found + 0, Frame.shape * 8)
        if found.tag != request.frame.tag:
            return OTHER_TAG
        header = frame_bytes(found)
        get(ring, capacity, tail, found + 0, header)
        tail, ready = tail + header, ready - header
        request.state = BEGUN
        request.begun = now()
        request.moved = 0
        request.num_bytes = 0 if found.is_elsewhere != 0 else found.num_bytes
        request.differs = 0 if is_as_expected(request) else 1
    elif most == 0:
        return NOTHING
    moved = request.moved
    length = min(min(ready, request.num_bytes - moved), min(part_bytes(capacity), most))
    if request.differs == 0:
        get(ring, capacity, tail, request.address + moved, length)
    tail, moved = tail + length, moved + length
    request.moved = moved
    if moved == request.num_bytes:
        tail = whole_lines(tail)
        request.state = ENDED
    store_release(ring.tail, tail)
    wake_other(other, FOR_ROOM)
    return MOVED


@inner
def rest(own: MessageRing, idle, polls, reason, nanoseconds):
    """Wait a moment, after `idle` looks at which nothing has moved; return how many there are at the next look.

    After the polls, this yields, or sleeps if told how long: it notes that for a last look, and sleeps after that.
    """
    if idle < polls:
        pause()
    elif nanoseconds == 0:
        give_way()
    elif idle == polls:
        store_release(own.asleep, reason)
        fence()
    else:
        sleep_until_woken(own.asleep, reason, nanoseconds)
        store(own.asleep, 0)
        return polls
    return idle + 1


@kernel
def advance(directions: Direction, count, own: MessageRing, capacity, polls, sleeps, nanoseconds):
    """Continue the messages of all directions.

    Args:
        directions: The directions.
        count: How many there are.
        own: The ring of this rank to itself.
        capacity: The bytes of a ring.
        polls: How often to look for something to move before this thread yields,
        sleeps: or if this is not 0 sleeps.
        nanoseconds: How long to wait while nothing moves.

    Returns:
        SOME_ENDED, or UNEXPECTED and the number of a direction, or 0 if nothing has moved for that time.
    """
    idle, since, ended = 0, 0, False
    while True:
        has_moved, reason = False, FOR_ARRIVALS
        for index in range(count):
            direction = directions[index]
            request = direction.request
            if not request:
                continue
            state = request.state
            if state == ENDED:  # before a message with another tag was found
                ended = True
                continue
            if state == BEGUN and request.is_from_any != 0 and request.direction != index:
                continue
            if direction.is_receive == 0:
                has_moved = send_on(direction.ring, direction.other, capacity, request) or has_moved
                reason = FOR_ROOM
            else:
                result = receive_on(direction.ring, direction.other, capacity, request, _NO_LIMIT)
                if result == OTHER_TAG:
                    return UNEXPECTED + index
                if result == MOVED:
                    has_moved = True
                    if state == WAITING:
                        request.direction = index
                        ended = ended or request.is_from_any != 0
            if request.state == ENDED:
                ended = True
        if ended:
            return SOME_ENDED
        if has_moved:
            idle, since = 0, 0
            continue
        if idle >= polls:
            time = now()
            since = time if since == 0 else since
            if time - since >= nanoseconds:
                return 0
        idle = rest(own, idle, polls, reason, nanoseconds if sleeps != 0 else 0)


# --- repeated messages --------------------------------------------------------------------------------------------


@inner
def prepare(request: MessageRequest, address, num_bytes, compared):
    """Set a message back to its begin, with other values."""
    request.state = WAITING
    request.moved = 0
    request.address = address
    request.num_bytes = num_bytes
    request.compared = compared
    return 0


@inner
def enter_message_of_rings(cached_call: CachedCallRecord, tensor: DLTensor, arguments: Arguments):
    """Enter a message if no other message of the group is under way, and describe it."""
    call = MessageCall(cached_call.call)
    numel, lock = plain_numel(cached_call, tensor), call.lock
    num_bytes = numel * call.item_bytes
    if numel < 0 or not is_free(lock):
        return NOT_FAST
    if lock.deferred != 0 and call.into and call.is_background == 0:
        return NOT_FAST
    status = begin_call(cached_call, tensor, num_bytes, arguments)
    if status != 0:
        return status
    store(lock.entered, 1)
    frame, length = call.sending.frame, num_dims(tensor)
    frame.num_bytes = num_bytes
    frame.num_dims = length
    for index in range(length):
        frame.shape[index] = dim(tensor, index)
    prepare(call.sending, data(tensor), num_bytes, 0)
    prepare(call.receiving, data(tensor), num_bytes, 3 + length if call.has_tag == 0 else 1)
    arguments.rest[0] = data(tensor)
    arguments.rest[1] = num_bytes
    return 0


@inner
def pass_through_rings(call: MessageCall, address, num_bytes):
    """Send a message, receive one, or both: 0, MISMATCH, or UNFINISHED, after which Python holds the lock.

    In an exchange, received values replace those that have been sent. A cycle of ranks does not wait for itself: each
    rank puts the first part into a ring that has room for it, before it reads.
    """
    out, into, sending, receiving = call.out, call.into, call.sending, call.receiving
    capacity, polls, patience = call.capacity, call.polls, call.patience
    begin, dtype = now(), call.sending.frame.dtype
    call.begun = begin
    if out:
        begin_message(call.send_channel, begin, dtype, num_bytes)
    else:
        sending.state = ENDED
    if into:
        begin_message(call.receive_channel, begin, dtype, num_bytes)
    else:
        receiving.state = ENDED
    idle, since = 0, 0
    while sending.state != ENDED or receiving.state != ENDED:
        has_moved = False
        if sending.state != ENDED:
            has_moved = send_on(out, call.receiver, capacity, sending)
        if receiving.state != ENDED:
            most = _NO_LIMIT if sending.state == ENDED or receiving.differs != 0 else sending.moved - receiving.moved
            result = receive_on(into, call.sender, capacity, receiving, most)
            if result == OTHER_TAG:  # Python makes way for it
                return UNFINISHED
            has_moved = result == MOVED or has_moved
        if has_moved:
            idle, since = 0, 0
            continue
        if idle >= polls:
            time = now()
            since = time if since == 0 else since
            if time - since >= patience:
                return UNFINISHED
        idle = rest(out, idle, polls, 0, 0)
    end = now()
    if out:
        end_message(call.send_channel, end)
    if into:
        end_message(call.receive_channel, end)
        call.call_log.waited = max(receiving.begun - begin, 0)
    store_release(call.lock.entered, 0)
    return MISMATCH if receiving.differs != 0 and into else 0


# --- of the fast path: through rings or by MPI ------------------------------------------------------------------------


@kernel
def enter_message(cached_call: CachedCallRecord, tensor: DLTensor, _: DLTensor, arguments: Arguments):
    """Enter a message if no other one is under way that it would overtake, and describe it."""
    if AnyMessage(cached_call.call).by_mpi:
        return enter_message_of_mpi(cached_call, tensor, arguments)
    return enter_message_of_rings(cached_call, tensor, arguments)


@kernel
def any_message(call: AnyMessage, seq, signature, address, num_bytes):
    """Send a message, receive one, or both.

    Returns 0, MISMATCH, UNFINISHED, after which Python holds the lock, or the error of MPI.
    """
    if call.by_mpi:
        return pass_by_mpi(MpiMessage(call), address, num_bytes)
    return pass_through_rings(MessageCall(call), address, num_bytes)
