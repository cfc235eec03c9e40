"""To a reader of the measurement of slow links: in a small job all methods learn, and report what they sent."""

from __future__ import annotations

import json

import pytest
from helpers.launching import ROOT

pytestmark = pytest.mark.any_mpi

SCRIPT = ROOT / "benchmarks" / "slow_links.py"

pytest.importorskip("sklearn", reason="the script trains on the digits of scikit-learn: install the extra examples")


def test_all_methods_reach_the_target(launch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws the curves: install the extra examples")
    files = ["--json", tmp_path / "curves.json", "--plot", tmp_path / "curves.png"]
    options = ["--target", "0.3", "--steps", "160", "--period", "8", "--overlap", "4", "--seeds", "1"]
    result = launch(2, [SCRIPT, *options, *files])
    assert result.returncode == 0, result.output
    runs = json.loads((tmp_path / "curves.json").read_text())
    assert len(runs) == 12 and (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for run in runs:
        seconds = [point[0] for point in run["curve"]]
        assert run["curve"][-1][1] >= 0.3 and seconds == sorted(seconds), run
        # Overlapped outer steps are taken four steps after a period, all others at its end.
        assert run["num_steps"] % 8 == (4 if "overlapped" in run["method"] else 0), run
        assert f"{run['method']}  " in result.stdout
    # Gradients that are only scheduled differently give the same steps.
    assert len({run["num_steps"] for run in runs if "synchronize" in run["method"] or "async" in run["method"]}) == 1


def test_an_exchange_that_is_longer_than_the_period_is_refused(launch):
    result = launch(1, [SCRIPT, "--period", "4", "--overlap", "5"])
    assert result.returncode == 2 and "--overlap is at most --period" in result.stderr
