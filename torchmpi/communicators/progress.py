"""The last steps of the program of this rank, in the head of the flight record, where `torchmpi top` looks.

A report writes four numbers to memory, and nothing reads them until somebody looks. docs/design/top.md has the reasons.
"""

from __future__ import annotations

import math
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch.utils.hooks import RemovableHandle

LENGTH = 512
"""How many reports are kept."""
_ENTRY = struct.Struct("<qqqd")
_WRITE = _ENTRY.pack_into
_FIELDS_BEFORE = 8
NUM_BYTES = 8 * _FIELDS_BEFORE + LENGTH * _ENTRY.size
_NUMBER = struct.Struct("<q").pack_into
_TYPE = np.dtype([("ns", "<i8"), ("step", "<i8"), ("samples", "<i8"), ("loss", "<f8")])
BY_GRADIENTS, BY_OPTIMIZER, BY_PROGRAM = range(3)
"""What has counted a step, each over the one before: one synchronization may be a part of a larger step."""


class Steps(NamedTuple):
    """The last steps of a rank, oldest first, one element per report."""

    ns: npt.NDArray[np.int64]
    """Nanoseconds of the monotonic clock."""
    step: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    """Since `start()`."""
    loss: npt.NDArray[np.float64]
    """NaN where none was reported."""


class Progress:
    """Writes the steps of this rank, as the memory of a flight record or nowhere.

    >>> memory = memoryview(bytearray(NUM_BYTES))
    >>> progress = Progress()
    >>> progress.attach(memory)
    >>> progress.note(BY_PROGRAM, samples=32, loss=0.5)
    >>> progress.note(BY_GRADIENTS)  # a part of the steps that the program reports
    >>> steps = steps_in(memory)
    >>> steps.step.tolist(), steps.samples.tolist(), steps.loss.tolist()
    ([1], [32], [0.5])
    >>> progress.last()
    (1, 32, 0.5)
    """

    def __init__(self) -> None:
        self._memory: memoryview | None = None
        self._hook: RemovableHandle | None = None
        self._reset()

    def _reset(self) -> None:
        self._count = self._step = self._samples = self._source = 0
        self._leader, self._others = 0, set[int]()

    def attach(self, memory: memoryview) -> None:
        """Write to this memory from now on, also what optimizers of torch do, and begin with step 0."""
        from torch.optim.optimizer import register_optimizer_step_post_hook  # which readers do not need

        self.detach()
        self._memory = memory
        self._reset()
        self._hook = register_optimizer_step_post_hook(self._note_optimizer)

    def detach(self) -> None:
        """Write nowhere."""
        self._memory = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step of that optimizer which makes the most: in a step of the program there may be several."""
        number = id(optimizer)
        if self._leader and number != self._leader and number not in self._others:
            self._others.add(number)  # it leads if it makes another step before the one that does
            return
        self._leader = number
        self._others.clear()
        self.note(BY_OPTIMIZER)

    def note(self, source: int, step: int | None = None, samples: int = 0, loss: float = math.nan) -> None:
        """Write that a step has ended.

        Args:
            source: What reports it; others that count parts of its steps are left out from then on.
            step: Its number; None for one more than the last.
            samples: The examples of this rank in it.
            loss: Its loss.
        """
        memory = self._memory
        if memory is None or source < self._source:
            return
        if source > self._source and self._count:  # this step has been counted by a part of it
            self._count, self._step = self._count - 1, self._step - 1
        self._source = source
        self._step = self._step + 1 if step is None else step
        self._samples += samples
        at = 8 * _FIELDS_BEFORE + self._count % LENGTH * _ENTRY.size
        _WRITE(memory, at, time.monotonic_ns(), self._step, self._samples, loss)
        self._count += 1
        _NUMBER(memory, 0, self._count)  # last: a reader takes no entry that is being written for the newest one

    def last(self) -> tuple[int | None, int, float]:
        """Return the last step, the samples of all steps, and the loss of the last one (NaN: not reported)."""
        memory, count = self._memory, self._count
        if memory is None or not count:
            return None, 0, math.nan
        _, step, samples, loss = _ENTRY.unpack_from(memory, 8 * _FIELDS_BEFORE + (count - 1) % LENGTH * _ENTRY.size)
        return step, samples, loss


progress = Progress()
"""That of this process."""


def steps_in(memory: bytes | memoryview) -> Steps:
    """Return the steps in the memory of a flight record; those of a damaged file are in the order of their times."""
    count = int.from_bytes(memory[:8], "little", signed=True)
    entries = np.frombuffer(memory, _TYPE, LENGTH, 8 * _FIELDS_BEFORE)[: max(0, min(count, LENGTH))]
    # The one that is written next has perhaps been begun.
    entries = np.delete(entries, count % LENGTH) if count > LENGTH else entries
    entries = entries[np.argsort(entries["ns"], kind="stable")]
    return Steps(*(np.ascontiguousarray(entries[name]) for name in Steps._fields))
