"""Run PyTorch's own distributed test suite over torchmpi and check the outcomes; see ranks.py for the execution.

    python tests/torch_suite/driver.py [OPTIONS] -- mpirun -n 3

The command after ``--`` starts the ranks. Every test must pass, or be skipped by PyTorch itself, or be listed in
listed.py with a reason. A job that hangs or dies is started again after the test that it was running.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from listed import LISTED

RANKS = Path(__file__).resolve().with_name("ranks.py")
MAX_JOBS = 30
HEADING = f"{'PyTorch distributed_test over':<46} passed  skipped by PyTorch  listed  failed  seconds"


class Outcome(NamedTuple):
    """The outcome of a test, passed, skipped or failed, and the reason."""

    name: str
    status: str
    reason: str = ""


class Report(NamedTuple):
    """All outcomes, and the MPI, number of ranks and PyTorch that they are for."""

    where: str
    outcomes: list[Outcome]
    seconds: float
    is_whole: bool


def main() -> int:
    options = parse()
    report = run_suite(options)
    problems = judge(report.outcomes, LISTED, is_whole=report.is_whole)
    show(report, problems, verbose=options.verbose)
    if problems:
        print(f"logs: {options.logs}", file=sys.stderr)
    if options.summary is not None:
        is_new = not options.summary.exists()
        with options.summary.open("a") as file:
            file.write(HEADING + "\n" if is_new else "")
            file.write(summary_line(report, problems) + "\n")
    return 1 if problems else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="patterns", action="append", default=[], help="part of a name, or a pattern with *")
    parser.add_argument("--without", action="append", default=[], help="the same of tests to leave out")
    parser.add_argument("--backend", default="torchmpi", help="gloo for a comparison")
    parser.add_argument("--limit", type=int, default=100, help="seconds for one test (default %(default)s)")
    parser.add_argument("--job-limit", type=int, default=1800, help="seconds for all of them (default %(default)s)")
    parser.add_argument("--logs", type=Path, help="folder for the output of the ranks (default: a temporary directory)")
    parser.add_argument("--summary", type=Path, help="append a line with the sums to this file")
    parser.add_argument("-v", "--verbose", action="store_true", help="name every test")
    parser.add_argument("launch", nargs="+", help="the command that starts the ranks: -- mpirun -n 3")
    options = parser.parse_args()
    options.logs = (options.logs or Path(tempfile.mkdtemp(prefix="torch-suite-logs-"))).resolve()
    options.deadline = time.monotonic() + options.job_limit
    return options


# ---- running -----------------------------------------------------------------------------------------------------


def run_suite(options: argparse.Namespace) -> Report:
    """Run one job after the other, until one has completed the suite."""
    begin = time.monotonic()
    where, outcomes, complete = "", list[Outcome](), False
    shutil.rmtree(options.logs / "jobs", ignore_errors=True)
    for number in range(MAX_JOBS):
        logs = options.logs / "jobs" / str(number)
        after = max((outcome.name for outcome in outcomes if outcome.name.startswith("test_")), default="")
        events, status = run_job(options, logs, after=after)
        if events:
            where = "{mpi}, {ranks} ranks, PyTorch {torch}".format(**events[0])
        new, complete = read(events, status, logs)
        outcomes += new
        if complete or not any(outcome.name.startswith("test_") for outcome in new):
            break
    if not complete:
        outcomes.append(Outcome("(the rest)", "failed", "has not been run"))
    is_whole = complete and not options.patterns and not options.without
    return Report(where, outcomes, time.monotonic() - begin, is_whole)


def run_job(options: argparse.Namespace, logs: Path, *, after: str) -> tuple[list[dict[str, Any]], int]:
    """Return the events recorded by rank 0, and the exit status."""
    logs.mkdir(parents=True)
    limit = max(10, options.deadline - time.monotonic())
    command = ["timeout", "-k", "10", f"{limit:.0f}", *options.launch, sys.executable, str(RANKS)]
    command += ["--backend", options.backend, "--logs", str(logs), "--limit", str(options.limit), "--after", after]
    for option, patterns in (("-k", options.patterns), ("--without", options.without)):
        command += [word for pattern in patterns for word in (option, pattern)]
    # No GPUs, as PyTorch's tests need one for each rank; one thread, as the ranks share the cores.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with (logs / "output.txt").open("w") as output:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False
        )
    file = logs / "events.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last one may be half a line
    return [json.loads(line) for line in lines], done.returncode


def read(events: Iterable[dict[str, Any]], status: int, logs: Path) -> tuple[list[Outcome], bool]:
    """Return the outcomes of a job, and whether it completed the suite."""
    outcomes, current, complete, failed = list[Outcome](), "(start)", False, False
    for event in events:
        if "begun" in event:
            current = event["begun"]
        elif "ended" in event:
            outcomes.append(Outcome(event["ended"], event["status"], event["reason"]))
            current, failed = f"(after {event['ended']})", event["status"] == "failed"
        complete = "complete" in event
    if not failed and (status != 0 or not complete):
        outcomes.append(Outcome(current, "failed", f"the job hung or died, status {status}\n{remains(logs)}"))
    return outcomes, complete


def remains(logs: Path) -> str:
    """Return the tracebacks, the stacks and the last output of a job that has not completed the suite."""
    files = [*sorted(logs.glob("failure-rank*.txt")), *sorted(logs.glob("stacks-rank*.txt")), logs / "output.txt"]
    parts = []
    for file in files:
        if lines := file.read_text(errors="replace").splitlines()[-40:]:
            parts.append("\n".join([f"--- {file.name}", *lines]))
    return "\n".join(parts)


# ---- judging -----------------------------------------------------------------------------------------------------


def judge(outcomes: Iterable[Outcome], listed: dict[str, str], *, is_whole: bool) -> list[str]:
    """Return the unexpected outcomes."""
    status_of = {outcome.name: outcome.status for outcome in outcomes}
    problems = [
        f"{outcome.name} failed: {outcome.reason}"
        for outcome in outcomes
        if outcome.status == "failed" and outcome.name not in listed
    ]
    for name, reason in listed.items():
        if status_of.get(name) == "passed":
            problems.append(f"{name} passed, but is in listed.py: {reason}")
        elif is_whole and name not in status_of:
            problems.append(f"{name} is in listed.py, but PyTorch has no such test")
    if "passed" not in status_of.values():
        problems.append("not a single test has passed")
    return problems


def summary_line(report: Report, problems: list[str]) -> str:
    number = Counter(
        "listed" if outcome.status == "failed" and outcome.name in LISTED else outcome.status
        for outcome in report.outcomes
    )
    return (
        f"{report.where:<46} {number['passed']:>6} {number['skipped']:>19} {number['listed']:>7} "
        f"{number['failed']:>7} {report.seconds:>8.0f}  {'FAILED' if problems else 'ok'}"
    )


def show(report: Report, problems: list[str], *, verbose: bool) -> None:
    if verbose:
        for outcome in report.outcomes:
            print(f"{outcome.status:<8} {outcome.name}  {outcome.reason.partition(chr(10))[0]}")
    reasons = Counter(outcome.reason for outcome in report.outcomes if outcome.status == "skipped")
    print("skipped by PyTorch, for these reasons:" if reasons else "nothing was skipped")
    for reason, number in reasons.most_common():
        print(f"{number:>6}  {reason}")
    for problem in problems:
        print(f"\n== {problem}")
    print(f"\n{HEADING}\n{summary_line(report, problems)}")


if __name__ == "__main__":
    sys.exit(main())
