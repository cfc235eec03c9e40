"""``torchmpi bench ps``: how fast a client sends to and receives from the ranks of other hosts."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ... import parameterserver as ps
from ...session import runtime
from .job import Job
from .ps_patience import Patient

Row = dict[str, Any]
_FAR_BYTES = 64 << 20
_NUM_REPEATS = 7
_CLIENT = 0
_ONE_HOST = (
    "all ranks are on one host. Start the job with hosts: mpirun -n 2 --hostfile hosts torchmpi bench ps --parts link"
)


def measure_link(job: Job, options: argparse.Namespace) -> list[Row]:
    """Send, receive, and bare MPI beside them; one row each, or why there are none. Collective."""
    head: Row = {"part": "link", "ranks": job.size}
    if runtime.current().num_hosts == 1:
        return [head | {"why_not": _ONE_HOST}]
    job.show("link")
    link = Link(job)
    rows = [head | {"bytes": link.far_bytes, "gbit": options.gbit} | row for row in link.rows()]
    return rows


class Link:
    """A server of which the ranks on other hosts than the client's hold 64 MB."""

    def __init__(self, job: Job) -> None:
        self._job, self._comm = job, Patient(job.comm)
        hosts = self._comm.allgather(runtime.current().host_name)
        self._far_ranks = [rank for rank, host in enumerate(hosts) if host != hosts[_CLIENT]]
        numel = -(-_FAR_BYTES // 4 * job.size // len(self._far_ranks))
        self._data = torch.ones(numel)
        self._server = ps.init(torch.zeros(numel))
        self.far_bytes = 4 * sum(self._server.parts[rank][1] for rank in self._far_ranks)

    def rows(self) -> list[Row]:
        """Figures."""
        received = torch.empty_like(self._data)
        rows = [
            self._timed("send", lambda: ps.send(self._server, self._data, "add").wait()),
            self._timed("receive", lambda: ps.receive(self._server, received).wait()),
        ]
        is_right = self._job.rank != _CLIENT or bool((received == 1 + _NUM_REPEATS).all())
        is_right = all(self._comm.allgather(is_right))
        ps.free(self._server)
        rows.append(self._timed("bare MPI, to one rank", self._bare, alone=False))
        return [row | {"is_exact": is_right} for row in rows]

    def _timed(self, what: str, call: Callable[[], object], *, alone: bool = True) -> Row:
        speeds = []
        for repeat in range(1 + _NUM_REPEATS):
            self._data.fill_(1)
            self._comm.Barrier()
            begin = time.perf_counter()
            if self._job.rank == _CLIENT or not alone:
                call()
            duration = time.perf_counter() - begin
            self._comm.Barrier()
            if repeat > 0:  # the first makes the connections
                speeds.append(self.far_bytes / duration)
        low, median, high = statistics.quantiles(self._job.comm.bcast(speeds, _CLIENT), n=4, method="inclusive")
        return {"what": what, "bytes_per_second": median, "low": low, "high": high}

    def _bare(self) -> None:
        """One message of the same length, and one back to say that it is there."""
        comm, far = self._job.comm, self._far_ranks[0]
        data = self._data.numpy()[: self.far_bytes // 4]
        if self._job.rank == _CLIENT:
            comm.Send(data, far)
            comm.Recv(bytearray(1), far)
        elif self._job.rank == far:
            comm.Recv(data, _CLIENT)
            comm.Send(bytearray(1), _CLIENT)
