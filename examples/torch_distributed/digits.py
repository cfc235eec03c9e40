"""The images for ``distributed_sgd.py``: those of the MNIST examples, of which each rank keeps a part.

Without a directory of MNIST files these are scikit-learn's digits, so that nothing needs to be downloaded.
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
    """Training images, test images, and where they come from."""
    data = load(directory)
    return _square(data.train), _square(data.test), data.origin


def part_of(images: TensorDataset, rank: int, size: int, *, seed: int) -> TensorDataset:
    """The part of one rank: all ranks shuffle alike, and no image is in two parts.

    The parts are equally long, at the cost of up to `size` - 1 images: in synchronous training a rank with one more
    batch would wait for the others for ever.
    """
    order: Tensor = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    length = len(images) // size
    return TensorDataset(*images[order[rank * length : (rank + 1) * length]])


def _square(split: Split) -> TensorDataset:
    """Rows of pixels become images of one channel, as convolutions want them."""
    side = math.isqrt(split.input.shape[1])
    return TensorDataset(split.input.view(-1, 1, side, side), split.target)
