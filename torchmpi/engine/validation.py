"""The validation after each epoch of a run: it steps a scheduler, finds the best epoch, and may end the run."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn

from .. import timeline
from ..errors import ArgumentError
from .data_loading import Source, make
from .early_stop import BestEpoch, EarlyStop
from .metrics import Metric
from .scheduling import Schedule
from .state import State
from .state_dicts import Tree, load_module, module_tree
from .test_result import TestResult


class Validation:
    """The validation of a run. Its result is equal on all ranks, and so is what follows from it."""

    def __init__(self, source: Source, metrics: dict[str, Metric], stop_early: EarlyStop | None) -> None:
        self._source, self._batches, self._metrics = source, make(source), metrics
        self.best = BestEpoch(stop_early)
        self._metric = "loss" if stop_early is None else stop_early.metric
        names = ["loss", "error", *metrics]
        if self._metric not in names:
            raise ArgumentError(f"stop_early: no metric {self._metric!r}; there are {', '.join(names)}")
        self.keeps_best = stop_early is not None and stop_early.keep_best
        self.best_weights: Tree | None = None

    def measure(self, test: Callable[..., TestResult], schedule: Schedule, state: State) -> None:
        """Measure the network after an epoch with ``engine.test()``, step the scheduler, and decide whether to stop."""
        with timeline.range("validation"):
            state.validation = test(
                network=state.network,
                criterion=state.criterion,
                iterator=self._batches,
                metrics=self._metrics,
                autocast=state.autocast,
            )
        if state.validation.loss.num_samples == 0:
            raise ArgumentError(
                f"validate= returned no batch after epoch {state.epoch}, on any rank. A generator can be iterated only "
                "once: pass a list, a DataLoader, or an object that makes a new iterator."
            )
        value = state.validation.value(self._metric)
        schedule.step("epoch", value)
        if self.best.add(value, state.epoch) and self.keeps_best:
            self.best_weights = copy.deepcopy(module_tree(state.network))
        self.decide(state)

    def decide(self, state: State) -> None:
        """Tell the state the best epoch so far, and stop if there is no improvement any more."""
        state.best_epoch = self.best.epoch
        state.stop = state.stop or self.best.is_over

    def divide_anew(self) -> None:
        """Make the iterator over the batches again, as the number of ranks has changed."""
        self._batches = make(self._source)

    def restore_best(self, network: nn.Module) -> None:
        """Load the weights of the best epoch, if they are kept."""
        if self.best_weights is not None:
            load_module(network, self.best_weights)
