"""A job of ``torchmpi run``: its hosts, its ranks, and the command that starts it."""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import ArgumentError, LaunchError, MissingMPIError
from ..launch import fault_tolerance, launcher, mpi_library, network
from . import hosts, rank_start
from .launching import Program, find_programs, hosts_of_batch_job, launch_command

# Open MPI passes its own variables to other hosts and no others; MPICH passes all.
_PASSED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "MASTER_ADDR", "MASTER_PORT")
_PASSED_PREFIXES = ("TORCHMPI_", "TORCH_", "PYTHON", "OMP_", "MKL_", "NUMBA_", "GLOO_", "NCCL_", "UCX_", "FI_")
# Below the ports that systems assign to outgoing connections.
_PORTS = range(20000, 32000)


class Job:
    """The hosts, the ranks and the launch command of a job."""

    def __init__(self, options: argparse.Namespace) -> None:
        known: list[hosts.Host] = []
        if options.hostfile is not None:
            known = hosts.read_file(Path(options.hostfile))
        elif options.hosts is not None:
            known = hosts.parse_list(options.hosts)
        launcher.set_home()
        self._options = options
        num_ranks = None if options.ranks is None else options.ranks + options.spares
        placed = hosts.place(known, num_ranks) if known else []
        self.num_ranks: int = sum(count for _, count in placed) or num_ranks or 0
        self.hosts = [hosts.Host(name, slots or dict(placed).get(name, 0)) for name, slots in known]
        """All hosts with the largest number of ranks on each; empty: this host."""
        self._program = _matching_program()
        self._is_open_mpi = self._program.library.startswith("Open MPI")
        self.continues: bool = options.on_lost_rank == "continue"
        """Whether the other ranks of Open MPI continue when one is lost."""
        if self.continues and (problem := fault_tolerance.why_not_built(mpi_library.load())):
            raise LaunchError(f"--on-lost-rank continue: {problem}. {fault_tolerance.HOW_ELSEWHERE}.")

    def agent(self, host: str) -> list[str]:
        """Return the command that runs a command on a host."""
        return [*(shlex.split(self._options.rsh) if self._options.rsh else ("ssh", "--")), host]

    def ranks_without(self, lost: Sequence[str]) -> int:
        """Return the number of ranks for which the other hosts have room, at most that of the first start."""
        room = sum(host.slots or 0 for host in self.hosts if host.name not in lost)
        return min(self.num_ranks, room) if self.hosts else self.num_ranks

    def command(self, lost: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> list[str]:
        """Return the command that starts the job on the hosts that are not lost, with additional variables."""
        options, num_ranks = self._options, self.ranks_without(lost)
        placed = hosts.place([host for host in self.hosts if host.name not in lost], num_ranks) if self.hosts else []
        of_losses = self._variables_of_losses(num_ranks)
        variables = _interface_variables(options.interface) | of_losses | dict(variables or {})
        launch = self._open_mpi(placed, num_ranks, variables) if self._is_open_mpi else self._hydra(placed, num_ranks)
        words = [word for text in options.option for word in shlex.split(text)]
        log_dir = [] if options.log_dir is None else ["--log-dir", os.path.abspath(options.log_dir)]
        is_network = not self._is_open_mpi and "/" in (options.interface or "")
        network_of_mpi = ["--network", options.interface] if is_network else []
        start = [sys.executable, "-I", "-S", rank_start.__file__, "--master", _master(placed), *network_of_mpi]
        start += [*log_dir, "--"]
        prefix = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
        return [*prefix, *launch, *words, "-n", str(num_ranks), *start, *program_of(options), *options.arguments]

    def _variables_of_losses(self, num_started: int) -> dict[str, str]:
        """Return the variables for the option ``--on-lost-rank``. Without a lost host there are fewer spare ranks."""
        if self._options.on_lost_rank is None:
            return {}
        of_mpi = fault_tolerance.variables(os.environ) if self.continues else {}
        num_spares = num_started - self._options.ranks if self._options.spares else 0
        spares = {fault_tolerance.SPARES_VARIABLE: str(num_spares)} if num_spares > 0 else {}
        return of_mpi | spares | on_lost_rank(self._options)

    def _open_mpi(self, placed: Sequence[tuple[str, int]], num_ranks: int, variables: Mapping[str, str]) -> list[str]:
        interface, rsh = self._options.interface, self._options.rsh
        always = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        always += ["--with-ft", "ulfm"] if self.continues else []
        if not placed:
            path, *more = launch_command(self._program, num_ranks)[:-2]
            return [path, *always, *more]
        # Not --oversubscribe, with which Open MPI starts all ranks on the first host.
        command = [self._program.path, *always, "--host", ",".join(f"{name}:{count}" for name, count in placed)]
        if rsh is not None:
            command += ["--prtemca", "plm_ssh_agent", rsh]
        if interface is not None:
            command += ["--mca", "btl_tcp_if_include", interface]
            if "/" in interface or _is_on_this_host(placed):
                command += ["--prtemca", "prte_if_include", interface]
        passed = {name for name in os.environ if name in _PASSED or name.startswith(_PASSED_PREFIXES)} | {*variables}
        return [*command, *(word for name in sorted(passed) for word in ("-x", name))]

    def _hydra(self, placed: Sequence[tuple[str, int]], num_ranks: int) -> list[str]:
        interface, rsh = self._options.interface, self._options.rsh
        if not placed:
            return launch_command(self._program, num_ranks)[:-2]
        command = [self._program.path, "-hosts", ",".join(f"{name}:{count}" for name, count in placed)]
        if rsh is not None:
            command += ["-launcher", "ssh", "-launcher-exec", rsh]
        # The interface of this host, to which the other ones connect.
        if interface is not None and "/" in interface:
            interface = _name_in(interface)
        elif not _is_on_this_host(placed):
            interface = None
        return command if interface is None else [*command, "-iface", interface]


def _interface_variables(interface: str | None) -> dict[str, str]:
    """Return the variables by which MPICH, gloo and NCCL choose a network interface; they accept no networks.

    Given a network, the name of the interface may differ between hosts: gloo and NCCL choose by themselves, and each
    rank of MPICH finds the name on its host when it starts.
    """
    if interface is None or "/" in interface:
        return {}
    return dict.fromkeys((*rank_start.OF_MPICH, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)


def _is_on_this_host(placed: Sequence[tuple[str, int]]) -> bool:
    """Return whether this host has ranks; otherwise its network interfaces may have other names than those of hosts."""
    return any(network.is_own(name) for name, _ in placed)


def _name_in(wanted: str) -> str | None:
    """Return the name of the interface of this host in a network, if it has one."""
    try:
        return network.interface_in(wanted)
    except ValueError as error:
        raise ArgumentError(f"--interface {wanted}: {error}.") from error


def _master(placed: Sequence[tuple[str, int]]) -> str:
    """Return the address for programs that make a store of torch.distributed by themselves: on the host of rank 0."""
    of_slurm = os.environ.get("SLURM_JOB_NODELIST", "")
    names = [launcher.first_host(of_slurm)] if of_slurm else hosts_of_batch_job()
    if names := [name for name, _ in placed] or names:
        return f"{names[0]}:{random.choice(_PORTS)}"
    address = network.loopback()
    with network.listen(address, 1) as free:
        return f"{address}:{free.getsockname()[1]}"


def on_lost_rank(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables of ranks for the option ``--on-lost-rank``."""
    if options.on_lost_rank is None:
        return {}
    return {"TORCHMPI_ON_LOST_RANK": "raise" if options.on_lost_rank == "continue" else "end"}


def program_of(options: argparse.Namespace) -> list[str]:
    """Return the command of the program, without its arguments."""
    names = [] if options.stands_for is None else ["env", f"TORCHMPI_AS_{options.stands_for.upper()}=1"]
    if options.is_module:
        return [*names, sys.executable, "-m", options.program]
    return [*names, *([sys.executable] if options.program.endswith(".py") else []), options.program]


def _matching_program() -> Program:
    """Return the launcher of the MPI library of this Python, or the first one that may belong to it."""
    library = mpi_library.short_version(mpi_library.load())
    programs = find_programs()
    possible = [program for program in programs if not launcher.are_incompatible(program.library, library)]
    if possible:
        return next((program for program in possible if program.library == library), possible[0])
    if programs:
        found = " and ".join(f"{program.path} ({program.library})" for program in programs)
        raise LaunchError(
            f"this Python loads {library}, but found only {found}. Put the mpirun of {library} on PATH, or point "
            "mpi4py to the library of the launcher with MPI4PY_LIBMPI."
        )
    raise MissingMPIError(f"neither mpirun nor mpiexec is on PATH or beside this Python. {mpi_library.HOW_TO_INSTALL}")
