"""The networks of ``bench train``: ResNets on small images, others, and one whose computing takes no core."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_NUM_TOKENS, _WIDTH, _LENGTH = 2000, 256, 32


class TrainingTask(NamedTuple):
    """A network with one batch; a step takes 20 to 300 ms on one core."""

    net: nn.Module
    inputs: Tensor
    targets: Tensor


def make_task(name: str, *, rank: int, layer_seconds: float = 0.01) -> TrainingTask:
    """Make a network with the same parameters on every rank, and a batch that differs between ranks.

    `layer_seconds` is the time of a layer of `offloaded` in forward.
    """
    make_net, make_batch = _TASKS[name]
    torch.manual_seed(1)
    net = make_net(layer_seconds) if name == "offloaded" else make_net()
    torch.manual_seed(1000 + rank)
    return TrainingTask(net, *make_batch())


def _mlp() -> nn.Module:
    widths = (784, 1024, 1024)
    hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1024, 10))


class Residual(nn.Module):
    """Convolutions of the given (channels, kernel, stride), with ReLU between them, and a shortcut."""

    def __init__(self, num_in: int, *convolutions: tuple[int, int, int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width, total_stride = num_in, 1
        for num_out, kernel, stride in convolutions:
            layers += [*_convolution(width, num_out, kernel, stride), nn.ReLU()]
            width, total_stride = num_out, total_stride * stride
        self.body = nn.Sequential(*layers[:-1])
        is_same = num_in == width and total_stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_convolution(num_in, width, 1, total_stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _convolution(num_in: int, num_out: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(num_in, num_out, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(num_out)


def resnet18() -> nn.Module:
    """Make a ResNet-18 for small images, without the large kernel and the pooling of the first layer.

    >>> net = resnet18()
    >>> len(list(net.parameters())), sum(parameter.numel() for parameter in net.parameters())
    (62, 11173962)
    """
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [
        Residual(num_in, (num_out, 3, 1 if num_in == num_out else 2), (num_out, 3, 1))
        for num_in, num_out in pairwise(widths)
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(*_convolution(3, 64, 3, 1), nn.ReLU(), *blocks, *head)


def resnet50() -> nn.Module:
    """Make a network with the parameters of ResNet-50.

    >>> net = resnet50()
    >>> len(list(net.parameters())), sum(parameter.numel() for parameter in net.parameters())
    (161, 25557032)
    """
    blocks: list[nn.Module] = []
    num_in = 64
    for inner, num_blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(num_blocks):
            blocks.append(Residual(num_in, (inner, 1, 1), (inner, 3, 1 if index else stride), (4 * inner, 1, 1)))
            num_in = 4 * inner
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    return nn.Sequential(*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks, *head)


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


class _Waiting(torch.autograd.Function):
    """A layer that takes time, twice as much in backward, but no core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = 2 * seconds, weight.shape
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, grad.norm().expand(ctx.shape).contiguous(), None


class Offloaded(nn.Module):
    """The parameters of ResNet-18 in layers that compute elsewhere, as on an accelerator.

    >>> sum(weight.dim() > 1 for weight in Offloaded(0.01).weights)
    21
    """

    def __init__(self, layer_seconds: float) -> None:
        super().__init__()
        self.weights, self.layer_seconds = nn.ParameterList(resnet18().parameters()), layer_seconds

    def forward(self, x: Tensor) -> Tensor:
        wait: Callable[..., Tensor] = _Waiting.apply
        for weight in self.weights:
            x = wait(x, weight, self.layer_seconds if weight.dim() > 1 else 0.0)
        return x


def _text_batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(_NUM_TOKENS, (2, _LENGTH + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


_TASKS: dict[str, tuple[Callable[..., nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "mlp": (_mlp, lambda: (torch.randn(128, 784), torch.randint(10, (128,)))),
    "cnn": (resnet18, lambda: (torch.randn(2, 3, 24, 24), torch.randint(10, (2,)))),
    "resnet": (resnet50, lambda: (torch.randn(2, 3, 64, 64), torch.randint(1000, (2,)))),
    "transformer": (Transformer, _text_batch),
    "offloaded": (Offloaded, lambda: (torch.randn(2, 10), torch.randint(10, (2,)))),
}
