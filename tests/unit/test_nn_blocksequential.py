"""To a user of BlockSequential: parameters in blocks, otherwise equal to Sequential."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from torchmpi.errors import ArgumentError
from torchmpi.nn.blocksequential import BlockSequential


def layers() -> list[nn.Module]:
    torch.manual_seed(2)
    return [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)]


def pair(partitions: int = 2) -> tuple[BlockSequential, nn.Sequential]:
    """Return the same net with and without blocks."""
    return BlockSequential(partitions, *layers()), nn.Sequential(*layers())


def is_in_blocks(net: BlockSequential) -> bool:
    """Return whether a change of the blocks changes the parameters."""
    before = [p.detach().clone() for p in net.parameters()]
    for block in net.parameter_blocks():
        block.add_(1)
    return all(torch.equal(p, old + 1) for p, old in zip(net.parameters(), before, strict=True))


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    dtype = next(net.parameters()).dtype
    net(torch.linspace(-1, 1, 20, dtype=dtype).view(5, 4)).square().sum().backward()
    optimizer.step()


def assert_same_state(net: nn.Module, other: nn.Module) -> None:
    state, expected = net.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_blocks_hold_all_parameters():
    net, _ = pair(3)
    assert len(net.parameter_blocks()) == 3
    assert sum(block.numel() for block in net.parameter_blocks()) == sum(p.numel() for p in net.parameters())
    assert is_in_blocks(net)


def test_more_partitions_than_parameters():
    net = BlockSequential(50, *layers())
    assert len(net.parameter_blocks()) == len(list(net.parameters()))


def test_trains_like_sequential():
    net, plain = pair()
    optimizers = [torch.optim.Adam(n.parameters(), lr=0.01) for n in (net, plain)]
    for _ in range(3):
        step(net, optimizers[0])
        step(plain, optimizers[1])
    assert_same_state(net, plain)
    assert is_in_blocks(net)


def test_state_dict_of_and_for_sequential():
    net, plain = pair()
    nn.init.ones_(plain[0].weight)
    net.load_state_dict(plain.state_dict())
    assert_same_state(net, plain)
    nn.init.zeros_(net[2].weight)
    plain.load_state_dict(net.state_dict())
    assert_same_state(net, plain)
    assert is_in_blocks(net)


def test_assigned_state_is_moved_to_blocks():
    net, plain = pair()
    net.load_state_dict(plain.state_dict(), assign=True)
    assert is_in_blocks(net)


def test_conversion_keeps_objects_values_and_blocks():
    net, plain = pair()
    parameters = list(net.parameters())
    net.double()
    assert all(p is q for p, q in zip(net.parameters(), parameters, strict=True))
    assert_same_state(net, plain.double())
    assert {block.dtype for block in net.parameter_blocks()} == {torch.float64}
    assert is_in_blocks(net)


def test_optimizer_made_before_a_conversion_keeps_working():
    net, plain = pair()
    for n in (net, plain):
        optimizer = torch.optim.SGD(n.parameters(), lr=0.1)
        n.double()
        step(n, optimizer)
    assert_same_state(net, plain)


def test_each_dtype_has_its_own_blocks():
    net = BlockSequential(1, nn.Linear(2, 2), nn.Linear(2, 2).double())
    assert [block.dtype for block in net.parameter_blocks()] == [torch.float32, torch.float64]


def test_channels_last_is_kept():
    net = BlockSequential(1, nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert is_in_blocks(net)


def test_gradient_blocks_are_the_gradients():
    net, plain = pair()
    for n in (net, plain):
        n(torch.ones(3, 4)).sum().backward()
    for block in net.gradient_blocks():
        block.mul_(2)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, 2 * q.grad)


def test_gradients_return_to_their_blocks_after_zero_grad():
    net, _ = pair()
    blocks = net.gradient_blocks()
    net.zero_grad(set_to_none=True)
    net(torch.ones(3, 4)).sum().backward()
    again = net.gradient_blocks()
    assert [block.data_ptr() for block in again] == [block.data_ptr() for block in blocks]
    assert torch.equal(net[4].bias.grad, torch.full((2,), 3.0))


def test_frozen_parameters_have_no_gradient_in_a_block():
    net, _ = pair(1)
    net[0].requires_grad_(False)
    numel = sum(block.numel() for block in net.gradient_blocks())
    net[2].requires_grad_(False)
    assert sum(block.numel() for block in net.gradient_blocks()) < numel
    assert net[0].weight.grad is None


def test_sharded_parameters_are_not_in_blocks():
    layer = nn.Linear(2, 2)
    layer.weight.torchmpi_sharded = True
    assert [block.numel() for block in BlockSequential(1, layer).parameter_blocks()] == [2]


def test_shared_parameters_are_stored_once():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    net = BlockSequential(1, first, second)
    assert [block.numel() for block in net.parameter_blocks()] == [8]
    assert net[0].weight is net[1].weight


def test_copies_have_their_own_blocks():
    net, plain = pair()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert_same_state(other, plain)
        assert is_in_blocks(other)
    assert_same_state(net, plain)


def test_layers_may_be_added_later():
    net, _ = pair()
    net.append(nn.Linear(2, 1))
    assert sum(block.numel() for block in net.parameter_blocks()) == sum(p.numel() for p in net.parameters())
    assert is_in_blocks(net)


def test_without_parameters():
    net = BlockSequential(2, nn.ReLU())
    assert net.parameter_blocks() == net.gradient_blocks() == []


def test_refusals():
    with pytest.raises(ArgumentError, match="partitions"):
        BlockSequential(0, nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="partitions"):
        BlockSequential(nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="cannot contain another"):
        BlockSequential(1, nn.Sequential(BlockSequential(1, nn.Linear(1, 1))))
