"""Collectives of torch.distributed over torchmpi, against readable references; and calls with invalid arguments."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchmpi.errors import TorchMPIError

sys.path.insert(0, str(Path(__file__).parent))
import contract
import torch_rig
from torch_rig import CALLS, LAYOUTS, MODES, NEEDS_ROWS, REDUCING, Setting, is_asynchronous, ops_of, wrong

torch_world = torch_rig.torch_world
pytestmark = [
    pytest.mark.usefixtures("torch_world"),
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
    """Every shape with every dtype and operation; layouts and modes alternate, so that all combinations occur."""
    turns = itertools.product(LAYOUTS, MODES)
    pairs = [(dtype, op) for dtype in contract.MOVABLE for op in (ops_of(dtype) if name in REDUCING else ["sum"])]
    if name == "barrier":
        pairs = pairs[:1]
    for number, (shape, (dtype, op)) in enumerate(itertools.product(contract.SHAPES, pairs)):
        if (not shape and name in NEEDS_ROWS) or (dtype.is_complex and "reduce_scatter" in name):
            continue  # torch does not support complex tensors here
        layout, mode = next(turns, (None, None))
        if layout is None:
            turns = itertools.product(LAYOUTS, MODES)
            layout, mode = next(turns)
        play(agree, name, Setting(None, dtype, shape, number, op, layout, is_asynchronous(mode, dist.get_rank())))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "barrier"])
def test_long_tensors(agree, name):
    for mode, dtype, layout in zip(MODES, (torch.float32, torch.bfloat16, torch.int32), LAYOUTS, strict=False):
        setting = Setting(None, dtype, (700_003 // dtype.itemsize,), 5, "sum", layout)
        play(agree, name, setting._replace(asynchronous=is_asynchronous(mode, dist.get_rank())))


def test_lists_and_rows_that_share_memory(agree):
    """As in FSDP: a rank's part is a view of the whole that is gathered, or reduced."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(size * 5)
    whole[rank * 5 : rank * 5 + 5] = rank + 1.0
    gathered = whole.clone()
    torch_rig.all_gather_single(gathered, gathered[rank * 5 : rank * 5 + 5])
    listed = whole.clone()
    dist.all_gather(list(listed.chunk(size)), listed[rank * 5 : rank * 5 + 5])
    summed = torch.arange(size * 5.0) + rank
    torch_rig.reduce_scatter_single(summed[rank * 5 : rank * 5 + 5], summed)
    expected = torch.arange(1.0, size + 1).repeat_interleave(5)
    agree.equal(gathered, expected)
    agree.equal(listed, expected)
    agree.equal(
        summed[rank * 5 : rank * 5 + 5],
        (torch.arange(size * 5.0) * size + sum(range(size)))[rank * 5 : rank * 5 + 5],
    )


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
    expected = sum((entries(other).to_dense() for other in range(1, size)), entries(0).to_dense())
    agree(tensor.is_sparse and tensor.dtype is dtype, f"{tensor}")
    agree.close(tensor.to_dense(), expected)


def test_versions_of_written_tensors_increase(agree):
    leaf = torch.ones(3, requires_grad=True)
    for asynchronous in (False, True):
        saved = leaf.exp()
        loss = saved.exp().sum()  # the backward of exp needs its own result
        work = dist.all_reduce(saved, async_op=asynchronous)
        if work is not None:
            work.wait()
        try:
            (saved * 1).sum().backward()
        except RuntimeError as error:
            agree("modified by an inplace operation" in str(error), str(error))
        else:
            agree(False, f"a stale value went into the gradient, asynchronous={asynchronous}")
        del loss


# --- calls in calls: coalescing, functional collectives, objects -----------------------------------------------------


