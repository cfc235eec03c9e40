"""The reduction of gradients: a sum over ranks, divided by a number of ranks or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import collectives
from ..collectives import tensor_lists
from ..communicators.communicator import Communicator
from ..config import Operation
from ..errors import ArgumentError, rank_prefix
from ..tensors import sparse, streams
from .error_feedback import GradientCompressor, GradientView


class ReducibleBucket(Protocol):
    """Parameters, and their gradients as views of a flat tensor."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters."""

    @property
    def views(self) -> Sequence[Tensor]:
        """Their gradients."""


class GradientReduction(NamedTuple):
    """A sum over `size` ranks, divided by `divisor`.

    A divisor of 1 gives the sum, `size` the average, and a smaller number the average over some ranks. With `wire`, a
    16-bit dtype, wider values are sent in that dtype; with `compressor`, as that says.
    """

    divisor: int
    size: int
    wire: torch.dtype | None = None
    compressor: GradientCompressor | None = None

    def average_over(self, size: int) -> GradientReduction:
        """Return the average over all ranks of another communicator, sent in the same way."""
        return self._replace(divisor=size, size=size)

    def is_compressed(self, comm: Communicator) -> bool:
        """Return whether a compressor is used for `comm`, after it is prepared. Collective the first time."""
        if self.compressor is None or not self.compressor.applies(comm):
            return False
        self.compressor.prepare(comm)
        return True

    def run(self, flat: Tensor, comm: Communicator) -> None:
        """Reduce `flat` in place."""
        if self.divisor in (self.size, 1) and self.wire is None:
            collectives.allreduce(flat, op="avg" if self.divisor == self.size else "sum", comm=comm)
        else:
            self.start(flat, None, comm)()

    def run_many(self, tensors: Sequence[Tensor], comm: Communicator) -> None:
        """Reduce a sum that is divided by another number than that of all ranks, in place."""
        totals: list[Tensor] = []
        storages: set[int] = set()
        for tensor in tensors:
            total, storage = _widened(tensor), tensor.untyped_storage().data_ptr()
            # Parameters may share a gradient, which must be divided once; other ranks pass one for each parameter.
            totals.append(total.clone() if total is tensor and storage in storages else total)
            storages.add(storage)
        tensor_lists.allreduce_many(totals, comm=comm)
        for tensor, total in zip(tensors, totals, strict=True):
            torch.div(total, self.divisor, out=total)
            if total is not tensor:
                tensor.copy_(total)

    def start(self, flat: Tensor, bucket: ReducibleBucket | None, comm: Communicator) -> Callable[[], object]:
        """Launch the reduction of `flat` in place and return the function that finishes it.

        `bucket` is that of the gradients; None if no compressor is used for `comm`.
        """
        if bucket is not None and flat.is_floating_point() and flat.numel() and self.is_compressed(comm):
            assert self.compressor is not None
            members = [GradientView(*pair) for pair in zip(bucket.parameters, bucket.views, strict=True)]
            return self.compressor.start(flat, members, comm, self.divisor)
        is_compressed = self.wire is not None and flat.is_floating_point() and flat.element_size() > 2
        is_complete = self.divisor in (self.size, 1)
        op: Operation = "avg" if self.divisor == self.size else "sum"
        if is_complete and not is_compressed:
            return collectives.allreduce_async(flat, op=op, comm=comm).wait
        total = flat.to(self.wire) if is_compressed else _widened(flat)
        handle = collectives.allreduce_async(total, op=op, comm=comm)

        def finish() -> None:
            handle.wait()
            streams.use_here(total)  # possibly allocated on the stream of a hook
            result = flat.copy_(total) if is_compressed else total
            if not is_complete:
                torch.div(result, self.divisor, out=result)
            if result is not flat:
                flat.copy_(result)

        return finish

    def run_sparse(self, parameter: Tensor, comm: Communicator) -> None:
        """Replace the sparse gradient of `parameter` by the reduction over all ranks; a missing gradient is zero.

        The result is sparse and coalesced, and the same on all ranks.
        """
        gradient = parameter.grad
        if gradient is None:
            # Without a gradient the sparse dimensions are unknown; autograd makes sparse rows only.
            indices = torch.empty(0, 1, dtype=torch.int64, device=parameter.device)
            values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
        else:
            indices, values = sparse.entries(gradient)
        gather = partial(collectives.allgather, comm=comm)
        total = sparse.total(indices, values, parameter.shape, gather, divisor=self.divisor)
        parameter.grad = total.coalesce()


_WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Compression = Literal["fp16", "bf16"] | GradientCompressor


class GradientTransport(NamedTuple):
    """How gradients are sent: in a 16-bit dtype, by a compressor, or as they are."""

    wire: torch.dtype | None = None
    compressor: GradientCompressor | None = None


_AS_THEY_ARE = GradientTransport()


def transport(compression: Compression | None) -> GradientTransport:
    """Return how gradients are sent."""
    if compression is None:
        return _AS_THEY_ARE
    if isinstance(compression, GradientCompressor):
        return GradientTransport(None, compression)
    if compression not in _WIRES:
        raise ArgumentError(
            f"{rank_prefix()}compression={compression!r} is not None, 'fp16', 'bf16' or a compressor, such as "
            "torchmpi.nn.EightBit()."
        )
    return GradientTransport(_WIRES[compression])


def _widened(tensor: Tensor) -> Tensor:
    """Return 16-bit values in float32: a sum that is divided afterwards must be rounded once, not twice."""
    return tensor.float() if tensor.element_size() < 4 and tensor.is_floating_point() else tensor
