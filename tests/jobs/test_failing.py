"""To whoever has a failing rank: the job ends within seconds, reports the cause once, and has a status other than 0."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from helpers.launching import IN_CALL, is_open_mpi

START = f"""{IN_CALL}
import os, signal, sys, threading, time
import torch
import torchmpi as mpi
mpi.start()
rank = mpi.rank()
mpi.barrier()
if rank == 0:
    open(__file__ + ".running", "w").close()  # launchers drop output that they have not read when a rank dies
mpi.barrier()
"""
HOSTS = "from mpi4py import MPI\nimport os\nos.environ['TORCHMPI_HOST_NAME'] = f'host{MPI.COMM_WORLD.rank}'\n"
"""Simulates a host for each rank."""
LIMIT_SECONDS = 400
any_mpi = pytest.mark.any_mpi
STALL = {"TORCHMPI_STALL_WARNING_SECONDS": "1", "TORCHMPI_STALL_ABORT_SECONDS": "5"}


@pytest.fixture
def failing(job, tmp_path):
    """``failing("code", ...)``: the result of a job that fails after START."""

    def run(code: str, *, n: int = 3, env: dict[str, str] | None = None):
        result = job(n, START + code, env=env or {})
        assert result.returncode != 0, result.output
        assert (tmp_path / "job.py.running").exists(), result.output
        return result

    return run


def lines_of_ours(result) -> list[str]:
    """The lines of reports, without those of tracebacks, of the launcher, and of the first start on a machine."""
    lines = [line.lstrip("\0") for line in result.stderr.splitlines()]  # Open MPI ends its messages with one
    return [line for line in lines if line.startswith("torchmpi: ") and " compil" not in line]


@pytest.mark.quick
def test_an_exception_ends_the_job_with_one_report(failing, tmp_path):
    """The report has the reason, what the others were doing, and announces the messages of the launcher."""
    file = tmp_path / "report.json"
    code = """
os.chdir("/")  # regression: the report was written there
asleep = __file__ + ".asleep"
if rank == 1:
    wait_until_in_call(2, 3)
    while not os.path.exists(asleep): time.sleep(0.01)
    time.sleep(1)  # the report tells how long they have waited
    raise ValueError("no such file" + " and" * 20 + "\\n".join(map(str, range(100))))
if rank == 0: os.mkdir(asleep), time.sleep(60)  # a line of rank 0
mpi.allreduce(torch.ones(3))
"""
    result = failing(code, n=4, env={"TORCHMPI_REPORT": os.path.relpath(file)})
    assert result.stderr.count("Traceback") == 1, result.output
    assert result.stderr.count("ValueError: no such file") == 1, result.output
    first, others, last = lines_of_ours(result)
    assert first == "torchmpi: rank 1 of 4 failed, which ends the job:", result.output
    assert re.match(r"torchmpi: rank 1 is process \d+ on .*\. The others:", others), result.output
    assert re.search(r"\n  rank 0: not in a call, at .*job.py:\d+ in <module>: .*# a line of rank 0\n", result.stderr)
    call = (
        r"allreduce\(float32 \[3\], sum\), call #\d+ on communicator world, for \d+ s, at .*job.py:\d+ in <module>: mpi"
    )
    assert re.search(rf"\n  ranks 2, 3: {call}", result.stderr), result.output
    assert re.match("torchmpi: The lines below are from .*(mpirun|mpiexec)", last), result.output
    assert result.stderr.splitlines().index(last) - result.stderr.splitlines().index(first) < 40, result.output
    written = json.loads(file.read_text())
    assert (written["rank"], written["size"], written["status"]) == (1, 4, 1), written
    assert "\n50\n" in written["reason"] and [other["ranks"] for other in written["others"]] == [[0], [2, 3]], written


@any_mpi
@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=any_mpi)])
def test_different_numbers_of_calls_of_a_closure_name_the_closure(failing, asynchronous):
    """Rank 0 sees no progress, and ends its step after two calls."""
    code = f"""
