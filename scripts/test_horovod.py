"""Run Horovod's own tests for torch, unmodified, on torchmpi.horovod: one job for each test.

    git clone --depth 1 https://github.com/horovod/horovod /tmp/horovod
    python scripts/test_horovod.py /tmp/horovod [-n 2,4] [-k WORD] [--write results/horovod-tests.md]

The tests find torchmpi.horovod by the names of Horovod's modules (torchmpi/horovod/aliases.py). Prints a line for each
test, and a table; ends with status 1 if a test failed that is not listed in EXPECTED.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

FILES = {
    "test/parallel/test_torch.py": None,
    "test/parallel/test_adasum_pytorch.py": None,
    "test/parallel/test_timeline.py": None,
    "test/parallel/test_common.py": None,
    "test/single/test_torch_elastic.py": 1,
}
"""The tests, and the number of ranks if it is fixed."""
_JOIN = "a rank that joins early: calls are matched by their order, so that the others raise"
EXPECTED = {
    "test_horovod_join_allreduce": _JOIN,
    "test_horovod_join_allgather": _JOIN,
    "test_horovod_join_broadcast": _JOIN,
}
"""Tests that fail, with the reason."""
SECONDS = 180


class Result(NamedTuple):
    """The outcome of a test on all ranks."""

    file: str
    test: str
    ranks: int
    outcome: str
    reason: str
    seconds: float


def test_names(path: Path) -> list[str]:
    """Return the tests of a file, as ``Class::test``."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names = dict.fromkeys(each.name for each in node.body if isinstance(each, ast.FunctionDef))
            found += [f"{node.name}::{name}" for name in names if name.startswith("test")]
    return found


# --- inside the job ---------------------------------------------------------------


def make_modules() -> None:
    """Make the modules that the tests import besides Horovod's."""
    import threading
    import unittest.mock

    from torchmpi.horovod.aliases import install

    install()

    def in_thread(target, args=(), name=None, daemon=True, silent=False):
        thread = threading.Thread(target=target, args=args, name=name, daemon=daemon)
        thread.start()
        return thread

    for name in ("horovod.runner.util", "horovod.runner.util.threads"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules["horovod.runner"].__path__ = []
    sys.modules["horovod.runner.util.threads"].in_thread = in_thread
    sys.modules.setdefault("mock", unittest.mock)


def run_inside(path: str, test: str, folder: Path) -> None:
    """Run one test on this rank and write its outcome to the folder."""
    make_modules()
    import pytest
    import torch

    if hasattr(torch.optim, "Muon"):
        # The tests try all optimizers of torch; this one refuses the biases of their nets, with every Horovod.
        torch.optim.Muon.__module__ = "hidden"
    reports = []

    class Plugin:
        def pytest_runtest_logreport(self, report):
            reports.append((report.outcome, _reason(report)))

        def pytest_collectreport(self, report):
            if report.failed:
                reports.append(("failed", _reason(report)))

    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(Path(path).parent), "--capture=no"]
    pytest.main([*options, f"{path}::{test}"], plugins=[Plugin()])
    outcome = next((each for each in reports if each[0] != "passed"), ("passed", "") if reports else ("failed", "none"))
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))
    (folder / f"{rank}.json").write_text(json.dumps(outcome))
    import horovod.torch as hvd

    hvd.shutdown()


def _reason(report) -> str:
    if report.skipped:
        return str(report.longrepr[-1]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr or "") if crash is None else crash.message


# --- outside ----------------------------------------------------------------------