@pytest.mark.parametrize("asynchronous", (False, True))
def test_coalescing_manager(agree, asynchronous):
    rank, size = dist.get_rank(), dist.get_world_size()
    summed = [torch.full((number + 1,), float(rank)) for number in range(4)]
    gathered = [torch.empty(size * (number + 1)) for number in range(3)]
    scattered = [torch.empty(number + 1) for number in range(3)]
    managers = []
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        for tensor in summed:
            dist.all_reduce(tensor)
    managers.append(manager)
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        for number, tensor in enumerate(gathered):
            torch_rig.all_gather_single(tensor, torch.full((number + 1,), float(rank)))
    managers.append(manager)
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        for number, tensor in enumerate(scattered):
            torch_rig.reduce_scatter_single(tensor, torch.arange(float(size)).repeat_interleave(number + 1))
    managers.append(manager)
    if asynchronous:
        for manager in managers:
            manager.wait()
    for tensor in summed:
        agree.equal(tensor, torch.full_like(tensor, float(sum(range(size)))))
    for number, tensor in enumerate(gathered):
        agree.equal(tensor, torch.arange(float(size)).repeat_interleave(number + 1))
    for number, tensor in enumerate(scattered):
        agree.equal(tensor, torch.full((number + 1,), float(rank * size)))


def test_functional_collectives(agree):
    from torch.distributed import _functional_collectives as functional

    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    total = float(sum(range(size)))
    own = torch.full((size, 2), float(rank))
    results = {
        "all_reduce": (functional.all_reduce(own, "sum", world), torch.full((size, 2), total)),
        "avg": (functional.all_reduce(own, "avg", world), torch.full((size, 2), total / size)),
        "broadcast": (functional.broadcast(own, size - 1, world), torch.full((size, 2), size - 1.0)),
        "all_gather": (
            functional.all_gather_tensor(own, 0, world),
            torch.arange(float(size)).repeat_interleave(2 * size).view(-1, 2),
        ),
        "all_gather along dim 1": (
            functional.all_gather_tensor(own, 1, world),
            torch.arange(float(size)).repeat_interleave(2).expand(size, -1),
        ),
        "reduce_scatter": (functional.reduce_scatter_tensor(own, "sum", 0, world), torch.full((1, 2), total)),
        "all_to_all": (
            functional.all_to_all_single(own, None, None, world),
            torch.arange(float(size)).repeat_interleave(2).view(-1, 2),
        ),
    }
    several = [functional.wait_tensor(each) for each in functional.all_reduce_coalesced([own, own + 1], "sum", world)]
    agree.equal(own, torch.full((size, 2), float(rank)), "the input of functional collectives")
    for name, (actual, expected) in results.items():
        agree.equal(functional.wait_tensor(actual), expected.contiguous(), name)
    agree.equal(several[1], torch.full((size, 2), total + size))


def test_collectives_with_gradients(agree):
    import torch.distributed.nn.functional as differentiable

    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.full((3,), rank + 1.0, requires_grad=True)
    (differentiable.all_reduce(own) * (rank + 1.0)).sum().backward()
    agree.equal(own.grad, torch.full((3,), float(sum(range(1, size + 1)))))


