"""To a user without MPI: another user of the host cannot take part in the job through the store of its ranks.

The store of torch has no password, so the stranger reads and writes it. It learns the address of the store from
``/proc/net/tcp``; here the ranks write it to a file. Each test also checks what the victims say.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import warm
from helpers.strangers import STRANGER, Stranger, needs_root

from torchmpi.errors import LaunchError
from torchmpi.launch.launcherless.step_file import MeetingPoint, StepFile
from torchmpi.shared_memory.compiler import native_code

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 120
TABLE = "torchmpi rendezvous place"
PROGRAM = """
import os, pathlib, sys, time
import torch
import torchmpi as mpi
from torchmpi.launch.launcherless import mesh
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
if rank == int(sys.argv[2]):  # until the stranger is there
    while not (folder / "go").exists():
        time.sleep(0.01)
init = mesh.Mesh.__init__
def noting(self, store, *arguments, **named):  # the stranger would find the port in /proc/net/tcp
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    (folder / f"port.{rank}.part").write_text(str(inner.port))
    (folder / f"port.{rank}.part").rename(folder / f"port.{rank}")
    init(self, store, *arguments, **named)
mesh.Mesh.__init__ = noting
mpi.start()
os.write(1, f"sum {mpi.allreduce(torch.ones(3)).tolist()}\\n".encode())
mpi.stop()
"""
pytestmark = [needs_root, pytest.mark.any_mpi]


def wait_for(path: Path) -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while not path.exists():
        assert time.monotonic() < limit, f"{path} has not come"
        time.sleep(0.01)


class Victims:
    """Two ranks, of which one waits for the file ``go``."""

    def __init__(self, folder: Path, late: int, launch: str, python: list[str]) -> None:
        self.folder, self.late = folder, late
        program = folder / "program.py"
        program.write_text(PROGRAM)
        tail = [str(program), str(folder), str(late)]
        env = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "SLURM_"))}
        # The home has the file of a step; kernels are in that of the user.
        kernels = str(native_code.cache_folders()[-1])
        env |= {"PYTHONPATH": str(ROOT), "TORCHMPI_THREADS": "1", "HOME": str(folder), "NUMBA_CACHE_DIR": kernels}
        if launch == "run":
            commands = [[*python, "-m", "torchmpi", "run", "--without-mpi", "-n", "2", *python, *tail]]
            self.prefixes = ["/worker/attempt_0/", ""]
        elif launch == "torchrun":
            options = ["--nproc-per-node=2", "--master-port=0", "--standalone", "--no-python"]
            commands = [[*python, "-m", "torch.distributed.run", *options, *python, *tail]]
            self.prefixes = ["/worker/attempt_0/", ""]
        else:
            commands = [[*python, *tail]] * 2
            self.prefixes = ["77.0.0/"]
            env |= {
                "SLURM_JOB_ID": "77",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": "h[0-1]",
                "MASTER_ADDR": "127.0.0.1",
            }
            env |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
        self.outputs = [(folder / f"output.{index}").open("w+") for index in range(len(commands))]
        self.processes = [
            subprocess.Popen(
                command,
                env=env | ({"SLURM_PROCID": str(index), "SLURM_NODEID": str(index)} if launch == "srun" else {}),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for index, (command, output) in enumerate(zip(commands, self.outputs, strict=True))
        ]

    def port_of_store(self) -> int:
        path = self.folder / f"port.{1 - self.late}"
        wait_for(path)
        return int(path.read_text())

    def output(self) -> str:
        """Return what all ranks have printed up to now."""
        return "\n".join(Path(output.name).read_text() for output in self.outputs)

    def go(self) -> None:
        (self.folder / "go").touch()

    def end(self) -> tuple[list[int], str]:
        """Return the statuses and the output of all ranks."""
        limit = time.monotonic() + LIMIT_SECONDS
        try:
            statuses = [process.wait(max(0.1, limit - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended in {LIMIT_SECONDS} s:\n{self.output()}") from None
        return statuses, self.output()

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for output in self.outputs:
            output.close()


@pytest.fixture(scope="module")
def warm_python(tmp_path_factory) -> Iterator[list[str]]:
    """The command in place of Python for ranks that have imported torchmpi."""
    if warm.IS_OFF:
        yield [sys.executable]
        return
    address = str(tmp_path_factory.mktemp("warm") / "socket")
    server = warm.Server(address, os.environ | {"PYTHONPATH": str(ROOT)})
    server.wait_for_start()
    yield warm.command(address)
    server.close()


@pytest.fixture
def victims(tmp_path, warm_python):
    """``victims(late, launch)``: two ranks, of which `late` waits for :meth:`Victims.go`."""
    begun: list[Victims] = []

    def begin(late: int, launch: str) -> Victims:
        begun.append(Victims(tmp_path, late, launch, warm_python))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def open_store(port: int, prefixes: list[str], rank: int) -> tuple[dist.Store, str]:
    """Open the store of the victims; return it with the key of their table."""
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
    keys = [f"{prefix}torchmpi start/{TABLE}" for prefix in prefixes]
    limit = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < limit:
        for key in keys:
            if store.check([f"{key} {rank}"]):
                return store, key
        time.sleep(0.01)
    raise AssertionError("the rank has written nothing")


def forged(entry: str, unix_name: str) -> str:
    """An entry that names a socket of the stranger, signed without a key, or as by versions that signed nothing."""
    content = json.loads(entry)
    is_signed = isinstance(content[0], str)
    place, nonce = json.loads(content[0]) if is_signed else content
    place[3] = unix_name
    if not is_signed:
        return json.dumps([place, nonce])
    text = json.dumps([place, nonce])
    return json.dumps([text, hmac.digest(b"", f"place 0 2 {text}".encode(), "sha256").hex()])


def listen_as_rank_0(port: int, prefixes: list[str], over: int) -> bytes:
    """Name an own socket as that of rank 0; return what rank 1 says there, until something can be read from `over`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0torchmpi-stranger" + os.urandom(8).hex())
        listener.listen(4)
        store, key = open_store(port, prefixes, 1)
        entry = store.get(f"{key} 1").decode()
        store.set(key, json.dumps([json.loads(forged(entry, listener.getsockname()[1:].decode())), json.loads(entry)]))
        if listener in select.select([listener, over], [], [], LIMIT_SECONDS)[0]:
            sock, _ = listener.accept()
            sock.settimeout(5)
            with contextlib.suppress(OSError):
                return sock.recv(1000)
    return b""


