"""The images for the MNIST examples: MNIST files from a directory, or the digits of scikit-learn.

The digits (1,797 handwritten digits of 8x8 pixels) are part of scikit-learn, so that the examples need no download.
With ``--data DIR`` the original MNIST files are read, compressed or not, in either spelling of their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from mnist_files import DataError, find, read_images
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Images as float32 rows scaled to [0, 1], and their labels."""

    input: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def part(self, rank: int, size: int) -> Split:
        """Return the rows of one rank: consecutive parts whose lengths differ by at most one."""
        return Split(self.input.tensor_split(size)[rank], self.target.tensor_split(size)[rank])


@dataclass(frozen=True)
class Dataset:
    """Training and test images, and a description of their origin."""

    train: Split
    test: Split
    origin: str

    @property
    def num_inputs(self) -> int:
        return self.train.input.shape[1]


class Batches:
    """Shuffled batches: all ranks shuffle with the same seed, and each takes its slice of each global batch.

    The order depends only on seed and epoch, so the global batches are the same for any number of ranks.
    """

    def __init__(self, split: Split, batch_size: int, *, seed: int = 0, rank: int = 0, size: int = 1) -> None:
        self.split, self.batch_size, self.seed = split, batch_size, seed
        self.rank, self.size, self.epoch = rank, size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.split) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        for rows in torch.randperm(len(self.split), generator=generator).split(self.batch_size):
            mine = rows.tensor_split(self.size)[self.rank]
            yield self.split.input[mine], self.split.target[mine]


def load(directory: str | None = None) -> Dataset:
    """Read MNIST from ``directory``, or the digits of scikit-learn if it is None."""
    return load_digits() if directory is None else load_mnist(Path(directory))


def load_digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits as load_from_sklearn
    except ImportError:
        raise DataError(
            "the built-in digits need scikit-learn: pip install scikit-learn, "
            "or give a directory of MNIST files with --data DIR"
        ) from None
    images, labels = load_from_sklearn(return_X_y=True)
    train, test = _split_off_test(torch.from_numpy(images / 16).float(), torch.from_numpy(labels).long())
    return Dataset(train, test, f"scikit-learn digits, {len(train)} training and {len(test)} test images of 8x8")


def load_mnist(directory: Path) -> Dataset:
    if not directory.is_dir():
        raise DataError(f"{directory}: expected a directory of MNIST files, found no directory")
    images, labels = read_images(directory, "t10k")
    if find(directory, "train", "images", 3) or find(directory, "train", "labels", 1):
        train, test, note = Split(*read_images(directory, "train")), Split(images, labels), ""
    else:
        train, test = _split_off_test(images, labels)
        note = " (only the t10k files are there: split into training and test)"
    return Dataset(train, test, f"MNIST in {directory}, {len(train)} training and {len(test)} test images{note}")


def _split_off_test(images: Tensor, labels: Tensor) -> tuple[Split, Split]:
    """Four fifths for training and the rest for testing, after a shuffle with a fixed seed."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1797))
    rows, test_rows = order.split([len(order) * 4 // 5, len(order) - len(order) * 4 // 5])
    return Split(images[rows], labels[rows]), Split(images[test_rows], labels[test_rows])
