"""To a user of servers for lists of tensors: they give and take what one server for each tensor would."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from helpers import updates_rig
from helpers.outcomes import refusal
from torch import nn

import torchmpi as mpi
import torchmpi.parameterserver as ps
from torchmpi.errors import ReplicaError
from torchmpi.parameterserver.parameter_lists import _registry

no_servers_left = updates_rig.no_servers_left
pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


def test_lists_of_tensors(agree):
    rank, size = mpi.rank(), mpi.size()
    ones = torch.ones(4, dtype=torch.int64)
    tensors = [torch.full((3, 2), float(rank)), torch.full((5,), rank), torch.full((), 0.5), ones.clone()]
    before = [tensor.clone() for tensor in tensors]
    ps.init_tensors(tensors)
    handles = ps.prefetch_tensors(tensors)
    agree.equal(len(handles), 2, "one server per dtype")
    agree.equal(ps.sync_handles(handles), [], "nothing left to wait for")
    seen = []
    ps.integrate_tensors(tensors, lambda fetched, tensor: seen.append((fetched.clone(), tensor)))
    expected = [torch.zeros(3, 2), torch.zeros(5, dtype=torch.int64), torch.full((), 0.5), ones]
    for (fetched, tensor), value, own in zip(seen, expected, tensors, strict=True):
        agree.equal(fetched, value, "the values of rank 0")
        agree(tensor is own, "the tensors themselves are handed out")
    mpi.barrier()
    updates = [torch.ones_like(tensor) for tensor in tensors]
    handles = ps.send_tensors(tensors, updates, local_update=lambda update: update * 2)
    for update in updates:
        update.fill_(77)  # they were copied
    ps.sync_handles(handles)
    mpi.barrier()
    ps.prefetch_tensors(tensors)
    ps.integrate_tensors(tensors, lambda fetched, tensor: tensor.copy_(fetched))
    for tensor, value, old in zip(tensors, expected, before, strict=True):
        agree.equal(tensor, value + 2 * size, f"was {old}")
    ps.free_tensors(tensors)


def test_server_init(agree):
    """Lua TorchMPI replaced this argument, psInitFun, by its default."""
    tensors = [torch.full((6,), mpi.rank() + 1.0), torch.full((2,), mpi.rank() + 1.0)]
    ps.init_tensors(tensors, server_init=lambda server, values: ps.send(server, values, "max").wait())
    ps.prefetch_tensors(tensors)
    ps.integrate_tensors(tensors, lambda fetched, tensor: tensor.copy_(fetched))
    for tensor in tensors:
        agree.equal(tensor, torch.full_like(tensor, float(mpi.size())), "the largest of all ranks")


def test_prefetch_allocator(agree):
    made = []

    def allocate(numel, dtype):
        made.append(torch.zeros(numel, dtype=dtype))
        return made[-1]

    tensors = [torch.ones(3), torch.ones(4)]
    ps.init_tensors(tensors, prefetch_allocator=allocate)
    ps.prefetch_tensors(tensors)
    addresses = []
    ps.integrate_tensors(tensors, lambda fetched, tensor: addresses.append(fetched.data_ptr()))
    agree.equal(addresses, [made[0].data_ptr(), made[0][3:].data_ptr()])


def test_none_counts_as_zeros(agree):
    tensors = [torch.zeros(3), torch.zeros(2)]
    ps.init_tensors(tensors)
    ps.sync_handles(ps.send_tensors(tensors, [None, torch.ones(2)]))
    mpi.barrier()
    ps.prefetch_tensors(tensors)
    ps.integrate_tensors(tensors, lambda fetched, tensor: tensor.copy_(fetched))
    agree.equal(torch.cat(tensors), torch.tensor([0.0] * 3 + [float(mpi.size())] * 2))


def test_invalid_lists_are_rejected(agree):
    tensors, others = [torch.zeros(3), torch.zeros(2)], [torch.zeros(1)]
    ps.init_tensors(tensors)
    ps.init_tensors(others)
    for action, message in (
        (lambda: ps.init_tensors([torch.zeros(1), tensors[0]]), "tensor 1 of the list has a server already"),
        (lambda: ps.prefetch_tensors([torch.zeros(1)]), "tensor 0 of the list has no server. Call init_tensors()"),
        (lambda: ps.prefetch_tensors(tensors[:1]), "in another list"),
        (lambda: ps.integrate_tensors(tensors[::-1], print), "in another list"),
        (lambda: ps.integrate_tensors(tensors, print), "no values have been fetched. Call prefetch_tensors()"),
        (lambda: ps.prefetch_tensors(tensors + others), "in another list"),
        (lambda: ps.prefetch_tensors([]), "found an empty one"),
        (lambda: ps.prefetch_tensors([1.0]), "found a float in it"),
        (lambda: ps.init_tensors([others[0], others[0]]), "twice"),
        (lambda: ps.send_tensors(tensors, [torch.zeros(3)]), "the updates need the shapes"),
        (lambda: ps.send_tensors(tensors, [torch.zeros(2), torch.zeros(3)]), "the updates need the shapes"),
        (lambda: ps.send_tensors(tensors, tensors, "nonsense"), "unknown rule 'nonsense'"),
    ):
        found = refusal(action)
        agree("ArgumentError" in found and message in found, f"expected {message!r}: {found}")
    ps.free_tensors(tensors)
    agree("has no server" in refusal(lambda: ps.prefetch_tensors(tensors)), "after free_tensors")
    ps.init_tensors(tensors)  # may be done again


def refuse_nans(values, sent):
    if sent.isnan().any():
        raise ValueError("nans")
    values.add_(sent)


def test_sends_after_a_failed_send(agree):
    ps.register_rule("refuse_nans", refuse_nans)
    tensors = [torch.zeros(4)]
    ps.init_tensors(tensors)
    handles = ps.send_tensors(tensors, [torch.full((4,), math.nan)], "refuse_nans")
    seen = refusal(lambda: ps.sync_handles(handles))
    found = refusal(lambda: ps.sync_handles(ps.send_tensors(tensors, [torch.ones(4)])))
    ps.send_tensors(tensors, [torch.full((4,), math.nan)], "refuse_nans")  # not waited for
    told = refusal(lambda: ps.send_tensors(tensors, [torch.ones(4)]))
    mpi.barrier()
    ps.prefetch_tensors(tensors)
    ps.integrate_tensors(tensors, lambda fetched, tensor: tensor.copy_(fetched))
    mpi.barrier()
    failing = ps.send_tensors(tensors, [torch.full((4,), math.nan)], "refuse_nans")
    freed = refusal(lambda: ps.free_tensors(tensors))
    last = refusal(lambda: ps.sync_handles(failing))
    agree.equal([found, freed], ["nothing was raised"] * 2)
    agree(all("ValueError: nans" in text for text in (seen, told, last)), f"{seen}, {told}, {last}")
    agree.equal(tensors[0], torch.full((4,), float(mpi.size())))


def test_a_rule_that_is_undefined_for_one_dtype_is_not_sent(agree):
    tensors = [torch.zeros(3), torch.zeros(2, dtype=torch.int64)]
    ps.init_tensors(tensors)
    found = refusal(lambda: ps.send_tensors(tensors, [torch.ones(3), None], ps.scaled_add(1.0)))
    mpi.barrier()
    ps.prefetch_tensors(tensors)
    ps.integrate_tensors(tensors, lambda fetched, tensor: tensor.copy_(fetched))
    agree(f"rank {mpi.rank()}: parameterserver.send: rule='scaled_add' is not defined for int64" in found, found)
    agree.equal(tensors[0], torch.zeros(3), "nothing was sent")


def test_lists_that_differ_between_ranks_are_rejected(agree):
    tensors = [torch.zeros(3 + (mpi.rank() == 1))]
    found = refusal(lambda: ps.init_tensors(tensors))
    agree(found.startswith(ReplicaError.__name__) if mpi.size() > 1 else "nothing" in found, found)


def test_no_reference_to_the_tensors_is_kept(agree):
    gc.collect()
    before = len(_registry())
    tensors = [torch.zeros(3), nn.Parameter(torch.zeros(2))]
    ps.init_tensors(tensors)
    ps.sync_handles(ps.prefetch_tensors(tensors) + ps.send_tensors(tensors, tensors))
    ps.integrate_tensors(tensors, lambda fetched, tensor: None)
    agree.equal(len(_registry()), before + 2)
    del tensors
    gc.collect()
    agree.equal(len(_registry()), before, "entries of deleted tensors")
