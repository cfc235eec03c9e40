"""To a reader of docs/extending.md: its changes, applied to a copy of the package, do what the page says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.launching import ROOT
from test_docs import DRIVER, Block, blocks_of, untested_reason

from torchmpi.shared_memory import kernels
from torchmpi.shared_memory.compiler import native_code

PAGE = ROOT / "docs" / "extending.md"


def changes() -> list[Block]:
    return [block for block in blocks_of(PAGE) if block.language == "diff"]


def programs() -> list[Block]:
    """The programs that need the changes; tests/jobs/test_docs.py runs the others."""
    return [block for block in blocks_of(PAGE) if block.language == "python" and untested_reason(block)]


def apply(change: Block, folder: Path) -> None:
    """Replace the unmarked and removed lines, which must occur once, by the unmarked and added ones."""
    first, *lines = change.code.splitlines()
    path = folder / first.removeprefix("+++ ")
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", mark)) for mark in ("-", "+"))
    text = path.read_text() if old else ""
    assert not old or text.count(old) == 1, f"{change}: {path.name} has not these lines once:\n{old}"
    path.write_text(text.replace(old, new) if old else new)


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "torchmpi", folder / "torchmpi")
    for change in changes():
        apply(change, folder)
    yield folder


def test_the_page_has_examples():
    assert len(changes()) == 10 and len(programs()) == 4


@pytest.mark.any_mpi
def test_programs_run_on_the_extended_package(launch, extended, monkeypatch):
    """One job for all of them. It compiles what the changes concern, and loads the kernels of the unchanged package."""
    kernels.load()
    for folder in filter(Path.exists, native_code.cache_folders()):
        only = [path.name for path in folder.iterdir() if not path.name.startswith("torchmpi_")]
        shutil.copytree(folder, extended / "cache", ignore=lambda *_: only, dirs_exist_ok=True)  # noqa: B023
    script, data = extended / "driver.py", extended / "blocks.json"
    script.write_text(DRIVER)
    data.write_text(json.dumps([{"page": str(each.page), "line": each.line, "code": each.code} for each in programs()]))
    monkeypatch.setenv("TORCHMPI_TEST_COLD", "1")  # forks of a process would have the package without the changes
    environment = {"PYTHONPATH": str(extended), "NUMBA_CACHE_DIR": str(extended / "cache")}
    result = launch(2, [script, data], timeout=300, env=environment)
    assert result.returncode == 0, result.output
    assert result.stdout.count("ran ") == 2 * len(programs()), result.output
