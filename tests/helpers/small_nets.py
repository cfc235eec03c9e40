"""Nets, batches and a metric that take no time, the same on all ranks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    """Return linear layers of these widths with tanh in between."""
    torch.manual_seed(seed)
    layers = [module for pair in pairwise(widths) for module in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def network() -> nn.Sequential:
    """Return a classifier of :func:`make_batches`."""
    return mlp(4, 8, 3)


def make_batches(num: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of six examples of three classes."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)) for _ in range(num)]


class Accuracy:
    """A metric with the methods of those of torchmetrics."""

    def reset(self) -> None:
        self.num_correct, self.num_total = torch.tensor(0), 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.num_correct = self.num_correct + (output.argmax(1) == target).sum()
        self.num_total += len(target)

    def compute(self) -> Tensor:
        return self.num_correct / self.num_total
