"""Collectives of torch.distributed over torchmpi, against readable references; and calls with invalid arguments."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import contract, torch_rig
from helpers.outcomes import error_of
from helpers.torch_rig import CALLS, LAYOUTS, MODES, NEEDS_ROWS, REDUCING, Setting, is_asynchronous, ops_of, wrong
from mpi4py import MPI

from torchmpi.errors import ArgumentError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.ranks(1, 3),
    pytest.mark.usefixtures("default_group"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*will be deprecated"),
]


def play(agree, name: str, setting: Setting) -> None:
    work, pairs = CALLS[name](setting)
    if setting.asynchronous:
        work.wait()
    else:
        agree(work is None, f"{name} called synchronously returned {work!r}")
    for problem in wrong(name, setting, pairs):
        agree(False, problem)


@pytest.mark.parametrize("name", CALLS)
def test_every_dtype_operation_shape_and_layout(agree, name):
    """Every dtype with every operation, on some of the shapes; layouts and modes alternate."""
    turns = itertools.cycle(itertools.product(LAYOUTS, MODES))
    pairs = [(dtype, op) for dtype in contract.MOVABLE for op in (ops_of(dtype) if name in REDUCING else ["sum"])]
    if name == "barrier":
        pairs = pairs[:1]
    cases = list(itertools.product(contract.SHAPES, pairs))
    # Each pair on every other shape, or on two shapes where there are many pairs.
    assert len(pairs) % 2
    cases = cases[:: 4 if name in REDUCING else 2]
    for number, ((shape, (dtype, op)), (layout, mode)) in enumerate(zip(cases, turns, strict=False)):
        if (not shape and name in NEEDS_ROWS) or (dtype.is_complex and "reduce_scatter" in name):
            continue  # torch does not support complex tensors here
        play(agree, name, Setting(None, dtype, shape, number, op, layout, is_asynchronous(mode, dist.get_rank())))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "barrier"])
def test_long_tensors(agree, name):
    for mode, dtype, layout in zip(MODES, (torch.float32, torch.bfloat16, torch.int32), LAYOUTS, strict=False):
        setting = Setting(None, dtype, (700_003 // dtype.itemsize,), 5, "sum", layout)
        play(agree, name, setting._replace(asynchronous=is_asynchronous(mode, dist.get_rank())))


@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("numel", (5, 3000, 300_000))
def test_lists_and_rows_that_share_memory(agree, numel, asynchronous):
    """As in FSDP: a rank's part is a view of the whole that is gathered, or reduced."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = slice(rank * numel, (rank + 1) * numel)
    expected = torch.arange(1.0, size + 1).repeat_interleave(numel)
    for number in range(3):  # the first one is made through Python
        whole = torch.zeros(size * numel)
        whole[own] = rank + 1.0
        gathered, listed, summed = whole.clone(), whole.clone(), torch.arange(size * numel) % 7.0 + rank
        works = [
            torch_rig.all_gather_single(gathered, gathered[own], async_op=asynchronous),
            dist.all_gather(list(listed.chunk(size)), listed[own], async_op=asynchronous),
            torch_rig.reduce_scatter_single(summed[own], summed, async_op=asynchronous),
        ]
        for work in works:
            if work is not None:
                work.wait()
        agree.equal(gathered, expected, f"call {number}")
        agree.equal(listed, expected, f"call {number} with a list")
        total = (torch.arange(size * numel) % 7.0) * size + sum(range(size))
        agree.equal(summed[own], total[own], f"call {number}")


