"""One update of the parameters from several batches: options, backward passes, clipping, and the optimizer's step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, GradientError, kind_of
from ..nn import DistributedOptimizer
from ..nn.clipping import clamp_gradients
from .state import Sample

Weight = Literal["batch", "example"]
ClipNorm = Callable[[list[Tensor], float], Tensor]


@dataclass(frozen=True)
class UpdateOptions:
    """How ``train()`` makes an update. The options are equal on all ranks.

    The options are those of ``train()``; `has_scaler`: whether a GradScaler scales the loss.
    """

    accumulate: int = 1
    weight: Weight = "batch"
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    autocast: torch.dtype | None = None
    has_scaler: bool = False

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ArgumentError(f"accumulate={self.accumulate}: expected a number of batches from 1")
        if self.weight not in ("batch", "example"):
            raise ArgumentError(f"weight={self.weight!r}: expected 'batch' or 'example'")
        limits = {"clip_grad_norm": self.clip_grad_norm, "clip_grad_value": self.clip_grad_value}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if len(given) > 1:
            raise ArgumentError(f"{given}: give only one of them; a hook in on_backward can clip in addition")
        if any(not limit > 0 for limit in given.values()):
            raise ArgumentError(f"{given}: expected a number above 0, or None for no clipping")
        if self.autocast is torch.float16 and not self.has_scaler:
            raise ArgumentError(
                "autocast=torch.float16 without scaler=: small gradients would become zero. Pass "
                "scaler=torch.amp.GradScaler(device), with enabled=False for no scaling, or use torch.bfloat16."
            )

    @property
    def weighs_ranks_equally(self) -> bool:
        """Whether every rank with a batch has the same weight in the average."""
        return self.accumulate == 1 and self.weight == "batch"


def autocast_dtype(autocast: torch.dtype | bool | None) -> torch.dtype | None:
    """Return the data type of an argument ``autocast=``.

    >>> autocast_dtype(True)
    torch.bfloat16
    """
    if autocast in (None, False):
        return None
    if autocast is True:
        return torch.bfloat16
    if autocast not in (torch.bfloat16, torch.float16):
        raise ArgumentError(f"autocast={autocast!r}: expected torch.bfloat16, torch.float16, True (bfloat16) or None")
    assert isinstance(autocast, torch.dtype)
    return autocast


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
            f"optimizer= is {kind_of(optimizer)}: an engine steps one optimizer of torch.optim. Put the "
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


def trained_parameters(network: nn.Module, criterion: Callable[..., Tensor]) -> list[nn.Parameter]:
    """Return the trainable parameters of network and criterion, each once.

    >>> len(trained_parameters(nn.Linear(2, 2), nn.CrossEntropyLoss()))
    2
    """
    modules = (module for module in (network, criterion) if isinstance(module, nn.Module))
    # A dict, because a criterion may share parameters with the network.
    return list({p: None for module in modules for p in module.parameters() if p.requires_grad})


class GradientUpdate:
    """One update: its backward passes, and the factor that turns the sum of their gradients into the average.

    A batch of weight w adds ``gradient * w / accumulate``. The ranks average these sums, and ``complete()`` makes the
    result the average over all batches. With full groups of equal weights there is nothing to do.
    """

    def __init__(
        self, options: UpdateOptions, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._options, self._optimizer, self._scaler = options, optimizer, scaler
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
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
        loss = loss if factor == 1 else loss * factor
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()

    @torch.no_grad()
    def complete(self, total_weight: int, size: int) -> None:
        """Complete the average, given the weights of all `size` ranks, and undo the scaling of the losses.

        The ranks have averaged their sums before. An infinite gradient of one rank is not finite on any rank then, so
        that all scalers skip the same updates and keep the same scale.
        """
        factor = size * self._options.accumulate / max(1, total_weight)
        if factor != 1:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self._scaler is not None:
            if not self.weight:  # a scaler creates its scale at the first use
                self._scaler.scale(torch.zeros((), device=self._parameters[0].device))
            self._scaler.unscale_(self._optimizer)

    def clip(self, clip_norm: ClipNorm) -> Tensor | None:
        """Clip the gradients, which are equal on all ranks; return the norm before if there is a limit for it."""
        limit = self._options.clip_grad_norm
        if self._options.clip_grad_value is not None:
            clamp_gradients(self._parameters, self._options.clip_grad_value)
        if limit is None:
            return None
        norm = clip_norm(self._parameters, limit)
        if self._scaler is None and not norm.isfinite():
            raise GradientError(
                f"clip_grad_norm={limit}: the norm of the averaged gradient is {norm.item()}, on all ranks, so the "
                "update would make parameters nan. Use a smaller learning rate, or check the data of all ranks for nan."
            )
        return norm

    def step(self) -> bool:
        """Step the optimizer; return False if the scaler has skipped the step, on all ranks."""
        if self._scaler is None:
            self._optimizer.step()
            return True
        scale = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return self._scaler.get_scale() >= scale


def _num_examples(sample: Sample) -> int:
    if not (isinstance(sample.target, Tensor) or isinstance(sample.input, Tensor)):
        raise ArgumentError(
            "weight='example' counts the rows of the target or the input, but in this batch neither is a tensor: they "
            f"are {type(sample.target).__name__} and {type(sample.input).__name__}. Use weight='batch'."
        )
    return sample.num_rows
