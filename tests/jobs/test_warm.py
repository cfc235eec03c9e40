"""To who adds a test of a job: ranks forked from a process with torchmpi are equal to ranks started by Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.launching import job_environment

pytestmark = pytest.mark.any_mpi

SHOW = """
import os, sys, threading
import torch
if __name__ == "__main__":
    print(sys.argv, sys.path[0], __name__, globals().get("__file__"), sys.modules["__main__"].__dict__ is globals())
    print(sorted(os.environ.items()), os.getcwd(), oct(os.umask(0)), os.sched_getaffinity(0))
    files = [f"/proc/self/fd/{number}" for number in range(999)]
    print([(file, os.readlink(file)) for file in files if os.path.lexists(file)])
    print(threading.active_count(), sys.stdin.read())
    print("to the other", file=sys.stderr)
"""


def run(python: list[str], arguments: list[object], folder: Path, **options: object) -> subprocess.CompletedProcess:
    (folder / "input").write_text("read from the input")
    with open(folder / "input") as stdin:
        return subprocess.run(
            [*python, *map(str, arguments)],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=400,
            cwd=folder,
            env=job_environment({"A": "ä"}),
            **options,
        )


@pytest.mark.parametrize("how", ("-c", "-m"))
def test_arguments_environment_and_files_are_equal(warm_python, tmp_path, how):
    (tmp_path / "shown.py").write_text(SHOW)
    arguments = {"-c": ["-c", SHOW], "-m": ["-m", "shown"]}[how] + ["a", "-b"]
    with open(tmp_path / "more", "w") as more:
        options = {"pass_fds": [more.fileno()], "preexec_fn": lambda: os.sched_setaffinity(0, {0})}
        cold, warm = (run(python, arguments, tmp_path, **options) for python in ([sys.executable], warm_python))
    assert cold.returncode == 0 and str(tmp_path / "more") in cold.stdout, cold.stderr
    without_numbers = [[word for word in each.stdout.split() if "pipe:[" not in word] for each in (cold, warm)]
    assert without_numbers[0] == without_numbers[1]
    assert (warm.returncode, warm.stderr) == (0, cold.stderr)


def test_ranks_of_torchmpi_run_are_recognized(warm_python, tmp_path):
    """By the process in TORCHMPI_RUN_PID. Otherwise init_process_group would not find the others through MPI."""
    code = "from torchmpi.launch import launcher; print(launcher.is_started_by_run())"
    shell = 'TORCHMPI_RUN_PID=$$ exec "$@"'
    for python in ([sys.executable], warm_python):
        assert run(["sh", "-c", shell, "sh", *python], ["-c", code], tmp_path).stdout == "True\n"


def test_random_numbers_differ_between_ranks(warm_python, tmp_path):
    code = "import random, numpy, torch; print(random.random(), numpy.random.random(), torch.rand(1).item())"
    drawn = [run(warm_python, ["-c", code], tmp_path).stdout.split() for _ in range(2)]
    assert all(len(numbers) == 3 for numbers in drawn) and not set(drawn[0]) & set(drawn[1])


@pytest.mark.parametrize(
    "code",
    (
        "raise SystemExit(3)",
        "raise SystemExit('said at the end')",
        "def broken():\n    1 / 0\nbroken()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit, threading; atexit.register(print, 'b'); threading.Timer(0.2, print, 'a').start()",
        "import os; os._exit(7)",
        "import ctypes, sys; ctypes.CDLL(None).printf(b'in a buffer of C'); sys.exit(5)",
        "import atexit; atexit.register(print, 'b'); raise KeyboardInterrupt",
        "class A:\n    def __del__(self): print('deleted')\na = A()\nfile = open('written', 'w')\nfile.write('a')",
        "a syntax error",
    ),
)
def test_output_and_status_are_equal(warm_python, tmp_path, code):
    (tmp_path / "ends.py").write_text(code)
    cold, warm = (run(python, ["ends.py"], tmp_path) for python in ([sys.executable], warm_python))
    assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGKILL), ids=lambda number: number.name)
def test_a_signal_ends_the_rank(warm_python, tmp_path, number):
    """SIGKILL also ends the child processes of the rank, which cannot end them itself."""
    code = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "100"])
with open("started", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("started", "running")
try:
    time.sleep(100)
finally:
    child.kill()
"""
    process = subprocess.Popen([*warm_python, "-c", code], cwd=tmp_path, env=job_environment({}))
    limit = time.monotonic() + 30
    while not (tmp_path / "running").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    rank, child = map(int, (tmp_path / "running").read_text().split())
    process.send_signal(number)
    assert process.wait(10) == -number
    while any(is_alive(each) for each in (rank, *([child] if number == signal.SIGKILL else []))):
        assert time.monotonic() < limit
        time.sleep(0.02)
    if number == signal.SIGTERM:  # the default handler ends the rank without `finally`: the child remains
        os.kill(child, signal.SIGKILL)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
