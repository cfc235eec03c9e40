"""Short calls over hosts: the steps within a host, and the messages between hosts, without Python in between.

`over_hosts` does the same as `ComparedCall` of torchmpi.backends, with the same messages, entries of call logs and
bits, so that ranks of both paths meet. It ends at the first step that fails; Python runs the rest of the call, or
raises the error. The steps and messages of a collective are data: `before`, `after` and `rounds` of the record.
"""

from __future__ import annotations

from ..compiler.compilation import inner, kernel
from ..memory_layout import CALL_NUMBER_BITS, FIELD_BYTES, RECORD_IS_NUMBER, WITH_COMPARISON
from ..typed_records import Words
from .access import group_of, part_at, set_receive, set_send, whole_lines
from .intrinsics import call_isend, call_test, copy, give_way, load_acquire, now, reduce, sleep, store_release
from .logged_calls import (
    FIRST_HASH,
    close_entry,
    count_call,
    hash_end,
    hash_step,
    open_entry,
    record_of,
    set_dim,
)
from .movement import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    exchange_parts,
    is_expected,
    own_length,
    own_offset,
    reduce_scatter,
    rows_before,
    scatter,
)
from .records import (
    DESCRIPTION_BYTES,
    LONG,
    MISMATCH,
    STEP_AFTER,
    STEP_BEFORE,
    STEP_BETWEEN,
    STEP_OF_HOST,
    STEP_PARTS,
    STEPS,
    TIMEOUT,
    UNEVEN,
    ComparedNumber,
    Hosts,
    KernelCall,
    RoundRecord,
    StepRecord,
    TensorMessage,
)
from .reduce_kernels import allreduce

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_BARRIER, _REDUCE, _GATHER, _BROADCAST, _REDUCE_SCATTER = range(len(STEPS))
# After so many polls a rank looks at the clock. It yields to other ranks when it has waited for `eager` of the record,
# and sleeps between its polls when the message is late.
_POLLS_PER_LOOK, _LATE_NANOSECONDS, _SLEEP_MICROSECONDS = 64, 20_000_000, 30


@inner
def call_number(seq, code, shape_hash):
    """Return `Group.call_number` of a call; `shape_hash` is the hash of its shape."""
    total = hash_step(hash_step(hash_step(FIRST_HASH, seq), code), shape_hash)
    return hash_end(total, 3) & ((1 << CALL_NUMBER_BITS) - 1)


# --- messages between hosts -------------------------------------------------------------------------------------


@inner
def set_operands(hosts: Hosts, position, address, count, num_bytes):
    """Store the addresses of `count` blocks of hosts in cyclic order, from a position after the own one."""
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
def await_message(hosts: Hosts, request):
    """Wait for a message: 0, the error of MPI, or TIMEOUT if another thread ends the call."""
    test, status, wait, num_polls, since, waited = hosts.test, hosts.status, hosts.wait, 0, 0, 0
    error = call_test(test, request, status)
    while error < 0:
        num_polls += 1
        if num_polls % _POLLS_PER_LOOK == 0:
            if load_acquire(wait.expired) == load_acquire(wait.polling):
                return TIMEOUT
            since = now() if since == 0 else since
            waited = now() - since
        if waited > _LATE_NANOSECONDS:
            sleep(_SLEEP_MICROSECONDS)
        elif since != 0 and waited >= hosts.eager:
            give_way()
        error = call_test(test, request, status)
    return error


@inner
def swap(hosts: Hosts, step: RoundRecord, num_bytes):
    """Exchange the numbers that are known, with bytes behind them if those of this rank are equal.

    Returns 0, MISMATCH if not all numbers are equal, TIMEOUT, or the error of MPI.
    """
    known, heard = ComparedNumber(hosts.sent), ComparedNumber(hosts.received)
    byte, tag, lowest = hosts.byte_type, hosts.tag, known.lowest
    is_equal = lowest == known.highest
    comm, length = hosts.comm, ComparedNumber.BYTES + (num_bytes if is_equal else 0)
    error = call_isend(hosts.irecv, heard, hosts.received_bytes, byte, step.origin, tag, comm, hosts.receive)
    if error == 0:
        error = call_isend(hosts.isend, known, length, byte, step.target, tag, comm, hosts.send)
    if error == 0:
        error = await_message(hosts, hosts.receive)
    if error == 0:
        error = await_message(hosts, hosts.send)
    if error != 0:
        return error
    if is_equal and heard.lowest == lowest and heard.highest == lowest:
        return 0
    known.lowest = _LOWEST
    known.highest = _HIGHEST
    return MISMATCH


