"""Jobs on hosts that scripts/hosts.sh has made, and faults of these hosts. scripts/test_hosts.sh runs these tests."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from helpers import failures, warm

ROOT = Path(__file__).resolve().parents[2]
STATE = Path(os.environ.get("HOSTS_STATE", "/run/torchmpi-hosts"))
BESIDE = Path(sys.executable).parent
PROGRAM = Path(__file__).parent / "fault_program.py"
PREFIX = os.environ.get("HOSTS_PREFIX", "tmpi")
NETWORK = os.environ.get("HOSTS_NETWORK", "10.87.21")
_HOSTS = ("h0", "h1", "h2")
_START_SECONDS = 120.0
# Of each rank: its status in a file, since the launcher may not learn it, and its messages, which it may not forward.
_WRAPPER = '{python} "$@" 2>"{folder}/messages.$R"; S=$?; echo $S >"{folder}/status.$R"; exit $S'
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
    found: dict[str, list[str]] = {host: [] for host in _HOSTS}
    networks = {os.stat(f"/run/netns/{PREFIX}-{host}").st_ino: pids for host, pids in found.items()}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            networks.get(os.stat(f"/proc/{pid}/ns/net").st_ino, []).append(pid)
    return found


Start = Callable[..., Job]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that all hosts see."""
    if not (STATE / "hosts").exists():
        pytest.skip("there are no hosts: run scripts/test_hosts.sh")
    made = Path(tempfile.mkdtemp(dir=STATE))
    yield made
    shutil.rmtree(made)


class WarmHosts:
    """The servers of warm ranks, one on each host; again after the crash of the host."""

    def __init__(self) -> None:
        self._servers: dict[str, warm.Server] = {}

    @staticmethod
    def command(host: str) -> list[str]:
        """Return the command in place of Python on this host."""
        return warm.command(str(STATE / f"warm-{host}"))

    def prepare(self, hosts: Iterable[str]) -> None:
        """Wait until these hosts have their servers."""
        needed = {host for host in hosts if host not in self._servers or not self._servers[host].is_running()}
        for host in needed:
            launcher = [str(ROOT / "scripts" / "hosts.sh"), "run", host]
            self._servers[host] = warm.Server(self.command(host)[-1], _environment(), launcher)
        for host in needed:
            self._servers[host].wait_for_start()

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


@pytest.fixture(scope="session")
def warm_hosts() -> Iterator[WarmHosts]:
    hosts = WarmHosts()
    yield hosts
    hosts.close()


def _environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_"))}
    return env | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def start(folder: Path, warm_hosts: WarmHosts) -> Iterator[Start]:
    """``start("h0:2,h1:2", *arguments, torchrun=False, separate=False, program=PROGRAM, **settings)``: start a job.

    With `survive`, `torchmpi run` of Open MPI leaves the other ranks alone when one is lost.
    `keepalive` has Open MPI's times of docs/hangs.md; the default is longer, so that the ranks report first.
    If it is the fault program, wait until its ranks are in their loop. Separate ranks are started as by
    ``srun --mpi=none --kill-on-bad-exit=0``: the end of one does not end the others.
    """
    jobs: list[Job] = []

    def run(
        layout: str,
        *arguments: object,
        torchrun: bool = False,
        separate: bool = False,
        survive: bool = False,
        program: Path = PROGRAM,
        keepalive: tuple[int, int, int] = (10, 3, 3),
        **settings: object,
    ) -> Job:
        counts = {host: int(count) for host, count in (each.split(":") for each in layout.split(","))}
        own = {f"TORCHMPI_{name.upper()}": str(value) for name, value in settings.items()}
        words = [str(program), *([str(folder)] if program == PROGRAM else []), *map(str, arguments)]
        if warm.IS_OFF:
            pythons = {host: [sys.executable] for host in counts}
            python = sys.executable
        else:
            warm_hosts.prepare(counts)
            pythons = {host: warm_hosts.command(host) for host in counts}
            python = " ".join(warm_hosts.command("$(uname -n)"))
        script = _WRAPPER.format(python=python, folder=folder)
        if torchrun:
            commands = [_torchrun(host, counts, pythons[host], script, words) for host in counts]
        elif separate:
            commands = _separate_ranks(counts, script, words)
        else:
            commands = [[*_mpirun(layout, [*own, "PATH", "PYTHONPATH"], keepalive), "-n", str(sum(counts.values()))]]
            commands[0] += ["sh", "-c", f"R=${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}; {script}", "sh", *words]
        if survive:
            commands = [[*_torchmpi_run(layout), "sh", "-c", f'exec {python} "$@"', "sh", *words]]
            own["PATH"] = f"{STATE / 'bin'}:{os.environ['PATH']}"
        failures.jobs.extend(commands)
        jobs.append(Job(commands, program, folder, sum(counts.values()), _environment() | own))
        if program == PROGRAM:
            jobs[-1].wait_for_start()
        return jobs[-1]

    yield run
    for host in _HOSTS:
        hosts_sh("heal", host)
    for job in jobs:
        job.close()


