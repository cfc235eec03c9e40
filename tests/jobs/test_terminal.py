"""Ctrl-C in a terminal: the job ends, and one line of torchmpi tells where a rank was."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time

import pytest
from conftest import job_environment

LIMIT_SECONDS = 60
PROGRAM = """
import time
import torch
import torchmpi as mpi
mpi.start()
mpi.barrier()
if mpi.rank() == 0:
    print("running", flush=True)
{line}
"""
LINES = {
    "sleeping": "time.sleep(1000) if mpi.rank() == 0 else mpi.allreduce(torch.ones(3))",
    "inside MPI": "mpi.recv(torch.ones(3), 1 - mpi.rank())",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
@pytest.mark.parametrize("starter", ("mpirun", "torchmpi run"))
def test_ctrl_c_is_one_line(mpirun, tmp_path, starter, line):
    """Regression: Open MPI's mpirun discards what ranks print after Ctrl-C, so that there was no line of ours."""
    script = tmp_path / "job.py"
    script.write_text(PROGRAM.format(line=line))
    command = [*mpirun, "-n", "2", sys.executable, str(script)]
    if starter == "torchmpi run":
        command = [sys.executable, "-m", "torchmpi", "run", "-n", "2", str(script)]
    output, status = in_terminal(command, press="\x03", after="running")
    assert status != 0 and status != -signal.SIGKILL, output
    ours = [text for text in output.splitlines() if "torchmpi: " in text and " compil" not in text]
    where = rf"It was at {re.escape(str(script))}:\d+ in <module>: {re.escape(line)}"
    first, last = ours
    how = r"received SIGTERM|was interrupted \(KeyboardInterrupt\)"
    assert re.search(rf"torchmpi: rank \d ({how}), which ends the job\. {where}$", first), ours
    assert last.startswith("torchmpi: The lines below are from "), ours
    assert "Traceback" not in output, output


def in_terminal(command: list[str], *, press: str, after: str) -> tuple[str, int]:
    """Run a command in a terminal of its own and press keys; return its output and status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, job_environment({"COLUMNS": "500"}))
    output, begin, pressed = b"", time.monotonic(), False
    try:
        while time.monotonic() < begin + LIMIT_SECONDS:
            if not pressed and after.encode() in output:
                time.sleep(0.5)  # until all ranks wait
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
