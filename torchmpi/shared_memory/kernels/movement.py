"""Kernels of the barrier and of all collectives that move data, reduce_scatter included.

Four routes by length; all ranks take the same route:

* up to PAYLOAD_BYTES the data travels in the payload of the ring entry;
* up to `whole_bytes` in the slot, written before the ranks synchronize; both routes synchronize once;
* longer data, if all tensors are shared, is copied from tensor to tensor (`end_reads` waits for all readers);
* otherwise it is read directly from the other processes (kernels.peer_memory), or goes through the slots in chunks
  (kernels.chunk_loop).

An allgather assumes equal lengths on all ranks. The lengths are in the payloads; if they differ, the kernel
returns UNEVEN, and Python allocates the result and calls `exchange`.

Memory order: payload and slot are published by the sequence number of the entry (`arrive`). A slot written whole also
sets `ready` and `reduced`, so that the counters stay equal to `chunks` on all ranks.

reduce_scatter, alltoall and scatter divide dim 0 among the ranks: rank `r` gets rows `rows_before(r)` to
`rows_before(r + 1)`; the first ranks take the remainder, one row each.

In chunks of such collectives each rank writes one part for each rank into its slot, `spacing` apart; a reduce_scatter
reduces where the others copy. alltoall assumes the same number of rows on all ranks (UNEVEN otherwise).

A scatter is two kernels, or one in the fast path. `offer` synchronizes: the root writes a description of its tensor
(dtype, dimensions, shape) to its payload, and its first chunk, or the whole tensor if the payload has room, or the
address for direct reads. `take` moves the rest, after Python has allocated the result.

`reduce_scatter` publishes `reduced` after a chunk has been read, before its slot is written again.
"""

from __future__ import annotations

from ..compiler.compilation import inner, kernel
from ..memory_layout import IN_CHUNKS, IN_SHARED_TENSORS, IN_WHOLE_SLOTS, PAYLOAD_BYTES, Block
from .access import (
    copy_from_slot,
    copy_to_payload,
    group_of,
    is_in_slot,
    outcome,
    part_at,
    payload_of,
    peer_at,
    set_counter,
    set_receive,
    set_send,
    transfer_slot_of,
)
from .arrival import arrive, begin, end_reads, leave, set_algorithm, wait_all
from .chunk_loop import (
    ALL_SEND_BYTES,
    ONE_SENDS_BYTES,
    deliver,
    divide_parts,
    divide_stream,
    exchange,
    put,
    put_first_chunk,
    put_next,
    run_rounds,
    send_to_all,
)
from .copying import begin_measuring, end_measuring, note_chunk, note_time
from .intrinsics import copy, load, now, store
from .kernel_sets import ENABLE_CHECKS
from .peer_memory import (
    all_show,
    announce_memory,
    announcement_of,
    can_read,
    end_reading,
    find_shared,
    note_pace,
    num_shared,
    prefers_reading,
    read_all,
    read_from,
    shared_tensor_of,
    show_memory,
)
from .records import COMPARED, PART_SIZES, UNEVEN, UNREADABLE, GroupRecord, KernelCall, TensorMessage, Transfer
from .reduce_kernels import combine, part_begin, set_operand

_SHORT_BROADCAST_BYTES = 128 << 10  # shorter broadcasts bypass the caches, which was never slower


@kernel
def barrier(call: KernelCall, seq, signature, message, num_bytes):
    """Synchronize; the message of each rank can be read in the payload of its entry afterwards."""
    group = group_of(call)
    status = begin(group, seq)
    if status == 0:
        copy_to_payload(group, seq, 0, message, num_bytes)
        status = arrive(group, seq, signature)
    return leave(group, seq, status)


@kernel
def compare_only(call: KernelCall, seq, signature):
    """Compare a call that Python runs and ends: COMPARED, or the status of `arrive`."""
    group = group_of(call)
    status = begin(group, seq)
    if status == 0:
        status = arrive(group, seq, signature)
    set_algorithm(group, 0)
    return outcome(group, COMPARED if status == 0 else status)


