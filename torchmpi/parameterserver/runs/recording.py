"""Recording of a run on ranks: each rank keeps its events in memory, and rank 0 writes them to a file at the end."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ... import collectives, files
from ...argument_types import checks_types
from ...errors import ArgumentError
from ...session import runtime
from . import observed_run
from .observed_run import RunObserver
from .run_record import RunRecord

if TYPE_CHECKING:
    from ...communicators.group import Group

__all__ = ["record"]


@contextmanager
@checks_types
def record(path: files.StrPath, *, norms: bool = False) -> Iterator[None]:
    """Record who sent what when, in a block of the program. Collective over all ranks.

    Each send, receive, wait and step of an update takes less than a microsecond more, and 250 bytes of memory until the
    end of the block, where rank 0 writes the file. If the block raises, there is no file.

    Args:
        path: The file, by custom with the suffix ``.npz``: see :func:`read_run`, and ``torchmpi staleness FILE``.
        norms: Also compute the norm of all sent values, which reads them once more.

    Returns:
        A context manager.

    Raises:
        ArgumentError: A recording, or a simulation, is in progress.
        OSError: The file cannot be written; raised on rank 0.

    Example:
        with ps.record("run.npz"):
            train()
    """
    world = runtime.current().world
    if observed_run.active is not None:
        raise ArgumentError(f"{world.where}: record({str(path)!r}): this run is being recorded already.")
    observer = RunObserver(norms=norms)
    begin = _common_begin(world)
    observed_run.active = observer
    try:
        yield
    finally:
        observed_run.active = None
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
