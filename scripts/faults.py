#!/usr/bin/env python3
"""Make one rank of three fail in many ways, and write a table of how each job ended.

    python scripts/faults.py [--launchers openmpi,mpich,torchrun,gloo] [--only REGEX] [--missing] [--not-good]
        [--output results/reliability.md]

An environment of scripts/test_cpu.sh is needed for each MPI (.venv/openmpi, .venv/mpich). Results are kept in
build/faults.json, so that a part can be run again (--only), an interrupted run can be continued (--missing), and the
page is written from all of them. `gloo` is the
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "scripts" / "fault_program.py"
RANKS = 3
LIMIT_SECONDS = 90
STALL = {"TORCHMPI_STALL_WARNING_SECONDS": "3", "TORCHMPI_STALL_ABORT_SECONDS": "8"}
QUICK_SECONDS, STALL_SECONDS = 5.0, 15.0
LEFTOVER_SECONDS = 2.0
ATTEMPTS = 3

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
# Where another thing is to be named: before `start()` the rank or process that is missing, since its line is not known;
# the gradients of a backward pass have a communicator of their own.
MISSING = r"ended before all ranks had called start\(\)|rank 1 has written nothing to the store in time"
OTHER_CAUSES = {
    ("end of the program", "start"): MISSING,
    ("os._exit(0)", "start"): MISSING,
    ("sys.exit(3)", "start"): MISSING,
    ("SIGSTOP", "start"): MISSING,
    ("sleep", "start"): r"in start\(\)\. Not arrived:|rank 1 has written nothing to the store in time",
    ("other shape", "backward"): r"float32 \[7\].*in calls on different communicators",
}
# Launcher and faults that it treats in a way that no program can change; what is said below the table.
BY_LAUNCHER = {
    ("mpich", ("SIGKILL", "SIGSEGV")): (
        "MPICH's launcher names the host and the process, not the rank, and kills the other ranks before they can "
        "report. Remedy: a shell around the program, which reports first:\n"
        "`mpirun -n 3 sh -c 'python train.py; s=$?; [ $s = 0 ] || echo \"rank $PMI_RANK: status $s\" >&2; exit $s'`"
    ),
    ("mpich", tuple(f"{name} before start" for name in ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGINT"))): (
        "Before `start()`, ranks that MPICH's launcher kills in `MPI_Init` also leave a file of MPICH, "
        "`/dev/shm/mpich_shm_*`. Remedy: remove it; `start()` does so when all ranks are there. The status is the "
        "bitwise or of those of all ranks: 11 for the signals 2 and 9."
    ),
    ("mpich", ("sys.exit(3)",)): (
        "`sys.exit(3)` of one rank when all others are in `stop()` is an orderly end: MPICH's launcher returns the "
        "status, and says nothing."
    ),
    ("torchrun", ("SIGSTOP", "SIGSTOP before start")): (
        "torchrun sends SIGTERM to the stopped rank, and SIGKILL 30 seconds later; the report is printed before. "
        "Remedy: `kill -9` of the process that the messages of torchrun name."
    ),
}
STALLS = ("SIGSTOP", "sleep")
IN_A_CALL = ("other collective", "other shape", "raise in a callback")
LAUNCHERS = ("openmpi", "mpich", "torchrun", "gloo")
TORCHRUN = ("torchrun", "gloo")
# torchrun takes the status 0 for success; the others wait for the timeout of init_process_group.
UNNOTICED = (("end of the program", "start"), ("os._exit(0)", "start"))


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
        is_stall = self.fault in STALLS or (self.launcher in TORCHRUN and (self.fault, self.moment) in UNNOTICED)
        return STALL_SECONDS if is_stall else QUICK_SECONDS

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
                if fault == "raise in a callback" and (moment != "call" or launcher in TORCHRUN):
                    continue
                if launcher in TORCHRUN and moment in ("mpi_call", "server", "async_call", "stop"):
                    continue
                yield launcher, fault, moment


def command(launcher: str, fault: str, moment: str) -> tuple[list[str], dict[str, str]]:
    mpi = launcher if launcher in ("openmpi", "mpich") else "openmpi"
    folder = ROOT / ".venv" / mpi / "bin"
    if not (folder / "python").exists():
        sys.exit(
            f"faults.py: there is no environment {folder.parent}. scripts/test_cpu.sh --mpi {mpi} --quick makes it."
        )
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"} | (STALL if fault in STALLS and launcher != "gloo" else {})
    program = [str(PROGRAM), fault, moment]
    if launcher in TORCHRUN:
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
    """Run a case; again if the job has ended before the fault, as when a busy machine takes too long to start it."""
    for _ in range(ATTEMPTS):
        outcome, log, has_failed = attempt(launcher, fault, moment)
        if has_failed:
            break
    return outcome, log


def attempt(launcher: str, fault: str, moment: str) -> tuple[Outcome, str, bool]:
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
        except BaseException:
            end_session(process.pid, 0.0)
            raise
        end = time.time()
        has_failed = mark.exists()
        began = float(mark.read_text()) if has_failed else end
        leftovers = end_session(process.pid, LEFTOVER_SECONDS if ended else 0.0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    time.sleep(0.2)
    files = unused_files() - before
    outcome = Outcome(
        launcher,
        fault,
        moment,
        ended,
        round(end - began, 1),
        status,
        names_rank=bool(re.search(r"\brank\s*:?\s*1\b|\[rank1\]|@1,1\]", text)),
        names_cause=names_cause(fault, moment, text),
        lines=sum(bool(line.strip()) for line in text.splitlines()) - text.count("failing now"),
        leftovers=leftovers + len(files) if ended else 0,
    )
    left = f"left in /dev/shm: {' '.join(sorted(files))}\n" if files else ""
    log = f"$ {' '.join(words)}\nstatus {status}, {outcome.seconds} s after the fault\n{left}{text}"
    return outcome, log, has_failed


def names_cause(fault: str, moment: str, text: str) -> bool:
    patterns = [FAULTS[fault], OTHER_CAUSES.get((fault, moment), FAULTS[fault])]
    return any(re.search(pattern, text, re.DOTALL) for pattern in patterns)


def end_session(session: int, patience_seconds: float) -> int:
    """Wait for the processes of a session, which may have been killed a moment ago; kill and count the others."""
    limit = time.monotonic() + patience_seconds
    while (left := processes_of(session)) and time.monotonic() < limit:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def processes_of(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) == session:
                found.append(int(entry.name))
    return found


# --- the page ----------------------------------------------------------------------------------------------


HEAD = "| fault of rank 1 | moment | ended after | status | rank named | cause named | lines | leftovers | good |"


def row(outcome: Outcome) -> str:
    yes = {True: "yes", False: "**no**"}
    after = f"{outcome.seconds:g} s" if outcome.ended else f"**over {LIMIT_SECONDS} s**"
    status = str(outcome.status) if outcome.status != 0 else "**0**"
    cells = [quoted(outcome.fault), MOMENTS[outcome.moment], after, status]
    cells += [yes[outcome.names_rank], yes[outcome.names_cause], str(outcome.lines), str(outcome.leftovers)]
    good = "yes" if outcome.is_good else "no, see below" if explanation(outcome) else "**no**"
    return f"| {' | '.join(cells)} | {good} |"


def explanation(outcome: Outcome) -> str:
    """Return why the launcher is the reason of a bad end; '' if it is not."""
    is_before = outcome.moment == "start"
    fault = f"{outcome.fault} before start" if is_before else outcome.fault
    is_orderly = (outcome.fault, outcome.moment) == ("sys.exit(3)", "stop")
    excused = replace(outcome, names_rank=True, names_cause=outcome.names_cause or is_orderly)
    excused = replace(excused, leftovers=0 if is_before else outcome.leftovers)
    if outcome.launcher == "torchrun":
        excused = replace(outcome, seconds=0.0)
    if outcome.is_good or not excused.is_good:
        return ""
    return next(
        (text for (name, faults), text in BY_LAUNCHER.items() if name == outcome.launcher and fault in faults),
        "",
    )


TITLES = {
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "torchrun": "torchrun, backend torchmpi",
    "gloo": "torchrun, DistributedDataParallel on gloo",
}


def page(outcomes: list[Outcome]) -> str:
    by_launcher = {name: [each for each in outcomes if each.launcher == name] for name in LAUNCHERS}
    by_launcher = {name: found for name, found in by_launcher.items() if found}
    parts = [
        "| | jobs | ended in time | status not 0 | rank named | cause named | all of these | explained |",
        "|---" * 8 + "|",
    ]
    for launcher, found in by_launcher.items():
        counts = [
            sum(each.ended and each.seconds <= each.limit for each in found),
            sum(each.ended and each.status != 0 for each in found),
            sum(each.names_rank for each in found),
            sum(each.names_cause for each in found),
            sum(each.is_good for each in found),
            sum(bool(explanation(each)) for each in found),
        ]
        parts.append(f"| {TITLES[launcher]} | {len(found)} | {' | '.join(map(str, counts))} |")
    parts += ["", "## Side by side", "", *side_by_side(outcomes, list(by_launcher))]
    for launcher, found in by_launcher.items():
        parts += ["", f"## {TITLES[launcher]}", "", HEAD, "|---" * 9 + "|", *map(row, found)]
        for text in dict.fromkeys(filter(None, map(explanation, found))):
            parts += ["", text]
    return "\n".join(parts) + "\n"


def side_by_side(outcomes: list[Outcome], launchers: list[str]) -> list[str]:
    """Return a table with a column for each launcher: seconds, and what is missing."""
    lines = [f"| fault of rank 1 | moment | {' | '.join(TITLES[each] for each in launchers)} |"]
    lines.append("|---" * (2 + len(launchers)) + "|")
    known = {(each.fault, each.moment, each.launcher): each for each in outcomes}
    for fault, moment in dict.fromkeys((each.fault, each.moment) for each in outcomes):
        cells = [shortly(known.get((fault, moment, launcher))) for launcher in launchers]
        lines.append(f"| {quoted(fault)} | {MOMENTS[moment]} | {' | '.join(cells)} |")
    return lines


def shortly(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    problems = {
        "late": outcome.ended and outcome.seconds > outcome.limit,
        "status 0": outcome.ended and outcome.status == 0,
        "no rank": not outcome.names_rank,
        "no cause": not outcome.names_cause,
        f"{outcome.leftovers} left": outcome.leftovers > 0,
    }
    shown = [f"{outcome.seconds:g} s" if outcome.ended else f"over {LIMIT_SECONDS} s"]
    shown += [name for name, is_so in problems.items() if is_so]
    return shown[0] if outcome.is_good else f"**{', '.join(shown)}**"


def quoted(fault: str) -> str:
    return f"`{fault}`" if "(" in fault else fault


def write(path: Path, outcomes: list[Outcome]) -> None:
    """Replace the part of the page below its marker."""
    marker = "<!-- The rest is written by scripts/faults.py -->\n"
    above = path.read_text().partition(marker)[0] if path.exists() else "# Reliability\n\n"
    path.write_text(f"{above}{marker}\n{page(outcomes)}")


def results_in(file: Path) -> dict[tuple[str, str, str], Outcome]:
    """Return the last result of each case."""
    outcomes = [Outcome(**fields) for fields in json.loads(file.read_text())] if file.exists() else []
    return {(outcome.launcher, outcome.fault, outcome.moment): outcome for outcome in outcomes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--only", default="", help="run the cases whose 'launcher fault moment' matches")
    parser.add_argument("--not-good", action="store_true", help="run only the cases whose last result is not good")
    parser.add_argument("--missing", action="store_true", help="run only the cases without a result, as after a break")
    parser.add_argument("--output", type=Path, help="page to write")
    options = parser.parse_args()
    if unknown := set(options.launchers.split(",")) - set(LAUNCHERS):
        parser.error(f"--launchers: {', '.join(sorted(unknown))} is none of {', '.join(LAUNCHERS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the job is ended too
    build = ROOT / "build"
    (build / "faults").mkdir(parents=True, exist_ok=True)
    file = build / "faults.json"
    known = results_in(file)
    for case in cases(options.launchers.split(",")):
        if not re.search(options.only, " ".join(case)) or (options.missing and case in known):
            continue
        if options.not_good and case in known and known[case].is_good:
            continue
        outcome, log = run(*case)
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
        # Read again, as other parts may run at the same time.
        file.write_text(json.dumps([asdict(each) for each in (results_in(file) | {case: outcome}).values()], indent=1))
    if options.output:
        known = results_in(file)
        write(options.output, [known[case] for case in cases(list(LAUNCHERS)) if case in known])


main()
