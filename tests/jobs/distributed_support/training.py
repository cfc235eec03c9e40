"""DistributedDataParallel, its hooks, and the optimizers around it: compared with one process on all the data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from features import Wrong, close, equal, feature, ones, raises, rank
from groups import short_group
from helpers.distributed_rig import TIGHT, gradients, loss_of, net, sgd, share, train, trained_alone, values
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SMALL_BUCKETS = {"bucket_cap_mb": 200 / 2**20}
HALF = 4e-3


@functools.cache
def alone() -> torch.Tensor:
    """Return the parameters after training in one process."""
    return values(trained_alone())


@functools.cache
def gradients_alone() -> torch.Tensor:
    model = net()
    loss_of(model, 0).backward()
    return gradients(model)


def trains(model: nn.Module, optimizer: Any = None) -> None:
    """Check that training on half of the data per rank equals training in one process."""
    train(model, optimizer or sgd(model.parameters()), share())
    close(values(model), alone(), TIGHT["rtol"])


def averages(model: nn.Module, tolerance: float) -> None:
    """Check the gradients of one backward pass, for hooks that round."""
    loss_of(model, 0, share()).backward()
    close(gradients(model), gradients_alone(), tolerance)


def learns(model: DDP, optimizer: Any = None) -> None:
    """Check that the loss decreases and the ranks are equal, for methods that compress or delay updates."""
    before = loss_of(model.module, 0).item()
    train(model, optimizer or sgd(model.parameters()), share(), steps=8)
    equal(loss_of(model.module, 0).item() < before, True)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, values(model).tolist())
    equal(found[0], found[1])


for name, options in {
    "`DistributedDataParallel`": {},
    "`bucket_cap_mb`": SMALL_BUCKETS,
    "`gradient_as_bucket_view`": {**SMALL_BUCKETS, "gradient_as_bucket_view": True},
    "`static_graph`": {**SMALL_BUCKETS, "static_graph": True},
    "`find_unused_parameters`": {**SMALL_BUCKETS, "find_unused_parameters": True},
}.items():

    @feature("DistributedDataParallel", name)
    def _(options: dict[str, Any] = options) -> None:
        trains(DDP(net(seed=3 + rank()), **options))


@feature("DistributedDataParallel", "`no_sync`")
def _() -> None:
    model, single = DDP(net(), **SMALL_BUCKETS), net()
    with model.no_sync():
        loss_of(model, 0, share()).backward()
    loss_of(model, 1, share()).backward()
    for step in (0, 1):
        loss_of(single, step).backward()
    close(gradients(model), gradients(single))


@feature("DistributedDataParallel", "`join`, ranks with different numbers of batches")
def _() -> None:
    for by_initial_size in (True, False):
        model = DDP(net(), **SMALL_BUCKETS)
        with model.join(divide_by_initial_world_size=by_initial_size):
            for _ in range(1 + rank()):
                model.zero_grad()
                loss_of(model, 0).backward()
        if rank() == 1:  # no other rank had a last batch
            close(gradients(model), gradients_alone() / (2 if by_initial_size else 1))


@feature("DistributedDataParallel", "buffers broadcast before each forward pass")
def _() -> None:
    model = DDP(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    for _ in range(2):
        model(torch.randn(4, 2) + 10 * rank())
    model.eval()
    found: list[Any] = [None, None]
    model.train()
    model(torch.zeros(2, 2))
    dist.all_gather_object(found, model.module[0].running_mean.tolist())
    equal(found[0], found[1])


@feature("DistributedDataParallel", "`SyncBatchNorm`")
def _() -> None:
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(6), net().float())))
    model(torch.randn(4, 6)).sum().backward()


@feature("DistributedDataParallel", "`torch.compile` of it")
def _() -> None:
    trains(torch.compile(DDP(net()), backend="aot_eager"))


@feature("DistributedDataParallel", "a missing rank: `backward()` raises after `timeout`", renews=True)
def _() -> None:
    model = DDP(net(), process_group=short_group())
    loss = loss_of(model, 0)
    if rank() == 0:
        raises(RuntimeError, loss.backward)


# --- hooks ----------------------------------------------------------------------------------------------------------


def hooked(hook: Any, state: Any = None, model: nn.Module | None = None) -> DDP:
    parallel = DDP(model or net(), **SMALL_BUCKETS)
    parallel.register_comm_hook(state, hook)
    return parallel


def powersgd(**options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1e-9, **options)


@feature("Communication hooks", "`allreduce_hook`")
def _() -> None:
    trains(hooked(default_hooks.allreduce_hook))


@feature("Communication hooks", "`fp16_compress_hook`, `fp16_compress_wrapper`")
def _() -> None:
    averages(hooked(default_hooks.fp16_compress_hook), HALF)
    averages(hooked(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)), HALF)


@feature("Communication hooks", "`bf16_compress_hook`")
def _() -> None:
    averages(hooked(default_hooks.bf16_compress_hook), 8 * HALF)


@feature("Communication hooks", "`powerSGD_hook`")
def _() -> None:
    model = DDP(net())  # one bucket: with several, gloo's threads sometimes wait for each other
    model.register_comm_hook(powersgd(matrix_approximation_rank=16), powerSGD_hook.powerSGD_hook)
    trains(model)


@feature("Communication hooks", "`batched_powerSGD_hook`")
def _() -> None:
    learns(hooked(powerSGD_hook.batched_powerSGD_hook, powersgd(matrix_approximation_rank=1)))


for kind in ("pertensor", "perchannel"):

    @feature("Communication hooks", f"`quantization_{kind}_hook`", turn=1)
    def _(kind: str = kind) -> None:
        hook = getattr(quantization_hooks, f"quantization_{kind}_hook")
        model, single = hooked(hook, dist.group.WORLD, net().float()), net().float()
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
        model(x[share()]).square().mean().backward()
        single(x).square().mean().backward()
        close(gradients(model), gradients(single), float(gradients(single).abs().max()) / 50)


@feature("Communication hooks", "`post_localSGD_hook`")
def _() -> None:
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=100)
    trains(hooked(post_localSGD_hook.post_localSGD_hook, state))


@feature("Communication hooks", "`hook_with_zero_step`")
def _() -> None:
    model = DDP(net(), **SMALL_BUCKETS)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, overlap_with_ddp=True)
    model.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, model, zero))
    learns(model, zero)


@feature("Communication hooks", "built in, in C++: `ALLREDUCE`")
def _() -> None:
    model = DDP(net(), **SMALL_BUCKETS)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    trains(model)


@feature("Communication hooks", "built in, in C++: `FP16_COMPRESS`")
def _() -> None:
    model = DDP(net(), **SMALL_BUCKETS)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    averages(model, HALF)


# --- optimizers, data -----------------------------------------------------------------------------------------------


@feature("Optimizers and data", "`ZeroRedundancyOptimizer`, its `consolidate_state_dict`")
def _() -> None:
    model = DDP(net())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    trains(model, zero)
    zero.consolidate_state_dict(0)
    if rank() == 0:
        equal(len(zero.state_dict()["state"]), 6)


@feature("Optimizers and data", "`Join` of a model and a `ZeroRedundancyOptimizer`")
def _() -> None:
    model = DDP(net())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, zero]):
        for step in range(2 + rank()):
            zero.zero_grad()
            loss_of(model, step).backward()
            zero.step()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, values(model).sum().item())
    equal(found[0], found[1])


@feature("Optimizers and data", "`PostLocalSGDOptimizer`, `PeriodicModelAverager`, `HierarchicalModelAverager`")
def _() -> None:
    averagers: tuple[Callable[[], Any], ...] = (
        lambda: PeriodicModelAverager(period=2, warmup_steps=0),
        lambda: HierarchicalModelAverager({2: 2}, warmup_steps=0),
    )
    for averager in averagers:
        parameter = nn.Parameter(torch.tensor([float(rank())]))
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD([parameter], lr=0.0), averager())
        parameter.grad = torch.zeros(1)
        for _ in range(3):
            optimizer.step()
        equal(parameter, [0.5])


@feature("Optimizers and data", "`DistributedSampler`, `DataLoader` workers made by `fork`")
def _() -> None:
    dataset = TensorDataset(torch.arange(12.0))
    loader = DataLoader(
        dataset, batch_size=3, sampler=DistributedSampler(dataset), num_workers=1, multiprocessing_context="fork"
    )
    total = torch.zeros(1)
    for (batch,) in loader:
        total += batch.sum()
    dist.all_reduce(total)
    equal(total, [66.0])


@feature("Optimizers and data", "a collective in a forked process is refused")
def _() -> None:
    import multiprocessing

    queue = multiprocessing.get_context("fork").SimpleQueue()

    def child() -> None:
        try:
            dist.all_reduce(ones())
            queue.put("no error")
        except Exception as error:
            queue.put(type(error).__name__)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(3)
    if process.is_alive():
        process.kill()
        process.join()
        raise Wrong("the child hangs")
    if queue.get() == "no error":
        raise Wrong("no error")
