"""Seconds that a killed rank costs the others: until the first update, and until all updates are repeated.

    torchmpi run -n 3 --without-mpi benchmarks/recovery.py --numel 25000000

Each run kills one rank, so the command is repeated for several measurements.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import torchmpi as mpi
from torchmpi.engine import AllReduceSGDEngine, State


def main() -> None:
    """Train, kill rank 1, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=25_000_000, help="number of parameters (momentum: as many again)")
    parser.add_argument("--every", type=int, default=10, help="updates between copies")
    options = parser.parse_args()
    mpi.start(config=mpi.Config(on_lost_rank="raise"))
    folder = Path(mpi.broadcast_object(tempfile.mkdtemp() if mpi.rank() == 0 else None))
    width = int(options.numel**0.5)
    network = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6, momentum=0.9)
    batches = [(torch.randn(4, width), torch.randn(4, width)) for _ in range(90)]
    victim, first_size = mpi.rank() == 1, mpi.size()
    last_update = 2 * options.every + options.every // 2
    began: list[tuple[int, int, float]] = []
    engine = AllReduceSGDEngine(progress=False)
    engine.recover(options.every)

    @engine.on("on_update")
    def note(state: State) -> None:
        began.append((mpi.size(), state.t, time.time()))
        state.stop = mpi.size() < first_size and state.t > last_update
        if victim and state.t == last_update:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    engine.train(
        network=network,
        criterion=nn.MSELoss(),
        optimizer=optimizer,
        iterator=lambda: batches[mpi.rank() :: mpi.size()],
        max_epochs=2,
    )
    killed = float((folder / "killed").read_text())
    after = [entry for entry in began if entry[0] < first_size]
    last = max(step for size, step, _ in began if size == first_size)
    caught_up = next(moment for _, step, moment in after if step > last)
    seconds = mpi.allgather_object((after[0][2] - killed, caught_up - killed))
    updates = [later[2] - earlier[2] for earlier, later in itertools.pairwise(began[: 2 * options.every])]
    if mpi.rank() == 0:
        print(f"first update after the kill: {max(first for first, _ in seconds):.2f} s")
        print(f"all updates repeated: {max(second for _, second in seconds):.2f} s")
        print(f"an update, median: {statistics.median(updates):.2f} s")
    mpi.stop()


if __name__ == "__main__":
    main()
