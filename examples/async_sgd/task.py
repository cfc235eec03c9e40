"""The task: handwritten digits, and batches of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.append(str(Path(__file__).resolve().parents[1] / "mnist"))
from mnist_data import Dataset, Split, load

__all__ = ["Dataset", "Split", "batches", "load", "test_loss"]


def batches(split: Split, batch: int = 16, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches of equal size, without end; an incomplete last batch is omitted."""
    generator = torch.Generator().manual_seed(seed)
    batch = min(batch, len(split))
    while True:
        order = torch.randperm(len(split), generator=generator)
        for rows in order[: len(order) // batch * batch].view(-1, batch):
            yield split.input[rows], split.target[rows]


@torch.no_grad()
def test_loss(network: nn.Module, split: Split) -> tuple[float, float]:
    """Return the loss, and the fraction of wrong predictions; non-finite outputs are wrong."""
    output = network(split.input)
    wrong = (output.argmax(1) != split.target) | ~output.isfinite().all(1)
    return float(cross_entropy(output, split.target)), wrong.double().mean().item()
