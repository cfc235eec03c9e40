"""To whoever sees a test fail: its report has the command that repeats the case, and what the case depends on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

from helpers import failures
from helpers.launching import ROOT, is_open_mpi, job_environment, launcher, search_path

PROGRAM = """
import random

import pytest


@pytest.mark.parametrize("kind", ["a b", "c"])
def test_of_numbers(kind):
    assert (kind, random.random()) == 0
"""
CONFTEST = """
from mpi4py import MPI


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker("n2")
"""


def failed(command: str, folder: Path) -> str:
    """The output of pytest with the hooks of tests/conftest.py, which must fail."""
    environment = job_environment(search_path())
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests'}"
    environment |= {"PYTEST_ADDOPTS": "-p helpers.failures --color=no -q", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode != 0, done.stdout
    return done.stdout


def lines_of(output: str, name: str) -> list[str]:
    return re.findall(rf"^{name}: +(.*)$", output, re.MULTILINE)


def test_a_test_of_ranks_is_repeated_by_ranks_of_the_same_mpi(tmp_path):
    is_open = is_open_mpi(launcher())
    (tmp_path / "tests/mpi").mkdir(parents=True)
    (tmp_path / "tests/mpi/test_numbers.py").write_text(PROGRAM)
    (tmp_path / "tests/mpi/conftest.py").write_text(CONFTEST)
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\nmarkers =\n    n2: on two ranks\n")
    options = "--oversubscribe -n 2" if is_open else "-n 2"
    expected = (
        f"mpirun {options} python -m pytest --with-mpi -p no:cacheprovider -m n2 "
        "'tests/mpi/test_numbers.py::test_of_numbers[c]'"
    )
    command = f"mpirun {options} python -m pytest --with-mpi -p no:cacheprovider tests/mpi"
    numbers = []
    for _ in range(2):
        output = failed(command, tmp_path)
        numbers.append(set(re.findall(r"(?m)^E +.*assert \('c', ([\d.]+)\) ==", output)))
        command = lines_of(output, "to repeat")[-1]
        assert command == expected
        assert set(lines_of(output, "ranks")) == {"2"} and set(lines_of(output, "seed")) == {"1 (Python)"}
        assert all(("Open MPI" in version) == is_open for version in lines_of(output, "MPI"))
    assert len(numbers[0]) == 1 and numbers[0] == numbers[1], "the seed is that of the first time"


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


def test_a_test_on_hosts_is_repeated_by_the_script_that_makes_them(monkeypatch):
    """Regression: the report named one rank without MPI, and a command that skips the test."""
    monkeypatch.setattr(failures, "jobs", [["mpirun", "--host", "h0:2,h1:2", "-n", "4", "program.py"]])
    item = SimpleNamespace(path=ROOT / "tests/hosts/test_links.py", nodeid="test_cut[both]", originalname="test_cut")
    item.name = item.nodeid
    text, name = failures.how_to_repeat(item), "openmpi" if is_open_mpi(launcher()) else "mpich"
    assert lines_of(text, "job") == ["mpirun --host h0:2,h1:2 -n 4 program.py"] and lines_of(text, "ranks") == []
    assert lines_of(text, "to repeat") == [f"scripts/test_hosts.sh --faults --mpi {name} -k test_cut"]