import torchmpi.nn as mpinn
net = torch.nn.Linear(3, 1)
mpinn.synchronize_parameters(net)
if {asynchronous}:
    mpinn.register_async_backward(net)
synchronize = mpinn.synchronize_gradients_async if {asynchronous} else mpinn.synchronize_gradients
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)
losses = iter([5.0, 5.0] if rank == 0 else [5.0, 4.0, 3.0, 2.0])
def closure():
    optimizer.zero_grad()
    net(torch.ones(2, 3)).square().sum().backward()
    synchronize(net)
    return next(losses)
optimizer.step(closure)
"""
    result = failing(code, n=2)
    assert re.search(r"MismatchError: .*closure.* must return the loss averaged over the ranks", result.stderr), (
        result.output
    )
    assert not re.search(r"failed too, .*MismatchError: ", result.stderr)  # the same text, cut


@any_mpi
def test_an_exception_hook_of_the_program_is_called(job):
    """Its output is part of the report."""
    setup = "import sys\nsys.excepthook = lambda kind, error, trace: print('my hook:', error, file=sys.stderr)\n"
    result = job(2, setup + START + "if rank == 1: raise ValueError('no such file')\nmpi.allreduce(torch.ones(3))")
    assert "which ends the job:\nmy hook: no such file\ntorchmpi: rank 1 is process" in result.stderr, result.output


@pytest.mark.parametrize(("delay", "n"), ((0, 3), pytest.param(1, 2, marks=any_mpi)))
def test_stopping_in_finally_does_not_hide_the_cause(failing, delay, n):
    """Regression: only the mismatch of stop() and allreduce was reported, by the other ranks."""
    code = f"""
try:
    if rank == 1:
        raise ValueError("bad sample 17")
    time.sleep({delay})
    mpi.allreduce(torch.ones(3))
finally:
    mpi.stop()
"""
    result = failing(code, n=n)
    assert result.stderr.count("ValueError: bad sample 17") == 1, result.output


@any_mpi
def test_an_exception_that_was_caught_before_stop_does_not_hide_the_cause(failing):
    """Regression: the job ended with the report of the caught exception only."""
    code = """
try:
    next(iter(()))
except StopIteration:
    if rank == 0: mpi.stop()
while rank == 1 and not mpi.communicator().intra.log_board.get(0, memory_layout.Block.dying): time.sleep(0.01)
raise RuntimeError("bad sample 17")
"""
    result = failing(f"from torchmpi.shared_memory import memory_layout\n{code}", n=2)
    assert result.stderr.count("rank 1 of 2 failed, which ends the job:") == 1, result.output
    assert result.stderr.count("RuntimeError: bad sample 17") == 1, result.output


@any_mpi
def test_an_error_of_stop_may_be_caught(job):
    """Regression: the next stop() of the other rank completed the one that had failed, and that at exit waited."""
    code = """
try:
    mpi.allreduce(torch.ones(3)) if rank == 0 else mpi.stop()
except mpi.errors.MismatchError:
    print("caught", flush=True)
if rank == 0: mpi.stop()
"""
    result = job(2, START + code, env=STALL)
    assert result.returncode == 0 and result.stdout.count("caught") == 2, result.output


@pytest.mark.parametrize("stop", ("mpi.stop()", pytest.param("", marks=any_mpi)), ids=("stop", "end of the program"))
def test_an_asynchronous_error_without_a_wait_fails_the_job(failing, stop):
    """Regression: the error was logged, and the job ended with status 0."""
    code = """
if rank == 1:
    mpi.communicator().intra.call_queue.submit(lambda: 1 / 0, "division")
"""
    result = failing(code + stop, n=2)
    assert result.stderr.count("wait() was not called: division by zero") == 1, result.output


def test_a_failed_thread_of_torchmpi_ends_the_job(failing):
    """Regression: the thread ended silently, and its queued calls never ended."""
    # Rank 1 does not wait for the call: it would run it, and end, in its main thread.
    code = f"""
begun = __file__ + ".begun"
if rank == 1:
    mpi.allreduce_async(torch.ones(3)).when_done(sys.exit)
    open(begun, "w").close()
    time.sleep({LIMIT_SECONDS})
