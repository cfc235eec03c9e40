"""Jobs on hosts that scripts/hosts.sh has made, and faults of these hosts. scripts/test_hosts.sh runs these tests."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from helpers import failures, warm
from helpers.host_jobs import BESIDE, HOSTS, NETWORK, PROGRAM, ROOT, STATE, Job, Start, hosts_sh, is_openmpi

# Of each rank: its status in a file, since the launcher may not learn it, and its messages, which it may not forward.
_WRAPPER = '{python} "$@" 2>"{folder}/messages.$R"; S=$?; echo $S >"{folder}/status.$R"; exit $S'


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
    for host in HOSTS:
        hosts_sh("heal", host)
    for job in jobs:
        job.close()


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
