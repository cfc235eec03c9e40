"""A reference training run, shared by the tests of torch.distributed's layers.

The net and its data are in double precision, so that the order in which gradients are added is within the
tolerance, and a missing or repeated gradient is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BATCH = 12
"""Rows that 1 to 4 ranks can share evenly."""
STEPS = 4
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 200 / 2**20}


def net(seed: int = 3) -> nn.Sequential:
    """Three layers: the first two can be split over 1 to 4 ranks, the third one unevenly."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 4)
    return nn.Sequential(*layers).double()


def batch(step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a step, all of them or a rank's share."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 4, generator=generator)
    return x[rows].double(), y[rows].double()


def share() -> slice:
    """The rows of this rank."""
    return slice(dist.get_rank(), None, dist.get_world_size())


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    # Adam divides by the size of the gradient, which amplifies the rounding of small gradients.
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)


def loss_of(model: nn.Module, step: int, rows: slice = slice(None)) -> Tensor:
    x, y = batch(step, rows)
    return nn.functional.mse_loss(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: slice = slice(None), steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rows).backward()
        optimizer.step()


def trained_alone(make: Callable[..., torch.optim.Optimizer] = sgd, steps: int = STEPS) -> nn.Sequential:
    """The parameters after training one process on all the data."""
    model = net()
    train(model, make(model.parameters()), steps=steps)
    return model


def gathered(tensor: Tensor) -> Tensor:
    """Gather a distributed tensor from the shards of all ranks; another tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values(model: nn.Module) -> Tensor:
    """All parameters, flat."""
    return torch.cat([gathered(parameter.detach()).reshape(-1) for parameter in model.parameters()])


def gradients(model: nn.Module) -> Tensor:
    """All gradients, flat."""
    return torch.cat([gathered(p.grad).reshape(-1) for p in model.parameters() if p.grad is not None])


def same_everywhere(tensor: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    everywhere: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(everywhere, tensor.detach().contiguous().numpy().tobytes())
    return len(set(everywhere)) == 1


def numbers(*shape: int, start: int = 0) -> Tensor:
    """Small whole numbers, which no order of additions can round."""
    count = int(torch.Size(shape).numel())
    return (torch.arange(start, start + count) % 13).double().reshape(shape)


def of_rank(rank: int, *shape: int) -> Tensor:
    """A tensor that differs between the ranks."""
    return numbers(*shape, start=3 * rank + 1)


def everybodys(*shape: int) -> list[Tensor]:
    return [of_rank(rank, *shape) for rank in range(dist.get_world_size())]