def run_test(checkout: Path, file: str, test: str, ranks: int, log: Path) -> Result:
    """Run one test in a job."""
    begin = time.monotonic()
    environment = {**os.environ, "TORCHMPI_VERBOSE": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        inside = [str(Path(__file__).resolve()), "--inside", str(checkout / file), test, folder]
        command = [sys.executable, "-m", "torchmpi", "run", "-n", str(ranks), *inside]
        with log.open("a") as output:
            print(f"=== {test} on {ranks} ranks", file=output, flush=True)
            job = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                status = job.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
                status = None
        outcomes = [tuple(json.loads(each.read_text())) for each in sorted(Path(folder).glob("*.json"))]
    seconds = time.monotonic() - begin
    failed = next((each for each in outcomes if each[0] == "failed"), None)
    if failed is None and status is None:
        failed = "failed", f"did not end within {SECONDS} s"
    elif failed is None and (status or len(outcomes) < ranks):
        failed = "failed", f"the job ended with status {status}"
    outcome, reason = failed or next((each for each in outcomes if each[0] == "skipped"), ("passed", ""))
    return Result(file, test.rpartition("::")[2], ranks, outcome, reason.strip().split("\n")[0][:200], seconds)


def as_table(results: list[Result], software: str) -> str:
    """Return the page with the results."""
    lines = [
        "# Results of the test suite of Horovod",
        "",
        "Written by `python scripts/test_horovod.py CHECKOUT --write results/horovod-tests.md`, which runs the "
        "tests of a checkout of",
        "Horovod, unmodified, on [`torchmpi.horovod`](../docs/horovod.md), one job for each test.",
        software,
        "",
        "| file | ranks | passed | failed | skipped |",
        "|---|---|---|---|---|",
    ]
    for file, ranks in dict.fromkeys((each.file, each.ranks) for each in results):
        count = Counter(each.outcome for each in results if (each.file, each.ranks) == (file, ranks))
        lines.append(f"| `{file}` | {ranks} | {count['passed']} | {count['failed']} | {count['skipped']} |")
    for outcome, title in (("failed", "Failed"), ("skipped", "Skipped, by the tests themselves")):
        lines += ["", f"## {title}", "", "| test | ranks | reason |", "|---|---|---|"]
        found: dict[tuple[str, str], list[int]] = {}
        for each in results:
            if each.outcome == outcome:
                reason = EXPECTED.get(each.test, each.reason) if outcome == "failed" else each.reason
                found.setdefault((each.test, reason.replace("|", "/") or "unittest.skip"), []).append(each.ranks)
        lines += [f"| `{test}` | {', '.join(map(str, ranks))} | {reason} |" for (test, reason), ranks in found.items()]
    return "\n".join(lines) + "\n"


def software(checkout: Path) -> str:
    """Return the versions in a sentence."""
    import torch

    command = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True)
    commit = f" at commit {head.stdout.strip()}" if head.returncode == 0 else ""
    library = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"(Open MPI)\)? ([\d.]+)|Version: +(\S+)", library)
    mpi = "an MPI library" if found is None else f"Open MPI {found[2]}" if found[1] else f"MPICH {found[3]}"
    return f"Horovod{commit}, PyTorch {torch.__version__}, {mpi}, ranks on one host without a GPU."


def main() -> None:
    """Run the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of Horovod")
    parser.add_argument("-n", default="2,4", help="numbers of ranks (default: 2,4)")
    parser.add_argument("-k", default="", help="only tests whose name contains this")
    parser.add_argument("--file", default="", help="only files whose name contains this")
    parser.add_argument("--log", type=Path, default=Path("build/test/horovod.log"), help="the output of the jobs")
    parser.add_argument("--commit", default="", help="the commit, if the checkout has no .git")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    options.log.write_text("")
    results = []
    for file, fixed in FILES.items():
        for test in test_names(checkout / file) if options.file in file else ():
            for ranks in [fixed] if fixed else map(int, options.n.split(",")):
                if options.k in test:
                    results.append(run_test(checkout, file, test, ranks, options.log))
                    last = results[-1]
                    print(f"{last.outcome:8}{last.seconds:6.1f} s  n={ranks}  {last.test}  {last.reason}", flush=True)
    about = software(checkout)
    if options.commit:
        about = about.replace("Horovod", f"Horovod at commit {options.commit}", 1)
    table = as_table(results, about)
    if options.write:
        options.write.write_text(table)
    print(table)
    unexpected = [each for each in results if each.outcome == "failed" and each.test not in EXPECTED]
    sys.exit(1 if unexpected else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        run_inside(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        main()
