"""To who looks for races: ``scripts/perturb.py`` stops threads of its command, and passes on how that ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PERTURB = Path(__file__).resolve().parents[2] / "scripts" / "perturb.py"
PROGRAM = """
import sys, threading, time
from pathlib import Path
ended, limit = threading.Event(), time.monotonic() + 60
thread = threading.Thread(target=ended.wait)
thread.start()
stat, is_stopped = Path(f"/proc/self/task/{thread.native_id}/stat"), False
while not is_stopped and time.monotonic() < limit:
    is_stopped = stat.read_text().rpartition(")")[2].split()[0] == "t"
    time.sleep(0.001)
ended.set()
thread.join()
sys.exit(7 if is_stopped and sys.getswitchinterval() < 0.001 else 1)
"""


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", PROGRAM], 7),
        (["sh", "-c", "kill -KILL $$"], 137),
    ],
    ids=("a thread alone", "killed"),
)
def test_a_command_is_perturbed_and_its_status_returned(command, status):
    program = [sys.executable, PERTURB, "--seed", "5", *command]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("perturb: seed 5\n") and " pauses\n" in done.stderr
