"""To a user of MixtureOfExperts: with experts and tokens on several ranks it is a plain mixture of one process."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError, MismatchError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2, 4), pytest.mark.usefixtures("world")]
TIGHT = {"rtol": 1e-9, "atol": 1e-11}
FEATURES, TOKENS = 6, 7


def make_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, FEATURES))


def num_experts() -> int:
    return 2 * mpi.size()


def layer(seed: int = 3, **options: object) -> mpinn.MixtureOfExperts:
    torch.manual_seed(seed)
    return mpinn.MixtureOfExperts(FEATURES, num_experts(), make_expert, **options).double()


class Whole(nn.Module):
    """All experts in one process, one token after the other."""

    def __init__(self, top_k: int = 2, capacity_factor: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(FEATURES, num_experts(), bias=False)
        self.experts = nn.ModuleDict({str(number): make_expert() for number in range(num_experts())})
        self.top_k, self.capacity_factor, self.num_dropped = top_k, capacity_factor, 0
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        probabilities = self.router(tokens).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        places = [math.inf] * num_experts()
        if self.capacity_factor is not None:
            places = [math.ceil(self.capacity_factor * chosen.numel() / num_experts())] * num_experts()
        result = [torch.zeros(FEATURES, dtype=torch.float64) for _ in tokens]
        for choice in range(self.top_k):
            for token, expert in enumerate(chosen[:, choice].tolist()):
                places[expert] -= 1
                if places[expert] >= 0:
                    one = self.experts[str(expert)](tokens[token])
                    result[token] = result[token] + weights[token, choice] * one
        self.num_dropped = -int(sum(min(each, 0) for each in places)) if self.capacity_factor is not None else 0
        shares = torch.bincount(chosen.reshape(-1), minlength=num_experts()) / chosen.numel()
        self.balance_loss = num_experts() * (shares * probabilities.mean(0)).sum()
        # An expert without tokens has a gradient of zeros, so that an optimizer with momentum moves it.
        nothing = sum(expert(tokens[:0]).sum() for expert in self.experts.values())
        return torch.stack(result) + nothing


def batch(seed: int = 8) -> Tensor:
    """The tokens of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    # Of unequal directions, so that some experts get many tokens and some none.
    return (
        torch.randn(mpi.size() * TOKENS, FEATURES, dtype=torch.float64, generator=generator)
        + torch.arange(FEATURES) / 4
    )


def own(tokens: Tensor) -> Tensor:
    return tokens[mpi.rank() * TOKENS : (mpi.rank() + 1) * TOKENS]


@pytest.mark.parametrize(
    "options", [{}, {"capacity_factor": 0.6}, {"top_k": 1}, {"top_k": 2, "capacity_factor": 0.1}], ids=str
)
def test_output_losses_and_gradients_are_those_of_one_process(agree, options):
    parallel, whole = layer(**options), Whole(**options)
    tokens = batch().requires_grad_()
    mine = own(tokens.detach()).clone().requires_grad_()
    output, expected = parallel(mine), whole(tokens)
    balance = mpi.allreduce(parallel.balance_loss.item(), op="avg")
    dropped = mpi.allreduce(parallel.num_dropped)
    (output.square().mean() + 0.1 * parallel.balance_loss).backward()
    (expected.square().mean() + 0.1 * whole.balance_loss).backward()
    mpinn.synchronize_gradients(parallel)
    agree.close(output, own(expected), "output", **TIGHT)
    agree.close(mine.grad, own(tokens.grad) * mpi.size(), "gradient of the tokens: the loss of this rank", **TIGHT)
    agree.equal((round(balance - whole.balance_loss.item(), 6), dropped), (0, whole.num_dropped))
    agree("capacity_factor" not in options or dropped > 0)
    for name, parameter in parallel.named_parameters():
        reference = dict(whole.named_parameters())[name].grad
        agree.close(
            parameter.grad,
            reference,
            f"gradient of {name}",
            **TIGHT,
        )


