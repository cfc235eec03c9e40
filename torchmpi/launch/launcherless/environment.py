"""Rendezvous of ranks whose launcher gives them numbers but no interface for MPI: ``srun --mpi=none`` and torchrun."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
from datetime import timedelta

from torch._C import _distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from ...errors import LaunchError
from ...log import logger
from .. import launcher, network, respawning, tcp_store
from . import connect as connect_through_store
from .newcomer import Newcomer
from .stand_in import StandIn
from .step_file import MeetingPoint, StepFile

_TIMEOUT = timedelta(minutes=5)
_SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_PROCID")


def connect(found: launcher.Launcher) -> StandIn:
    """Connect to the other ranks of the launcher. Collective. Return the stand-in for MPI.

    Raises:
        LaunchError: The variables of the launcher are incomplete, or a rank cannot be reached.
    """
    if respawning.is_newcomer():
        return Newcomer()
    key = launcher.job_key()
    with contextlib.ExitStack() as opened:
        if found.name == launcher.SLURM:
            store, rank, size, key = _store_of_step(found, key, opened)
        else:
            store, rank, size = next(rendezvous("env://", timeout=_TIMEOUT))
            if rank == 0 and not key and found.local_size != size:
                logger.warning(
                    f"The ranks meet through torchrun's store at {os.environ.get('MASTER_ADDR')}, which has no "
                    "password: who reaches it can join this job and run code in it. To admit the ranks only, start "
                    f"them with the same {launcher.JOB_KEY_VARIABLE} on all hosts, from openssl rand -hex 32."
                )
        # The store is closed on return, when all ranks are connected.
        return connect_through_store(
            c10d.PrefixStore("torchmpi start", store), rank, size, timeout_seconds=_TIMEOUT.total_seconds(), key=key
        )


def _store_of_step(
    found: launcher.Launcher, key: bytes, opened: contextlib.ExitStack
) -> tuple[c10d.Store, int, int, bytes]:
    """Open a store on rank 0 of a step of Slurm; return it with the rank, the number of ranks, and the key of the job.

    The host of rank 0 follows from variables that are equal on all ranks. So does the port on one host, where the
    kernel tells who connects, and if there is a key. Otherwise rank 0 chooses a port and a key.
    """
    missing = [name for name in _SLURM_VARIABLES if name not in os.environ]
    if missing or found.rank is None or found.num_ranks is None:
        raise LaunchError(
            f"{found.name} started {found.least_num_ranks} processes without an interface for MPI, and the variables "
            f"{', '.join(missing)} are missing. Start the processes with srun itself, or srun --mpi=pmix or --mpi=pmi2."
        )
    variables = {name: os.environ[name] for name in _SLURM_VARIABLES}
    step = f"{variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}.{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    is_one_host = variables["SLURM_STEP_NUM_NODES"] == "1"
    own = network.loopback() if is_one_host else launcher.first_host(variables["SLURM_STEP_NODELIST"])
    address, wanted = os.environ.get("MASTER_ADDR") or own, int(os.environ.get("MASTER_PORT") or 0)
    step_file = None if is_one_host or key else StepFile(step)
    if step_file is None:
        secret = hmac.new(key, step.encode(), "sha256").hexdigest() if key else ""
        wanted = wanted or launcher.port_of(secret or step)
    elif found.rank > 0:
        wanted, text = step_file.read(found.rank)
        key = text.encode()
    if found.rank == 0 and not is_one_host:
        logger.info(
            f"srun started {found.num_ranks} processes without an interface for MPI, so that ranks on different hosts "
            "communicate over TCP. Where the network is faster: srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)."
        )
    try:
        if found.rank == 0:
            listener = _listen(address if is_one_host else "", wanted)
            if step_file is not None:
                meeting = MeetingPoint(listener.getsockname()[1], secrets.token_hex(32))
                key = meeting.key.encode()
                opened.callback(step_file.remove)
                step_file.write(meeting)
            store = tcp_store.open_tcp_store(
                address,
                listener.getsockname()[1],
                found.num_ranks,
                True,
                _TIMEOUT,
                master_listen_fd=listener.detach(),
            )
        else:
            store = tcp_store.open_tcp_store(address, wanted, found.num_ranks, False, _TIMEOUT)
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"rank {found.rank} of the step {step} of Slurm: the store of rank 0 at {address}, port {wanted}, failed: "
            f"{error}. Choose another host or port with MASTER_ADDR and MASTER_PORT, or start with srun --mpi=pmix or "
            "--mpi=pmi2."
        ) from error
    return c10d.PrefixStore(step, store), found.rank, found.num_ranks, key


def _listen(address: str, port: int) -> socket.socket:
    """Listen at an address; if '' at all, since the name of a host may be that of its loopback interface (Debian)."""
    is_dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else network.family(address)
    return socket.create_server((address, port), family=family, backlog=2048, dualstack_ipv6=is_dual)