while not os.path.exists(begun): time.sleep(0.01)
mpi.allreduce(torch.ones(3))
mpi.allreduce_async(torch.ones(3)).wait()
"""
    result = failing(code, n=2, env={"TORCHMPI_REPORT": "/nowhere/report.json"})
    assert "rank 1: the thread 'torchmpi world' failed, which ends the job:\nTraceback" in result.stderr, result.output
    assert "the report cannot be written: [Errno 2] No such file" in result.stderr, result.output


def test_the_same_exception_on_all_ranks_is_reported_once(failing):
    result = failing("raise ValueError('on all ranks')")
    assert result.stderr.count("Traceback") >= 1, result.output
    assert result.stderr.count("Traceback") <= 2, result.output  # two ranks may fail within the same microseconds


def test_another_error_on_another_rank_is_a_line_of_the_report(failing):
    """Regression: the other rank printed this line by itself, sometimes within the traceback of the first."""
    code = """
while rank == 1 and not mpi.communicator().intra.log_board.get(0, memory_layout.Block.dying): time.sleep(0.01)
raise ValueError(f"on rank {rank}")
"""
    result = failing(f"from torchmpi.shared_memory import memory_layout\n{code}", n=2)
    assert result.stderr.count("Traceback") == 1, result.output
    assert re.search(r"\n  rank 1: failed too, at .*job.py:\d+ in <module>.*: ValueError: on rank 1\n", result.stderr)


@pytest.mark.quick
@pytest.mark.parametrize(("inside_mpi", "n"), ((False, 3), (True, 2)), ids=("in Python", "inside MPI"))
def test_sigterm_on_one_rank_ends_the_job(failing, tmp_path, inside_mpi, n):
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
    result = failing(code, n=n, env={"TORCHMPI_REPORT": str(tmp_path / "report.json")})
    first, _ = lines_of_ours(result)
    assert re.search(r"rank 1 received SIGTERM, which ends the job. It was at .*job.py:\d+ in <module>", first), first
    assert json.loads((tmp_path / "report.json").read_text())["status"] == 128 + signal.SIGTERM


@pytest.mark.parametrize("inside_mpi", (False, True), ids=("in Python", "inside MPI"))
def test_the_line_of_sigterm_names_a_killed_rank(failing, mpirun, inside_mpi):
    """Regression: rank 0 said only that it received SIGTERM, which Open MPI's launcher sends after a rank has ended."""
    if not is_open_mpi(mpirun[0]):
        pytest.skip("MPICH's launcher sends SIGKILL to the other ranks")
    code = f"""
pid = mpi.broadcast_object(os.getpid(), 1)
if rank == 0:
    print("killed:", pid, flush=True)
mpi.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
{"" if inside_mpi else f"time.sleep({LIMIT_SECONDS})"}
mpi.allreduce(torch.ones(3), backend="mpi")
"""
    for _ in range(5):  # the launcher sends SIGKILL 0.25 s later, when a busy machine may not have run rank 0
        result = failing(code, n=2)
        if "torchmpi: rank 0 received SIGTERM" in result.stderr:
            break
    pid = re.search(r"killed: (\d+)", result.stdout)[1]
    where = r"torchmpi: rank 0 received SIGTERM, which ends the job. It was at .*job.py:\d+"
    assert re.search(where, result.stderr), result.output
    line = rf"\nrank 1 \(process {pid}\) has ended without a message before, probably killed \(SIGKILL, out of memory\)"
    assert re.search(line, result.stderr), result.output


def test_an_interrupt_of_all_ranks_is_one_line(failing):
    """Ctrl-C, as MPICH passes it on; Open MPI sends SIGTERM instead."""
    code = """
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
if rank == 0:
    time.sleep(60)
mpi.allreduce(torch.ones(3))
"""
    result = failing(code)
    first, _ = lines_of_ours(result)
    assert re.search(r"rank \d was interrupted .* It was at .*job.py:\d+ in <module>: ", first), result.output
    assert "Traceback" not in result.stderr, result.output


