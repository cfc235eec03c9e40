"""Training that continues without some ranks: ``recovery_program.py FOLDER MOMENT ASYNCHRONOUS LOST FAULT``.

The ranks LOST, as in ``1,2``, are lost in update 8, in the given MOMENT of it. FAULT is how: `kill`, by themselves;
`wait`, until the file "on" is in FOLDER, by a test that meanwhile does something to their host; or `reference`: there
are no lost ranks, and the run begins with the checkpoint of update 6 that another run has left in FOLDER.
"""

import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

import torchmpi as mpi
from torchmpi.engine import AllReduceSGDEngine, TensorBoard

EVERY, LAST_UPDATE = 6, 8  # with 36 batches, 4, 3 and 2 ranks can share what is left after 6 updates
folder, moment, asynchronous, fault = Path(sys.argv[1]), sys.argv[2], bool(int(sys.argv[3])), sys.argv[5]
lost = [int(text) for text in sys.argv[4].split(",")]
mpi.start(config=mpi.Config(on_lost_rank="raise", verbose=False))
first_rank, first_size = mpi.rank(), mpi.size()
torch.manual_seed(7)
inputs = torch.randn(36, 6, 8)
batches = [(each, each[:, :3].argmax(1)) for each in inputs]
network = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
engine = AllReduceSGDEngine(asynchronous=asynchronous, progress=False)
losses, calls = [], []
scalars, begin = defaultdict(list), time.monotonic()


class Writer:
    def add_scalar(self, name, value, step):
        scalars[name].append(value)


engine.add(TensorBoard(Writer()))


@engine.on("on_forward_criterion")
def note(state):
    losses.append((state.t, state.loss.item()))


def fail(state, point):
    if fault == "reference" or (point, state.t, mpi.size()) != (moment, LAST_UPDATE, first_size):
        return
    if first_rank in lost and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "wait":
        (folder / f"here.{first_rank}").touch()
        while first_rank in lost and not (folder / "on").exists():
            time.sleep(0.05)


engine.on("on_sample")(lambda state: fail(state, "forward"))
register = network[0].weight.register_hook
engine.on("on_backward_criterion")(lambda state: register(lambda gradient: fail(state, "backward")))
engine.on("on_backward")(lambda state: fail(state, "synchronized"))
engine.on("on_update")(lambda state: fail(state, "updated"))
if fault != "reference":
    engine.recover(every=EVERY)
    engine.on("on_update")(
        lambda state: (
            engine.save_checkpoint(folder / "checkpoint") if (state.t, mpi.size()) == (EVERY, first_size) else None
        )
    )


def divided():
    calls.append(mpi.size())
    return batches[mpi.rank() :: mpi.size()]


state = engine.train(
    network=network,
    criterion=nn.CrossEntropyLoss(),
    iterator=divided,
    optimizer=optimizer,
    max_epochs=3,
    resume=folder / "checkpoint" if fault == "reference" else None,
)
total = sum(parameter.detach().double().sum() for parameter in network.parameters()).item()
moments = sum(each["momentum_buffer"].double().sum() for each in optimizer.state_dict()["state"].values()).item()
after = [loss for t, loss in losses if t >= EVERY][-15:]
totals = mpi.allgather_object(total)
assert len(set(totals)) == 1, totals
if fault != "reference":
    assert calls == [first_size, first_size - len(lost)], calls
    first, last = (sum(loss for _, loss in part) / len(part) for part in (losses[:5], losses[-15:]))
    assert last < 0.8 * first, losses
assert bool(scalars) == (mpi.rank() == 0), scalars
assert all(value >= 0 for name in scalars.keys() - {"loss"} for value in scalars[name]), scalars
assert sum(scalars["seconds/update"]) <= time.monotonic() - begin, scalars
print(f"result {mpi.rank()}: {state.t} {total.hex()} {moments.hex()} {after}", flush=True)
mpi.stop()