@inner
def gather(hosts: Hosts, number, num_bytes):
    """Compare a number and move blocks (`NumberExchange.agree`): 0, MISMATCH, or the error of MPI."""
    memory, heard = hosts.sent + ComparedNumber.BYTES, hosts.received + ComparedNumber.BYTES
    status, num_rounds = begin_comparison(hosts, number), hosts.num_rounds
    set_operands(hosts, 0, memory, 1, num_bytes)
    for index in range(num_rounds):
        step = hosts.rounds[index]
        count, position = step.num_received, step.position
        status = swap(hosts, step, step.num_sent * num_bytes)
        if status != 0 and status != MISMATCH:
            return status
        if status == 0 and index == num_rounds - 1:
            set_operands(hosts, position, heard, count, num_bytes)
        elif status == 0:
            copy(memory + position * num_bytes, heard, count * num_bytes)
            set_operands(hosts, position, memory + position * num_bytes, count, num_bytes)
    return status


@inner
def relay(hosts: Hosts, number, block_bytes):
    """Compare a number, and bring the blocks to the hosts for which they are (`NumberExchange.relay`): status likewise.

    Position j has the block for the host j before this one; in the end, that of the host j after it.
    """
    memory, heard = hosts.sent + ComparedNumber.BYTES, hosts.received + ComparedNumber.BYTES
    blocks, size = hosts.relayed_blocks, hosts.num_hosts
    status = begin_comparison(hosts, number)
    for index in range(hosts.num_rounds):
        distance, length = 1 << index, 0
        for position in range(distance, size):
            if position & distance:
                copy(memory + length, blocks + position * block_bytes, block_bytes)
                length += block_bytes
        status = swap(hosts, hosts.rounds[index], length)
        if status != 0 and status != MISMATCH:
            return status
        length = 0
        for position in range(distance, size if status == 0 else 0):
            if position & distance:
                copy(blocks + position * block_bytes, heard + length, block_bytes)
                length += block_bytes
    set_operands(hosts, 0, blocks, size, block_bytes)
    return status


# --- vectors that are combined ------------------------------------------------------------------------------------


