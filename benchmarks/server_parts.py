"""The parts of the measurement of the parameter server, which run inside a job: speed, rows, idle, storm, link."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from one_sided import OneSided
from rpc_peer import FORMS, RPCPeer
from sleeping_comm import SleepingComm
from usage import usage

from torchmpi import parameterserver as ps
from torchmpi.cli.bench.bench_job import BenchJob
from torchmpi.cli.bench.contestants import COPY
from torchmpi.cli.bench.options import short_size
from torchmpi.cli.bench.timing import BATCH_SECONDS, MIN_BATCHES, TimedCall, measure_calls
from torchmpi.session import runtime

Row = dict[str, Any]
OURS = "torchmpi"
RMA = "mpi rma"
ALL, ONE = "add + receive, all ranks at once", "add + receive, one client"
ROWS_ALL, ROWS_ONE = "add + receive of rows, all ranks at once", "add + receive of rows, one client"
TABLE = 100_000, 64
"""The shape of the table whose rows are sent: 25.6 MB, 256 bytes each."""
_NUM_CONTESTANTS = 3 + len(FORMS)
_ASSUMED_BYTES_PER_SECOND = 1e9  # to divide the time among sizes
_MOST_ROW_BYTES = 4 << 20


def measure_speed(job: BenchJob, options: argparse.Namespace) -> list[Row]:
    """Return rows for each size, with all ranks as clients and with one. Collective."""
    return _measure(job, options, "speed", options.sizes, (ALL, ONE))


def measure_rows(job: BenchJob, options: argparse.Namespace) -> list[Row]:
    """Return the same for random rows of a table, with so many bytes. Collective."""
    sizes = [num_bytes for num_bytes in options.sizes if 4 * TABLE[1] <= num_bytes <= _MOST_ROW_BYTES]
    return _measure(job, options, "rows", sizes, (ROWS_ALL, ROWS_ONE))


def _measure(
    job: BenchJob, options: argparse.Namespace, part: str, sizes: Sequence[int], operations: tuple[str, str]
) -> list[Row]:
    comm = SleepingComm(job.comm)
    cases = [(num_bytes, operation) for num_bytes in sizes for operation in operations]
    with ExitStack() as resources:
        rpc = None
        if "rpc" in options.peers:
            job.show("starting torch.distributed.rpc")
            rpc = RPCPeer(comm, resources)
        tasks = [
            (
                f"{operation}, {short_size(num_bytes)}",
                _NUM_CONTESTANTS * MIN_BATCHES * max(BATCH_SECONDS, num_bytes / _ASSUMED_BYTES_PER_SECOND),
                partial(_speed, job, comm, rpc, part, num_bytes, operation),
            )
            for num_bytes, operation in cases
        ]
        return job.run_in_turn(tasks, options.seconds)


def _speed(job: BenchJob, comm: SleepingComm, rpc: RPCPeer | None, part: str, num_bytes: int, *rest: Any) -> list[Row]:
    return SpeedMeasurement(job, comm, rpc, part, num_bytes).rows(*rest)


class SpeedMeasurement:
    """All contestants on one size: of a whole tensor, or of rows of the table."""

    def __init__(self, job: BenchJob, comm: SleepingComm, rpc: RPCPeer | None, part: str, num_bytes: int) -> None:
        self._job, self._comm, self._rpc = job, comm, rpc
        self._shape, self._index = (max(1, num_bytes // 4), 1), None
        if part == "rows":
            chosen = torch.randperm(TABLE[0], generator=torch.Generator().manual_seed(0))
            self._shape, self._index = TABLE, chosen[: num_bytes // (4 * TABLE[1])].sort().values
        self._numel = self._shape[0] if self._index is None else len(self._index) * TABLE[1]
        self._gradient, self._received = torch.zeros(self._numel), torch.zeros(self._numel)
        self._head: Row = {"part": part, "ranks": job.size, "dtype": "float32", "mode": "sync", "bytes": num_bytes}

    def rows(self, operation: str, seconds: float) -> list[Row]:
        """Return one row for each contestant: its times, or the reason why there are none."""
        # Not the rank with the server of RPC.
        is_client = operation in (ALL, ROWS_ALL) or self._job.rank == self._job.size - 1
        self._rest()
        server = ps.init(torch.zeros(self._shape))
        index = None if self._index is None else self._index.numpy()
        windows = OneSided(self._job.comm, self._shape, index, self._gradient, self._received)
        own: dict[str, Callable[[], Any]] = {
            OURS: partial(self._ours, server),
            RMA: windows.add_and_receive,
            COPY: partial(self._received.copy_, self._gradient),
        }
        reasons = {name: self._job.agreed(self._check(own[name])) for name in (OURS, RMA)}
        calls = [
            TimedCall(name, (call if is_client else _nothing,), self._touch)
            for name, call in own.items()
            if reasons.get(name) is None
        ]
        found, why_not = self._peers(is_client)
        reasons |= why_not
        calls[-1:-1] = found
        summaries = measure_calls(calls, self._comm, seconds=seconds, one_clock=self._job.one_clock)
        self._rest()
        ps.free(server)
        windows.close()
        figures = {call.name: dataclasses.asdict(summary) for call, summary in zip(calls, summaries, strict=True)}
        names = (OURS, RMA, *(FORMS if self._rpc else ()), COPY)
        return [self._row(operation, name) | figures.get(name, {"why_not": reasons.get(name)}) for name in names]

    def _row(self, operation: str, name: str) -> Row:
        num_moved = 1 if name == COPY else 2  # add and receive move the tensor twice, a copy once
        return self._head | {"verb": operation, "contestant": name, "payload_bytes": num_moved * 4 * self._numel}

    def _ours(self, server: Any) -> None:
        if self._index is None:
            ps.send(server, self._gradient, "add").wait()
            ps.receive(server, self._received).wait()
        else:
            ps.send(server, self._gradient, "add", rows=self._index).wait()
            ps.receive(server, self._received, rows=self._index).wait()

    def _check(self, call: Callable[[], None]) -> str | None:
        """Let every rank add once, and check the sum."""
        self._gradient.fill_(self._job.rank + 1)
        call()
        self._comm.Barrier()
        self._touch()
        call()
        right = self._job.size * (self._job.size + 1) / 2
        return None if bool((self._received == right).all()) else f"wrong result on rank {self._job.rank}"

    def _peers(self, is_client: bool) -> tuple[list[TimedCall], dict[str, str]]:
        if self._rpc is None:
            return [], {}
        reasons, value, calls = dict(self._rpc.why_not), 0.0, []
        if self._rpc.forms:
            self._rpc.make(self._shape, [] if self._index is None else self._index.tolist())
        for form in self._rpc.forms:
            value, reason = self._rpc.check(form, value)
            if reason is None:
                timed = partial(self._rpc.run, form) if is_client else _no_time
                calls.append(TimedCall(form, (_nothing,), self._rpc.touch, timed))
            else:
                reasons[form] = reason
        return calls, reasons

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


# --- idle and storm --------------------------------------------------------------------------------------

_IDLE_NUMEL = 1 << 18
STORM_SIZES = (8 << 10, 4 << 20)
"""One that a call handles itself, and one that goes through the call queue."""
_NUM_GRADIENTS = 3
_WARM_UP = 20
_SHOW_SECONDS = 5.0


def measure_idle(job: BenchJob, options: argparse.Namespace) -> list[Row]:
    """Measure the share of a core that each idle rank uses: without a server, with one, and the peer's. Collective."""
    comm = SleepingComm(job.comm)
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


