"""To an author of call hooks for PyTorch 2.14: they get what gloo's get, and cost nothing when they are gone."""

from __future__ import annotations

import enum
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.outcomes import refusal
from mpi4py import MPI

from torchmpi.distributed import call_hooks, torch_names
from torchmpi.distributed.process_group import ProcessGroup

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]

NAMES = "ALLREDUCE BROADCAST REDUCE ALLGATHER GATHER SCATTER REDUCE_SCATTER ALLTOALL SEND RECV BARRIER"


@pytest.fixture
def group(monkeypatch):
    """The default group. Torch before 2.14 has no names of the operations."""
    if torch_names.HookOpName is None:
        monkeypatch.setattr(torch_names, "HookOpName", enum.Enum("HookOpName", NAMES))
    dist.init_process_group("torchmpi")
    yield dist.group.WORLD
    dist.destroy_process_group()


def ones(numel: int = 3) -> torch.Tensor:
    return torch.ones(numel)


def rows(numel: int = 3) -> list[torch.Tensor]:
    return [ones(numel) for _ in range(SIZE)]


LAST = SIZE - 1
ROOT_ROWS = rows() if RANK == LAST else None
ROW, ROWS = [3], [3] * SIZE
IF_ROOT = ROWS if RANK == LAST else []
CALLS = (  # name, whether asynchronous, elements of inputs and outputs, root, call; as gloo's hooks got them in 2.14.1
    ("ALLREDUCE", False, ROW, [], -1, lambda: dist.all_reduce(ones())),
    ("ALLREDUCE", True, ROW, [], -1, lambda: dist.all_reduce(ones(), async_op=True).wait()),
    ("ALLREDUCE", False, [3, 2], [], -1, lambda: dist.all_reduce_coalesced([ones(), ones(2)])),
    ("BROADCAST", False, ROW, [], LAST, lambda: dist.broadcast(ones(), LAST)),
    ("REDUCE", False, ROW, [], LAST, lambda: dist.reduce(ones(), LAST)),
    ("ALLGATHER", False, ROW, ROWS, -1, lambda: dist.all_gather(rows(), ones())),
    ("ALLGATHER", False, ROW, [3 * SIZE], -1, lambda: dist.all_gather_into_tensor(ones(3 * SIZE), ones())),
    ("GATHER", False, ROW, IF_ROOT, LAST, lambda: dist.gather(ones(), ROOT_ROWS, LAST)),
    ("SCATTER", False, IF_ROOT, ROW, LAST, lambda: dist.scatter(ones(), ROOT_ROWS, LAST)),
    ("REDUCE_SCATTER", False, [3 * SIZE], ROW, -1, lambda: dist.reduce_scatter_tensor(ones(), ones(3 * SIZE))),
    ("REDUCE_SCATTER", False, ROWS, ROW, -1, lambda: dist.reduce_scatter(ones(), rows())),
    ("ALLTOALL", False, [SIZE], [SIZE], -1, lambda: dist.all_to_all_single(ones(SIZE), ones(SIZE))),
    ("ALLTOALL", False, ROWS, ROWS, -1, lambda: dist.all_to_all(rows(), rows())),
    ("BARRIER", False, [], [], -1, lambda: dist.barrier()),
)


def test_hooks_get_what_those_of_gloo_get(group, agree):
    """Regression: hooks were accepted, and never called."""
    before, after = [], []
    group.register_pre_hook(1, before.append)
    group.register_post_hook(1, after.append)
    for _ in range(2):  # the second time by machine code
        for *_, call in CALLS:
            call()
    found = [
        (
            each.name.name,
            each.async_op,
            *([one.numel() for one in some] for some in (each.input_tensors, each.output_tensors)),
            each.root,
        )
        for each in before
    ]
    agree.equal(found, [tuple(row[:-1]) for row in CALLS] * 2)
    agree.equal(
        [(each.name, each.async_op, each.op_id) for each in after],
        [(each.name, each.async_op, each.op_id) for each in before],
    )
    agree(all(each.work.is_completed() for each in after), "works")
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)
    dist.all_reduce(ones())
    agree.equal((len(before), "allreduce" in vars(group)), (2 * len(CALLS), False), "the group is as before")


@pytest.mark.ranks(3)
def test_hooks_of_messages(group, agree):
    before = []
    group.register_pre_hook(1, before.append)
    if RANK == 0:
        dist.send(ones(), 1)
    elif RANK == 1:
        dist.recv(ones(), 0)
    agree.equal(
        [(each.name.name, each.root) for each in before],
        [("SEND", 1), ("RECV", 0), None][RANK : RANK + 1] if RANK < 2 else [],
    )


def test_abort_hooks_run_when_a_call_fails_and_before_an_abort(group, agree):
    calls = []

    def fails():
        calls.append("raised")
        raise ValueError("of the hook")

    group.register_abort_hook(1, lambda: calls.append("called"))
    group.register_abort_hook(2, fails)
    agree("Pass a function" in refusal(lambda: group.register_abort_hook(3, None)))
    dist.all_reduce(ones())
    agree.equal(calls, [])
    agree("dtype" in refusal(lambda: dist.all_gather(rows(), torch.ones(3, dtype=torch.int32))), "an argument")
    agree.equal(calls, [], "the group is as before an error in arguments")
    if SIZE > 1:
        message = refusal(lambda: dist.all_reduce(ones(2 + (RANK == 0))))
        agree("different" in message and "of the hook" not in message, message)
        agree.equal(calls, ["called", "raised"], "a mismatch")
        late = dist.new_group(timeout=timedelta(seconds=0.2))
        late.register_abort_hook(1, lambda: calls.append("late"))
        if RANK == 0:
            agree("0.2 s" in refusal(lambda: dist.all_reduce(ones(), group=late, async_op=True).wait()), "a timeout")
            agree("late" in calls, str(calls))
        dist.barrier()
    calls.clear()
    made = dist.new_group()
    made.register_abort_hook(1, lambda: calls.append("aborted"))
    made.unregister_abort_hook(7)
    dist.barrier(made)
    made.abort()
    agree.equal(calls, ["aborted"])


def test_every_call_of_a_group_has_hooks(agree):
    calls = {
        name
        for name, each in vars(ProcessGroup).items()
        if "Work" in str(getattr(each, "__annotations__", {}).get("return"))
    }
    private = {name for name in calls if name.startswith("_")} - {"_allgather_base", "_reduce_scatter_base"}
    agree.equal(calls - private, set(call_hooks._FORMS))


def test_what_a_group_in_python_cannot_do_names_what_to_use(group, agree):
    """Regression: the errors were those of a backend that is not found."""
    agree.equal((group.supports_reconfigure, group.supports_window), (False, False))
    for call in (group.get_reconfigure_handle, lambda: group.reconfigure(None), group.new_window):
        agree("shrink_group" in refusal(call), refusal(call))
