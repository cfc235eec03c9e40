"""Small nets of four kinds, in double precision, with a batch that 1 to 4 ranks can share evenly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import torchmpi as mpi

BATCH = 12


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), torch.randn(BATCH, 6)


def cnn() -> tuple[nn.Module, Tensor]:
    """With batch norm in eval mode: in training mode its statistics depend on how the batch is split."""
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)).eval()
    return net, torch.randn(BATCH, 2, 6, 6)


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 5, num_layers=2, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.rnn(x)[0][:, -1])
        return result


def rnn() -> tuple[nn.Module, Tensor]:
    return LastStep(), torch.randn(BATCH, 7, 3)


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 4)), torch.randn(BATCH, 5, 8)


KINDS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": mlp, "cnn": cnn, "rnn": rnn, "transformer": transformer,
}  # fmt: skip


def make(kind: str, seed: int = 5) -> tuple[nn.Module, Tensor, Tensor]:
    """The same net, batch and targets on all ranks."""
    torch.manual_seed(seed)
    net, x = KINDS[kind]()
    return net.double(), x.double(), torch.randint(4, (BATCH,))


def mine(batch: Tensor) -> Tensor:
    """This rank's share of a batch."""
    return batch[mpi.rank() :: mpi.size()]


def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x), y)


def gradients(net: nn.Module) -> list[Tensor | None]:
    """Copies of all gradients."""
    return [None if p.grad is None else p.grad.detach().clone() for p in net.parameters()]


def values(net: nn.Module) -> Tensor:
    """All parameters, flat."""
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def whole_batch_gradients(kind: str) -> list[Tensor | None]:
    """The result of one rank on all the data."""
    net, x, y = make(kind)
    loss(net, x, y).backward()
    return gradients(net)
