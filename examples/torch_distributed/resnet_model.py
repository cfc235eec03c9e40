"""Residual networks (He et al. 2015, arXiv:1512.03385): ResNet-18, 34 and 50, and a tiny one for tests."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu


def convolution(num_inputs: int, num_outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the size of the image, except for the stride, and batch normalization."""
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(num_outputs),
    )


class Block(nn.Module):
    """Residual block: the sum of the input and the output of the layers."""

    expansion = 1

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        num_outputs = width * self.expansion
        self.layers = self.make_layers(num_inputs, width, stride)
        # With an initial scale of zero a block is the identity, which improves the training of deep networks.
        nn.init.zeros_(self.layers[-1][-1].weight)
        has_same_shape = stride == 1 and num_inputs == num_outputs
        self.shortcut = nn.Identity() if has_same_shape else convolution(num_inputs, num_outputs, 1, stride)

    def make_layers(self, num_inputs: int, width: int, stride: int) -> nn.Sequential:
        return nn.Sequential(convolution(num_inputs, width, 3, stride), nn.ReLU(), convolution(width, width, 3))

    def forward(self, images: Tensor) -> Tensor:
        return relu(self.layers(images) + self.shortcut(images))


class Bottleneck(Block):
    """Three convolutions, the second with fewer channels and the stride, as in most current implementations."""

    expansion = 4

    def make_layers(self, num_inputs: int, width: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            convolution(num_inputs, width, 1),
            nn.ReLU(),
            convolution(width, width, 3, stride),
            nn.ReLU(),
            convolution(width, width * self.expansion, 1),
        )


class ResNet(nn.Sequential):
    """A stem, stages of blocks with half the size and twice the channels of the previous stage, and a classifier."""

    def __init__(self, block: type[Block], depths: tuple[int, ...], *, width: int = 64, num_classes: int = 10) -> None:
        layers = [convolution(3, width, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
        num_channels = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(block(num_channels, width << stage, stride))
                num_channels = (width << stage) * block.expansion
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_channels, num_classes))


MODELS = {
    "tiny": (Block, (1, 1), 16),
    "resnet18": (Block, (2, 2, 2, 2), 64),
    "resnet34": (Block, (3, 4, 6, 3), 64),
    "resnet50": (Bottleneck, (3, 4, 6, 3), 64),
}


def make_model(name: str, num_classes: int) -> ResNet:
    """Return one of MODELS.

    Example: ``make_model("resnet50", 1000)`` has 25,557,032 parameters.
    """
    block, depths, width = MODELS[name]
    return ResNet(block, depths, width=width, num_classes=num_classes)