@pytest.mark.parametrize("numel", (1, 3000))
def test_a_rank_with_equal_parts_may_omit_their_sizes(agree, numel):
    """Its call is that of an alltoall, also of machine code, and the others exchange parts of any length."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numels = [[numel * (2 if 0 in (i, j) else 1 + (i + j) % 3) for j in range(size)] for i in range(size)]
    sent, expected = numels[rank], [row[rank] for row in numels]
    given = torch.cat([torch.full((each,), rank + 100.0 * to) for to, each in enumerate(sent)])
    right = torch.cat([torch.full((each,), other + 100.0 * rank) for other, each in enumerate(expected)])
    for number, mode in enumerate(MODES * 2):
        found = torch.zeros(sum(expected))
        even = torch.full((size,), float(rank))
        dist.all_to_all_single(even, even.clone())  # equal parts on all ranks, so that machine code has the call
        sizes = (None, None) if rank == 0 else (expected, sent)
        work = dist.all_to_all_single(found, given, *sizes, async_op=is_asynchronous(mode, rank))
        if work is not None:
            work.wait()
        agree.equal(found, right, f"call {number}")
        agree.equal(even, torch.arange(float(size)))


@pytest.mark.parametrize("asynchronous", (False, True))
def test_premul_sum(agree, asynchronous):
    rank, size = dist.get_rank(), dist.get_world_size()
    op = dist._make_nccl_premul_sum(0.5)
    total = 0.5 * sum(range(1, size + 1))
    everywhere, on_root = torch.full((5,), rank + 1.0), torch.full((5,), rank + 1.0)
    part, rows = torch.empty(2), torch.full((2 * size,), rank + 1.0)
    works = [
        dist.all_reduce(everywhere, op, async_op=asynchronous),
        dist.reduce(on_root, size - 1, op, async_op=asynchronous),
        torch_rig.reduce_scatter_single(part, rows, op, async_op=asynchronous),
    ]
    for work in works:
        if work is not None:
            work.wait()
    agree.equal(everywhere, torch.full((5,), total))
    agree.equal(on_root, torch.full((5,), total if rank == size - 1 else rank + 1.0))
    agree.equal(part, torch.full((2,), total))
    agree.equal(rows, torch.full((2 * size,), rank + 1.0), "the input of reduce_scatter")


@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64))
def test_sums_of_sparse_tensors(agree, dtype, asynchronous):
    """A sparse tensor with a number of entries that depends on the rank and may be 0; indices may be repeated."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def entries(other: int) -> torch.Tensor:
        places = torch.tensor([[(3 * other + number) % 7 for number in range(3 * other)]], dtype=torch.int64)
        values = contract.values((3 * other, 2), dtype, other)
        places, values = torch.cat([places, places[:, :1]], 1), torch.cat([values, values[:1]])
        return torch.sparse_coo_tensor(places, values, (7, 2), check_invariants=True)

    tensor = entries(rank)
    work = dist.all_reduce(tensor, async_op=asynchronous)
    if work is not None:
        work.wait()
        new = [memory.data_ptr() for memory in (tensor._indices(), tensor._values())]
        agree.equal([memory.data_ptr() for memory in work._handle.wait()], new, "memory whose use wait() records")
    expected = sum((entries(other).to_dense() for other in range(1, size)), entries(0).to_dense())
    agree(tensor.is_sparse and tensor.dtype is dtype, f"{tensor}")
    agree.close(tensor.to_dense(), expected)


def test_sums_of_complex_sparse_tensors_and_in_inference_mode(agree):
    """torch passes the real numbers of a complex one in a sparse copy."""
    size, tensor = dist.get_world_size(), (torch.eye(2) * (1 + 2j)).to_sparse()
    dist.all_reduce(tensor)
    agree.equal(tensor.to_dense(), torch.eye(2) * (1 + 2j) * size)
    with torch.inference_mode():
        tensor = torch.eye(2).to_sparse()
        dist.all_reduce(tensor, async_op=True).wait()
        agree.equal(tensor.to_dense(), torch.eye(2) * size)


def test_versions_of_written_tensors_increase(agree):
    leaf = torch.ones(3, requires_grad=True)
    for asynchronous in (False, True):
        saved = leaf.exp()
        loss = saved.exp().sum()  # the backward of exp needs its own result
        work = dist.all_reduce(saved, async_op=asynchronous)
        if work is not None:
            work.wait()
        agree("modified by an inplace operation" in error_of((saved * 1).sum().backward), "a stale value was used")
        del loss


# --- objects ---------------------------------------------------------------------------------------------------------


