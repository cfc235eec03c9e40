"""To a user without an MPI launcher: processes that meet through a store are ranks like others, and end as such."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import failures
from helpers.launching import job_environment

PROGRAM = Path(__file__).parent / "launcherless_program.py"
LIMIT_SECONDS = 150
pytestmark = pytest.mark.any_mpi

START = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
import torchmpi as mpi
from torchmpi.launch import launcherless
from torchmpi.launch import mpi_library
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MPI = launcherless.connect(dist.FileStore(os.environ["STORE"], size), rank, size, timeout_seconds=60)
mpi_library.adopt(MPI)
"""


class Ended(NamedTuple):
    """Status and output of one rank."""

    status: int
    stdout: str
    stderr: str


class Job:
    """`n` processes."""

    def __init__(self, n: int, command: list[str | Path], folder: Path, env: Callable[[int], dict[str, str]]) -> None:
        common = {"WORLD_SIZE": str(n), "STORE": str(folder / "store"), "PYTHONFAULTHANDLER": "1"}
        self._begin = time.monotonic()
        self._outputs = [[(folder / f"{rank}.{kind}").open("w+") for kind in ("out", "err")] for rank in range(n)]
        self.processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=job_environment(common | {"RANK": str(rank)} | env(rank)),
            )
            for rank, (out, err) in enumerate(self._outputs)
        ]

    def wait_for(self, text: str) -> None:
        """Wait until all ranks have printed a text."""
        while not all(text in self._text(out) for out, _ in self._outputs):
            ended = [process.returncode for process in self.processes if process.poll() is not None]
            assert not ended and time.monotonic() - self._begin < LIMIT_SECONDS, self.end()
            time.sleep(0.05)

    def wait_until_asleep(self, rank: int) -> None:
        """Wait until a rank, which has printed its process, sleeps: before the call in which it waits it does not."""
        process = re.search(r"^process (\d+) ", self._text(self._outputs[rank][0]), re.M)
        assert process is not None
        while Path(f"/proc/{process[1]}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() - self._begin < LIMIT_SECONDS, self.end()
            time.sleep(0.01)

    def end(self) -> list[Ended]:
        """Return the results of all ranks; ranks that do not end are killed (status -9)."""
        for process in self.processes:
            try:
                process.wait(max(0.1, LIMIT_SECONDS - (time.monotonic() - self._begin)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [
            Ended(process.returncode, self._text(out), self._text(err))
            for process, (out, err) in zip(self.processes, self._outputs, strict=True)
        ]

    def _text(self, file) -> str:
        return Path(file.name).read_text()

    def close(self) -> None:
        self.end()
        for out, err in self._outputs:
            out.close()
            err.close()


@pytest.fixture
def begin(tmp_path, warm_python):
    """``begin(n, "code" or path, env=lambda rank: {}) -> Job``"""
    jobs = []

    def run(n: int, program: str | Path, env: Callable[[int], dict[str, str]] = lambda rank: {}) -> Job:
        script = program if isinstance(program, Path) else tmp_path / "job.py"
        if isinstance(program, str):
            script.write_text(START + textwrap.dedent(program))
        failures.jobs.append(["env", f"WORLD_SIZE={n}", "RANK=0", "python", str(script)])  # and the other ranks
        folder = tmp_path / str(len(jobs))
        folder.mkdir()
        jobs.append(Job(n, [*warm_python, script], folder, env))
        return jobs[-1]

    yield run
    for job in jobs:
        for process in job.processes:
            process.kill()
        job.close()


REPORT = re.compile(r"^compared (\d+), wrong (.*), hosts (\d+), digest (\w+)$", re.MULTILINE)


def check_program(ranks: list[Ended], num_hosts: int) -> str:
    """Check the reports of all ranks; return the digest of all results."""
    assert [rank.status for rank in ranks] == [0] * len(ranks), ranks
    reports = REPORT.findall(ranks[0].stdout)
    assert [report[1:3] for report in reports] == [("[]", str(num_hosts))] * 3, ranks
    assert int(reports[0][0]) > 200 and reports[1] == reports[2], ranks
    for number, rank in enumerate(ranks):
        assert rank.stdout.count(f"rank {number} left: [], mpi4py: False\n") == 2, ranks
    return reports[0][3]


@pytest.mark.quick
@pytest.mark.parametrize("n", (1, 3))
def test_program(begin, n):
    check_program(begin(n, PROGRAM).end(), 1)


def test_results_have_the_same_bits_as_with_mpi(begin, launch):
    digest = check_program(begin(2, PROGRAM).end(), 1)
    result = launch(2, [PROGRAM], timeout=LIMIT_SECONDS)
    assert result.returncode == 0, result.output
    assert REPORT.findall(result.stdout)[0][1:] == ("[]", "1", digest), result.output


@pytest.mark.parametrize("hosts", ("abc", "aab"), ids=("three hosts", "two hosts"))
def test_ranks_on_different_hosts(begin, hosts):
    """Ranks on different hosts share no memory: collectives run over messages and gloo, also in steps."""
    job = begin(3, PROGRAM, lambda rank: {"TORCHMPI_HOST_NAME": hosts[rank]})
    check_program(job.end(), len(set(hosts)))


# --- ends


CALLS = {
    "in shared memory": "mpi.allreduce(tensor)",
    "in messages": "mpi.allreduce(tensor, backend='p2p')",
    "in gloo": "mpi.allreduce(tensor, backend='gloo')",
    "in a receive": "mpi.recv(torch.empty(3), 1)",
}


@pytest.mark.quick
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_killed_rank_ends_the_job_and_is_named(begin, call):
    job = begin(3, f"""
        mpi.start()
        tensor = torch.ones(3)
        mpi.allreduce(tensor), mpi.allreduce(tensor, backend="p2p"), mpi.allreduce(tensor, backend="gloo")
        mpi.barrier()
        print("process", os.getpid(), "runs", flush=True)
        if rank == 1:
            time.sleep({LIMIT_SECONDS})
        {call}
    """)  # fmt: skip
    job.wait_for("runs")
    for rank in (0, 2):
        job.wait_until_asleep(rank)
    job.processes[1].kill()
    ranks = job.end()
    assert ranks[1].status == -signal.SIGKILL
    assert [ranks[0].status, ranks[2].status] == [1, 1], ranks
    assert re.search(r"rank 1 on host \S+ is gone|lost the connection to rank 1", ranks[0].stderr + ranks[2].stderr), (
        ranks
    )


def test_an_exception_ends_the_job_with_one_traceback(begin):
    ranks = begin(
        3,
        """
        mpi.start()
        mpi.barrier()
        if rank == 1:
            raise ValueError("no such file")
        mpi.allreduce(torch.ones(3))
    """,
    ).end()
    everything = "".join(rank.stderr for rank in ranks)
    assert [rank.status for rank in ranks] == [1, 1, 1], ranks
    assert everything.count("Traceback") == 1 and "ValueError: no such file" in ranks[1].stderr, ranks
    assert "since rank 1 has ended the job (status=1)" in ranks[0].stderr, ranks


def test_abort_ends_all_with_its_status(begin):
    """The ranks compute, wait for a message, or sleep."""
    ranks = begin(
        4,
        """
        MPI.COMM_WORLD.Barrier()
        if rank == 3:
            time.sleep(0.5)
            MPI.COMM_WORLD.Abort(7)
        if rank == 2:
            MPI.COMM_WORLD.recv(source=0)
        if rank == 1:
            while True:
                pass
        time.sleep(1000)
    """,
    ).end()
    assert [rank.status for rank in ranks] == [7] * 4, ranks
    for number in (0, 1, 2):
        assert ranks[number].stderr.count("since rank 3 has ended the job (status=7)") == 1, ranks


def test_ctrl_c_ends_the_job(begin):
    job = begin(
        2,
        """
        mpi.start()
        mpi.barrier()
        print("running", flush=True)
        if rank == 0:
            time.sleep(1000)
        MPI.COMM_WORLD.Barrier()
    """,
    )
    job.wait_for("running")
    job.processes[0].send_signal(signal.SIGINT)
    ranks = job.end()
    assert [rank.status for rank in ranks] == [130, 130], ranks


def test_ends_without_stop_and_close_are_clean(begin):
    """The end of Python calls stop() and close() on all ranks."""
    ranks = begin(
        3,
        """
        mpi.start()
        print(mpi.allreduce(torch.ones(1)).item())
    """,
    ).end()
    assert [(rank.status, rank.stdout) for rank in ranks] == [(0, "3.0\n")] * 3, ranks
    assert not any("Traceback" in rank.stderr for rank in ranks), ranks


def test_some_may_leave_earlier(begin):
    """A closed connection is not a lost one: other ranks continue, and calls that need the rank raise."""
    ranks = begin(
        3,
        """
        MPI.COMM_WORLD.Barrier()
        part = MPI.COMM_WORLD.Split(rank // 2)
        if rank == 2:
            sys.exit()
        time.sleep(1)
        print(part.allgather(rank))
        try:
            MPI.COMM_WORLD.recv(source=2)
        except MPI.Exception as error:
            print(error)
    """,
    ).end()
    assert [rank.status for rank in ranks] == [0] * 3, ranks
    assert re.fullmatch(r"\[0, 1\]\nrank 2 on host \S+ has left: .*\n", ranks[0].stdout), ranks


def test_workers_of_a_data_loader(begin):
    """Workers are forked, and end while the ranks communicate."""
    ranks = begin(
        2,
        """
        mpi.start()
        dataset = torch.utils.data.TensorDataset(torch.arange(40.0))
        total = 0.0
        for _ in range(2):
            for batch, in torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2):
                total += mpi.allreduce(batch.sum(), backend="gloo").item()
                mpi.sendreceive(batch, src=1 - rank, dst=1 - rank)
        print(total)
        mpi.stop()
    """,
    ).end()
    assert [(rank.status, rank.stdout) for rank in ranks] == [(0, "3120.0\n")] * 2, ranks


def test_a_missing_rank_is_named(begin):
    code = "launcherless.connect(dist.FileStore(os.environ['STORE'] + '2', 2), rank, 2, timeout_seconds=1)"
    (rank,) = begin(1, code).end()
    assert rank.status == 1 and "LaunchError: rank 0: rank 1 has written nothing to the store" in rank.stderr, rank


def test_the_environment_is_that_of_no_launcher():
    """The other tests depend on this."""
    assert not any(name.startswith(("OMPI_COMM", "PMI_")) for name in job_environment({})), os.environ
