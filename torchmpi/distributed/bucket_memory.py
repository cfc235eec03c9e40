"""Shared memory for the buckets of DistributedDataParallel."""

from __future__ import annotations

import torch

from ..session import runtime
from . import torch_names

MIN_BYTES = 256 << 10
"""Shorter buckets stay private: copying them costs less than the file descriptors for sharing them."""


def share(bucket: torch.Tensor) -> bool:
    """Move a bucket to memory that the ranks of the host share; return False if this is impossible or has no benefit.

    DDP allocates its buckets in private memory, and a reduction would copy them to slots and back. torch can move a
    storage to a file in memory together with all views of it, such as those of DDP's reducer. The ranks may differ in
    the outcome: if the bucket of one rank is private, all of them go through the slots.
    """
    current = runtime.current()
    if current.local_size == 1 or not (current.config.share_ddp_buckets and current.can_share):
        return False
    current.heap.forget_what_moved()
    if current.heap.holds(bucket.data_ptr()):
        return True
    try:
        moved = torch_names.move_to_file(bucket, at_once=current.local_size)
        if moved is not None:
            current.heap.adopt(*moved)
    except (OSError, RuntimeError):  # no descriptors, no /dev/shm, or a limit of torch
        return False
    return moved is not None
