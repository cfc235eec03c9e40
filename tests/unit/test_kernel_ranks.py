"""To a user of one host: the compiled collectives among 2, 3, 17 and 70 ranks equal NumPy."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from helpers.kernel_ranks import Rank, Ranks

from torchmpi.communicators import call_log
from torchmpi.errors import MismatchError
from torchmpi.shared_memory.memory_layout import RING_LENGTH
from torchmpi.tensors import dtypes, partition

SIZES = (2, 3, 17, 70)
# In an entry of the ring, in a slot as a whole, in chunks with an incomplete last one.
NUMELS = (1, 3, 700, 5003)


@pytest.fixture(scope="module", params=[(size, reads) for size in SIZES for reads in (False, True)], ids=str)
def ranks(request):
    """Ranks that move long tensors through slots, or read those of each other."""
    size, reads_directly = request.param
    made = Ranks(size, reads_directly=reads_directly)
    yield made
    made.close()


def size_of(ranks: Ranks) -> int:
    return len(ranks.members)


def values(ranks: Ranks, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Different values for each rank and call; sums of floats depend on the order of their terms."""
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).mul(100).to(dtype) for _ in ranks.members]


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def arrays(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in tensors]


def check(results: Sequence[object], right: Callable[[int], np.ndarray]) -> None:
    """Compare the result of each rank, which may be an exception, with what is right there."""
    for rank, result in enumerate(results):
        assert isinstance(result, torch.Tensor), f"rank {rank}: {result!r}"
        np.testing.assert_array_equal(result.numpy(), right(rank), f"rank {rank}")


@pytest.mark.parametrize(
    ("dtype", "op", "combine"),
    [(torch.float32, "sum", np.add), (torch.int32, "max", np.maximum), (torch.float64, "prod", np.multiply)],
    ids=("float32 sum", "int32 max", "float64 prod"),
)
def test_allreduce(ranks, dtype, op, combine):
    """In the order of the ranks, to the last bit."""
    for numel in NUMELS:
        parts = values(ranks, numel, dtype)
        right = functools.reduce(combine, arrays(parts))
        check(ranks.call("allreduce", copies(parts), op=op), lambda rank, right=right: right)


def test_reduce(ranks):
    root = size_of(ranks) - 1
    for numel in NUMELS:
        parts = values(ranks, numel)
        right = functools.reduce(np.add, arrays(parts))
        own = arrays(parts)
        results = ranks.call("reduce", copies(parts), op="sum", root=root)
        check(results, lambda rank, right=right, own=own: right if rank == root else own[rank])


