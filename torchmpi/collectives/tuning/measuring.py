"""Measurement of the backends.

The backends alternate, in both orders, so that a disturbance affects all of them. The buffers are written between
batches, as by a program. A sample is the time of the slowest rank.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from ... import collectives
from ...backends.selection_table import MODES, Key
from ...collective_specs import SPECS
from ...communicators.communicator import Communicator
from ...communicators.plan import PLAIN, PlanKey
from ...config import BackendName
from ...session import runtime
from ...tensors import streams
from ..prepared import plan_for
from .decision import Samples

_BATCH_SECONDS = 0.002
_MOST_CALLS = 50
_FEWEST_ROUNDS, _MOST_ROUNDS = 8, 24


class Subject(NamedTuple):
    """A rule to find, and the backends to compare."""

    collective: str
    device: str
    span: str
    communicator: Communicator
    names: tuple[str, ...]

    def modes(self) -> list[Key]:
        """Return the keys of the rule, one for each mode."""
        return [Key(*self[:3], mode) for mode in (MODES if SPECS[self.collective].has_async else MODES[:1])]

    def __str__(self) -> str:
        return f"{self.collective} {self.device} {self.span}"


class Session:
    """The measurements of one autotune(), and the remaining time."""

    def __init__(self, running: runtime.Runtime, sizes: Sequence[int], seconds: float) -> None:
        self._running, self._sizes, self._seconds = running, sizes, seconds
        self._begin = time.perf_counter()
        self._spent = 0.0  # the same on all ranks
        self.num_left = 0

    def measure(self, subject: Subject) -> dict[str, dict[int, Samples]]:
        """Return samples by mode and size, until the time is used up."""
        found: dict[str, dict[int, Samples]] = defaultdict(dict)
        modes = [key.mode for key in subject.modes()]
        sizes = self._sizes if SPECS[subject.collective].tensors else self._sizes[:1]
        for mode in modes:
            for size in sizes:
                samples = self._compete(Work(self._running, subject, size, mode), subject.names)
                if samples is not None:
                    found[mode][size] = samples
                self.num_left -= 1
        self.num_left -= len(MODES) * len(self._sizes) - len(modes) * len(sizes)
        # Times of small tensors do not predict those of large ones.
        return {mode: samples for mode, samples in found.items() if len(samples) == len(sizes)}

    def _compete(self, work: Work, names: Sequence[str]) -> Samples | None:
        if self._spent >= self._seconds:
            return None
        for name in names:
            work.time(name, 1)  # compiles, connects, allocates
        begin = time.perf_counter()
        once = [work.time(name, 1) for name in names]
        end = time.perf_counter()
        *once, round_seconds, self._spent = self._slowest([*once, end - begin, end - self._begin])
        counts = [min(_MOST_CALLS, max(1, int(_BATCH_SECONDS / seconds))) for seconds in once]
        round_seconds += sum((count - 1) * seconds for count, seconds in zip(counts, once, strict=True))
        remaining = self._seconds - self._spent
        num_rounds = min(_MOST_ROUNDS, int(remaining / max(1, self.num_left) / round_seconds))
        num_rounds = max(_FEWEST_ROUNDS, num_rounds // 2 * 2)  # as many in each order
        if num_rounds * round_seconds > remaining:
            return None
        times = []
        for index in range(num_rounds):
            order = range(len(names))[:: -1 if index % 2 else 1]
            row = {which: work.time(names[which], counts[which]) for which in order}
            times += [row[which] for which in range(len(names))]
        *times, self._spent = self._slowest([*times, time.perf_counter() - self._begin])
        return {name: times[which :: len(names)] for which, name in enumerate(names)}

    def _slowest(self, values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        world = self._running.communicators.levels[0]
        backend = cast(BackendName, self._running.selector.network.name)
        slowest: list[float] = collectives.allreduce(tensor, op="max", comm=world, backend=backend).tolist()
        return slowest


class Work:
    """One collective on tensors of one size, called as by a user."""

    def __init__(self, running: runtime.Runtime, subject: Subject, size: int, mode: str) -> None:
        collective, device, _, communicator, _ = subject
        group = communicator.intra
        self._communicator, self._is_async = communicator, mode == "async"
        # The size is that of the largest tensor of the call: for a gather, of its result.
        spec = SPECS[collective]
        numel = max(1, size // torch.float32.itemsize // (group.size if spec.grows > 0 else 1))
        self._tensor = torch.zeros(numel, device=running.device if device != "cpu" else "cpu")
        given = self._tensor if spec.passes(group.rank == 0) else None
        self._call: Callable[[str], Any]
        if not spec.tensors:
            self._call = self._barrier
        else:
            function = getattr(collectives, f"{collective}_async" if self._is_async else collective)
            self._call = lambda name: function(given, comm=communicator, backend=name)

    def _barrier(self, name: str) -> None:  # barrier() has no backend=
        plan = plan_for(self._communicator, PlanKey("barrier", None, None, PLAIN, name))
        self._communicator.intra.call(plan)

    def time(self, name: str, count: int) -> float:
        """Return the seconds per call."""
        self._tensor.zero_()  # as by a program
        streams.settle(self._tensor)
        collectives.barrier(self._communicator)
        begin = time.perf_counter()
        for _ in range(count):
            result = self._call(name)
            if self._is_async:
                result.wait()
        streams.settle(self._tensor)  # some backends return when their work is queued
        return (time.perf_counter() - begin) / count
