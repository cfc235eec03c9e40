"""To a user of synchronize_parameters(): which tensors of a net are synchronized."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchmpi.errors import ArgumentError
from torchmpi.nn.replica import SHARDED, Attachment, Replica, attach, attached, sparse_by_declaration
from torchmpi.nn.sharding import Sharding


def test_parameters_and_buffers_in_module_order():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.LSTM(3, 2)))
    replica = Replica(net)
    assert all(a is b for a, b in zip(replica.parameters, net.parameters(), strict=True))
    assert all(a is b for a, b in zip(replica.buffers, net.buffers(), strict=True))


def test_shared_modules_parameters_and_buffers_count_once():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    norm = nn.BatchNorm1d(2)
    replica = Replica(nn.Sequential(first, second, norm, norm))
    assert (len(replica.parameters), len(replica.buffers)) == (5, 3)


def test_sharded_and_frozen_parameters():
    net = nn.Linear(2, 2)
    net.weight.torchmpi_sharded = True
    assert Replica(net).names(Replica(net).parameters) == ["bias"]
    net.bias.requires_grad_(False)
    assert Replica(net).trainable == []


def test_names():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    replica = Replica(net)
    assert replica.names([net[1].running_mean, net[0].bias]) == ["1.running_mean", "0.bias"]
    assert replica.name(net[0].weight) == "0.weight"


def test_iterables_of_tensors():
    tensor = torch.ones(2)
    replica = Replica(item for item in (tensor, tensor, torch.ones(3)))
    assert len(replica.parameters) == 2
    assert replica.name(replica.parameters[1]) == "tensor 1"
    with pytest.raises(ArgumentError, match="found a str"):
        Replica(["weight"])


def test_modules_may_have_empty_places():
    net = nn.Linear(2, 2, bias=False)
    net.register_buffer("nothing", None)
    net.register_module("no_module", None)
    assert len(Replica(net).parameters) == 1


def test_declared_sparse():
    net = nn.ModuleList([nn.Embedding(3, 2), nn.Embedding(3, 2, sparse=True), nn.EmbeddingBag(3, 2, sparse=True)])
    assert sparse_by_declaration(net.modules()) == {id(net[1].weight), id(net[2].weight)}


def test_attachments_are_not_copied_with_a_net():
    net = nn.Linear(2, 2)
    state = Attachment()
    attach(net, "torchmpi_test", state)
    assert attached(net, "torchmpi_test") is state
    assert attached(copy.deepcopy(net), "torchmpi_test") is None
    assert attached(pickle.loads(pickle.dumps(net)), "torchmpi_test") is None
    attach(net, "torchmpi_test", None)
    assert "torchmpi_test" not in net.__dict__


def test_sync_batchnorm_of_torch_is_refused_where_it_would_not_synchronize():
    net = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ArgumentError, match=r"'1' is a torch.nn.SyncBatchNorm.*convert_sync_batchnorm"):
        Replica(net)
    Replica(net.eval())  # uses the running statistics
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        Replica(net.train())
    finally:
        torch.distributed.destroy_process_group()


def test_modules_and_shards_are_listed_once():
    inner = nn.Linear(2, 2)
    net = nn.Sequential(inner, nn.Sequential(inner, nn.ReLU()))
    assert Replica(net).modules == list(net.modules())
    shard = nn.Parameter(torch.ones(2))
    setattr(shard, SHARDED, True)
    inner.weight = net[1][1].weight = shard
    assert [id(tensor) for tensor in Replica(net).shards] == [id(shard)]
    assert [id(tensor) for tensor in Replica(net).parameters] == [id(inner.bias)]


def test_the_frozen_part_of_a_shard_is_not_trained(monkeypatch):
    """Gradients are exchanged of the others only."""
    net = nn.Linear(2, 2)
    net.register_buffer("mean", torch.zeros(2))
    holders = SimpleNamespace(intra=object())
    sharding = Sharding(None, None)
    monkeypatch.setattr(sharding, "holders_in", lambda comm: holders, raising=False)
    for tensor in (net.weight, net.bias, net.mean):
        setattr(tensor, SHARDED, sharding)
    net.bias.requires_grad_(False)
    ((part, found),) = Replica(net).shard_parts(SimpleNamespace(size=2))
    assert found is holders
    assert part.names(part.trainable) == ["weight"]
    assert part.names(part.parameters) == ["weight", "bias"] and part.names(part.buffers) == ["mean"]
