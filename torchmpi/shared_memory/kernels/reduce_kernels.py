"""Kernels of allreduce and reduce: one tensor, or a list of tensors as one stream.

All routes reduce each element in rank order with the same code (:mod:`torchmpi.shared_memory.kernels.reduction`), give
the same bits, and differ in speed only:

* up to PAYLOAD_BYTES (one tensor) the data travels in the ring entry, and every rank reduces everything (`in_payload`);
* up to `whole_bytes` the same through the slots (`whole`);
* longer data, if all tensors are shared, is divided among the ranks: each reduces its part of all tensors and writes
  the result into all of them (`combine_shared`);
* otherwise it goes through the slots in chunks (`in_chunks`). Of chunk `c` each rank

  1. copies the parts of the other ranks into its slot; `ready` = c + 1 (`copy_in`);
  2. when `ready` > c everywhere, reduces its own part from the slots of the others and its own tensor, in rank order,
     into its tensor and back into these slots; `reduced` = c + 1 (`combine_own`);
  3. when `reduced` > c everywhere, copies the other parts from its slot into its tensor (`copy_out`).

  Two chunks are in progress, each in a slot of its own.

The result is written to the slots of the operands, so that each cache line is transferred twice: once with the operand
and once with the result. If the caches are bypassed, a rank writes its result to its own slot instead and sets `kept`
before it publishes `reduced`.

Memory order: `ready` is published after the slot is written and acquired before it is read in step 2; `reduced` (and
`kept` before it) after the results are written, and acquired before step 3. A slot is written again for chunk `c + 2`
after step 3 of chunk `c`; see docs/design/shared-memory.md.
"""

from __future__ import annotations

from ..compiler.compilation import inner, kernel
from ..memory_layout import IN_CHUNKS, IN_SHARED_TENSORS, IN_WHOLE_SLOTS, PAYLOAD_BYTES, Block
from .access import (
    block_of,
    copy_from_slot,
    copy_to_payload,
    group_of,
    is_in_slot,
    payload_of,
    peer_at,
    set_counter,
    slot_of,
)
from .arrival import arrive, begin, end_reads, have_all, leave, set_algorithm, wait_all
from .copying import begin_measuring, copy_into_slot, end_measuring, note_chunk, note_put, note_time, publish
from .intrinsics import now, reduce
from .kernel_sets import ENABLE_CHECKS
from .peer_memory import announce_memory, find_shared, num_shared, shared_tensor_of
from .records import GroupRecord, KernelCall, TensorRecord

_LINE_BYTES = 64
_MAX_IN_PROGRESS = 2  # chunks, each in a slot of its own
_BLOCK_BYTES = 16 << 10  # reduced, then copied while it is in the first-level cache
_FRAGMENT_BYTES = 4 << 10  # for shorter tensors on average, the loop over tensors affects the pace


