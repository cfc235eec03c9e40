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
    """Writes loss, learning rate, and times and bytes of each update for TensorBoard; pass it to ``engine.add()``.

    Only rank 0 of the current communicator writes. The scalars are ``loss`` (of the last batch of rank 0), ``lr``,
    ``seconds/update``; of the calls of this rank since the last update ``seconds/calls``, ``seconds/waited``,
    ``seconds/moved``, ``bytes/calls`` and ``stalls``; of each update with parameter servers ``bytes/NAME`` and
    ``staleness/NAME``. Asynchronous calls overlap with the update.

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
        self._begin = 0.0
        self._totals: dict[str, float] = {}  # empty before the first measurement

    def on_start(self, state: State) -> None:
        """Open the file, and begin the measurement of the first update."""
        if state.training and _is_first_rank():
            self._start()

    def _start(self) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder)
        self._begin, (self._totals, _) = time.monotonic(), _metrics()

    def on_update(self, state: State) -> None:
        """Write the scalars of an update."""
        if not _is_first_rank():
            return
        if not self._totals:  # mpi.recover() has made this rank the first one: its first update is not measured
            self._start()
            return
        now, (totals, staleness) = time.monotonic(), _metrics()
        scalars = {"lr": state.lr, "seconds/update": now - self._begin}
        scalars |= {name: _growth(self._totals.get(name, 0), total) for name, total in totals.items()} | staleness
        if state.loss is not None:
            scalars["loss"] = state.loss.item()
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, state.t)
        self._begin, self._totals = now, totals

    def on_end(self, state: State) -> None:
        """Write what the writer has buffered."""
        if state.training and _is_first_rank() and hasattr(self._writer, "flush"):
            self._writer.flush()


def _is_first_rank() -> bool:
    return not runtime.is_running() or api.rank() == 0


def _growth(old: float, total: float) -> float:
    """Return by how much a sum has grown, also if it has begun anew, by mpi.recover() or a new update of its name.

    >>> _growth(5, 7), _growth(5, 3)
    (2, 3)
    """
    return total - old if total >= old else total


def _metrics() -> tuple[dict[str, float], dict[str, float]]:
    """Return the sums over the calls of this rank since start(), and the last staleness of each update."""
    if not runtime.is_running():
        return dict.fromkeys(("seconds/calls", "seconds/waited", "seconds/moved", "bytes/calls", "stalls"), 0.0), {}
    found = call_metrics.metrics()
    calls, steps = ([each for by in found[kind].values() for each in by.values()] for kind in ("calls", "steps"))
    totals = {"seconds/calls": found["seconds"], "stalls": found["stalls"]}
    totals["bytes/calls"] = sum(each["bytes"] for each in calls)
    for name in ("waited", "moved"):  # of a hierarchical call, measured in its steps only
        totals[f"seconds/{name}"] = sum(each[name] for each in (*calls, *steps))
    updates = found["updates"].items()
    totals |= {f"bytes/{name}": each["bytes_sent"] + each["bytes_received"] for name, each in updates}
    lasts = {f"staleness/{name}": each["staleness_last"] for name, each in updates}
    return totals, {name: last for name, last in lasts.items() if last == last}  # nan before the first send
