"""Training recipes: what a loop does, and the interfaces by which its gradients become those of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.engine import AllReduceSGDEngine

ROWS, FEATURES, CLASSES, STEPS = 12, 6, 4, 4
LATE = 2
"""The step before which recipes with late parameters change the net."""

Net = nn.Module
Optimizer = torch.optim.Optimizer


# --- nets ------------------------------------------------------------------------------------------------


def mlp(first: type[nn.Linear] | type[nn.LazyLinear] = nn.Linear) -> nn.Sequential:
    layer = nn.LazyLinear(8) if first is nn.LazyLinear else nn.Linear(FEATURES, 8)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, CLASSES))


class Tied(nn.Module):
    """A layer that is applied twice, and whose weight is also that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.same = self.layer

    def forward(self, x: Tensor) -> Tensor:
        return linear(torch.tanh(self.same(torch.tanh(self.layer(x)))), self.layer.weight)[:, :CLASSES]


class Branches(nn.Module):
    """Layers that are used by no row, and by some rows: on some ranks by none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused, self.sometimes = mlp(), nn.Linear(3, 3), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        rows = x[:, :1] > 0
        return y + rows * self.sometimes(x) if rows.any() else y


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 5, sparse=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding((4 * x).long().abs() % 9).mean(1))
        return result


class Checkpointed(nn.Module):
    """The activations of the first layers are computed again in the backward pass."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.net, self.reentrant = mlp(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(self.reentrant)  # a reentrant block without such an input has no gradients
        result: Tensor = self.net[2](checkpoint(self.net[:2], x, use_reentrant=self.reentrant))
        return result


