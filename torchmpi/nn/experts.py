"""A mixture of experts that are divided over the ranks: tokens travel to the ranks of their experts and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import collectives
from ..argument_types import checks_types
from ..collectives import exchange
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..errors import ArgumentError, rank_prefix
from ..session import runtime
from .functional import linear_map
from .replica import Attachment
from .sharding import SHARDED, KeepsShards, make_sharding, mark

_EXPERTS = "experts."


@checks_types
class MixtureOfExperts(KeepsShards):
    """A layer of many networks, the experts, of which each token passes through `top_k`. Collective.

    Each rank has an equal part of the experts and *its own tokens*. A linear router gives each token probabilities of
    experts; the token is sent to the ranks of the `top_k` most probable ones, and the results come back and are added,
    weighted by their probabilities, which are scaled to add up to 1. The result is that of one process with all
    experts and with the tokens of all ranks in rank order, rounding aside, and so are the gradients that the functions
    of :mod:`torchmpi.nn` average. With the same seed on all ranks, so are the initial weights.

    ``balance_loss`` is the loss of the last forward pass that keeps the experts equally busy: add a multiple of it to
    the loss of the task. Averaged over ranks with equally many tokens, it is that of one process; 1 is balance.
    ``num_dropped`` is the number of choices of this rank that had no place in the last pass.

    The parameters of experts are marked by :func:`~torchmpi.nn.set_sharded`; the router is replicated. The names of
    parameters contain the number of the expert, so that the ``state_dict()`` of all ranks together are a complete one,
    of which ``load_state_dict()`` takes what a rank needs, on any number of ranks.

    Args:
        num_features: Size of the last dimension of the input and output.
        num_experts: The number of experts; a multiple of the number of ranks.
        make_expert: Makes an expert, a module from (tokens, num_features) to the same shape. It is called for each
            expert on each rank, so that the weights do not depend on the number of ranks.
        top_k: The number of experts of a token.
        capacity_factor: In training, limits the tokens of an expert to this multiple of an equal share. What is beyond
            is dropped: the token gets nothing from that expert. First choices have places before second ones, and lower
            ranks before higher ones. None, and after ``eval()``: no limit.
        comm: Ranks over which the experts are divided; default: the current communicator.
        data_comm: Ranks with the same experts; default: as for ``set_sharded``.

    Raises:
        ArgumentError: The experts cannot be divided, or an argument is out of range; in the forward pass: the input
            does not have `num_features` features.
        MismatchError: In the forward pass: the ranks made different calls; raised on all ranks.

    Example:
        def make_expert():
            return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

        layer = mpinn.MixtureOfExperts(16, 2 * mpi.size(), make_expert, capacity_factor=1.25)
        y = x + layer(x)
        (y.square().mean() + 0.01 * layer.balance_loss).backward()
        mpinn.synchronize_gradients(layer)
    """

    balance_loss: Tensor
    num_dropped: int

    def __init__(
        self,
        num_features: int,
        num_experts: int,
        make_expert: Callable[[], nn.Module],
        *,
        top_k: int = 2,
        capacity_factor: float | None = None,
        comm: Comm = None,
        data_comm: Comm = None,
    ) -> None:
        super().__init__()
        communicator = runtime.communicator(comm)
        _check(communicator, num_features, num_experts, top_k, capacity_factor)
        self.num_features, self.num_experts, self.top_k = num_features, num_experts, top_k
        self.capacity_factor = capacity_factor
        self.token_exchange = TokenExchange(communicator)
        self.router = nn.Linear(num_features, num_experts, bias=False)
        here = num_experts // communicator.size
        own = range(communicator.rank * here, (communicator.rank + 1) * here)
        made = ((number, make_expert()) for number in range(num_experts))
        self.experts = nn.ModuleDict({str(number): expert for number, expert in made if number in own})
        self._sharding = make_sharding(comm, data_comm)
        _mark_experts(self)
        self.balance_loss, self.num_dropped = torch.zeros(()), 0
        self.register_load_state_dict_pre_hook(_leave_out_other_experts)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_mark_experts)  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum of the weighted results of the experts of each token, in the shape of the input."""
        if input.shape[-1] != self.num_features:
            raise ArgumentError(
                f"{rank_prefix()}MixtureOfExperts({self.num_features}, {self.num_experts}) got an input of shape "
                f"{list(input.shape)}. Pass tokens with {self.num_features} features in the last dimension."
            )
        tokens = input.reshape(-1, self.num_features)
        scores = self.router(tokens)
        probabilities = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights, chosen = probabilities.topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        routes = self._routes(chosen)
        self.num_dropped = chosen.numel() - len(routes.tokens)
        mean = probabilities.sum(0) / max(1, len(tokens))
        self.balance_loss = self.num_experts * (routes.shares * mean).sum()
        results = self._run_experts(tokens[routes.tokens], routes)
        results = results * weights[routes.tokens, routes.choices].unsqueeze(-1).to(results.dtype)
        return torch.zeros_like(tokens).index_add(0, routes.tokens, results.to(tokens.dtype)).view(input.shape)

    @torch.no_grad()
    def _routes(self, chosen: Tensor) -> _Routes:
        """Decide which choices have a place, with the numbers of all ranks. Collective."""
        num_tokens, top_k = chosen.shape
        experts = chosen.t().reshape(-1)  # of the first choices of all tokens, then of the second ones
        choices = torch.arange(top_k, device=chosen.device).repeat_interleave(num_tokens)
        keys = choices * self.num_experts + experts
        own = keys.bincount(minlength=top_k * self.num_experts)
        counts = self.token_exchange.gather(own.cpu()).view(-1, top_k, self.num_experts)
        kept = _with_place(counts, self.capacity_factor if self.training else None)
        order = keys.argsort(stable=True)
        keys = keys[order]
        places = torch.arange(len(keys), device=keys.device) - (own.cumsum(0) - own)[keys]
        limits = kept[self.token_exchange.comm.rank].reshape(-1).to(keys.device)
        order = order[places < limits[keys]]
        order = order[experts[order].argsort(stable=True)]
        per_expert = counts.sum((0, 1))
        shares = (per_expert / max(1, int(per_expert.sum()))).to(chosen.device)
        return _Routes(order % max(1, num_tokens), choices[order], kept.sum(1), shares)

    def _run_experts(self, rows: Tensor, routes: _Routes) -> Tensor:
        """Send rows, which are in the order of their experts, to the ranks of these; return the results. Collective."""
        comm = self.token_exchange.comm
        here, size = len(self.experts), comm.size
        per_rank = routes.kept.view(size, size, here).sum(2)
        sent, received = per_rank[comm.rank].tolist(), per_rank[:, comm.rank].tolist()
        arrived = self.token_exchange.alltoall(rows, sent, received)
        # They come by rank, and an expert takes those of all ranks together.
        counts = routes.kept.view(size, size, here)[:, comm.rank]
        numbers = torch.arange(here, device="cpu").repeat(size).repeat_interleave(counts.reshape(-1))
        order = numbers.argsort(stable=True).to(rows.device)
        # The gradient of an expert is the sum over ranks, and that of the router is averaged: scale it in between.
        arrived = _scale_gradient(arrived[order], size)
        parts = arrived.split(counts.sum(0).tolist())
        results = torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])
        if results.shape[1:] != rows.shape[1:]:
            raise ArgumentError(
                f"{rank_prefix()}MixtureOfExperts({self.num_features}, {self.num_experts}): an expert has returned "
                f"{results.shape[-1]} features. make_expert() must make modules that return {self.num_features}."
            )
        results = _scale_gradient(results, 1 / size)
        return self.token_exchange.alltoall(results[order.argsort()], received, sent)

    def extra_repr(self) -> str:
        """Describe the layer, for ``repr``."""
        return (
            f"num_features={self.num_features}, num_experts={self.num_experts} ({len(self.experts)} here), "
            f"top_k={self.top_k}, capacity_factor={self.capacity_factor}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # Neither copies nor pickles can have the graph of a loss.
        return {**self.__dict__, "balance_loss": self.balance_loss.detach()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.token_exchange is None:  # a pickle contains no communicator, which would be invalid in another job
            self.token_exchange = TokenExchange(runtime.communicator(None))
            _check(self.token_exchange.comm, self.num_features, self.num_experts, self.top_k, self.capacity_factor)
            self._sharding = make_sharding(None, None)
            for parameter in self.experts.parameters():
                mark(parameter, self._sharding)


class _Routes(NamedTuple):
    """Where the choices of this rank go that have a place, in the order of their experts."""

    tokens: Tensor
    """The token of each."""
    choices: Tensor
    """Whether it is the first choice of the token, or which."""
    kept: Tensor
    """How many rows each rank sends to each expert."""
    shares: Tensor
    """The part of all choices that each expert has, also of those without a place."""


def _with_place(counts: Tensor, capacity_factor: float | None) -> Tensor:
    """Return how many choices have a place, of those of each rank and order for each expert, given their numbers.

    >>> _with_place(torch.tensor([[[2, 0], [0, 2]], [[2, 1], [1, 2]]]), 1.0).tolist()  # 5 places for each expert
    [[[2, 0], [0, 2]], [[2, 1], [1, 2]]]
    >>> _with_place(torch.tensor([[[2, 0], [0, 2]], [[2, 0], [0, 2]]]), 0.5).tolist()  # 2 places
    [[[2, 0], [0, 2]], [[0, 0], [0, 0]]]
    """
    if capacity_factor is None:
        return counts
    capacity = math.ceil(capacity_factor * int(counts.sum()) / counts.shape[2])
    of_order = counts.sum(0)
    before = of_order.cumsum(0) - of_order + counts.cumsum(0) - counts
    return torch.minimum((capacity - before).clamp(min=0), counts)


class TokenExchange(Attachment):
    """What a layer asks of its communicator. Copies of the layer share it; pickles do not contain it."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenExchange:
        return self

    def gather(self, counts: Tensor) -> Tensor:
        """Return the counts of all ranks, in a new first dimension."""
        gathered: Tensor = collectives.allgather(counts.unsqueeze(0), comm=self.comm)
        return gathered

    def alltoall(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[j]` rows to rank j, and receive `received[j]` from it; the gradients go the other way."""
        return linear_map(
            rows,
            lambda values: self.move(values, sent, received),
            lambda values: self.move(values, received, sent),
        )

    def move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[j]` rows to rank j; return those that come, in the order of the ranks."""
        group = self.comm.intra
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        sources, parts = list(rows.detach().contiguous().split(sent)), list(result.split(received))
        exchange.PartsExchange.of(group, rows.dtype).run(sources, parts, rows)
        return result


def _check(comm: Communicator, num_features: int, num_experts: int, top_k: int, capacity_factor: float | None) -> None:
    where = f"{rank_prefix()}MixtureOfExperts"
    if num_experts < 1 or num_features < 1 or num_experts % comm.size:
        fitting = [each for each in range(1, num_experts + 1) if num_experts % each == 0]
        more = -(-num_experts // comm.size) * comm.size
        raise ArgumentError(
            f"{where}: num_experts={num_experts} cannot be divided over {comm.size} ranks, each with equally many. "
            f"Pass {max(more, comm.size)} experts, or as comm= one of {', '.join(map(str, fitting)) or 1} ranks."
        )
    if not 1 <= top_k <= num_experts:
        raise ArgumentError(f"{where}: top_k={top_k} of {num_experts} experts. Pass a number from 1 to {num_experts}.")
    if capacity_factor is not None and not capacity_factor > 0:
        raise ArgumentError(f"{where}: capacity_factor={capacity_factor}. Pass a number above 0, or None for no limit.")


def _scale_gradient(values: Tensor, factor: float) -> Tensor:
    """Return the values, whose gradient is multiplied by a factor."""
    same: Callable[[Tensor], Tensor] = lambda given: given.view_as(given)  # noqa: E731
    return values if factor == 1 else linear_map(values, same, lambda gradient: gradient * factor)


def _mark_experts(module: nn.Module, *_: Any) -> None:
    """Mark new parameters, such as those of ``load_state_dict(assign=True)``: their modules know nothing of shards."""
    assert isinstance(module, MixtureOfExperts)
    for parameter in module.experts.parameters():
        if not hasattr(parameter, SHARDED):
            mark(parameter, module._sharding)


def _leave_out_other_experts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Leave out what a complete state has of experts of other ranks."""
    assert isinstance(module, MixtureOfExperts)
    start, own = prefix + _EXPERTS, set(module.experts)
    for name in [name for name in state if name.startswith(start)]:
        number = name.removeprefix(start).partition(".")[0]
        if number.isdecimal() and int(number) < module.num_experts and number not in own:
            del state[name]