@inner
def put_whole(group: GroupRecord, address, num_bytes):
    """Copy short data into the slot before arriving."""
    chunk = group.chunks
    slot = transfer_slot_of(group, group.rank, chunk)
    if not ENABLE_CHECKS or is_in_slot(group, slot, num_bytes):
        copy(slot, address, num_bytes)
    set_counter(group, Block.ready, chunk + 1)
    return 0


@inner
def end_whole(group: GroupRecord):
    """Count the chunk of `put_whole` after reading the slots."""
    chunk = group.chunks
    set_algorithm(group, IN_WHOLE_SLOTS)
    set_counter(group, Block.reduced, chunk + 1)
    group.chunks = chunk + 1
    return 0


@inner
def broadcast_shared(group: GroupRecord, address, num_bytes, root):
    """Broadcast between shared tensors; the root writes the first part of all others: equal amounts on all ranks."""
    rank, size = group.rank, group.size
    share = part_begin(num_bytes, size, 1)
    set_algorithm(group, IN_SHARED_TENSORS)
    if rank != root:
        deliver(address + share, shared_tensor_of(group, root) + share, num_bytes - share, num_bytes)
    else:
        for other in range(size):
            if other != root:
                deliver(shared_tensor_of(group, other), address, share, num_bytes)
    return end_reads(group)


@inner
def broadcast_chunks(call: KernelCall, address, num_bytes):
    """Broadcast through the slots of the root."""
    group = group_of(call)
    rank, root = group.rank, call.root
    transfers = send_to_all(call, address, num_bytes if rank == root else 0)
    for other in range(group.size):
        set_receive(transfers, other, address, num_bytes if other == root and rank != root else 0)
    num_rounds = divide_stream(group, num_bytes, ONE_SENDS_BYTES)
    begin_measuring(group, num_rounds, num_bytes <= _SHORT_BROADCAST_BYTES)
    put(group, group.chunks, transfers, False)
    return run_rounds(group, transfers, num_rounds)


@inner
def broadcast_short(call: KernelCall, seq, signature, address, num_bytes):
    """Broadcast in the payload."""
    group, root = group_of(call), call.root
    if group.rank == root:
        copy_to_payload(group, seq, 0, address, num_bytes)
    status = arrive(group, seq, signature)
    if status == 0 and group.rank != root:
        copy(address, payload_of(group, root, seq), num_bytes)
    return status


@inner
def broadcast_whole(call: KernelCall, seq, signature, address, num_bytes):
    """Broadcast in the slot of the root."""
    group, root = group_of(call), call.root
    if group.rank == root:
        put_whole(group, address, num_bytes)
    status = arrive(group, seq, signature)
    if status != 0:
        return status
    if group.rank != root:
        copy_from_slot(group, address, transfer_slot_of(group, root, group.chunks), num_bytes)
    return end_whole(group)


@inner
def broadcast_long(call: KernelCall, seq, signature, address, num_bytes):
    """Broadcast between shared tensors, if all of them are, or in chunks."""
    group = group_of(call)
    announce_memory(group, seq, address, num_bytes)
    status = arrive(group, seq, signature)
    if status != 0:
        return status
    if num_shared(group, seq) < group.size:
        return broadcast_chunks(call, address, num_bytes)
    status = find_shared(group, seq, address)
    return status if status != 0 else broadcast_shared(group, address, num_bytes, call.root)


@kernel
def broadcast(call: KernelCall, seq, signature, address, num_bytes):
    """Copy the root's bytes to all ranks, in place."""
    group = group_of(call)
    status = begin(group, seq)
    if status != 0:
        return status
    if num_bytes <= PAYLOAD_BYTES:
        status = broadcast_short(call, seq, signature, address, num_bytes)
    elif num_bytes <= group.whole_bytes:
        status = broadcast_whole(call, seq, signature, address, num_bytes)
    else:
        status = broadcast_long(call, seq, signature, address, num_bytes)
    return leave(group, seq, status)


@inner
def are_even(group: GroupRecord, seq, length):
    """Return whether all ranks have announced the same length, in bytes or rows, in their payloads."""
    for other in range(group.size):
        if announcement_of(group, other, seq).length != length:
            return False
    return True


