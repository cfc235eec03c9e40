"""Initialization, groups, and errors."""

from __future__ import annotations

import os
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from features import Wrong, equal, feature, ones, other, raises, rank, without_addresses

TIMEOUT = timedelta(seconds=20)


@contextmanager
def another_world(backend: str, **options: Any) -> Iterator[None]:
    """Replace the default group within the block."""
    dist.destroy_process_group()
    dist.init_process_group(backend, timeout=TIMEOUT, **options)
    tensor = ones()
    dist.all_reduce(tensor)
    equal(tensor, [3.0] * 3)
    yield


def agreed(make: Any) -> Any:
    """Return the result of `make` on rank 0, on both ranks."""
    found = [make() if rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def numbers() -> dict[str, int]:
    return {"rank": rank(), "world_size": 2}


@feature("Starting", 'the backend alone: `init_process_group("...")`', renews=True)
def _() -> None:
    with another_world(str(dist.get_backend())):
        equal(dist.get_world_size(), 2)


@feature("Starting", '`init_method="mpi://"`', renews=True)
def _() -> None:
    with another_world(str(dist.get_backend()), init_method="mpi://"):
        pass


@feature("Starting", '`init_method="env://"` with `MASTER_ADDR`, `MASTER_PORT`, `RANK`, `WORLD_SIZE`', renews=True)
def _() -> None:
    variables = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agreed(free_port)), "RANK": str(rank()), "WORLD_SIZE": "2",
    }  # fmt: skip
    before = dict(os.environ)
    os.environ |= variables
    try:
        with another_world(str(dist.get_backend()), init_method="env://"):
            pass
    finally:
        os.environ.clear()
        os.environ |= before


@feature("Starting", '`init_method="tcp://..."`', renews=True)
def _() -> None:
    port = agreed(free_port)
    with another_world(str(dist.get_backend()), init_method=f"tcp://127.0.0.1:{port}", **numbers()):
        pass


@feature("Starting", '`init_method="file://..."`', renews=True)
def _() -> None:
    folder = agreed(tempfile.mkdtemp)
    with another_world(str(dist.get_backend()), init_method=f"file://{folder}/meet", **numbers()):
        pass


@feature("Starting", "`store=`", renews=True)
def _() -> None:
    folder = agreed(tempfile.mkdtemp)
    with another_world(str(dist.get_backend()), store=dist.FileStore(f"{folder}/meet", 2), **numbers()):
        pass


@feature("Starting", "`destroy_process_group()`, then `init_process_group()` again", renews=True)
def _() -> None:
    for _ in range(2):
        with another_world(str(dist.get_backend()), **without_addresses(str(dist.get_backend()))):
            pass


@feature("Starting", "`TORCH_DISTRIBUTED_DEBUG=DETAIL`", renews=True)
def _() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with another_world(str(dist.get_backend()), **without_addresses(str(dist.get_backend()))):
            dist.barrier()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


# --- groups ---------------------------------------------------------------------------------------------------------


@feature(
    "Groups",
    "`get_rank`, `get_world_size`, `get_process_group_ranks`, `get_group_rank`, `get_global_rank`, "
    "`get_node_local_rank`, `get_pg_count`, `is_initialized`",
)
def _() -> None:
    group = dist.new_group([1, 0])
    equal((rank(), dist.get_world_size(), dist.get_process_group_ranks(None)), (dist.get_rank(group), 2, [0, 1]))
    equal((dist.get_group_rank(group, rank()), dist.get_global_rank(group, rank())), (rank(), rank()))
    local_rank = int(os.environ.get("LOCAL_RANK", 5))
    equal((dist.get_node_local_rank(5), dist.get_pg_count() >= 2, dist.is_initialized()), (local_rank, True, True))


@feature(
    "Groups",
    "`get_backend`, `get_backend_config`, `is_backend_available`, `get_default_backend_for_device`, `supports_complex`",
)
def _() -> None:
    name = str(dist.get_backend())
    equal(f"cpu:{name}" in dist.get_backend_config() and dist.is_backend_available(name), True)
    equal(dist.distributed_c10d.supports_complex(dist.ReduceOp.SUM), True)
    equal(isinstance(dist.get_default_backend_for_device("cpu"), str), True)


@feature("Groups", "`new_group`, of some ranks")
def _() -> None:
    group = dist.new_group([1])
    if rank() == 1:
        equal(dist.get_world_size(group), 1)
        tensor = ones()
        dist.all_reduce(tensor, group=group)
        equal(tensor, [2.0] * 3)
    else:
        equal(group, dist.GroupMember.NON_GROUP_MEMBER)


@feature("Groups", "`new_group(use_local_synchronization=True)`, called by members only")
def _() -> None:
    if rank() == 1:
        tensor = ones()
        dist.all_reduce(tensor, group=dist.new_group([1], use_local_synchronization=True))
        equal(tensor, [2.0] * 3)


@feature("Groups", "`new_subgroups`")
def _() -> None:
    own, groups = dist.new_subgroups(1)
    equal((dist.get_process_group_ranks(own), len(groups)), ([rank()], 2))


@feature("Groups", "`new_subgroups_by_enumeration`")
def _() -> None:
    own, groups = dist.new_subgroups_by_enumeration([[0], [1]])
    equal((dist.get_process_group_ranks(own), len(groups)), ([rank()], 2))


