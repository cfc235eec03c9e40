"""To whoever stops a job: a signal to the launcher ends it and names a line, and handlers of a program remain."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from helpers.launching import is_open_mpi, job_environment, search_path

LIMIT_SECONDS = 400
PROGRAM = """
import os, sys, threading, time
import torch
import torchmpi as mpi

def print_when_at_last_line():
    last_line = len(open(__file__).readlines())
    while True:
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame.f_back is not None:
            frame = frame.f_back
        if frame.f_lineno == last_line:
            break
        time.sleep(0.01)
    print("at the last line", flush=True)

mpi.start()
mpi.barrier()
threading.Thread(target=print_when_at_last_line, daemon=True).start()
{line}
"""
HANDLED = "import os, signal, time\nimport torchmpi as mpi\nmpi.start()\n"
LINES = {
    "sleeping": "time.sleep(1000) if mpi.rank() == 0 else mpi.allreduce(torch.ones(3))",
    "inside MPI": "mpi.recv(torch.ones(3), 1 - mpi.rank())",
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("starter", "line"), (("mpirun", LINES["sleeping"]), ("torchmpi run", LINES["inside MPI"])), ids=LINES
)
def test_ctrl_c_is_one_line(mpirun, tmp_path, starter, line):
    """Regression: Open MPI's mpirun discards what ranks print after Ctrl-C, so that there was no line of ours."""
    script = tmp_path / "job.py"
    script.write_text(PROGRAM.format(line=line))
    starting = mpirun if starter == "mpirun" else [sys.executable, "-m", "torchmpi", "run"]
    command = [*starting, "-n", "2", sys.executable, str(script)]
    output, status = in_terminal(command, press="\x03", after="at the last line", num_times=2)
    assert status != 0 and status != -signal.SIGKILL, output
    ours = [text for text in output.splitlines() if "torchmpi: " in text and " compil" not in text]
    where = rf"It was at {re.escape(str(script))}:\d+ in <module>: {re.escape(line)}"
    assert len(ours) == 2, output
    first, last = ours
    how = r"received SIGTERM|was interrupted \(KeyboardInterrupt\)"
    assert re.search(rf"torchmpi: rank \d ({how}), which ends the job\. {where}$", first), ours
    assert last.startswith("torchmpi: The lines below are from "), ours
    assert "Traceback" not in output, output


def in_terminal(command: list[str], *, press: str, after: str, num_times: int) -> tuple[str, int]:
    """Run a command in a terminal of its own and press keys after some output; return its output and status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, job_environment({"COLUMNS": "500"}))
    output, begin, pressed = b"", time.monotonic(), False
    try:
        while time.monotonic() < begin + LIMIT_SECONDS:
            if not pressed and output.count(after.encode()) == num_times:
                os.write(terminal, press.encode())
                pressed = True
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    output += os.read(terminal, 1 << 16)
                except OSError:  # all processes have closed the terminal
                    break
        else:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(terminal)  # SIGHUP ends the processes that are left
        _, status = os.waitpid(pid, 0)
    return output.decode(), os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("number, options", (
    (signal.SIGTERM, ()),
    (signal.SIGKILL, ()),
    (signal.SIGKILL, ("--verbose",)),
    (signal.SIGKILL, ("--timeout", "200")),
    pytest.param(signal.SIGKILL, ("--without-mpi",), marks=pytest.mark.any_mpi),
), ids=("terminated", "killed", "torchmpi run killed", "supervisor killed", "without MPI"))  # fmt: skip
def test_the_end_of_the_launcher_ends_everything(tmp_path, mpirun, number, options):
    """SIGTERM, as a scheduler sends it to mpirun: neither a rank that sleeps nor one that waits in a call survives.

    Regression: after SIGKILL the ranks went on for ever, except those of MPICH; all of them with a time limit.
    """
    if number == signal.SIGKILL and options in ((), ("--verbose",)) and not is_open_mpi(mpirun[0]):
        pytest.skip("MPICH ends its ranks itself")
    script = tmp_path / "job.py"
    line = f"""