@inner
def gather_shared(call: KernelCall, first, num_bytes, target):
    """Copy `num_bytes` from offset `first` of every rank's shared tensor."""
    group = group_of(call)
    rank, size = group.rank, group.size
    set_algorithm(group, IN_SHARED_TENSORS)
    for shift in range(size):
        other = peer_at(rank, size, shift)
        part = part_at(call.received_parts, other, target + other * num_bytes)
        deliver(part, shared_tensor_of(group, other) + first, num_bytes, num_bytes)
    return end_reads(group)


@inner
def arrive_evenly(group: GroupRecord, seq, signature, length):
    """Arrive, with the length of this rank: 0, UNEVEN if another rank has another one, or the status of `arrive`."""
    status = arrive(group, seq, signature)
    return UNEVEN if status == 0 and not are_even(group, seq, length) else status


@inner
def num_gathered(call: KernelCall, num_bytes):
    """Return how many bytes this rank gets from each rank."""
    return num_bytes if call.root < 0 or group_of(call).rank == call.root else 0


@inner
def allgather_short(call: KernelCall, seq, signature, source, num_bytes, target):
    """Gather in the payloads."""
    group = group_of(call)
    copy_to_payload(group, seq, 8, source, num_bytes)
    status = arrive_evenly(group, seq, signature, num_bytes)
    if status != 0:
        return status
    num_received = num_gathered(call, num_bytes)
    for other in range(group.size):
        part = part_at(call.received_parts, other, target + other * num_bytes)
        copy(part, payload_of(group, other, seq) + 8, num_received)
    return 0


@inner
def allgather_whole(call: KernelCall, seq, signature, source, num_bytes, target):
    """Gather in whole slots; the root of a gather puts nothing."""
    group = group_of(call)
    rank = group.rank
    put_whole(group, source, num_bytes if rank != call.root else 0)
    status = arrive_evenly(group, seq, signature, num_bytes)
    if status != 0:
        return status
    num_received = num_gathered(call, num_bytes)
    for other in range(group.size):
        part = part_at(call.received_parts, other, target + other * num_bytes)
        if other == rank:
            copy(part, source, num_received)
        else:
            copy_from_slot(group, part, transfer_slot_of(group, other, group.chunks), num_received)
    return end_whole(group)


@inner
def allgather_long(call: KernelCall, seq, signature, source, num_bytes, target):
    """Gather from shared tensors, if all of them are, by direct reads, or in chunks.

    The root of a gather decides on direct reads. The other ranks always publish the address of their data, and also
    write their slots unless the last long gather was read directly.
    """
    group = group_of(call)
    rank, size, root = group.rank, group.size, call.root
    transfers = send_to_all(call, source, num_bytes if rank != root else 0)
    num_rounds, num_received = divide_stream(group, num_bytes, ALL_SEND_BYTES), num_gathered(call, num_bytes)
    only_sends, paces = root >= 0 and rank != root, group.allgather_paces if root < 0 else group.gather_paces
    shows = can_read(group, num_bytes) if only_sends else prefers_reading(group, paces, num_bytes)
    # The own tensor of a list, in which a message of another host has arrived, is not announced as shared: ranks that
    # must map it go on in Python, with rows of one tensor.
    is_own_part = part_at(call.received_parts, rank, 0) == source
    is_shared = announce_memory(group, seq, source, 0 if is_own_part else num_bytes)
    puts = not is_shared and (group.gathers_read == 0 if only_sends else not shows)
    show_memory(group, seq, source if shows else 0)
    since = now()
    if puts:
        put_first_chunk(group, transfers, num_rounds)
    spent = now() - since
    status = arrive_evenly(group, seq, signature, num_bytes)
    if status != 0:
        return status
    if num_shared(group, seq) == size:
        status = find_shared(group, seq, source)
        return status if status != 0 else gather_shared(call, 0, num_received, target)
    since, reads = now(), all_show(group, seq)
    if only_sends:
        group.gathers_read = reads
    status = read_all(call, seq, source, 0, num_received, target) if reads else UNREADABLE
    if status == UNREADABLE:
        if reads or not puts:
            put_first_chunk(group, transfers, num_rounds)
        for other in range(size):
            part = part_at(call.received_parts, other, target + other * num_bytes)
            set_receive(transfers, other, part, num_received)
        status = run_rounds(group, transfers, num_rounds)
    if not only_sends and status == 0:
        note_pace(paces, num_bytes, reads, now() - since + spent)
    return status


