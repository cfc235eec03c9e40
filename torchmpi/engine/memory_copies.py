"""Copies of the state of a run in memory, from which the remaining ranks continue after a rank is lost."""

from __future__ import annotations

import copy

from .checkpoint import Content, Saved, Stateful
from .coordination import Coordinator
from .data_loading import map_tensors, num_batches
from .training_run import TrainingRun, redivided_batch


class MemoryCopies:
    """The last two copies: when a rank is lost, the others may differ by one.

    copies = MemoryCopies()
    copies.take(run, {})
    saved = copies.last_common(run, {}, num_lost=1, coordinator=SingleProcess())
    """

    def __init__(self) -> None:
        self._copies: dict[int, Content] = {}
        self._num_taken = 0

    def take(self, run: TrainingRun, kept: dict[str, Stateful]) -> None:
        """Copy the state of a run and of `kept`. All ranks do so at the same points."""
        self._copies = {number: self._copies[number] for number in sorted(self._copies)[-1:]}
        self._copies[self._num_taken] = _copied(run.content(kept))
        self._num_taken += 1

    def last_common(
        self, run: TrainingRun, kept: dict[str, Stateful], num_lost: int, coordinator: Coordinator
    ) -> Saved:
        """Return the last copy that all remaining ranks have, for their present parts of the data. Collective."""
        if not self._copies:  # the rank was lost before the first copy, so nothing has changed yet
            self.take(run, kept)
        number = min(coordinator.gather(max(self._copies)))
        content = _copied(self._copies[number])
        self._copies, self._num_taken = {number: self._copies[number]}, number + 1
        own = content.own
        everyone = coordinator.gather({name: own[name] for name in ("batch", "num_batches")})
        if content.common["in_epoch"]:
            # How far the lost ranks were is not known; they took part in every update.
            everyone += num_lost * everyone[:1]
            own["batch"] = redivided_batch(everyone, coordinator.size, num_batches(run.state.iterator))
        own["iterator"] = None  # the position of an iterator over another part of the data
        return Saved(content.common, coordinator.size * [own], content.trees)


def _copied(content: Content) -> Content:
    trees = map_tensors(lambda tensor, _: tensor.detach().clone(), content.trees)
    return Content(dict(content.common), copy.deepcopy(content.own), trees)
