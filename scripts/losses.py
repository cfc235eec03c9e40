#!/usr/bin/env python3
"""Lose ranks in many ways, and check that the others continue with right results, or that the job ends.

    python scripts/losses.py [--ways openmpi,spares,without-mpi] [--only REGEX] [--runs 20] [--output losses.md]
    TMPDIR=SHARED python scripts/losses.py --ways openmpi,spares --run-options="--hosts a:4,b:4"

The ways are those of docs/recovery.md, and `spares` has a spare rank for each lost one; the Python of this script
decides which MPI it is. Each cell of the table has the number of runs that did as documented, of all runs, and the
median of the seconds from the fault to the first right result.
The exit status is 1 if a result was wrong, a job hung, or another one did not do as documented.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "scripts" / "loss_program.py"
WAYS = {
    "openmpi": ["--on-lost-rank", "continue", "--option=--bind-to none"],
    "spares": ["--on-lost-rank", "continue", "--option=--bind-to none"],
    "without-mpi": ["--without-mpi"],
}
MOMENTS = (
    "computing", "waiting in shared memory", "short allreduce", "long allreduce", "barrier", "send and receive",
    "new groups", "copies", "recovery", "elastic loop", "elastic DDP",
)  # fmt: skip
LOOPS = ("elastic loop", "elastic DDP")
"""The moments of programs that may have spare ranks."""
SIGNALS, ENDS = ("SIGKILL", "SIGSEGV"), ("exit", "raise")
VICTIMS = ("1", "0", "1,2", "0,1", "1+2")


class Cell(NamedTuple):
    """A way to lose ranks."""

    way: str
    moment: str
    fault: str
    victims: str

    def __str__(self) -> str:
        return ", ".join(self)

    @property
    def num_victims(self) -> int:
        """How many ranks are lost."""
        return len(re.findall(r"\d", self.victims))


class Outcome(NamedTuple):
    """What a job did: `problem` is '' if as documented."""

    problem: str
    seconds: list[float]
    output: str


def cells() -> Iterator[Cell]:
    """Return all cells that differ: of faults that end the job there is one for each moment."""
    for way in WAYS:
        for moment in LOOPS if way == "spares" else MOMENTS:
            for fault in (*SIGNALS, *ENDS):
                for victims in VICTIMS:
                    is_in_recovery = moment == "recovery"
                    if is_in_recovery != ("," in victims) and is_in_recovery:
                        continue
                    if fault in ENDS and victims != ("1,2" if is_in_recovery else "1"):
                        continue
                    yield Cell(way, moment, fault, victims)


def run(cell: Cell, limit_seconds: float, run_options: list[str]) -> Outcome:
    """Run one job."""
    num_ranks = 2 + cell.num_victims
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory(prefix="torchmpi-losses-") as folder:
        command = [sys.executable, "-m", "torchmpi", "run", "-n", str(num_ranks), *WAYS[cell.way], *run_options]
        if cell.way == "spares":
            command += ["--spares", str(cell.num_victims)]
        command += ["--timeout", str(limit_seconds), str(PROGRAM), cell.moment, cell.fault, cell.victims, folder]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    output = done.stdout + done.stderr
    found = re.findall(r"continued: first rank (\d) of now (\d), (\d) losses, ([\d.]+) s", done.stdout)
    seconds = [float(each[3]) for each in found]
    if "WRONG" in output:
        return Outcome("wrong", seconds, output)
    if done.returncode == 124:
        return Outcome("hung", seconds, output)
    if cell.fault in ENDS:
        return Outcome("" if done.returncode > 0 and not found else "went on", seconds, output)
    num_started = num_ranks + (cell.num_victims if cell.way == "spares" else 0)
    left = sorted({*range(num_started)} - {int(text) for text in re.findall(r"\d", cell.victims)})
    has_all = [(int(rank), int(size)) for rank, size, *_ in sorted(found)] == [(rank, len(left)) for rank in left]
    return Outcome("" if has_all and done.returncode == 0 else f"status {done.returncode}", seconds, output)


def main() -> int:
    """Run the cells, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--only", default="", metavar="REGEX", help="of 'way, moment, fault, victims'")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="after which a job hangs")
    parser.add_argument("--run-options", default="", help="of `torchmpi run`, such as --hosts; for Open MPI")
    parser.add_argument("--output", type=Path, help="also write the table here, and the output of other jobs beside it")
    options = parser.parse_args()
    chosen = [each for each in cells() if each.way in options.ways.split(",") and re.search(options.only, str(each))]
    lines = [
        f"{len(chosen)} cells, {options.runs} runs each", "",
        "| way | moment | fault | lost | as documented | others | seconds |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    num_others = 0
    for cell in chosen:
        begin = time.monotonic()
        outcomes = [run(cell, options.limit, shlex.split(options.run_options)) for _ in range(options.runs)]
        others = Counter(each.problem for each in outcomes if each.problem)
        num_others += others.total()
        seconds = [most for each in outcomes if (most := max(each.seconds, default=0.0))]
        median = f"{statistics.median(seconds):.2f}" if seconds else ""
        shown = ", ".join(f"{problem}: {number}" for problem, number in others.items())
        good = f"{options.runs - others.total()} of {options.runs}"
        lines.append(f"| {' | '.join(cell)} | {good} | {shown} | {median} |")
        print(lines[-1], f"({time.monotonic() - begin:.0f} s)", flush=True)
        for outcome in outcomes:
            if outcome.problem:
                print(f"--- {cell}: {outcome.problem}\n{outcome.output}", file=sys.stderr, flush=True)
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n")
    return int(num_others > 0)


if __name__ == "__main__":
    sys.exit(main())