@inner
def convert(hosts: Hosts, function, target, source, num_bytes, item_bytes):
    """Convert elements of this size (`reduction.converter`)."""
    hosts.result[0], hosts.source[0] = target, source
    reduce(function, hosts.result, hosts.divisor, hosts.source, 1, num_bytes // item_bytes)
    return 0


@inner
def combine(hosts: Hosts, reducer, address, num_bytes):
    """Combine the operands."""
    hosts.result[0] = address
    reduce(reducer, hosts.result, 1, hosts.operands, hosts.num_hosts, num_bytes // hosts.sent_item_bytes)
    return 0


@inner
def combine_to_result(call: KernelCall, address, num_bytes):
    """Combine the operands, and write the result."""
    hosts = call.hosts
    if not hosts.finish:
        return combine(hosts, call.reducer, address, num_bytes)
    combine(hosts, call.reducer, hosts.own, num_bytes)
    return convert(hosts, hosts.finish, address, hosts.own, num_bytes, hosts.sent_item_bytes)


@inner
def block_length(block, block_bytes, num_bytes):
    """Return the length of a block of a vector, without padding."""
    return max(0, min(block_bytes, num_bytes - block * block_bytes))


@inner
def exchange_vectors(call: KernelCall, number, num_bytes, passed, begin):
    """Combine the vectors of all hosts (`NumberExchange.allreduce`); `passed` is 0 where the result is not needed."""
    hosts = call.hosts
    own, blocks, size = hosts.own, hosts.relayed_blocks, hosts.num_hosts
    if num_bytes <= hosts.most_gathered:
        status = gather(hosts, number, num_bytes)
        if status == 0:
            hosts.waited = now() - begin
            if passed != 0:
                combine_to_result(call, passed, num_bytes)
        return status
    width = (num_bytes // hosts.sent_item_bytes + size - 1) // size
    block_bytes = width * hosts.sent_item_bytes
    for position in range(size):
        block = (hosts.own_host - position + size) % size
        length = block_length(block, block_bytes, num_bytes)
        copy(blocks + position * block_bytes, own + block * block_bytes, length)
    status = relay(hosts, number, block_bytes)
    if status != 0:
        return status
    hosts.waited = now() - begin
    combine(hosts, call.reducer, own, block_bytes)
    status = gather(hosts, number, block_bytes)
    total = blocks if hosts.finish else passed
    for block in range(size if status == 0 and passed != 0 else 0):
        length = block_length(block, block_bytes, num_bytes)
        copy(total + block * block_bytes, hosts.operands[block], length)
    if hosts.finish and status == 0 and passed != 0:
        convert(hosts, hosts.finish, passed, total, num_bytes, hosts.sent_item_bytes)
    return status


# --- rows ---------------------------------------------------------------------------------------------------------


@inner
def write_rows(hosts: Hosts, passed, num_bytes):
    """Copy the rows of all ranks to their places."""
    most_ranks = hosts.most_ranks
    for host in range(hosts.num_hosts):
        for place in range(most_ranks):
            rank = hosts.ranks[host * most_ranks + place]
            if rank >= 0:
                copy(passed + rank * num_bytes, hosts.operands[host] + place * num_bytes, num_bytes)
    return 0


@inner
def part_length(call: KernelCall, num_rows, row_bytes, rank):
    """Return the length of the part of a tensor that is for a rank."""
    size = group_of(call).size
    return (rows_before(num_rows, size, rank + 1) - rows_before(num_rows, size, rank)) * row_bytes


@inner
def fill_blocks(call: KernelCall, num_rows, row_bytes, unit_bytes):
    """Copy what this host has collected to the blocks for all hosts: by rank that sends, and rank that receives."""
    hosts, size = call.hosts, group_of(call).size
    own, most_ranks, num_hosts = hosts.own, hosts.most_ranks, hosts.num_hosts
    block_bytes, num_sources = hosts.block_units * unit_bytes, hosts.num_local if hosts.gathers else 1
    for host in range(num_hosts):
        position = (hosts.own_host - host + num_hosts) % num_hosts
        block = hosts.relayed_blocks + position * block_bytes
        for place in range(most_ranks):
            rank = hosts.ranks[host * most_ranks + place]
            if rank >= 0:
                first = rows_before(num_rows, size, rank) * row_bytes
                length = part_length(call, num_rows, row_bytes, rank)
                for index in range(num_sources):
                    target = block + (index * most_ranks + place) * unit_bytes
                    copy(target, own + index * num_rows * row_bytes + first, length)
    return 0


@inner
def sort_parts(call: KernelCall, num_rows, row_bytes, unit_bytes):
    """Copy what this host has received to the memory that is passed on: by rank that receives, and rank that sends."""
    hosts, size = call.hosts, group_of(call).size
    own, most_ranks = hosts.own, hosts.most_ranks
    for place in range(hosts.num_local):
        length = part_length(call, num_rows, row_bytes, hosts.ranks[hosts.own_host * most_ranks + place])
        for host in range(hosts.num_hosts):
            for index in range(most_ranks):
                origin = hosts.ranks[host * most_ranks + index]
                if origin >= 0:
                    source = hosts.operands[host] + (index * most_ranks + place) * unit_bytes
                    copy(own + place * size * unit_bytes + origin * length, source, length)
    return 0


@inner
def exchange_even_parts(call: KernelCall, number, num_rows, row_bytes, unit_bytes, begin):
    """Send each host the parts for its ranks, and combine or sort those for this host."""
    hosts = call.hosts
    fill_blocks(call, num_rows, row_bytes, unit_bytes)
    status = relay(hosts, number, hosts.block_units * unit_bytes)
    if status != 0:
        return status
    hosts.waited = now() - begin
    if hosts.reduces:
        return combine_to_result(call, hosts.own, hosts.passed_units * unit_bytes)
    return sort_parts(call, num_rows, row_bytes, unit_bytes)


@inner
def exchange(call: KernelCall, number, num_bytes, row_bytes, unit_bytes, passed, begin):
    """Move the values between the hosts, to the memory that is passed on: 0, MISMATCH, or the error of MPI."""
    hosts = call.hosts
    if hosts.divides:
        return exchange_even_parts(call, number, num_bytes // row_bytes, row_bytes, unit_bytes, begin)
    if hosts.reduces:
        return exchange_vectors(call, number, num_bytes, passed, begin)
    status = gather(hosts, number, hosts.block_units * unit_bytes)
    hosts.waited = now() - begin
    if status != 0 or passed == 0:
        return status
    if hosts.gathers:
        return write_rows(hosts, passed, num_bytes)
    if hosts.is_root == 0:
        copy(passed, hosts.operands[hosts.own_host], num_bytes)
    return 0


# --- steps within a host --------------------------------------------------------------------------------------------


@inner
def run_step(hosts: Hosts, step: StepRecord, number, failing, source, num_bytes, row_bytes, target):
    """Run a step within the host, and enter it into the call log of its ranks: return 0, or its status.

    `row_bytes` belongs to rows that are divided.
    """
    local = hosts.intra_log
    if not local:
        return 0
    kind, call, seq, status = step.kind, step.call, local.sequence + 1, 0
    record = open_entry(local, seq)
    set_dim(record, 0, number)
    close_entry(local, record, seq, step.code, RECORD_IS_NUMBER + 1, num_bytes)
    signature = step.signed_code ^ hash_end(hash_step(FIRST_HASH, number), 1)
    if kind == _REDUCE:
        status = allreduce(call, seq, signature, source, num_bytes // call.item_bytes)
    elif kind == _GATHER:
        status = allgather(call, seq, signature, source, num_bytes, target)
    elif kind == _BROADCAST:
        status = broadcast(call, seq, signature, source, num_bytes)
    elif kind == _REDUCE_SCATTER:
        status = reduce_scatter(call, seq, signature, source, num_bytes // row_bytes, row_bytes, target)
    else:
        status = barrier(call, seq, signature, 0, 0)
    if status != 0:
        hosts.failed_step = failing
        return status
    return count_call(local)


@inner
def as_sent(call: KernelCall, num_bytes):
    """Return the length of elements as they are sent, given that in the tensor."""
    return num_bytes // call.item_bytes * call.hosts.sent_item_bytes


@inner
def unit_of(call: KernelCall, num_bytes, row_bytes):
    """Return the length of the tensor of a rank, or of the longest part of it for one rank (`Blocks.unit_bytes`)."""
    unit_bytes = part_length(call, num_bytes // row_bytes, row_bytes, 0) if call.hosts.divides else num_bytes
    return as_sent(call, unit_bytes)


@inner
def is_carried(call: KernelCall, num_bytes, row_bytes):
    """Return whether a call over hosts is so short that its values are sent with the comparison; True within a host."""
    hosts = call.hosts
    if not hosts:
        return True
    if num_bytes == 0:
        return False
    is_vector = hosts.divides == 0 and hosts.gathers == 0
    num_units = 1 if is_vector else hosts.block_units * hosts.num_hosts
    return unit_of(call, num_bytes, row_bytes) * num_units <= hosts.value_bytes


@inner
def is_long(call: KernelCall, num_bytes, row_bytes):
    """Return whether the values of a call over hosts follow the comparison in messages (`LongCall.takes`)."""
    if not call.hosts or num_bytes == 0:
        return False
    if not call.hosts.long:
        return False
    num_units = group_of(call).size if call.hosts.divides else 1
    return unit_of(call, num_bytes, row_bytes) * num_units <= call.hosts.most_long


@inner
def move_parts(parts: Words, size, memory, num_bytes, unpacks):
    """Copy the tensors of a list, which are alike, into memory for rows, or back; return the address of that memory."""
    part_bytes = num_bytes // size
    for index in range(size):
        row = memory + index * part_bytes
        copy(parts[index] if unpacks else row, row if unpacks else parts[index], part_bytes)
    return memory


@inner
def over_hosts(call: KernelCall, seq, signature, source, num_bytes, row_bytes, target):
    """Run a short call; `signature` is the hash of its shape."""
    hosts = call.hosts
    number = call_number(seq, record_of(hosts.call_log, seq).code, signature) ^ as_sent(call, num_bytes) ^ hosts.mark
    return call_over_hosts(call, seq, number, source, num_bytes, row_bytes, target)


@kernel
def call_over_hosts(call: KernelCall, seq, number, source, num_bytes, row_bytes, target):
    """Run a short call with this number; `row_bytes` belongs to rows that are divided.

    Returns 0, MISMATCH, TIMEOUT, the error of MPI, or the status of a kernel, with the step in `failed_step`.
    """
    hosts, begin, unit_bytes, parts = call.hosts, now(), unit_of(call, num_bytes, row_bytes), call.received_parts
    log, own, place, size = hosts.call_log, hosts.own, hosts.place, group_of(call).size
    if call.given_parts:
        source = move_parts(call.given_parts, size, hosts.given_memory, num_bytes, False)
    if parts:
        target = hosts.received_memory
    part = target
    if hosts.takes_part:
        source = target = source if hosts.is_root else hosts.given_memory
    log.waited = -begin  # for Python, which ends a call that fails here
    log.algorithm = WITH_COMPARISON
    sent_bytes, length, result_unit = as_sent(call, num_bytes), 0, unit_bytes // hosts.sent_item_bytes * call.item_bytes
    divides, is_first, is_broadcast = hosts.divides != 0, hosts.isend != 0, hosts.before.kind == _BROADCAST
    passed_bytes = hosts.passed_units * result_unit
    if hosts.widen:
        convert(hosts, hosts.widen, own, source, num_bytes, call.item_bytes)
    elif hosts.copies:  # the tensor of a call that differs stays as it is
        copy(own, source, num_bytes)
    is_in_own = hosts.widen or hosts.copies or (is_broadcast and hosts.is_root == 0)
    status = run_step(hosts, hosts.before, number, STEP_BEFORE, own if is_in_own else source, sent_bytes, 0, own)
    if status != 0:
        return status
    passed = own if divides else target if hosts.receives else hosts.scratch if hosts.is_home else 0
    if is_first:
        store_release(hosts.wait.polling, seq)
        status = exchange(call, number, sent_bytes, as_sent(call, row_bytes), unit_bytes, passed, begin)
        store_release(hosts.wait.polling, 0)
        if status != 0:
            hosts.failed_step = STEP_BETWEEN
            return status
    status = run_step(hosts, hosts.after, number, STEP_AFTER, passed, passed_bytes, 0, 0)
    if status != 0:
        return status
    if divides:
        num_parts = size if hosts.gathers else 1
        length = part_length(call, num_bytes // row_bytes, row_bytes, group_of(call).rank)
        copy(target, own + place * num_parts * result_unit, num_parts * length)
    elif is_broadcast and not is_first and hosts.is_root == 0:
        copy(target, own, num_bytes)
    if hosts.takes_part:
        length = num_bytes // size
        copy(part, target + group_of(call).rank * length, length)
    if parts:
        move_parts(parts, size, target, size * (length if divides else num_bytes), True)
    # The other hosts have arrived when their messages have, or for ranks that receive none, when the result has.
    log.waited = hosts.waited if is_first else now() - begin
    return 0


@inner
def compare(hosts: Hosts, seq, number):
    """Compare a number between the hosts: 0, MISMATCH, TIMEOUT, or the error of MPI."""
    if hosts.isend == 0:
        return 0
    store_release(hosts.wait.polling, seq)
    status = gather(hosts, number, 0)
    store_release(hosts.wait.polling, 0)
    if status != 0:
        hosts.failed_step = STEP_BETWEEN
    return status


@kernel
def compare_over_hosts(hosts: Hosts, seq, number):
    """Compare a number of a call between all ranks.

    Returns 0, MISMATCH, TIMEOUT, the error of MPI, or the status of a kernel, with the step in `failed_step`.
    """
    status = run_step(hosts, hosts.before, number, STEP_BEFORE, 0, 0, 0, 0)
    if status == 0:
        status = compare(hosts, seq, number)
    return status if status != 0 else run_step(hosts, hosts.after, number, STEP_AFTER, 0, 0, 0, 0)


# --- parts of any length ----------------------------------------------------------------------------------------------


@inner
def size_of_part(hosts: Hosts, rank, position):
    """Return a size in the frame of a rank: first those of the parts that it sends, then of those that it expects."""
    return Words(hosts.received_memory + rank * hosts.frame_bytes)[position]


@inner
def room_for_values(hosts: Hosts, size):
    """Return how many bytes of values a frame has room for."""
    return hosts.frame_bytes - 2 * size * FIELD_BYTES


@inner
def write_frame(call: KernelCall):
    """Write the sizes of the parts of this rank, and the values for other ranks if there is room."""
    hosts, size, rank, transfers, total = call.hosts, group_of(call).size, group_of(call).rank, call.transfers, 0
    sizes = Words(hosts.given_memory)
    for other in range(size):
        sizes[other] = transfers[other].send_bytes
        sizes[size + other] = transfers[other].receive_bytes
        total += transfers[other].send_bytes if other != rank else 0
    offset = 2 * size * FIELD_BYTES
    for other in range(size if total <= room_for_values(hosts, size) else 0):
        if other != rank:
            copy(sizes + offset, transfers[other].send_address, transfers[other].send_bytes)
            offset += transfers[other].send_bytes
    return 0


@inner
def most_sent(call: KernelCall):
    """Return the most bytes that a rank sends to the others; -1 if a rank expects another size than is sent."""
    hosts, size, most = call.hosts, group_of(call).size, 0
    for sender in range(size):
        total = 0
        for receiver in range(size):
            length = size_of_part(hosts, sender, receiver)
            if length != size_of_part(hosts, receiver, size + sender):
                return -1
            total += length if receiver != sender else 0
        most = max(most, total)
    return most


@inner
def read_frames(call: KernelCall):
    """Copy the values for this rank from the frames of the others."""
    hosts, size, rank, transfers = call.hosts, group_of(call).size, group_of(call).rank, call.transfers
    for sender in range(size):
        values = hosts.received_memory + sender * hosts.frame_bytes + 2 * size * FIELD_BYTES
        for receiver in range(rank if sender != rank else 0):
            values += size_of_part(hosts, sender, receiver) if receiver != sender else 0
        if sender != rank:
            copy(transfers[sender].receive_address, values, transfers[sender].receive_bytes)
    return 0


@inner
def send_parts(call: KernelCall, seq):
    """Send each rank its part, and wait for all parts: 0, TIMEOUT, the error of MPI, or UNEVEN if one is too long."""
    hosts, size, rank, transfers = call.hosts.parts, group_of(call).size, group_of(call).rank, call.transfers
    byte, tag, comm, number, error = hosts.byte_type, hosts.tag, hosts.comm, 0, 0
    for other in range(size):
        if max(transfers[other].send_bytes, transfers[other].receive_bytes) > hosts.received_bytes:
            return UNEVEN
    store_release(hosts.wait.polling, seq)
    for shift in range(1, size):
        origin, target = (rank - shift + size) % size, (rank + shift) % size
        address, length = transfers[origin].receive_address, transfers[origin].receive_bytes
        if length != 0 and error == 0:
            request = hosts.requests + number * FIELD_BYTES
            error = call_isend(hosts.irecv, address, length, byte, origin, tag, comm, request)
            number += 1
        address, length = transfers[target].send_address, transfers[target].send_bytes
        if length != 0 and error == 0:
            request = hosts.requests + number * FIELD_BYTES
            error = call_isend(hosts.isend, address, length, byte, target, tag, comm, request)
            number += 1
    for index in range(number):
        if error == 0:
            error = await_message(hosts, hosts.requests + index * FIELD_BYTES)
    store_release(hosts.wait.polling, 0)
    return error


@inner
def exchange_over_hosts(call: KernelCall, seq, signature):
    """Exchange the parts of the transfers: their sizes, and short values, are gathered with the comparison.

    Returns 0, the status of `over_hosts`, TIMEOUT, the error of MPI, or UNEVEN if Python must go on: a rank expects
    another size than is sent, or a part is too long for one message.
    """
    hosts, frames, group = call.hosts, call.hosts.frames, group_of(call)
    write_frame(call)
    status = over_hosts(frames, seq, signature, hosts.given_memory, hosts.frame_bytes, 0, hosts.received_memory)
    if status != 0:
        return status
    frames.hosts.failed_step = STEP_PARTS
    most = most_sent(call)
    if most < 0:
        return UNEVEN
    own = call.transfers[group.rank]
    copy(own.receive_address, own.send_address, own.send_bytes)
    if most <= room_for_values(hosts, group.size):
        return read_frames(call)
    return send_parts(call, seq)


@inner
def scatter_over_hosts(call: KernelCall, seq, signature, message: TensorMessage, source, num_rows, row_bytes, target):
    """Give each rank its part of the root's rows, of which the others know what they expect.

    A frame of the root has the description of its tensor, and the values if there is room. Returns what
    `exchange_over_hosts` does, UNEVEN if a rank expects another tensor.
    """
    hosts, frames, group, transfers = call.hosts, call.hosts.frames, group_of(call), call.transfers
    is_root, size = hosts.is_root, group.size
    frame = TensorMessage(hosts.given_memory if is_root else hosts.received_memory)
    values, room = frame + DESCRIPTION_BYTES, hosts.frame_bytes - DESCRIPTION_BYTES
    if num_rows * row_bytes <= room:
        copy(values, source, num_rows * row_bytes)
    status = over_hosts(frames, seq, signature, frame, hosts.frame_bytes, 0, frame)
    if status != 0:
        return status
    frames.hosts.failed_step = STEP_PARTS
    if is_root == 0 and not is_expected(group, frame, message):
        return UNEVEN
    num_rows = frame.shape[0]
    first, length = own_offset(group, num_rows, row_bytes), own_length(group, num_rows, row_bytes)
    if num_rows * row_bytes <= room:
        copy(target, values + first, length)
        return 0
    for other in range(size):
        begin = rows_before(num_rows, size, other) * row_bytes
        num_sent = part_length(call, num_rows, row_bytes, other) if is_root else 0
        set_send(transfers, other, part_at(call.given_parts, other, source + begin), num_sent)
        set_receive(transfers, other, target, length if other == call.root else 0)
    if is_root:
        copy(target, transfers[group.rank].send_address, length)
    return send_parts(call, seq)


@inner
def set_even_parts(call: KernelCall, source, num_bytes, target):
    """Write transfers of equal parts of two tensors, or of lists of tensors."""
    size, transfers = group_of(call).size, call.transfers
    length = num_bytes // size
    for other in range(size):
        set_send(transfers, other, part_at(call.given_parts, other, source + other * length), length)
        set_receive(transfers, other, part_at(call.received_parts, other, target + other * length), length)
    return 0


# --- long calls: messages after the comparison ------------------------------------------------------------------------


@inner
def clear_transfers(call: KernelCall):
    """Let the transfers of a call send and receive nothing."""
    for other in range(group_of(call).size):
        set_send(call.transfers, other, 0, 0)
        set_receive(call.transfers, other, 0, 0)
    return 0


@inner
def host_at(hosts: Hosts, index):
    """Return the host whose turn it is: each begins with itself."""
    return (hosts.own_host + index) % hosts.num_hosts


@inner
def begin_parts(call: KernelCall):
    """Note that all ranks have arrived, and that messages follow."""
    call.hosts.long.waited = now() + call.hosts.call_log.waited
    call.hosts.long.failed_step = STEP_PARTS
    return 0


@inner
def step_at(index):
    """Return the step in which the ranks of a host move the values for the host at this turn after the first one."""
    return STEP_AFTER if index == 1 else STEP_OF_HOST


@inner
def gather_in_host(call: KernelCall, number, index, source, num_bytes, target):
    """Let the ranks of this host gather the rows that they have from one host."""
    hosts, long, parts = call.hosts, call.hosts.long, call.received_parts
    first, local = host_at(hosts, index) * hosts.most_ranks, long.after.call
    own = source if index == 0 else part_at(parts, first + hosts.place, target + (first + hosts.place) * num_bytes)
    local.received_parts = Words(parts + first * FIELD_BYTES if parts else 0)
    long.num_done = index
    status = run_step(long, long.after, number, step_at(index + 1), own, num_bytes, 0, target + first * num_bytes)
    local.received_parts = Words(0)
    return status


@inner
def gather_long(call: KernelCall, seq, number, source, num_bytes, target):
    """Send the rows to the rank in this place on each other host, which passes them on there; or to the root."""
    hosts, long, root, rank, transfers = call.hosts, call.hosts.long, call.root, group_of(call).rank, call.transfers
    has_steps, receives = long.after.kind == _GATHER, root < 0 or rank == root
    if has_steps:
        status = run_step(long, long.before, number, STEP_BEFORE, 0, 0, 0, 0)
        if status == 0:
            status = compare(long, seq, number)
        if status == 0:
            status = gather_in_host(call, number, 0, source, num_bytes, target)
    else:
        status = compare_over_hosts(long, seq, number)
    if status != 0:
        return status
    for other in range(group_of(call).size):
        is_sent = other == root if root >= 0 else other % hosts.most_ranks == hosts.place
        row = part_at(call.received_parts, other, target + other * num_bytes)
        if other != rank:
            set_send(transfers, other, source, num_bytes if is_sent else 0)
            set_receive(transfers, other, row, num_bytes if receives and (root >= 0 or is_sent) else 0)
        elif receives and not has_steps and row != source:
            copy(row, source, num_bytes)
    begin_parts(call)
    status = send_parts(call, seq)
    for index in range(1, hosts.num_hosts if has_steps else 0):
        if status == 0:
            status = gather_in_host(call, number, index, source, num_bytes, target)
    return status


@inner
def exchange_long(call: KernelCall, seq, number, source, num_rows, row_bytes, target):
    """Send each rank its rows."""
    group, long, transfers = group_of(call), call.hosts.long, call.transfers
    rank, size, own_bytes = group.rank, group.size, own_length(group, num_rows, row_bytes)
    status = compare_over_hosts(long, seq, number)
    if status != 0:
        return status
    for other in range(size):
        begin, length = rows_before(num_rows, size, other) * row_bytes, part_length(call, num_rows, row_bytes, other)
        if other == rank:
            copy(target + other * own_bytes, source + begin, own_bytes)
        else:
            set_send(transfers, other, source + begin, length)
            set_receive(transfers, other, target + other * own_bytes, own_bytes)
    begin_parts(call)
    return send_parts(call, seq)


@inner
def reduce_long(call: KernelCall, seq, number, source, num_rows, row_bytes, target):
    """Send the rank in this place on each other host the sums of this host that are for it, and combine those of all.

    The ranks of a host first reduce the rows for each host.
    """
    hosts, long, most_ranks, memory = call.hosts, call.hosts.long, call.hosts.most_ranks, call.hosts.memory
    group, size, num_bytes, status = group_of(call), group_of(call).size, num_rows * row_bytes, 0
    if hosts.widen:
        convert(hosts, hosts.widen, memory, source, num_bytes, call.item_bytes)
        source, row_bytes = memory, as_sent(call, row_bytes)
        memory += whole_lines(as_sent(call, num_bytes))
    own_bytes, room = own_length(group, num_rows, row_bytes), whole_lines(part_length(call, num_rows, row_bytes, 0))
    for index in range(hosts.num_hosts):
        if index == 1 and status == 0:
            status = compare(long, seq, number)
        if status != 0:
            return status
        host, sums, received = host_at(hosts, index), memory + index * room, memory + (hosts.num_hosts + index) * room
        first, peer = host * most_ranks, host * most_ranks + hosts.place
        begin = rows_before(num_rows, size, first) * row_bytes
        length = rows_before(num_rows, size, first + most_ranks) * row_bytes - begin
        long.num_done, failing = index, STEP_BEFORE if index == 0 else step_at(index)
        if long.intra_log:
            status = run_step(long, long.after, number, failing, source + begin, length, row_bytes, sums)
        else:
            sums = source + begin
        hosts.operands[host] = sums if index == 0 else received
        if index != 0:
            set_send(call.transfers, peer, sums, part_length(call, num_rows, row_bytes, peer))
            set_receive(call.transfers, peer, received, own_bytes)
    if status != 0:
        return status
    begin_parts(call)
    status = send_parts(call, seq)
    if status != 0:
        return status
    total = hosts.operands[hosts.own_host] if hosts.finish else target
    combine(hosts, call.reducer, total, own_bytes)
    return convert(hosts, hosts.finish, target, total, own_bytes, hosts.sent_item_bytes) if hosts.finish else 0


@kernel
def call_long_over_hosts(call: KernelCall, seq, number, source, num_bytes, row_bytes, target):
    """Compare a call, and move its values: `LongCall` of torchmpi.backends.

    Returns 0, MISMATCH, TIMEOUT, the error of MPI, or the status of a kernel, with the step in `failed_step` of `long`.
    """
    hosts, log = call.hosts, call.hosts.call_log
    log.waited = -now()
    log.algorithm = hosts.algorithm
    clear_transfers(call)
    if hosts.reduces:
        status = reduce_long(call, seq, number, source, num_bytes // row_bytes, row_bytes, target)
    elif hosts.divides:
        status = exchange_long(call, seq, number, source, num_bytes // row_bytes, row_bytes, target)
    else:
        status = gather_long(call, seq, number, source, num_bytes, target)
    if status == 0:
        log.waited = hosts.long.waited
    return status


@inner
def long_over_hosts(call: KernelCall, seq, signature, source, num_bytes, row_bytes, target):
    """Run a long call; `signature` is the hash of its shape."""
    number = call_number(seq, record_of(call.hosts.call_log, seq).code, signature) ^ num_bytes ^ LONG
    return call_long_over_hosts(call, seq, number, source, num_bytes, row_bytes, target)


# --- kernels of the fast path: within a host or over hosts ------------------------------------------------------------


@kernel
def any_barrier(call: KernelCall, seq, signature, message, num_bytes):
    """Synchronize."""
    if call.hosts:
        return over_hosts(call, seq, signature, 0, 0, 0, 0)
    return barrier(call, seq, signature, message, num_bytes)


@kernel
def any_allreduce(call: KernelCall, seq, signature, address, numel):
    """Reduce one tensor in place, on all ranks or on a root."""
    if call.hosts:
        return over_hosts(call, seq, signature, address, numel * call.item_bytes, 0, address)
    return allreduce(call, seq, signature, address, numel)


@kernel
def any_broadcast(call: KernelCall, seq, signature, address, num_bytes):
    """Copy the root's bytes to all ranks, in place."""
    if call.hosts:
        return over_hosts(call, seq, signature, address, num_bytes, 0, address)
    return broadcast(call, seq, signature, address, num_bytes)


@kernel
def any_allgather(call: KernelCall, seq, signature, source, num_bytes, target):
    """Concatenate the bytes of all ranks, on all of them or on the root."""
    if call.hosts and not is_carried(call, num_bytes, 0):
        return long_over_hosts(call, seq, signature, source, num_bytes, 0, target)
    if call.hosts:
        return over_hosts(call, seq, signature, source, num_bytes, 0, target)
    return allgather(call, seq, signature, source, num_bytes, target)


@kernel
def any_reduce_scatter(call: KernelCall, seq, signature, source, num_rows, row_bytes, target):
    """Reduce the rows of all ranks, and give each rank its part."""
    if call.hosts and not is_carried(call, num_rows * row_bytes, row_bytes):
        return long_over_hosts(call, seq, signature, source, num_rows * row_bytes, row_bytes, target)
    if call.hosts:
        return over_hosts(call, seq, signature, source, num_rows * row_bytes, row_bytes, target)
    return reduce_scatter(call, seq, signature, source, num_rows, row_bytes, target)


@kernel
def any_alltoall(call: KernelCall, seq, signature, source, num_rows, row_bytes, target):
    """Send each rank its rows."""
    if call.hosts and not is_carried(call, num_rows * row_bytes, row_bytes):
        if not call.hosts.frames:
            return long_over_hosts(call, seq, signature, source, num_rows * row_bytes, row_bytes, target)
        set_even_parts(call, source, num_rows * row_bytes, target)
        return exchange_over_hosts(call, seq, signature)
    if call.hosts:
        return over_hosts(call, seq, signature, source, num_rows * row_bytes, row_bytes, target)
    return alltoall(call, seq, signature, source, num_rows, row_bytes, target)


@kernel
def any_exchange(call: KernelCall, seq, signature, message, num_bytes):
    """Exchange parts of any length, which are in the transfers."""
    if call.hosts:
        return exchange_over_hosts(call, seq, signature)
    return exchange_parts(call, seq, signature, message, num_bytes)


@kernel
def any_scatter(
    call: KernelCall, seq, signature, message: TensorMessage, message_bytes, source, num_rows, row_bytes, target
):
    """Give each rank its part of the root's rows; one row if the values are sent with the comparison over hosts."""
    if call.hosts and message_bytes != 0:
        return scatter_over_hosts(call, seq, signature, message, source, num_rows, row_bytes, target)
    if call.hosts:
        return over_hosts(call, seq, signature, source, group_of(call).size * row_bytes, 0, target)
    return scatter(call, seq, signature, message, message_bytes, source, num_rows, row_bytes, target)
