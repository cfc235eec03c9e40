"""Process groups of torch as backends: opening and closing them, and lost connections."""

from __future__ import annotations

import os

import pytest
import torch

import torchmpi as mpi
from torchmpi.backends.gloo import GlooBackend
from torchmpi.backends.network import INTERFACE_VARIABLE
from torchmpi.backends.torch_groups import GroupStore
from torchmpi.errors import MismatchError, TransportError

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def group():
    made = mpi.communicator(0).intra.duplicate("another group")
    yield made
    made.free()


def bind(group, collective, op=None):
    return GlooBackend(mpi.Config(), "").bind(group, collective, torch.float32, op)


def num_threads():
    return len(os.listdir("/proc/self/task"))


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
    before = num_threads()
    group = mpi.communicator(0).intra.duplicate("a group of gloo")
    operation = bind(group, "allreduce", "sum")
    agree.equal(len(group.attachments), 0, "bound")
    result = operation(torch.ones(3), None, 0)
    bind(group, "barrier")(None, None, 0)
    during = num_threads()
    group.free()
    agree.equal(result, torch.full((3,), float(mpi.size())))
    agree(during > before or mpi.size() == 1, f"{during} threads")
    agree(num_threads() <= before, "threads are left")


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


def test_calls_that_differ_raise_on_all_ranks_before_gloo_moves_data(agree):
    if mpi.size() == 1:
        pytest.skip("needs another rank")
    for collective in (mpi.allreduce, mpi.broadcast):
        for numel in (3, 30_000):
            with pytest.raises(MismatchError, match=rf"\[{numel}\].*\[{numel + 1}\]|\[{numel + 1}\].*\[{numel}\]"):
                collective(torch.ones(numel + (mpi.rank() == 0)), backend="gloo")
            agree.equal(mpi.allreduce(1, backend="gloo"), mpi.size(), "the call after it")


def test_an_interface_that_does_not_exist_is_refused_with_the_variable(agree, group, monkeypatch):
    monkeypatch.setenv(INTERFACE_VARIABLE, "eth99")
    if mpi.size() > 1:
        with pytest.raises(TransportError, match=f"(?s)eth99.*{INTERFACE_VARIABLE}"):
            bind(group, "allreduce", "sum")(torch.ones(3), None, 0)


def test_the_interface_can_be_chosen(agree, group, monkeypatch):
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")
    agree.equal(bind(group, "allreduce", "sum")(torch.ones(3), None, 0), torch.full((3,), float(mpi.size())))
