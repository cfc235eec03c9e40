"""The task of the programs in this folder: a small net, its data, and what one process makes of them.

The programs are those of users of other libraries: they name gloo or no backend, and run unchanged over torchmpi.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH = 64, 16
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 1


class Task:
    """A data set, with the time since it was made."""

    def __init__(self) -> None:
        x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0)).double()
        self.data = TensorDataset(x, x.sum(1, keepdim=True))
        self.begin = time.perf_counter()

    def loader(self, num_ranks: int = 1) -> DataLoader:
        """Return batches; those of all ranks together have the size of one for one rank."""
        return DataLoader(self.data, batch_size=BATCH // num_ranks)

    def compare(self, model: nn.Module, *, epochs: int = EPOCHS, accumulate: int = 1, tolerance: float = 1e-12) -> None:
        """Compare the parameters with those that one process gets; print the result, and the time of the training."""
        seconds = time.perf_counter() - self.begin
        alone = train(net(), self.loader(), epochs=epochs, accumulate=accumulate)
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found.detach(), expected.detach(), rtol=100 * tolerance, atol=tolerance)
        # In one write, since launchers mix the output of the ranks.
        name = os.path.basename(sys.argv[0]).removesuffix(".py")
        sys.stdout.write(f"rank {dist.get_rank()}: {name} like one process, {seconds:.3f} s\n")
        sys.stdout.flush()


def net() -> nn.Module:
    """Return the net, in double precision, so that the order of additions does not matter."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def train(model: nn.Module, loader: DataLoader, *, epochs: int = EPOCHS, accumulate: int = 1) -> nn.Module:
    """Train in the usual way, and return the model."""
    optimizer = sgd(model)
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader, start=1):
            (nn.functional.mse_loss(model(x), y) / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model
