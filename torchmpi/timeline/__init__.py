"""Timelines: what each rank does when, as trace files for Perfetto and Chrome, and their analysis.

``TORCHMPI_TIMELINE=traces`` in the environment of a job records one, ``torchmpi timeline report traces`` explains it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from ..errors import NotStartedError, TorchMPIError
from . import events
from .clocks import ClockSample
from .trace_writer import TraceWriter, path_for


class MeasuredClock(Protocol):
    """The clock of this host while a timeline is recorded."""

    samples: list[ClockSample]

    def follow(self, take: Callable[[ClockSample], None]) -> None:
        """Pass further samples to a function, in a thread."""

    def close(self) -> None:
        """Take no further samples."""


class JobInfo(NamedTuple):
    """What a timeline needs of the running job."""

    describe: dict[str, Any]
    """Rank, size, host, the first rank of the host (`leader`), and other facts for the readers of the file."""
    open_clock: Callable[[], MeasuredClock]
    """Compares the clock of this host with that of rank 0, now and further on. Collective."""
    measure_clock: Callable[[], list[ClockSample]]
    """Compares the clock of this host with that of rank 0. Collective."""
    agree: Callable[[bool], bool]
    """Whether a condition is true on all ranks. Collective."""


_job: JobInfo | None = None
_recording: Recording | None = None


class Recording:
    """A timeline that is being recorded: a context manager that calls :func:`stop` at its end.

    Attributes:
        folder: The folder of the trace files.
        path: The trace file of this rank.
    """

    def __init__(self, folder: Path, job: JobInfo) -> None:
        self.folder, self._job = folder, job
        path = path_for(folder, job.describe["rank"])
        self._clock = job.open_clock()
        error: Exception | None = None
        try:
            self._writer = TraceWriter(path, job.describe, self._clock.samples)
        except (OSError, RuntimeError) as caught:  # the latter if there can be no more threads
            error = caught
        if not job.agree(error is None):  # or stop() would wait for this rank
            self._clock.close()
            if error is None:
                self._writer.close([])
            raise error or TorchMPIError(f"No timeline is recorded: other ranks cannot write to {folder}.")
        self.path = self._writer.path
        self._clock.follow(self._writer.add_sample)
        self._hook = _count_steps()
        events.add_reader(self._writer.read)

    def _close(self, measure_clock: Callable[[], list[ClockSample]]) -> None:
        events.remove_reader(self._writer.read)  # before the measurement, which is no call of the program
        self._hook()
        samples: list[ClockSample] = []
        try:
            samples = measure_clock()  # waits for the other ranks; until then the clock is measured further
        finally:
            self._clock.close()
            self._writer.close(samples)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if _recording is self:
            _end(agree=error is None)


def start(folder: str | os.PathLike[str]) -> Recording:
    """Record what all ranks do from now on, in trace files. Collective.

    Each rank writes ``rankN.json.gz`` in the folder, in the format of Chrome's trace viewer and of Perfetto
    (https://ui.perfetto.dev). The file can be read at any time, also after the process was killed.
    ``TORCHMPI_TIMELINE=FOLDER`` records from ``mpi.start()`` to ``mpi.stop()``.

    Args:
        folder: The folder for the files, the same on all ranks; created if necessary. Files of an earlier timeline in
            it are overwritten.

    Returns:
        A context manager that calls :func:`stop` at the end of a block.

    Raises:
        NotStartedError: torchmpi is not started.
        TorchMPIError: A timeline is being recorded already, or another rank cannot write its file.
        OSError: This rank cannot write its file.

    Example:
        with mpi.timeline.start("traces"):
            train_one_epoch()
    """
    global _recording
    if _job is None:
        raise NotStartedError("A timeline is recorded by the ranks of a job. Call mpi.start() before timeline.start().")
    if _recording is not None:
        raise TorchMPIError(f"A timeline is being recorded in {_recording.folder}. Call mpi.timeline.stop() first.")
    _recording = Recording(Path(folder), _job)
    return _recording


def stop() -> None:
    """Complete the trace files; do nothing if no timeline is being recorded. Collective.

    Raises:
        MismatchError: Other ranks make a different call.

    Example:
        mpi.timeline.start("traces")
        train_one_epoch()
        mpi.timeline.stop()
    """
    _end(agree=True)


def range(name: str) -> AbstractContextManager[None]:
    """Show a part of the program in the timeline. Without a timeline it does nothing.

    Args:
        name: The name of the range.

    Returns:
        A context manager.

    Example:
        with mpi.timeline.range("validation"):
            validate()
    """
    return _NOTHING if events.recorder is None else _Range(name)


class _Range:
    """A range that is being recorded. A class, since a generator would cost more than the record."""

    __slots__ = ("_begin", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._begin = events.now()

    def __exit__(self, *_: object) -> None:
        recorder = events.recorder
        if recorder is not None:
            recorder.slice(self._name, "range", self._begin)


_NOTHING = nullcontext()


def is_recording() -> bool:
    """Return whether a timeline is being recorded.

    Returns:
        True between :func:`start` and :func:`stop`.

    Example:
        if not mpi.timeline.is_recording():
            mpi.timeline.start("traces")
    """
    return _recording is not None


def _end(*, agree: bool) -> None:
    """Complete the file; compare the clocks again if all ranks do so."""
    if _recording is not None:
        finish(_recording._job.measure_clock if agree else list)


def finish(measure_clock: Callable[[], list[ClockSample]]) -> None:
    """Complete the file with the measurement that a function makes."""
    global _recording
    recording, _recording = _recording, None
    if recording is not None:
        recording._close(measure_clock)


def set_job(job: JobInfo | None) -> None:
    """Set the running job, or None when it ends, which completes the file of this rank."""
    global _job
    if job is None:
        _end(agree=False)
    _job = job


def in_forked_child() -> None:
    """Forget the timeline in a forked process, which is no rank."""
    global _job, _recording
    _job = _recording = None
    events.in_forked_child()


os.register_at_fork(after_in_child=in_forked_child)


def _count_steps() -> Callable[[], None]:
    """Mark the end of each step of an optimizer; return a function that removes the marks."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def mark(optimizer: Any, *_: Any) -> None:
        recorder = events.recorder
        if recorder is not None:
            recorder.slice("step", "step", events.now(), optimizer=type(optimizer).__name__)

    return register_optimizer_step_post_hook(mark).remove


__all__ = ["Recording", "is_recording", "range", "start", "stop"]