@kernel
def allgather(call: KernelCall, seq, signature, source, num_bytes, target):
    """Concatenate the bytes of all ranks, on all ranks or on the root of the call, if the lengths are equal.

    Returns UNEVEN otherwise, with the lengths in the payloads.
    """
    group = group_of(call)
    status = begin(group, seq)
    if status != 0:
        return status
    announcement_of(group, group.rank, seq).length = num_bytes
    if num_bytes <= PAYLOAD_BYTES - 8:
        status = allgather_short(call, seq, signature, source, num_bytes, target)
    elif num_bytes <= group.whole_bytes:
        status = allgather_whole(call, seq, signature, source, num_bytes, target)
    else:
        status = allgather_long(call, seq, signature, source, num_bytes, target)
    return leave(group, seq, status)


@inner
def rows_before(num_rows, size, rank):
    """Return the number of rows of the ranks below."""
    return num_rows // size * rank + min(num_rows % size, rank)


@inner
def divide_rows(group: GroupRecord, num_rows, row_bytes):
    """Choose the chunks of rows that are divided among the ranks; return the number of rounds."""
    return divide_parts(group, rows_before(num_rows, group.size, 1) * row_bytes)


@inner
def send_rows(call: KernelCall, source, num_rows, row_bytes) -> Transfer:
    """Fill the sending half of the transfers, which are returned, with the rows for each rank."""
    size, transfers = group_of(call).size, call.transfers
    for other in range(size):
        first = rows_before(num_rows, size, other) * row_bytes
        part, end = part_at(call.given_parts, other, source + first), rows_before(num_rows, size, other + 1) * row_bytes
        set_send(transfers, other, part, end - first)
    return transfers


@inner
def put_in_payload(call: KernelCall, seq, offset, source, num_bytes):
    """Write rows for all ranks to this rank's payload before it arrives."""
    group, parts = group_of(call), call.given_parts
    if not parts:
        return copy_to_payload(group, seq, offset, source, num_bytes)
    length = num_bytes // group.size
    for other in range(group.size):
        copy_to_payload(group, seq, offset + other * length, parts[other], length)
    return 0


@inner
def whole_bytes(call: KernelCall, num_bytes):
    """Return the length of the tensor that this rank passes if other ranks may read it; 0 of a list."""
    return 0 if call.given_parts else num_bytes


@inner
def reduce_rows(call: KernelCall, source, length, target, transfers: Transfer, num_rounds, is_first_put):
    """Reduce the rows of this rank, whose own values begin at `source`, chunk by chunk from the slots.

    `is_first_put`: all ranks had written their first chunk before they arrived.
    """
    group = group_of(call)
    rank, size = group.rank, group.size
    base, chunk_bytes = group.chunks, group.chunk_bytes
    set_algorithm(group, IN_CHUNKS)
    for index in range(num_rounds):
        chunk = base + index
        if index + 1 < num_rounds:
            status = put_next(group, index, transfers, False)
            if status != 0:
                return status
        if index > 0 or not is_first_put:
            status = wait_all(group, Block.ready, chunk + 1)
            if status != 0:
                return status
        for other in range(size):
            set_operand(group, other, transfer_slot_of(group, other, chunk) + rank * chunk_bytes)
        set_operand(group, rank, source + index * chunk_bytes)
        mine, since = max(0, min(chunk_bytes, length - index * chunk_bytes)), now()
        last_slot = transfer_slot_of(group, size - 1, chunk) + rank * chunk_bytes
        if not ENABLE_CHECKS or is_in_slot(group, last_slot, mine):
            combine(call, target + index * chunk_bytes, mine)
        note_time(group, chunk, since)
        note_chunk(group, chunk, mine * (size - 1))
        set_counter(group, Block.reduced, chunk + 1)
    end_measuring(group)
    group.chunks = base + num_rounds
    return wait_all(group, Block.reduced, base + num_rounds - 1) if num_rounds > 1 else 0


