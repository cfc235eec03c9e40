"""The task: handwritten digits, divided among the ranks, and a small network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

sys.path.append(str(Path(__file__).resolve().parents[1] / "mnist"))
from mnist_data import Dataset, Split, load

__all__ = ["BATCH_SIZE", "Dataset", "batches", "load", "make_network", "test_error", "validation"]

BATCH_SIZE = 16
"""Images per step and rank."""
HIDDEN = 64


def make_network(num_inputs: int, seed: int) -> nn.Sequential:
    """The same weights on every rank, and for every method."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(num_inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def batches(split: Split, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches of equal size, without end; an incomplete last batch is omitted."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(split), generator=generator)
        for rows in order[: len(order) // BATCH_SIZE * BATCH_SIZE].view(-1, BATCH_SIZE):
            yield split.input[rows], split.target[rows]


def validation(data: Dataset) -> Dataset:
    """Replace the test images by a fifth of the training images, to tune learning rates."""
    num_train = len(data.train) * 4 // 5
    train = Split(data.train.input[:num_train], data.train.target[:num_train])
    held_out = Split(data.train.input[num_train:], data.train.target[num_train:])
    return Dataset(train, held_out, f"{data.origin}; the last {len(held_out)} training images are for validation")


@torch.no_grad()
def test_error(network: nn.Module, flat: Tensor, split: Split) -> float:
    """Fraction of wrong predictions of the network with these parameters; non-finite outputs are wrong."""
    vector_to_parameters(flat, network.parameters())
    output = network(split.input)
    wrong = (output.argmax(1) != split.target) | ~output.isfinite().all(1)
    return wrong.double().mean().item()
