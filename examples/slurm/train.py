"""Train under Slurm: save a checkpoint when the time limit is near, and continue from it when the job starts again.

sbatch examples/slurm/requeue.sh
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
import time
from pathlib import Path

received: list[bool] = []
signal.signal(signal.SIGUSR1, lambda *_: received.append(True))  # the imports take seconds

import torch
from torch import nn
from torch.utils.data import TensorDataset

import torchmpi as mpi
from torchmpi.engine import AllReduceSGDEngine, fit

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the job script starts the job again
NUM_CLASSES = 3


def examples(num: int, seed: int) -> TensorDataset:
    """Points around three centers, which are the classes."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(num) % NUM_CLASSES
    centers = 4 * torch.eye(NUM_CLASSES, 8)
    return TensorDataset(centers[targets] + torch.randn(num, 8, generator=generator), targets)


def main() -> int:
    """Train, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("slurm-run"), help="checkpoints; visible to all nodes")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="additional time of a step, for a trial")
    options = parser.parse_args()

    mpi.start()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "run.ckpt"
    engine = AllReduceSGDEngine(progress=False)
    engine.checkpoint(path, resume=True)

    def stop_if_signalled(state) -> None:
        time.sleep(options.step_seconds)
        state.stop = bool(
            received
        )  # it stops on all ranks after the same step, although they receive it at other times

    def save_if_stopped(state) -> None:
        if state.stop:
            engine.save_checkpoint(path)

    engine.hooks.on_update.append(stop_if_signalled)
    engine.hooks.on_end.append(save_if_stopped)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES))
    result = fit(
        network, examples(960, 1), validate=examples(300, 2), batch_size=32, max_epochs=options.epochs, lr=options.lr,
        engine=engine,
    )  # fmt: skip
    rank, size, stopped = mpi.rank(), mpi.size(), result.state.stop
    mpi.stop()
    if rank == 0 and stopped:
        print(f"stopped after {result.state.t} updates; a checkpoint is in {path}", flush=True)
    elif rank == 0:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in network.parameters())).hexdigest()[:16]
        error = f"{result.history[-1]['validation']['error']:.1f} %" if result.history else "not measured again"
        print(f"{size} ranks, {result.state.t} updates, error {error}, parameters {digest}", flush=True)
    return STOPPED if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
