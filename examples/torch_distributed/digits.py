"""The images for ``distributed_sgd.py``: those of the MNIST examples, divided over the ranks.

Without a directory of MNIST files these are the digits of scikit-learn, which need no download.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1] / "mnist"))
from mnist_data import Split, load


def load_images(directory: str | None) -> tuple[TensorDataset, TensorDataset, str]:
    """Return training images, test images, and a description of their origin."""
    data = load(directory)
    return _square(data.train), _square(data.test), data.origin


def part_of(images: TensorDataset, rank: int, size: int, *, seed: int) -> TensorDataset:
    """Return the part of one rank: all ranks shuffle with the same seed, and no image is in two parts.

    The parts have equal lengths, so that up to `size` - 1 images are unused: in synchronous training a rank with an
    additional batch would wait for the others without end.
    """
    order: Tensor = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    length = len(images) // size
    return TensorDataset(*images[order[rank * length : (rank + 1) * length]])


def _square(split: Split) -> TensorDataset:
    """Reshape rows of pixels to images of one channel, for convolutions."""
    side = math.isqrt(split.input.shape[1])
    return TensorDataset(split.input.view(-1, 1, side, side), split.target)