@pytest.mark.parametrize("backend", ("shm", pytest.param("mpi", marks=any_mpi)), ids=("in shared memory", "inside MPI"))
def test_an_interrupt_of_one_rank_in_a_call_ends_the_job(failing, backend):
    """Regression: the main thread was in a kernel, or in MPI, which did not return."""
    code = f"""
if rank == 0:
    time.sleep({LIMIT_SECONDS})
def interrupt(last):
    wait_until_in_call(1, last=last)
    time.sleep(0.2)  # in the call, not only at its line
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, args=(mpi.communicator().intra.call_log.seq,)).start()
mpi.allreduce(torch.ones(3), backend={backend!r})
"""
    result = failing(code, n=2)
    first = lines_of_ours(result)[0]
    assert re.search(r"rank 1 was interrupted .* It was at .*job.py:\d+ in <module>: mpi.allreduce", first), (
        result.output
    )


@any_mpi
def test_nets_that_differ_are_named(failing):
    """Regression: the error described an internal allreduce of bytes."""
    code = """
import torchmpi.nn as mpinn
net = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(1 + rank)))
net(torch.ones(1, 3)).sum().backward()
mpinn.synchronize_gradients(net)
"""
    result = failing(code, n=2)
    assert "The nets differ: the number of parameters is 2 on rank 0 and 4 on rank 1." in result.stderr, result.output
    named = "this rank has '1.weight', '1.bias' in addition"
    assert named in result.stderr or "rank 0 of 2 failed" in result.stderr, result.output


@pytest.mark.quick
def test_os_exit_ends_the_job(failing):
    """Regression: MPICH killed the other ranks and returned the status 0."""
    result = failing("if rank == 1: os._exit(0)\nmpi.allreduce(torch.ones(3))", n=2)
    first, *_ = lines_of_ours(result)
    where = r"It was at .*job.py:\d+ in <module>: if rank == 1: os._exit\(0\)"
    assert re.search(rf"rank 1 called os._exit\(0\) without mpi.stop\(\), which ends the job. {where}", first), first


@pytest.mark.quick
def test_a_killed_rank_with_a_child_ends_the_job(failing):
    """Regression: the launcher waited for the child."""
    code = f"""
import multiprocessing
if rank == 1:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=({LIMIT_SECONDS},)).start()
    os.kill(os.getpid(), signal.SIGKILL)
mpi.allreduce(torch.ones(3))
"""
    failing(code, n=2)


@pytest.mark.parametrize(
    ("setup", "end", "how"),
    (
        ("", "sys.exit(3)", r"left by sys.exit\(3\)"),
        pytest.param(HOSTS, "mpi.stop()", r"is in stop\(\)", marks=any_mpi),
    ),
    ids=("one host", "two hosts"),
)
def test_a_message_from_a_rank_in_stop_ends_the_job(job, setup, end, how):
    """Regression: it was noticed by the limit for stalls only, and the report did not tell where the other rank is."""
    code = f"if rank == 1: {end}\nelse: mpi.recv(torch.empty(3), 1)"
    result = job(2, setup + START + code)
    assert result.returncode != 0, result.output
    call = r"rank 0 has waited \d+ s in recv\(float32 \[3\]\) from rank 1 on communicator world."
    assert re.search(rf"{call}\n  rank 1 {how}, and does not make the other call: at ", result.stderr), result.output


@pytest.mark.parametrize(
    ("leave", "how", "status"),
    (
        ("sys.exit(3)", "left by sys.exit(3)", 3),
        pytest.param("sys.exit('no data')", "left by sys.exit(1)", 1, marks=any_mpi),
        pytest.param("raise SystemExit(3)", "reached the end of its program", 1, marks=any_mpi),
    ),
)
def test_leaving_while_the_others_communicate_ends_the_job(failing, leave, how, status):
    result = failing(f"if rank == 1: {leave}\nmpi.allreduce(torch.ones(3))")
    first, *_ = lines_of_ours(result)
    where = r"rank [02] was at .*job.py:\d+ in <module>: mpi.allreduce\(torch.ones\(3\)\)"
    assert re.match(f"torchmpi: rank 1 {re.escape(how)} without mpi.stop\\(\\), while {where}", first), result.output
    assert f"rank 1 {how}" in result.stderr.split("made different calls")[1], result.output
    assert "allreduce(float32 [3], sum)" in result.stderr, result.output
    assert "rank 1 called stop()" not in result.stderr, result.output
    assert "Traceback" not in result.stderr and result.returncode == status, result.output


