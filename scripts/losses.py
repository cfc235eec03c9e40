#!/usr/bin/env python3
"""Lose ranks in many ways, and check that the others continue with right results, or that the job ends.

    python scripts/losses.py RESULTS [--ways openmpi,spares] [--hosts 1,2] [--only REGEX] [--runs 20] [--jobs 4]
    python scripts/losses.py RESULTS --table

The ways are those of docs/recovery.md: `spares` has a spare rank for each lost one, and `respawns` starts a new one,
without MPI. The Python of this script decides which MPI it is. Two hosts are h0 and h1 of scripts/hosts.sh, which must
be up (HOSTS_STATE); without MPI they are two names of this one.

Each run is a line of the file RESULTS. Started again, the script makes the runs that are missing, first those of the
cells that have the fewest, so it can be ended at any time. The table has the number of runs that did as documented, of
all runs, and the median of the seconds from the last fault to the first right result. The output of other runs is
beside RESULTS. The exit status is 1 if there are some: a result was wrong, a job hung, or ended in another way.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from helpers import warm  # noqa: E402

PROGRAM = ROOT / "scripts" / "loss_program.py"
STATE = Path(os.environ.get("HOSTS_STATE", "/run/torchmpi-hosts"))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
"""Of jobs and of the servers of warm ranks: where variables that are read at import differ, ranks start cold."""
CONTINUE = ["--on-lost-rank", "continue"]
WITHOUT_MPI = ["--without-mpi", *CONTINUE]
WAYS = {"openmpi": CONTINUE, "spares": CONTINUE, "without-mpi": WITHOUT_MPI, "respawns": WITHOUT_MPI}
MOMENTS = (
    "start", "computing", "waiting in shared memory", "short allreduce", "long allreduce", "other collectives",
    "asynchronous calls", "barrier", "send and receive", "new groups", "copies", "recovery", "elastic loop",
    "elastic DDP", "elastic server", "checkpoint", "parameter server", "new rank",
)  # fmt: skip
LOOPS = ("start", "elastic loop", "elastic DDP", "elastic server", "checkpoint", "new rank")
"""The moments of programs that may have spare ranks, or new ones, of which the first is lost too in the last."""
SIGNALS, ENDS = ("SIGKILL", "SIGSEGV"), ("SIGSTOP", "exit", "raise")
STATUSES = {"exit": 3, "raise": 1}
"""Of a job in which a rank fails so, after all have met."""
VICTIMS = ("1", "0", "1,2", "0,1", "1+2")


class Cell(NamedTuple):
    """A way to lose ranks."""

    way: str
    hosts: str
    moment: str
    fault: str
    victims: str

    def __str__(self) -> str:
        return ", ".join(self)

    @property
    def num_victims(self) -> int:
        """How many ranks are lost."""
        return len(re.findall(r"\d", self.victims))

    @property
    def on_hosts(self) -> bool:
        """Whether the ranks are on the hosts of scripts/hosts.sh."""
        return self.hosts == "2" and "--without-mpi" not in WAYS[self.way]

    @property
    def ends(self) -> bool:
        """Whether the job must end."""
        return self.fault in ENDS or self.moment == "start"


class Outcome(NamedTuple):
    """What a job did: `problem` is '' if as documented."""

    problem: str
    seconds: float
    output: str


def cells() -> Iterator[Cell]:
    """Return all cells that differ: of losses that end the job only those of rank 1 and of rank 0."""
    for way in WAYS:
        for hosts in "12":
            for moment in LOOPS if way in ("spares", "respawns") else MOMENTS:
                for fault in (*SIGNALS, *ENDS):
                    for victims in VICTIMS:
                        cell = Cell(way, hosts, moment, fault, victims)
                        if moment == "recovery" and "," not in victims:
                            continue
                        if moment == "new rank" and (way != "respawns" or fault not in SIGNALS):
                            continue
                        if cell.ends and victims not in (("1,2", "0,1") if moment == "recovery" else ("1", "0")):
                            continue
                        yield cell


def launching(way: list[str], num_ranks: int, num_spares: int, hosts_of: str) -> tuple[list[str], dict[str, str]]:
    """Return the beginning of a command with `torchmpi run`, and its environment.

    `way`: its options; `hosts_of`: a folder for the hosts of scripts/hosts.sh, which they share; '' for this host.
    """
    command = [sys.executable, "-m", "torchmpi", "run", "-n", str(num_ranks), *way]
    environment = dict(ENVIRONMENT)
    options, num_started = ["--bind-to none"], num_ranks + num_spares
    if num_spares:
        command += ["--spares", str(num_spares)]
    if hosts_of:
        options += [f"--prtemca plm_ssh_agent {STATE}/agent --mca btl_tcp_if_include eth0 -x PYTHONPATH"]
        options += [f"--prtemca prte_if_include {os.environ.get('HOSTS_NETWORK', '10.87.21')}.0/24"]
        command += ["--hosts", f"h0:{num_started // 2 + num_started % 2},h1:{num_started // 2}"]
        (Path(hosts_of) / "ssh").symlink_to(STATE / "agent")  # torchmpi run asks the hosts whether they answer
        environment["PATH"] = f"{hosts_of}:{environment['PATH']}"
    if "--without-mpi" not in way:
        command += [f"--option={' '.join(options)}"]
    return command, environment


def run(cell: Cell, limit_seconds: float) -> Outcome:
    """Run one job."""
    # After a call of MPI_Abort, mpirun itself ends two others, but not three.
    num_ranks, num_spares = 4 if cell.ends else 2 + cell.num_victims, cell.num_victims if cell.way == "spares" else 0
    shared = str(STATE) if cell.on_hosts else None
    with tempfile.TemporaryDirectory(prefix="losses-", dir=shared) as folder:
        hosts_of = folder if cell.on_hosts else ""
        options = [*WAYS[cell.way], *(["--respawns", str(cell.num_victims + 1)] if cell.way == "respawns" else [])]
        command, environment = launching(options, num_ranks, num_spares, hosts_of)
        # A rank that is killed before it has started is found by its launcher, whose child a warm one is not.
        words = [sys.executable] if cell.moment == "start" else warm.command(address("$(uname -n)", cell.on_hosts))
        if cell.hosts == "2" and not cell.on_hosts:
            words = ["env", "TORCHMPI_HOST_NAME=h$((RANK % 2))", *words]
        python = " ".join(words)
        if cell.way == "without-mpi" and len(words) > 1:
            command[:1] = warm.command(address("", False))  # torchmpi run itself imports torch, for its store
        command += ["--timeout", str(limit_seconds), "sh", "-c", f'exec {python} "$@"', "sh", str(PROGRAM)]
        command += [cell.moment, cell.fault, cell.victims, folder, str(num_ranks)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    return judged(cell, num_ranks + num_spares, done)


def judged(cell: Cell, num_started: int, done: subprocess.CompletedProcess[str]) -> Outcome:
    """Return whether a job did as documented."""
    output = done.stdout + done.stderr
    found = re.findall(r"continued: first rank (-?\d) of now (\d), (\d) losses, ([\d.]+) s", done.stdout)
    seconds = max((float(each[3]) for each in found), default=0.0)
    if "WRONG" in output:
        return Outcome("wrong", seconds, output)
    if done.returncode == 124:
        return Outcome("hung", seconds, output)
    if cell.ends:
        status = STATUSES.get("" if cell.moment == "start" else cell.fault, done.returncode)
        if done.returncode <= 0 or found:
            return Outcome("went on", seconds, output)
        return Outcome("" if done.returncode == status else f"status {done.returncode}", seconds, output)
    left = sorted({*range(num_started)} - {int(text) for text in re.findall(r"\d", cell.victims)})
    if cell.way == "respawns":
        left = [-1] * cell.num_victims + left
    has_all = sorted((int(rank), int(size)) for rank, size, *_ in found) == [(rank, len(left)) for rank in left]
    return Outcome("" if has_all and done.returncode == 0 else f"status {done.returncode}", seconds, output)


def address(name: str, is_host: bool) -> str:
    """Return the address of the server of warm ranks, which has imported torch, on a host or, without one, here."""
    return f"{STATE}/losses-{name}" if is_host else f"{tempfile.gettempdir()}/losses-{os.getpid()}"


def start_servers(resources: ExitStack, missing: Iterable[Cell]) -> None:
    """Start the servers of warm ranks that these cells need."""
    for on_hosts in sorted({cell.on_hosts for cell in missing}):
        for name in ("h0", "h1") if on_hosts else ("",):
            launcher = [str(ROOT / "scripts" / "hosts.sh"), "run", name] if on_hosts else []
            server = warm.Server(address(name, on_hosts), ENVIRONMENT, launcher)
            resources.enter_context(closing(server))
            server.wait_for_start()


def read(file: Path) -> dict[Cell, list[dict[str, Any]]]:
    """Return the runs of a file, by cell."""
    runs = defaultdict(list)
    for line in file.read_text().splitlines() if file.exists() else ():
        entry = json.loads(line)
        runs[Cell(*entry["cell"])].append(entry)
    return runs


def table(runs: dict[Cell, list[dict[str, Any]]]) -> tuple[list[str], int]:
    """Return the lines of the table, and the number of runs that did not do as documented."""
    lines = ["| way | hosts | moment | fault | lost | as documented | others | seconds |", "|---" * 8 + "|"]
    num_others = 0
    for cell in filter(runs.get, cells()):
        others = Counter(each["problem"] for each in runs[cell] if each["problem"])
        num_others += others.total()
        seconds = [each["seconds"] for each in runs[cell] if each["seconds"]]
        median = f"{statistics.median(seconds):.2f}" if seconds else ""
        shown = ", ".join(f"{problem}: {number}" for problem, number in others.items())
        good = f"{len(runs[cell]) - others.total()} of {len(runs[cell])}"
        lines.append(f"| {' | '.join(cell)} | {good} | {shown} | {median} |")
    return lines, num_others


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that have been started and awaited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def make(missing: list[Cell], options: argparse.Namespace, runs: dict[Cell, list[dict[str, Any]]]) -> None:
    """Make runs of these cells, several at a time, and add them to the file and to `runs`."""
    end, num_made = time.monotonic() + options.seconds, 0

    def outcome_in_time(cell: Cell) -> tuple[Cell, Outcome | None]:
        return cell, run(cell, options.limit) if time.monotonic() < end else None

    with ExitStack() as resources:
        start_servers(resources, missing)
        for cell, outcome in resources.enter_context(ThreadPoolExecutor(options.jobs)).map(outcome_in_time, missing):
            if outcome is None:
                continue
            num_made += 1
            entry = {"cell": list(cell), "problem": outcome.problem, "seconds": outcome.seconds}
            runs[cell].append(entry)
            with options.results.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            if outcome.problem:
                print(f"{cell}: {outcome.problem}", flush=True)
                with options.results.with_suffix(".others.txt").open("a") as file:
                    file.write(f"--- {cell}: {outcome.problem}\n{outcome.output}\n")
    print(f"{num_made} runs, of {cpu_seconds() / max(1, num_made):.2f} CPU seconds, with those of the servers")


def main() -> int:
    """Make the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--hosts", default="1")
    parser.add_argument("--only", default="", metavar="REGEX", help="of 'way, hosts, moment, fault, victims'")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="after which a job hangs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time: for the most part they wait")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after this time")
    parser.add_argument("--table", action="store_true", help="make no runs")
    options = parser.parse_args()
    runs = read(options.results)
    ways, hosts = options.ways.split(","), options.hosts.split(",")
    chosen = [
        each for each in cells() if each.way in ways and each.hosts in hosts and re.search(options.only, str(each))
    ]
    missing = sorted((number, each) for each in chosen for number in range(len(runs[each]), options.runs))
    order = {cell: index for index, cell in enumerate(chosen)}
    missing.sort(key=lambda pair: (pair[0], order[pair[1]]))
    if missing and not options.table:
        print(f"{len(chosen)} cells; {len(missing)} runs are missing", flush=True)
        make([cell for _, cell in missing], options, runs)
    lines, num_others = table(runs)
    print("\n".join(lines))
    return int(num_others > 0)


if __name__ == "__main__":
    sys.exit(main())