def test_objects(agree):
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {"rank": rank, "text": "x" * 1000 * rank}
    everybody: list = [None] * size
    dist.all_gather_object(everybody, own)
    gathered: list | None = [None] * size if rank == size - 1 else None
    dist.gather_object(own, gathered, dst=size - 1)
    shared = [own, rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    part: list = [None]
    dist.scatter_object_list(part, [("part", number) for number in range(size)] if rank == 0 else None, src=0)
    agree.equal([entry["rank"] for entry in everybody], list(range(size)))
    agree(gathered is None or [len(entry["text"]) for entry in gathered] == [1000 * number for number in range(size)])
    agree.equal(shared, [{"rank": 0, "text": ""}, 0])
    agree.equal(part, [("part", rank)])


# --- refusals --------------------------------------------------------------------------------------------------------


def refused_calls():
    """By name: an invalid call, and a part of the error message."""
    size, ones = dist.get_world_size(), torch.ones(3)
    world = dist.group.WORLD
    rows = torch.ones(size, 2)
    return {
        "sparse": (lambda: dist.broadcast(ones.to_sparse(), 0), "to_dense"),
        "maximum of sparse tensors": (lambda: dist.all_reduce(ones.to_sparse(), dist.ReduceOp.MAX), "summed"),
        "average of sparse integers": (lambda: dist.all_reduce(ones.int().to_sparse(), dist.ReduceOp.AVG), "divide"),
        "compressed": (lambda: dist.all_reduce(torch.ones(2, 2).to_sparse_csr()), "to_dense"),
        "nested": (lambda: dist.all_reduce(torch.nested.nested_tensor([ones, ones[:2]])), "unbind"),
        "meta": (lambda: dist.broadcast(ones.to("meta"), 0), "meta"),
        "meta gathered": (lambda: dist.all_gather([ones.to("meta")] * size, ones.to("meta")), "meta"),
        "meta scattered": (lambda: torch_rig.reduce_scatter_single(ones[:1], ones[:1].to("meta").expand(size)), "meta"),
        "expanded": (lambda: dist.all_reduce(torch.ones(1).expand(3)), "expanded"),
        "average of integers": (lambda: dist.all_reduce(ones.int(), dist.ReduceOp.AVG), "divide"),
        "bits of floats": (lambda: dist.all_reduce(ones, dist.ReduceOp.BAND), "integers"),
        "sum of 8 bit floats": (lambda: dist.all_reduce(ones.to(torch.float8_e5m2)), "bfloat16"),
        "factor for integers": (lambda: dist.all_reduce(ones.int(), dist._make_nccl_premul_sum(2.0)), "floating"),
        "two tensors": (lambda: world.allreduce([ones, ones]), "2 tensors"),
        "no tensor": (lambda: world.allreduce([]), "0 tensors"),
        "list too short": (lambda: dist.all_gather([ones] * (size - 1), ones), f"{size - 1} output"),
        "list too long": (lambda: dist.all_gather([ones] * 5000, ones), "5000 output"),
        "nothing to exchange": (lambda: dist.all_to_all([], []), "0 input"),
        "two dtypes to exchange": (lambda: world.alltoall([ones] * size, [ones.int()] * size), "dtypes"),
        "nothing to reduce": (lambda: dist.reduce_scatter(ones, []), "0 input"),
        "output too long": (lambda: torch_rig.all_gather_single(torch.ones(3 * size + 1), ones), "times as long"),
        "input too long": (lambda: torch_rig.reduce_scatter_single(ones, torch.ones(3 * size + 1)), "times as long"),
        "rows that do not add up": (lambda: dist.all_to_all_single(rows, rows, [7] * size, [1] * size), "add up"),
        "negative rows": (lambda: dist.all_to_all_single(rows, rows, [-1] * size, [1] * size), "add up"),
        "sizes for too few": (lambda: dist.all_to_all_single(rows, rows, [size], [1] * size), "add up")
        if size > 1
        else (lambda: dist.all_to_all_single(rows, rows, [1, 0], [1]), "add up"),
        "no such root": (lambda: dist.broadcast(ones, size), f"root={size}"),
        "negative root": (lambda: dist.broadcast(ones, group_src=-1), "root=-1"),
        "root of the group too large": (lambda: world.broadcast([ones], size), f"root={size}"),
        "no root to reduce on": (lambda: dist.reduce(ones, group_dst=size), f"root={size}"),
        "no root to gather on": (lambda: dist.gather(ones, group_dst=size), f"root={size}"),
        "no root to scatter from": (lambda: dist.scatter(ones, group_src=size), f"root={size}"),
    }


REFUSED = (
    "sparse", "maximum of sparse tensors", "average of sparse integers", "compressed", "nested", "meta",
    "meta gathered", "meta scattered", "expanded", "average of integers", "bits of floats", "sum of 8 bit floats",
    "factor for integers", "two tensors", "no tensor", "list too short", "list too long", "nothing to exchange",
    "two dtypes to exchange", "nothing to reduce", "output too long", "input too long", "rows that do not add up",
    "negative rows", "sizes for too few", "no such root", "negative root", "root of the group too large",
    "no root to reduce on", "no root to gather on", "no root to scatter from",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*nested", "ignore:.*CSR")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_sent(agree, name):
    call, remedy = refused_calls()[name]
    before = dist.group.WORLD._get_sequence_number_for_group()
    try:
        call()
    except (TorchMPIError, ValueError, TypeError) as error:
        agree(remedy in str(error), f"no remedy: {error}")
    else:
        agree(False, "accepted")
    agree.equal(dist.group.WORLD._get_sequence_number_for_group(), before, "it communicated")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    agree.equal(tensor, torch.full((2,), float(dist.get_world_size())), "the next call")
