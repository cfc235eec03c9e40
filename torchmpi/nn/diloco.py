"""DiLoCo: local training, and periodically an outer step of SGD with momentum along the average change of all ranks.

Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023. Exchanges during the next
steps, and of few bits: Douillard et al., Streaming DiLoCo with overlapping communication, 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import collectives
from ..argument_types import checks_types
from ..communicators.levels import Comm
from ..errors import ArgumentError, CheckpointError
from ..tensors.flat_buffers import FlatBuffers, cache_blocks
from .buckets import allocate_flat
from .channel import close_private, open_private
from .gradient_reduction import Compression, GradientReduction, transport
from .local_sgd import LocalSGDUpdate
from .periodic_update import check_whole

__all__ = ["DiLoCoUpdate"]


class _Exchanged(NamedTuple):
    """The parameters of one dtype and device, and their outer gradients as views of a flat tensor."""

    flat: Tensor
    parameters: Sequence[Tensor]
    views: Sequence[Tensor]


@checks_types
class DiLoCoUpdate(LocalSGDUpdate):
    """Takes an outer step every `update_frequency` steps.

    The outer gradient is ``anchor - parameters``, averaged over the ranks; the anchor is the result of the previous
    outer step. The outer step is that of ``torch.optim.SGD``, and its result is the new anchor and the parameters of
    all ranks. With ``outer_lr=1, outer_momentum=0`` it is :class:`LocalSGDUpdate`.

    Call ``update()`` once per step, *after* the step of the inner optimizer. The call and the constructor are
    collective. The first anchor is the network of rank 0, at the beginning or after `init_delay` steps.

    With `overlap_steps`, the outer gradient is exchanged in the background during that number of inner steps. Then the
    outer step is taken, and the parameters are the new anchor plus the change by these inner steps. No inner step is
    lost: the next outer gradient contains them. The networks of the ranks differ until :meth:`finish`; ``anchor`` does
    not.

    Args:
        network: The network.
        update_frequency: Steps between two outer steps.
        init_delay: Number of first steps that are not counted.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Momentum of the outer step.
        nesterov: Whether the outer step uses Nesterov's momentum.
        overlap_steps: Steps from the start of an exchange to its outer step, at most `update_frequency`; with 0,
            ``update()`` waits for the exchange.
        compression: How outer gradients are sent, as for ``mpinn.synchronize_gradients``. A compressor belongs to one
            update, and its state to a checkpoint. Collectives of ``EightBit`` and ``PowerSGD`` after their first one
            are not overlapped.
        comm: Communicator, or its level. Default: the current communicator.

    Raises:
        ArgumentError: An option is invalid, or the network has no trainable parameters.

    Example:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with mpinn.DiLoCoUpdate(model, update_frequency=100) as update:
            for x, y in batches:
                inner.zero_grad()
                loss(model(x), y).backward()
                inner.step()
                update.update()
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        update_frequency: int = 100,
        init_delay: int = 0,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        overlap_steps: int = 0,
        compression: Compression | None = None,
        comm: Comm = None,
    ) -> None:
        self.overlap_steps = overlap_steps
        super().__init__(network, update_frequency=update_frequency, init_delay=init_delay, comm=comm)
        if not outer_lr > 0 or not 0 <= outer_momentum < 1:
            raise ArgumentError(
                f"outer_lr={outer_lr!r} must be greater than zero, outer_momentum={outer_momentum!r} from 0 to below 1."
            )
        self.outer_lr, self.outer_momentum, self.nesterov = outer_lr, outer_momentum, nesterov
        size = self.communicator.size
        self._reduction = GradientReduction(size, size, *transport(compression))
        self._gradient = FlatBuffers(self._parameters, allocate=self._allocate)
        """The outer gradient; if possible in shared memory, which allreduce does not copy."""
        self._anchor = FlatBuffers(self._parameters)
        self._momentum = FlatBuffers(self._parameters)
        for buffer in self._momentum.buffers:
            buffer.zero_()
        self._exchanges = self._by_buffer()
        self._finishers: list[Callable[[], object]] = []
        """Of the exchanges that are in progress."""
        self._begun: FlatBuffers | None = None
        """The parameters at the start of the last exchange; None if the update waits for each exchange."""
        self._begun_at: int | None = None
        """The step of the exchange whose outer step has not been taken."""
        # Other calls of the program on the communicator do not wait for an exchange on a private one.
        self._channel = self.communicator
        if overlap_steps:
            self._begun = FlatBuffers(self._parameters)
            self._channel = open_private(self.communicator, f"{self.communicator.name} outer gradients")
        self._has_anchor = False
        if init_delay == 0:
            self._set_anchor()

    def _check_options(self) -> None:
        super()._check_options()
        check_whole("overlap_steps", self.overlap_steps, 0)
        if self.overlap_steps > self.update_frequency:
            raise ArgumentError(
                f"overlap_steps={self.overlap_steps} is more than update_frequency={self.update_frequency}: an "
                "exchange must end before the next one."
            )

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate_flat(numel, self._parameters[0].detach().new_empty(0, dtype=dtype))

    def _by_buffer(self) -> list[_Exchanged]:
        exchanges = []
        for flat in self._gradient.buffers:
            pairs = [
                (parameter, view)
                for parameter, view in zip(self._parameters, self._gradient.views, strict=True)
                if (view.dtype, view.device) == (flat.dtype, flat.device)
            ]
            exchanges.append(_Exchanged(flat, *map(list, zip(*pairs, strict=True))))
        return exchanges

    @property
    def anchor(self) -> list[Tensor]:
        """The result of the last outer step, on all ranks the same, in the order of the trainable parameters."""
        return self._anchor.views

    def _set_anchor(self) -> None:
        self._anchor.gather(self._parameters)
        for buffer in self._anchor.buffers:
            collectives.broadcast(buffer, 0, comm=self.communicator)
        self._has_anchor = True

    def _take_step(self) -> bool:
        if not self._has_anchor:
            if self.step + 1 >= self.init_delay:  # greater if update(step) skips steps
                self._set_anchor()
            return False
        is_due = self._begun_at is not None and self.step - self._begun_at >= self.overlap_steps
        if is_due:
            self._take_outer_step()
        has_begun = super()._take_step()
        return is_due or (has_begun and self._begun_at is None)

    def _integrate(self) -> None:
        self._begin()
        if self._begun is None:
            self._take_outer_step()

    def _begin(self) -> None:
        """Start to average the outer gradients."""
        for gradient, anchor, own in cache_blocks(self._gradient.views, self._anchor.views, self._parameters):
            torch._foreach_copy_(gradient, anchor)
            torch._foreach_sub_(gradient, own)
        if self._begun is not None:
            self._begun.gather(self._parameters)
        self._begun_at = self.step
        compressor = self._reduction.compressor
        self._num_compressed_bytes = 0 if compressor is None else compressor.payload_bytes
        self._finishers = [self._reduction.start(each.flat, each, self._channel) for each in self._exchanges]

    def _finish_exchange(self) -> None:
        """Wait until the buffers contain the average of the outer gradients."""
        finishers, self._finishers = self._finishers, []
        for finish in finishers:
            finish()
        if finishers:
            self._count_bytes(self._exchanged_bytes())

    def _exchanged_bytes(self) -> int:
        wire, compressor = self._reduction.wire, self._reduction.compressor
        num_bytes = 0 if compressor is None else compressor.payload_bytes - self._num_compressed_bytes
        for flat, *_ in self._exchanges:
            if flat.is_floating_point() and self._reduction.is_compressed(self._channel):
                continue  # counted by the compressor
            is_narrowed = wire is not None and flat.is_floating_point() and flat.element_size() > 2
            num_bytes += flat.numel() * (2 if is_narrowed else flat.element_size())
        return num_bytes

    def _take_outer_step(self) -> None:
        self._finish_exchange()
        self._begun_at = None
        self.num_integrations += 1
        begun = self._anchor.views if self._begun is None else self._begun.views
        lists = (self._gradient.views, self._momentum.views, self._anchor.views, begun, self._parameters)
        for gradient, momentum, anchor, start, own in cache_blocks(*lists):
            step = gradient
            if self.outer_momentum:
                torch._foreach_mul_(momentum, self.outer_momentum)
                torch._foreach_add_(momentum, gradient)
                if self.nesterov:
                    torch._foreach_add_(gradient, momentum, alpha=self.outer_momentum)
                else:
                    step = momentum
            torch._foreach_sub_(anchor, step, alpha=self.outer_lr)
            if self._begun is None:
                torch._foreach_copy_(own, anchor)
            else:
                # In this order the result is the anchor itself, to the last bit, if no step was taken meanwhile.
                torch._foreach_sub_(own, start)
                torch._foreach_add_(own, anchor)

    @torch.no_grad()
    def finish(self) -> None:
        """Take the outer step of an exchange in progress, and another if inner steps were taken since. Collective."""
        if self.is_finished:
            return
        if self._begun_at is not None:
            self._take_outer_step()
        super().finish()
        if self._begun_at is not None:
            self._take_outer_step()
        if self._channel is not self.communicator:
            if self._reduction.compressor is not None:
                self._reduction.compressor.release(self._channel)
            close_private(self._channel)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, including anchor and outer momentum, without the network and compressor.

        Waits for an exchange in progress; the outer step is taken when it is due. Collective if there is one.
        """
        self._finish_exchange()
        is_pending = self._begun_at is not None
        return {
            **super().state_dict(),
            "begun_at": self._begun_at,
            "begun": self._begun.clones() if is_pending and self._begun is not None else [],
            "gradient": self._gradient.clones() if is_pending else [],
            "has_anchor": self._has_anchor,
            "anchor": self._anchor.clones(),
            "momentum": self._momentum.clones(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``. Waits for an exchange in progress."""
        self._finish_exchange()
        super().load_state_dict(state)
        self._has_anchor = state["has_anchor"]
        self._anchor.restore(state["anchor"])
        self._momentum.restore(state["momentum"])
        self._begun_at = state.get("begun_at")
        if self._begun_at is not None:
            if self._begun is None:
                raise CheckpointError(
                    "The state was saved during an exchange of outer gradients. Resume with the same overlap_steps."
                )
            self._begun.restore(state["begun"])
            self._gradient.restore(state["gradient"])
