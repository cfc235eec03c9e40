"""To whoever opens a damaged file: no reader hangs or crashes; ``tests/fuzz_inputs.py`` tries any number of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "fuzz_inputs.py"
import fuzz_inputs  # noqa: E402
from fuzz_inputs import Fuzzer, Target, is_equal  # noqa: E402


@pytest.mark.slow
def test_damaged_inputs_are_read_as_written_or_refused():
    """Fifty of each reader; before a release, and by ``tests/fuzz_inputs.py``, more."""
    cases = 2000 if os.environ.get("TORCHMPI_TEST_COMPLETE") else 50 * len(fuzz_inputs.TARGETS)
    command = [sys.executable, PROGRAM, "--here", "--cases", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def prepare(folder: Path) -> None:
    (folder / "file").write_bytes(b"content")


def read(folder: Path) -> bytes:
    with (folder / "file").open("rb") as file:
        return file.read(7)


def reads_no_pipes(folder: Path) -> bytes:
    if not (folder / "file").is_file() or (folder / "file").is_symlink():
        raise OSError("no file")
    return read(folder)


def raise_key_error(folder: Path) -> None:
    if reads_no_pipes(folder) != b"content":
        raise KeyError("content")


def raise_nothing_said(folder: Path) -> None:
    if reads_no_pipes(folder) != b"content":
        raise ValueError


@pytest.mark.parametrize(
    ("reader", "is_right", "problem"),
    [
        (reads_no_pipes, is_equal, "altered data were read: b'"),
        (raise_key_error, is_equal, "KeyError: 'content'"),
        (raise_nothing_said, is_equal, "says nothing"),
        (reads_no_pipes, lambda found, true: True, None),
    ],
)
def test_problems_of_readers_are_found(tmp_path, reader, is_right, problem):
    fuzzer = Fuzzer(tmp_path, [Target("target", prepare, reader, (OSError, ValueError), is_right)])
    found = [text for number in range(50) if (text := fuzzer.run(1, number))]
    assert any(problem in text for text in found) if problem else not found


def test_every_reader_of_the_package_is_a_target():
    """Readers of files are those that use `files.open_input` or `files.read`."""
    package = PROGRAM.parents[1] / "torchmpi"
    readers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"files\.(open_input|read)\(", path.read_text())
    }
    assert readers == {
        "backends/saved_tables.py", "cli/bench/bench_report.py", "cli/open_records.py",
        "communicators/flight_record.py", "datasets/data_format.py", "engine/checkpoint.py",
        "parameterserver/runs/run_record.py", "parameterserver/shard_checkpoint.py",
        "launch/launcherless/step_file.py", "shared_memory/compiler/native_code.py", "timeline/trace_reader.py",
    }  # fmt: skip
    assert len(fuzz_inputs.TARGETS) >= 14
