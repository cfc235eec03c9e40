"""One rank fails: the job ends in seconds, says why once, and has a status to match."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import pytest

START = """
import os, signal, sys, threading, time
import torch
import torchmpi as mpi
mpi.start()
rank = mpi.rank()
mpi.barrier()
if rank == 0:
    print("running", flush=True)
    time.sleep(0.1)  # launchers drop what they have not read when a rank dies
mpi.barrier()
"""
# Starting Python and torch on a busy machine is most of this; the issue is that nobody waits for ever.
LIMIT_SECONDS = 60
once = pytest.mark.once


def failing(job, code: str, *, n: int = 3, env: dict[str, str] | None = None):
    result = job(n, START + code, timeout=LIMIT_SECONDS, env=env or {})
    assert result.returncode != 0, result.output
    assert "running" in result.stdout, result.output
    return result


def test_an_exception_ends_the_job_with_one_traceback(job):
    result = failing(job, "if rank == 1: raise ValueError('no such file')\nmpi.allreduce(torch.ones(3))")
    assert result.stderr.count("Traceback") == 1, result.output
    assert result.stderr.count("ValueError: no such file") == 1, result.output
    assert "torchmpi: rank 1 of 3 failed" in result.stderr, result.output


@pytest.mark.parametrize(("delay", "n"), ((0, 3), pytest.param(1, 2, marks=once)))
def test_stopping_in_finally_does_not_hide_the_cause(job, delay, n):
    """Regression: the others met stop() where they expected allreduce, and their complaint was all one saw."""
    code = f"""
try:
    if rank == 1:
        raise ValueError("bad sample 17")
    time.sleep({delay})
    mpi.allreduce(torch.ones(3))
finally:
    mpi.stop()
"""
    result = failing(job, code, n=n)
    assert result.stderr.count("ValueError: bad sample 17") == 1, result.output


def test_an_asynchronous_error_nobody_waits_for_is_mentioned(job):
    code = """
queue = mpi.communicator().intra.call_queue
queue.submit(lambda: 1 / 0, "division")
mpi.stop()
"""
    result = job(2, START + code)
    assert "wait() was not called: division by zero" in result.stderr, result.output


def test_a_failed_thread_of_torchmpi_ends_the_job(job):
    """Regression: it ended silently, and calls that it should have run never ended."""
    code = """
if rank == 1: mpi.allreduce_async(torch.ones(3)).when_done(sys.exit)
else: mpi.allreduce(torch.ones(3))
mpi.allreduce_async(torch.ones(3)).wait()
"""
    result = failing(job, code, n=2)
    assert "rank 1: the thread 'torchmpi world' failed, which ends the job:\nTraceback" in result.stderr, result.output


def test_the_same_exception_on_all_ranks_is_explained_once(job):
    result = failing(job, "raise ValueError('everybody')")
    assert result.stderr.count("Traceback") >= 1, result.output
    assert result.stderr.count("Traceback") <= 2, result.output  # two ranks may fail within the same microseconds


@pytest.mark.parametrize(("inside_mpi", "n"), ((False, 3), (True, 2)), ids=("in Python", "inside MPI"))
def test_sigterm_on_one_rank_ends_the_job(job, inside_mpi, n):
    kill = "os.kill(os.getpid(), signal.SIGTERM)"
    code = f"""
if rank == 1 and {not inside_mpi}:
    {kill}
if rank == 1:
    threading.Timer(0.5, lambda: {kill}).start()
if rank == 0:
    time.sleep({LIMIT_SECONDS})
