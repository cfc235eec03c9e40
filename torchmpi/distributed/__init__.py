"""The ``torch.distributed`` backend: ``dist.init_process_group("torchmpi")``.

torch registers the backend when it is imported, if torchmpi is installed; a script need not import this package. Two
functions have no counterpart in torch.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

# torch imports this package together with itself, in every process: no further imports are allowed here.
from .registration import register

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["monitored_barrier", "register"]


def __dir__() -> list[str]:
    return list(__all__)


def monitored_barrier(
    group: dist.ProcessGroup | int | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Run a barrier that raises an error with the names of missing ranks.

    This is ``torch.distributed.monitored_barrier``, which torch supports for gloo only. Rank 0 of the group waits
    for the other ranks; if one is missing, the ranks that have arrived raise an error too.

    Args:
        group: A process group with the backend ``torchmpi``; the default group if None.
        timeout: Time, or number of seconds, to wait; the timeout of the group if None.
        wait_all_ranks: Name all missing ranks instead of the first one.

    Raises:
        StallError: If a rank did not arrive in time.
        ArgumentError: If the group has another backend.

    Example::

        from torchmpi.distributed import monitored_barrier
        monitored_barrier(timeout=timedelta(seconds=30))
    """
    import torch.distributed as dist

    from ..errors import ArgumentError
    from .process_group import ProcessGroup

    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return  # as in every collective of torch
    chosen = group or dist.group.WORLD
    if not isinstance(chosen, ProcessGroup):
        raise ArgumentError("monitored_barrier needs a group with the backend 'torchmpi'; torch has one for gloo.")
    chosen.monitored_barrier(timeout, wait_all_ranks)