class Normalized(nn.Module):
    """Batch norm, of all rows together."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.net, self.norm = mlp(), make(8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net[2](self.norm(torch.tanh(self.net[0](x))))
        return result


class Parallel(nn.Module):
    """A layer divided over the ranks between replicated layers; in one process all layers are complete."""

    def __init__(self, middle: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(FEATURES, 8), middle(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return result


def frozen() -> nn.Sequential:
    net = mlp()
    net[0].requires_grad_(False)
    return net


def lazy() -> nn.Sequential:
    """Its parameters get their shapes from the first batch."""
    net = mlp(nn.LazyLinear)
    net(torch.zeros(2, FEATURES))
    return net


# --- recipes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """What a training loop does besides forward, backward and step. Equal under all interfaces."""

    net: Callable[[], Net] = mlp
    optimizer: Callable[..., Optimizer] = torch.optim.SGD
    passes: int = 1
    clip: Literal["", "torch", "mpinn"] = ""
    """The module of the function that clips."""
    autocast: bool = False
    scheduler: bool = False
    set_to_none: bool = True
    penalty: bool = False
    scaler: bool = False
    """With a GradScaler, and an overflow on the last rank, after which all ranks skip a step."""
    compiled: bool = False
    late: Callable[[Net, Optimizer], object] | None = None
    width: int = 1
    """Number of ranks that share a layer, and have the same part of the batch."""

    @property
    def dtype(self) -> torch.dtype:
        """Double, so that any difference but rounding is visible; autocast is for float."""
        return torch.float32 if self.autocast else torch.float64

    @property
    def tolerance(self) -> float:
        """Largest relative error of the change of a parameter. bfloat16 has 8 bits, in any part of a batch."""
        return 3e-2 if self.autocast else 1e-9

    def make(self) -> tuple[Net, Optimizer]:
        """The same net on all ranks, and its optimizer. Frozen parameters are in it, as they may be thawed."""
        torch.manual_seed(7)
        net = self.net().to(self.dtype)
        options = {"momentum": 0.9} if self.optimizer is torch.optim.SGD and self.net is not Sparse else {}
        # Groups of their own for weights and biases, with different learning rates.
        weights = [p for p in net.parameters() if p.dim() > 1]
        biases = [p for p in net.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "lr": 0.05}, {"params": biases, "lr": 0.1}]
        return net, self.optimizer(groups, lr=0.05, **options)

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """A batch of all ranks, sorted, so that the rows of a rank differ in kind from those of others."""
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
        y = torch.randint(CLASSES, (ROWS,), generator=generator)
        x = x[x[:, 0].argsort()].to(self.dtype)
        if self.scaler and index == 1:
            x[-1] = math.inf
        return x, y

    def loss(self, output: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(output, y)
        if self.penalty:  # the gradient of a gradient
            (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
            loss = loss + slope.square().sum(1).mean()
        return loss

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


MAX_NORM = 0.05
"""All gradients are larger."""


def clip(net: Net, optimizer: Optimizer | None = None) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)


def thaw(net: Net, optimizer: Optimizer) -> None:
    net.requires_grad_()


def freeze(net: Net, optimizer: Optimizer) -> None:
    assert isinstance(net, nn.Sequential)
    net[0].requires_grad_(False)


def grow(net: Net, optimizer: Optimizer) -> None:
    """Append a layer."""
    torch.manual_seed(8)
    layer = nn.Linear(CLASSES, CLASSES, dtype=torch.float64)
    assert isinstance(net, nn.Sequential)
    net.append(layer)
    optimizer.add_param_group({"params": list(layer.parameters())})


# --- interfaces ------------------------------------------------------------------------------------------


class Local:
    """One process on the whole batch. Other interfaces override what differs."""

    def __init__(self, recipe: Recipe, net: Net, optimizer: Optimizer) -> None:
        self.recipe, self.net, self.optimizer = recipe, net, optimizer
        self.stepper = optimizer
        self.forward: Callable[[Tensor], Tensor] = net
        self.open()
        if recipe.compiled:
            # Without C++ code, which takes very long to compile.
            self.forward = torch.compile(self.forward, backend="aot_eager")

    def open(self) -> None:
        """Register the net; called again when it has new parameters."""

    def close(self) -> None:
        """Undo `open`."""

    def share(self, rows: Tensor) -> Tensor:
        """This rank's part of the rows."""
        return rows

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward."""
        return nullcontext()

    def after_backward(self) -> None:
        """After each backward pass."""

    def synchronize(self) -> None:
        """After the last backward pass of a step."""

    def clip(self) -> None:
        """Clip synchronized gradients by a function of this interface."""
        clip(self.net)

    def step(self) -> None:
        """Synchronize and step."""
        self.synchronize()
        self.stepper.step()

    def step_with_closure(self, closure: Callable[[], Tensor]) -> None:
        """Step with an optimizer that computes several gradients; `closure` computes one and returns the loss."""
        self.stepper.step(closure)


class Shared(Local):
    """A part of the batch on each rank."""

    def share(self, rows: Tensor) -> Tensor:
        return rows.chunk(mpi.size() // self.recipe.width)[mpi.rank() // self.recipe.width]

    def clip(self) -> None:
        mpinn.clip_grad_norm_(self.net, MAX_NORM)

    def step_with_closure(self, closure: Callable[[], Tensor]) -> None:
        def synchronized() -> Tensor:
            loss = closure()
            self.synchronize()
            result: Tensor = mpi.allreduce(loss.detach().clone(), op="avg")
            return result

        self.stepper.step(synchronized)


class Sync(Shared):
    """``synchronize_gradients``."""

    def synchronize(self) -> None:
        mpinn.synchronize_gradients(self.net)


class Hooks(Shared):
    """``register_async_backward``."""

    def open(self) -> None:
        mpinn.register_async_backward(self.net, self.recipe.passes, bucket_bytes=200)

    def close(self) -> None:
        mpinn.unregister_async_backward(self.net)

    def after_backward(self) -> None:
        mpinn.synchronize_gradients_async(self.net)


class Wrapped(Shared):
    """``DistributedOptimizer``."""

    asynchronous = False

    def open(self) -> None:
        self.stepper = self.wrapper = mpinn.DistributedOptimizer(
            self.optimizer, self.net, asynchronous=self.asynchronous, backward_passes_per_step=self.recipe.passes
        )

    def synchronize(self) -> None:
        self.wrapper.synchronize()

    def step(self) -> None:
        self.wrapper.step()

    def step_with_closure(self, closure: Callable[[], Tensor]) -> None:
        self.wrapper.step(closure)


class WrappedHooks(Wrapped):
    """``DistributedOptimizer(asynchronous=True)``."""

    asynchronous = True

    def close(self) -> None:
        mpinn.unregister_async_backward(self.net)


class Ddp(Shared):
    """DistributedDataParallel over the backend torchmpi."""

    def open(self) -> None:
        # Small buckets, so that there are several; torch.compile requires those of the default size.
        self.replica = DistributedDataParallel(
            self.net,
            find_unused_parameters=self.recipe.net is Branches,
            bucket_cap_mb=None if self.recipe.compiled else 1e-4,
        )
        self.forward = self.replica

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self.replica.no_sync()


INTERFACES: dict[str, type[Local]] = {
    "sync": Sync, "hooks": Hooks, "optimizer": Wrapped, "optimizer hooks": WrappedHooks, "ddp": Ddp,
}  # fmt: skip


def train(recipe: Recipe, interface: type[Local], *, renew: bool = True) -> Net:
    """Train for a few steps; without `renew`, the interface is not told of late parameters."""
    net, optimizer = recipe.make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=recipe.scaler)
    run = interface(recipe, net, optimizer)
    try:
        for step in range(STEPS):
            if recipe.late is not None and step == LATE:
                if renew:
                    run.close()
                recipe.late(net, optimizer)
                if renew:
                    run.open()
            optimizer.zero_grad(recipe.set_to_none)
            for index in range(recipe.passes):
                x, y = map(run.share, recipe.batch(step * recipe.passes + index))
                x.requires_grad_(recipe.penalty)
                with run.accumulating(index == recipe.passes - 1):
                    with recipe.precision():
                        loss = recipe.loss(run.forward(x), x, y) / recipe.passes
                    scaler.scale(loss).backward()
                run.after_backward()
            if recipe.clip or recipe.scaler:
                run.synchronize()
                scaler.unscale_(run.stepper)
                if recipe.clip:
                    run.clip() if recipe.clip == "mpinn" else clip(net)
                scaler.step(run.stepper)
                scaler.update()
            else:
                run.step()
            if recipe.scheduler:
                scheduler.step()
    finally:
        run.close()
    return net


# --- the engine ------------------------------------------------------------------------------------------


def train_with_engine(recipe: Recipe, *, asynchronous: bool = False) -> Net:
    """The same by ``AllReduceSGDEngine.train()``."""
    net, optimizer = recipe.make()
    share = Shared(recipe, net, optimizer).share
    engine = AllReduceSGDEngine(use_gpu=False, asynchronous=asynchronous, progress=False)
    if recipe.late is not None:
        late = recipe.late
        engine.hooks.on_update.append(lambda state: late(net, optimizer) if state.t == LATE else None)
    engine.train(
        network=torch.compile(net, backend="aot_eager") if recipe.compiled else net,
        criterion=cross_entropy,
        iterator=[tuple(map(share, recipe.batch(index))) for index in range(STEPS * recipe.passes)],
        optimizer=optimizer,
        accumulate=recipe.passes,
        clip_grad_norm=MAX_NORM if recipe.clip else None,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if recipe.scheduler else None,
        scheduler_step="step",
        autocast=recipe.autocast,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10) if recipe.scaler else None,
    )
    return net


# --- two nets, and closures ------------------------------------------------------------------------------


def train_adversaries(interface: type[Local]) -> nn.ModuleList:
    """Train a generator and a discriminator in turns, each with its own optimizer."""
    recipe = Recipe()
    torch.manual_seed(7)
    nets = nn.ModuleList([nn.Sequential(mlp(), nn.Linear(CLASSES, FEATURES)), mlp()]).double()
    runs = [interface(recipe, net, torch.optim.Adam(net.parameters(), lr=0.02)) for net in nets]
    maker, judge = runs
    for step in range(STEPS):
        noise, real = (maker.share(recipe.batch(2 * step + part)[0]) for part in (0, 1))
        judge.optimizer.zero_grad()
        made = maker.forward(noise)
        verdicts = judge.forward(torch.cat([real, made.detach()]))
        right = torch.arange(len(verdicts)) // len(real)
        cross_entropy(verdicts, right).backward()
        judge.after_backward()
        judge.step()

        maker.optimizer.zero_grad()
        judge.net.requires_grad_(False)  # its gradients are not needed, and its hooks must not send them
        cross_entropy(judge.net(made), torch.zeros(len(made), dtype=torch.int64)).backward()
        judge.net.requires_grad_(True)
        maker.after_backward()
        maker.step()
    for run in runs:
        run.close()
    return nets


def train_with_closure(interface: type[Local]) -> Net:
    """Train with LBFGS, which calls its closure until the loss has decreased enough."""
    recipe = Recipe()
    net, _ = recipe.make()
    run = interface(recipe, net, torch.optim.LBFGS(net.parameters(), lr=0.5, line_search_fn="strong_wolfe", max_iter=5))
    x, y = map(run.share, recipe.batch(0))

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = cross_entropy(run.forward(x), y)
        loss.backward()
        run.after_backward()
        return loss

    for _ in range(2):
        run.step_with_closure(closure)
    run.close()
    return net
