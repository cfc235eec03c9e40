"""Training images: synthetic images of any size, or CIFAR-10 from its binary files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

RECORD_BYTES = 1 + 3 * 32 * 32
"""One label, then the red, green and blue values of the 32x32 pixels."""


class SyntheticImages(Dataset[tuple[Tensor, int]]):
    """Synthetic images: a pattern per class, with noise.

    Image i is the same on all ranks and in all runs.
    """

    def __init__(self, num_images: int, size: int, num_classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.num_images, self.num_classes, self.size = num_images, num_classes, size
        self.patches = torch.randn(num_classes, 3, 4, 4, generator=generator)
        # Generating noise takes longer than a step of a small network, and a few noise images are sufficient.
        self.noises = torch.randn(16, 3, size, size, generator=generator)

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label, number = index % self.num_classes, index // self.num_classes
        (pattern,) = interpolate(self.patches[label : label + 1], size=self.size)
        return pattern + self.noises[number % len(self.noises)], label


def read_cifar10(directory: str) -> TensorDataset:
    """Read the training images of CIFAR-10's binary version, ``data_batch_1.bin`` to ``data_batch_5.bin``."""
    paths = sorted(Path(directory).glob("data_batch_*.bin"))
    if not paths:
        raise SystemExit(f"{directory}: expected files data_batch_*.bin, of the binary version of CIFAR-10; found none")
    for path in paths:
        if path.stat().st_size == 0 or path.stat().st_size % RECORD_BYTES:
            raise SystemExit(
                f"{path}: expected records of {RECORD_BYTES} bytes, found {path.stat().st_size} bytes in all"
            )
    records = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, RECORD_BYTES) for path in paths])
    labels, pixels = torch.from_numpy(records[:, 0].astype(np.int64)), torch.from_numpy(records[:, 1:])
    if labels.max() > 9:
        raise SystemExit(f"{directory}: expected labels from 0 to 9, found {labels.max()}")
    return TensorDataset(pixels.view(-1, 3, 32, 32).float() / 127.5 - 1, labels)


def batches(images: Dataset, batch_size: int, **ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end: in each epoch the images are divided over the ranks in a new order.

    `ranks` are `num_replicas` and `rank`; default: those of the job.
    """
    sampler = DistributedSampler(images, **ranks)
    loader = DataLoader(images, batch_size, sampler=sampler, drop_last=True)
    if not len(loader):
        raise SystemExit(f"a rank has {len(sampler)} images, fewer than a batch of {batch_size}")
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1
