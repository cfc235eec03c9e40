"""To whoever has a slow job: it names the rank that makes the others wait, on any host, and what it does there."""

from __future__ import annotations

import re

import pytest

PROGRAM = """
import gc, logging, os, time
import torch
number = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
os.environ["TORCHMPI_HOST_NAME"] = "first" if number < 2 else "second"
import torchmpi as mpi
mpi.start()
rank, verdicts = mpi.rank(), []
logging.getLogger("torchmpi").addFilter(lambda record: verdicts.append(record.getMessage()) or True)

def pause(late):
    time.sleep(0.02 if late else 0.0)

class Batches(torch.utils.data.Dataset):
    late = False
    def __len__(self):
        return 1 << 30
    def __getitem__(self, index):
        pause(self.late)
        return torch.ones(1)

class Net(torch.nn.Module):
    late = False
    def forward(self, x):
        pause(self.late)
        return x

data, net = Batches(), Net()
loader = iter(torch.utils.data.DataLoader(data, batch_size=1))

def train_until(message, late=(), way=""):
    # No step is longer or shorter by the time that the verdict takes: rank 0 tells the others when it is there, and
    # whether it knows a cause: on a busy machine the ranks may have shown too little of one.
    data.late, net.late = (rank in late and way == each for each in ("loading", "forward"))
    ended = 0.0
    while not ended:
        net(next(loader))
        time.sleep(0.003)
        if rank in late and way == "collecting":
            gc.callbacks.append(lambda phase, _: phase == "start" and time.sleep(0.02))  # much garbage
            gc.collect()
            gc.callbacks.pop()
        if rank in late and way == "line":
            time.sleep(0.02)
        found = [each for each in verdicts if message in each]
        ended = mpi.allreduce(2.0 - ("not known" in found[0]) if found else 0.0, op="max")
    verdicts.clear()
    return ended == 2.0

for late, way in ((1, "loading"), (2, "forward"), (1, "collecting"), (2, "line")):
    is_known = False
    while not is_known:
        is_known = train_until(f"rank {late} on host", (late,), way)
        train_until(f"rank {late} on host")
mpi.stop()
"""
LATE = r"torchmpi: rank (\d) on host (\w+) is late: the other ranks wait for it \d+ % of the time, for \d+ s now\. "
CAUSES = ("data loading, ", "the forward pass, ", "garbage collection of Python, ", "a line of the program, ")
LINES = ("time.sleep(0.02 if late else 0.0)", "time.sleep(0.02 if late else 0.0)", "", "time.sleep(0.02)")


@pytest.mark.any_mpi
def test_ranks_are_named_with_what_makes_them_late(job):
    result = job(3, PROGRAM, env={"TORCHMPI_WATCHDOG_PERIOD_SECONDS": "0.03"})
    assert result.returncode == 0, result.output
    lines = [line for line in result.stderr.splitlines() if " late" in line]
    found = [re.match(rf"{LATE}Likely cause: (.*)", line) for line in lines[::2] if "not known" not in line]
    assert [each and each.group(1, 2) for each in found] == [("1", "first"), ("2", "second")] * 2, result.output
    causes = [each[3] for each in found if each]
    assert [cause.startswith(named) for cause, named in zip(causes, CAUSES, strict=True)] == [True] * 4, causes
    assert all(line in cause for cause, line in zip(causes, LINES, strict=True)), causes
    assert all(" is not late any more, after " in line for line in lines[1::2]) and len(lines) % 2 == 0, result.output
