"""The networks of ``bench train``: a perceptron, ResNet-18 and ResNet-50 on small images, a small transformer."""

# ruff: noqa: D102 -- forward() needs no description
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class TrainingTask(NamedTuple):
    """A network with one batch; a step takes 20 to 300 ms on one core."""

    net: nn.Module
    inputs: Tensor
    targets: Tensor


def make_task(name: str, *, rank: int) -> TrainingTask:
    """Make a network with the same parameters on every rank, and a batch that differs between ranks."""
    torch.manual_seed(1)
    net = _NETS[name]()
    torch.manual_seed(1000 + rank)
    return TrainingTask(net, *_BATCHES[name]())


# --- multilayer perceptron -----------------------------------------------------------------------------------


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )  # fmt: skip


def _mlp_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(128, 784), torch.randint(10, (128,))


# --- ResNet-18 for CIFAR-10: 62 tensors, 11.2 million elements -----------------------------------------------


class Basic(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(num_in, num_out, 3, stride), nn.ReLU(), *_convolution(num_out, num_out, 3, 1)
        )  # fmt: skip
        self.shortcut = _shortcut(num_in, num_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """Make a ResNet-18 for small images, without the large kernel and the pooling of the first layer.

    >>> net = resnet18()
    >>> len(list(net.parameters())), sum(parameter.numel() for parameter in net.parameters())
    (62, 11173962)
    """
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [
        Basic(before, width, 1 if before == width else 2) for before, width in zip((64, *widths), widths, strict=False)
    ]
    return nn.Sequential(
        *_convolution(3, 64, 3, 1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    )  # fmt: skip


def _small_image_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 24, 24), torch.randint(10, (2,))


# --- ResNet-50: 161 tensors, 25.6 million elements -----------------------------------------------------------


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    def __init__(self, num_in: int, num_inner: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * num_inner
        self.body = nn.Sequential(
            *_convolution(num_in, num_inner, 1, 1), nn.ReLU(),
            *_convolution(num_inner, num_inner, 3, stride), nn.ReLU(),
            *_convolution(num_inner, num_out, 1, 1),
        )  # fmt: skip
        self.shortcut = _shortcut(num_in, num_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _shortcut(num_in: int, num_out: int, stride: int) -> nn.Module:
    is_same = num_in == num_out and stride == 1
    return nn.Identity() if is_same else nn.Sequential(*_convolution(num_in, num_out, 1, stride))


def _convolution(num_in: int, num_out: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(num_in, num_out, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(num_out)


def resnet50() -> nn.Module:
    """Make a network with the parameters of ResNet-50.

    >>> net = resnet50()
    >>> len(list(net.parameters())), sum(parameter.numel() for parameter in net.parameters())
    (161, 25557032)
    """
    blocks: list[nn.Module] = []
    num_in = 64
    for num_inner, num_rows, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(num_rows):
            blocks.append(Bottleneck(num_in, num_inner, stride if index == 0 else 1))
            num_in = 4 * num_inner
    return nn.Sequential(
        *_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000),
    )  # fmt: skip


def _image_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 64, 64), torch.randint(1000, (2,))


# --- transformer ---------------------------------------------------------------------------------------------

_NUM_TOKENS, _WIDTH, _LENGTH = 2000, 256, 32


class Transformer(nn.Module):
    """Four layers that predict the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_NUM_TOKENS, _WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(_LENGTH, _WIDTH))
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _NUM_TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.layers(self.tokens(x) + self.positions, mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits.flatten(0, 1)


def _text_batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(_NUM_TOKENS, (2, _LENGTH + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


_NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp, "cnn": resnet18, "resnet": resnet50, "transformer": Transformer,
}  # fmt: skip
_BATCHES = {"mlp": _mlp_batch, "cnn": _small_image_batch, "resnet": _image_batch, "transformer": _text_batch}
