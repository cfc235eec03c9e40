"""To who adds a test: scripts/repeated_tests.py finds copies, and tests/ has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import repeated_tests

TESTS = Path(__file__).resolve().parents[1]
FIRST = """
def test_sum(agree):
    \"\"\"Of three ones.\"\"\"
    values = [one for one in range(3)]
    agree.equal(mpi.allreduce(sum(values)), 3 * mpi.size(), "sum")
"""


@pytest.mark.parametrize(
    ("second", "is_copy"),
    [
        (FIRST, True),
        (
            FIRST.replace("test_sum", "test_total").replace("3", "4").replace("one", "each").replace("agree", "says"),
            True,
        ),
        (FIRST.replace("sum(", "max("), False),
        (FIRST.replace(".equal", ".close"), False),
        (FIRST.replace("3 * mpi.size()", "mpi.size() * 3"), False),
    ],
)
def test_copies_differ_in_numbers_texts_and_local_names_only(tmp_path, monkeypatch, second, is_copy):
    monkeypatch.setattr(repeated_tests, "ROOT", tmp_path)
    (tmp_path / "test_a.py").write_text(FIRST)
    (tmp_path / "test_b.py").write_text(f"class TestB:\n{second.replace(chr(10), chr(10) + '    ')}")
    paths = [tmp_path / "test_a.py", tmp_path / "test_b.py"]
    found = repeated_tests.copies(paths, 10)
    assert [[each.path for each in group] for group in found] == ([paths] if is_copy else [])
    assert repeated_tests.copies(paths, 1000) == []


@pytest.mark.slow
def test_no_function_of_tests_is_a_copy():
    found = repeated_tests.copies(sorted(TESTS.rglob("*.py")), 30)
    assert found == [], "\n".join(" = ".join(map(str, group)) for group in found)
