"""To a user of torch.distributed: PyTorch's own tests pass over torchmpi, and unexpected results are reported."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from helpers.launching import job_environment

pytestmark = pytest.mark.any_mpi

SUITE = Path(__file__).resolve().parents[1] / "torch_suite"
LIMIT_SECONDS = 300  # scripts/test_cpu.sh sets the timeout of pytest to 600

pytest.importorskip("expecttest", reason="PyTorch's tests import it: install the extra dev")


COMPILES = ("test_ddp_compile_static_graph",)
"""Compiles for half a minute."""
MORE_OF_THE_SAME = (
    # Training of networks over calls that other tests make too; several forms of each call and of each group.
    "SyncBatchNorm_", "model_averager", "post_localSGD", "mixed_precision", "profil", "apply_optim", "hook_parity",
    "join_model", "uneven_input", "unused_params", "full_group", "grad_is_view", "static_graph",
)  # fmt: skip
"""In the names of tests that are run before a release only."""


@pytest.mark.slow
def test_pytorchs_tests_pass(mpirun, warm_python, tmp_path):
    """On four ranks, where the fewest tests are skipped. Two thirds of them; before a release all."""
    is_complete = bool(os.environ.get("TORCHMPI_TEST_COMPLETE"))
    command = [*warm_python, str(SUITE / "driver.py"), "--logs", str(tmp_path), "--job-limit", str(LIMIT_SECONDS)]
    for name in COMPILES if is_complete else (*COMPILES, *MORE_OF_THE_SAME):
        command += ["--without", name]
    command += ["--", *mpirun, "-n", "4"]
    result = subprocess.run(command, capture_output=True, text=True, env=job_environment({}), check=False)
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr
    passed, _, listed, failed = map(int, result.stdout.splitlines()[-1].partition("PyTorch")[2].split()[1:5])
    assert passed >= (200 if is_complete else 140) and listed < 5 and failed == 0, result.stdout


def test_unexpected_results_are_problems(monkeypatch):
    monkeypatch.syspath_prepend(str(SUITE))
    from driver import Outcome, judge

    good = [Outcome("test_a", "passed"), Outcome("test_b", "skipped", "no GPU"), Outcome("test_c", "failed", "why")]
    assert judge(good, {"test_c": "known"}, is_whole=True) == []
    assert judge(good, {}, is_whole=True) == ["test_c failed: why"]
    assert judge(good, {"test_c": "known", "test_a": "old"}, is_whole=True) == [
        "test_a passed, but is in listed.py: old"
    ]
    unknown = {"test_c": "known", "test_d": "gone"}
    assert judge(good, unknown, is_whole=True) == ["test_d is in listed.py, but PyTorch has no such test"]
    assert judge(good, unknown, is_whole=False) == []  # the test may not be selected
    assert judge(good[1:], {"test_c": "known"}, is_whole=True) == ["not a single test has passed"]


BEGUN, PASSED, FAILED = {"begun": "test_a"}, {"ended": "test_a", "status": "passed", "reason": ""}, "failed"


@pytest.mark.parametrize(
    ("events", "status", "expected", "complete"),
    [
        ([], 1, [("(start)", FAILED)], False),
        ([BEGUN], 142, [("test_a", FAILED)], False),
        ([BEGUN, PASSED | {"status": FAILED}], 3, [("test_a", FAILED)], False),
        ([BEGUN, PASSED], 9, [("test_a", "passed"), ("(after test_a)", FAILED)], False),
        ([BEGUN, PASSED, {"complete": True}], 0, [("test_a", "passed")], True),
        ([BEGUN, PASSED, {"complete": True}], 9, [("test_a", "passed"), ("(after test_a)", FAILED)], True),
    ],
    ids=["no start", "died in a test", "failed", "died after it", "good", "died at the end"],
)
def test_leftovers_of_a_job(monkeypatch, tmp_path, events, status, expected, complete):
    monkeypatch.syspath_prepend(str(SUITE))
    from driver import read

    (tmp_path / "output.txt").write_text("last words\n")
    outcomes, is_complete = read(events, status, tmp_path)
    assert [(outcome.name, outcome.status) for outcome in outcomes] == expected and is_complete == complete
    hung = [outcome for outcome in outcomes if "hung or died" in outcome.reason]
    assert all("last words" in outcome.reason for outcome in hung) and len(hung) == (status in (1, 9, 142))
