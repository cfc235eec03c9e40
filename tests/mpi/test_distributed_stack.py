"""Parts of PyTorch on top of process groups: meshes, sharded tensors and tensor parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.distributed_rig import TIGHT, everybodys, gradients, loss_of, net, numbers, of_rank, values
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 4), pytest.mark.usefixtures("default_group")]


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


def test_tensor_and_data_parallel_on_a_mesh(agree):
    """Layers split over one dimension of the mesh, and parameters and data over the other."""
    mesh, alone = mesh_2d(), net()
    model = net()
    parallelize_module(model, mesh["columns"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["rows"])
    row, num_rows = mesh["rows"].get_local_rank(), mesh["rows"].size()
    loss_of(model, 0, slice(row, None, num_rows)).backward()
    loss_of(alone, 0).backward()
    agree.close(gradients(model), gradients(alone), **TIGHT)
    agree.close(values(model), values(net()), **TIGHT)
