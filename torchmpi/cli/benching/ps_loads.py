"""``torchmpi bench ps``: what servers take while nobody asks them, and what is left after a storm of updates."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ... import parameterserver as ps
from .arguments import short_size
from .job import Job
from .ps_patience import Patient
from .ps_rpc import RPC
from .usage import usage

Row = dict[str, Any]
_IDLE_NUMEL = 1 << 18
STORM_SIZES = (8 << 10, 1 << 20)
"""One that a call does by itself, and one that goes through the lane."""
_NUM_GRADIENTS = 3
_WARM_UP = 20
_SHOW_SECONDS = 5.0


def measure_idle(job: Job, options: argparse.Namespace) -> list[Row]:
    """The share of a core that each rank takes, idle: without servers, with one, and the peer's. Collective."""
    comm = Patient(job.comm)
    is_first = not options.settings  # of the two jobs with so many ranks
    shares = {}
    if is_first:
        job.show(f"idle without a server, {options.idle:g} s")
        shares["no server"] = _share(comm, options.idle)
    server = ps.init(torch.zeros(_IDLE_NUMEL))
    ps.send(server, torch.ones(_IDLE_NUMEL)).wait()
    name = "server, no thread" if server.is_local else "server with its thread"
    job.show(f"idle with a {name}, {options.idle:g} s")
    shares[name] = _share(comm, options.idle)
    ps.free(server)
    if "rpc" in options.peers and is_first:
        job.show(f"idle torch.distributed.rpc, {options.idle:g} s")
        shares |= _share_of_rpc(comm, options.idle)
    head = {"part": "idle", "ranks": job.size, "rank": job.rank, "seconds": options.idle}
    rows = [head | {"what": what, "share": share} for what, share in shares.items()]
    return [row for found in zip(*comm.allgather(rows), strict=True) for row in found]


def _share(comm: Patient, seconds: float) -> float:
    comm.Barrier()
    begin, begin_cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - begin_cpu) / (time.monotonic() - begin)


def _share_of_rpc(comm: Patient, seconds: float) -> dict[str, float]:
    with ExitStack() as resources:
        rpc = RPC(comm, resources)
        return {"torch.distributed.rpc": rpc.idle(seconds)} if rpc.forms else {}


def measure_storm(job: Job, options: argparse.Namespace) -> list[Row]:
    """One row for each size: all ranks add whole numbers, as fast as they can. Collective."""
    return [Storm(job, num_bytes).row(options.seconds / len(STORM_SIZES)) for num_bytes in STORM_SIZES]


class Storm:
    """One size. Each rank adds gradients of its own in turn, and counts."""

    def __init__(self, job: Job, num_bytes: int) -> None:
        self._job, self._num_bytes = job, num_bytes
        self._numel = num_bytes // 8
        self._gradients = [self._gradient(job.rank, number) for number in range(_NUM_GRADIENTS)]
        self._num_rounds = 0

    def _gradient(self, rank: int, number: int) -> torch.Tensor:
        return torch.arange(self._numel) % 7 + 10 * number + rank

    def row(self, seconds: float) -> Row:
        """How many updates, whether the sum is right, and what has grown."""
        comm = Patient(self._job.comm)
        server = ps.init(torch.zeros(self._numel, dtype=torch.int64))
        for _ in range(_WARM_UP):
            self._add_all(server)
        ps.receive(server).wait()
        comm.Barrier()
        warmed_up, before = self._num_rounds, usage()
        took = self._run(server, seconds)
        comm.Barrier()
        after = usage()
        everybody = comm.allgather((self._num_rounds, self._num_rounds - warmed_up, took, before, after))
        found = ps.receive(server).wait()
        is_exact = bool(torch.equal(found, self._total([rounds for rounds, *_ in everybody])))
        is_exact = all(comm.allgather(is_exact))
        ps.free(server)
        num_updates = _NUM_GRADIENTS * sum(rounds for _, rounds, *_ in everybody)
        elapsed = max(took for _, _, took, _, _ in everybody)
        return {
            "part": "storm", "ranks": self._job.size, "bytes": self._num_bytes, "seconds": round(elapsed, 3),
            "updates": num_updates, "updates_per_second": round(num_updates / elapsed, 1), "is_exact": is_exact,
            **_growth([(before, after) for *_, before, after in everybody]),
        }  # fmt: skip

    def _run(self, server: Any, seconds: float) -> float:
        begin = shown = time.monotonic()
        while (now := time.monotonic()) < begin + seconds:
            if now >= shown:
                self._job.show(f"storm of {short_size(self._num_bytes)}: {now - begin:.0f} of {seconds:g} s")
                shown += _SHOW_SECONDS
            self._add_all(server)
        return time.monotonic() - begin

    def _add_all(self, server: Any) -> None:
        for handle in [ps.send(server, gradient, "add") for gradient in self._gradients]:
            handle.wait()
        self._num_rounds += 1

    def _total(self, rounds: Sequence[int]) -> torch.Tensor:
        """What the server must have after so many rounds of each rank."""
        total = torch.zeros(self._numel, dtype=torch.int64)
        for rank, number_of_rounds in enumerate(rounds):
            for number in range(_NUM_GRADIENTS):
                total += number_of_rounds * self._gradient(rank, number)
        return total


def _growth(of_ranks: Sequence[tuple[dict[str, int], dict[str, int]]]) -> Row:
    """Resident memory of the rank whose memory has grown most."""
    before, after = max(of_ranks, key=lambda pair: pair[1]["resident_bytes"] - pair[0]["resident_bytes"])
    return {"resident_bytes_before": before["resident_bytes"], "resident_bytes_after": after["resident_bytes"]}