def test_averages_of_integers_are_rounded_towards_zero(agree):
    """As by NCCL. On rank 0 the values are one further from zero, which does not fill a step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    average = torch.tensor([-7, -1, 0, 1, 7])
    own = average + (average.sign() if rank == 0 and size > 1 else 0)
    for dtype in (torch.int8, torch.int32, torch.int64):
        for asynchronous in (False, True):
            options = {"op": dist.ReduceOp.AVG, "async_op": asynchronous}
            tensor, other, reduced = (own.to(dtype, copy=True) for _ in range(3))
            tensors, scattered, listed = (
                [other[2:], other[:2]],
                torch.zeros(5, dtype=dtype),
                torch.zeros(5, dtype=dtype),
            )
            calls = [dist.all_reduce(tensor, **options), dist.reduce(reduced, size - 1, **options)]
            calls.append(dist.all_reduce_coalesced(tensors, **options))
            calls.append(torch_rig.reduce_scatter_single(scattered, own.to(dtype).repeat(size), **options))
            calls.append(dist.reduce_scatter(listed, [own.to(dtype)] * size, **options))
            for work in calls:
                if work is not None:
                    work.wait()
            for found in (tensor, other, scattered, listed, *([reduced] if rank == size - 1 else [])):
                agree.equal(found, average.to(dtype))


def test_lists_of_several_tensors_are_those_of_gloo(agree):
    """The methods of a group accept several tensors of a rank, of which gloo is the reference."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = dist.group.WORLD, dist.new_group(backend="gloo")

    def values(number: int) -> list[torch.Tensor]:
        return [torch.arange(1, 7).view(3, 2).t() + (rank * number + index) % 3 for index in range(number)]

    for number in (1, 2, 3):
        for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND"):
            found, expected = values(number), values(number)
            for group, tensors in zip(groups, (found, expected), strict=True):
                options = dist.AllreduceOptions()
                options.reduceOp = getattr(dist.ReduceOp, op)
                group.allreduce(tensors, options).wait()
            for tensor, reference in zip(found, expected, strict=True):
                agree.equal(tensor, reference, f"{op} of {number}")
        for root, chosen in itertools.product(range(size), range(number)):
            found, expected = values(number), values(number)
            for group, tensors in zip(groups, (found, expected), strict=True):
                group.broadcast(tensors, root_tensor(chosen, root)).wait()
            agree.equal(torch.stack(found), torch.stack(expected), f"broadcast of {chosen} of {number}")
        room = torch.zeros(2, number, number * size, 2, 3, dtype=torch.int64)
        for group, outputs in zip(groups, room, strict=True):
            lists = [list(rows) for rows in outputs]
            future = group.allgather(lists, [value.contiguous() for value in values(number)]).get_future()
            future.wait()
            agree.equal(len(future.value()), number if number > 1 else size, "the value of the future")
        agree.equal(room[0], room[1], f"allgather of {number}")


def test_lists_of_several_sparse_and_scaled_tensors(agree):
    group, size = dist.group.WORLD, dist.get_world_size()
    eyes = [torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()]
    group.allreduce(eyes).wait()
    for tensor in eyes:
        agree.equal(tensor.to_dense(), (torch.eye(3) + 1) * size, "sparse")
    for op, factor in ((dist._make_nccl_premul_sum(0.5), 0.5), (dist.ReduceOp.AVG, 1 / size)):
        tensors = [torch.ones(3), torch.ones(3)]
        dist.group.WORLD.allreduce(tensors, op=op).wait()
        agree.equal(torch.stack(tensors), torch.full((2, 3), 2 * size * factor), str(op))


# --- refusals --------------------------------------------------------------------------------------------------------


def root_tensor(number: int, root: int = 0) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootTensor, options.rootRank = number, root
    return options


