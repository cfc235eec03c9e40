"""Copies of the state of a run in memory, from which the remaining ranks continue after a rank is lost."""

from __future__ import annotations

import copy

import torch

from ..continuing.numbered_copies import NumberedCopies
from ..errors import ArgumentError, RankLostError, TorchMPIError
from ..log import logger
from ..nn import DistributedOptimizer
from ..session import recovery, runtime
from ..tensors import streams
from .checkpoint import Content, Saved
from .coordination import Coordinator
from .data_loading import Source, is_function, map_tensors, num_batches
from .training_run import TrainingRun, redivided_batch


class MemoryCopies:
    """The last copies of a run."""

    def __init__(self) -> None:
        self._copies = NumberedCopies[tuple[Content, int]]()
        """Each with the number of ranks that had parts of the data then."""

    def take(self, run: TrainingRun, num_ranks: int) -> None:
        """Copy the state of a run. All ranks do so at the same points."""
        self._copies.add((_copied(run.content()), num_ranks))

    def last_common(self, run: TrainingRun, coordinator: Coordinator, *, is_newcomer: bool = False) -> Saved:
        """Return the last copy that all remaining ranks have, for their present parts of the data. Collective.

        A newcomer, which was a spare rank or is a new one, gets it from the first of the others.
        """
        if not (self._copies or is_newcomer):  # the rank was lost before the first copy, so nothing has changed yet
            self.take(run, coordinator.size)
        common = self._copies.agree(coordinator.gather, coordinator.broadcast, coordinator.rank)
        assert common is not None  # newcomers alone do not continue
        kept, num_ranks = common
        if is_newcomer:
            fresh = run.content().own["rng"]  # with those of another rank, both would have the same dropout
            kept.own.update({name: fresh for name in ("rng", "begin") if name in kept.own})
        content = _copied(kept)
        own = content.own
        everyone = coordinator.gather({name: own[name] for name in ("batch", "num_batches")})
        if content.common["in_epoch"]:
            # How far the lost ranks were is not known; they took part in every update. A new rank is the last one.
            done = (everyone + num_ranks * everyone[:1])[:num_ranks]
            own["batch"] = redivided_batch(done, coordinator.size, num_batches(run.state.iterator))
        own["iterator"] = None  # the position of an iterator over another part of the data
        return Saved(content.common, coordinator.size * [own], content.trees)


def _copied(content: Content) -> Content:
    trees = map_tensors(lambda tensor, _: tensor.detach().clone(), content.trees)
    return Content(dict(content.common), copy.deepcopy(content.own), trees)


class Recovery:
    """What ``engine.recover()`` adds to a run: copies at intervals, and the return to one of them."""

    def __init__(self, coordinator: Coordinator, every: int, timeout: float) -> None:
        self._coordinator, self._every, self._timeout = coordinator, every, timeout
        self._copies = MemoryCopies()

    def check(self, optimizer: torch.optim.Optimizer | None, sources: list[Source]) -> None:
        """Refuse a run that could not continue."""
        self._copies = MemoryCopies()
        if problem := recovery.why_not():
            raise ArgumentError(f"rank {self._coordinator.rank}: recover(): {problem}")
        if not all(is_function(source) for source in sources):
            raise ArgumentError(
                f"rank {self._coordinator.rank}: recover() needs functions for iterator= and validate=, such as "
                "iterator=lambda: batches[mpi.rank() :: mpi.size()], since the data are divided anew when a rank is "
                "lost."
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise ArgumentError(
                f"rank {self._coordinator.rank}: recover() would leave a DistributedOptimizer with closed "
                "communicators. Pass the optimizer of torch: the engine synchronizes the gradients."
            )

    def copy_if_due(self, run: TrainingRun) -> None:
        """Copy the state before each epoch, and after each `every` updates."""
        if run.phase != "between epochs" and run.state.t % self._every:
            return
        # A call on a device that was aborted, because a rank is lost, has left undefined values in the parameters.
        streams.settle(next(run.state.network.parameters()))
        with recovery.copying():
            self._copies.take(run, self._coordinator.size)

    def confirm(self) -> None:
        """Return when all ranks have ended their loop, so that none goes on while others must return to a copy."""
        recovery.confirm()

    @property
    def joins(self) -> bool:
        """Whether this rank has taken the place of a lost one, and has not got the state of the others yet."""
        return recovery.is_newcomer()

    def return_to_copy(self, run: TrainingRun, error: TorchMPIError) -> Saved:
        """Return the copy from which the remaining ranks continue; raise an error that is not the loss of a rank."""
        if not runtime.current().context.loss:
            raise error
        self._recover()
        return self.join(run)

    def join(self, run: TrainingRun) -> Saved:
        """Return the copy from which the others continue, and this rank with them."""
        coordinator = self._coordinator
        while True:
            try:
                recovery.begin_again()
                run.divide_anew()
                saved = self._copies.last_common(run, coordinator, is_newcomer=self.joins)
                if coordinator.rank == 0:
                    logger.info(f"continuing from epoch {saved.common['epoch'] + 1}, after update {saved.common['t']}")
                coordinator.begin(run.state)
                recovery.note_state()
                return saved
            except RankLostError:  # another one
                self._recover()

    def _recover(self) -> None:
        recovery.recover(self._timeout)
        self._coordinator.end(failed=True)  # the communicators of the registration are closed