@pytest.mark.min_ranks(2)
def test_over_hosts(agree):
    mpi.stop()
    name = "aabb"[MPI.COMM_WORLD.rank] if MPI.COMM_WORLD.size == 4 else "ab"[MPI.COMM_WORLD.rank]
    with mpi.started(config=dataclasses.replace(mpi.Config.from_environment(), host_name=name, verbose=False)):
        parallel, whole = layer(capacity_factor=0.6), Whole(capacity_factor=0.6)
        tokens = batch()
        output, expected = parallel(own(tokens)), whole(tokens)
        output.square().mean().backward()
        expected.square().mean().backward()
        agree.close(output, own(expected), "output", **TIGHT)
        for name, parameter in parallel.experts.named_parameters():
            agree.close(parameter.grad, dict(whole.experts.named_parameters())[name].grad, name, **TIGHT)
    mpi.start()


def test_ranks_may_have_other_numbers_of_tokens(agree):
    """Rank 0 has none: it takes part with its experts."""
    parallel, whole = layer(), Whole()
    tokens = batch()[: mpi.rank() * 3].clone().requires_grad_()
    output = parallel(tokens.view(-1, 1, FEATURES))
    output.sum().backward()
    agree.equal(output.shape, (mpi.rank() * 3, 1, FEATURES))
    if len(tokens):
        agree.close(output.view(-1, FEATURES), whole(tokens.detach()), **TIGHT)
    agree(parallel.balance_loss.item() >= 0)


def test_state_dicts_of_all_ranks_are_a_complete_one(agree):
    parallel, whole = layer(seed=5), Whole()
    states = mpi.allgather_object(parallel.state_dict())
    complete = {name: value for state in states for name, value in state.items()}
    whole.load_state_dict(complete)
    other = layer(seed=6)
    other.load_state_dict(complete)
    agree.close(other(own(batch())), own(whole(batch())), **TIGHT)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**complete, f"experts.{num_experts()}.0.weight": torch.ones(1)})
    del complete[f"experts.{2 * mpi.rank()}.0.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(complete)


def test_no_limit_in_evaluation(agree):
    parallel, whole = layer(capacity_factor=0.1).eval(), Whole()
    agree.close(parallel(own(batch())), own(whole(batch())), **TIGHT)


def test_the_default_device_is_not_that_of_numbers_of_the_host(agree):
    parallel, tokens = layer(), own(batch())
    expected = parallel(tokens)
    torch.set_default_device("meta")
    try:
        output = parallel(tokens)
    finally:
        torch.set_default_device(None)
    agree.close(output, expected.detach(), **TIGHT)


def test_copies_and_pickles(agree):
    parallel = layer()
    expected = parallel(own(batch()))
    for other in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        agree.close(other(own(batch())), expected.detach(), **TIGHT)
        agree.equal([mpinn.sharding_of(each) is not None for each in other.parameters()][:2], [False, True])


def test_shards_are_not_replicated(agree):
    parallel = layer()
    before = {name: value.clone() for name, value in parallel.state_dict().items()}
    mpinn.synchronize_parameters(parallel)
    mpinn.check_with_allreduce(parallel)
    agree.equal(all(torch.equal(before[name], value) for name, value in parallel.state_dict().items()), True)
    agree("2 here" in repr(parallel), repr(parallel))


def test_wrong_arguments(agree):
    size = mpi.size()
    if size > 1:
        call = lambda: mpinn.MixtureOfExperts(4, size + 1, make_expert)  # noqa: E731
        agree.raises(ArgumentError, call, f"rank {mpi.rank()}", f"over {size} ranks", f"Pass {2 * size} experts")
    agree.raises(ArgumentError, lambda: mpinn.MixtureOfExperts(4, 0, make_expert), f"Pass {size} experts")
    agree.raises(ArgumentError, lambda: layer(top_k=2 * size + 1), f"Pass a number from 1 to {2 * size}")
    agree.raises(ArgumentError, lambda: layer(capacity_factor=0.0), "Pass a number above 0")
    agree.raises(ArgumentError, lambda: layer()(torch.ones(3, FEATURES + 1)), "with 6 features")
    wide = mpinn.MixtureOfExperts(FEATURES, 2 * size, lambda: nn.Linear(FEATURES, 9))
    agree.raises(ArgumentError, lambda: wide(torch.ones(3 * size, FEATURES)), "has returned 9 features", "return 6")


@pytest.mark.min_ranks(2)
def test_tokens_of_another_dtype_are_a_mismatch(agree):
    parallel = layer()
    if mpi.rank() == 1:
        parallel.float()
    agree.raises(MismatchError, lambda: parallel(own(batch()).to(parallel.router.weight.dtype)), "float32", "float64")