@inner
def part_begin(num_bytes, size, rank):
    """Return the offset of the part of a rank, in whole cache lines; for rank `size` the end."""
    lines = (num_bytes + _LINE_BYTES - 1) // _LINE_BYTES
    return min(lines * rank // size * _LINE_BYTES, num_bytes)


@inner
def chunk_part_begin(group: GroupRecord, rank, num_bytes):
    """Return `part_begin` within a chunk; the last chunk, which is shorter, is divided at the same offsets.

    Other ranks may still read this rank's part of the chunk before last in the slot, so no other part may overlap it.
    """
    return min(part_begin(group.chunk_bytes, group.size, rank), num_bytes)


# --- reducing ---------------------------------------------------------------------------------------------------


@inner
def set_operand(group: GroupRecord, rank, address):
    """Store the address of a rank's operand."""
    group.operands[rank] = address
    return 0


@inner
def combine(call: KernelCall, out, num_bytes):
    """Reduce the operands into `out`."""
    group = group_of(call)
    group.out[0] = out
    operands, numel = group.operands, num_bytes // call.item_bytes
    reduce(call.reducer, group.out, 1, operands, group.size, numel)
    return 0


@inner
def combine_into_all(call: KernelCall, num_bytes):
    """Reduce the operands, and write the result over each of them."""
    group = group_of(call)
    operands, size = group.operands, group.size
    reduce(call.reducer, operands, size, operands, size, num_bytes // call.item_bytes)
    return 0


@inner
def combine_into_slot(call: KernelCall, out, also, num_bytes):
    """Reduce the operands into `out`, and copy the result into a slot while it is in the first-level cache."""
    group = group_of(call)
    done = 0
    while done < num_bytes:
        block = min(_BLOCK_BYTES, num_bytes - done)
        combine(call, out + done, block)
        copy_into_slot(group, also + done, out + done, block)
        for rank in range(group.size):
            set_operand(group, rank, group.operands[rank] + block)
        done += block
    return 0


# --- the stream of tensors ----------------------------------------------------------------------------------------


@inner
def tensor_at(group: GroupRecord, offset):
    """Return the index of the last tensor that begins at this offset of the stream or before it."""
    low, high = 0, group.num_tensors - 1
    while low < high:
        middle = (low + high + 1) // 2
        if group.tensors[middle].begin <= offset:
            low = middle
        else:
            high = middle - 1
    return low


@inner
def overlap(group: GroupRecord, index, begin, end):
    """Intersect a tensor with a range of the stream: first offset, its address, and the length, 0 in a gap."""
    tensor = group.tensors[index]
    tensor_begin = tensor.begin
    first = max(tensor_begin, begin)
    length = min(tensor_begin + tensor.num_bytes, end) - first
    return first, tensor.address + first - tensor_begin, max(length, 0)


@inner
def has_more(group: GroupRecord, index, end):
    """Return whether there is a tensor of this index that begins before the end of a range."""
    is_there = index < group.num_tensors
    return is_there and group.tensors[index].begin < end


@inner
def put_range(group: GroupRecord, target, begin, end):
    """Copy a range of the stream into a slot."""
    index = tensor_at(group, begin)
    while begin < end and has_more(group, index, end):
        first, address, length = overlap(group, index, begin, end)
        copy_into_slot(group, target + first - begin, address, length)
        index += 1
    return 0


@inner
def combine_range(call: KernelCall, chunk, base, begin, end, publishes):
    """Reduce a range of a chunk that begins at offset `base` of the stream; with `publishes` also into the slots."""
    group = group_of(call)
    rank, size, root = group.rank, group.size, call.root
    index = tensor_at(group, base + begin)
    while begin < end and has_more(group, index, base + end):
        first, address, length = overlap(group, index, base + begin, base + end)
        if ENABLE_CHECKS and not is_in_slot(group, slot_of(group, size - 1, chunk) + first - base, length):
            return 0
        for other in range(size):
            set_operand(group, other, slot_of(group, other, chunk) + first - base)
        set_operand(group, rank, address)
        if root >= 0:
            combine(call, group.operands[root], length)
        elif not publishes:
            combine(call, address, length)
        elif group.cache_bypass != 0:
            combine_into_slot(call, address, slot_of(group, rank, chunk) + first - base, length)
        else:
            combine_into_all(call, length)
        index += 1
    return 0


# --- the steps of a chunk -----------------------------------------------------------------------------------------


@inner
def copy_in(group: GroupRecord, chunk, base, num_bytes):
    """Step 1: copy the other ranks' parts of a chunk into this rank's slot."""
    rank = group.rank
    target = slot_of(group, rank, chunk)
    begin, end = chunk_part_begin(group, rank, num_bytes), chunk_part_begin(group, rank + 1, num_bytes)
    since = now()
    put_range(group, target, base, base + begin)
    put_range(group, target + end, base + end, base + num_bytes)
    note_put(group, chunk, since, begin + num_bytes - end)
    note_time(group, chunk, since)
    publish(group, Block.ready, chunk + 1)
    return 0


@inner
def combine_own(call: KernelCall, chunk, base, num_bytes):
    """Step 2: reduce this rank's part of a chunk, into the slots of the others or into its own."""
    group = group_of(call)
    rank = group.rank
    begin, end = chunk_part_begin(group, rank, num_bytes), chunk_part_begin(group, rank + 1, num_bytes)
    since = now()
    combine_range(call, chunk, base, begin, end, True)
    note_time(group, chunk, since)
    block_of(group, rank).kept[chunk & 1] = call.root < 0 and group.cache_bypass != 0
    publish(group, Block.reduced, chunk + 1)
    return 0


@inner
def copy_out(call: KernelCall, chunk, base, num_bytes):
    """Step 3: copy the parts that the others have reduced into this rank's tensors."""
    group = group_of(call)
    rank, size, root = group.rank, group.size, call.root
    if root >= 0 and root != rank:
        return 0
    for shift in range(1, size):
        other = peer_at(rank, size, shift)
        begin, end = chunk_part_begin(group, other, num_bytes), chunk_part_begin(group, other + 1, num_bytes)
        owner = other if block_of(group, other).kept[chunk & 1] else rank
        source, since = slot_of(group, owner, chunk), now()
        index = tensor_at(group, base + begin)
        while begin < end and has_more(group, index, base + end):
            first, address, length = overlap(group, index, base + begin, base + end)
            copy_from_slot(group, address, source + first - base, length)
            index += 1
        note_time(group, chunk, since)
    return 0


# --- routes -------------------------------------------------------------------------------------------------------


@inner
def in_payload(call: KernelCall, seq, signature, address, num_bytes):
    """Reduce a tensor that is short enough for the payload of the ring entry."""
    group = group_of(call)
    rank, size, root = group.rank, group.size, call.root
    copy_to_payload(group, seq, 0, address, num_bytes)
    status = arrive(group, seq, signature)
    if status == 0 and (root < 0 or root == rank):
        for other in range(size):
            set_operand(group, other, payload_of(group, other, seq))
        combine(call, address, num_bytes)
    return status


@inner
def whole(call: KernelCall, seq, signature, num_bytes):
    """Reduce tensors that each rank copies into its slot as a whole."""
    group = group_of(call)
    rank, root, chunk = group.rank, call.root, group.chunks
    group.cache_bypass, group.call_chunks = 0, 1
    put_range(group, slot_of(group, rank, chunk), 0, num_bytes)
    set_counter(group, Block.ready, chunk + 1)
    status = arrive(group, seq, signature)
    if status != 0:
        return status
    set_algorithm(group, IN_WHOLE_SLOTS)
    if root < 0 or root == rank:
        combine_range(call, chunk, 0, 0, num_bytes, False)
    set_counter(group, Block.reduced, chunk + 1)
    group.chunks = chunk + 1
    return 0


@inner
def combine_shared(call: KernelCall, address, num_bytes):
    """Reduce this rank's part of the shared tensors, and write it to all ranks that receive the result."""
    group = group_of(call)
    rank, size, root = group.rank, group.size, call.root
    begin, end = part_begin(num_bytes, size, rank), part_begin(num_bytes, size, rank + 1)
    set_algorithm(group, IN_SHARED_TENSORS)
    for other in range(size):
        set_operand(group, other, shared_tensor_of(group, other) + begin)
    if root < 0:
        combine_into_all(call, end - begin)
    else:
        combine(call, group.operands[root], end - begin)
    return end_reads(group)


@inner
def in_chunks(call: KernelCall, num_bytes, num_put):
    """Reduce through the slots, which already contain `num_put` chunks (0 or 1).

    Each iteration runs a possible step, of the earliest chunk first, so that a rank that shares its core waits as late
    as possible.
    """
    group = group_of(call)
    base, chunk_bytes = group.chunks, group.chunk_bytes
    num_chunks = (num_bytes + chunk_bytes - 1) // chunk_bytes
    set_algorithm(group, IN_CHUNKS)
    num_combined, num_out = 0, 0
    while num_out < num_chunks:
        # When all ranks have combined the last chunk, all have copied out the earlier ones: the next call may write its
        # slot.
        is_next = num_combined < num_put and (num_combined + 1 < num_chunks or num_out == num_combined)
        if num_combined > num_out and have_all(group, Block.reduced, base + num_out + 1):
            length = min(chunk_bytes, num_bytes - num_out * chunk_bytes)
            copy_out(call, base + num_out, num_out * chunk_bytes, length)
            note_chunk(group, base + num_out, length)
            num_out += 1
        elif is_next and have_all(group, Block.ready, base + num_combined + 1):
            offset = num_combined * chunk_bytes
            combine_own(call, base + num_combined, offset, min(chunk_bytes, num_bytes - offset))
            num_combined += 1
        elif num_put < min(num_chunks, num_out + _MAX_IN_PROGRESS):
            offset = num_put * chunk_bytes
            copy_in(group, base + num_put, offset, min(chunk_bytes, num_bytes - offset))
            num_put += 1
        else:
            counter = Block.reduced if num_combined > num_out else Block.ready
            status = wait_all(group, counter, base + num_out + 1)
            if status != 0:
                return status
    end_measuring(group)
    group.chunks = base + num_chunks
    return 0


@inner
def divide(group: GroupRecord, num_bytes):
    """Choose the chunks of a call: equal ones, so that the last one is not much shorter."""
    most = min(group.slot_bytes, group.max_chunk_bytes)
    num_chunks = (num_bytes + most - 1) // most
    chunk_bytes = ((num_bytes + num_chunks - 1) // num_chunks + _LINE_BYTES - 1) // _LINE_BYTES * _LINE_BYTES
    group.chunk_bytes = chunk_bytes
    begin_measuring(group, num_chunks, False)
    return 0


@inner
def divided(call: KernelCall, seq, signature, address, num_bytes):
    """Reduce a tensor that is too long to be reduced by every rank."""
    group = group_of(call)
    divide(group, num_bytes)
    is_shared = announce_memory(group, seq, address, num_bytes)
    if not is_shared:
        put_first(group, num_bytes)
    status = arrive(group, seq, signature)
    if status != 0:
        return status
    if num_shared(group, seq) < group.size:
        return in_chunks(call, num_bytes, 0 if is_shared else 1)
    status = find_shared(group, seq, address)
    return status if status != 0 else combine_shared(call, address, num_bytes)


@inner
def list_divided(call: KernelCall, seq, signature, num_tensors, num_bytes):
    """Reduce tensors that are too long together to be reduced by every rank."""
    group = group_of(call)
    divide(group, num_bytes)
    group.fragmented = num_bytes < num_tensors * _FRAGMENT_BYTES
    put_first(group, num_bytes)
    status = arrive(group, seq, signature)
    return status if status != 0 else in_chunks(call, num_bytes, 1)


@inner
def put_first(group: GroupRecord, num_bytes):
    """Copy the first chunk into the slot."""
    copy_in(group, group.chunks, 0, min(group.chunk_bytes, num_bytes))
    return 0


# --- kernels ------------------------------------------------------------------------------------------------------


@kernel
def allreduce(call: KernelCall, seq, signature, address, numel):
    """Reduce one tensor in place, on all ranks or on the root of the call."""
    group = group_of(call)
    num_bytes = numel * call.item_bytes
    status = begin(group, seq)
    if status != 0:
        return status
    if num_bytes <= PAYLOAD_BYTES:
        return leave(group, seq, in_payload(call, seq, signature, address, num_bytes))
    tensor = group.single_tensor
    tensor.begin, tensor.address, tensor.num_bytes = 0, address, num_bytes
    group.tensors, group.num_tensors = tensor, 1
    if num_bytes <= group.whole_bytes:
        return leave(group, seq, whole(call, seq, signature, num_bytes))
    return leave(group, seq, divided(call, seq, signature, address, num_bytes))


@kernel
def allreduce_list(call: KernelCall, seq, signature, tensors: TensorRecord, num_tensors, num_bytes):
    """Reduce a list of tensors in place, given by their tensor records; `num_bytes` is the length of the stream."""
    group = group_of(call)
    status = begin(group, seq)
    if status != 0:
        return status
    group.tensors, group.num_tensors = tensors, num_tensors
    if num_bytes <= group.whole_bytes:
        return leave(group, seq, whole(call, seq, signature, num_bytes))
    return leave(group, seq, list_divided(call, seq, signature, num_tensors, num_bytes))
