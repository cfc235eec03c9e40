"""The comparison of the calls of backends that would otherwise notice a different call on some ranks only."""

from __future__ import annotations

import torch

from ..collective_specs import SPECS
from ..communicators.group import Group
from .base import Operation, announced, refusal
from .shm import SharedMemoryBackend


def compared(
    operation: Operation,
    group: Group,
    collective: str,
    dtype: torch.dtype | None,
    op: str | None,
    shared: SharedMemoryBackend | None,
) -> Operation:
    """Return an operation that publishes the current call first, and in shared memory compares it among all ranks.

    MPI raises on the ranks alone that receive too much: the others return, or wait for those that have raised. Calls in
    which a rank does not wait for all others are published only. In a strict group, where a message compares, the
    operation is returned as it is.
    """
    if group.is_strict:
        return operation
    waits_for_all = SPECS[collective].flow == "all to all"
    if not waits_for_all or group.log_board is None or shared is None or refusal(shared, "barrier", "cpu", group):
        return announced(group, operation)
    return shared.compared(operation.run, group, collective, dtype, op)
