"""One who applies rules to shards in memory, and reads them: the client of a rank, or its server thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from ..shared_memory import kernels
from ..shared_memory.kernels import shard_layout as fields
from .arena import Arena, Memory
from .rules import Prepared
from .shards import Layout, chunk_numel

_SPINS, _CROWDED_SPINS, _YIELDS = 2000, 50, 200


class Shards:
    """The shards of one server that this process reaches through memory."""

    def __init__(
        self, memory: Memory, layout: Layout, parts: list[tuple[int, int]], *, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        """`parts`: first element and number of elements of each; `dtypes`: of the values, and of the states."""
        self.memory = memory
        self.dtype, self.state_dtype = dtypes
        self.chunk_numel = chunk_numel(self.dtype.itemsize, self.state_dtype.itemsize)
        self.parts = parts
        self.table = np.zeros((len(parts), fields.SHARD_FIELDS), np.int64)
        for row, (begin, numel), headers, arrays in zip(self.table, parts, layout.headers, layout.arrays, strict=True):
            row[fields.SHARD_HEADERS] = memory.address + headers
            row[fields.SHARD_ARRAYS : fields.SHARD_BEGIN] = [memory.address + array for array in arrays]
            row[fields.SHARD_BEGIN], row[fields.SHARD_NUMEL] = begin, numel

    def array(self, index: int, which: int = 0) -> torch.Tensor:
        """The values (0) or a state of one shard, as they are in memory: for while nobody uses it, and not for long."""
        row, (_, numel) = self.table[index], self.parts[index]
        return tensor_at(int(row[fields.SHARD_ARRAYS + which]), numel, self.state_dtype if which else self.dtype)

    def headers(self, index: int) -> torch.Tensor:
        """The words of the chunks of one shard: LOCK, VERSION, STEPS, and nothing, for each."""
        num_chunks = -(-self.parts[index][1] // self.chunk_numel)
        flat = tensor_at(int(self.table[index, fields.SHARD_HEADERS]), num_chunks * 8, torch.int64)
        return flat.view(num_chunks, 8)

    def close(self) -> None:
        """Unmap."""
        self.memory.close()


def tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The memory at an address, as a tensor that keeps nothing alive."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


class Actor:
    """Runs passes over shards. One at a time: whoever has an actor sees to that."""

    def __init__(self, arena: Arena, kind: int, *, is_crowded: bool = False) -> None:
        self.arena, self.number = arena, arena.enter(kind)
        self._kernels = kernels.load(which="sharding")
        self._pass_over = self._kernels["pass_over"]
        self._plan = np.zeros(fields.PLAN_FIELDS, np.int64)
        self._coefficients = np.zeros(fields.NUM_COEFFICIENTS, np.float64)
        self._address = int(self._plan.ctypes.data)
        plan = self._plan
        plan[fields.ARENA], plan[fields.ACTOR] = arena.address, self.number
        plan[fields.COEFFICIENTS] = self._coefficients.ctypes.data
        plan[fields.SPINS], plan[fields.YIELDS] = _CROWDED_SPINS if is_crowded else _SPINS, _YIELDS
        self.on_wait: Callable[[int], None] = lambda holder: None
        """Called again and again with the actor that holds a lock for long."""

    @property
    def versions(self) -> int:
        """Sum of the VERSIONs that the last pass found in its chunks."""
        return int(self._plan[fields.VERSIONS])

    @property
    def num_chunks(self) -> int:
        """Chunks of the last pass."""
        return int(self._plan[fields.POSITION])

    def apply(self, shards: Shards, data: int, span: tuple[int, int], prepared: Prepared) -> None:
        """Apply a rule to the elements in `span` that the shards have; `data` is the address of what is sent."""
        self._set(shards, data, span, prepared)
        if prepared.function is None:
            self._run()
        else:
            self._run_in_python(shards, data, span, prepared)

    def read(self, shards: Shards, data: int, span: tuple[int, int]) -> None:
        """Copy the elements in `span` that the shards have to their places in memory at `data`."""
        self._set(shards, data, span, None)
        self._run()

    def _set(self, shards: Shards, data: int, span: tuple[int, int], prepared: Prepared | None) -> None:
        plan, num_shards = self._plan, len(shards.parts)
        if prepared is not None and prepared.coefficients:
            self._coefficients[: len(prepared.coefficients)] = prepared.coefficients
        plan[fields.SHARDS : fields.RULE + 1] = (
            shards.table.ctypes.data,
            num_shards,
            self.arena.rank_of(self.number) % num_shards,
            shards.chunk_numel,
            shards.dtype.itemsize,
            shards.state_dtype.itemsize,
            0 if prepared is None else prepared.num_states,
            0 if prepared is None else prepared.address,
        )
        plan[fields.DATA : fields.VERSIONS + 1] = data, *span, 0, 0

    def _run(self) -> None:
        while self._pass_over(self._address) == fields.HELD:
            self._look_after_holder()

    def _look_after_holder(self) -> None:
        holder = int(self._plan[fields.HOLDER])
        if self.arena.is_dead(holder):
            self._kernels["take_over"](self._address)
        else:
            self.on_wait(holder)

    def _run_in_python(self, shards: Shards, data: int, span: tuple[int, int], prepared: Prepared) -> None:
        kernel = self._kernels
        try:
            while (status := kernel["take_chunk"](self._address)) != fields.DONE:
                if status == fields.HELD:
                    self._look_after_holder()
                else:
                    self._call_function(shards, data - span[0] * shards.dtype.itemsize, prepared)
                    kernel["end_chunk"](self._address, 1)
        finally:  # an interrupt may come between any two steps above: whatever chunk is taken, let go of it
            kernel["end_chunk"](self._address, 0)

    def _call_function(self, shards: Shards, data: int, prepared: Prepared) -> None:
        """Have a rule in Python change the scratch; `data` is where element 0 would be."""
        plan, function = self._plan, prepared.function
        assert function is not None
        begin, end = int(plan[fields.CHUNK_BEGIN]), int(plan[fields.CHUNK_END])
        sent = tensor_at(data + begin * shards.dtype.itemsize, end - begin, shards.dtype)
        arrays = [
            tensor_at(int(plan[fields.TARGETS + array]), end - begin, shards.state_dtype if array else shards.dtype)
            for array in range(1 + prepared.num_states)
        ]
        with torch.no_grad():
            function(arrays[0], sent, *arrays[1:], *prepared.coefficients)
