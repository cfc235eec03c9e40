"""The seconds of docs/design/recovery.md: after a kill, with and without a spare or a new rank; latency without a loss.

    HOSTS_STATE=... python benchmarks/recovery_seconds.py --rounds 10 --hosts

The cells of a round follow each other, so that other load meets all of them; ranks have imported torch before.
Two hosts are those of scripts/hosts.sh, which must be up. The Python decides which MPI it is; it must be Open MPI.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests")]
from helpers import warm  # type: ignore[import-not-found]  # noqa: E402
from losses import CONTINUE, STATE, WITHOUT_MPI, Cell, address, launching, start_servers  # type: ignore  # noqa: E402

SMALL, LARGE = 10_000, 25_000_000
LATENCY = """
import sys, time, statistics, torch, torchmpi as mpi
mpi.start(config=mpi.Config(on_lost_rank=sys.argv[1], verbose=False))
for numel, number in ((1, 2000), (1 << 18, 100)):
    tensor, seconds = torch.ones(numel), []
    for _ in range(15):
        mpi.barrier()
        begin = time.perf_counter()
        for _ in range(number):
            mpi.allreduce(tensor, out=tensor.zero_())
        seconds.append((time.perf_counter() - begin) / number)
    if mpi.rank() == 0:
        print(f"{4 * numel} B: {statistics.median(seconds) * 1e6:.3f} us")
mpi.stop()
"""


def run(way: list[str], num_ranks: int, num_spares: int, program: list[str], *, on_hosts: bool = False) -> str:
    """Return the output of a job; `{}` in its program becomes a folder that all ranks share."""
    with tempfile.TemporaryDirectory(prefix="recovery-", dir=STATE if on_hosts else None) as folder:
        command, environment = launching(way, num_ranks, num_spares, folder if on_hosts else "")
        python = " ".join(warm.command(address("$(uname -n)", on_hosts)))
        command += ["sh", "-c", f'exec {python} "$@"', "sh", *(folder if word == "{}" else word for word in program)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode:
        print(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}", file=sys.stderr)
    return "" if done.returncode else done.stdout


def kill(way: list[str], numel: int, num_spares: int = 0, *, on_hosts: bool = False, pause: bool = False) -> float:
    """Return the seconds from a kill to the first update, or the longest `pause` after it; nan if the job failed."""
    program = [str(ROOT / "benchmarks" / "recovery.py"), "--numel", str(numel), "--every", "4", "--folder", "{}"]
    output = run(way, 3, num_spares, program, on_hosts=on_hosts)
    name = "longest time between updates.*" if pause else "first update after the kill"
    return float((re.findall(rf"{name}: ([\d.]+)", output) or ["nan"])[0])


def latencies(way: list[str], setting: str, *, on_hosts: bool) -> list[float]:
    """Return the microseconds of an allreduce of 4 bytes and of one of 1 MB, of two ranks."""
    output = run(way, 2, 0, ["-c", LATENCY, setting], on_hosts=on_hosts)
    return [float(text) for text in re.findall(r"B: ([\d.]+) us", output)]


def main() -> None:
    """Make the rounds, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no round after this time")
    parser.add_argument("--hosts", action="store_true", help="also on the two hosts of scripts/hosts.sh")
    options = parser.parse_args()
    places = {"one host": False} | ({"two hosts": True} if options.hosts else {})
    seconds, pauses, ratios = (defaultdict[str, list[float]](list) for _ in range(3))
    end = time.monotonic() + options.seconds
    with ExitStack() as resources:
        start_servers(resources, (Cell("openmpi", "12"[on_hosts], "", "", "") for on_hosts in places.values()))
        for number in range(options.rounds):
            if time.monotonic() > end:
                break
            for place, on_hosts in places.items():
                for numel in (SMALL, LARGE):
                    cell = f"Open MPI, {place}, {numel:,} parameters"
                    seconds[cell].append(kill(CONTINUE, numel, on_hosts=on_hosts))
                seconds[f"Open MPI, {place}, spare rank, {SMALL:,} parameters"].append(
                    kill(CONTINUE, SMALL, 1, on_hosts=on_hosts)
                )
                ways = [([], "end"), (CONTINUE, "raise")][:: 1 if number % 2 else -1]
                found = {setting: latencies(way, setting, on_hosts=on_hosts) for way, setting in ways}
                for size, on, off in zip(("4 B", "1 MB"), found["raise"], found["end"], strict=False):
                    ratios[f"Open MPI, {place}, allreduce of {size}"].append(on / off)
            for numel in (SMALL, LARGE):
                seconds[f"without MPI, one host, {numel:,} parameters"].append(kill(WITHOUT_MPI, numel))
            pauses[f"without MPI, one host, {SMALL:,} parameters"].append(
                kill([*WITHOUT_MPI, "--respawns", "1"], SMALL, pause=True)
            )
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    for title, digits, cells in (
        ("seconds from the kill to the first update", 2, seconds),
        ("seconds between two updates, the most until a new rank has joined", 3, pauses),
        ("time with recovery over that without", 3, ratios),
    ):
        print(f"| | {title}: median | least | most | jobs | failed |\n|---|---|---|---|---|---|")
        for cell, every in cells.items():
            values = [value for value in every if value == value] or [math.nan]
            numbers = [f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
            print(f"| {cell} | {' | '.join(numbers)} | {len(every)} | {sum(value != value for value in every)} |")
        print()


if __name__ == "__main__":
    main()
