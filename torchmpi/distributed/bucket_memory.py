"""Buckets of DistributedDataParallel, moved once to memory that all ranks of the host can reach.

DDP makes its buckets itself, so they are private memory, and to reduce them each gradient is copied to a slot and back.
torch can move a storage to a file in memory with everything that looks into it, the reducer's views among them.
"""

from __future__ import annotations

import torch

from ..session import runtime
from . import torch_names

LEAST_BYTES = 256 << 10
"""Shorter ones are not worth their descriptors: a part of one slot."""


def share(bucket: torch.Tensor) -> bool:
    """See to it that a bucket is in shared memory; False if there is none to be had, or nobody to share it with.

    The ranks need not agree: where one of them has private memory, all go through the slots.
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
    except (OSError, RuntimeError):  # no descriptors, no /dev/shm, or a limit that torch ran into
        return False
    return moved is not None
