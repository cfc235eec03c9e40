#!/usr/bin/env python3
"""Measure how long each way to go on after the loss of a rank takes, and what the ability costs calls.

    python scripts/recovery_times.py [--runs 5] [--numel 1000,25000000] [--ways 'continue;spare'] [--calls]

Each run is a job of three ranks, of which one is killed (``benchmarks/recovery.py``). Ways alternate, so that other
work on the machine meets all of them. It prints a
table of medians, with the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "benchmarks" / "recovery.py"
NUM_RANKS = 3
CONTINUE = ["--on-lost-rank", "continue"]
OF_OPEN_MPI = ["--option=--bind-to none"]
WAYS = {
    "restart": [*OF_OPEN_MPI, "--restarts", "1"],
    "continue": [*CONTINUE, *OF_OPEN_MPI],
    "spare": [*CONTINUE, *OF_OPEN_MPI, "--spares", "1"],
    "respawn": [*CONTINUE, *OF_OPEN_MPI, "--respawns", "1"],
    "continue, without MPI": ["--without-mpi", *CONTINUE],
    "respawn, without MPI": ["--without-mpi", *CONTINUE, "--respawns", "1"],
}
CALLS = {"without": OF_OPEN_MPI, "with": [*CONTINUE, *OF_OPEN_MPI]}
MEASURED = ("first", "full", "repeated", "pause", "update")


def run(num_ranks: int, options: list[str], arguments: list[str], variables: dict[str, str]) -> dict[str, float]:
    """Run one job, and return what rank 0 has printed."""
    command = [sys.executable, "-m", "torchmpi", "run", "-n", str(num_ranks), *options, "--timeout", "240"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run([*command, str(PROGRAM), *arguments], capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    result: dict[str, float] = json.loads(lines[0])
    return result


def time_losses(numels: list[int], ways: list[str], num_runs: int) -> None:
    """Print the seconds of each way and number of parameters."""
    found = defaultdict(list)
    for _ in range(num_runs):
        for numel in numels:
            for way in ways:
                with tempfile.TemporaryDirectory() as folder:
                    arguments = ["--numel", str(numel)]
                    arguments += ["--checkpoint", f"{folder}/checkpoint"] if way == "restart" else []
                    variables = {"RECOVERY_FOLDER": folder, "RECOVERY_RANKS": str(NUM_RANKS)}
                    found[way, numel].append(run(NUM_RANKS, WAYS[way], arguments, variables))
    print("| way | parameters | " + " | ".join(MEASURED) + " | runs |")
    print("|---" * (len(MEASURED) + 3) + "|")
    for (way, numel), results in sorted(found.items(), key=lambda item: (item[0][1], ways.index(item[0][0]))):
        values = [[result[name] for result in results if result[name] is not None] for name in MEASURED]
        cells = [f"{statistics.median(each):.3f}" if each else "" for each in values]
        print(f"| {way} | {numel:,} | {' | '.join(cells)} | {len(results)} |")


def time_calls(num_runs: int) -> None:
    """Print the microseconds of calls with and without the ability to continue, and the medians of the ratios."""
    found = [{way: run(2, options, ["--calls"], {}) for way, options in CALLS.items()} for _ in range(num_runs)]
    print("| allreduce | without, us | with, us | ratio |")
    print("|---|---|---|---|")
    for name in found[0]["with"]:
        without, having = ([pair[way][name] for pair in found] for way in CALLS)
        ratio = statistics.median(b / a for a, b in zip(without, having, strict=True))
        print(f"| {name} | {statistics.median(without):.2f} | {statistics.median(having):.2f} | {ratio:.3f} |")


def main() -> None:
    """Measure what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--numel", default="1000,25000000", help="numbers of parameters")
    parser.add_argument("--ways", default=";".join(WAYS), help="names, separated by semicolons")
    parser.add_argument("--calls", action="store_true", help="measure calls instead")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f} at the beginning", flush=True)
    if options.calls:
        time_calls(options.runs)
    else:
        time_losses([int(text) for text in options.numel.split(",")], options.ways.split(";"), options.runs)


if __name__ == "__main__":
    main()