def _share(comm: SleepingComm, seconds: float) -> float:
    comm.Barrier()
    begin, begin_cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - begin_cpu) / (time.monotonic() - begin)


def _share_of_rpc(comm: SleepingComm, seconds: float) -> dict[str, float]:
    with ExitStack() as resources:
        rpc = RPCPeer(comm, resources)
        return {"torch.distributed.rpc": rpc.idle(seconds)} if rpc.forms else {}


def measure_storm(job: BenchJob, options: argparse.Namespace) -> list[Row]:
    """Return one row for each size: all ranks add integers as fast as they can. Collective."""
    return [Storm(job, num_bytes).row(options.seconds / len(STORM_SIZES)) for num_bytes in STORM_SIZES]


class Storm:
    """One size. Each rank adds several gradients of its own in rotation, and counts the rounds."""

    def __init__(self, job: BenchJob, num_bytes: int) -> None:
        self._job, self._num_bytes = job, num_bytes
        self._numel = num_bytes // 8
        self._gradients = [self._gradient(job.rank, number) for number in range(_NUM_GRADIENTS)]
        self._num_rounds = 0

    def _gradient(self, rank: int, number: int) -> torch.Tensor:
        return torch.arange(self._numel) % 7 + 10 * number + rank

    def row(self, seconds: float) -> Row:
        """Return the number of updates, whether the sum is exact, and the growth of memory."""
        comm = SleepingComm(self._job.comm)
        server = ps.init(torch.zeros(self._numel, dtype=torch.int64))
        for _ in range(_WARM_UP):
            self._add_all(server)
        ps.receive(server).wait()
        comm.Barrier()
        warmed_up, before = self._num_rounds, usage()
        took = self._run(server, seconds)
        comm.Barrier()
        after = usage()
        of_ranks = comm.allgather((self._num_rounds, self._num_rounds - warmed_up, took, before, after))
        found = ps.receive(server).wait()
        is_exact = bool(torch.equal(found, self._total([rounds for rounds, *_ in of_ranks])))
        is_exact = all(comm.allgather(is_exact))
        ps.free(server)
        num_updates = _NUM_GRADIENTS * sum(rounds for _, rounds, *_ in of_ranks)
        elapsed = max(took for _, _, took, _, _ in of_ranks)
        return {
            "part": "storm", "ranks": self._job.size, "bytes": self._num_bytes, "seconds": round(elapsed, 3),
            "updates": num_updates, "updates_per_second": round(num_updates / elapsed, 1), "is_exact": is_exact,
            **_growth([(before, after) for *_, before, after in of_ranks]),
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
        """Return the expected values after a number of rounds of each rank."""
        total = torch.zeros(self._numel, dtype=torch.int64)
        for rank, number_of_rounds in enumerate(rounds):
            for number in range(_NUM_GRADIENTS):
                total += number_of_rounds * self._gradient(rank, number)
        return total


def _growth(of_ranks: Sequence[tuple[dict[str, int], dict[str, int]]]) -> Row:
    """Return the resident memory of the rank where it has grown most."""
    before, after = max(of_ranks, key=lambda pair: pair[1]["resident_bytes"] - pair[0]["resident_bytes"])
    return {"resident_bytes_before": before["resident_bytes"], "resident_bytes_after": after["resident_bytes"]}


# --- link ------------------------------------------------------------------------------------------------

_FAR_BYTES = 64 << 20
_NUM_REPEATS = 7
_CLIENT = 0
_ONE_HOST = (
    "all ranks are on one host. Start the job with hosts: mpirun -n 2 --hostfile hosts python benchmarks/server.py "
    "--parts link"
)


def measure_link(job: BenchJob, options: argparse.Namespace) -> list[Row]:
    """Return a row each for send, receive and bare MPI, or the reason why there are none. Collective."""
    head: Row = {"part": "link", "ranks": job.size}
    if runtime.current().num_hosts == 1:
        return [head | {"why_not": _ONE_HOST}]
    job.show("link")
    link = Link(job)
    rows = [head | {"bytes": link.far_bytes, "gbit": options.gbit} | row for row in link.rows()]
    return rows


class Link:
    """A server with 64 MB on the ranks of other hosts than the client's."""

    def __init__(self, job: BenchJob) -> None:
        self._job, self._comm = job, SleepingComm(job.comm)
        hosts = self._comm.allgather(runtime.current().host_name)
        self._far_ranks = [rank for rank, host in enumerate(hosts) if host != hosts[_CLIENT]]
        numel = -(-_FAR_BYTES // 4 * job.size // len(self._far_ranks))
        self._data = torch.ones(numel)
        self._server = ps.init(torch.zeros(numel))
        self.far_bytes = 4 * sum(self._server.parts[rank][1] for rank in self._far_ranks)

    def rows(self) -> list[Row]:
        """Return the rows."""
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
            if repeat > 0:  # the first one opens the connections
                speeds.append(self.far_bytes / duration)
        low, median, high = statistics.quantiles(self._job.comm.bcast(speeds, _CLIENT), n=4, method="inclusive")
        return {"what": what, "bytes_per_second": median, "low": low, "high": high}

    def _bare(self) -> None:
        """Send one message of the same length, and receive an acknowledgement."""
        comm, far = self._job.comm, self._far_ranks[0]
        data = self._data.numpy()[: self.far_bytes // 4]
        if self._job.rank == _CLIENT:
            comm.Send(data, far)
            comm.Recv(bytearray(1), far)
        elif self._job.rank == far:
            comm.Recv(data, _CLIENT)
            comm.Send(bytearray(1), _CLIENT)