def serve_as_rank_0(port: int) -> str:
    """Serve a store in place of rank 0; return who has written to it."""
    store = dist.TCPStore("127.0.0.1", port, 2, True, timedelta(seconds=30), wait_for_workers=False)
    limit = time.monotonic() + 5
    while time.monotonic() < limit:
        if store.check([f"77.0.0/torchmpi start/{TABLE} 1"]):
            return "rank 1"
        time.sleep(0.05)
    return "no rank"


def connect_as_rank_1(port: int, prefixes: list[str], ready: int) -> bytes:
    """Connect to rank 0 with all that the store says, and with 300 silent connections; return what rank 0 says.

    Rank 0 does not accept before rank 1 has come: then the connections of the stranger are the first ones.
    """
    store, key = open_store(port, prefixes, 0)
    content = json.loads(store.get(f"{key} 0"))
    place, nonce = json.loads(content[0]) if isinstance(content[0], str) else content
    greetings = [struct.pack("<16sI", bytes.fromhex(nonce), 1), b"torchmpi" + struct.pack("<II16s", 1, 0, bytes(16))]
    said = b""
    with contextlib.ExitStack() as opened:
        socks = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(300)]
        for index, sock in enumerate(socks):
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # the queue is full
                sock.connect("\0" + place[3])
                sock.sendall(b"" if index >= 4 else greetings[index % 2])
        os.write(ready, b"\1")
        for sock in socks[:4]:
            sock.settimeout(LIMIT_SECONDS)
            with contextlib.suppress(OSError):
                said += sock.recv(1000)
    return said


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        ("run", "rank 1: the entry of rank 0 in the store is not signed with the key of this job"),
        ("torchrun", f"rank 0 .* cannot be reached on this host: the other end belongs to the user .* {STRANGER}"),
    ],
)
def test_a_stranger_that_names_itself_rank_0_in_the_store_is_told_nothing(victims, launch, reason):
    """Regression: rank 1 connected to the stranger, and unpickled what it said."""
    job = victims(0, launch)
    reader, over = os.pipe()
    stranger = Stranger(listen_as_rank_0, job.port_of_store(), job.prefixes, reader)
    limit = time.monotonic() + LIMIT_SECONDS
    while not re.search(reason, job.output()) and time.monotonic() < limit:
        time.sleep(0.01)
    os.write(over, b"\1")
    assert stranger.result() == b""
    os.close(reader)
    os.close(over)
    job.go()
    statuses, output = job.end()
    assert statuses[0] != 0, output
    assert re.search(reason, output), output


def test_a_stranger_at_the_port_of_a_step_of_slurm_is_told_nothing(victims):
    """Regression: the port followed from the number of the step, and who had taken it was trusted on all hosts."""
    job = victims(0, "srun")
    assert Stranger(serve_as_rank_0, 20000 + zlib.crc32(b"77.0.0") % 12000).result() == "no rank"
    job.go()
    statuses, output = job.end()
    assert statuses == [0, 0], output
    assert not list((job.folder / ".torchmpi").iterdir())


@pytest.mark.parametrize("launch", ("run", "torchrun", "srun"))
def test_a_stranger_that_connects_as_rank_1_is_refused_and_the_job_runs(victims, launch):
    """Regression: rank 0 took the stranger for rank 1; and silent connections let the start fail."""
    job = victims(1, launch)
    reader, writer = os.pipe()
    stranger = Stranger(connect_as_rank_1, job.port_of_store(), job.prefixes, writer)
    os.close(writer)
    is_ready = os.read(reader, 1)
    os.close(reader)
    job.go()
    statuses, output = job.end()
    assert stranger.result() == b""
    assert is_ready
    assert set(statuses) == {0}, output
    assert output.count("sum [2.0, 2.0, 2.0]") == 2, output


def test_the_file_of_a_step_is_private_and_names_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    step = StepFile("77.0.0")
    with pytest.raises(
        LaunchError, match=r"rank 3: rank 0 has not written the key .* within 0.1 s. If the hosts share no"
    ):
        step.read(3, limit_seconds=0.1)
    step.write(MeetingPoint(1234, "secret"))
    assert (step.path.stat().st_mode & 0o777, step.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    step.write(MeetingPoint(1235, "secret"))  # after a restart
    assert step.read(3) == MeetingPoint(1235, "secret")
    for damage in (
        lambda: step.path.write_text("[1]"),
        lambda: step.path.chmod(0o644),
        lambda: os.chown(step.path, STRANGER, -1),
        lambda: (step.path.unlink(), os.mkfifo(step.path, 0o600)),
        lambda: (step.path.unlink(), step.path.symlink_to("/etc/passwd")),
    ):
        damage()
        with pytest.raises(LaunchError, match="rank 3 cannot read the key of the job"):
            step.read(3, limit_seconds=5)
    os.chown(step.path.parent, STRANGER, -1)
    with pytest.raises(LaunchError, match=r"rank 0 cannot write the key .* belongs to the user"):
        step.write(MeetingPoint(1, "secret"))