def test_broadcast(ranks):
    for numel in NUMELS:
        for root in {0, size_of(ranks) // 2}:
            parts = values(ranks, numel)
            right = parts[root].numpy()
            check(ranks.call("broadcast", copies(parts), root=root), lambda rank, right=right: right)


def test_allgather(ranks):
    for numel in NUMELS:
        parts = values(ranks, numel)
        right = np.concatenate(arrays(parts))
        check(ranks.call("allgather", parts), lambda rank, right=right: right)


def test_allgather_of_different_lengths(ranks):
    """The lengths are known only when all ranks have arrived."""
    for numel in NUMELS:
        parts = [part[: numel - rank % numel] for rank, part in enumerate(values(ranks, numel))]
        right = np.concatenate(arrays(parts))
        check(ranks.call("allgather", parts), lambda rank, right=right: right)


def part_of(array: np.ndarray, size: int, rank: int) -> np.ndarray:
    first, length = partition.part_of(len(array), size, rank)
    return array[first : first + length]


def test_reduce_scatter(ranks):
    size = size_of(ranks)
    for numel in NUMELS:
        parts = values(ranks, numel)
        right = functools.reduce(np.add, arrays(parts))
        check(ranks.call("reduce_scatter", parts, op="sum"), lambda rank, right=right: part_of(right, size, rank))


def test_allgather_of_a_row_of_the_result(ranks):
    """Also while other ranks read that row, which this one writes again with the same values."""
    size = size_of(ranks)
    for numel in NUMELS:
        parts = values(ranks, numel)
        wholes = [torch.zeros(size * numel) for _ in parts]
        for rank, part in enumerate(parts):
            wholes[rank][rank * numel : (rank + 1) * numel] = part
        rows = [whole.split(numel)[rank] for rank, whole in enumerate(wholes)]
        results = ranks.together(
            lambda member, rows=rows, wholes=wholes: member.call("allgather", rows[member.rank], wholes[member.rank])
        )
        assert [result.data_ptr() for result in results] == [whole.data_ptr() for whole in wholes]
        right = np.concatenate(arrays(parts))
        check(results, lambda _, right=right: right)


def test_allgather_of_a_row_of_the_result_if_another_rank_has_fewer(ranks):
    """So that the rows of the ranks behind it are at other places of the result, which has room for as many."""
    size, numel = size_of(ranks), 5003
    numels = [numel + 2000, numel - 2000, *[numel] * (size - 2)]
    parts, wholes = [], [torch.zeros(size * numel) for _ in numels]
    for rank, (whole, value) in enumerate(zip(wholes, values(ranks, max(numels)), strict=True)):
        begin = min(rank * numel, size * numel - numels[rank])
        parts.append(whole[begin : begin + numels[rank]])
        parts[rank].copy_(value[: numels[rank]])
    right = np.concatenate(arrays(parts))
    found = ranks.together(lambda member: member.call("allgather", parts[member.rank], wholes[member.rank]))
    check(found, lambda _: right)


def test_alltoall(ranks):
    size = size_of(ranks)
    for numel in NUMELS:
        parts = values(ranks, numel)
        check(
            ranks.call("alltoall", parts),
            lambda rank, parts=parts: np.concatenate([part_of(part.numpy(), size, rank) for part in parts]),
        )


def exchanged(member: Rank, sizes: Sequence[Sequence[int]], apart: bool) -> list[torch.Tensor]:
    """Return what a rank receives if rank i sends rank j `sizes[i][j]` elements, all of value i + 100 j."""
    code = call_log.call_code("alltoall", None, dtypes.info(torch.float32).code)
    sent, expected = sizes[member.rank], [row[member.rank] for row in sizes]
    sources = [torch.full((numel,), float(member.rank + 100 * to)) for to, numel in enumerate(sent)]
    parts = [torch.zeros(numel) for numel in expected]
    if not apart:
        sources, parts = list(torch.cat(sources).split(sent)), list(torch.cat(parts).split(expected))
    operation = member.backend.bind(member.group, "exchange_parts", torch.float32, None)
    member.poll_little()
    member.log.enter(code, ())
    try:
        operation.run(sources, parts, 0)
        member.log.leave()
    except BaseException:
        member.log.abandon()
        raise
    return parts


def test_exchanges_of_equal_and_other_parts_meet(ranks):
    """A rank with equal parts makes the call of an alltoall, and learns of the others that theirs are not equal."""
    size = size_of(ranks)
    for numel in (3, 700):
        even = [[numel] * size for _ in range(size)]
        mixed = [[numel if 0 in (i, j) else (i + 2 * j) % 4 for j in range(size)] for i in range(size)]
        for sizes, apart in ((even, ()), (even, (0,)), (even, range(size)), (mixed, ()), (mixed, (size - 1,))):
            found = ranks.together(
                lambda member, sizes=sizes, apart=apart: exchanged(member, sizes, member.rank in apart)
            )
            for rank, parts in enumerate(found):
                assert isinstance(parts, list), f"rank {rank}: {parts!r}"
                for other, part in enumerate(parts):
                    assert part.tolist() == [other + 100.0 * rank] * sizes[other][rank], (rank, other)


@pytest.mark.parametrize("numels", ((3, 5), (0, 4)), ids=str)
def test_all_ranks_refuse_an_exchange_of_which_sizes_differ(ranks, numels):
    """Also if each rank has equal parts, and only the last one others than all."""
    size = size_of(ranks)

    def work(member: Rank) -> list[torch.Tensor]:
        numel = numels[member.rank == size - 1]
        return exchanged(member, [[numel] * size for _ in range(size)], apart=False)

    results = ranks.together(work)
    assert [type(result) for result in results] == [MismatchError] * size, results
    assert any("which has room for" in str(result) for result in results), results


def test_gather_and_scatter(ranks):
    size, root = size_of(ranks), 1
    for numel in NUMELS:
        parts = values(ranks, numel)
        results = ranks.call("gather", parts, root=root)
        right = np.concatenate(arrays(parts))
        check([results[root]], lambda _, right=right: right)
        assert [result for rank, result in enumerate(results) if rank != root] == [None] * (size - 1)
        whole = parts[root].numpy()
        check(ranks.call("scatter", parts, root=root), lambda rank, whole=whole: part_of(whole, size, rank))


def test_no_rank_leaves_a_barrier_before_all_have_entered(ranks):
    """Also when the entries of the ring are used again."""
    size, entered, lock = size_of(ranks), [0], threading.Lock()

    def work(member):
        seen = []
        for _ in range(RING_LENGTH + 3):
            with lock:
                entered[0] += 1
            member.call("barrier")
            seen.append(entered[0])
        return seen

    for seen in ranks.together(work):
        assert isinstance(seen, list), repr(seen)
        assert [number >= (index + 1) * size for index, number in enumerate(seen)] == [True] * len(seen)


def test_calls_of_different_lengths_follow_each_other_without_a_barrier(ranks):
    """A rank that is ahead begins the next call while others still read what it has put into its slots."""
    size, lengths = size_of(ranks), (5003, 3, 700, 1, 2047, 2048, 2049, 5003)

    def work(member):
        calls = ((numel, torch.full((numel,), float(member.rank + numel))) for numel in lengths)
        return [(numel, member.call("allreduce", tensor, op="sum")) for numel, tensor in calls]

    for found in ranks.together(work):
        assert isinstance(found, list), repr(found)
        for numel, tensor in found:
            assert tensor.unique().tolist() == [size * (size - 1) / 2 + size * numel]


def test_all_ranks_refuse_a_call_that_one_makes_differently(ranks, monkeypatch):
    monkeypatch.setattr(call_log, "_STATUS_SECONDS", 0.0)  # there are no watchdogs, which would describe the calls
    size = size_of(ranks)
    odd = size - 1
    results = ranks.together(lambda member: member.call("broadcast", torch.ones(3), root=int(member.rank == odd)))
    assert [type(result) for result in results] == [MismatchError] * size, results
    parts = values(ranks, 700)  # and the next call works
    right = functools.reduce(np.add, arrays(parts))
    check(ranks.call("allreduce", copies(parts), op="sum"), lambda rank: right)