rank = mpi.rank()
open({str(tmp_path)!r} + f'/pid{{rank}}', 'w').write(str(os.getpid()))
mpi.barrier()
if rank: time.sleep(100)
mpi.allreduce(torch.ones(3))
"""
    script.write_text(PROGRAM.format(line=line))
    command = [sys.executable, "-m", "torchmpi", "run", *options] if options else mpirun
    # Without `timeout`, which passes the signal on twice: then Open MPI discards what the ranks print.
    process = subprocess.Popen(
        [*command, "-n", "2", sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=job_environment({}),
    )
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    limit = time.monotonic() + LIMIT_SECONDS
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < limit:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(number)
    try:
        _, stderr = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode != 0
    is_terminated = number == signal.SIGTERM or "--timeout" in options  # mpirun gets SIGTERM when its parent is killed
    assert ("received SIGTERM, which ends the job. It was at " in stderr) == is_terminated, stderr
    assert wait_for_states([int(file.read_text()) for file in files], "", "Z"), stderr


SESSION = """
import os, time
own = [name for name, number in (("session", os.getsid(0)), ("group", os.getpgid(0))) if number == os.getpid()]
print("leads", *own, os.getpid(), flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks that share cores share a session")
def test_each_rank_has_a_session_and_job_control(tmp_path, mpirun):
    """Regression: the ranks of Open MPI got the share of one program of the cores. Ctrl-Z stops them as before."""
    (tmp_path / "job.py").write_text(SESSION)
    command = [sys.executable, "-m", "torchmpi", "run", "-n", "2", str(tmp_path / "job.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=job_environment(search_path()))
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().split() for _ in range(2)]
        assert [words[:3] for words in lines] == [["leads", "session", "group"]] * 2
        if is_open_mpi(mpirun[0]):  # MPICH's stops itself only
            ranks = [int(words[3]) for words in lines]
            for number, state in ((signal.SIGTSTP, "T"), (signal.SIGCONT, "S")):
                process.send_signal(number)
                assert wait_for_states(ranks, state)
        process.terminate()
        process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert wait_for_states([int(words[3]) for words in lines], "", "Z")


COUNTING = """
import signal, sys, time
received = []
signal.signal(int(sys.argv[1]), lambda *_: received.append(1))
print("ready", flush=True)
while not received: time.sleep(0.01)
time.sleep(1)
print(len(received), "received", flush=True)
"""


@pytest.mark.any_mpi
@pytest.mark.parametrize("number, send", (
    (signal.SIGINT, os.kill), (signal.SIGINT, os.killpg), (signal.SIGTERM, os.killpg)
), ids=("SIGINT", "SIGINT to the group", "SIGTERM to the group"))  # fmt: skip
def test_ranks_get_a_signal_once(tmp_path, number, send):
    """Regression: not at all if only `torchmpi run` got SIGINT, and twice if the group got SIGTERM."""
    (tmp_path / "job.py").write_text(COUNTING)
    output, _ = signaled(["-n", "2", "--without-mpi", str(tmp_path / "job.py"), str(int(number))], number, send, 2)
    assert output.splitlines() == ["1 received"] * 2


def test_a_supervised_mpirun_gets_sigint(tmp_path):
    """Regression: the job went on if only `torchmpi run` got it."""
    program = ["sh", "-c", f"echo $$ > {tmp_path}/pid$RANK; echo ready; exec sleep 300"]
    _, status = signaled(["-n", "2", "--restarts", "1", "--timeout", "200", *program], signal.SIGINT, os.kill, 2)
    assert status not in (0, 124)
    assert wait_for_states([int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)], "", "Z")


def signaled(
    options: list[str], number: signal.Signals, send: Callable[[int, int], None], num_ready: int
) -> tuple[str, int]:
    """Start `torchmpi run` in a group of its own, and send a signal; return what it then prints and its status."""
    command = [sys.executable, "-m", "torchmpi", "run", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=job_environment(search_path()), start_new_session=True
    )
    assert process.stdout is not None
    try:
        for _ in range(num_ready):
            assert process.stdout.readline() == "ready\n"
        send(process.pid, number)
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
        process.wait()
    return output, process.returncode


def wait_for_states(pids: list[int], *states: str) -> bool:
    """Wait until all processes are in one of these states ("": it is gone); return whether they have been."""
    limit = time.monotonic() + LIMIT_SECONDS
    while not (are_there := all(_state(pid) in states for pid in pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    return are_there


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


STOPPING = """
import os, signal, sys, time
from pathlib import Path
import torchmpi as mpi
from torchmpi.launch import mpi_library
mpi.start()
mpi.barrier()
if mpi.rank() == 0:
    Path(sys.argv[1]).write_text(f"{os.getpid()} {os.getppid()}")
    os.kill(os.getppid(), signal.SIGSTOP)
    mpi_library.abort(3)
time.sleep(1000)
"""


def test_an_abort_ends_although_the_launcher_is_stopped(tmp_path, mpirun):
    """Regression: MPI_Abort of Open MPI waits for the launcher, and the rank waited with it when start() had failed."""
    (tmp_path / "job.py").write_text(STOPPING)
    note = tmp_path / "processes"
    job = subprocess.Popen(
        [*mpirun, "-n", "2", sys.executable, str(tmp_path / "job.py"), str(note)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=job_environment({}),
    )
    try:
        limit = time.monotonic() + LIMIT_SECONDS
        while not (note.exists() and len(note.read_text().split()) == 2) and time.monotonic() < limit:
            time.sleep(0.05)
        rank, parent = map(int, note.read_text().split())
        try:
            assert wait_for_states([rank], "", "Z")
        finally:
            os.kill(parent, signal.SIGCONT)
        assert job.wait(LIMIT_SECONDS) != 0
    finally:
        job.kill()
        job.wait()


@pytest.mark.any_mpi
def test_a_handler_installed_before_start_remains(job):
    """Regression: Open MPI replaced that of SIGHUP."""
    setup = "import signal\nsignal.signal(signal.SIGHUP, lambda *_: print('saved', flush=True))\n"
    result = job(2, setup + HANDLED + "os.kill(os.getpid(), signal.SIGHUP)\nmpi.stop()", timeout=LIMIT_SECONDS)
    assert result.returncode == 0 and result.stdout.count("saved") == 2, result.output


@pytest.mark.any_mpi
def test_a_handler_of_sigterm_installed_after_start_decides(job):
    """Regression: the handler ran, and a second later the job was ended nevertheless."""
    code = """
signal.signal(signal.SIGTERM, lambda *_: print("saved", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(2)
mpi.stop()
"""
    result = job(2, HANDLED + code, timeout=LIMIT_SECONDS)
    assert result.returncode == 0 and result.stdout.count("saved") == 2, result.output
