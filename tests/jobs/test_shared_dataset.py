"""To a user of shared_dataset(): workers read the same memory, and kill -9 leaves nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
import torchmpi as mpi
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return 4

    def __getitem__(self, index):
        (line,) = [line.split() for line in open("/proc/self/maps") if "torchmpi-dataset" in line]
        return self.data["x"][index], int(line[4]), os.getpid()

if __name__ == "__main__":
    mpi.start()
    data = mpi.shared_dataset(lambda: {"x": torch.arange(1_000_000.0)})
    _, own, _ = Numbers(data)[0]
    way = "spawn" if mpi.rank() == 0 else "fork"
    loader = DataLoader(Numbers(data), 4, num_workers=1, multiprocessing_context=way, persistent_workers=True)
    for values, inodes, processes in loader:
        right = values.tolist() == [0, 1, 2, 3] and set(inodes.tolist()) == {own} and os.getpid() not in processes
    rights = mpi.allgather_object(right)
    if mpi.rank() == 0:
        Path(sys.argv[0] + ".seen").write_text(f"{rights} {own}")  # launchers drop output when a rank dies
        if (process := os.fork()) == 0:
            os.dup2(os.open(sys.argv[0] + ".crash", os.O_WRONLY | os.O_CREAT), 2)
            data["x"][0] = 1  # the line of the write
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGSEGV
    mpi.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def mapped(inode: int) -> list[str]:
    """The processes of this host that have mapped a file in memory of this number."""
    found = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = path.read_text().splitlines()
        except OSError:  # ended meanwhile
            continue
        found += [path.parent.name for line in lines if "torchmpi-dataset" in line and int(line.split()[4]) == inode]
    return found


@pytest.mark.any_mpi
def test_workers_share_the_memory_and_killed_ranks_leave_nothing(job, tmp_path):
    result = job(2, PROGRAM)
    seen = tmp_path / "job.py.seen"
    assert result.returncode != 0 and seen.exists(), result.output
    rights, _, inode = seen.read_text().rpartition(" ")
    assert rights == "[True, True]", result.output
    number = next(i for i, line in enumerate(PROGRAM.splitlines(), 1) if "the line of the write" in line)
    crash = (tmp_path / "job.py.crash").read_text()
    assert "Segmentation fault" in crash and f'job.py", line {number} in' in crash
    limit = time.monotonic() + 60  # the workers look for their rank every five seconds
    while mapped(int(inode)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert mapped(int(inode)) == []
    assert [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("torchmpi-dataset")] == []