mpi.allreduce(torch.ones(3))
"""
    result = failing(job, code, n=n)
    assert result.stderr.count("rank 1 received SIGTERM") == 1, result.output
    assert "job.py" in result.stderr, result.output


def test_a_killed_rank_ends_the_job(job):
    failing(job, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nmpi.allreduce(torch.ones(3))")


@pytest.mark.parametrize(("status", "n"), (pytest.param(0, 2, marks=once), (3, 3)))
def test_leaving_while_the_others_communicate_ends_the_job(job, status, n):
    result = failing(job, f"if rank == 1: sys.exit({status})\nmpi.allreduce(torch.ones(3))", n=n)
    assert "rank 1 called stop()" in result.stderr, result.output
    assert "allreduce(float32 [3], sum)" in result.stderr, result.output


# What rank 1 calls, what the others call, and what both are told.
DIFFERENT = [
    ("mpi.barrier()", "mpi.allreduce(torch.ones(3))", ("barrier()", "allreduce(float32 [3], sum)")),
    ("mpi.allreduce(torch.ones(4))", "mpi.allreduce(torch.ones(3))", ("float32 [4]", "float32 [3]")),
    ("mpi.allreduce(torch.ones(2, 3))", "mpi.allreduce(torch.ones(3, 2))", ("float32 [2, 3]", "float32 [3, 2]")),
    ("mpi.allreduce(torch.ones(3).int())", "mpi.allreduce(torch.ones(3))", ("int32 [3]", "float32 [3]")),
    ("mpi.allreduce(torch.ones(3), op='max')", "mpi.allreduce(torch.ones(3))", ("max", "sum")),
    ("mpi.broadcast(torch.ones(3), 1)", "mpi.broadcast(torch.ones(3), 0)", ("root=1", "root=0")),
    ("mpi.allreduce_async(torch.ones(4)).wait()", "mpi.allreduce_async(torch.ones(3)).wait()", ("[4]", "[3]")),
    (
        "mpi.allgather(torch.ones(3, 2))",
        "mpi.allgather(torch.ones(3, 3))",
        ("allgather(float32 [2])", "allgather(float32 [3])"),
    ),
    (
        "mpi.allreduce_many([torch.ones(2), torch.ones(3)])",
        "mpi.allreduce_many([torch.ones(3), torch.ones(2)])",
        ("allreduce_many(2 tensors of 5 float32 in all",),
    ),
    ("mpi.stop()", "mpi.allreduce(torch.ones(3))", ("stop()", "allreduce")),
]


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [DIFFERENT[0], pytest.param(*DIFFERENT[6], marks=once), pytest.param(*DIFFERENT[9], marks=once)],
)
def test_different_calls_end_the_job_and_are_named(job, one, other, names):
    result = failing(job, f"if rank == 1: {one}\nelse: {other}\nmpi.barrier()\n", n=2)
    assert "made different calls" in result.stderr, result.output
    for name in names:
        assert name in result.stderr, result.output


@pytest.fixture(scope="module")
def told(launch, tmp_path_factory) -> list[list[str]]:
    """For each of the different calls but ``stop()`` what the ranks have been told, in a job that catches it."""
    code = f"""
for number, (one, other, _) in enumerate({DIFFERENT[:-1]!r}):
    try:
        eval(one if rank == 1 else other)
    except mpi.TorchMPIError as error:
        print(f"told {{number}}:", " ".join(str(error).split()), flush=True)
mpi.barrier()
"""
    script = tmp_path_factory.mktemp("different") / "job.py"
    script.write_text(START + code)
    result = launch(3, [script], timeout=LIMIT_SECONDS)
    assert result.returncode == 0, result.output
    lines = result.stdout.splitlines()
    return [[line for line in lines if line.startswith(f"told {number}:")] for number in range(len(DIFFERENT) - 1)]


@pytest.mark.parametrize("number", range(len(DIFFERENT) - 1), ids=[one for one, *_ in DIFFERENT[:-1]])
def test_different_calls_are_named_on_all_ranks(told, number):
    assert len(told[number]) == 3, told[number]
    for line in told[number]:
        assert "made different calls" in line, line
        for name in DIFFERENT[number][2]:
            assert name in line, line


def test_a_refusal_that_is_caught_does_not_leave_the_others_waiting(job):
    """Where MPI moves the data: in shared memory every rank gets the error itself (test_shared_memory.py)."""
    code = """
try:
    if rank == 1:
        time.sleep(1)
        mpi.barrier()
    else:
        mpi.allreduce(torch.ones(3))
except mpi.TorchMPIError:
    time.sleep(60)
"""
    result = failing(job, code, env={"TORCHMPI_BACKEND": "mpi"})
    assert "cannot complete: rank 1 called another operation" in result.stderr, result.output


@pytest.mark.parametrize("hosts", (pytest.param(1, marks=once), 3))
def test_a_missing_rank_is_named_with_the_line_it_is_at(job, hosts):
    """On one host the ranks read it from a shared page; between hosts (here in name only) they ask each other."""
    code = "if rank == 2: time.sleep(60)  # lost in thought\nmpi.allreduce(torch.ones(3))"
    env = {"TORCHMPI_STALL_WARNING_SECONDS": "2", "TORCHMPI_STALL_ABORT_SECONDS": "5"}
    setup = START
    if hosts > 1:
        setup = (
            "from mpi4py import MPI\nimport os\nos.environ['TORCHMPI_HOST_NAME'] = f'host{MPI.COMM_WORLD.rank}'\n"
            + START
        )
    result = job(3, setup + code, timeout=LIMIT_SECONDS, env=env)
    assert result.returncode != 0, result.output
    assert f"3 ranks on {hosts} host" in result.stderr, result.output
    assert re.search(
        r"rank 0 has waited \d+ s in allreduce\(float32 \[3\], sum\), call #\d+ on communicator world", result.stderr
    )
    assert re.search(r"rank 2, after \d+ calls: at .*lost in thought", result.stderr), result.output
    assert "exceeds stall_abort_seconds" in result.stderr, result.output


def test_a_message_nobody_sends_is_reported(job):
    env = {"TORCHMPI_STALL_WARNING_SECONDS": "1", "TORCHMPI_STALL_ABORT_SECONDS": "8"}
    result = failing(job, "if rank == 0: mpi.recv(torch.empty(5), 1)\nelse: time.sleep(60)", n=2, env=env)
    assert "recv(float32 [5]) from rank 1" in result.stderr, result.output


@once
def test_a_job_that_is_ended_within_pytest_says_why(launch, tmp_path):
    """pytest keeps what a test writes until that is over, which it never is."""
    test = tmp_path / "test_one.py"
    body = "    print('kept')\n    mpi.recv(torch.empty(5), 1 - rank)\n"
    test.write_text(f"import pytest\n{START}\n@pytest.mark.mpi\ndef test_one():\n{body}")
    env = {"TORCHMPI_STALL_WARNING_SECONDS": "1", "TORCHMPI_STALL_ABORT_SECONDS": "8"}
    result = launch(2, ["-m", "pytest", "--with-mpi", "--capture=sys", "-q", str(test)], timeout=LIMIT_SECONDS, env=env)
    assert result.returncode != 0, result.output
    assert "recv(float32 [5]) from rank" in result.stderr, result.output
    assert "exceeds stall_abort_seconds" in result.stderr, result.output


@pytest.fixture(scope="module")
def after_forks(launch, tmp_path_factory):
    """A job of two ranks that fork in all the ways that people do, and forget to stop."""
    code = """
