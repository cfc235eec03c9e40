"""To a user of experiment files: errors have file and line; interrupted runs, simulated or on ranks, continue."""

from __future__ import annotations

import csv
import re

import pytest
from helpers.launching import ROOT, job_environment

pytest.importorskip("tomllib", reason="experiments are TOML files, which Python reads from 3.11 on")
from examples.async_sgd.__main__ import main
from examples.async_sgd.experiment import Experiment, ExperimentError
from examples.async_sgd.results import lines_of

FILES = sorted((ROOT / "examples" / "async_sgd").rglob("*.toml"))
SERIES = '[[series]]\nlabel = "a"\n'
HEAD = 'finding = "x"\nseeds = [1]\n'
ASGD = HEAD + "[settings]\nworkers = 2\n" + SERIES + 'algorithm = "ASGD"\n'
BAD = {
    "no TOML": (HEAD + "[settings\n", "no TOML: .* line 3, column 10"),
    "no seeds": ('finding = "x"\nseeds = []\n' + SERIES, "line 2: seeds: expected a list of whole numbers"),
    "no finding": ("seeds = [1]\n" + SERIES, "line 1: finding: expected a text"),
    "no series": (HEAD, r"no \[\[series\]\]: expected at least one"),
    "an unknown table": (HEAD + "[setings]\nworkers = 2\n", "line 3: unknown 'setings': expected finding, grid"),
    "series as a number": (HEAD + "series = 3\n", r"line 3: series: write it as \[\[series\]\]"),
    "an unknown setting": (
        ASGD.replace("= 2\n", "= 2\nsampels = 3\n"),
        "line 5: unknown 'sampels': ASGD .* have workers",
    ),
    "an unknown algorithm": (
        ASGD + SERIES + 'algorithm = "ASDG"\n',
        "line 10: algorithm='ASDG': expected FILE.py:CLASS",
    ),
    "another file's class": (ASGD.replace('"ASGD"', '"own.py:Mine"'), "line 7: algorithm='own.py:Mine': there is no"),
    "an option of the wrong type": (ASGD + 'update_frequency = "now"\n', "line 7: ASGD: .*update_frequency='now'"),
    "a setting of the wrong type": (ASGD + 'batch = "many"\n', "line 8: batch='many': expected images per step"),
    "a value out of range": (ASGD + "lr = -1\n", "line 8: lr=-1: expected a rate of more than 0"),
    "lists of several lengths": (ASGD + "lr = [1, 2]\nbatch = [1]\n", "line 8: the lists of a series go together"),
    "a grid without a list": (ASGD + "[grid]\nlr = 0.1\n", "line 9: lr: expected a list of values"),
    "workers and ranks": (ASGD + "ranks = 2\n", "line 4: expected either workers = N, which are simulated, or ranks"),
    "collectives in a simulation": (ASGD.replace("ASGD", "LocalSGD"), "line 7: LocalSGD is not simulated"),
    "a missing record": (ASGD + 'compute = "run.npz"\n', "line 8: compute: .*run.npz: No such file .* Give"),
    "another file as a record": (ASGD + 'compute = "bad.toml"\n', "line 8: compute: .*bad.toml: .* no .npz file"),
    "a column that is not measured": (ASGD + '[plot]\ny = "los"\n', "line 9: y: 'los' is no number that all runs have"),
}
pytestmark = pytest.mark.any_mpi


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused(tmp_path, name):
    text, message = BAD[name]
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ExperimentError, match=f"(?s)^{re.escape(str(path))}.*{message}"):
        Experiment(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_experiment_of_the_documentation_is_valid_and_has_its_section(path):
    experiment = Experiment(path)
    assert len(experiment.seeds) >= 3
    pages = [(ROOT / "docs" / name).read_text() for name in ("findings.md", "async-sgd.md")]
    assert any(f"python -m examples.async_sgd {path.relative_to(ROOT)}" in page for page in pages)
    assert path.parent.name != "findings" or f"## {experiment.finding}\n" in pages[0]


def test_curves_of_different_settings_are_different_lines():
    experiment = Experiment(ROOT / "examples" / "async_sgd" / "comparison.toml")
    rows = {run.key: [{"megabytes": each, "error": 1.0} for each in (1, 2)] for run in experiment.runs}
    lines = lines_of(experiment, rows, "error")
    assert len(lines) == len(experiment.runs) / len(experiment.seeds)
    assert all(points == [(1, [1.0] * 3), (2, [1.0] * 3)] for _, points in lines)
    of_findings = Experiment(ROOT / "examples" / "async_sgd" / "findings" / "ssp.toml")
    rows = {run.key: [{"loss": 1.0}] for run in of_findings.runs}
    (line,) = lines_of(of_findings, rows, "loss")
    assert line[0] == "SSP" and [x for x, _ in line[1]] == [0, 1, 3, 8]


def rows_of(folder):
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_an_experiment_is_continued_where_it_stopped(tmp_path, capsys, digits):
    """The run that is made again after a loss of its rows has the same bits; an algorithm may be in a file."""
    path, folder = tmp_path / "run.toml", tmp_path / "results"
    (tmp_path / "own.py").write_text(
        "import torchmpi.parameterserver as ps\nclass Half(ps.ASGDUpdate):\n"
        "    def rule(self):\n        return ps.scaled_add(-self.at(self.lr) / 2)\n"
    )
    own = SERIES.replace('"a"', '"own"') + 'algorithm = "own.py:Half"\n'
    settings = f'steps = 8\npoints = 2\nlr = 0.2\ndata = "{digits}"\n[grid]\nworkers = [1, 3]\n'
    path.write_text(ASGD.replace("workers = 2\n", settings) + own + '[plot]\nx = "workers"\n')
    assert main([str(path), "--out", str(folder)]) == 0
    assert "4 runs, of which 4 are to do" in capsys.readouterr().out
    first = rows_of(folder)
    assert [(row["label"], row["workers"], row["samples"]) for row in first] == [
        (label, str(workers), str(float(16 * workers * steps)))
        for label in ("a", "own") for workers in (1, 3) for steps in (4, 8)
    ]  # fmt: skip
    assert all(0 < float(row["error"]) < 1 and 0.05 < float(row["seconds"]) < 0.5 for row in first)
    assert [float(row["mean_staleness"]) > 1 for row in first] == [False, False, True, True] * 2
    losses = {(row["label"], row["workers"]): float(row["loss"]) for row in first}  # the last ones
    assert losses["a", "3"] < losses["own", "3"], "the half rate learns less"

    lines = (folder / "results.csv").read_text().splitlines(keepends=True)
    (folder / "results.csv").write_text("".join(lines[:3] + lines[5:]))  # without the second run
    assert main([str(path), "--out", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "4 runs, of which 1 are to do" in output and "| own | 3 | " in output
    assert sorted(map(str, rows_of(folder))) == sorted(map(str, first))

    (folder / "results.csv").write_text("".join([*lines[:4], lines[4].replace(",", ";", 5)]))
    assert main([str(path), "--out", str(folder)]) == 2
    assert "results.csv, line 5: no row of results" in capsys.readouterr().err


def test_runs_on_ranks(tmp_path, capsys, digits, monkeypatch):
    """The program starts a job of its own; algorithms of collectives run there too."""
    path = tmp_path / "run.toml"
    settings = f'ranks = 2\nsteps = 8\npoints = 1\nupdate_frequency = 2\ndata = "{digits}"\n'
    path.write_text(ASGD.replace("workers = 2\n", settings) + SERIES.replace('"a"', '"b"') + 'algorithm = "LocalSGD"\n')
    for name, value in job_environment({}).items():
        monkeypatch.setenv(name, value)
    assert main([str(path), "--out", str(tmp_path)]) == 0, capsys.readouterr()
    rows = rows_of(tmp_path)
    assert [(row["label"], row["samples"]) for row in rows] == [("a", "256.0"), ("b", "256.0")]
    assert all(float(row["seconds"]) > 0 and float(row["megabytes"]) > 0 for row in rows)
