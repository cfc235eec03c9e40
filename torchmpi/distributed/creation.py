"""Creation of process groups, for the name of this backend and for others that stand for it.

With ``TORCHMPI_AS_MPI`` the name ``mpi``, and with ``TORCHMPI_AS_GLOO`` the name ``gloo``, stands for this backend.
Each group of theirs writes one line that tells what it is.
"""

from __future__ import annotations

import torch.distributed as dist

from ..log import logger
from ..session import runtime
from . import membership, replica_checks, torch_functions, torch_names
from .process_group import ProcessGroup
from .torch_names import BackendOptions


def create(options: BackendOptions, pg_options: object = None, *, backend_name: str = torch_names.NAME) -> ProcessGroup:
    """Create a process group, as torch requires of a backend. Collective over its members."""
    torch_names.check_version()
    torch_names.keep_works_of_join()
    torch_functions.extend()
    group = ProcessGroup(options, backend_name)
    replica_checks.prepare()
    return group


def create_for_mpi(options: BackendOptions, pg_options: object) -> ProcessGroup:
    """Create a process group and announce it."""
    group = create(options)
    _announce(options, "TORCHMPI_AS_MPI", _description(group))
    return group


def create_for_gloo(options: BackendOptions, pg_options: object) -> dist.ProcessGroup:
    """Create a process group of torchmpi that has the name ``gloo``; one of gloo itself if torchmpi rejects it.

    All ranks of the group know the reasons for which it may be rejected here. An error of one rank is not one of them:
    the other ranks would wait for it.
    """
    reason = torch_names.why_too_old() or membership.why_not(options)
    if reason:
        gloo = torch_names.group_of_gloo(options)
        _announce(options, "TORCHMPI_AS_GLOO", f"gloo, {gloo.size()} ranks, since {reason}")
        return gloo
    group = create(options, backend_name=torch_names.GLOO)
    _announce(options, "TORCHMPI_AS_GLOO", _description(group))
    return group


def _description(group: ProcessGroup) -> str:
    num_hosts = group.num_hosts
    return f"torchmpi, {group.size()} rank{'s' * (group.size() > 1)} on {num_hosts} host{'s' * (num_hosts > 1)}"


def _announce(options: BackendOptions, variable: str, description: str) -> None:
    """Write the line of a group, on its first rank."""
    if options.group_rank == 0 and not (runtime.is_running() and not runtime.current().config.verbose):
        logger.info(f"process group {options.group_id} ({variable}): {description}")
