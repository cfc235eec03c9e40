"""Seconds that a killed rank costs the others: until the first update, and until all updates are repeated.

    torchmpi run -n 3 --without-mpi benchmarks/recovery.py --numel 25000000
    torchmpi run -n 3 --on-lost-rank continue --spares 1 benchmarks/recovery.py --folder $(mktemp -d)

Each run kills one rank; recovery_seconds.py makes several. With a spare rank the first update is that of all ranks.
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_000_000, help="number of parameters (momentum: as many again)")
    parser.add_argument("--every", type=int, default=10, help="updates between copies")
    parser.add_argument("--folder", type=Path, help="that all ranks share; with spare ranks, which make no call before")
    options = parser.parse_args()
    victim = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1"
    mpi.start(config=mpi.Config(on_lost_rank="raise"))
    folder = options.folder or Path(mpi.broadcast_object(tempfile.mkdtemp() if mpi.rank() == 0 else None))
    width = int(options.numel**0.5)
    network = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6, momentum=0.9)
    batches = [(torch.randn(4, width), torch.randn(4, width)) for _ in range(90)]
    last_update = 2 * options.every + options.every // 2
    began: list[tuple[bool, int, float]] = []
    engine = AllReduceSGDEngine(progress=False)
    engine.recover(options.every)

    @engine.on("on_update")
    def note(state: State) -> None:
        is_after = (folder / "killed").exists()
        began.append((is_after, state.t, time.time()))
        state.stop = state.t > last_update
        if victim and state.t == last_update:
            (folder / "new").write_text(str(time.time()))
            (folder / "new").rename(folder / "killed")
            os.kill(os.getpid(), signal.SIGKILL)

    engine.train(
        network=network,
        criterion=nn.MSELoss(),
        optimizer=optimizer,
        iterator=lambda: batches[mpi.rank() :: mpi.size()],
        max_epochs=2,
    )
    killed = float((folder / "killed").read_text())
    after = [(step, moment) for is_after, step, moment in began if is_after and step < last_update]
    first, caught_up = after[0][1] - killed, began[-1][2] - killed
    seconds = mpi.allgather_object((first, caught_up))
    updates = [later[2] - earlier[2] for earlier, later in itertools.pairwise(began[: 2 * options.every])]
    if mpi.rank() == 0:
        print(f"first update after the kill: {max(first for first, _ in seconds):.3f} s")
        print(f"all updates repeated: {max(second for _, second in seconds):.2f} s")
        print(f"an update, median: {statistics.median(updates):.2f} s")
    mpi.stop()


if __name__ == "__main__":
    main()
