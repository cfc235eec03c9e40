"""What PyTorch builds on a process group: functional collectives, meshes, sharded tensors, tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from distributed_rig import (
    TIGHT,
    default_group,  # noqa: F401
    gradients,
    loss_of,
    net,
    values,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

# Newer versions have other names for some collectives, which older ones do not know.
pytestmark = [
    pytest.mark.usefixtures("default_group"),
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),
]


def numbers(*shape: int, start: int = 0) -> Tensor:
    """Small whole numbers, which no order of additions can round."""
    count = int(torch.Size(shape).numel())
    return (torch.arange(start, start + count) % 13).double().reshape(shape)


def of_rank(rank: int, *shape: int) -> Tensor:
    return numbers(*shape, start=3 * rank + 1)


def everybodys(*shape: int) -> list[Tensor]:
    return [of_rank(rank, *shape) for rank in range(dist.get_world_size())]


# --- functional collectives ---------------------------------------------------------------------------------------


def test_functional_collectives(agree):
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    mine, all_of_them = of_rank(rank, 2 * size, 3), everybodys(2 * size, 3)
    total = sum(all_of_them)
    last = size - 1
    found = {
        "all_reduce": funcol.all_reduce(mine, "sum", group),
        "average": funcol.all_reduce(mine, "avg", group),
        "all_gather": funcol.all_gather_tensor(mine, 0, group),
        "all_gather along 1": funcol.all_gather_tensor(mine, 1, group),
        "reduce_scatter": funcol.reduce_scatter_tensor(mine, "sum", 0, group),
        "all_to_all": funcol.all_to_all_single(mine, None, None, group),
        "broadcast": funcol.broadcast(mine, last, group),
    }
    expected = {
        "all_reduce": total,
        "average": total / size,
        "all_gather": torch.cat(all_of_them),
        "all_gather along 1": torch.cat(all_of_them, 1),
        "reduce_scatter": total.chunk(size)[rank],
        "all_to_all": torch.cat([theirs.chunk(size)[rank] for theirs in all_of_them]),
        "broadcast": all_of_them[last],
    }
    for name, result in found.items():
        agree.equal(funcol.wait_tensor(result), expected[name], name)
    agree.equal(mine, of_rank(rank, 2 * size, 3), "the input")


def test_functional_all_to_all_uneven(agree):
    """Rank r sends as many rows to rank j as r + 2 j says, modulo 3."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def rows(source: int, target: int) -> int:
        return (source + 2 * target) % 3

    incoming, outgoing = [rows(r, rank) for r in range(size)], [rows(rank, r) for r in range(size)]
    result = funcol.all_to_all_single(of_rank(rank, sum(outgoing), 2), incoming, outgoing, dist.group.WORLD)
    parts = []
    for source in range(size):
        theirs = [rows(source, target) for target in range(size)]
        parts.append(of_rank(source, sum(theirs), 2).split(theirs)[rank])
    agree.equal(funcol.wait_tensor(result), torch.cat(parts))


def test_functional_coalesced(agree):
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    mine = [of_rank(rank, size, 2), of_rank(rank, 3 * size)]
    everybody = [everybodys(size, 2), everybodys(3 * size)]
    sums = funcol.all_reduce_coalesced(mine, "sum", group)
    wholes = funcol.all_gather_into_tensor_coalesced(mine, group)
    parts = funcol.reduce_scatter_tensor_coalesced(mine, "sum", [0, 0], group)
    for index, theirs in enumerate(everybody):
        agree.equal(funcol.wait_tensor(sums[index]), sum(theirs), "all_reduce")
        agree.equal(funcol.wait_tensor(wholes[index]), torch.cat(theirs), "all_gather")
        agree.equal(funcol.wait_tensor(parts[index]), sum(theirs).chunk(size)[rank], "reduce_scatter")


