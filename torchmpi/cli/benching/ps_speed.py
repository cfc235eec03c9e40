"""``torchmpi bench ps``, first part: add and receive, against torch.distributed.rpc and against a plain copy."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ... import parameterserver as ps
from .arguments import short_size
from .clock import BATCH_SECONDS, MIN_BATCHES, Entrant, measure
from .contestants import COPY
from .job import Job, split_seconds
from .ps_patience import Patient
from .ps_rpc import FORMS, RPC

Row = dict[str, Any]
OURS = "torchmpi"
ALL, ONE = "add + receive, all ranks at once", "add + receive, one client"
_NUM_CONTESTANTS = 2 + len(FORMS)
_ASSUMED_BYTES_PER_SECOND = 1e9  # to divide the time among sizes


def measure_speed(job: Job, options: argparse.Namespace) -> list[Row]:
    """Rows for each size, with all ranks at work and with one. Collective."""
    comm = Patient(job.comm)
    cells = [(num_bytes, collective) for num_bytes in options.sizes for collective in (ALL, ONE)]
    weights = [
        _NUM_CONTESTANTS * MIN_BATCHES * max(BATCH_SECONDS, size / _ASSUMED_BYTES_PER_SECOND) for size, _ in cells
    ]
    rows: list[Row] = []
    end = time.monotonic() + options.seconds
    with ExitStack() as resources:
        rpc = None
        if "rpc" in options.peers:
            job.show("starting torch.distributed.rpc")
            rpc = RPC(comm, resources)
        for index, (num_bytes, collective) in enumerate(cells):
            job.show(f"{index + 1}/{len(cells)} {collective}, {short_size(num_bytes)}")
            left = job.comm.bcast(max(0.0, end - time.monotonic()))
            rows += Cell(job, comm, rpc, num_bytes).rows(collective, split_seconds(left, weights, index))
    return rows


class Cell:
    """One size."""

    def __init__(self, job: Job, comm: Patient, rpc: RPC | None, num_bytes: int) -> None:
        self._job, self._comm, self._rpc = job, comm, rpc
        self._numel = max(1, num_bytes // 4)
        self._gradient, self._received = torch.zeros(self._numel), torch.zeros(self._numel)
        self._head: Row = {"part": "speed", "ranks": job.size, "dtype": "float32", "mode": "sync", "bytes": num_bytes}

    def rows(self, collective: str, seconds: float) -> list[Row]:
        """One row for each contestant: its figures, or why there are none."""
        works = collective == ALL or self._job.rank == self._job.size - 1  # not the rank that has the server of RPC
        self._rest()
        server = ps.init(torch.zeros(self._numel))
        ours, copy = partial(self._ours, server), partial(self._received.copy_, self._gradient)
        reasons = {OURS: self._job.agreed(self._check(ours))}
        entrants = [
            Entrant(name, (call if works else _nothing,), self._touch)
            for name, call in ((OURS, ours), (COPY, copy))
            if reasons.get(name) is None
        ]
        found, why_not = self._peers(works)
        reasons |= why_not
        entrants[1:1] = found
        samples = measure(entrants, self._comm, seconds=seconds, one_clock=self._job.one_clock)
        self._rest()
        ps.free(server)
        figures = {entrant.name: dataclasses.asdict(sample) for entrant, sample in zip(entrants, samples, strict=True)}
        names = (OURS, *(FORMS if self._rpc else ()), COPY)
        return [self._row(collective, name) | figures.get(name, {"why_not": reasons.get(name)}) for name in names]

    def _row(self, collective: str, name: str) -> Row:
        num_moved = 1 if name == COPY else 2  # add and receive move the tensor twice, a copy once
        return self._head | {"verb": collective, "contestant": name, "payload_bytes": num_moved * 4 * self._numel}

    def _ours(self, server: Any) -> None:
        ps.send(server, self._gradient, "add").wait()
        ps.receive(server, self._received).wait()

    def _check(self, call: Callable[[], None]) -> str | None:
        """Every rank adds once."""
        self._gradient.fill_(self._job.rank + 1)
        call()
        self._comm.Barrier()
        self._gradient.zero_()
        call()
        right = self._job.size * (self._job.size + 1) / 2
        return None if bool((self._received == right).all()) else f"wrong result on rank {self._job.rank}"

    def _peers(self, works: bool) -> tuple[list[Entrant], dict[str, str]]:
        if self._rpc is None:
            return [], {}
        reasons, value, entrants = dict(self._rpc.why_not), 0.0, []
        if self._rpc.forms:
            self._rpc.make(self._numel)
        for form in self._rpc.forms:
            value, reason = self._rpc.check(form, value)
            if reason is None:
                timed = partial(self._rpc.run, form) if works else _no_time
                entrants.append(Entrant(form, (_nothing,), self._rpc.touch, timed))
            else:
                reasons[form] = reason
        return entrants, reasons

    def _touch(self) -> None:
        self._rest()
        self._gradient.zero_()
        self._received.zero_()

    def _rest(self) -> None:
        if self._rpc is not None:
            self._rpc.rest()


def _nothing() -> None:
    pass


def _no_time(num_calls: int) -> float:
    return 0.0
