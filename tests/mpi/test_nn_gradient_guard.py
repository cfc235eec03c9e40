"""To whoever uses gradients too early: a table of the uses, the interfaces that see them, and whom the error names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
from helpers.nn_nets import loss, make, mine, values
from torch import nn

import torchmpi as mpi
import torchmpi.horovod as hvd
import torchmpi.nn as mpinn
from torchmpi.errors import GradientError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("initialized")]


@pytest.fixture(scope="module")
def initialized(world) -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


class Interface(NamedTuple):
    """A way to synchronize gradients."""

    wrap: Callable[[nn.Module, torch.optim.Optimizer], Any]
    """Watches the net, and returns what synchronizes it."""
    synchronize: Callable[[nn.Module, Any], object]
    call: str
    """The remedy in messages."""


def registered(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mpinn.register_async_backward(net)


def in_one_call(net: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    return mpinn.DistributedOptimizer(optimizer, net, asynchronous=False)


INTERFACES = {
    "call": Interface(
        lambda net, optimizer: None,
        lambda net, wrapped: mpinn.synchronize_gradients(net),
        r"synchronize_gradients\(net\) after backward",
    ),
    "hooks": Interface(
        registered,
        lambda net, wrapped: mpinn.synchronize_gradients_async(net),
        r"synchronize_gradients_async\(net\) after backward, also in a closure",
    ),
    "optimizer": Interface(
        in_one_call,
        lambda net, wrapped: wrapped.synchronize(),
        r"step\(\) of the DistributedOptimizer, or its synchronize\(\)",
    ),
    "optimizer hooks": Interface(
        lambda net, optimizer: mpinn.DistributedOptimizer(optimizer, net),
        lambda net, wrapped: wrapped.synchronize(),
        r"step\(\) of the DistributedOptimizer, or its synchronize\(\)",
    ),
    "horovod": Interface(
        lambda net, optimizer: hvd.DistributedOptimizer(optimizer, net.named_parameters()),
        lambda net, wrapped: wrapped.synchronize(),
        r"step\(\) or synchronize\(\) of the optimizer",
    ),
}


class Loop:
    """A net, and a loop with one of the interfaces."""

    def __init__(self, interface: Interface) -> None:
        self.net, self.inputs, self.targets = make("mlp")
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.interface, self.wrapped = interface, interface.wrap(self.net, self.optimizer)

    @property
    def stepper(self) -> torch.optim.Optimizer:
        return self.optimizer if self.wrapped is None else self.wrapped

    def backward(self) -> None:
        loss(self.net, mine(self.inputs), mine(self.targets)).backward()

    def synchronize(self) -> None:
        self.interface.synchronize(self.net, self.wrapped)


def scaler() -> torch.amp.GradScaler:
    """A GradScaler that has scaled a loss."""
    result = torch.amp.GradScaler("cpu", init_scale=1.0)
    result.scale(torch.ones(1))
    return result


def fused(loop: Loop) -> None:
    scaler().step(torch.optim.SGD(loop.net.parameters(), lr=0.1, fused=True))


def end_join(loop: Loop) -> None:
    loop.synchronize()
    with mpinn.join(loop.net):
        loop.backward()


USES: dict[str, Callable[[Loop], object]] = {
    "step": lambda loop: loop.optimizer.step(),
    "unscale": lambda loop: scaler().unscale_(loop.stepper),
    "scaled step": lambda loop: scaler().step(loop.stepper),
    "scaled fused step": fused,
    "change": lambda loop: loop.net[0].weight.grad.mul_(2),
    "clear": lambda loop: loop.stepper.zero_grad(),
    "backward": Loop.backward,
    "join": end_join,
    "clip": lambda loop: mpinn.clip_grad_norm_(loop.net, 0.1),
}
SGD, SCALER, SOMEBODY = r"step\(\) of SGD uses", "a GradScaler uses", "some rank has changed or used"
HOOKS = ("hooks", "optimizer hooks")
WATCHED = ("optimizer", *HOOKS)
ANOTHER = r"another backward than backward_passes_per_step=1 adds to"
SEEN: dict[str, dict[str, str]] = {
    "step": {"call": SOMEBODY, **dict.fromkeys((*WATCHED, "horovod"), SGD)},
    "unscale": {"call": SOMEBODY, **dict.fromkeys((*WATCHED, "horovod"), SCALER)},
    "scaled step": {"call": SOMEBODY, **dict.fromkeys((*WATCHED, "horovod"), SCALER)},
    "scaled fused step": {"call": SOMEBODY, **dict.fromkeys((*WATCHED, "horovod"), SGD)},
    "change": dict.fromkeys(WATCHED, SOMEBODY),
    "clear": {**dict.fromkeys(HOOKS, SOMEBODY), "horovod": r"zero_grad\(\) clears"},
    "backward": {**dict.fromkeys(HOOKS, "backward number 2 adds to"), "horovod": ANOTHER},
    "join": dict.fromkeys(HOOKS, "the end of the join block drops"),
    "clip": {"call": r"clip_grad_norm_\(\), with norms that differ between the ranks \(.*\), uses"},
}
"""For each use the interfaces that refuse it, and the beginning of the error.

``call`` has no hooks, and averages what it finds; the others finish the reductions before they clip.
"""
CASES = [
    pytest.param(use, name, marks=[pytest.mark.min_ranks(2)] if "horovod" in name or use == "clip" else [])
    for use, seen in SEEN.items()
    for name in seen
]


@pytest.mark.parametrize(("use", "name"), CASES)
def test_an_early_use_is_refused(agree, use, name):
    loop = Loop(INTERFACES[name])
    which = r"the gradient of '[02]\.(weight|bias)'( and \d others?)? before it is synchronized"
    error = rf"^rank {mpi.rank()}: {SEEN[use][name]} {which}\. Call {loop.interface.call}, before gradients are clipped"
    with pytest.raises(GradientError, match=error):
        for _ in range(2):  # without hooks a step is known from the second one on
            loop.net.zero_grad()
            loop.backward()
            before = values(loop.net)
            USES[use](loop)
            loop.synchronize()
    if SEEN[use][name] in (SGD, SCALER):
        agree.equal(values(loop.net), before, "refused before the step")
    with suppress(GradientError):
        loop.synchronize()  # where the error was that of one rank
    loop.net.zero_grad()
    loop.backward()
    loop.synchronize()  # the error is not repeated
    gradient = loop.net[0].weight.grad
    agree.close(gradient, mpi.allreduce(gradient.clone(), op="avg"))
    if name in HOOKS:
        mpinn.unregister_async_backward(loop.net)


@pytest.mark.parametrize("name", INTERFACES)
def test_uses_after_the_synchronization_are_allowed(agree, name):
    loop = Loop(INTERFACES[name])
    for _ in range(3):
        loop.stepper.zero_grad()
        loop.backward()
        loop.synchronize()
        loop.net[0].weight.grad.mul_(0.5)
        mpinn.clip_grad_norm_(loop.net, 0.1)
        scaler().unscale_(loop.stepper)
        loop.optimizer.step()
    mpinn.check_with_allreduce(loop.net)
    if name in HOOKS:
        mpinn.unregister_async_backward(loop.net)