@functools.cache
def is_openmpi() -> bool:
    """Return whether this environment has Open MPI, rather than MPICH."""
    version = subprocess.run([BESIDE / "mpirun", "--version"], capture_output=True, text=True, timeout=60).stdout
    return "Open MPI" in version


def _mpirun(layout: str, variables: Sequence[str], keepalive: tuple[int, int, int]) -> list[str]:
    agent = str(STATE / "agent")
    if not is_openmpi():
        return [
            *(str(BESIDE / "mpiexec"), "-localhost", f"{NETWORK}.254", "-launcher", "ssh", "-launcher-exec", agent),
            *("-hosts", layout),
        ]
    options = {"plm_ssh_agent": agent, "prte_if_include": f"{NETWORK}.0/24"}
    names = ("oob_tcp_keepalive_time", "oob_tcp_keepalive_intvl", "oob_tcp_keepalive_probes")
    options |= dict(zip(names, map(str, keepalive), strict=True))
    command = [str(BESIDE / "mpirun"), "--bind-to", "none", "--host", layout]
    for name, value in options.items():
        command += ["--prtemca", name, value]
    for name, value in {"btl_tcp_if_include": "eth0", "mpi_yield_when_idle": "1"}.items():
        command += ["--mca", name, value]
    for name in variables:
        command += ["-x", name]
    return command


def _torchmpi_run(layout: str) -> list[str]:
    (STATE / "bin").mkdir(exist_ok=True)
    ssh = STATE / "bin" / "ssh"  # asks the hosts whether they answer
    if not ssh.exists():
        ssh.symlink_to(STATE / "agent")
    options = f"--prtemca plm_ssh_agent {STATE}/agent --prtemca prte_if_include {NETWORK}.0/24 -x PYTHONPATH"
    more = f"--option={options} --mca btl_tcp_if_include eth0 --bind-to none"
    return [sys.executable, "-m", "torchmpi", "run", "--hosts", layout, "--on-lost-rank", "continue", more]


def _torchrun(host: str, counts: dict[str, int], python: list[str], script: str, program: list[str]) -> list[str]:
    return [
        *(str(ROOT / "scripts" / "hosts.sh"), "run", host, *python, "-m", "torch.distributed.run"),
        *("--nnodes", str(len(counts)), "--node-rank", str(list(counts).index(host))),
        *("--nproc-per-node", str(counts[host]), "--master-addr", f"{NETWORK}.1", "--master-port", "29511"),
        *("--no-python", "sh", "-c", f"R=$RANK; {script}", "sh", *program),
    ]


def _separate_ranks(counts: dict[str, int], script: str, program: list[str]) -> list[list[str]]:
    hosts = [host for host, count in counts.items() for _ in range(count)]
    variables = {
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_STEP_ID": time.time_ns() % 100_000,
        "SLURM_STEP_NODELIST": ",".join(counts),
        "SLURM_STEP_NUM_NODES": len(counts),
        "SLURM_STEP_NUM_TASKS": len(hosts),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts.values())),
    }
    commands = []
    for rank, host in enumerate(hosts):
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank - hosts.index(host), "SLURM_NODEID": [*counts].index(host)}
        assignments = [f"{name}={value}" for name, value in (variables | own).items()]
        start = [str(ROOT / "scripts" / "hosts.sh"), "run", host, "env", *assignments]
        commands.append([*start, "sh", "-c", f"R={rank}; {script}", "sh", *program])
    return commands
