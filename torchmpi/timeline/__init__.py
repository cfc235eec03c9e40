"""Timelines: what each rank does when, as trace files for Perfetto and Chrome, and their analysis.

``TORCHMPI_TIMELINE=traces`` in the environment of a job records one, ``torchmpi timeline report traces`` explains it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from ..errors import ArgumentError, NotStartedError, TorchMPIError, kind_of, rank_prefix
from . import events, observer
from .clocks import ClockSample
from .events import CallRecord, MessageRecord, SliceRecord
from .observer import Observer
from .trace_writer import TraceWriter, path_for


class MeasuredClock(Protocol):
    """The clock of this host while a timeline is recorded."""

    samples: list[ClockSample]

    def follow(self, take: Callable[[ClockSample], None]) -> None:
        """Pass further samples to a function, in a thread."""

    def close(self) -> None:
        """Take no further samples."""


Measure = Callable[[], list[ClockSample]]
AnyObserver = TypeVar("AnyObserver", bound=Observer)


class JobInfo(NamedTuple):
    """What a timeline needs of the running job."""

    describe: dict[str, Any]
    """Rank, size, host, the first rank of the host (`leader`), and other facts for the readers of the file."""
    open_clock: Callable[[], MeasuredClock]
    """Compares the clock of this host with that of rank 0, now and further on. Collective."""
    measure_clock: Measure
    """Compares the clock of this host with that of rank 0. Collective."""
    measure_in_call: Measure
    """The same, by a thread that already makes a call."""
    agree: Callable[[bool], bool]
    """Whether a condition is true on all ranks. Collective."""


_job: JobInfo | None = None
_recording: Recording | None = None


class Recording(TraceWriter):
    """A timeline that is being recorded: a context manager that calls :func:`stop` at its end.

    Attributes:
        folder: The folder of the trace files.
        path: The trace file of this rank.
    """

    def __init__(self, folder: Path, job: JobInfo) -> None:
        self.folder, self._job = folder, job
        self._measure: Measure = list
        self._clock, self._remove_marks = job.open_clock(), _count_steps()
        error: Exception | None = None
        try:
            super().__init__(path_for(folder, job.describe["rank"]), job.describe, self._clock.samples)
        except (OSError, RuntimeError) as caught:  # the latter if there can be no more threads
            error = caught
        if not job.agree(error is None):  # or stop() would wait for this rank
            (self.close if error is None else self._close_clock)()
            raise TorchMPIError(
                f"rank {job.describe['rank']}: no timeline is recorded in {folder}: {error or 'other ranks cannot'}. "
                "Name a folder that this user may write to on all hosts, or unset TORCHMPI_TIMELINE."
            ) from error
        self._clock.follow(self.add_sample)
        self.attach()

    def meet(self) -> None:
        """Complete the file, with the clock at the end."""
        self.finish(self._job.measure_in_call)

    def finish(self, measure: Measure) -> None:
        """Complete the file with a measurement of the clock."""
        self._measure = measure
        self.close()

    def _end(self) -> None:
        global _recording
        _recording = None if _recording is self else _recording
        events.remove_reader(self.read)  # before the measurement, which is no call of the program
        try:
            for each in self._measure():  # waits for the other ranks; until then the clock is measured further
                self.add_sample(each)
        finally:
            self._close_clock()
            super()._end()

    def _close_clock(self) -> None:
        self._remove_marks()
        self._clock.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.finish(self._job.measure_clock if error is None else list)


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
        TorchMPIError: A timeline is being recorded already, or a rank cannot write its file; then on all ranks.

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
    if _recording is not None:
        _recording.finish(_recording._job.measure_clock)


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


def add_observer(observer: AnyObserver) -> AnyObserver:
    """Pass records of all calls of this rank to an observer, until its ``close()`` or ``mpi.stop()``. Not collective.

    While there is an observer, calls do not take the fast path (docs/timeline.md#cost).

    Args:
        observer: An object of a class that is derived from :class:`Observer`.

    Returns:
        The observer, which is also a context manager that closes it.

    Raises:
        NotStartedError: torchmpi is not started.
        ArgumentError: `observer` is no Observer.
        TorchMPIError: The observer has been closed.

    Example:
        ::

            class Sizes(mpi.timeline.Observer):
                def write(self, records):
                    sizes.extend(each.num_bytes for each in records if isinstance(each, mpi.timeline.CallRecord))

            sizes = []
            with mpi.timeline.add_observer(Sizes()):
                mpi.allreduce(torch.ones(3))
            assert sizes == [12]
    """
    if _job is None:
        raise NotStartedError("An observer needs the calls of a job. Call mpi.start() before timeline.add_observer().")
    if not isinstance(observer, Observer):
        raise ArgumentError(
            f"{rank_prefix()}timeline.add_observer(): {kind_of(observer)} is no Observer. Pass an object of a "
            "class that is derived from mpi.timeline.Observer."
        )
    return observer.attach()


def set_job(job: JobInfo | None) -> None:
    """Set the running job, or None when it ends."""
    global _job
    _job = job


def in_forked_child() -> None:
    """Forget the timeline in a forked process, which is no rank."""
    global _job, _recording
    _job = _recording = None
    events.in_forked_child()
    observer.in_forked_child()


os.register_at_fork(after_in_child=in_forked_child)


def _count_steps() -> Callable[[], None]:
    """Mark the end of each step of an optimizer; return a function that removes the marks."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def mark(optimizer: Any, *_: Any) -> None:
        recorder = events.recorder
        if recorder is not None:
            recorder.slice("step", "step", events.now(), optimizer=type(optimizer).__name__)

    return register_optimizer_step_post_hook(mark).remove


__all__ = [
    "CallRecord",
    "MessageRecord",
    "Observer",
    "Recording",
    "SliceRecord",
    "add_observer",
    "is_recording",
    "range",
    "start",
    "stop",
]
