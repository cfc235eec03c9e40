"""Collectives of ranks that are threads of one process, of which one runs at a time."""

from __future__ import annotations

from typing import Any

import torch

from ...backends.base import Backend, Operation
from ...backends.mpi_messages import rows_of
from ...backends.rank_order import combiner
from ...collective_specs import COLLECTIVES, SPECS
from ...communicators.group import Group, bytes_of
from ...tensors import partition


class MeetingBackend(Backend):
    """Takes the place of shared memory: the ranks meet, and the last one does the work of all."""

    name = "shm"
    announces = False
    enqueues = False
    device_types = ("cpu",)
    collectives = frozenset(name for name in COLLECTIVES if not (SPECS[name].divides and SPECS[name].gathers))

    def takes(self, device_type: str, collective: str) -> bool:
        return device_type == "cpu"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Accept everything within a host."""
        return None

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        spec = SPECS[collective]

        def run(source: Any, destination: Any, root: int) -> Any:
            def work(values: list[Any]) -> torch.Tensor | None:
                return _within_host(collective, op, values, root)

            num_bytes = max((bytes_of(each) for each in (source, destination)), default=0)
            comm = group.comm
            name = f"{collective} of communicator {comm.name}"
            result = comm.world.meet(name, comm, (source, destination), work, num_bytes)
            if destination is not None or spec.grows <= 0:
                return source if destination is None else destination
            return result.clone() if spec.receives(comm.rank == root) else None  # to each its own

        return Operation(run)


def _within_host(collective: str, op: str | None, values: list[tuple[Any, Any]], root: int) -> torch.Tensor | None:
    """Do the work of all ranks; return gathered rows."""
    spec = SPECS[collective]
    sources, destinations = [source for source, _ in values], [destination for _, destination in values]
    if not spec.tensors:
        return None
    if spec.reduces:
        assert op is not None
        parts = [source.reshape(-1) for source in sources]
        total = torch.empty_like(parts[0])
        combiner(total.dtype, op)(parts, total)
        if spec.reduces_to_root:
            parts[root].copy_(total)
        elif spec.reduces_to_all:
            for part in parts:
                part.copy_(total)
        else:
            _divide(total.view_as(sources[0]), destinations)
    elif spec.divides:
        _divide(sources[root], destinations)
    elif spec.gathers:
        gathered = torch.cat(sources)
        for destination in destinations:
            if destination is not None:
                destination.copy_(gathered)
        return gathered
    else:
        for rank, source in enumerate(sources):
            if rank != root:
                source.copy_(sources[root])
    return None


def _divide(rows: torch.Tensor, destinations: list[torch.Tensor]) -> None:
    """Copy its share of the rows to each rank."""
    shares = partition.even_partition(rows_of(rows)[0], len(destinations))
    for (first, count), destination in zip(shares, destinations, strict=True):
        destination.copy_(rows[first : first + count])