@any_mpi
def test_leaving_is_reported_once_on_several_hosts(job):
    """Regression: each host had a traceback, which told that rank 1 called stop()."""
    code = """
there = __file__ + ".there"
if rank == 1:
    while not os.path.exists(there): time.sleep(0.01)
    sys.exit(3)
if rank == 2: os.mkdir(there), mpi.allreduce(torch.ones(3))
mpi.allreduce(torch.ones(3))
"""
    result = job(3, HOSTS + START + code)
    first, *_ = lines_of_ours(result)
    assert re.match(r"torchmpi: rank 1 left by sys.exit\(3\) without mpi.stop\(\), while rank 0 was at ", first), (
        result.output
    )
    assert "Traceback" not in result.stderr and result.stderr.count("without mpi.stop()") == 1, result.output
    # Rank 2 may have got its error already.
    where = r"\n  rank 2: .*(?:job.py:\d+ in <module>: if rank == 2: .*mpi.all|sys.excepthook)"
    assert re.search(where, result.stderr), result.output
    assert result.returncode == 3, result.output


# The call of rank 1, the call of the other ranks, and parts of the errors on all ranks.
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


@pytest.mark.quick
@pytest.mark.parametrize(("one", "other", "names"), [DIFFERENT[0], pytest.param(*DIFFERENT[-1], marks=any_mpi)])
def test_different_calls_end_the_job_and_are_named(failing, one, other, names):
    result = failing(f"if rank == 1: {one}\nelse: {other}\nmpi.barrier()\n", n=2)
    assert "made different calls" in result.stderr, result.output
    for name in names:
        assert name in result.stderr, result.output


@pytest.fixture(scope="module")
def mismatches(launch, tmp_path_factory) -> list[list[str]]:
    """The errors of all ranks for each pair of calls except ``stop()``, from one job that catches them."""
    code = f"""
for number, (one, other, _) in enumerate({DIFFERENT[:-1]!r}):
    try:
        eval(one if rank == 1 else other)
    except mpi.TorchMPIError as error:
        print(f"mismatch {{number}}:", " ".join(str(error).split()), flush=True)
mpi.barrier()
"""
    script = tmp_path_factory.mktemp("different") / "job.py"
    script.write_text(START + code)
    result = launch(3, [script])
    assert result.returncode == 0, result.output
    lines = result.stdout.splitlines()
    return [[line for line in lines if line.startswith(f"mismatch {number}:")] for number in range(len(DIFFERENT) - 1)]


@any_mpi
@pytest.mark.parametrize("number", range(len(DIFFERENT) - 1), ids=[one for one, *_ in DIFFERENT[:-1]])
def test_different_calls_are_named_on_all_ranks(mismatches, number):
    assert len(mismatches[number]) == 3, mismatches[number]
    for line in mismatches[number]:
        assert "made different calls" in line, line
        for name in DIFFERENT[number][2]:
            assert name in line, line


@any_mpi
def test_a_caught_mismatch_does_not_leave_the_others_waiting(failing):
    """With the backend `mpi` and a root that waits; otherwise every rank gets the error (test_host_mismatches.py)."""
    code = """
try:
    if rank == 1:
        wait_until_in_call(0, 2)
        mpi.barrier()
    else:
        mpi.gather(torch.ones(3))
except mpi.TorchMPIError:
    time.sleep(60)
"""
    result = failing(code, env={"TORCHMPI_BACKEND": "mpi"})
    assert "cannot complete: rank 1 has aborted it, or made a different call" in result.stderr, result.output