ONES, ROWS = torch.ones(3), torch.ones(SIZE, 2)
REFUSED = {
    "sparse": (lambda: dist.broadcast(ONES.to_sparse(), 0), "to_dense"),
    "maximum of sparse tensors": (lambda: dist.all_reduce(ONES.to_sparse(), dist.ReduceOp.MAX), "summed"),
    "average of sparse integers": (lambda: dist.all_reduce(ONES.int().to_sparse(), dist.ReduceOp.AVG), "divide"),
    "compressed": (lambda: dist.all_reduce(torch.ones(2, 2).to_sparse_csr()), "to_dense"),
    "nested": (lambda: dist.all_reduce(torch.nested.nested_tensor([ONES, ONES[:2]])), "unbind"),
    "meta": (lambda: dist.broadcast(ONES.to("meta"), 0), "meta"),
    "meta gathered": (lambda: dist.all_gather([ONES.to("meta")] * SIZE, ONES.to("meta")), "meta"),
    "meta scattered": (lambda: torch_rig.reduce_scatter_single(ONES[:1], ONES[:1].to("meta").expand(SIZE)), "meta"),
    "expanded": (lambda: dist.all_reduce(torch.ones(1).expand(3)), "expanded"),
    "average of integers that torch cannot divide": (
        lambda: dist.all_reduce(ONES.to(torch.uint16), dist.ReduceOp.AVG),
        "divide",
    ),
    "bits of floats": (lambda: dist.all_reduce(ONES, dist.ReduceOp.BAND), "integers"),
    "sum of 8 bit floats": (lambda: dist.all_reduce(ONES.to(torch.float8_e5m2)), "bfloat16"),
    "factor for integers": (lambda: dist.all_reduce(ONES.int(), dist._make_nccl_premul_sum(2.0)), "floating"),
    "tensors that differ": (lambda: dist.group.WORLD.allreduce([ONES, ONES[:2]]), "2 tensors"),
    "two to reduce on a root": (lambda: dist.group.WORLD.reduce([ONES, ONES], 0), "2 tensors"),
    "two to gather into lists too short": (lambda: dist.group.WORLD.allgather([[ONES]] * 2, [ONES] * 2), "2 output"),
    "two of which one is expanded": (lambda: dist.group.WORLD.allreduce([ONES, ONES[:1].expand(3)]), "expanded"),
    "root among two": (lambda: dist.group.WORLD.broadcast([ONES, ONES], root_tensor(2)), "tensor 2 of 2"),
    "no tensor": (lambda: dist.group.WORLD.allreduce([]), "0 tensors"),
    "list too short": (lambda: dist.all_gather([ONES] * (SIZE - 1), ONES), f"{SIZE - 1} output"),
    "list too long": (lambda: dist.all_gather([ONES] * 5000, ONES), "5000 output"),
    "nothing to exchange": (lambda: dist.all_to_all([], []), "0 input"),
    "two dtypes to exchange": (lambda: dist.group.WORLD.alltoall([ONES] * SIZE, [ONES.int()] * SIZE), "dtypes"),
    "nothing to reduce": (lambda: dist.reduce_scatter(ONES, []), "0 input"),
    "output too long": (lambda: torch_rig.all_gather_single(torch.ones(3 * SIZE + 1), ONES), "times as long"),
    "input too long": (lambda: torch_rig.reduce_scatter_single(ONES, torch.ones(3 * SIZE + 1)), "times as long"),
    "rows that do not add up": (lambda: dist.all_to_all_single(ROWS, ROWS, [7] * SIZE, [1] * SIZE), "add up"),
    "negative rows": (lambda: dist.all_to_all_single(ROWS, ROWS, [-1] * SIZE, [1] * SIZE), "add up"),
    "sizes for too few": (lambda: dist.all_to_all_single(ROWS, ROWS, [SIZE], [1] * SIZE), "add up")
    if SIZE > 1
    else (lambda: dist.all_to_all_single(ROWS, ROWS, [1, 0], [1]), "add up"),
    "no such root": (lambda: dist.broadcast(ONES, SIZE), f"root={SIZE}"),
    "negative root": (lambda: dist.broadcast(ONES, group_src=-1), "root=-1"),
    "root of the group too large": (lambda: dist.group.WORLD.broadcast([ONES], SIZE), f"root={SIZE}"),
    "no root to reduce on": (lambda: dist.reduce(ONES, group_dst=SIZE), f"root={SIZE}"),
    "no root to gather on": (lambda: dist.gather(ONES, group_dst=SIZE), f"root={SIZE}"),
    "no root to scatter from": (lambda: dist.scatter(ONES, group_src=SIZE), f"root={SIZE}"),
}
"""By name: an invalid call, and a part of the error message."""


