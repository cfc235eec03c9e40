"""A linear layer whose input features are divided over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import collectives
from ..backends.schedule import part_of
from ..communicators.communicator import Communicator
from ..errors import ArgumentError
from .channel import resolve
from .replica import SHARDED, Attachment


class MPLinear(nn.Module):
    """``nn.Linear`` with its input features divided over the ranks, for weights that are too large for one.

    Every rank gives the same, whole input and gets the same, whole output; it holds only its columns of the
    weight, computes its part, and the parts are added. So it can stand anywhere in a net that is replicated
    and fed the *same batch* on all ranks. Feature counts that do not divide evenly are fine. With the same
    seed on all ranks the weights are those of ``nn.Linear``.

    ``weight`` is marked ``torchmpi_sharded``: the ``synchronize_*`` functions and checks leave it alone.
    ``bias`` is whole on every rank.

        layer = mpinn.MPLinear(784, 10)
        layer(x).sum().backward()
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: int | Communicator | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._home = _Home(resolve(comm))
        # The whole weight is drawn, so that neither the values nor the state of the generator depend on the
        # number of ranks.
        full = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        begin, length = self._home.part(in_features)
        self.weight = nn.Parameter(full.weight.detach()[:, begin : begin + length].clone())
        self.bias = full.bias
        setattr(self.weight, SHARDED, True)

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1] != self.in_features:
            raise ArgumentError(
                f"MPLinear({self.in_features}, {self.out_features}) got an input of shape "
                f"{list(input.shape)}. Give it the whole input, with {self.in_features} features in the "
                "last dimension."
            )
        home = self._home
        partial_output = nn.functional.linear(_Narrow.apply(input, home), self.weight)
        output: Tensor = _Reduce.apply(partial_output, home)
        return output if self.bias is None else output + self.bias

    @torch.no_grad()
    def full_weight(self) -> Tensor:
        """The weight of the equivalent ``nn.Linear``, on every rank. Collective.

        torch.save(layer.full_weight(), "weight.pt")
        """
        return _gather_last(self.weight.detach(), self._home)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features} ({self.weight.shape[1]} here), "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        setattr(self.weight, SHARDED, True)  # copying a parameter drops its attributes
        # The communicator of the job that wrote a pickle is of no use in the one that reads it.
        self._home = self._home or _Home(resolve(None))


class _Home(Attachment):
    """The communicator of a layer. Copies of the layer share it; pickles do without."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> _Home:
        return self

    def part(self, length: int) -> tuple[int, int]:
        """Begin and length of this rank's part of `length` features."""
        return part_of(length, self.comm.size, self.comm.rank)


def _sum(tensor: Tensor, home: _Home) -> Tensor:
    result: Tensor = collectives.allreduce(tensor.detach().clone(memory_format=torch.contiguous_format), comm=home.comm)
    return result


def _gather_last(tensor: Tensor, home: _Home) -> Tensor:
    """Concatenate along the last dimension, in rank order."""
    rows = tensor.detach().movedim(-1, 0).contiguous()
    return collectives.allgather(rows, comm=home.comm).movedim(0, -1)


# Seen by the whole job these four are linear maps, and the transposes of each other: the values a replicated
# tensor has on all ranks are one value, those of a partial or divided one are many.


class _Reduce(torch.autograd.Function):
    """Partial sums to their replicated total."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, home: _Home) -> Tensor:
        ctx.home = home
        return _sum(part, home)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Replicate.apply(gradient, ctx.home), None


class _Replicate(torch.autograd.Function):
    """A replicated value to one part on each rank."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, home: _Home) -> Tensor:
        ctx.home = home
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Reduce.apply(gradient, ctx.home), None


class _Narrow(torch.autograd.Function):
    """The features of this rank, of a replicated input."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, home: _Home) -> Tensor:
        ctx.home = home
        return whole.narrow(-1, *home.part(whole.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(gradient, ctx.home), None


class _Gather(torch.autograd.Function):
    """The features of all ranks, side by side on each."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, home: _Home) -> Tensor:
        ctx.home = home
        return _gather_last(part, home)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Narrow.apply(gradient, ctx.home), None
