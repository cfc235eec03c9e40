"""Shards without MPI: memory shared by forked processes, actors, and a reference of the rules in plain torch."""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable

import torch

from helpers.rule_references import twin
from torchmpi.parameterserver import rules
from torchmpi.parameterserver.kernels import server_rules as native
from torchmpi.parameterserver.kernels import shard_layout as fields
from torchmpi.parameterserver.rules import Rule
from torchmpi.parameterserver.shards import CLIENT, Actor, Shards, layout, private_segment
from torchmpi.shared_memory.segments import Segment


class Rig:
    """The shards of a server, of `numels` elements; `chunk` makes their chunks smaller than usual.

    With `num_images`, twice the number of ranks, chunks are copied before they are changed.
    """

    def __init__(
        self,
        numels: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        *,
        chunk: int = 0,
        shared: bool = False,
        num_images: int = 0,
    ) -> None:
        state_dtype = native.state_dtype(dtype)
        plan = layout(numels, dtype.itemsize, state_dtype.itemsize, num_images)
        begins = [sum(numels[:index]) for index in range(len(numels))]
        parts = list(zip(begins, numels, strict=True))
        self.dtype, self.numel = dtype, sum(numels)
        assert not chunk or max(numels) <= chunk * 4096 // fields.Header.BYTES, "a page of headers"
        memory = segment_of(plan.num_bytes, shared)
        self.shards = Shards(memory, plan, parts, dtypes=(dtype, state_dtype), chunk=chunk)

    def actor(self, index: int, kind: int = CLIENT) -> Actor:
        """An actor of the calling process."""
        return Actor(kind, index)

    def apply(self, actor: Actor, rule: str | Rule, data: torch.Tensor, span: tuple[int, int] | None = None) -> None:
        """Apply a rule; `data` holds the elements of the span."""
        span = span or (0, self.numel)
        assert data.numel() == span[1] - span[0] and data.dtype is self.dtype and data.is_contiguous()
        actor.visit(self.shards, data.data_ptr(), span, rules.prepare(rule, self.dtype))

    def read(self, actor: Actor, span: tuple[int, int] | None = None) -> torch.Tensor:
        span = span or (0, self.numel)
        data = torch.empty(span[1] - span[0], dtype=self.dtype)
        actor.visit(self.shards, data.data_ptr(), span, None)
        return data

    def arrays(self, which: int = 0) -> torch.Tensor:
        """The values (0) or a state of all shards."""
        return torch.cat([self.shards.array(index, which) for index in range(len(self.shards.parts))])

    def headers(self) -> torch.Tensor:
        """LOCK, VERSION, STEPS of all chunks."""
        return torch.cat([self.shards.headers(index) for index in range(len(self.shards.parts))])[:, :3]

    def num_pending(self) -> int:
        """The number of copies of chunks that are being changed."""
        address, num_images, _ = self.shards.images
        words = (ctypes.c_int64 * (num_images * fields.Image.FIELDS)).from_address(address)
        return sum(chunk != 0 for chunk in words[:: fields.Image.FIELDS])

    def chunks(self) -> list[tuple[int, int]]:
        """First element and end of every chunk."""
        step = self.shards.chunk_numel
        return [
            (start, min(start + step, begin + numel))
            for begin, numel in self.shards.parts
            for start in range(begin, begin + numel, step)
        ]

    def close(self) -> None:
        self.shards.close()


def segment_of(num_bytes: int, shared: bool) -> Segment:
    if not shared:
        return private_segment(num_bytes)
    segment = Segment.create("test", num_bytes)
    segment.withdraw()
    return segment


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a forked process and return its id; its exit status is not 0 if `work` fails."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return process


class Twin:
    """The expected content of the shards of a rig: rules computed by torch, chunk by chunk."""

    def __init__(self, rig: Rig) -> None:
        self.chunks, self.dtype = rig.chunks(), rig.dtype
        self.values = torch.zeros(rig.numel, dtype=rig.dtype)
        self.states = [torch.zeros(rig.numel, dtype=native.state_dtype(rig.dtype)) for _ in range(2)]
        self.versions, self.steps = [0] * len(self.chunks), [0] * len(self.chunks)

    def inside(self, span: tuple[int, int]) -> list[int]:
        """The chunks of a span."""
        return [index for index, (begin, end) in enumerate(self.chunks) if span[0] <= begin and end <= span[1]]

    def apply(self, rule: str | Rule, data: torch.Tensor, span: tuple[int, int]) -> None:
        rule = Rule(rule) if isinstance(rule, str) else rule
        for index in self.inside(span):
            begin, end = self.chunks[index]
            sent, value = data[begin - span[0] : end - span[0]], self.values[begin:end]
            self.versions[index] += 1
            row = native.BUILT_IN[rule.name]
            states = [state[begin:end] for state in self.states[: row.num_states]]
            if row.is_plain(rule.coefficients):
                states = [torch.zeros_like(state) for state in states]  # not kept
            elif states:
                self.steps[index] += 1
            results = twin(rule.name, rule.coefficients, [value, *states], sent, self.steps[index])
            for kept, result in zip((value, *states), results, strict=True):
                kept.copy_(result)

    def agrees(self, rig: Rig) -> None:
        """Compare all bits of values and headers."""
        header = rig.headers()
        assert header[:, fields.Header.lock].count_nonzero() == 0
        assert header[:, fields.Header.version].tolist() == self.versions
        assert header[:, fields.Header.steps].tolist() == self.steps
        for which, expected in enumerate((self.values, *self.states)):
            assert torch.equal(rig.arrays(which), expected)
