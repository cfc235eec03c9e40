"""Seconds that a killed rank costs the others: the program of ``scripts/recovery_times.py``, for each way to go on.

It kills rank 1 of a training, and prints a line of JSON: the seconds from the kill to the first update of the others
(`first`), to the first one on all ranks again (`full`), and until all updates are repeated (`repeated`); the longest
time between two updates after the first (`pause`), and the median of those before the kill (`update`). With ``--calls``
it prints the median microseconds of allreduce of 4 B and 1 MB instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import torchmpi as mpi
from torchmpi.engine import AllReduceSGDEngine, State

GOES_ON = 10
"""How many updates end the measurement, once all ranks are there that are to come."""
KEEPS_SIZE = any(f"TORCHMPI_{name}" in os.environ for name in ("SPARES", "RESPAWNS", "RESTARTS"))
Update = tuple[int, int, float]
"""The number of ranks, that of the update, and when it had ended."""


def after_loss(updates: list[Update]) -> list[Update]:
    """Return the updates from the first one that is made again; all in a job that was restarted."""
    if "TORCHMPI_RESTARTS" in os.environ:
        return updates
    steps = [step for _, step, _ in updates]
    return next((updates[index:] for index in range(1, len(steps)) if steps[index] <= steps[index - 1]), [])


def train(numel: int, every: int, checkpoint: Path | None) -> None:
    """Train, kill rank 1, and print the seconds."""
    is_first_start = not any(name in os.environ for name in ("TORCHMPI_NEWCOMER", "TORCHMPI_RESTARTS"))
    is_victim = is_first_start and os.environ["RANK"] == "1"
    folder = Path(os.environ["RECOVERY_FOLDER"])
    full_size, last_update, width = int(os.environ["RECOVERY_RANKS"]), 2 * every + every // 2, int(numel**0.5)
    network = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6, momentum=0.9)
    batch = torch.randn(4, width), torch.randn(4, width)
    updates: list[Update] = []
    engine = AllReduceSGDEngine(progress=False)
    if checkpoint is None:
        engine.recover(every)
    else:
        engine.checkpoint(checkpoint, every=every, resume=True)

    @engine.on("on_update")
    def note(state: State) -> None:
        updates.append((mpi.size(), state.t, time.time()))
        if is_victim and state.t == last_update:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        since = [update for update in after_loss(updates) if update[0] == full_size or not KEEPS_SIZE]
        state.stop = mpi.rank() == 0 and len(since) > GOES_ON and state.t > last_update

    engine.train(
        network=network, criterion=nn.MSELoss(), optimizer=optimizer, iterator=lambda: [batch] * 10_000, max_epochs=1
    )
    if mpi.rank() == 0:
        killed, after = float((folder / "killed").read_text()), after_loss(updates)
        before = updates[: len(updates) - len(after)]
        full = [moment for size, _, moment in after if size == full_size]
        result = {
            "first": after[0][2] - killed,
            "full": full[0] - killed if full else None,
            "repeated": next(moment for _, step, moment in after if step > last_update) - killed,
            "pause": max(later[2] - earlier[2] for earlier, later in itertools.pairwise(after)),
            "update": statistics.median(b[2] - a[2] for a, b in itertools.pairwise(before or after)),
        }
        print(json.dumps(result), flush=True)


def time_calls() -> None:
    """Print the median microseconds of calls."""
    result = {}
    for numel, name, times in ((1, "4 B", 20_000), (1 << 18, "1 MB", 1000)):
        tensor, seconds = torch.ones(numel), []
        for _ in range(times):
            begin = time.perf_counter()
            mpi.allreduce(tensor)
            seconds.append(time.perf_counter() - begin)
            tensor.fill_(1.0)
        result[name] = 1e6 * statistics.median(seconds)
    if mpi.rank() == 0:
        print(json.dumps(result), flush=True)


def main() -> None:
    """Measure what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_000_000, help="number of parameters (momentum: as many again)")
    parser.add_argument("--every", type=int, default=10, help="updates between copies")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="where to continue from after a restart")
    parser.add_argument("--calls", action="store_true", help="measure calls instead")
    options = parser.parse_args()
    mpi.start()
    if options.calls:
        time_calls()
    else:
        train(options.numel, options.every, options.checkpoint)
    mpi.stop()


if __name__ == "__main__":
    main()