@inner
def reduce_rows_shared(call: KernelCall, first, length, target):
    """Reduce this rank's rows, at offset `first`, from the shared tensors of all ranks."""
    group = group_of(call)
    set_algorithm(group, IN_SHARED_TENSORS)
    for other in range(group.size):
        set_operand(group, other, shared_tensor_of(group, other) + first)
    combine(call, target, length)
    return end_reads(group)


@inner
def own_offset(group: GroupRecord, num_rows, row_bytes):
    """Return the offset of the rows of this rank."""
    return rows_before(num_rows, group.size, group.rank) * row_bytes


@inner
def own_length(group: GroupRecord, num_rows, row_bytes):
    """Return the length of the rows of this rank."""
    return rows_before(num_rows, group.size, group.rank + 1) * row_bytes - own_offset(group, num_rows, row_bytes)


@inner
def reduce_scatter_short(call: KernelCall, seq, signature, source, num_rows, row_bytes, target):
    """Reduce in the payloads."""
    group = group_of(call)
    put_in_payload(call, seq, 0, source, num_rows * row_bytes)
    status = arrive(group, seq, signature)
    if status != 0:
        return status
    for other in range(group.size):
        set_operand(group, other, payload_of(group, other, seq) + own_offset(group, num_rows, row_bytes))
    combine(call, target, own_length(group, num_rows, row_bytes))
    return 0


@inner
def reduce_scatter_long(call: KernelCall, seq, signature, source, num_rows, row_bytes, target):
    """Reduce from shared tensors, if all of them are, or in chunks."""
    group = group_of(call)
    first, length = own_offset(group, num_rows, row_bytes), own_length(group, num_rows, row_bytes)
    transfers, num_rounds = send_rows(call, source, num_rows, row_bytes), divide_rows(group, num_rows, row_bytes)
    is_shared = announce_memory(group, seq, source, whole_bytes(call, num_rows * row_bytes))
    if not is_shared:
        put_first_chunk(group, transfers, num_rounds)
    status = arrive(group, seq, signature)
    if status != 0:
        return status
    if num_shared(group, seq) == group.size:
        status = find_shared(group, seq, source)
        return status if status != 0 else reduce_rows_shared(call, first, length, target)
    if is_shared:
        put_first_chunk(group, transfers, num_rounds)
    own = part_at(call.given_parts, group.rank, source + first)
    return reduce_rows(call, own, length, target, transfers, num_rounds, num_shared(group, seq) == 0)


@kernel
def reduce_scatter(call: KernelCall, seq, signature, source, num_rows, row_bytes, target):
    """Reduce the rows of all ranks, and give each rank its part."""
    group = group_of(call)
    status = begin(group, seq)
    if status != 0:
        return status
    if num_rows * row_bytes <= PAYLOAD_BYTES:
        status = reduce_scatter_short(call, seq, signature, source, num_rows, row_bytes, target)
    else:
        status = reduce_scatter_long(call, seq, signature, source, num_rows, row_bytes, target)
    return leave(group, seq, status)


@inner
def alltoall_short(call: KernelCall, seq, signature, source, num_rows, row_bytes, target):
    """Move the rows in the payloads."""
    group = group_of(call)
    first, length = own_offset(group, num_rows, row_bytes), own_length(group, num_rows, row_bytes)
    put_in_payload(call, seq, 8, source, num_rows * row_bytes)
    status = arrive_evenly(group, seq, signature, num_rows)
    if status != 0:
        return status
    for other in range(group.size):
        part = part_at(call.received_parts, other, target + other * length)
        copy(part, payload_of(group, other, seq) + 8 + first, length)
    return 0


