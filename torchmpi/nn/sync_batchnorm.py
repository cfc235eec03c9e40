"""Batch normalization with the statistics of the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import collectives
from ..argument_types import checks_types
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..errors import ArgumentError, kind_of, rank_prefix
from ..session import runtime
from .replica import Attachment

Module = TypeVar("Module", bound=nn.Module)
_CONVERTIBLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@checks_types
class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the mini-batches of all ranks, on CPUs and GPUs. Collective in training mode.

    In training mode the forward pass normalizes with the mean and variance of the complete batch: the batches of all
    ranks together, which may have different sizes, also 0. The backward pass takes the dependence of the statistics on
    the inputs of all ranks into account. In evaluation mode the layer is ``nn.BatchNorm`` and does not communicate.
    16-bit inputs are normalized in float32.

    The gradients of ``weight`` and ``bias`` are those of this rank's outputs, as for every other layer: average them
    over the ranks with ``synchronize_gradients`` and the like.

    Args:
        num_features: Number of channels, dimension 1 of the input.
        eps: Added to the variance.
        momentum: Weight of the new value in the running statistics; None for the average over all batches.
        affine: Scale and shift with ``weight`` and ``bias``.
        track_running_stats: Keep running statistics for evaluation; without them the evaluation mode normalizes with
            the statistics of this rank's batch.
        comm: Communicator, group or level; default: the communicator that is current in each forward pass. Copies of
            the layer share it; pickles do not contain it.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ArgumentError: In the forward pass: the input does not have `num_features` channels, or, on all ranks, the
            complete batch has one value per channel. In the backward pass: with ``create_graph=True``, since second
            derivatives are not available.

    Example:
        model = nn.Sequential(nn.Linear(4, 8), mpinn.SyncBatchNorm(8), nn.ReLU())
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        comm: Comm = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._chosen_comm = _chosen(comm)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`, of shape (N, C) or (N, C, ...)."""
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ArgumentError(
                f"{rank_prefix()}SyncBatchNorm({self.num_features}) got an input of shape {list(input.shape)}; it "
                f"needs {self.num_features} channels in dimension 1."
            )
        if not self.training:
            return nn.functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.running_mean is None,
                eps=self.eps,
            )
        chosen = self._chosen_comm
        comm = runtime.communicator(None) if chosen is None else chosen.comm
        mean, variance, count = _global_statistics(input, comm)
        self._track(mean, variance, count)
        normalize: Callable[..., Tensor] = _Normalize.apply
        return normalize(input, self.weight, self.bias, mean, variance, self.eps, count, comm)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        if self.running_mean is None or self.running_var is None or count == 0:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        fraction = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        self.running_mean.mul_(1 - fraction).add_(mean, alpha=fraction)
        self.running_var.mul_(1 - fraction).add_(unbiased, alpha=fraction)

    @classmethod
    def convert_sync_batchnorm(cls, module: Module, comm: Comm = None) -> Module:
        """Convert all BatchNorm and ``torch.nn.SyncBatchNorm`` layers of a module, in place.

        The layers remain the same objects, with the same parameters, buffers, hooks and ``state_dict()``, so that an
        optimizer may be made before.

        Args:
            module: The module, which may be such a layer itself.
            comm: Communicator, group or level of the layers; default: the communicator that is current in each forward
                pass.

        Returns:
            `module`.

        Raises:
            ArgumentError: A layer is a subclass of BatchNorm, or lazy, so that its forward pass is another one.

        Example:
            model = mpinn.SyncBatchNorm.convert_sync_batchnorm(model)
        """
        found = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
        }
        for name, layer in found.items():
            if type(layer) not in _CONVERTIBLE:
                raise ArgumentError(
                    f"{rank_prefix()}convert_sync_batchnorm: {name!r} is {kind_of(layer)}, a BatchNorm with a "
                    "forward pass of its own. Replace the layer before; a lazy one needs a batch first."
                )
        for layer in found.values():
            layer.__class__ = cls
            layer.__dict__.pop("process_group", None)  # of torch.nn.SyncBatchNorm
            layer._chosen_comm = _chosen(comm)  # type: ignore[assignment]
        return module


class _ChosenComm(Attachment):
    """The communicator given to a layer. Copies of the layer share it; pickles contain None."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> _ChosenComm:
        return self


def _chosen(comm: Comm) -> _ChosenComm | None:
    return None if comm is None else _ChosenComm(runtime.communicator(comm))


@torch.no_grad()
def _global_statistics(input: Tensor, comm: Communicator) -> tuple[Tensor, Tensor, int]:
    """Return mean and variance of each channel over all ranks, and the number of values per channel. Collective.

    The ranks exchange means and sums of squared deviations, which do not cancel as sums of squares would.
    """
    values, dims = _widened(input.detach()), _all_but_channels(input)
    count = input.numel() // input.shape[1]
    mean = values.sum(dims) / max(count, 1)
    deviation = (values - _per_channel(mean, values)).square().sum(dims)
    local = torch.cat([mean, deviation, mean.new_tensor([count])])
    gathered = collectives.allgather(local.unsqueeze(0), comm=comm)
    means, deviations, counts = torch.split(gathered, [len(mean), len(mean), 1], dim=1)
    total = int(counts.double().sum().item())
    if total == 1:
        raise ArgumentError(
            f"rank {comm.rank}: SyncBatchNorm got one value per channel on all ranks together, which has no variance. "
            "Use larger batches, or eval()."
        )
    mean = (means * counts).sum(0) / max(total, 1)
    variance = (deviations + counts * (means - mean).square()).sum(0) / max(total, 1)
    return mean, variance, total


class _Normalize(torch.autograd.Function):
    """Normalization with statistics of the inputs of all ranks, which are part of the derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        count: int,
        comm: Communicator,
    ) -> Tensor:
        inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.count, ctx.comm = count, comm
        values = _widened(input)
        scale = inverse if weight is None else inverse * weight
        output = (values - _per_channel(mean, values)) * _per_channel(scale, values)
        if bias is not None:
            output += _per_channel(bias, values)
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ArgumentError(
                f"rank {ctx.comm.rank}: SyncBatchNorm has no second derivatives, which create_graph=True asks for. Use "
                "eval(), or a normalization without batch statistics such as nn.GroupNorm."
            )
        input, weight, mean, inverse = ctx.saved_tensors
        values, dims = _widened(input), _all_but_channels(input)
        gradient = gradient.to(values.dtype)
        normalized = (values - _per_channel(mean, values)) * _per_channel(inverse, values)
        sums = torch.stack([gradient.sum(dims), (gradient * normalized).sum(dims)])
        of_bias, of_weight = sums.unbind()
        of_input = None
        if ctx.needs_input_grad[0]:
            means = collectives.allreduce(sums.clone(), comm=ctx.comm) / max(ctx.count, 1)
            scale = inverse if weight is None else inverse * weight
            centered = gradient - _per_channel(means[0], values) - normalized * _per_channel(means[1], values)
            of_input = (centered * _per_channel(scale, values)).to(input.dtype)
        of_parameters = [None if weight is None else each.to(weight.dtype) for each in (of_weight, of_bias)]
        return of_input, *of_parameters, None, None, None, None, None


def _widened(tensor: Tensor) -> Tensor:
    """Return 16-bit values in float32."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return one value per channel in the shape that broadcasts to `like`."""
    return values.view(1, -1, *[1] * (like.dim() - 2))
