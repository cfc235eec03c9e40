"""Training in which ranks take steps of their own and communicate now and then: steps, metrics and checkpoints."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, CheckpointError, kind_of, rank_prefix
from .replica import Replica

PeriodicT = TypeVar("PeriodicT", bound="PeriodicUpdate")


class PeriodicUpdate:
    """Base of all updates: counts steps and keeps metrics. The end of a ``with`` block calls :meth:`finish`."""

    def __init__(self, network: nn.Module, *, update_frequency: Any, init_delay: int) -> None:
        self.network = network
        self.update_frequency, self.init_delay = update_frequency, init_delay
        """May be changed during training; by all ranks at the same step if the update is collective."""
        self._check_options()
        self.step = 0
        """The number of the next step."""
        self.num_integrations = self.num_sends = 0
        self.is_finished = False
        self._bytes_sent = self._bytes_received = 0
        self._parameters: list[Tensor] = []

    def _check_options(self) -> None:
        """Raise an ArgumentError unless the options can be used."""
        check_whole("update_frequency", self._fixed_period(), 1)
        check_whole("init_delay", self.init_delay, 0)

    def _fixed_period(self) -> object:
        """Return the steps between two integrations, or 1 if their number varies."""
        return self.update_frequency

    def update(self, step: int | None = None) -> bool:
        """Communicate if this step requires it.

        Args:
            step: Number of the step. Default: calls are counted from 0.

        Returns:
            Whether the parameters of the network have changed.
        """
        if self.is_finished:
            raise ArgumentError(
                f"{rank_prefix()}update() after finish(). Create a new {type(self).__name__} to continue."
            )
        if step is not None:
            check_whole("step", step, 0)
            self.step = step
        self._check_options()  # they may have been changed
        with torch.no_grad():
            changed = self._take_step()
        self.step += 1
        return changed

    def _take_step(self) -> bool:
        raise NotImplementedError(f"{type(self).__name__} does not implement _take_step().")

    def finish(self) -> None:
        """Complete everything in progress; no update may follow. Further calls have no effect."""
        self.is_finished = True

    def __enter__(self: PeriodicT) -> PeriodicT:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.finish()
        else:  # other ranks may never make the calls that finish() waits for
            self._abort()

    def _abort(self) -> None:
        self.is_finished = True

    # --- metrics

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank has received."""
        return self._bytes_received

    def metrics(self) -> dict[str, float]:
        """Return all metrics of this rank, for a log.

        Example:
            writer.add_scalars("update", update.metrics(), step)
        """
        return {
            "step": self.step,
            "num_integrations": self.num_integrations,
            "num_sends": self.num_sends,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
        }

    # --- parameters

    def _adopt_parameters(self) -> list[Tensor]:
        """Determine the trainable parameters of the network, which must not change afterwards."""
        self._parameters = Replica(self.network).trainable
        if not self._parameters:
            raise ArgumentError(
                f"{rank_prefix()}the network of this {type(self).__name__} has no trainable parameters."
            )
        return self._parameters

    def _check_parameters(self) -> None:
        current = Replica(self.network).trainable
        if list(map(id, current)) != list(map(id, self._parameters)):
            raise ArgumentError(
                f"{rank_prefix()}the network has other trainable parameters than when this {type(self).__name__} "
                "started. Freeze, unfreeze and replace parameters before, or create a new update afterwards."
            )

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, without the network."""
        return {
            "kind": type(self).__name__,
            "step": self.step,
            "num_integrations": self.num_integrations,
            "num_sends": self.num_sends,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``, with the same options and a network of the same structure."""
        if state.get("kind") != type(self).__name__:
            raise CheckpointError(
                f"This is the state of a {state.get('kind')}, not of {kind_of(self)}. Resume with the class "
                "with which it was saved."
            )
        self.step = state["step"]
        self.num_integrations, self.num_sends = state["num_integrations"], state["num_sends"]
        self._bytes_sent += state["bytes_sent"] - self.bytes_sent
        self._bytes_received += state["bytes_received"] - self.bytes_received


def check_whole(option: str, value: object, least: int) -> None:
    """Raise an ArgumentError unless `value` is a whole number of at least `least`.

    >>> check_whole("prefetch", -1, 0)
    Traceback (most recent call last):
    torchmpi.errors.ArgumentError: prefetch=-1: expected a whole number from 0.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{option}={value!r}: expected a whole number from {least}.")
