"""Scalars of a run for TensorBoard."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from typing import Any

from ..errors import ArgumentError
from ..session import api, call_metrics, runtime
from .state import State


class TensorBoard:
    """Writes loss, learning rate and times of each update for TensorBoard; pass it to ``engine.add()``.

    Only rank 0 of the current communicator writes. The scalars are ``loss`` (of the last batch of rank 0), ``lr``,
    ``seconds/update``, and ``seconds/calls``: those in calls since the last update, of which asynchronous ones overlap
    with the update.

    Args:
        target: A folder, for a ``SummaryWriter`` of torch; or an object with ``add_scalar(name, value, step)``.

    Raises:
        ArgumentError: `target` is a folder, and the package tensorboard is not installed.

    Example:
        ::

            engine = AllReduceSGDEngine()
            engine.add(TensorBoard("runs/first"))
    """

    def __init__(self, target: str | os.PathLike[str] | Any) -> None:
        self._folder: str | None = os.fspath(target) if isinstance(target, (str, os.PathLike)) else None
        self._writer: Any = target if self._folder is None else None
        if self._folder is not None and find_spec("tensorboard") is None:
            raise ArgumentError(
                f"TensorBoard({self._folder!r}) needs the package tensorboard, which is not installed. Install it with "
                "`pip install tensorboard`, or pass an object with add_scalar(name, value, step)."
            )
        self._begin = self._seconds = 0.0

    def on_start(self, state: State) -> None:
        """Open the file, and begin the measurement of the first update."""
        if state.training and _is_first_rank():
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(self._folder)
            self._begin, self._seconds = time.monotonic(), _seconds_in_calls()

    def on_update(self, state: State) -> None:
        """Write the scalars of an update."""
        if not _is_first_rank():
            return
        now, seconds = time.monotonic(), _seconds_in_calls()
        scalars = {"lr": state.lr, "seconds/update": now - self._begin, "seconds/calls": seconds - self._seconds}
        if state.loss is not None:
            scalars["loss"] = state.loss.item()
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, state.t)
        self._begin, self._seconds = now, seconds

    def on_end(self, state: State) -> None:
        """Write what the writer has buffered."""
        if state.training and _is_first_rank() and hasattr(self._writer, "flush"):
            self._writer.flush()


def _is_first_rank() -> bool:
    return not runtime.is_running() or api.rank() == 0


def _seconds_in_calls() -> float:
    return float(call_metrics.metrics()["seconds"]) if runtime.is_running() else 0.0
