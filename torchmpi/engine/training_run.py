"""The state of one call of ``train()``, and its conversion to and from a checkpoint."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .. import log
from ..errors import CheckpointError
from ..tensors import random_states
from . import rng
from .checkpoint import Content, Saved, Saver, Stateful, digest
from .coordination import Coordinator
from .data_loading import DeviceCopy, Epoch, Source, iterator_state, load_iterator_state, make, num_batches
from .meters import Meter
from .scheduling import Schedule
from .state import State
from .state_dicts import load_trees, trees_of, versions, whole
from .validation import Validation


class TrainingRun:
    """One call of ``train()``: the state that hooks receive, the position in the data, the contents of a checkpoint."""

    def __init__(
        self,
        state: State,
        source: Source,
        device: torch.device,
        schedule: Schedule,
        scaler: torch.amp.GradScaler | None,
        validation: Validation | None,
        kept: dict[str, Stateful],
        coordinator: Coordinator,
    ) -> None:
        self.state, self.scaler, self.schedule, self.validation = state, scaler, schedule, validation
        self._source, self._device_copy, self._coordinator = source, DeviceCopy(device), coordinator
        arguments: dict[str, Stateful | None] = {
            "scheduler=": schedule.scheduler,
            "scaler=": scaler,
            "validate=": None if validation is None else validation.best,
        }
        self._arguments = {name: value for name, value in arguments.items() if value is not None}
        """Arguments of ``train()`` whose state belongs into checkpoints."""
        self._kept = kept
        self.saver = Saver(coordinator)
        self.phase: Literal["between epochs", "between updates", "update", "epoch end"] = "between epochs"
        self._epoch: Epoch | None = None

    def begin_epoch(self, depth: int, position: dict[str, Any] | None) -> Epoch:
        """Start a pass over the data, or continue one at a saved position."""
        self.state.batch = 0 if position is None else position["batch"]
        self._epoch = Epoch(self.state.iterator, self._device_copy, depth, position)
        return self._epoch

    def divide_anew(self) -> None:
        """Make the iterators over the data again, as the number of ranks has changed."""
        self.phase, self._epoch = "between epochs", None
        self.state.iterator = make(self._source)
        if self.validation is not None:
            self.validation.divide_anew()

    def content(self) -> Content:
        """Return the present state of this run. The tensors are not copied."""
        state, in_epoch = self.state, self.phase == "between updates"
        own: dict[str, Any] = {
            "batch": state.batch,
            "num_batches": num_batches(state.iterator),
            "rng": random_states.capture(self._device_copy.device),
            "kept": {name: value.state_dict() for name, value in self._all_kept().items()},
        }
        if in_epoch and self._epoch is not None:
            own.update(self._epoch.position())
        else:
            own.update(generators=rng.capture_generators(state.iterator), iterator=iterator_state(state.iterator))
        epoch = state.epoch + (self.phase == "epoch end")
        trees = trees_of(state, None if self.validation is None else self.validation.best_weights)
        common = {"epoch": epoch, "t": state.t, "in_epoch": in_epoch, "metadata": versions(trees)}
        return Content(common, own, whole(state, trees))

    def go_to(self, saved: Saved) -> None:
        """Take epoch and number of updates from a checkpoint. ``restore()`` loads the rest, after on_start_epoch."""
        state, common = self.state, saved.common
        state.epoch, state.t, state.stop = common["epoch"], common["t"], False
        if common["in_epoch"] and state.epoch >= state.max_epochs:
            raise CheckpointError(
                f"the checkpoint was saved within epoch {state.epoch + 1}, but max_epochs={state.max_epochs}: "
                "nothing would be trained or loaded"
            )

    def restore(self, saved: Saved) -> dict[str, Any] | None:
        """Load a checkpoint; return the position for `begin_epoch`, or None if it was saved between two epochs."""
        state, kept, names = self.state, self._all_kept(), saved.ranks[0]["kept"].keys()
        if names != kept.keys():
            raise CheckpointError(
                f"the checkpoint has the state of {sorted(names)}, but this engine keeps {sorted(kept)}: "
                "give train(), keep() and step_scheduler() the same objects as in the run that is resumed"
            )
        best = load_trees(state, saved.trees, saved.common["metadata"])
        if self.validation is not None and self.validation.keeps_best and best is not None:
            self.validation.best_weights = best
        own = self._own_state(saved, kept)
        for name, value in kept.items():
            value.load_state_dict(own["kept"][name])
        if saved.common["in_epoch"]:
            return own
        rng.restore_generators(state.iterator, own["generators"])
        load_iterator_state(state.iterator, own["iterator"])
        random_states.restore(own["rng"], self._device_copy.device)
        if self.validation is not None:
            self.validation.decide(state)
        return None

    def _all_kept(self) -> dict[str, Stateful]:
        return self._kept | self._arguments  # hooks may have added objects

    def _own_state(self, saved: Saved, kept: dict[str, Stateful]) -> dict[str, Any]:
        """Return the saved state of this rank; if the number of ranks has changed, a part of the state of all ranks."""
        rank, size, length = self._coordinator.rank, self._coordinator.size, num_batches(self.state.iterator)
        if len(saved.ranks) == size:
            return saved.ranks[rank]
        own = dict(saved.ranks[rank % len(saved.ranks)])
        own["kept"] = {name: _kept_state(name, value, saved, rank) for name, value in kept.items()}
        if rank >= len(saved.ranks):  # with the random numbers of another rank, both would have the same dropout
            own["rng"] = own["begin"] = random_states.capture(self._device_copy.device)
        if saved.common["in_epoch"]:
            own["iterator"] = None  # the position of a rank that had another part of the data
            own["batch"] = redivided_batch(saved.ranks, size, length)
        if rank == 0:
            begin = f" after batch {own['batch']} of rank 0" if saved.common["in_epoch"] else ""
            log.logger.info(
                f"resuming on {size} rank(s) a run of {len(saved.ranks)}, from epoch {saved.common['epoch'] + 1}{begin}"
            )
        return own


def redivided_batch(ranks: list[dict[str, Any]], size: int, length: int | None) -> int:
    """Return how many of `length` batches each of `size` ranks skips.

    A remainder of fewer than `size` batches is processed again.

    >>> redivided_batch([{"batch": 5, "num_batches": 10}, {"batch": 5, "num_batches": 10}], 4, 5)
    2
    """
    num_done: int = sum(rank["batch"] for rank in ranks)
    lengths = [rank["num_batches"] for rank in ranks]
    if length is None or None in lengths:
        return num_done // size
    total: int = sum(lengths)
    return length * num_done // max(1, total)


def _kept_state(name: str, value: Stateful, saved: Saved, rank: int) -> dict[str, Any]:
    states: list[dict[str, Any]] = [theirs["kept"][name] for theirs in saved.ranks]
    if isinstance(value, Meter):
        return value.divided(states, rank)
    if rank == 0 and len({digest(state) for state in states}) > 1:
        log.logger.warning(
            f"the state of {name!r} differs between the {len(states)} ranks that saved it; rank r now takes the state "
            f"of rank r modulo {len(states)}"
        )
    return states[rank % len(states)]
