"""Tests that launch jobs with the MPI of this environment and check their output and exit status."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from helpers import failures, warm
from helpers.launching import Launch, Result, is_open_mpi, job_environment, launcher, search_path, write_mnist

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start background processes with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def mpirun() -> list[str]:
    """The launch command without the number of ranks; works as root and with more ranks than cores."""
    program = launcher()
    return [program, "--oversubscribe"] if is_open_mpi(program) else [program]


@pytest.fixture(scope="session")
def warm_python() -> Iterator[list[str]]:
    """The command in place of Python for ranks that have imported torchmpi; with TORCHMPI_TEST_COLD=1 plain Python."""
    if warm.IS_OFF:
        yield [sys.executable]
        return
    with tempfile.TemporaryDirectory(prefix="torchmpi-warm-") as folder:
        # Many programs train on digits.
        modules = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "sklearn.datasets"]
        server = warm.Server(f"{folder}/socket", job_environment({}), modules=modules)
        server.wait_for_start()
        yield warm.command(f"{folder}/socket")
        server.close()


@pytest.fixture(scope="session")
def launch(mpirun: list[str], warm_python: list[str]) -> Launch:
    """``launch(n, ["script.py", ...], timeout=400, env={}) -> Result``.

    Ranks are forks of a process that has imported torchmpi.
    ``timeout -k`` is necessary because a hung mpirun may ignore SIGTERM.
    """

    def run(
        n: int, arguments: Sequence[str | Path], *, timeout: float = 400, env: Mapping[str, str] | None = None
    ) -> Result:
        failures.jobs.append([*mpirun, "-n", str(n), "python", *map(str, arguments)])
        command = ["timeout", "-k", "5", str(timeout), *mpirun, "-n", str(n), *warm_python, *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=job_environment(env or {}), stdin=subprocess.DEVNULL
        )
        result = Result(done.returncode, done.stdout, done.stderr)
        assert result.returncode != 124, f"{' '.join(command)} did not end in {timeout} s\n{result.output}"
        return result

    return run


@pytest.fixture
def job(launch: Launch, tmp_path: Path) -> Launch:
    """``job(n, "code", ...)``: the same for a script given as text."""

    def run(n: int, code: str, **options: object) -> Result:
        script = tmp_path / "job.py"
        script.write_text(textwrap.dedent(code))
        return launch(n, [script], **options)

    return run


@pytest.fixture(scope="session")
def alone(warm_python: list[str]) -> Launch:
    """``alone("-m", "torchmpi", ..., path=folder, NAME="value") -> Result``, of a process without a launcher.

    `path` comes first on PATH, then the folder of this environment's mpirun. `python` is another interpreter.
    """

    def run(*arguments: object, path: Path | None = None, python: str | None = None, **environment: str) -> Result:
        failures.jobs.append(["python", *map(str, arguments)])
        done = subprocess.run(
            [
                *([python] if python else warm_python),
                *map(str, arguments),
            ],
            capture_output=True,
            text=True,
            timeout=400,
            env=job_environment(search_path(path) | environment),
            stdin=subprocess.DEVNULL,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with scikit-learn's digits for ``--data``; importing scikit-learn takes longer than the training."""
    pytest.importorskip("sklearn", reason="the examples train on scikit-learn's digits: install the extra examples")
    folder = tmp_path_factory.mktemp("digits")
    write_mnist(folder, 1797)
    return folder