@pytest.mark.quick
def test_a_missing_rank_is_named_with_its_source_line(job):
    """Between (simulated) hosts the line is requested from the rank."""
    code = "if rank == 2: time.sleep(60)  # the missing rank\nmpi.allreduce(torch.ones(3))"
    env = STALL | {"TORCHMPI_STALL_ABORT_SECONDS": "3"}
    result = job(3, HOSTS + START + code, env=env)
    assert result.returncode != 0, result.output
    assert "3 ranks on 3 host" in result.stderr, result.output
    assert re.search(
        r"rank 0 has waited \d+ s in allreduce\(float32 \[3\], sum\), call #\d+ on communicator world", result.stderr
    )
    assert re.search(r"rank 2, after \d+ calls: at .*the missing rank", result.stderr), result.output
    assert "exceeds stall_abort_seconds" in result.stderr, result.output
    assert "With TORCHMPI_FLIGHT_RECORD=FOLDER the last calls of the ranks remain" in result.stderr, result.output
    assert re.search(r"`torchmpi dump \d+` compares the last calls of the ranks\.", result.stderr), result.output


@any_mpi
def test_a_late_rank_is_named_until_it_arrives(job):
    """On one host the line is read from the status board."""
    code = """
group = mpi.group([2, 0])
def on_the_group():
    if group: mpi.allreduce(torch.ones(3), comm=group)
for _ in range(3): on_the_group()  # the last call takes the fast path
import logging
def tell(record):
    if rank == 0 and "has waited" in record.getMessage(): open(told, "w").close()
    return True
logging.getLogger("torchmpi").addFilter(tell)
for turn, call in enumerate((lambda: mpi.allreduce(torch.ones(3)), lambda: mpi.push_communicator(0), on_the_group)):
    told = f"{__file__}.{turn}"
    mpi.barrier(0)
    while rank == 2 and not os.path.exists(told): time.sleep(0.01)  # the missing rank
    call()
import gc, weakref
freed = weakref.ref(group.intra) if group else lambda: None
if group: group.free()
del group, on_the_group, call
deadline = time.monotonic() + 20
while time.monotonic() < deadline and (gc.collect(), freed())[1] is not None: time.sleep(0.1)
print("freed:", freed() is None, flush=True)
mpi.stop()
"""
    result = job(3, START + code, env={"TORCHMPI_STALL_WARNING_SECONDS": "1"})
    assert result.returncode == 0, result.output
    assert result.stdout.count("freed: True") == 3, result.output  # reports do not keep the group
    for call in (r"allreduce\(.*\), call #\d+ on communicator world", r"split\(\)", r"allreduce\(.* group \[2, 0\]"):
        missing = r"[^\n]*\n *rank 2, after \d+ calls: at .*the missing rank"
        assert re.search(rf"rank 0 has waited \d+ s in {call}{missing}", result.stderr), result.output
    assert "call #4 on communicator group [2, 0]" in result.stderr, result.output


@any_mpi
def test_a_message_that_is_not_sent_is_reported_within_pytest(launch, tmp_path):
    """pytest captures the output of a test until the test has ended, which this one never does."""
    test = tmp_path / "test_one.py"
    body = "    print('captured')\n    mpi.recv(torch.empty(5), 1 - rank)\n"
    together = "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()"  # importing pytest may take longer than a stall
    test.write_text(f"import pytest\n{together}\n{START}\n@pytest.mark.mpi\ndef test_one():\n{body}")
    options = ["-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", "--capture=sys", "-q"]
    result = launch(2, [*options, test], env=STALL)
    assert result.returncode != 0, result.output
    assert "recv(float32 [5]) from rank" in result.stderr, result.output
    assert "exceeds stall_abort_seconds" in result.stderr, result.output


@any_mpi
def test_freeing_a_group_while_another_rank_uses_it_ends_the_job(failing):
    code = """
group = mpi.group([0, 1])
if rank == 1: group.free()
else: mpi.allreduce(torch.ones(3), comm=group)
"""
    result = failing(code, n=2)
    assert "free()" in result.stderr and "communicator group [0, 1]" in result.stderr, result.output


