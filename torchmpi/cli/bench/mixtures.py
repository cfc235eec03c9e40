"""Training steps of a mixture of experts, in one process and divided over ranks, for ``torchmpi bench parallel``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchmpi

from ... import nn as mpinn
from ...nn.experts import TokenExchange
from .bench_job import BenchJob
from .divided_work import ONE_PROCESS, ParallelContestant, compared, held_bytes

_EXPERTS_PER_RANK = 2

Average = Callable[[Tensor], object]


class TorchExchange(TokenExchange):
    """The exchange of a layer through a process group of torch.distributed."""

    def __init__(self, group: Any) -> None:
        super().__init__(torchmpi.communicator(0))
        self.group = group

    def gather(self, counts: Tensor) -> Tensor:
        gathered = counts.new_empty(self.comm.size * len(counts))
        dist.all_gather_into_tensor(gathered, counts, group=self.group)
        return gathered

    def move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows to other ranks, and return the received ones."""
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group)
        return result


class _RecordedExchange(TokenExchange):
    """The exchange of a layer, which keeps its calls so that they can be repeated without computing."""

    def __init__(self, exchange: TokenExchange) -> None:
        super().__init__(exchange.comm)
        self._exchange = exchange
        self.calls: list[Callable[[], object]] = []

    def gather(self, counts: Tensor) -> Tensor:
        self.calls.append(partial(self._exchange.gather, counts))
        return self._exchange.gather(counts)

    def move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        self.calls.append(partial(self._exchange.move, rows, sent, received))
        return self._exchange.move(rows, sent, received)


def mixtures(job: BenchJob, width: int, batch: int, groups: Mapping[str, Any]) -> list[ParallelContestant]:
    """Make the contestants: one process, the layer, and the same layer with the exchange of each group."""
    num_experts = _EXPERTS_PER_RANK * job.size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(job.size, batch, width, generator=generator)
    layer = _make_layer(width, num_experts)
    alone = ParallelContestant(ONE_PROCESS, lambda: None, alone=True)
    first, expected = torchmpi.group([0]), 0.0
    job.resources.callback(first.free)
    if first:
        with torchmpi.use(first):
            whole = _make_layer(width, num_experts)
        step = partial(_step, whole, tokens.view(-1, width), lambda gradient: gradient)
        expected = step()
        alone = ParallelContestant(ONE_PROCESS, step, alone=True, held_bytes=held_bytes(whole))
    expected = job.comm.bcast(expected)
    held = partial(held_bytes, layer)
    found = [alone]

    def add(name: str, messages: str, layer: mpinn.MixtureOfExperts, average: Average) -> None:
        step = partial(_step, layer, tokens[job.rank], average)
        found.append(compared(job, name, step, [expected], held))
        found.append(ParallelContestant(messages, _messages(layer, step, average)))

    add("MixtureOfExperts", "its messages", layer, partial(torchmpi.allreduce, op="avg"))
    for name, group in groups.items():
        other = copy.deepcopy(layer)
        other.token_exchange = TorchExchange(group)
        add(f"torch.distributed on {name}", f"its messages on {name}", other, partial(_average, group))
    return found


def _average(group: Any, gradient: Tensor) -> None:
    dist.all_reduce(gradient, group=group)
    gradient /= dist.get_world_size(group)


def _messages(layer: mpinn.MixtureOfExperts, step: Callable[[], object], average: Average) -> Callable[[], None]:
    """Return a function that makes the calls of a step without computing. Collective."""
    exchange = layer.token_exchange
    layer.token_exchange = recorded = _RecordedExchange(exchange)
    step()
    layer.token_exchange = exchange
    gradient = layer.router.weight.detach().clone()

    def messages() -> None:
        for call in recorded.calls:
            call()
        average(gradient)

    return messages


def _make_layer(width: int, num_experts: int) -> mpinn.MixtureOfExperts:
    """Make the layer, with the same weights whatever ranks it is divided over."""
    torch.manual_seed(1)

    def make_expert() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    return mpinn.MixtureOfExperts(width, num_experts, make_expert, capacity_factor=1.25)


def _step(layer: mpinn.MixtureOfExperts, tokens: Tensor, average: Average) -> float:
    """Run forward and backward, and average the gradient of the router; return the loss of this rank."""
    layer.zero_grad()
    loss = (tokens + layer(tokens)).square().mean() + 0.01 * layer.balance_loss
    loss.backward()
    gradient = layer.router.weight.grad
    assert gradient is not None
    average(gradient)
    return float(loss.detach())
