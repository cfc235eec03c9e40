"""Copies of the state of a run in memory, from which the remaining ranks continue after a rank is lost."""

from __future__ import annotations

import copy

import torch

from ..errors import ArgumentError, RankLostError, TorchMPIError
from ..log import logger
from ..nn import DistributedOptimizer
from ..tensors import streams
from .all_ranks import AllRanks
from .checkpoint import Content, Saved
from .coordination import Coordinator
from .data_loading import Source, is_function, map_tensors, num_batches
from .training_run import TrainingRun, redivided_batch


class MemoryCopies:
    """The last two copies: when a rank is lost, the others may differ by one.

    copies = MemoryCopies()
    copies.take(run)
    saved = copies.last_common(run, num_lost=1, coordinator=SingleProcess())
    """

    def __init__(self) -> None:
        self._copies: dict[int, Content] = {}
        self._num_taken = 0

    def take(self, run: TrainingRun) -> None:
        """Copy the state of a run. All ranks do so at the same points."""
        self._copies = {number: self._copies[number] for number in sorted(self._copies)[-1:]}
        self._copies[self._num_taken] = _copied(run.content())
        self._num_taken += 1

    def last_common(self, run: TrainingRun, num_lost: int, coordinator: Coordinator) -> Saved:
        """Return the last copy that all remaining ranks have, for their present parts of the data. Collective."""
        if not self._copies:  # the rank was lost before the first copy, so nothing has changed yet
            self.take(run)
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


class Recovery:
    """What ``engine.recover()`` adds to a run: copies at intervals, and the return to one of them."""

    def __init__(self, coordinator: AllRanks, every: int, timeout: float) -> None:
        self._coordinator, self._every, self._timeout = coordinator, every, timeout
        self._copies = MemoryCopies()

    def check(self, optimizer: torch.optim.Optimizer | None, sources: list[Source]) -> None:
        """Refuse a run that could not continue."""
        self._copies = MemoryCopies()
        if not self._coordinator.raises_losses:
            raise ArgumentError(
                f"rank {self._coordinator.rank}: recover() needs start(config=Config(on_lost_rank='raise')), or "
                "TORCHMPI_ON_LOST_RANK=raise: without it, the job ends when a rank is lost."
            )
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
        self._coordinator.confirm()
        self._copies.take(run)

    def return_to_copy(self, run: TrainingRun, error: TorchMPIError) -> Saved:
        """Return the copy from which the remaining ranks continue; raise an error that is not the loss of a rank."""
        if not self._coordinator.loss:
            raise error
        num_before = self._coordinator.size
        while True:
            self._coordinator.recover(self._timeout)
            try:
                run.divide_anew()
                num_lost = num_before - self._coordinator.size
                saved = self._copies.last_common(run, num_lost, self._coordinator)
                if self._coordinator.rank == 0:
                    logger.info(f"continuing from epoch {saved.common['epoch'] + 1}, after update {saved.common['t']}")
                self._coordinator.begin(run.state)
                return saved
            except RankLostError:  # another one
                continue
