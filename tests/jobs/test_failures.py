"""To whoever sees a test fail: its report has the command that repeats the case, and what the case depends on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, is_open_mpi, job_environment, launcher, search_path
from helpers import failures

PROGRAM = """
import random

import pytest


@pytest.mark.parametrize("kind", ["a b", "c"])
def test_of_numbers(kind):
    assert (kind, random.random()) == ("a b", 0)
"""
CONFTEST = """
from mpi4py import MPI


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker("n2")
"""
NUMBERS = r"(?m)^E +.*assert \('(.*?)', ([\d.]+)\) =="
"""In the report only: where CI is set, pytest's summary has the whole line again."""


def failed(command: str, folder: Path, **settings: str) -> str:
    """The output of pytest with the hooks of tests/conftest.py, which must fail."""
    environment = job_environment(search_path() | settings)
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests'}"
    environment |= {"PYTEST_ADDOPTS": "-p helpers.failures --color=no -q", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode != 0, done.stdout
    return done.stdout


def lines_of(output: str, name: str) -> list[str]:
    return re.findall(rf"^{name}: +(.*)$", output, re.MULTILINE)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a test that fails in each folder of tests."""
    for folder in ("unit", "jobs", "mpi"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / "test_numbers.py").write_text(PROGRAM)
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\nmarkers =\n    n2: on two ranks\n")
    return tmp_path


@pytest.mark.any_mpi
def test_a_test_of_one_process_fails_with_the_same_numbers_when_it_is_repeated(checkout):
    first = failed("python -m pytest tests/unit", checkout, TORCHMPI_TEST_SEED="23")
    assert lines_of(first, "ranks") == ["1, without MPI"] * 2
    assert lines_of(first, "seed") == ["23 (Python)"] * 2
    one, other = lines_of(first, "to repeat")
    assert one == "TORCHMPI_TEST_SEED=23 python -m pytest 'tests/unit/test_numbers.py::test_of_numbers[a b]'"
    numbers = re.findall(NUMBERS, first)
    for command, expected in zip((one, other), numbers, strict=True):
        repeated = failed(command, checkout)
        assert re.findall(NUMBERS, repeated) == [expected]


def test_a_test_of_ranks_is_repeated_by_ranks_of_the_same_mpi(checkout):
    is_open = is_open_mpi(launcher())
    (checkout / "tests/mpi/conftest.py").write_text(CONFTEST)
    options = "--oversubscribe -n 2" if is_open else "-n 2"
    expected = (
        f"mpirun {options} python -m pytest --with-mpi -p no:cacheprovider -m n2 "
        "'tests/mpi/test_numbers.py::test_of_numbers[c]'"
    )
    command = f"mpirun {options} python -m pytest --with-mpi -p no:cacheprovider tests/mpi"
    for _ in range(2):
        output = failed(command, checkout)
        command = lines_of(output, "to repeat")[-1]
        assert command == expected
        assert set(lines_of(output, "ranks")) == {"2"} and set(lines_of(output, "seed")) == {"1 (Python)"}
        assert all(("Open MPI" in version) == is_open for version in lines_of(output, "MPI"))


def test_a_test_that_launches_jobs_names_them(mpirun, job, request, monkeypatch):
    monkeypatch.setattr(failures, "SETTINGS", {"TORCHMPI_LOG": "a b"})
    assert job(2, "print(1)").returncode == 0
    text = failures.how_to_repeat(request.node)
    (started,) = lines_of(text, "job")
    assert started.startswith(" ".join([*mpirun, "-n", "2", "python"])) and started.endswith("job.py")
    assert ("Open MPI" in lines_of(text, "MPI")[0]) == is_open_mpi(launcher())
    (command,) = lines_of(text, "to repeat")
    assert command == f"TORCHMPI_LOG='a b' python -m pytest {request.node.nodeid}"
    assert shutil.which("python") is not None and lines_of(text, "seed") == []
