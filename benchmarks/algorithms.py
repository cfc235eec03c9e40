"""Show each algorithm of asynchronous SGD: the test of its formula, and runs on ranks and on simulated workers.

    python benchmarks/algorithms.py results/algorithms-2026-11-30.md

Writes the table. The runs are those of `examples/async_sgd/algorithms.toml`, which are not repeated; the tests compare
each algorithm with a sequential twin, on 3 ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from experiment_tables import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from examples.async_sgd import __main__ as command  # noqa: E402
from examples.async_sgd.experiment import Experiment, Run  # noqa: E402
from examples.async_sgd.results import interval, read_table  # noqa: E402

EXPERIMENT = ROOT / "examples" / "async_sgd" / "algorithms.toml"
FORMULAS = {
    "ASGD": "test_asgd",
    "SSP": "test_ssp_keeps_its_bound",
    "staleness-aware": "test_staleness_aware_rates",
    "DC-ASGD": "test_delay_compensation",
    "gap-aware": "test_gap_aware",
    "Downpour": "test_downpour_loses_no_gradient",
    "EASGD": "test_easgd_against_a_reference",
    "EAMSGD": "test_eamsgd_is_equation_5",
    "asynchronous DiLoCo": "test_asynchronous_diloco",
    "FedBuff": "test_fedbuff",
    "SGP": "test_stochastic_gradient_push",
    "AD-PSGD": "test_asynchronous_decentralized_sgd",
}
"""The test of each series."""
_FILES = ("test_algorithms.py", "test_parameterserver_updates.py")
_TESTS = """
import sys, pytest
from torchmpi.launch import launcher
report, *arguments = sys.argv[1:]
sys.exit(pytest.main(arguments + [f"--junitxml={report}"] * (launcher.detect().rank == 0)))
"""
_INTRODUCTION = """\
# Algorithms of asynchronous SGD

{machine}

The tests compare an algorithm with a sequential twin, step by step, on 3 ranks of a job; the number is that of the
cases that have passed. Runs train a network of 2,410 parameters on images of digits, of which all workers together take
{samples:,}: on 4 ranks, and on 64 workers in simulated time, with rates of their own (`{experiment}`). Loss and error
are those of the test images, means of {seeds} seeds with the range in brackets; staleness is the mean.

| algorithm | test of the formula | on | lr | loss | error | staleness | seconds |
|---|---|---|---|---|---|---|---|
"""


def passed_cases() -> Counter[str]:
    """Run the tests on 3 ranks; return how many cases of each have passed, or raise."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        chosen = " or ".join(FORMULAS.values())
        options = ["--with-mpi", "-p", "no:cacheprovider", "-q", "--capture=sys", "-m", "n3", "-k", chosen]
        files = [str(ROOT / "tests" / "mpi" / name) for name in _FILES]
        program = Path(folder, "tests.py")
        program.write_text(_TESTS)
        run = [sys.executable, "-m", "torchmpi", "run", "-n", "3", str(program), str(report), *options, *files]
        subprocess.run(run, check=True, cwd=ROOT, stdout=sys.stderr)
        cases = [case for case in ET.parse(report).iter("testcase") if not len(case)]
        return Counter(case.attrib["name"].partition("[")[0] for case in cases)


def main() -> int:
    """Run the tests and the experiment, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the page")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    passed = passed_cases()
    status: int = command.main([str(EXPERIMENT)])
    if status:
        return status
    experiment = Experiment(EXPERIMENT)
    rows = read_table(Path("results/async_sgd", EXPERIMENT.stem, "results.csv"))
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in experiment.runs:
        groups.setdefault((run.label, str(run.varied)), []).append(run)
    text = _INTRODUCTION.format(
        machine=machine(load), samples=experiment.runs[0].settings["samples"], seeds=len(experiment.seeds),
        experiment=EXPERIMENT.relative_to(ROOT),
    )  # fmt: skip
    for (label, _), runs in groups.items():
        ends = [rows[run.key][-1] for run in runs]
        name, settings = FORMULAS[label], runs[0].settings
        cells = [interval([end[column] for end in ends]) for column in ("loss", "error", "mean_staleness", "seconds")]
        where = f"{settings['ranks']} ranks" if settings["ranks"] else f"{settings['workers']} simulated"
        test = f"`{name}`, {passed[name]}" if settings["ranks"] else ""
        text += f"| {label if test else ''} | {test} | {where} | {settings['lr']} | {' | '.join(cells)} |\n"
    options.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
