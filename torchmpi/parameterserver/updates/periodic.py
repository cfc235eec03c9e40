"""A loop that communicates now and then: steps, figures, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ... import collectives
from ...communicators.communicator import Communicator
from ...errors import ArgumentError, CheckpointError
from ...nn.replica import Replica
from ...session import runtime
from ...tensors import fusion
from ..staleness import StalenessMeter
from ..tensors import FlatViews

PeriodicT = TypeVar("PeriodicT", bound="PeriodicUpdate")


class Schedule(NamedTuple):
    """Which steps fetch and which integrate.

    >>> schedule = Schedule(update_frequency=10, init_delay=100, prefetch=3)
    >>> [step for step in range(125) if schedule.integrates(step)]
    [110, 120]
    >>> [step for step in range(125) if schedule.fetches(step)]
    [107, 117]
    """

    update_frequency: int
    init_delay: int
    prefetch: int = 0

    def integrates(self, step: int) -> bool:
        """Whether fetched values are used at this step."""
        return step > self.init_delay and (step - self.init_delay) % self.update_frequency == 0

    def fetches(self, step: int) -> bool:
        """Whether the values for the next integration are asked for at this step."""
        return self.integrates(step + self.prefetch)


class PeriodicUpdate:
    """A loop that communicates now and then: it counts steps and keeps figures. Base of all updates.

    As a context manager it calls :meth:`finish` at the end.
    """

    def __init__(self, network: nn.Module, *, update_frequency: int, init_delay: int) -> None:
        check_whole("update_frequency", update_frequency, 1)
        check_whole("init_delay", init_delay, 0)
        self.network = network
        self.update_frequency, self.init_delay = update_frequency, init_delay
        self.step = 0
        """The number of the next step."""
        self.staleness = StalenessMeter()
        """Of each send: how many rules of others the values it was computed from did not know of."""
        self.num_integrations = self.num_sends = 0
        self.is_finished = False
        self._bytes_sent = self._bytes_received = 0
        self._parameters: list[Tensor] = []

    def update(self, step: int | None = None) -> bool:
        """Do what is due at this step, and say whether the parameters of the network were changed by it.

        Without `step` the calls are counted, from 0.
        """
        if self.is_finished:
            raise ArgumentError(f"{where()}: update() after finish(). Make a new {type(self).__name__} to go on.")
        if step is not None:
            check_whole("step", step, 0)
            self.step = step
        with torch.no_grad():
            changed = self._take_step()
        self.step += 1
        return changed

    def _take_step(self) -> bool:
        raise NotImplementedError(f"{type(self).__name__} does not say what to do at a step.")

    def finish(self) -> None:
        """End what is under way; no update follows. A second call is harmless."""
        self.is_finished = True

    def __enter__(self: PeriodicT) -> PeriodicT:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.finish()
        else:  # the others may never come to the calls that finishing takes
            self._give_up()

    def _give_up(self) -> None:
        self.is_finished = True

    # --- figures -----------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank has received."""
        return self._bytes_received

    def metrics(self) -> dict[str, float]:
        """All figures of this rank, for a log.

        writer.add_scalars("parameter server", update.metrics(), step)
        """
        return {
            "step": self.step,
            "num_integrations": self.num_integrations,
            "num_sends": self.num_sends,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "staleness_last": self.staleness.last,
            "staleness_mean": self.staleness.mean,
            "staleness_max": self.staleness.max,
        }

    # --- parameters --------------------------------------------------------------------------------------

    def _adopt_parameters(self) -> list[Tensor]:
        """The parameters of the network that are trained, from now on always the same."""
        self._parameters = Replica(self.network).trainable
        if not self._parameters:
            raise ArgumentError(f"{where()}: the network of this {type(self).__name__} has nothing to train.")
        return self._parameters

    def _check_parameters(self) -> None:
        """Refuse to go on with a network whose parameters are no longer those that were adopted."""
        current = Replica(self.network).trainable
        if list(map(id, current)) != list(map(id, self._parameters)):
            raise ArgumentError(
                f"{where()}: the network has other trainable parameters than when this {type(self).__name__} "
                "started. Freeze, thaw and replace parameters before, or make a new one after."
            )

    # --- checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later, apart from the servers' shards and the network. Waits for sends."""
        return {
            "kind": type(self).__name__,
            "step": self.step,
            "num_integrations": self.num_integrations,
            "num_sends": self.num_sends,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "staleness": self.staleness.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` gave, with the same options and an equal network."""
        if state.get("kind") != type(self).__name__:
            raise CheckpointError(
                f"This is the state of a {state.get('kind')}, not of a {type(self).__name__}. Resume with the class "
                "with which it was saved."
            )
        self.step = state["step"]
        self.num_integrations, self.num_sends = state["num_integrations"], state["num_sends"]
        self._bytes_sent += state["bytes_sent"] - self.bytes_sent
        self._bytes_received += state["bytes_received"] - self.bytes_received
        self.staleness.load_state_dict(state["staleness"])


def broadcast_many(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Give all ranks the tensors of rank 0, in few messages; in place."""
    for members in fusion.plan_buckets(tensors, runtime.current().config.bucket_bytes):
        own = [tensors[index] for index in members]
        flat = FlatViews(own)
        if comm.rank == 0:
            flat.gather(own)
        collectives.broadcast(flat.flats[0], 0, comm=comm)
        if comm.rank != 0:
            flat.scatter(own)


def check_whole(option: str, value: object, least: int) -> None:
    """Refuse what is no whole number from `least`.

    >>> check_whole("prefetch", -1, 0)
    Traceback (most recent call last):
    torchmpi.errors.ArgumentError: prefetch=-1: expected a whole number from 0.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{option}={value!r}: expected a whole number from {least}.")


def where() -> str:
    return runtime.current().world.where if runtime.is_running() else "torchmpi"
