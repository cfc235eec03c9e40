"""Train while ranks are killed one after the other and spare ones take their places; then compare with a run without.

    torchmpi run -n 4 --on-lost-rank continue --spares 60 benchmarks/soak_kills.py FOLDER 3600 --kill-each 60
    torchmpi run -n 4 --on-lost-rank continue benchmarks/soak_kills.py FOLDER 3600

`scripts/soak.sh` starts both, with an empty folder. The first one is paced, 10 steps in a second, but repeats steps at
once. The other one makes the same steps without pauses. The one that ends last compares: all losses, the weights and
the momentum must have the same bits.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from usage import usage

import torchmpi as mpi
import torchmpi.nn as mpinn

STEPS_PER_SECOND, STEPS_PER_COMMIT = 10, 10


def main() -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="that all ranks share")
    parser.add_argument("seconds", type=int)
    parser.add_argument("--kill-each", type=int, default=0, metavar="SECONDS", help="0: none, and no pauses")
    options = parser.parse_args()
    kills, seconds, *results = (options.folder / name for name in ("kills", "seconds", "with", "without"))
    own, other = results if options.kill_each else reversed(results)
    torch.set_num_threads(1)
    mpi.start(config=mpi.Config(on_lost_rank="raise"))
    torch.manual_seed(mpi.rank())
    network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    num_steps = options.seconds * STEPS_PER_SECOND

    @mpi.elastic(network=network, optimizer=optimizer, losses=torch.zeros(num_steps), step=0, begun=time.time())
    def train(job: Any) -> Any:
        """Return the losses of all steps."""

        def die() -> None:
            with kills.open("a") as file:
                file.write(f"{time.time()} {mpi.rank()} {job.step}\n")
            os.kill(os.getpid(), signal.SIGKILL)

        made = [line.split() for line in kills.read_text().splitlines()] if options.kill_each and kills.exists() else []
        killed, _, in_step = map(float, made[-1]) if made else (0.0, 0.0, num_steps)
        due = job.begun + options.kill_each * (len(made) + 0.5) + random.random()
        timer = threading.Timer(max(0.0, due - time.time()), die)
        if options.kill_each and random.Random(len(made)).randrange(mpi.size()) == mpi.rank():
            timer.start()
        first_step = 0.0
        while job.step < num_steps:
            if options.kill_each:
                time.sleep(max(0.0, job.begun + job.step / STEPS_PER_SECOND - time.time()))
            generator = torch.Generator().manual_seed(job.step)
            rows = torch.randn(16, 32, generator=generator)[mpi.rank() :: mpi.size()]
            optimizer.zero_grad()
            loss = (network(rows)[:, 0] - rows.square().mean(1)).square().mean()
            loss.backward()
            mpinn.synchronize_gradients(network)
            optimizer.step()
            job.losses[job.step] = mpi.allreduce(loss.detach(), op="avg")
            first_step = first_step or time.time() - killed
            if job.step == in_step:
                used = mpi.allgather_object(usage())
                if mpi.rank() == 0:
                    all_repeated = time.time() - killed
                    with seconds.open("a") as file:
                        file.write(f"{first_step} {all_repeated}\n")
                    print(
                        f"kill {len(made)}: rank {made[-1][1]} in step {in_step:.0f}; first step after "
                        f"{first_step:.2f} s, all repeated after {all_repeated:.2f} s; now {mpi.size()} ranks of at "
                        f"most {max(each['resident_bytes'] for each in used) >> 20} MB, "
                        f"{max(each['descriptors'] for each in used)} descriptors",
                        flush=True,
                    )
            job.step += 1
            if job.step % STEPS_PER_COMMIT == 0:
                job.commit()
        timer.cancel()
        return job.losses

    found = {"losses": train(), "weights": network.state_dict(), "momentum": optimizer.state_dict()["state"]}
    mpinn.check_with_allreduce(network)
    size, is_first = mpi.size(), mpi.rank() == 0
    mpi.stop()
    if not is_first:
        return
    torch.save(found, own)
    if options.kill_each:
        columns = zip(*(map(float, line.split()) for line in seconds.read_text().splitlines()), strict=True)
        for name, values in zip(("first step", "all repeated"), columns, strict=True):
            print(f"{name} after the kill: median {statistics.median(values):.2f} s, most {max(values):.2f} s")
        print(f"{len(kills.read_text().splitlines())} kills, {num_steps} steps; {size} ranks at the end")
    if other.exists():
        torch.testing.assert_close(found, torch.load(other), rtol=0, atol=0)
        parts = [f"{part.mean():.4f}" for part in found["losses"].chunk(6)]
        print(f"the same bits with and without kills; mean losses of sixths of the steps: {', '.join(parts)}")


if __name__ == "__main__":
    main()
