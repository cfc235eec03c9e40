"""The images for the MNIST examples: IDX files from a directory, or scikit-learn's built-in digits.

The digits (1,797 real handwritten 8x8 images) come with scikit-learn, so the examples need no download.
With ``--data DIR`` the original MNIST files are read, packed or not, in either spelling of their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mnist_idx import DataError, read_idx
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Images as float32 rows scaled to [0, 1], and their labels."""

    input: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def part(self, rank: int, size: int) -> Split:
        """The rows of one rank: consecutive parts whose lengths differ by at most one."""
        return Split(self.input.tensor_split(size)[rank], self.target.tensor_split(size)[rank])


@dataclass(frozen=True)
class Dataset:
    """Training and test images, and one line saying where they come from."""

    train: Split
    test: Split
    origin: str

    @property
    def num_inputs(self) -> int:
        return self.train.input.shape[1]


class Batches:
    """Shuffled batches; every rank shuffles alike and takes its slice of each global batch.

    The order depends on the seed and the epoch alone, so any number of ranks walks the same global batches.
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
    """Read MNIST from ``directory``, or the built-in digits when none is given."""
    return load_digits() if directory is None else load_mnist(Path(directory))


def load_digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits as load_from_sklearn
    except ImportError:
        raise DataError(
            "the built-in digits need scikit-learn: pip install 'torchmpi[examples]', "
            "or give a directory of MNIST files with --data DIR"
        ) from None
    images, labels = load_from_sklearn(return_X_y=True)
    train, test = _split_off_test(torch.from_numpy(images / 16).float(), torch.from_numpy(labels).long())
    return Dataset(train, test, f"scikit-learn digits, {len(train)} training and {len(test)} test images of 8x8")


def load_mnist(directory: Path) -> Dataset:
    if not directory.is_dir():
        raise DataError(f"{directory}: expected a directory of MNIST files, found no directory")
    test = _read_pair(directory, "t10k")
    if _find(directory, "train", "images", 3) or _find(directory, "train", "labels", 1):
        train, note = _read_pair(directory, "train"), ""
    else:
        train, test = _split_off_test(test.input, test.target)
        note = " (only the t10k files are there: split into training and test)"
    return Dataset(train, test, f"MNIST in {directory}, {len(train)} training and {len(test)} test images{note}")


def _split_off_test(images: Tensor, labels: Tensor) -> tuple[Split, Split]:
    """Four fifths for training and the rest for testing, by a fixed shuffle."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1797))
    rows, test_rows = order.split([len(order) * 4 // 5, len(order) - len(order) * 4 // 5])
    return Split(images[rows], labels[rows]), Split(images[test_rows], labels[test_rows])


def _names(prefix: str, kind: str, ndim: int) -> list[str]:
    return [f"{prefix}-{kind}{dot}idx{ndim}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]


def _find(directory: Path, prefix: str, kind: str, ndim: int) -> Path | None:
    found = (directory / name for name in _names(prefix, kind, ndim))
    return next((path for path in found if path.is_file()), None)


def _read_pair(directory: Path, prefix: str) -> Split:
    arrays = []
    for kind, ndim in (("images", 3), ("labels", 1)):
        path = _find(directory, prefix, kind, ndim)
        if path is None:
            raise DataError(f"{directory}: expected one of {', '.join(_names(prefix, kind, ndim))}; found none")
        arrays.append((path, read_idx(path, ndim)))
    (images_path, images), (labels_path, labels) = arrays
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: expected {len(images)} labels, one for each image of {images_path}, found {len(labels)}"
        )
    if not len(labels) or labels.max() > 9:
        raise DataError(
            f"{labels_path}: expected labels from 0 to 9, found {labels.max(initial=0)} as the largest of {len(labels)}"
        )
    pixels = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32) / 255)
    return Split(pixels, torch.from_numpy(labels.astype(np.int64)))