@pytest.mark.filterwarnings("ignore:.*nested", "ignore:.*CSR")
@pytest.mark.parametrize(("call", "remedy"), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_is_sent(agree, call, remedy):
    before = dist.group.WORLD._get_sequence_number_for_group()
    problem = error_of(call)
    agree(remedy in problem, problem)
    agree.equal(dist.group.WORLD._get_sequence_number_for_group(), before, "it communicated")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    agree.equal(tensor, torch.full((2,), float(dist.get_world_size())), "the next call")


REFUSED_AFTER_OTHERS = {
    "rows too long": (
        lambda more, later: torch_rig.all_gather_single(torch.ones((3 + more) * SIZE), ONES, async_op=later),
        "times as long",
    ),
    "output too short": (
        lambda more, later: dist.reduce_scatter(torch.ones(3 - more), [ONES] * SIZE, async_op=later),
        "same length",
    ),
    "rows that cannot be divided": (
        lambda more, later: dist.all_to_all_single(*torch.ones(2, SIZE + more, SIZE + 1 - more), async_op=later),
        "add up",
    ),
    "a part for itself too long": (
        lambda more, later: dist.all_to_all(
            [torch.ones(1 + (RANK + rank) % 2 + more * (rank == RANK)) for rank in range(SIZE)],
            [torch.ones(1 + (RANK + rank) % 2) for rank in range(SIZE)],
            async_op=later,
        ),
        "Make the two equal",
    ),
}
"""By name: a call that is invalid if its tensors are longer or shorter by one element, and a part of the message."""


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("later", (False, True))
@pytest.mark.parametrize("name", REFUSED_AFTER_OTHERS)
def test_a_call_is_refused_though_machine_code_makes_others_like_it(agree, name, later):
    call, remedy = REFUSED_AFTER_OTHERS[name]
    for _ in range(3):
        work = call(0, later)
        agree(work is None or work.wait())
    before = dist.group.WORLD._get_sequence_number_for_group()
    agree.raises(ArgumentError, lambda: call(1, later), remedy)
    agree.equal(dist.group.WORLD._get_sequence_number_for_group(), before, "it communicated")


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_tensors_in_read_only_memory_are_refused(agree, tmp_path):
    """Where the call would write to them. Regression: SIGSEGV."""
    rank, size = dist.get_rank(), dist.get_world_size()
    np.ones(300 * size).tofile(tmp_path / "values")
    mapped = torch.from_numpy(np.memmap(tmp_path / "values", mode="r", dtype=np.float64))
    row, rows = torch.ones(mapped.numel() // size).to(mapped), torch.ones(mapped.numel() * size).to(mapped)
    group = dist.new_group()  # no call in it runs in machine code yet
    calls = {
        "all_reduce": lambda: dist.all_reduce(mapped, group=group),
        "all_reduce, asynchronous": lambda: dist.all_reduce(mapped, group=group, async_op=True),
        "all_gather": lambda: dist.all_gather([mapped] * size, torch.ones_like(mapped), group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(mapped, row, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(mapped, rows, group=group),
        "recv": lambda: dist.recv(mapped, (rank + 1) % size, group=group),
    }
    for name, call in calls.items():
        if size > 1 or name != "recv":
            agree.raises(ArgumentError, call, "memory that cannot be written", f"rank {rank}")
    for call, given in ((torch_rig.all_gather_single, row), (torch_rig.reduce_scatter_single, rows)):
        for _ in range(2):  # after which machine code makes calls like these
            call(torch.ones_like(mapped), given, group=group)
        refused = partial(call, mapped, given, group=group)
        agree.raises(ArgumentError, refused, "memory that cannot be written")
    dist.all_reduce(torch.ones_like(mapped), group=group)
    agree.raises(ArgumentError, calls["all_reduce, asynchronous"], "memory that cannot be written")
    for root in range(size):  # which only reads
        given = mapped if rank == root else torch.zeros_like(mapped)
        dist.broadcast(given, root, group=group)
        agree.equal(given, torch.ones_like(given), f"broadcast of rank {root}")
