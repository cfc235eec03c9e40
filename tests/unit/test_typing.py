"""A type checker finds typical mistakes, and none in correct programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

PROGRAMS = Path(__file__).parent / "typing_programs"
FEWEST_FOUND = 35 / 40


@pytest.fixture(scope="module")
def found() -> dict[str, dict[int, str]]:
    """The errors of mypy, by file and line."""
    errors: dict[str, dict[int, str]] = {"correct.py": {}, "mistakes.py": {}}
    output, problems, status = api.run(["--strict", "--no-error-summary", *map(str, sorted(PROGRAMS.glob("*.py")))])
    assert status == 1 and not problems, problems
    for name, line, message in re.findall(r"(\w+\.py):(\d+): error: (.*)", output):
        errors[name][int(line)] = message
    return errors


@pytest.mark.slow
def test_correct_programs_have_no_errors(found):
    assert found["correct.py"] == {}


@pytest.mark.slow
def test_most_mistakes_are_found_and_nothing_else(found):
    lines = enumerate((PROGRAMS / "mistakes.py").read_text().splitlines(), 1)
    mistakes = {number: line for number, line in lines if line.endswith("# mistake")}
    assert len(mistakes) >= 50
    assert set(found["mistakes.py"]) <= set(mistakes), "errors on lines that are not marked"
    missed = [line for number, line in mistakes.items() if number not in found["mistakes.py"]]
    assert len(missed) <= (1 - FEWEST_FOUND) * len(mistakes), missed
