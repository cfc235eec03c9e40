"""Seconds that a killed rank costs the others: until the first update, and until all updates are repeated.

With a new rank in its place, also the longest time between two updates of the others until it has made some, too.

    torchmpi run -n 3 --without-mpi benchmarks/recovery.py --numel 25000000
    torchmpi run -n 3 --on-lost-rank continue --spares 1 benchmarks/recovery.py --folder $(mktemp -d)
    torchmpi run -n 3 --without-mpi --on-lost-rank continue --respawns 1 benchmarks/recovery.py --folder $(mktemp -d)

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
    parser.add_argument("--folder", type=Path, help="that all ranks share; spare and new ranks make no call before")
    options = parser.parse_args()
    is_new, grows = "TORCHMPI_NEWCOMER" in os.environ, "TORCHMPI_RESPAWNS" in os.environ
    victim = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1" and not is_new
    mpi.start(config=mpi.Config(on_lost_rank="raise"))
    folder = options.folder or Path(mpi.broadcast_object(tempfile.mkdtemp() if mpi.rank() == 0 else None))
    width = int(options.numel**0.5)
    network = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6, momentum=0.9)
    batches = [(torch.randn(4, width), torch.randn(4, width)) for _ in range(90)] * (1000 if grows else 1)
    last_update, full_size = 2 * options.every + options.every // 2, mpi.size()
    began: list[tuple[bool, int, float]] = []
    num_joined = 0
    engine = AllReduceSGDEngine(progress=False)
    engine.recover(options.every)

    @engine.on("on_update")
    def note(state: State) -> None:
        nonlocal num_joined
        is_after = (folder / "killed").exists()
        began.append((is_after, state.t, time.time()))
        num_joined += is_after and state.t > last_update and (mpi.size() == full_size or not grows)
        state.stop = mpi.rank() == 0 and num_joined > (2 * options.every if grows else 0)
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
    after = [(step, moment) for is_after, step, moment in began if is_after]
    after = after[next((index for index, (step, _) in enumerate(after) if step < last_update), len(after)) :]
    own = None
    if after:  # not in a new rank
        caught_up = next(moment for step, moment in after if step > last_update)
        pause = max(later[1] - earlier[1] for earlier, later in itertools.pairwise(after))
        own = after[0][1] - killed, caught_up - killed, pause
    firsts, ends, pauses = zip(*filter(None, mpi.allgather_object(own)), strict=True)
    updates = [later[2] - earlier[2] for earlier, later in itertools.pairwise(began[: 2 * options.every])]
    if mpi.rank() == 0:
        print(f"first update after the kill: {max(firsts):.3f} s")
        print(f"all updates repeated: {max(ends):.2f} s")
        if grows:
            print(f"longest time between updates, until a new rank has made some: {max(pauses):.3f} s")
        print(f"an update, median: {statistics.median(updates):.2f} s")
    mpi.stop()


if __name__ == "__main__":
    main()
