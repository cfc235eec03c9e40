"""PyTorch's distributed test suite over torchmpi, and the reports of its failures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import job_environment

SUITE = Path(__file__).resolve().parents[1] / "torch_suite"
LIMIT_SECONDS = 300

pytest.importorskip("expecttest", reason="PyTorch's tests import it: install the extra dev")

RunSuite = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_suite(mpirun: list[str], tmp_path: Path) -> RunSuite:
    """``run_suite(3, "-k", "test_get")``"""

    def run(n: int, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SUITE / "driver.py"), "--logs", str(tmp_path), *options]
        command += ["--job-limit", str(LIMIT_SECONDS), "--", *mpirun, "-n", str(n)]
        return subprocess.run(command, capture_output=True, text=True, env=job_environment({}), check=False)

    return run


def sums(result: subprocess.CompletedProcess[str]) -> list[int]:
    """Return the numbers of tests that passed, were skipped, are listed, failed."""
    return [int(word) for word in result.stdout.splitlines()[-1].partition("PyTorch")[2].split()[1:5]]


@pytest.mark.slow
def test_pytorchs_tests_pass(run_suite):
    """On four ranks, where the fewest tests are skipped; except one that compiles for half a minute."""
    result = run_suite(4, "--without", "test_ddp_compile_static_graph")
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr
    passed, _, listed, failed = sums(result)
    assert passed >= 200 and listed < 5 and failed == 0, result.stdout


@pytest.mark.slow
def test_a_test_that_hangs_is_a_failure_and_the_rest_still_runs(run_suite):
    """The test waits five seconds for a missing rank, with a limit of two seconds."""
    result = run_suite(3, "--limit", "2", "-k", "test_barrier_timeout_group", "-k", "test_get_rank_size")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "== test_barrier_timeout_group failed: the job hung or died" in result.stdout
    for rank in range(3):
        assert f"--- stacks-rank{rank}.txt" in result.stdout, result.stdout
    assert "in test_barrier_timeout_group" in result.stdout  # of a stack
    assert sums(result) == [2, 0, 0, 1]


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
