"""Recording of a run on ranks: each rank keeps its events in memory, and rank 0 writes them to a file at the end."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from .. import collectives, files
from ..argument_types import checks_types
from ..communicators.conditions import from_rank_0
from ..errors import ArgumentError
from ..session import runtime
from .call_numbers import CallNumbers, RecordedCalls, RepeatedCalls
from .runs import observed_run
from .runs.call_order import RecordedRows
from .runs.observed_run import RunObserver
from .runs.run_record import RunRecord, read_run
from .servers import refuse_continuing

if TYPE_CHECKING:
    from ..communicators.group import Group

__all__ = ["record", "replay"]


@contextmanager
@checks_types
def record(path: files.StrPath, *, norms: bool = False, ordered: bool = False) -> Iterator[None]:
    """Record who sent what when, in a block of the program. Collective over all ranks.

    Each send, receive, wait and step of an update takes about a microsecond more, and 250 bytes of memory until the end
    of the block, where rank 0 writes the file. If the block raises, there is no file.

    Args:
        path: The file, by custom with the suffix ``.npz``: see :func:`read_run`, and ``torchmpi staleness FILE``.
        norms: Also compute the norm of all sent values, which reads them once more.
        ordered: Also record the order of all calls, for :func:`replay`. Then one call of the job runs at a time, and
            checksums of the values are computed.

    Returns:
        A context manager.

    Raises:
        ArgumentError: A recording, or a simulation, is in progress.
        CommunicatorError: With ``ordered=True``: the ranks can have no parameter servers, see :func:`init`.
        OSError: The file cannot be written; raised on rank 0.

    Example:
        with ps.record("run.npz"):
            train()
    """
    world = _world(f"record({str(path)!r})")
    numbers = CallNumbers(world) if ordered else None
    observer = RunObserver(norms=norms)
    observer.order = None if numbers is None else RecordedCalls(numbers)
    with _observed(world, observer, path, numbers):
        yield


@contextmanager
@checks_types
def replay(path: files.StrPath, *, record: files.StrPath | None = None) -> Iterator[None]:
    """Repeat a recorded run bit for bit, in a block of the program. Collective over all ranks.

    The sends and receives in the block run in the order of the record, whatever the load of the machine. The program,
    its data and its seeds must be those of the recorded run, on as many ranks, of any hosts. Each call is compared with
    the recorded one, by checksums of all values.

    Args:
        path: A file of :func:`record` with ``ordered=True``, which rank 0 reads.
        record: File for the record of the repeated run.

    Returns:
        A context manager.

    Raises:
        ArgumentError: The file is no such record, or a call differs from the recorded one, which is not applied; the
            message names row and column.
        OSError: The file cannot be read.
        StallError: Another rank has not made its next call for ``stall_abort_seconds``.

    Example:
        with ps.replay("run.npz"):
            train()
    """
    world = _world(f"replay({str(path)!r})")
    broadcast = partial(collectives.broadcast_object, comm=world)  # other hosts may not have the file
    content = from_rank_0(world.rank, broadcast, lambda: read_run(path).to_bytes())
    rows = RecordedRows(RunRecord.from_file(io.BytesIO(content)), path, world.size, world.where)
    numbers = CallNumbers(world)
    observer = RunObserver()
    observer.order = RepeatedCalls(numbers, rows)
    with _observed(world, observer, record, numbers):
        yield
        rows.check_all_taken(world.world_ranks[world.rank])


def _world(call: str) -> Group:
    """Return the group of all ranks; raise if a run is observed already."""
    world = runtime.current().world
    refuse_continuing(call, "a run is not recorded or repeated, as the record of a lost rank would be lost with it")
    if observed_run.active is not None:
        raise ArgumentError(f"{world.where}: {call}: this run is being recorded or repeated already.")
    return world


@contextmanager
def _observed(
    world: Group, observer: RunObserver, path: files.StrPath | None, numbers: CallNumbers | None
) -> Iterator[None]:
    """Let an observer see a block, and write what it has seen. Collective."""
    begin = _common_begin(world)
    observed_run.observe(observer)
    try:
        yield
    finally:
        observed_run.observe(None)
    collectives.barrier(world)  # no rank makes an ordered call any more
    if numbers is not None:
        numbers.close()
    if path is None:
        return
    own = RunRecord.of(observer.events, begin, num_ranks=world.size)
    records = _gathered(own, world)
    if records:
        RunRecord.joined(records).save(path)
    collectives.barrier(world)  # from now on all ranks may read the file


def _gathered(own: RunRecord, world: Group) -> list[RunRecord]:
    """Return the records of all ranks on rank 0; nothing on the others. Collective."""
    data = torch.frombuffer(bytearray(own.to_bytes()), dtype=torch.uint8)
    lengths = collectives.allgather_object(data.numel(), comm=world)
    everything = collectives.gather(data, 0, comm=world)
    if everything is None:
        return []
    return [RunRecord.from_file(io.BytesIO(part.numpy().data)) for part in torch.split(everything, lengths)]


def _common_begin(world: Group) -> int:
    """Return the time of this rank's clock that is the begin of the record: ranks of a host share a clock. Collective.

    The clocks of different hosts are aligned by the end of a barrier.
    """
    collectives.barrier(world)
    host, now = world.context.hosts[world.world_ranks[world.rank]], time.monotonic_ns()
    times = collectives.allgather_object((host, now), comm=world)
    return min(now for other, now in times if other == host)
