"""The comparison of asynchronous methods as a program: errors, and consistent output files."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import ROOT, WITHOUT_MATPLOTLIB

EXAMPLES = ROOT / "examples" / "async_sgd"
COMPARE = EXAMPLES / "compare.py"
METHODS = ("allreduce", "easgd")
pytestmark = pytest.mark.any_mpi

pytest.importorskip("sklearn", reason="the examples train on the digits of scikit-learn: install the extra examples")


class Outcome(NamedTuple):
    """The output of a comparison."""

    folder: Path
    stdout: str
    runs: list[dict[str, Any]]
    table: list[dict[str, str]]


@pytest.fixture
def compare(launch, tmp_path):
    """``compare("--quick")`` runs on two ranks and reads its output; plots take some seconds."""
    without_plots = tmp_path / "without_plots.py"
    without_plots.write_text(WITHOUT_MATPLOTLIB)

    def run(*options: str | Path, plots: bool = False) -> Outcome:
        folder = tmp_path / "results"
        program = [COMPARE] if plots else [without_plots, COMPARE]
        result = launch(2, [*program, "--out", folder, *options], timeout=120)
        assert result.returncode == 0, result.output
        with (folder / "table.csv").open(newline="") as file:
            table = list(csv.DictReader(file))
        return Outcome(folder, result.stdout, json.loads((folder / "runs.json").read_text()), table)

    return run


def test_quick(compare, digits):
    """Two methods learn from equally many samples; table, curves and progress are consistent."""
    outcome = compare("--quick", "--methods", *METHODS, "--data", digits)
    expected = [("allreduce", 0), ("easgd", 4), ("easgd", 16)]
    assert [(run["method"], run["period"]) for run in outcome.runs] == expected
    assert [(row["method"], int(row["period"])) for row in outcome.table] == expected

    ends = [run["curve"][-1] for run in outcome.runs]
    assert all(end["error"] < 0.1 for end in ends), ends
    assert len({end["samples"] for end in ends}) == 1
    for run in outcome.runs:
        for name in ("samples", "seconds", "megabytes"):
            values = [point[name] for point in run["curve"]]
            assert values == sorted(values) and values[0] < values[-1], (run["method"], name)
    # A period of 4 takes a quarter of what each step takes, a period of 16 a quarter of that.
    per_step, per_4, per_16 = (end["megabytes"] for end in ends)
    assert per_step == pytest.approx(4 * per_4, rel=0.1) and per_4 == pytest.approx(4 * per_16, rel=0.1)

    cells = [line.strip("| ").split(" | ") for line in (outcome.folder / "table.md").read_text().splitlines()[2:]]
    for row, cell, end in zip(outcome.table, cells, ends, strict=True):
        assert float(row["error"]) == pytest.approx(end["error"])  # of one seed
        assert float(row["megabytes"]) == pytest.approx(end["megabytes"])
        assert cell[0] == row["method"] and cell[3] == f"{100 * end['error']:.2f}"
    for number, (end, (method, _)) in enumerate(zip(ends, expected, strict=True), 1):
        assert re.search(rf"^ *{number}/3 +{method} .*error {100 * end['error']:5.2f} %", outcome.stdout, re.M)


def test_plots(compare, digits):
    pytest.importorskip("matplotlib", reason="matplotlib draws the curves: install the extra examples")
    options = ("--periods", "4", "8", "--seeds", "1", "2", "--epochs", "1", "--slow", "0.5", "--data", digits)
    outcome = compare("--methods", "sequential", "diloco", *options, plots=True)
    assert "rank 1 sleeps 0.5 ms after each step" in outcome.stdout.splitlines()
    for name in ("samples", "seconds", "megabytes", "summary"):
        assert (outcome.folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert [row["method"] for row in outcome.table] == ["sequential", "diloco", "diloco"]
    for row in outcome.table:
        errors = [
            run["curve"][-1]["error"]
            for run in outcome.runs
            if (run["method"], run["period"]) == (row["method"], int(row["period"]))
        ]
        assert len(errors) == 2
        assert float(row["error"]) == pytest.approx(sum(errors) / 2)
        assert (float(row["lowest"]), float(row["highest"])) == (min(errors), max(errors))


def test_tuning_selects_the_better_rate(compare, digits):
    """A rate that is too small is not selected, and the test images are not used."""
    options = ["--tune", "--methods", "localsgd", "--periods", "4", "--seeds", "1", "--epochs", "4", "--data", digits]
    outcome = compare(*options, "--lr", "1e-5", "0.2")
    assert "no plots: matplotlib is not installed" in outcome.stdout
    assert "localsgd: {4: 0.2}" in outcome.stdout.splitlines()
    assert "the last 288 training images are for validation" in outcome.stdout


def test_unknown_method_is_rejected(launch):
    result = launch(1, [COMPARE, "--methods", "magic"])
    assert result.returncode == 2 and "invalid choice: 'magic'" in result.stderr
