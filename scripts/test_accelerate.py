"""Run Accelerate's own tests that start several processes on CPUs, unmodified, over gloo and over torchmpi.

    pip download --no-deps --no-binary :all: accelerate==1.15.0 && tar xf accelerate-1.15.0.tar.gz
    python scripts/test_accelerate.py accelerate-1.15.0 [--file WORD] [--write]

These tests start two processes by `debug_launcher`, which forks the process of pytest and names no launcher of MPI;
with TORCHMPI_AS_GLOO=1 their process groups are of torchmpi. Prints a table and the reasons of skips; --write puts them
into results/frameworks.md. Ends with status 1 if a test fails with torchmpi and not with gloo.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import place_table

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = CHECKOUT / "results" / "frameworks.md"
FILES = ("test_cpu.py", "test_grad_sync.py", "test_scheduler.py", "test_metrics.py")
"""Those of the folder tests that call debug_launcher."""
BACKENDS: Mapping[str, Mapping[str, str]] = {"gloo": {}, "torchmpi": {"TORCHMPI_AS_GLOO": "1"}}
OUTCOMES = ("passed", "failed", "skipped")
TIMEOUT_SECONDS = 1200


class Outcome(NamedTuple):
    """The outcomes of the tests of a file, by name, why tests were skipped, and the process groups of torchmpi."""

    tests: dict[str, str]
    reasons: Counter[str]
    num_groups: int

    def __str__(self) -> str:
        counts = Counter(self.tests.values())
        return ", ".join(str(counts[outcome]) for outcome in OUTCOMES)


def outcome_of(path: Path, variables: Mapping[str, str], *selection: str) -> Outcome:
    """Run the tests of a file, or those that options of pytest select."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHMPI_AS_")}
    environment |= {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-s", "-p", "no:cacheprovider", f"--junitxml={report}", *selection]
        command = ["timeout", "-k", "5", str(TIMEOUT_SECONDS), sys.executable, "-m", "pytest", *options, str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=path.parent.parent, env=environment
        )
        if not report.exists():
            sys.exit(f"{path.name} did not end:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    tests, reasons = dict[str, str](), Counter[str]()
    for case in cases:
        skipped, name = case.find("skipped"), f"{case.get('classname', '').split('.')[-1]}.{case.get('name')}"
        is_failed = case.find("failure") is not None or case.find("error") is not None
        tests[name] = "failed" if is_failed else "passed" if skipped is None else "skipped"
        if skipped is not None:
            reasons[str(skipped.get("message"))] += 1
    if "failed" in tests.values():
        print(done.stdout[-8000:], done.stderr[-8000:], file=sys.stderr)
    return Outcome(tests, reasons, len(re.findall(r"\): torchmpi, \d+ ranks", done.stdout + done.stderr)))


def compare(title: str, path: Path, section: str, *selection: str) -> bool:
    """Run tests with each backend, print a line, and write it into a table of the page unless its name is empty.

    Returns whether a test that passes with gloo does not with torchmpi.
    """
    gloo, ours = (outcome_of(path, variables, *selection) for variables in BACKENDS.values())
    reasons = "; ".join(f"{reason} ({number})" for reason, number in ours.reasons.items())
    line = f"| {title} | {gloo} | {ours} | {ours.num_groups} | {reasons} |"
    print(line, flush=True)
    if section:
        place_table.write(section, [line], PAGE)
    return any(ours.tests.get(test) != outcome for test, outcome in gloo.tests.items() if outcome == "passed")


def main() -> int:
    """Run the tests of the chosen files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder with the sources of Accelerate")
    parser.add_argument("--file", default="", metavar="WORD", help="files with this word in their name")
    parser.add_argument("--write", action="store_true", help="write the lines into results/frameworks.md")
    options = parser.parse_args()
    failed = False
    for name in FILES:
        if options.file not in name:
            continue
        path = options.checkout.resolve() / "tests" / name
        failed |= compare(f"`{name}`", path, "tests of Accelerate" if options.write else "")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
