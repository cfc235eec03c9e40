"""To a rank that computes: what the thread does that makes progress between its calls."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, threading
import torch
from torchmpi.session import mpi_progress

torch.set_num_threads(2)
values = torch.ones(1 << 20)
values.add_(1)  # the threads of this thread exist now
before, release, num_joined = len(os.listdir("/proc/self/task")), threading.Event(), []

def run():
    mpi_progress.join_openmp()
    num_joined.append(len(os.listdir("/proc/self/task")))
    release.wait()

thread = threading.Thread(target=run)
thread.start()
while not num_joined and thread.is_alive():
    pass
print(num_joined[0] - before)
release.set()
"""


@pytest.mark.slow
def test_openmp_counts_a_thread_more_than_torch_uses():
    """The thread, and one that OpenMP starts for it: only then are there more OpenMP threads than cores."""
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "2"