@feature("Groups", '`new_group(backend="gloo")` beside the default group')
def _() -> None:
    tensor = ones()
    dist.all_reduce(tensor, group=dist.new_group(backend="gloo"))
    equal(tensor, [3.0] * 3)


@feature("Groups", "`destroy_process_group` of one group")
def _() -> None:
    group = dist.new_group([0, 1])
    dist.all_reduce(ones(), group=group)
    dist.destroy_process_group(group)
    raises((KeyError, ValueError), lambda: dist.get_process_group_ranks(group))
    tensor = ones()
    dist.all_reduce(tensor)
    equal(tensor, [3.0] * 3)


@feature("Groups", "`split_group`")
def _() -> None:
    group = dist.split_group(split_ranks=[[0], [1]])
    equal(dist.get_process_group_ranks(group), [rank()])


@feature("Groups", "a new timeout for a group")
def _() -> None:
    group = dist.new_group([0, 1])
    with warnings.catch_warnings(action="error"):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=30), group)
    tensor = ones()
    dist.all_reduce(tensor, group=group)
    equal(tensor, [3.0] * 3)


@feature("Groups", "`shrink_group`, of a group that `new_group` has made")
def _() -> None:
    group = dist.new_group([0, 1])
    if rank() == 0:
        equal(dist.get_world_size(dist.shrink_group([1], group)), 1)


@feature("Groups", "`shrink_group` of the default group, although no rank is lost", renews=True)
def _() -> None:
    if rank() == 0:
        equal(dist.get_world_size(dist.shrink_group([1])), 1)


@feature("Groups", "`record_comm`")
def _() -> None:
    with dist.distributed_c10d.record_comm("step"):
        tensor = ones()
        dist.all_reduce(tensor)
    equal(tensor, [3.0] * 3)


# --- errors ---------------------------------------------------------------------------------------------------------


@feature("Errors", "`monitored_barrier`")
def _() -> None:
    dist.monitored_barrier(timeout=TIMEOUT)


@feature("Errors", "`torchmpi.distributed.monitored_barrier`: names the missing ranks", renews=True)
def _() -> None:
    from torchmpi.distributed import monitored_barrier

    monitored_barrier(timeout=TIMEOUT)
    if rank() == 0:
        error = raises(RuntimeError, lambda: monitored_barrier(timeout=timedelta(seconds=0.2)))
        equal("rank 1" in str(error).lower(), True)


def short_group(seconds: float = 1) -> Any:
    """Return a group with a short timeout."""
    return dist.new_group([0, 1], timeout=timedelta(seconds=seconds))


@feature("Errors", "a missing rank: the call raises after `timeout`", renews=True)
def _() -> None:
    group = short_group()
    if rank() == 0:
        raises(RuntimeError, lambda: dist.all_reduce(ones(), group=group))


@feature("Errors", "the error of such a call names the rank", renews=True)
def _() -> None:
    group = short_group()
    if rank() == 0:
        error = raises(RuntimeError, lambda: dist.all_reduce(ones(), group=group))
        if "rank 1" not in str(error).lower():
            raise Wrong("it does not")


@feature("Errors", "`recv` of a message that is never sent raises after `timeout`", renews=True)
def _() -> None:
    group = short_group()
    if rank() == 0:
        raises(RuntimeError, lambda: dist.recv(torch.zeros(1), other(), group=group))


@feature("Errors", "tensors of different lengths in `all_reduce` raise on every rank", renews=True)
def _() -> None:
    raises(RuntimeError, lambda: dist.all_reduce(torch.ones(3 + rank()), group=short_group()))


@feature("Errors", "the same in an asynchronous `all_reduce`: `wait()` raises", renews=True)
def _() -> None:
    work = dist.all_reduce(torch.ones(3 + rank()), group=short_group(), async_op=True)
    raises(RuntimeError, work.wait)


@feature("Errors", "different dtypes in `all_reduce` raise on every rank", renews=True)
def _() -> None:
    tensor = torch.ones(4) if rank() == 0 else torch.ones(4, dtype=torch.int32)
    raises(RuntimeError, lambda: dist.all_reduce(tensor, group=short_group()))


@feature("Errors", "different operations raise on every rank", renews=True)
def _() -> None:
    op = dist.ReduceOp.SUM if rank() == 0 else dist.ReduceOp.MAX
    raises(RuntimeError, lambda: dist.all_reduce(ones(), op, group=short_group()))


@feature("Errors", "different calls raise on every rank", renews=True)
def _() -> None:
    group = short_group()
    call = dist.all_reduce if rank() == 0 else lambda tensor, group: dist.broadcast(tensor, 0, group=group)
    raises(RuntimeError, lambda: call(ones(), group=group))


@feature("Errors", "a message longer than the receiving tensor raises", turn=2)
def _() -> None:
    group = short_group()
    if rank() == 0:
        dist.send(torch.ones(4), 1, group=group)
    else:
        raises(RuntimeError, lambda: dist.recv(torch.zeros(2), 0, group=group))


@feature("Errors", "a root outside the group raises")
def _() -> None:
    raises((RuntimeError, ValueError), lambda: dist.broadcast(ones(), group_src=7))
