"""Functions of torch.distributed that torch restricts to its own backends by name or class.

They are extended when the first process group is created. For groups of other backends they remain those of torch.
What a program has imported by name before, ``from torch.distributed import split_group``, stays torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import ArgumentError
from ..session import recovery
from . import torch_names
from .process_group import ProcessGroup


def extend() -> None:
    """Extend the functions, once."""
    torch_names.extend_function("monitored_barrier", _monitored_barrier)
    torch_names.extend_function("split_group", _split_group)
    if hasattr(dist, "shrink_group"):  # torch 2.9
        torch_names.extend_function("shrink_group", _shrink_group)
    torch_names.extend_function("_set_pg_timeout", _set_timeout)
    torch_names.extend_function("_register_builtin_comm_hook", _register_builtin_hook, DistributedDataParallel)
    torch_names.extend_checkpointing(_save_on_own_group)
    torch_names.implement_out_variants()


def _monitored_barrier(
    original: Callable[..., None],
    group: Any = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    chosen = group or dist.group.WORLD
    if isinstance(chosen, ProcessGroup):
        chosen.monitored_barrier(timeout, wait_all_ranks)
    else:
        original(group, timeout, wait_all_ranks)


def _set_timeout(original: Callable[..., None], timeout: timedelta, group: Any = None) -> None:
    chosen = group or dist.group.WORLD
    if isinstance(chosen, ProcessGroup):
        chosen.set_timeout(timeout)
    else:
        original(timeout, group)


def _register_builtin_hook(original: Callable[..., None], model: DistributedDataParallel, comm_hook_type: Any) -> None:
    """Register PyTorch's hook in Python, which computes the same, in the place of that in C++ for float16.

    That in C++ requires a future of C++ tensors, and those which Python can make do not follow the streams of a GPU.
    """
    if comm_hook_type == torch_names.FP16_COMPRESS and isinstance(model.process_group, ProcessGroup):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(model.process_group, fp16_compress_hook)
        if model.logger is not None:
            model.logger._set_comm_hook_name(str(comm_hook_type))  # what the program has registered
    else:
        original(model, comm_hook_type)


def _save_on_own_group(
    original: Callable[..., Any], executor: Any, *arguments: Any, process_group: Any = None, **options: Any
) -> Any:
    """Save an asynchronous checkpoint on a group of its own, where the default group would be used.

    A thread saves it while the main thread trains: on one group, the order of their calls may differ between ranks.
    """
    world = dist.group.WORLD
    if process_group in (None, world) and isinstance(world, ProcessGroup) and not options.get("no_dist"):
        if world.for_checkpoints is None:
            world.for_checkpoints = dist.new_group(group_desc="checkpoints")
        process_group = world.for_checkpoints
    return original(executor, *arguments, process_group=process_group, **options)


def _split_group(
    original: Callable[..., Any],
    parent_pg: Any = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    **others: Any,
) -> Any:
    """Create the group of the list, of ranks of the parent, that has this rank; without one return None."""
    parent = parent_pg or dist.group.WORLD
    if not isinstance(parent, ProcessGroup):
        return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **others)
    lists = [sorted(ranks) for ranks in split_ranks or []]
    members = [rank for ranks in lists for rank in ranks]
    if not lists or not all(lists) or len(set(members)) < len(members) or not set(members) <= set(range(parent.size())):
        raise ArgumentError(
            f"split_group: split_ranks={split_ranks}. Pass lists of ranks of the parent, which has {parent.size()}; "
            "each rank may be in one of them."
        )
    mine = next((ranks for ranks in lists if parent.rank() in ranks), None)
    if mine is None:
        return None
    ranks = [dist.get_global_rank(parent, rank) for rank in mine]
    backend = dist.get_backend(parent)
    return dist.new_group(ranks, timeout, backend, pg_options, use_local_synchronization=True, group_desc=group_desc)


def _shrink_group(
    original: Callable[..., Any],
    ranks_to_exclude: list[int],
    group: Any = None,
    shrink_flags: int = 0,
    pg_options: Any = None,
) -> Any:
    """Replace a group by that of its other ranks, which alone call this.

    The default group has all ranks of the job, so it shrinks only by those that are lost: by ``recover()``.
    """
    chosen = group or dist.group.WORLD
    if not isinstance(chosen, ProcessGroup):
        return original(ranks_to_exclude, group, shrink_flags, pg_options)
    excluded, everyone = set(ranks_to_exclude), range(chosen.size())
    if not excluded or not excluded < set(everyone) or chosen.rank() in excluded:
        raise ArgumentError(
            f"rank {dist.get_rank()}: shrink_group({ranks_to_exclude}): pass ranks of the group, which has "
            f"{chosen.size()}, without this one."
        )
    backend = dist.get_backend(chosen)
    if chosen is dist.group.WORLD:
        if not recovery.is_rank_lost():
            raise ArgumentError(
                f"rank {dist.get_rank()}: shrink_group({ranks_to_exclude}): the default group shrinks only by ranks "
                "that are lost, with on_lost_rank='raise'. Make a group without them by new_group()."
            )
        recovery.recover()
        dist.init_process_group(backend)
        return dist.group.WORLD
    ranks = [dist.get_global_rank(chosen, rank) for rank in everyone if rank not in excluded]
    shrunk = dist.new_group(ranks, backend=backend, pg_options=pg_options, use_local_synchronization=True)
    if shrink_flags:  # SHRINK_ABORT
        chosen.abort()
    dist.destroy_process_group(chosen)
    return shrunk
