"""To whoever reports a defect: ``torchmpi --version`` names the commit, and versions that do not fit are refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import mpi4py
import pytest

from torchmpi import _version
from torchmpi.errors import LaunchError
from torchmpi.launch import mpi_library


def copy_of_module(folder: Path):
    """Return a copy of the module in a folder of its own, as in an installation."""
    target = folder / "torchmpi"
    target.mkdir()
    shutil.copy(_version.__file__, target / "_version.py")
    names: dict[str, object] = {"__file__": str(target / "_version.py")}
    exec((target / "_version.py").read_text(), names)
    return names["commit"], target


def test_nothing_is_known_outside_a_checkout(tmp_path):
    commit, _ = copy_of_module(tmp_path)
    assert commit() == ""


def test_the_commit_of_a_checkout(tmp_path):
    commit, package = copy_of_module(tmp_path)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    head = git("rev-parse", "--short=12", "HEAD")
    assert commit() == head
    (package / "_version.py").write_text("# changed\n")
    assert commit() == f"{head}-dirty"


def test_the_commit_that_was_built_in_comes_first(tmp_path):
    commit, package = copy_of_module(tmp_path)
    (package / "_commit.txt").write_text("0123456789ab\n")
    assert commit() == "0123456789ab"


def test_mpi4py_3_is_refused_with_the_reason(monkeypatch):
    mpi_library.load()
    monkeypatch.setattr(mpi4py, "__version__", "3.1.6")
    with pytest.raises(LaunchError, match=r"mpi4py 3\.1\.6 is too old: before 4\.0.*pip install 'mpi4py>=4\.0'"):
        mpi_library.load()
