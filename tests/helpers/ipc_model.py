"""A model for the ipc backend: processes that synchronize by published numbers, and streams that do the same.

A stream runs what was enqueued on it in order. It writes numbers and waits for those of other streams; a wait may only
be enqueued after the write that ends it. So the order of the work depends
only on the order in which the hosts run, which is chosen at random. Vector clocks determine the order of
accesses: two accesses to one location, one of them a write, must be ordered for any timing of the devices.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from torchmpi.backends.ipc import chunk_plan
from torchmpi.backends.ipc.chunk_plan import Fill, ReduceAreas, Room, Sync, Take
from torchmpi.shared_memory.memory_layout import STAGE_BITS


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
    stream: tuple[int, int]
    tick: int
    what: str


class Written(NamedTuple):
    """The write of a number by a stream, and its position in the order of the work."""

    number: int
    clock: dict[tuple[int, int], int]
    done: list[bool]


class Problem(AssertionError):
    """A protocol error that the model has detected."""


class Model:
    """All ranks; the thread of each host is a generator that yields before visible operations and while it waits."""

    def __init__(self, size: int, half: int, seed: int) -> None:
        self.size, self.half, self.random = size, half, random.Random(seed)
        self.fields = [0] * size
        self.areas = np.full((size, 2, half), 255, np.uint8)
        self.writes: list[list[Written]] = [[Written(0, {}, [True])] for _ in range(size)]
        self.queues: dict[tuple[int, int], list[Any]] = {}
        self.clocks: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
        self.touches: dict[tuple[int, int], tuple[list[Touch], list[Touch]]] = {}
        """The reads and writes of each half."""
        self.last_use = [[0, 0] for _ in range(size)]
        self.is_free = [[False, False] for _ in range(size)]
        self.last_stream: dict[int, tuple[int, int]] = {}
        self.publishes_late = True
        """Whether a rank publishes in its next call that it has read the areas in a short allreduce."""

    def play(self, calls: list[Call]) -> None:
        """Run the hosts in a random order to their end, then the devices. Other calls may come between these."""
        self.seqs = list(accumulate(self.random.choice((1, 1, 2, 3)) for _ in calls))
        hosts = {rank: self._host(rank, calls) for rank in range(self.size)}
        waiting: dict[int, Any] = {}
        while hosts:
            able = [rank for rank in hosts if rank not in waiting or waiting[rank]()]
            if not able:
                raise Problem(f"the hosts wait for each other: {sorted(hosts)}, words {self.fields}")
            rank = self.random.choice(able)
            # Some hosts run much faster than others.
            for _ in range(self.random.choice((1, 1, 2, 5, 50))):
                waiting.pop(rank, None)
                try:
                    condition = next(hosts[rank])
                except StopIteration:
                    del hosts[rank]
                    break
                if condition is not None:
                    waiting[rank] = condition
                    if not condition():
                        break
        self._run_devices()

    # --- the hosts

    def _host(self, rank: int, calls: list[Call]) -> Iterator[Any]:
        late = 0
        for seq, call in zip(self.seqs, calls, strict=True):
            base = seq << STAGE_BITS
            stream = (rank, call.streams[rank])
            self._follow_last_stream(rank, stream)
            yield None
            # Each rank decides by itself.
            if self._can_be_short(call.chunks[rank], self.is_free[rank][seq & 1]) and self.random.random() < 0.8:
                for step in call.chunks[rank][0][:-1]:
                    yield from self._step(rank, stream, call, step, (0, base, seq & 1))
                late = base + chunk_plan.stage_number(0, chunk_plan.EMPTIED)
                continue
            if late and self.publishes_late:
                self._write(rank, stream, late)
                late = 0
                yield None
            self.fields[rank] = base
            for index, steps in enumerate(call.chunks[rank]):
                half = seq + index & 1
                for step in steps:
                    yield from self._step(rank, stream, call, step, (index, base, half))

    def _can_be_short(self, chunks: list[list[Any]], is_free: bool) -> bool:
        """Return whether a :class:`~torchmpi.backends.ipc.short_allreduce.ShortAllreduce` can run these steps."""
        kinds = [type(step) for chunk in chunks for step in chunk]
        return self.size > 1 and is_free and kinds == [Room, Fill, Sync, ReduceAreas, Sync]

    def _step(self, rank: int, stream: tuple[int, int], call: Call, step: Any, place: Any) -> Iterator[Any]:
        index, base, half = place
        if isinstance(step, Room):
            if not self.is_free[rank][half]:
                yield from self._await(rank, stream, chunk_plan.others(rank, self.size), self.last_use[rank][half])
            self.last_use[rank][half] = base + chunk_plan.stage_number(index, chunk_plan.EMPTIED)
            self.is_free[rank][half] = False
        elif isinstance(step, Sync):
            number = base + chunk_plan.stage_number(index, step.stage)
            if step.publishes:
                yield None
                self._write(rank, stream, number)
                yield None
                self.fields[rank] = number
            yield from self._await(rank, stream, step.awaits, number)
            if step.stage == chunk_plan.FILLED and len(step.awaits) == self.size - 1:
                self.is_free[rank][1 - half] = True
        else:
            self._enqueue(rank, stream, call, step, half)

    def _await(self, rank: int, stream: tuple[int, int], others: tuple[int, ...], number: int) -> Iterator[Any]:
        yield lambda: all(self.fields[other] >= number for other in others)
        for other in others:
            yield None
            self._wait(stream, other, number)

    def _follow_last_stream(self, rank: int, stream: tuple[int, int]) -> None:
        """Order the calls of a rank: a stream waits for the one before."""
        last = self.last_stream.get(rank, stream)
        self.last_stream[rank] = stream
        if last != stream:
            done = [False]
            self.queues.setdefault(last, []).append(("record", done))
            self.queues.setdefault(stream, []).append(("wait", done))
            clock = self.clocks.setdefault(stream, {})
            for other, tick in self.clocks.get(last, {}).items():
                clock[other] = max(clock.get(other, 0), tick)

    def _tick(self, stream: tuple[int, int]) -> tuple[int, dict[tuple[int, int], int]]:
        clock = self.clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream], dict(clock)

    def _write(self, rank: int, stream: tuple[int, int], number: int) -> None:
        done = [False]
        _, clock = self._tick(stream)
        if number <= self.writes[rank][-1].number:
            raise Problem(f"rank {rank} writes {number} after {self.writes[rank][-1].number}")
        self.writes[rank].append(Written(number, clock, done))
        self.queues.setdefault(stream, []).append(("record", done))

    def _wait(self, stream: tuple[int, int], other: int, number: int) -> None:
        found = next((each for each in self.writes[other] if each.number >= number), None)
        if found is None:
            raise Problem(f"{stream} waits for {number} of rank {other}, which is not enqueued")
        clock = self.clocks.setdefault(stream, {})
        for writer, tick in found.clock.items():
            clock[writer] = max(clock.get(writer, 0), tick)
        self.queues.setdefault(stream, []).append(("wait", found.done))

    # --- the devices

    def _enqueue(self, rank: int, stream: tuple[int, int], call: Call, step: Any, half: int) -> None:
        tick, clock = self._tick(stream)

        def touch(owner: int, begin: int, numel: int, writes: bool) -> None:
            if begin < 0 or numel < 1 or begin + numel > self.half:
                raise Problem(f"{step} of rank {rank} goes beyond the half of {self.half}")
            new = Touch(begin, begin + numel, stream, tick, f"{step} of rank {rank}")
            known = self.touches.setdefault((owner, half), ([], []))
            for old in known[1] if not writes else known[0] + known[1]:
                is_ordered = old.stream == stream or clock.get(old.stream, 0) >= old.tick
                if max(old.begin, new.begin) < min(old.end, new.end) and not is_ordered:
                    raise Problem(f"nothing orders {new.what} on the area of {owner} after {old.what}")
            known[writes].append(new)

        if isinstance(step, Fill):
            touch(rank, step.area, step.numel, True)
        elif isinstance(step, Take):
            touch(step.rank, step.area, step.numel, False)
        else:
            assert isinstance(step, ReduceAreas)
            for owner in range(self.size):
                touch(owner, step.area, step.numel, False)
        self.queues.setdefault(stream, []).append(("work", rank, call, step, half))

    def _run_devices(self) -> None:
        heads = dict.fromkeys(self.queues, 0)
        while heads:
            able = []
            for stream, at in heads.items():
                kind, *rest = self.queues[stream][at]
                if kind != "wait" or rest[0][0]:
                    able.append(stream)
            if not able:
                raise Problem("the streams wait for each other")
            stream = self.random.choice(able)
            kind, *rest = self.queues[stream][heads[stream]]
            if kind == "record":
                rest[0][0] = True
            elif kind == "work":
                self._work(*rest)
            heads[stream] += 1
            if heads[stream] == len(self.queues[stream]):
                del heads[stream]

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
            result = self.areas[:, half, step.area : end].sum(0, dtype=np.uint8)
        assert step.out + step.numel <= len(out)
        out[step.out : step.out + step.numel] = result