def test_a_rank_that_exits_while_others_wait_on_another_communicator_is_named(failing):
    """Regression: the report did not say how the rank had left, and the job had the status 1."""
    code = """
group = mpi.group([0, 1, 2])
if rank == 1: sys.exit(3)
mpi.allreduce(torch.ones(3), comm=group)
"""
    result = failing(code)
    assert result.returncode == 3, result.output
    assert result.stderr.count("rank 1 left by sys.exit(3) without mpi.stop(), while rank") == 1, result.output


@pytest.mark.parametrize(
    ("asynchronous", "backend", "hosts"),
    (
        (False, "shm", "aaa"),
        pytest.param(False, "auto", "aab", marks=any_mpi),
        (True, "mpi", "aba"),
    ),
    ids=("memory", "one of two hosts", "asynchronous on hosts"),
)
def test_communicators_in_different_orders_end_the_job(job, asynchronous, backend, hosts):
    """Regression: noticed by the limit for stalls only. Rank 2 computes, and takes no part in the circle."""
    several = f"from mpi4py import MPI\nimport os\nos.environ['TORCHMPI_HOST_NAME'] = {hosts!r}[MPI.COMM_WORLD.rank]\n"
    code = f"""
backend = None if {backend!r} == 'auto' else {backend!r}
groups = mpi.group([0, 1]), mpi.group([2, 1, 0])
for group in groups * 3:  # later calls take the fast path
    if group: mpi.allreduce(torch.ones(3), comm=group, backend=backend)
if rank == 2: time.sleep({LIMIT_SECONDS})
first, second = groups if rank == 0 else groups[::-1]
for group in (first, second):
    if {asynchronous}: mpi.allreduce_async(torch.ones(3), comm=group, backend=backend).wait()
    else: mpi.allreduce(torch.ones(3), comm=group, backend=backend)  # the line of the program
"""
    result = job(3, ("" if hosts == "aaa" else several) + START + code)
    assert result.returncode != 0, result.output
    assert re.search(r"rank (0|1) waits for rank (0|1), which waits for rank \1, in calls on", result.stderr), (
        result.output
    )
    assert re.search(r"rank [01].* at .*comm=group", result.stderr) and "not in a call, at" in result.stderr, (
        result.output
    )
    # On a busy machine a call in shared memory may not end in time, and the watchdog then ends the job.
    assert "StallError" not in result.stderr or backend == "shm", result.output


@any_mpi
def test_ranks_that_wait_for_each_other_are_both_located(failing):
    """Regression: a watchdog that waited for the status of the other rank sent no status of its own."""
    env = {"TORCHMPI_STALL_WARNING_SECONDS": "3", "TORCHMPI_STALL_ABORT_SECONDS": "7"}
    code = """
level = mpi.push_communicator(0)
mpi.set_communicator(0)
mpi.allreduce(torch.ones(3), comm=rank and level)
"""
    result = failing(code, n=2, env=env)
    assert "does not reply" not in result.stderr, result.output
    assert result.stderr.count("mpi.allreduce(torch.ones(3), comm=rank and level)") >= 2, result.output


def test_an_error_of_a_single_rank_ends_python_normally(job):
    """Buffered files are written and exit handlers run, as no other rank waits."""
    result = job(1, START + "import atexit\natexit.register(print, 'goodbye')\nraise ValueError('alone')")
    assert result.returncode != 0, result.output
    assert "goodbye" in result.stdout and result.stderr.count("ValueError: alone") == 1, result.output


def test_an_exception_after_stop_ends_the_job(failing):
    result = failing("mpi.stop()\nif rank == 1: raise ValueError('late')", n=2)
    assert result.stderr.count("ValueError: late") == 1, result.output


@any_mpi
def test_an_exception_that_a_notebook_has_shown_does_not_fail_the_job(job):
    """Regression: `sys.last_value`, which notebooks set, made the end of Python abort the job."""
    result = job(2, START + "sys.last_value = ValueError('shown')\nmpi.stop()")
    assert result.returncode == 0, result.output