def test_gradients_go_through_functional_collectives(agree):
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = of_rank(rank, size, 2).requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(x, 0, group)
    scattered = funcol.reduce_scatter_tensor_autograd(gathered * (rank + 1), "sum", 0, group)
    exchanged = funcol.all_to_all_single_autograd(scattered, [1] * size, [1] * size, group)
    (exchanged * (rank + 1)).sum().backward()
    # x is multiplied by the sum of all factors on its way, and its row r by what rank r makes of it.
    factor = size * (size + 1) / 2
    agree.equal(x.grad, factor * torch.arange(1.0, size + 1).double()[:, None].expand(size, 2))


def test_coalescing_manager(agree):
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    pairs = [(of_rank(rank, size), torch.empty(1).double()), (of_rank(rank, 2 * size), torch.empty(2).double())]
    sums, wholes = [of_rank(rank, 4), of_rank(rank, 2, 3)], [torch.empty(3 * size).double() for _ in range(2)]
    copies = [of_rank(rank, 5), of_rank(rank, 2)]
    with dist._coalescing_manager(async_ops=True) as reducing:
        for tensor in sums:
            dist.all_reduce(tensor)
    with dist._coalescing_manager(device=device, async_ops=True) as gathering:
        for whole in wholes:
            dist.all_gather_into_tensor(whole, of_rank(rank, 3))
    with dist._coalescing_manager(device=device):
        for whole, part in pairs:
            dist.reduce_scatter_tensor(part, whole)
    with dist._coalescing_manager(device=device):
        for tensor in copies:
            dist.broadcast(tensor, size - 1)
    reducing.wait()
    gathering.wait()
    agree.equal(sums[0], sum(everybodys(4)))
    agree.equal(sums[1], sum(everybodys(2, 3)))
    for whole in wholes:
        agree.equal(whole, torch.cat(everybodys(3)))
    for index, (_, part) in enumerate(pairs, start=1):
        agree.equal(part, sum(everybodys(index * size)).chunk(size)[rank])
    agree.equal(copies[0], of_rank(size - 1, 5))
    agree.equal(copies[1], of_rank(size - 1, 2))


# --- meshes and sharded tensors -----------------------------------------------------------------------------------


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))


def mesh_2d() -> DeviceMesh:
    """2 x 2 on 4 ranks; with fewer, one row."""
    size = dist.get_world_size()
    return init_device_mesh("cpu", (2, 2) if size == 4 else (1, size), mesh_dim_names=("rows", "columns"))


def test_mesh_of_two_dimensions(agree):
    mesh, rank = mesh_2d(), dist.get_rank()
    row, column = mesh.get_coordinate()
    sums = []
    for name in ("rows", "columns"):
        count = torch.tensor([float(rank)])
        dist.all_reduce(count, group=mesh[name].get_group())
        sums.append(count.item())
    whole = mesh._flatten("all")
    count = torch.ones(1)
    dist.all_reduce(count, group=whole.get_group())
    agree.equal(sums[0], float(mesh.mesh[:, column].sum()))
    agree.equal(sums[1], float(mesh.mesh[row].sum()))
    agree.equal(count.item(), float(dist.get_world_size()))
    agree.equal(mesh["columns"].get_local_rank(), column)


LAYOUTS = (Replicate(), Shard(0), Shard(1))


@pytest.mark.parametrize("shape", [(12, 8), (5, 3), (3, 2, 4)], ids=str)
def test_redistribute(agree, shape):
    """From every layout to every other, whether or not the shards are even, or there are enough rows for all."""
    mesh, whole = mesh_1d(), numbers(*shape)
    for source in LAYOUTS:
        tensor = distribute_tensor(whole, mesh, [source])
        for target in LAYOUTS:
            moved = tensor.redistribute(mesh, [target])
            agree.equal(moved.full_tensor(), whole, f"{source} -> {target}")
            expected = distribute_tensor(whole, mesh, [target]).to_local()
            agree.equal(moved.to_local(), expected, f"{source} -> {target}, here")


