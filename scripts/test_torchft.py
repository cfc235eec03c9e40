#!/usr/bin/env python3
"""Run the collectives of torchft's ``MultiPgBaseTest`` over the backend ``torchmpi``, also after the loss of a rank.

    python scripts/test_torchft.py CHECKOUT/torchft/process_group_test.py [--ways "Open MPI;without MPI"]

torchft's class makes ranks of threads, each with a process group of its own, which this backend cannot do: a process is
one rank. So its functions, one for each collective, are called by processes, with the default group; torchft is not
installed, and its Rust part is not needed. As in torchft's test of resiliency, each collective runs; then the last rank
fails, here by SIGKILL instead of `shutdown()`; the call of the others must raise, and after `recover()` and a new
`init_process_group()` it must run on them. The table has a row for each collective, and the status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS, SECONDS = 3, 120
CONTINUE = ["--on-lost-rank", "continue"]
WAYS = {"Open MPI": [*CONTINUE, "--option=--bind-to none"], "without MPI": ["--without-mpi", *CONTINUE]}


class Placeholder(ModuleType):
    """A module of torchft, whose names are imported by the file, but not used by the functions of collectives."""

    def __getattr__(self, name: str) -> Any:
        """Return something that can be called, and decorate."""
        return Placeholder(name)

    def __call__(self, *_: Any) -> Any:
        """Return a decorator."""
        return lambda function: function


def functions(file: Path) -> dict[str, Any]:
    """Return torchft's functions, by the name of the collective."""
    for name in ("parameterized", "torchft", "torchft.manager", "torchft.process_group", "torchft.work"):
        sys.modules[name] = Placeholder(name)
    spec = importlib.util.spec_from_file_location("process_group_test", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = module._COLLECTIVE_TO_FUNC
    return found


class WithBroadcastOne:
    """A process group with the method that torchft adds to those of torch."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        """Return a method of the group."""
        return getattr(self._group, name)

    def broadcast_one(self, tensor: Any, root: int) -> Any:
        """Broadcast one tensor."""
        from torch._C._distributed_c10d import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = root
        return self._group.broadcast([tensor], options)


def run_rank(file: Path, collective: str) -> None:
    """Be a rank of the test of one collective."""
    import torch
    import torch.distributed as dist

    import torchmpi as mpi

    function = functions(file)[collective]

    def call() -> None:
        function(WithBroadcastOne(dist.group.WORLD), dist.get_rank(), torch.tensor([dist.get_rank() + 1]))

    mpi.start()
    dist.init_process_group("torchmpi")
    call()
    dist.barrier()
    print("normal: ok", flush=True)
    if dist.get_rank() == NUM_RANKS - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:  # the message of send/recv needs only ranks that are left
            call()
            dist.barrier()
    except mpi.RankLostError as error:
        print(f"raised: {type(error).__name__}", flush=True)
    except RuntimeError as error:  # torch's C++ hides the type
        print(f"raised: {type(error).__name__}", flush=True)
    mpi.recover()
    dist.init_process_group("torchmpi")
    call()
    print(f"again: ok on {dist.get_world_size()}", flush=True)
    dist.destroy_process_group()
    mpi.stop()


def main() -> int:
    """Run all tests, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--ways", default=";".join(WAYS))
    parser.add_argument("--rank", metavar="COLLECTIVE", help="be a rank; for this script itself")
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.file, options.rank)
        return 0
    print("| collective | ranks | all ranks | after the loss of one | after recover() |\n|---|---|---|---|---|")
    num_failed, environment = 0, os.environ | {"PYTHONPATH": str(ROOT)}
    for way in options.ways.split(";"):
        for collective in functions(options.file):
            command = [sys.executable, "-m", "torchmpi", "run", "-n", str(NUM_RANKS), *WAYS[way]]
            command += ["--timeout", str(SECONDS), __file__, str(options.file), "--rank", collective]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            counts = [len(re.findall(text, done.stdout)) for text in ("normal: ok", "raised: ", "again: ok on 2")]
            is_right = done.returncode == 0 and counts == [NUM_RANKS, NUM_RANKS - 1, NUM_RANKS - 1]
            errors = sorted({*re.findall(r"raised: (\w+)", done.stdout)})
            cells = [f"{counts[0]} of {NUM_RANKS}", f"{counts[1]} of 2: {', '.join(errors)}", f"{counts[2]} of 2"]
            print(f"| {collective} | {way} | {' | '.join(cells)} |", flush=True)
            if not is_right:
                num_failed += 1
                print(done.stdout, done.stderr, file=sys.stderr)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
