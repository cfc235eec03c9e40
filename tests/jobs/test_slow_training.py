"""To whoever asks why training is slow: the report on a timeline names the fault that a script has planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmpi.timeline.step_report import StepReport
from torchmpi.timeline.trace_reader import read_folder

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "slow_training.py"


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("fault", "num_ranks", "words"),
    [
        ("late", 2, "Rank 1 on host "),
        ("buckets", 2, "Each step makes 16 calls of 32.2 KB at "),
        ("flat", 3, "Calls over several hosts run flat (backend mpi)"),
    ],
)
def test_the_report_names_the_planted_fault(launch, tmp_path, fault, num_ranks, words):
    settings = {"TORCHMPI_HIERARCHICAL": "off"} if fault == "flat" else {}
    environment = {"TORCHMPI_TIMELINE": str(tmp_path), **settings}
    result = launch(num_ranks, [SCRIPT, "--rank-of", fault, "--steps", "13"], env=environment)
    assert result.returncode == 0, result.output
    report = StepReport.of(read_folder(tmp_path))
    assert report.num_steps == 12
    assert words in report.advice(), report.text()
    assert ("calls over several hosts" in report.advice().lower()) == (fault == "flat")
    assert ("the buckets are too small" in report.advice()) == (fault == "buckets")
