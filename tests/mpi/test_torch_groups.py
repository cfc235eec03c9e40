"""To a user of the backends of torch: their groups open and close, and lost connections raise."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import torchmpi as mpi
from torchmpi.backends.gloo import GlooGroup
from torchmpi.backends.gloo_backend import GlooBackend
from torchmpi.backends.shm import SharedMemoryBackend
from torchmpi.backends.torch_groups import GroupStore
from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.group import Group
from torchmpi.communicators.plan import Plan
from torchmpi.errors import MismatchError, TransportError
from torchmpi.launch.network import INTERFACE_VARIABLE
from torchmpi.session import runtime
from torchmpi.tensors.dtypes import info

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(3), pytest.mark.usefixtures("world")]


def unchecked(name):
    """Return a group whose operations can be run without an entry in the call log."""
    world = mpi.communicator(0).intra
    return Group(world.comm.Dup(), name, world.world_ranks, world.context, check="off")


@pytest.fixture
def group():
    made = unchecked("another group")
    yield made
    made.free()


def bind(group, collective, op=None):
    backends = runtime.current().selector.backends
    return GlooBackend(mpi.Config(), "", backends["shm"]).bind(group, collective, torch.float32, op).run


def threads():
    """The number of threads of this process, by name."""
    return Counter(path.read_text().rstrip("\n") for path in Path("/proc/self/task").glob("*/comm"))


def test_the_store_exchanges_keys_in_steps(agree):
    comm, rank, size = mpi.communicator(0).intra.comm, mpi.rank(), mpi.size()
    store = GroupStore(comm)
    store.set(f"key {rank}", str(rank))
    store.wait([f"key {other}" for other in range(size)])
    found = [store.get(f"key {other}") for other in range(size)]
    if rank == size - 1:
        store.set("id", b"of the last rank")
    agree.equal(store.get("id"), b"of the last rank")
    agree.equal(found, [str(other).encode() for other in range(size)])
    store.close()
    store.set("own", b"1")
    agree(store.check(["own", "id"]) and not store.check(["key of nobody"]))


def test_a_group_opens_its_connections_in_the_first_call_and_closes_them(agree):
    before = threads()
    group = unchecked("a group of gloo")
    operation = bind(group, "allreduce", "sum")
    agree.equal(len(group.attachments), 0, "bound")
    result = operation(torch.ones(3), None, 0)
    bind(group, "barrier")(None, None, 0)
    during = threads()
    group.free()
    agree.equal(result, torch.full((3,), float(mpi.size())))
    agree(during.total() > before.total() or mpi.size() == 1, f"{during}")
    limit = time.monotonic() + 30
    while (left := threads()).total() > before.total() and time.monotonic() < limit:
        time.sleep(0.01)  # gloo ends them in a thread of its own
    agree(left.total() <= before.total(), f"left: {left - before}")


def test_a_lost_connection_is_an_error_that_names_the_rank(agree, group):
    rank, size = mpi.rank(), mpi.size()
    operation = bind(group, "allreduce", "sum")
    operation(torch.ones(3), None, 0)
    error = None
    if rank == size - 1:
        group.comm.Barrier()
        for attachment in group.attachments:
            attachment.close()
    else:
        group.comm.Barrier()
        try:
            operation(torch.ones(100_000), None, 0)
        except TransportError as raised:
            error = raised
        lost = f"gloo lost the connection to rank {size - 1}"
        agree(error is not None and (lost in str(error) or size > 2), f"{error!r}")


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize(
    ("collective", "step"), [("allreduce", "begin_alltoall"), ("broadcast", "broadcast"), ("allgather", "exchange")]
)
def test_a_rank_that_fails_inside_a_call_ends_the_call_on_all_ranks(agree, monkeypatch, collective, step):
    """Regression: the other ranks waited until the watchdog ended the job."""
    world = mpi.communicator(0).intra
    group, last = world.duplicate("a call that fails"), mpi.size() - 1
    dtype, op = torch.float32, "sum" if collective == "allreduce" else None
    operation = runtime.current().selector.backends["gloo"].bind(group, collective, dtype, op).run
    plan = Plan(collective, call_code(collective, op, info(dtype).code), operation, shape_of=None)
    agree.equal(group.call(plan, torch.ones(3))[0].item(), mpi.size() if op else 1, "the call before it")
    mpi.barrier()

    def fail(*_):
        raise MemoryError("no room for a buffer")

    if mpi.rank() == last:
        monkeypatch.setattr(GlooGroup, step, fail)
    error = None
    try:
        group.call(plan, torch.ones(30_000), None, last)
    except (MemoryError, TransportError) as raised:
        error = raised
    agree(isinstance(error, MemoryError if mpi.rank() == last else TransportError), repr(error))
    monkeypatch.undo()
    mpi.barrier()  # no rank ends the wait of another one by freeing the group
    with pytest.raises(TransportError, match=r"has closed the connections of gloo.*Error: "):
        group.call(plan, torch.ones(3))
    mpi.barrier()
    group.free()


@pytest.mark.min_ranks(2)
def test_calls_that_differ_raise_on_all_ranks_before_gloo_moves_data(agree):
    for collective in (mpi.allreduce, mpi.broadcast):
        for numel in (3, 30_000):
            with pytest.raises(MismatchError, match=rf"\[{numel}\].*\[{numel + 1}\]|\[{numel + 1}\].*\[{numel}\]"):
                collective(torch.ones(numel + (mpi.rank() == 0)), backend="gloo")
            agree.equal(mpi.allreduce(1, backend="gloo"), mpi.size(), "the call after it")


@pytest.mark.min_ranks(2)
def test_a_call_by_gloo_does_not_match_the_same_call_by_shared_memory(agree):
    if mpi.communicator(0).intra.log_board is None:
        pytest.skip("no shared memory with all ranks")
    with pytest.raises(MismatchError, match=r"different transports|has aborted"):
        mpi.allreduce(torch.ones(3), backend="gloo" if mpi.rank() == 0 else "shm")
    agree.equal(mpi.allreduce(1, backend="gloo"), mpi.size(), "the call after it")
    agree.equal(mpi.allreduce(1, backend="shm"), mpi.size(), "shared memory after it")


@pytest.mark.min_ranks(2)
def test_without_kernels_calls_are_compared_by_a_message(agree):
    if mpi.communicator(0).intra.log_board is None:
        pytest.skip("over several hosts the caller of the backend compares")
    group = mpi.communicator(0).intra.duplicate("without kernels")
    config = mpi.Config(slot_bytes=0)
    backend = GlooBackend(config, "", SharedMemoryBackend(config, runtime.current().heap))
    code = call_code("broadcast", None, info(torch.float32).code)
    plan = Plan("broadcast", code, backend.bind(group, "broadcast", torch.float32, None).run, shape_of=None)
    for numel in (3, 30_000):
        with pytest.raises(MismatchError, match=rf"\[{numel}\].*\[{numel + 1}\]|\[{numel + 1}\].*\[{numel}\]"):
            group.call(plan, torch.ones(numel + (mpi.rank() == 0)))
        result = group.call(plan, torch.full((numel,), mpi.rank() + 1.0))
        agree.equal(result, torch.ones(numel), "the call after it")
    group.free()


def test_an_interface_that_does_not_exist_is_refused_with_the_variable(agree, group, monkeypatch):
    monkeypatch.setenv(INTERFACE_VARIABLE, "eth99")
    if mpi.size() > 1:
        with pytest.raises(TransportError, match=f"(?s)eth99.*{INTERFACE_VARIABLE}"):
            bind(group, "allreduce", "sum")(torch.ones(3), None, 0)


def test_the_interface_can_be_chosen(agree, group, monkeypatch):
    if len(group.hosts) > 1:
        pytest.skip("the loopback interface does not reach other hosts")
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")
    agree.equal(bind(group, "allreduce", "sum")(torch.ones(3), None, 0), torch.full((3,), float(mpi.size())))
