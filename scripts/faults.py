#!/usr/bin/env python3
"""Make one rank of three fail in many ways, and write a table of how each job ended.

    python scripts/faults.py [--launchers openmpi,mpich,torchrun,gloo] [--only REGEX] [--output docs/reliability.md]

An environment of scripts/test_cpu.sh is needed for each MPI (.venv/openmpi, .venv/mpich). Results are kept in
build/faults.json, so that a part can be run again (--only) and the page is written from all of them. `gloo` is the
same program with DistributedDataParallel on gloo under torchrun, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "scripts" / "fault_program.py"
RANKS = 3
LIMIT_SECONDS = 60
STALL = {"TORCHMPI_STALL_WARNING_SECONDS": "3", "TORCHMPI_STALL_ABORT_SECONDS": "8"}
QUICK_SECONDS, STALL_SECONDS = 5.0, 15.0

MOMENTS = {
    "start": "before `start()`",
    "call": "others in a collective",
    "async_call": "others wait for a handle",
    "mpi_call": "others inside the MPI library",
    "backward": "others in an asynchronous backward",
    "message": "others in `recv`",
    "server": "parameter server",
    "stop": "others in `stop()`",
}
# The words that name the cause. A signal that ends a process at once leaves its report to the launcher.
FAULTS = {
    "raise": r"MemoryError: no memory for the batch",
    "sys.exit(3)": r"sys\.exit\(3\)|exit(ed)? (code|status|with)\D*3|[Ee]xit code:\s+3|EXIT CODE: 3|exitcode\s*: 3",
    "end of the program": r"reached the end of its program|called stop|has ended|left|exited",
    "os._exit(0)": r"has ended|os\._exit|exited|without calling .?finalize|died|gone",
    "SIGKILL": r"signal 9|SIGKILL|Killed|EXIT CODE: 9",
    "SIGSEGV": r"signal 11|SIGSEGV|Segmentation|EXIT CODE: 11|EXIT CODE: 139",
    "SIGTERM": r"SIGTERM|signal 15",
    "SIGINT": r"KeyboardInterrupt|Ctrl-C|SIGINT|signal 2\b",
    "SIGSTOP": r"stopped|no answer|does not answer|busy",
    "sleep": r"fault_program\.py:\d+|time\.sleep",
    "other collective": r"broadcast.*allreduce|allreduce.*broadcast",
    "other shape": r"float32 \[7\].*float32 \[1000\]|float32 \[1000\].*float32 \[7\]",
    "raise in a callback": r"MemoryError: no memory for the batch",
}
STALLS = ("SIGSTOP", "sleep")
IN_A_CALL = ("other collective", "other shape", "raise in a callback")
LAUNCHERS = ("openmpi", "mpich", "torchrun", "gloo")


@dataclass
class Outcome:
    """How a job ended."""

    launcher: str
    fault: str
    moment: str
    ended: bool
    seconds: float
    status: int
    names_rank: bool
    names_cause: bool
    lines: int
    leftovers: int

    @property
    def limit(self) -> float:
        """The seconds within which the job has to end after the fault."""
        return STALL_SECONDS if self.fault in STALLS else QUICK_SECONDS

    @property
    def is_good(self) -> bool:
        """Whether the job ended in time, with a status other than 0, named rank and cause, and left nothing behind."""
        named = self.names_rank and self.names_cause
        return self.ended and self.seconds <= self.limit and self.status != 0 and named and not self.leftovers


def cases(launchers: list[str]) -> Iterator[tuple[str, str, str]]:
    for launcher in launchers:
        for fault in FAULTS:
            for moment in MOMENTS:
                if fault in IN_A_CALL and moment not in ("call", "async_call", "backward"):
                    continue
                if (fault, moment) == ("end of the program", "stop"):
                    continue  # an ordinary end
                if fault == "raise in a callback" and (moment != "call" or launcher in ("torchrun", "gloo")):
                    continue
                if launcher in ("torchrun", "gloo") and moment in ("mpi_call", "server", "async_call", "stop"):
                    continue
                yield launcher, fault, moment


def command(launcher: str, fault: str, moment: str) -> tuple[list[str], dict[str, str]]:
    mpi = launcher if launcher in ("openmpi", "mpich") else "openmpi"
    folder = ROOT / ".venv" / mpi / "bin"
    if not (folder / "python").exists():
        sys.exit(
            f"faults.py: there is no environment {folder.parent}. scripts/test_cpu.sh --mpi {mpi} --quick makes it."
        )
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"} | (STALL if launcher != "gloo" else {})
    program = [str(PROGRAM), fault, moment]
    if launcher in ("torchrun", "gloo"):
        environment["FAULTS_BACKEND"] = "torchmpi" if launcher == "torchrun" else "gloo"
        run = [str(folder / "torchrun"), "--standalone", f"--nproc-per-node={RANKS}", *program]
        return run, environment
    if launcher == "openmpi":
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        more = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        return [str(folder / "mpirun"), *more, "-n", str(RANKS), str(folder / "python"), *program], environment
    return [str(folder / "mpirun"), "-n", str(RANKS), str(folder / "python"), *program], environment


def unused_files() -> set[str]:
    """Return the files in /dev/shm that no process has mapped."""
    maps = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended
            maps += path.read_text()
    return set(os.listdir("/dev/shm")) - set(re.findall(r"/dev/shm/(\S+)", maps))


def run(launcher: str, fault: str, moment: str) -> tuple[Outcome, str]:
    words, environment = command(launcher, fault, moment)
    before = unused_files()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        mark = Path(folder) / "mark"
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment | {"FAULTS_MARK": str(mark)},
            start_new_session=True,
        )
        try:
            status, ended = process.wait(LIMIT_SECONDS), True
        except subprocess.TimeoutExpired:
            status, ended = -1, False
        end = time.time()
        began = float(mark.read_text()) if mark.exists() else end
        leftovers = end_session(process.pid)
        output.seek(0)
        text = output.read().decode(errors="replace")
    time.sleep(0.2)
    leftovers += len(unused_files() - before)
    outcome = Outcome(
        launcher,
        fault,
        moment,
        ended,
        round(end - began, 1),
        status,
        names_rank=bool(re.search(r"\brank\s*:?\s*1\b|\[rank1\]|\brank 1 ", text)),
        names_cause=bool(re.search(FAULTS[fault], text, re.DOTALL)),
        lines=sum(bool(line.strip()) for line in text.splitlines()) - text.count("failing now"),
        leftovers=leftovers if ended else 0,
    )
    return outcome, f"$ {' '.join(words)}\nstatus {status}, {outcome.seconds} s after the fault\n{text}"


def end_session(session: int) -> int:
    """Kill the processes of a session; return their number."""
    count = 0
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        # Zombies have ended.
        if entry.name.isdigit() and fields[0] != "Z" and int(fields[3]) == session:
            count += 1
            os.kill(int(entry.name), signal.SIGKILL)
    return count


# --- the page ----------------------------------------------------------------------------------------------


HEAD = "| fault of rank 1 | moment | ended after | status | rank named | cause named | lines | leftovers | good |"


def row(outcome: Outcome) -> str:
    yes = {True: "yes", False: "**no**"}
    after = f"{outcome.seconds:g} s" if outcome.ended else f"**over {LIMIT_SECONDS} s**"
    status = str(outcome.status) if outcome.status != 0 else "**0**"
    cells = [f"`{outcome.fault}`" if "(" in outcome.fault else outcome.fault, MOMENTS[outcome.moment], after, status]
    cells += [yes[outcome.names_rank], yes[outcome.names_cause], str(outcome.lines), str(outcome.leftovers)]
    return f"| {' | '.join(cells)} | {'yes' if outcome.is_good else '**no**'} |"


def page(outcomes: list[Outcome]) -> str:
    titles = {
        "openmpi": "Open MPI",
        "mpich": "MPICH",
        "torchrun": "torchrun, backend torchmpi",
        "gloo": "torchrun, DistributedDataParallel on gloo",
    }
    parts = [
        "| | jobs | ended in time | status not 0 | rank named | cause named | all of these |",
        "|---|---|---|---|---|---|---|",
    ]
    for launcher in LAUNCHERS:
        found = [each for each in outcomes if each.launcher == launcher]
        if not found:
            continue
        counts = [
            sum(each.ended and each.seconds <= each.limit for each in found),
            sum(each.ended and each.status != 0 for each in found),
            sum(each.names_rank for each in found),
            sum(each.names_cause for each in found),
            sum(each.is_good for each in found),
        ]
        parts.append(f"| {titles[launcher]} | {len(found)} | {' | '.join(map(str, counts))} |")
    for launcher in LAUNCHERS:
        found = [each for each in outcomes if each.launcher == launcher]
        if found:
            parts += ["", f"## {titles[launcher]}", "", HEAD, "|---" * 9 + "|", *map(row, found)]
    return "\n".join(parts) + "\n"


def write(path: Path, outcomes: list[Outcome]) -> None:
    """Replace the part of the page below its marker."""
    marker = "<!-- The rest is written by scripts/faults.py -->\n"
    above = path.read_text().partition(marker)[0] if path.exists() else "# Reliability\n\n"
    path.write_text(f"{above}{marker}\n{page(outcomes)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--only", default="", help="run the cases whose 'launcher fault moment' matches")
    parser.add_argument("--not-good", action="store_true", help="run only the cases whose last result is not good")
    parser.add_argument("--output", type=Path, help="page to write")
    options = parser.parse_args()
    build = ROOT / "build"
    (build / "faults").mkdir(parents=True, exist_ok=True)
    file = build / "faults.json"
    known = {}
    if file.exists():
        for fields in json.loads(file.read_text()):
            outcome = Outcome(**fields)
            known[outcome.launcher, outcome.fault, outcome.moment] = outcome
    order = list(cases(list(LAUNCHERS)))
    for case in cases(options.launchers.split(",")):
        if not re.search(options.only, " ".join(case)) or (options.not_good and case in known and known[case].is_good):
            continue
        outcome, log = run(*case)
        known[case] = outcome
        name = re.sub(r"\W+", "_", " ".join(case))
        (build / "faults" / f"{name}.log").write_text(log)
        print(
            "good    " if outcome.is_good else "NOT GOOD",
            *case,
            outcome.seconds,
            "s, status",
            outcome.status,
            flush=True,
        )
        file.write_text(json.dumps([asdict(known[case]) for case in order if case in known], indent=1))
    if options.output:
        write(options.output, [known[case] for case in order if case in known])


main()
