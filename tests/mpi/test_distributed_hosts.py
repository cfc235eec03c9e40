"""To a user of torch.distributed on several hosts: calls run in machine code of the caller, and end at timeouts."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers.functions_entered import python_calls
from helpers.torch_rig import CALLS, Pairs, Setting, uneven_rows, wrong
from mpi4py import MPI

import torchmpi as mpi
from torchmpi.backends.long_calls import LongCall
from torchmpi.backends.mpi import MPIMovement
from torchmpi.config import Config
from torchmpi.errors import StallError
from torchmpi.session import runtime
from torchmpi.shared_memory import fast_path

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.ranks(3),
    pytest.mark.skipif(SIZE == 1, reason="needs another rank"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*will be deprecated"),
]
PLACEMENTS = sorted({hosts[:SIZE] for hosts in ("abc", "aab") if len(set(hosts[:SIZE])) > 1})
IN_CALLER = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "all_to_all_even", "all_to_all", "all_to_all_single",
    "all_to_all_single_uneven", "barrier", "native_alltoall_uneven",
)  # fmt: skip


def native_alltoall_uneven(s: Setting) -> tuple[None, Pairs]:
    given, sent, _, expected = uneven_rows(s)
    return None, [(mpi.alltoall(given, splits=sent), expected)]


@pytest.fixture(params=PLACEMENTS, scope="module")
def placement(request) -> Iterator[str]:
    """The process group, on these hosts."""
    was_running = runtime.is_running()
    mpi.stop()
    mpi.start(config=dataclasses.replace(Config.from_environment(), host_name=request.param[RANK]))
    dist.init_process_group("torchmpi")
    yield request.param
    dist.destroy_process_group()
    mpi.stop()
    if was_running:
        mpi.start()


def has_machine_code() -> bool:
    local, context = runtime.current().world.intra_host, runtime.current().context
    lacks_memory = mpi.allreduce(local is not None and local.status_board is None, op="max")
    is_built = fast_path.allreduce is not fast_path._not_built and runtime.current().config.fast_path
    return is_built and not (lacks_memory or context.sleeps_before_mpi)


@pytest.mark.parametrize(
    ("name", "asynchronous"), [*((name, False) for name in IN_CALLER), ("all_reduce", True), ("all_to_all", True)]
)
def test_a_repeated_call_has_the_same_result_in_the_caller(agree, placement, name, asynchronous):
    is_compiled = has_machine_code() and name in IN_CALLER and not asynchronous
    calls = CALLS | {"native_alltoall_uneven": native_alltoall_uneven}
    for repeat, root in itertools.product(range(3), (0, SIZE - 1)):
        setting = Setting(None, torch.int32, (5,), seed=repeat * SIZE + root, asynchronous=asynchronous)
        functions, (work, pairs) = python_calls(partial(calls[name], setting))
        if work is not None:
            work.wait()
        agree.equal(wrong(name, setting, pairs), [])
        through_python = {"submit", "perform"} & {code.co_name for code in functions}
        agree(not (is_compiled and repeat == 2 and through_python), f"the third call enters {through_python}")


@pytest.mark.parametrize("placement", ["aab"], indirect=True, scope="module")
def test_a_call_ends_at_the_timeout_and_the_group_is_refused(agree, placement):
    """One rank makes no call. What it would have sent may still arrive, so the group must not be used any more."""
    if not has_machine_code():
        pytest.skip("no machine code, whose wait can end")
    group, tensor = dist.new_group(), torch.ones(4)
    for _ in range(3):
        dist.all_reduce(tensor, group=group)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), group)
    heard = []
    for _ in range(2 if RANK < SIZE - 1 else 0):
        try:
            dist.all_reduce(tensor, group=group)
        except StallError as error:
            heard.append(str(error))
    MPI.COMM_WORLD.Barrier()
    if RANK < SIZE - 1:
        agree(f"rank {SIZE - 1}, after 3 calls" in heard[0], heard)
        awaits_messages = placement.index(placement[RANK]) == RANK and placement[RANK] != placement[SIZE - 1]
        agree(not awaits_messages or "cannot be used any more" in heard[1], heard)
    dist.all_reduce(tensor.fill_(1))
    agree.equal(tensor, torch.full((4,), float(SIZE)), "another group")


@pytest.mark.parametrize("name", ["all_to_all_single", "scatter", "gather"])
@pytest.mark.parametrize("placement", ["aab"], indirect=True, scope="module")
def test_a_call_ends_at_the_timeout_while_values_are_awaited(agree, placement, monkeypatch, name):
    """All ranks have exchanged what they must know of the tensors, but one does not send its values."""
    if not has_machine_code():
        pytest.skip("no machine code, whose wait can end")
    group, is_last, sender = dist.new_group(), RANK == SIZE - 1, MPIMovement
    if name == "scatter":
        received = torch.zeros(100_000)
        given, sends = torch.ones_like(received), "_send"
        call = partial(dist.scatter, received, [given] * SIZE if is_last else None, SIZE - 1, group)
    elif name == "gather":
        given, received, sends, sender = torch.ones(200_000), torch.zeros(SIZE, 200_000), "_exchange", LongCall
        call = partial(dist.gather, given, [*received] if RANK == 0 else None, 0, group)
        given = torch.ones_like(received) if RANK == 0 else received
    else:
        sizes, sends = [400 + (RANK + other) % 2 for other in range(SIZE)], "_exchange"
        given, received = torch.ones(sum(sizes)), torch.zeros(sum(sizes))
        call = partial(dist.all_to_all_single, received, given, sizes, sizes, group=group)
    for _ in range(3):
        call()
    agree.equal(received, given)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), group)
    if is_last:
        fast_path.pause(True)
        monkeypatch.setattr(sender, sends, lambda *_: 1 // 0)
        agree.raises(ZeroDivisionError, call)
        fast_path.pause(False)
    elif name != "gather" or RANK == 0:
        agree.raises(StallError, call, "The timeout of this group is 0.3 s")
        agree.raises(StallError, call, "cannot be used any more")
    else:  # it only sends
        with contextlib.suppress(StallError):
            call()
    MPI.COMM_WORLD.Barrier()
    dist.all_reduce(tensor := torch.ones(4))
    agree.equal(tensor, torch.full((4,), float(SIZE)), "another group")
