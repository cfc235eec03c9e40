"""FSDP, meshes, DTensor, tensor parallelism, pipelines, checkpoints, functional collectives, compiled code."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from features import close, equal, feature, ones, other, rank
from groups import agreed
from helpers.distributed_rig import loss_of, net, sgd, share, train, values
from helpers.small_nets import mlp
from torch import nn
from torch.distributed import checkpoint, fsdp, pipelining
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn import functional as differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from training import alone

CPU = torch.device("cpu")


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (2,), mesh_dim_names=names)


# --- FSDP -----------------------------------------------------------------------------------------------------------


def full_values(model: nn.Module) -> torch.Tensor:
    """Return all parameters of an FSDP2 model as a flat tensor."""
    return torch.cat([parameter.full_tensor().reshape(-1) for parameter in model.parameters()])


def sharded(**options: Any) -> nn.Module:
    model = net()
    for layer in (model[0], model[2], model):
        fsdp.fully_shard(layer, **{"mesh": mesh(), **options})
    return model


def fsdp1_trains(**options: Any) -> None:
    model = fsdp.FullyShardedDataParallel(net(), device_id=CPU, **options)
    train(model, sgd(model.parameters()), share())
    with fsdp.FullyShardedDataParallel.summon_full_params(model):
        close(values(model), alone())


for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):

    @feature("FSDP", f"`FullyShardedDataParallel` on CPU, `{strategy}`")
    def _(strategy: str = strategy) -> None:
        fsdp1_trains(sharding_strategy=fsdp.ShardingStrategy[strategy], use_orig_params=True)


@feature("FSDP", "`FullyShardedDataParallel` on CPU, `HYBRID_SHARD`")
def _() -> None:
    fsdp1_trains(sharding_strategy=fsdp.ShardingStrategy.HYBRID_SHARD, device_mesh=mesh(1, 2))


@feature("FSDP", "its full and sharded state dicts")
def _() -> None:
    FSDP = fsdp.FullyShardedDataParallel
    model = FSDP(net(), device_id=CPU)
    with FSDP.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT):
        close(model.state_dict()["0.weight"], net()[0].weight)
    with FSDP.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(model.state_dict())


@feature("FSDP", "`fully_shard`")
def _() -> None:
    model = sharded()
    train(model, sgd(model.parameters()), share())
    close(full_values(model), alone())


@feature("FSDP", "`fully_shard(reshard_after_forward=False)`, `no_sync`, `clip_grad_norm_`")
def _() -> None:
    model, single = sharded(reshard_after_forward=False), net()
    model.set_requires_gradient_sync(False)
    loss_of(model, 0, share()).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, 1, share()).backward()
    for step in (0, 1):
        loss_of(single, step).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    close(norm, nn.utils.clip_grad_norm_(single.parameters(), 0.1))


@feature("FSDP", "`MixedPrecisionPolicy`")
def _() -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, single = sharded(mp_policy=policy), net()
    loss = model(torch.ones(2, 6)).float().square().mean()
    loss.backward()
    single(torch.ones(2, 6).double()).square().mean().backward()
    close(model[0].weight.grad.full_tensor().double(), single[0].weight.grad, 0.05)


@feature("FSDP", "`set_allocate_memory_from_process_group_for_comm`")
def _() -> None:
    model = sharded()
    model.set_allocate_memory_from_process_group_for_comm(True)
    train(model, sgd(model.parameters()), share())
    close(full_values(model), alone())


@feature("FSDP", "`fully_shard` over a mesh of two dimensions (HSDP)")
def _() -> None:
    for shape in ((1, 2), (2, 1)):
        model = sharded(mesh=mesh(*shape, names=("replicate", "shard")))
        train(model, sgd(model.parameters()), share())
        close(full_values(model), alone())


# --- meshes and distributed tensors ---------------------------------------------------------------------------------


@feature("DeviceMesh and DTensor", "`init_device_mesh`, slices, `from_group`, `_flatten`")
def _() -> None:
    both = mesh(1, 2, names=("outer", "inner"))
    equal((both["inner"].size(), both["inner"].get_local_rank(), both.get_coordinate()), (2, rank(), (0, rank())))
    tensor = ones()
    dist.all_reduce(tensor, group=both.get_group("inner"))
    equal(tensor, [3.0] * 3)
    equal((DeviceMesh.from_group(dist.group.WORLD, "cpu").size(), both._flatten().size()), (2, 2))


@feature("DeviceMesh and DTensor", "`distribute_tensor`, `full_tensor`, uneven shards")
def _() -> None:
    whole = torch.arange(15.0).view(5, 3)
    for dim in (0, 1):
        equal(distribute_tensor(whole, mesh(), [Shard(dim)]).full_tensor(), whole)
    equal(distribute_tensor(whole * (1 + rank()), mesh(), [Replicate()]).to_local(), whole)


@feature("DeviceMesh and DTensor", "`redistribute` from and to `Shard`, `Replicate`, `Partial`")
def _() -> None:
    sums = DTensor.from_local(torch.full((2, 4), rank() + 1.0), mesh(), [Partial()])
    equal(sums.redistribute(placements=[Replicate()]).to_local(), torch.full((2, 4), 3.0))
    rows = sums.redistribute(placements=[Shard(0)])
    equal(rows.to_local(), torch.full((1, 4), 3.0))
    equal(rows.redistribute(placements=[Shard(1)]).to_local(), torch.full((2, 2), 3.0))


@feature("DeviceMesh and DTensor", "operations on sharded tensors and their gradients")
def _() -> None:
    a, b = torch.arange(8.0).view(2, 4).requires_grad_(), torch.arange(8.0).view(4, 2)
    left, right = distribute_tensor(a, mesh(), [Shard(1)]), distribute_tensor(b, mesh(), [Shard(0)])
    product = left @ right
    equal(product.full_tensor(), a @ b)
    product.sum().backward()
    equal(left.grad.full_tensor(), torch.ones(2, 2) @ b.T)


@feature("DeviceMesh and DTensor", "`distribute_module`")
def _() -> None:
    model = distribute_module(net(), mesh())
    close(model[0].weight.full_tensor(), net()[0].weight)


# --- parts of a model -----------------------------------------------------------------------------------------------


def even_net() -> nn.Sequential:
    """Return layers that two ranks can split evenly."""
    return mlp(6, 8, 4, seed=3).double()


@feature("Tensor and pipeline parallel", "`ColwiseParallel`, `RowwiseParallel`")
def _() -> None:
    single, model = even_net(), even_net()
    parallelize_module(model, mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for each in (single, model):
        loss_of(each, 0).backward()
    close(model[0].weight.grad.full_tensor(), single[0].weight.grad)


@feature("Tensor and pipeline parallel", "`SequenceParallel`, `PrepareModuleInput`")
def _() -> None:
    single = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    model = copy.deepcopy(single)
    layouts = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {"0": SequenceParallel(), "1": layouts}
    parallelize_module(model[0:1], mesh(), {"0": plan["0"]})
    x = torch.arange(16.0).view(1, 4, 4)
    out = model[0](distribute_tensor(x, mesh(), [Shard(1)]))
    close(out.full_tensor(), single[0](x), 1e-6)
    distribute_module(model[1], mesh())
    parallelize_module(model[1], mesh(), layouts)
    close(model[1](out.to_local()).full_tensor(), single(x), 1e-5)


@feature("Tensor and pipeline parallel", "`loss_parallel`")
def _() -> None:
    logits, target = torch.arange(8.0).view(2, 4).requires_grad_(), torch.tensor([1, 2])
    with loss_parallel():
        loss = nn.functional.cross_entropy(distribute_tensor(logits, mesh(), [Shard(1)]), target)
        loss.backward()
    close(loss.full_tensor(), nn.functional.cross_entropy(logits.detach(), target), 1e-5)


@feature("Tensor and pipeline parallel", "`fully_shard` of tensor-parallel modules")
def _() -> None:
    both = mesh(2, 1, names=("data", "tensor"))
    model = net()
    parallelize_module(model, both["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fsdp.fully_shard(model, mesh=both["data"])
    train(model, sgd(model.parameters()), share())
    close(full_values(model), alone())


class Stage(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def pipeline_runs(schedule: type, num_stages: int) -> None:
    """Check the product of the factors of all stages, and its gradient."""
    scales = [2.0, 3.0, 0.5, 4.0][:num_stages]
    own = range(rank(), num_stages, 2)
    stages = [pipelining.PipelineStage(Stage(scales[index]), index, num_stages, CPU) for index in own]
    several = {"n_microbatches": 4, "loss_fn": lambda output, target: (output - target).sum()}
    run = schedule(stages if num_stages > 2 else stages[0], **several)
    x, target, losses = torch.arange(8.0).view(8, 1), torch.zeros(8, 1), []
    arguments = (x,) if rank() == 0 else ()
    extra = {"target": target, "losses": losses} if rank() == 1 else {}
    run.step(*arguments, **extra)
    product = torch.tensor(scales).prod()
    if rank() == 1:
        close(torch.stack(losses).sum(), x.sum() * product, 1e-5)
    for stage in stages:  # the gradients of 4 microbatches are averaged
        close(stage.submod.scale.grad * stage.submod.scale.detach() * 4, x.sum() * product, 1e-5)


for name, num_stages in {"ScheduleGPipe": 2, "Schedule1F1B": 2, "ScheduleInterleaved1F1B": 4}.items():

    @feature("Tensor and pipeline parallel", f"`{name}`")
    def _(name: str = name, num_stages: int = num_stages) -> None:
        pipeline_runs(getattr(pipelining, name), num_stages)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@feature("Checkpoints", "`dcp.save`, `dcp.load` of `fully_shard` and its optimizer, with `get_state_dict`")
def _() -> None:
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, share(), steps=1)
    before, folder = full_values(model), agreed(tempfile.mkdtemp)
    weights, states = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    train(model, optimizer, share(), steps=1)
    weights, states = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    equal(full_values(model), before)


@feature("Checkpoints", "loading into a different sharding")
def _() -> None:
    folder, whole = agreed(tempfile.mkdtemp), torch.arange(12.0).view(4, 3)
    checkpoint.save({"x": distribute_tensor(whole, mesh(), [Shard(0)])}, checkpoint_id=folder)
    other_way = {"x": distribute_tensor(torch.zeros(4, 3), mesh(), [Shard(1)])}
    checkpoint.load(other_way, checkpoint_id=folder)
    equal(other_way["x"].full_tensor(), whole)


@feature("Checkpoints", "`dcp.async_save`")
def _() -> None:
    folder, whole = agreed(tempfile.mkdtemp), torch.arange(12.0).view(4, 3)
    checkpoint.async_save({"x": distribute_tensor(whole, mesh(), [Shard(0)])}, checkpoint_id=folder).result()
    found = {"x": distribute_tensor(torch.zeros(4, 3), mesh(), [Shard(0)])}
    checkpoint.load(found, checkpoint_id=folder)
    equal(found["x"].full_tensor(), whole)


# --- functional collectives, compiled code --------------------------------------------------------------------------


@feature("Functional and compiled", "functional collectives")
def _() -> None:
    world = dist.group.WORLD
    equal(functional.all_reduce(ones(), "sum", world).wait(), [3.0] * 3)
    equal(functional.broadcast(ones(), 1, world).wait(), [2.0] * 3)
    equal(functional.all_gather_single(ones(1), 0, world).wait(), [1.0, 2.0])
    equal(functional.reduce_scatter_single(ones(2), "sum", 0, world).wait(), [3.0])
    parts = torch.tensor([0.0, 1.0]) + 2 * rank()
    equal(functional.all_to_all_single(parts, None, None, world).wait(), [0.0 + rank(), 2.0 + rank()])
    summed = functional.all_reduce_coalesced([ones(1), ones(1)], "sum", world)
    equal([each.wait().tolist() for each in summed], [[3.0]] * 2)
    gathered = functional.all_gather_single_coalesced([ones(1), ones(1)], world)
    equal([each.wait().tolist() for each in gathered], [[1.0, 2.0]] * 2)
    scattered = functional.reduce_scatter_single_coalesced([ones(2), ones(2)], "sum", [0, 0], world)
    equal([each.wait().tolist() for each in scattered], [[3.0]] * 2)


@feature("Functional and compiled", "functional collectives with `out`")
def _() -> None:
    operations, world = torch.ops._c10d_functional, dist.group.WORLD.group_name
    gathered, scattered = torch.zeros(2), torch.zeros(1)
    operations.wait_tensor(operations.all_gather_into_tensor_out(ones(1), 2, world, out=gathered))
    equal(gathered, [1.0, 2.0])
    operations.wait_tensor(operations.reduce_scatter_tensor_out(ones(2), "sum", 2, world, out=scattered))
    equal(scattered, [3.0])


@feature("Functional and compiled", "with gradients: `torch.distributed.nn.functional`")
def _() -> None:
    x = ones().requires_grad_()
    differentiable.all_reduce(x * x).sum().backward()
    equal(x.grad, 4 * x.detach())
    y = ones(1).requires_grad_()
    torch.stack(differentiable.all_gather(y)).prod().backward()
    equal(y.grad.item(), 2.0 * (other() + 1))
    z = ones(2).requires_grad_()
    differentiable.all_to_all([torch.zeros(1), torch.zeros(1)], list(z.split(1)))[0].sum().backward()
    equal(z.grad.sum().item(), 2.0 if rank() == 0 else 0.0)


@feature("Functional and compiled", "`torch.compile` of functions that call collectives")
def _() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return functional.all_gather_single(x * 2, 0, dist.group.WORLD)

    equal(torch.compile(step, backend="aot_eager", fullgraph=True)(ones(1)), [6.0, 6.0])


@feature("Functional and compiled", "`torch.compile` of `fully_shard`")
def _() -> None:
    model = sharded()
    train(torch.compile(model, backend="aot_eager"), sgd(model.parameters()), share())
    close(full_values(model), alone())


for mode, asynchronous in (("sync", False), ("async", True)):

    @feature("Functional and compiled", f"`torch.profiler` shows `all_reduce`|{mode}")
    def _(asynchronous: bool = asynchronous) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            work = dist.all_reduce(ones(), async_op=asynchronous)
            if asynchronous:
                work.wait()
        equal(any("all_reduce" in event.key for event in profile.key_averages()), True)