@inner
def alltoall_long(call: KernelCall, seq, signature, source, num_rows, row_bytes, target):
    """Move the rows between shared tensors, if all of them are, by direct reads, or in chunks."""
    group = group_of(call)
    rank, size, num_rounds = group.rank, group.size, divide_rows(group, num_rows, row_bytes)
    first, length = own_offset(group, num_rows, row_bytes), own_length(group, num_rows, row_bytes)
    is_shared = announce_memory(group, seq, source, whole_bytes(call, num_rows * row_bytes))
    shows, since = prefers_reading(group, group.alltoall_paces, whole_bytes(call, length)), now()
    show_memory(group, seq, source if shows else 0)
    if not shows and not is_shared:
        put_first_chunk(group, send_rows(call, source, num_rows, row_bytes), num_rounds)
    spent = now() - since
    status = arrive_evenly(group, seq, signature, num_rows)
    if status != 0:
        return status
    if num_shared(group, seq) == size:
        status = find_shared(group, seq, source)
        return status if status != 0 else gather_shared(call, first, length, target)
    since, reads = now(), all_show(group, seq)
    status = read_all(call, seq, source, first, length, target) if reads else UNREADABLE
    if status == UNREADABLE:
        transfers = send_rows(call, source, num_rows, row_bytes)
        if shows or is_shared:
            put_first_chunk(group, transfers, num_rounds)
        for other in range(size):
            set_receive(transfers, other, part_at(call.received_parts, other, target + other * length), length)
        own = part_at(call.given_parts, rank, source + first)
        deliver(transfers[rank].receive_address, own, length, length)
        status = run_rounds(group, transfers, num_rounds)
    if status == 0:
        note_pace(group.alltoall_paces, length, reads, now() - since + spent)
    return status


@kernel
def alltoall(call: KernelCall, seq, signature, source, num_rows, row_bytes, target):
    """Send each rank its rows, if all ranks have the same number of rows.

    Returns UNEVEN otherwise, with the numbers in the payloads.
    """
    group = group_of(call)
    status = begin(group, seq)
    if status != 0:
        return status
    announcement_of(group, group.rank, seq).length = num_rows
    if num_rows * row_bytes <= PAYLOAD_BYTES - 8:
        status = alltoall_short(call, seq, signature, source, num_rows, row_bytes, target)
    else:
        status = alltoall_long(call, seq, signature, source, num_rows, row_bytes, target)
    return leave(group, seq, status)


@inner
def sent_bytes(call: KernelCall, seq, sender, receiver):
    """Return how many bytes a rank has announced to send to another one, in an exchange of parts of any length."""
    group = group_of(call)
    payload = payload_of(group, sender, seq)
    return payload[1 + receiver] if payload[0] == PART_SIZES else payload[0] // group.size * call.item_bytes


@inner
def expected_bytes(call: KernelCall, seq, sender, receiver):
    """Return how many bytes a rank has announced to expect from another one."""
    group = group_of(call)
    payload = payload_of(group, receiver, seq)
    if payload[0] == PART_SIZES:
        return payload[1 + group.size + sender]
    return payload[0] // group.size * call.item_bytes


@inner
def exchange_parts(call: KernelCall, seq, signature, message, num_bytes):
    """Exchange parts of any length, which are in the transfers; the message of each rank has the lengths of its parts.

    Returns UNEVEN if a rank expects another length than is sent.
    """
    status = barrier(call, seq, signature, message, num_bytes)
    if status != 0:
        return status
    size, longest = group_of(call).size, 0
    for sender in range(size):
        for receiver in range(size):
            length = sent_bytes(call, seq, sender, receiver)
            if length != expected_bytes(call, seq, sender, receiver):
                return UNEVEN
            longest = max(longest, length)
    return exchange(call, call.transfers, 0, longest, 0)