child = os.fork()
if child == 0:
    try:
        mpi.rank()
    except mpi.TorchMPIError as error:
        print("refused:", "forked" in str(error), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
pid, status = os.waitpid(child, 0)
print("child ended by", os.WTERMSIG(status), flush=True)

child = os.fork()
if child == 0:
    sys.exit(0)
print("child ended with", os.waitpid(child, 0)[1], flush=True)

data = torch.utils.data.TensorDataset(torch.arange(64.0))
total = torch.zeros(())
for epoch in range(2):
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork"):
        total += mpi.allreduce(batch.sum())
print("total", total.item(), flush=True)
"""
    script = tmp_path_factory.mktemp("forks") / "job.py"
    script.write_text(START + code)
    return launch(2, [script], timeout=LIMIT_SECONDS)


def test_a_forked_process_is_no_rank_and_ends_quietly(after_forks):
    assert after_forks.stdout.count("refused: True") == 2, after_forks.output
    assert after_forks.stdout.count(f"child ended by {int(signal.SIGTERM)}") == 2, after_forks.output
    assert "received SIGTERM" not in after_forks.stderr, after_forks.output


def test_a_forked_child_that_ends_normally_does_not_finalize_mpi(after_forks):
    """Its exit handlers ran MPI_Finalize, which waited for the other ranks for ever."""
    assert after_forks.stdout.count("child ended with 0") == 2, after_forks.output


def test_dataloader_workers_by_fork(after_forks):
    assert after_forks.stdout.count(f"total {2 * 2 * sum(range(64)):.1f}") == 2, after_forks.output


def test_a_program_that_forgets_to_stop_ends_well(after_forks):
    assert after_forks.returncode == 0, after_forks.output


def test_terminating_the_launcher_ends_everything(tmp_path, mpirun):
    """SIGTERM to mpirun, as a scheduler sends it: no rank may survive, and none needs a page of explanation."""
    from conftest import job_environment

    script = tmp_path / "job.py"
    script.write_text(
        START
        + f"open({str(tmp_path)!r} + f'/pid{{rank}}', 'w').write(str(os.getpid()))\nmpi.barrier()\ntime.sleep(100)"
    )
    command = ["timeout", "-k", "30", str(LIMIT_SECONDS), *mpirun, "-n", "2", sys.executable, str(script)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=job_environment({})
    )
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    limit = time.monotonic() + LIMIT_SECONDS
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < limit:
        time.sleep(0.1)
    time.sleep(0.5)
    process.terminate()
    _, stderr = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode != 0
    for file in files:
        for _ in range(100):
            if not _alive(int(file.read_text())):
                break
            time.sleep(0.1)
        assert not _alive(int(file.read_text())), stderr


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_rank_that_does_not_come_to_push_communicator_is_named(job):
    env = {"TORCHMPI_STALL_WARNING_SECONDS": "1", "TORCHMPI_STALL_ABORT_SECONDS": "8"}
    result = failing(job, "if rank == 1: time.sleep(60)\nmpi.push_communicator(0)", n=2, env=env)
    assert "split()" in result.stderr and "rank 1, after" in result.stderr, result.output


def test_ranks_that_wait_for_each_other_both_say_where_they_are(job):
    """Each watchdog asked the other and did not answer meanwhile."""
    env = {"TORCHMPI_STALL_WARNING_SECONDS": "4", "TORCHMPI_STALL_ABORT_SECONDS": "10"}
    code = """
level = mpi.push_communicator(0)
mpi.set_communicator(0)
mpi.allreduce(torch.ones(3), comm=rank and level)
"""
    result = failing(job, code, n=2, env=env)
    assert "does not reply" not in result.stderr, result.output
    assert result.stderr.count("mpi.allreduce(torch.ones(3), comm=rank and level)") >= 2, result.output


def test_an_error_alone_ends_python_as_ever(job):
    """With one rank nobody waits: buffered files are written and exit handlers run."""
    result = job(1, START + "import atexit\natexit.register(print, 'goodbye')\nraise ValueError('alone')")
    assert result.returncode != 0, result.output
    assert "goodbye" in result.stdout and result.stderr.count("ValueError: alone") == 1, result.output
