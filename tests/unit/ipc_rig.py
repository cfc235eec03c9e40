"""A model for the ipc backend: streams that publish numbers and wait for them.

A rank enqueues the steps of its calls without regard to the other ranks; a stream runs its work in order, and the
streams in a random order. Vector clocks determine the order of accesses: two accesses to one location, one of them a
write, must be ordered for any timing of the devices. A wait follows the first number that ends it.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from torchmpi.backends.ipc import chunk_plan
from torchmpi.backends.ipc.chunk_plan import Fill, ReduceAreas, Room, Sync, Take

Stream = tuple[int, int]
"""A rank, and the number of the stream on which it enqueues."""
Clock = dict[Stream, int]


class Call(NamedTuple):
    """A collective: its steps for each rank, and its memory."""

    chunks: list[list[list[Any]]]  # of each rank
    sources: list[np.ndarray]
    outs: list[np.ndarray]
    streams: list[int]  # for each rank, the number of the stream on which it enqueues


class Touch(NamedTuple):
    """An access to a range of a half of a rank's area."""

    begin: int
    end: int
    stream: Stream
    tick: int
    what: str


class Work(NamedTuple):
    """A step of a call on a half."""

    rank: int
    call: Call
    step: Any
    half: int


class Write(NamedTuple):
    """Publish a number of a rank."""

    rank: int
    number: int


class Wait(NamedTuple):
    """Wait for a number of a rank."""

    rank: int
    number: int


class Follow(NamedTuple):
    """Wait until another stream of the same rank has done its first `count` entries."""

    stream: Stream
    count: int


class Problem(AssertionError):
    """A protocol error that the model has detected."""


class Model:
    """All ranks, their staging areas and streams."""

    def __init__(self, size: int, half: int, seed: int) -> None:
        self.size, self.half, self.random = size, half, random.Random(seed)
        self.areas = np.full((size, 2, half), 255, np.uint8)
        self.queues: dict[Stream, list[Any]] = {}
        self.clocks: dict[Stream, Clock] = {}
        self.ends: dict[Stream, list[Clock]] = {}
        """The clock of a stream after each entry that it has done."""
        self.published: list[list[tuple[int, Clock]]] = [[(0, {})] for _ in range(size)]
        self.touches: dict[tuple[int, int], tuple[list[Touch], list[Touch]]] = {}
        """The reads and writes of each half."""

    def play(self, calls: list[Call]) -> None:
        """Enqueue the calls on all ranks, then run the streams. Calls of other backends may come between these."""
        seqs = list(accumulate(self.random.choice((1, 1, 2, 3)) for _ in calls))
        for rank in range(self.size):
            self._enqueue(rank, list(zip(seqs, calls, strict=True)))
        self._run()

    def _enqueue(self, rank: int, calls: list[tuple[int, Call]]) -> None:
        """Enqueue as `StagedGroup.run` does."""
        half, last_use, is_free = 0, [0, 0], [False, False]
        others, last = chunk_plan.others(rank, self.size), None
        for seq, call in calls:
            base, stream = seq << chunk_plan.STAGE_BITS, (rank, call.streams[rank])
            queue = self.queues.setdefault(stream, [])
            if last not in (None, stream):  # the calls of a group are in one order
                queue.append(Follow(last, len(self.queues[last])))
            last = stream
            for index, steps in enumerate(call.chunks[rank]):
                for step in steps:
                    if isinstance(step, Room):
                        queue += [Wait(other, last_use[half]) for other in others if not is_free[half]]
                    elif isinstance(step, Sync):
                        number = base + chunk_plan.stage_number(index, step.stage)
                        queue += [Write(rank, number)] * step.publishes + [Wait(other, number) for other in step.awaits]
                        if step.stage == chunk_plan.FILLED and len(step.awaits) == self.size - 1:
                            is_free[1 - half] = True
                    else:
                        queue.append(Work(rank, call, step, half))
                last_use[half] = base + chunk_plan.stage_number(index, chunk_plan.EMPTIED)
                is_free[half], half = False, 1 - half

    def _run(self) -> None:
        heads = {stream: 0 for stream, queue in self.queues.items() if queue}
        while heads:
            able = [stream for stream, at in heads.items() if self._is_able(self.queues[stream][at])]
            if not able:
                raise Problem(
                    f"the streams wait for each other, after {[numbers[-1][0] for numbers in self.published]}"
                )
            stream = self.random.choice(able)
            # Some streams run much faster than others.
            for _ in range(self.random.choice((1, 1, 2, 5, 50))):
                entry = self.queues[stream][heads[stream]]
                if not self._is_able(entry):
                    break
                self._do(stream, entry)
                heads[stream] += 1
                if heads[stream] == len(self.queues[stream]):
                    del heads[stream]
                    break

    def _is_able(self, entry: Any) -> bool:
        if isinstance(entry, Wait):
            return self.published[entry.rank][-1][0] >= entry.number
        return not isinstance(entry, Follow) or len(self.ends.get(entry.stream, ())) >= entry.count

    def _do(self, stream: Stream, entry: Any) -> None:
        clock = self.clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        if isinstance(entry, Work):
            self._touch_all(entry, stream, clock)
            self._work(*entry)
        elif isinstance(entry, Write):
            numbers = self.published[entry.rank]
            if entry.number <= numbers[-1][0]:
                raise Problem(f"rank {entry.rank} publishes {entry.number} after {numbers[-1][0]}")
            numbers.append((entry.number, dict(clock)))
        else:
            if isinstance(entry, Wait):
                followed = next(each for number, each in self.published[entry.rank] if number >= entry.number)
            else:
                followed = self.ends[entry.stream][entry.count - 1] if entry.count else {}
            for other, tick in followed.items():
                clock[other] = max(clock.get(other, 0), tick)
        self.ends.setdefault(stream, []).append(dict(clock))

    def _touch_all(self, work: Work, stream: Stream, clock: Clock) -> None:
        rank, _, step, half = work
        owners = [rank] if isinstance(step, Fill) else [step.rank] if isinstance(step, Take) else range(self.size)
        for owner in owners:
            what = f"{step} of rank {rank}"
            if step.area < 0 or step.numel < 1 or step.area + step.numel > self.half:
                raise Problem(f"{what} goes beyond the half of {self.half}")
            new = Touch(step.area, step.area + step.numel, stream, clock[stream], what)
            reads, writes = self.touches.setdefault((owner, half), ([], []))
            for old in reads + writes if isinstance(step, Fill) else writes:
                is_ordered = old.stream == stream or clock.get(old.stream, 0) >= old.tick
                if max(old.begin, new.begin) < min(old.end, new.end) and not is_ordered:
                    raise Problem(f"nothing orders {new.what} on the area of {owner} after {old.what}")
            (writes if isinstance(step, Fill) else reads).append(new)

    def _work(self, rank: int, call: Call, step: Any, half: int) -> None:
        source, out = call.sources[rank], call.outs[rank]
        end = step.area + step.numel
        if isinstance(step, Fill):
            values = source[step.source : step.source + step.numel]
            assert len(values) == step.numel
            self.areas[rank, half, step.area : end] = values
            return
        if isinstance(step, Take):
            result = self.areas[step.rank, half, step.area : end]
        else:
            assert isinstance(step, ReduceAreas)
            result = self.areas[:, half, step.area : end].sum(0, dtype=np.uint8)
        assert step.out + step.numel <= len(out)
        out[step.out : step.out + step.numel] = result
