"""Text as bytes, and batches of windows of it in an order that does not depend on the number of ranks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

NUM_VALIDATION_WINDOWS = 192


def load_text(path: str | None) -> Tensor:
    """Return the bytes of a file, or of Python's reference manual, which the standard library contains."""
    if path is not None:
        with open(path, "rb") as file:
            content = file.read()
    else:
        from pydoc_data.topics import topics

        content = "\n\n".join(topics.values()).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """All windows of `context` bytes, each with the bytes that follow at each position."""

    def __init__(self, text: Tensor, context: int) -> None:
        if len(text) <= context:
            raise SystemExit(f"the text has {len(text)} bytes, too few for a context of {context}")
        self.text, self.context = text, context

    def __len__(self) -> int:
        return len(self.text) - self.context

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class RandomBatches(Sampler[list[int]]):
    """The part of one rank of random batches. Batch i depends on the seed and on i only, so any batch can be first."""

    def __init__(self, num_windows: int, options: Namespace, *, rank: int, size: int, first: int) -> None:
        self.num_windows, self.options = num_windows, options
        self.rank, self.size, self.first = rank, size, first

    def __len__(self) -> int:
        return self.options.steps * self.options.accumulate - self.first

    def __iter__(self) -> Iterator[list[int]]:
        for index in range(self.first, self.first + len(self)):
            generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + index)
            starts = torch.randint(self.num_windows, (self.options.batch_size,), generator=generator)
            yield starts.view(self.size, -1)[self.rank].tolist()


def make_loaders(
    options: Namespace, *, rank: int, size: int, first_step: int = 0
) -> tuple[DataLoader[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Return a loader of this rank's training batches from `first_step` on, and its validation batches."""
    if options.batch_size % size:
        raise SystemExit(f"--batch-size {options.batch_size} is no multiple of the number of ranks, {size}")
    text = load_text(options.data)
    num_train = len(text) * 9 // 10
    train, validation = (Windows(part, options.context) for part in (text[:num_train], text[num_train:]))
    batches = RandomBatches(len(train), options, rank=rank, size=size, first=first_step * options.accumulate)
    loader = DataLoader(train, batch_sampler=batches, num_workers=options.workers)
    # Equally many on each rank, so that the mean over the ranks is the mean of all windows.
    starts = torch.linspace(0, len(validation) - 1, NUM_VALIDATION_WINDOWS // size * size).long().tolist()
    mine = [validation[start] for start in starts[rank::size]]
    return loader, [(torch.stack([x for x, _ in mine]), torch.stack([y for _, y in mine]))]