@kernel
def offer(call: KernelCall, seq, signature, message: TensorMessage, num_bytes, source, num_rows, row_bytes):
    """Synchronize for a scatter; the root publishes the description of its tensor, and first rows or their address."""
    group = group_of(call)
    status = begin(group, seq)
    if status != 0:
        return status
    copy_to_payload(group, seq, 0, message, num_bytes)
    is_root = group.rank == call.root
    if is_root and num_bytes + num_rows * row_bytes <= PAYLOAD_BYTES:
        put_in_payload(call, seq, num_bytes, source, num_rows * row_bytes)
    elif is_root:
        num_rounds, since = divide_rows(group, num_rows, row_bytes), now()
        has_room = num_bytes + 8 <= PAYLOAD_BYTES
        share_bytes = num_rows // group.size * row_bytes
        shows = has_room and prefers_reading(group, group.scatter_paces, whole_bytes(call, share_bytes))
        if has_room:
            store(payload_of(group, group.rank, seq) + num_bytes, source if shows else 0)
        if not shows:
            put_first_chunk(group, send_rows(call, source, num_rows, row_bytes), num_rounds)
        group.spent_before = now() - since
    status = arrive(group, seq, signature)
    return leave(group, seq, status)


@inner
def offered_by(group: GroupRecord, root, seq) -> TensorMessage:
    """Return the description that the root of a scatter has written to its payload."""
    return TensorMessage(payload_of(group, root, seq))


@inner
def message_bytes_of(message: TensorMessage):
    """Return the length of the description of a tensor."""
    return (TensorMessage.shape + message.num_dims) * 8


@kernel
def take(call: KernelCall, seq, num_rows, row_bytes, source, target):
    """Copy this rank's rows of the root's tensor, after `offer`."""
    group = group_of(call)
    rank, size, root = group.rank, group.size, call.root
    first, length = own_offset(group, num_rows, row_bytes), own_length(group, num_rows, row_bytes)
    offered = offered_by(group, root, seq)
    message_bytes = message_bytes_of(offered)
    if message_bytes + num_rows * row_bytes <= PAYLOAD_BYTES:
        copy(target, offered + message_bytes + first, length)
        return outcome(group, 0)
    transfers, num_rounds, since = call.transfers, divide_rows(group, num_rows, row_bytes), now()
    shown = load(offered + message_bytes) if message_bytes + 8 <= PAYLOAD_BYTES else 0
    if rank == root:
        deliver(target, part_at(call.given_parts, rank, source + first), length, length)
    status = UNREADABLE
    if shown != 0:
        status = end_reading(group, rank == root or read_from(group, root, shown + first, length, target))
    if status == UNREADABLE:
        if rank != root:
            send_to_all(call, 0, 0)
            begin_measuring(group, num_rounds, False)
        elif shown != 0:
            put_first_chunk(group, send_rows(call, source, num_rows, row_bytes), num_rounds)
        for other in range(size):
            set_receive(transfers, other, target, length if other == root else 0)
        status = run_rounds(group, transfers, num_rounds)
    if rank == root and status == 0:
        spent = now() - since + group.spent_before
        note_pace(group.scatter_paces, num_rows // size * row_bytes, shown != 0, spent)
    return outcome(group, status)


@inner
def is_expected(group: GroupRecord, offered: TensorMessage, message: TensorMessage):
    """Return whether dtype, shape and this rank's number of rows in the root's offer equal those of the message."""
    if offered.dtype != message.dtype or offered.num_dims != message.num_dims:
        return False
    for index in range(1, message.num_dims):
        if offered.shape[index] != message.shape[index]:
            return False
    return own_length(group, offered.shape[0], 1) == message.shape[0]


@kernel
def scatter(call: KernelCall, seq, signature, message: TensorMessage, num_bytes, source, num_rows, row_bytes, target):
    """Run `offer`, then `take`; the other ranks pass the description that they expect: UNEVEN if the offer differs."""
    group = group_of(call)
    root = call.root
    if group.rank == root:
        status = offer(call, seq, signature, message, num_bytes, source, num_rows, row_bytes)
    else:
        status = offer(call, seq, signature, message, 0, 0, 0, 0)
        offered = offered_by(group, root, seq)
        if status == 0 and not is_expected(group, offered, message):
            status = UNEVEN
        num_rows = offered.shape[0]
    return status if status != 0 else take(call, seq, num_rows, row_bytes, source, target)