@pytest.mark.parametrize("target", LAYOUTS, ids=str)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_redistribute_of_partial_results(agree, target, op):
    mesh, size = mesh_1d(), dist.get_world_size()
    parts = torch.stack(everybodys(6, 5))
    expected = {"sum": parts.sum(0), "avg": parts.sum(0) / size, "max": parts.amax(0)}[op]
    partial = DTensor.from_local(of_rank(dist.get_rank(), 6, 5), mesh, [Partial(op)])
    agree.equal(partial.redistribute(mesh, [target]).full_tensor(), expected)


def test_redistribute_over_two_dimensions(agree):
    mesh, whole = mesh_2d(), numbers(8, 12)
    layouts: list[list[Placement]] = [[a, b] for a in LAYOUTS for b in LAYOUTS]
    for source in layouts:
        tensor = distribute_tensor(whole, mesh, source)
        for target in layouts:
            agree.equal(tensor.redistribute(mesh, target).full_tensor(), whole, f"{source} -> {target}")


def test_products_of_sharded_tensors(agree):
    """Also backwards; the sum over the shared dimension is left to whoever asks for the result."""
    mesh = mesh_1d()
    a, b = numbers(6, 12), numbers(12, 4, start=5)
    plain = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    spread = [
        distribute_tensor(a, mesh, [Shard(1)]).requires_grad_(),
        distribute_tensor(b, mesh, [Shard(0)]).requires_grad_(),
    ]
    results: list[Any] = []
    for left, right in (plain, spread):
        product = left @ right
        (product * product).sum().backward()
        results.append((product, left.grad, right.grad))
    for expected, found in zip(*results, strict=True):
        agree.equal(found.full_tensor().detach(), expected.detach())


# --- tensor parallelism -------------------------------------------------------------------------------------------


def test_tensor_parallel_equals_one_process(agree):
    mesh, model, alone = mesh_1d(), net(), net()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for module in (model, alone):
        loss_of(module, 0).backward()
    # torch takes either tensors that are spread or those that are not: the last layer has none that are.
    norms = [nn.utils.clip_grad_norm_(module[:4].parameters(), 0.02) for module in (model, alone)]
    agree.close(whole_gradients(model), gradients(alone), **TIGHT)
    agree.close(plain(norms[0]), norms[1], **TIGHT)


def test_sequence_parallel_and_loss_parallel(agree):
    """The norm works on a part of the sequence, the loss on a part of the classes."""
    torch.manual_seed(4)
    mesh, size = mesh_1d(), dist.get_world_size()
    layers = [nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12)).double() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 4 * size, 6).double()
    target = torch.randint(12, (2 * 4 * size,))
    columns = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    parallelize_module(layers[0], mesh, {"0": SequenceParallel(), "1": columns})
    split = distribute_tensor(x, mesh, [Shard(1)])
    with loss_parallel():
        loss = nn.functional.cross_entropy(layers[0](split).flatten(0, 1), target)
        loss.backward()
    expected = nn.functional.cross_entropy(layers[1](x).flatten(0, 1), target)
    expected.backward()
    agree.close(plain(loss.detach()), expected.detach(), **TIGHT)
    agree.close(whole_gradients(layers[0]), gradients(layers[1]), **TIGHT)


def test_tensor_and_data_parallel_on_a_mesh(agree):
    """Layers split over one dimension of the mesh, and parameters and data over the other."""
    mesh, alone = mesh_2d(), net()
    model = net()
    parallelize_module(model, mesh["columns"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["rows"])
    row, num_rows = mesh["rows"].get_local_rank(), mesh["rows"].size()
    loss_of(model, 0, slice(row, None, num_rows)).backward()
    loss_of(alone, 0).backward()
    agree.close(whole_gradients(model), gradients(alone), **TIGHT)
    agree.close(torch.cat([plain(p.detach()).reshape(-1) for p in model.parameters()]), values(net()), **TIGHT)


def plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_gradients(model: nn.Module) -> Tensor:
    return torch.cat([plain(p.grad).reshape(-1) for p in model.parameters()])
