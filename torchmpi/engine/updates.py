"""One update of the parameters from several batches: options, weights of the batches, and backward passes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..nn import DistributedOptimizer
from .state import Sample, State

Weight = Literal["batch", "example"]


@dataclass(frozen=True)
class UpdateOptions:
    """How ``train()`` makes an update. The options are equal on all ranks.

    Args:
        accumulate: Number of batches per update, on each rank.
        weight: Whether batches or examples have equal weights in the average of the gradients.
    """

    accumulate: int = 1
    weight: Weight = "batch"

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ArgumentError(f"accumulate={self.accumulate}: expected a number of batches from 1")
        if self.weight not in ("batch", "example"):
            raise ArgumentError(f"weight={self.weight!r}: expected 'batch' or 'example'")

    @property
    def weighs_ranks_equally(self) -> bool:
        """Whether every rank with a batch has the same weight in the average."""
        return self.accumulate == 1 and self.weight == "batch"


def num_accumulated(optimizer: torch.optim.Optimizer | None, accumulate: int | None) -> int:
    """Return the number of batches per update; a DistributedOptimizer has a number of its own.

    >>> num_accumulated(None, None), num_accumulated(None, 4)
    (1, 4)
    """
    if not isinstance(optimizer, DistributedOptimizer):
        return 1 if accumulate is None else accumulate
    own = optimizer.backward_passes_per_step
    if accumulate not in (None, own):
        raise ArgumentError(
            f"accumulate={accumulate}, but the optimizer is a DistributedOptimizer(backward_passes_per_step={own}). "
            "Give both the same number, or omit accumulate."
        )
    return own


def check_optimizer(optimizer: Any) -> None:
    """Refuse optimizers that the loop cannot step, and which it would otherwise use in a wrong way."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"optimizer= is a {type(optimizer).__name__}: an engine steps one optimizer of torch.optim. Put the "
            "parameters into several param_groups of one optimizer; for networks with optimizers of their own, as in a "
            "GAN, write the loop with torchmpi.nn."
        )
    inner = unwrapped(optimizer)
    closure = inspect.signature(type(inner).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ArgumentError(
            f"{type(inner).__name__}.step() needs a closure that computes the loss several times, which an engine does "
            "not call. Write the loop with torchmpi.nn.DistributedOptimizer, whose step(closure) synchronizes "
            "gradients and loss."
        )


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside a DistributedOptimizer, or the optimizer itself."""
    return optimizer.optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer


def trained_parameters(state: State) -> list[nn.Parameter]:
    """Return the trainable parameters of network and criterion, each once."""
    modules = (m for m in (state.network, state.criterion) if isinstance(m, nn.Module))
    # A dict, because a criterion may share parameters with the network.
    return list({p: None for module in modules for p in module.parameters() if p.requires_grad})


class Update:
    """One update: its backward passes, and the factor that turns the sum of their gradients into the average.

    A batch of weight w adds ``gradient * w / accumulate``. The ranks average these sums, and ``rescale()`` completes
    the average over all batches. With full groups of equal weights there is nothing to rescale.
    """

    def __init__(self, options: UpdateOptions) -> None:
        self._options = options
        self.num_batches = 0
        self.weight = 0
        """Sum of the weights of the batches of this rank."""

    @property
    def is_full(self) -> bool:
        """Whether all batches of the update have been added."""
        return self.num_batches == self._options.accumulate

    def backward(self, loss: Tensor, sample: Sample) -> None:
        """Add the gradient of one batch."""
        weight = 1 if self._options.weight == "batch" else _num_examples(sample)
        self.num_batches += 1
        self.weight += weight
        if weight == 0:
            return  # the mean over no examples is nan
        factor = weight / self._options.accumulate
        (loss if factor == 1 else loss * factor).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def rescale(self, optimizer: torch.optim.Optimizer, total_weight: int, size: int) -> None:
        """Complete the average, given the weights of all `size` ranks, after the ranks have averaged their sums."""
        factor = size * self._options.accumulate / max(1, total_weight)
        if factor != 1:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)


def _num_examples(sample: Sample) -> int:
    if not (isinstance(sample.target, Tensor) or isinstance(sample.input, Tensor)):
        raise ArgumentError(
            "weight='example' counts the rows of the target or the input, but in this batch neither is a tensor: they "
            f"are {type(sample.target).__name__} and {type(sample.input).__name__}. Use weight='batch'."
        )
    return sample.num_rows
