"""Run by test_cuda_reduction.py with NUMBA_ENABLE_CUDASIM=1: the kernels under Numba's simulator, against those of the
host, which have twins of their own. Prints one line of JSON: what differs, by dtype."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from numba import config, cuda

from torchmpi.backends.ipc import cuda_elements
from torchmpi.backends.ipc.cuda_intrinsics import UNIT_BYTES
from torchmpi.shared_memory.kernels import reduction
from torchmpi.tensors import dtypes

GRID, BLOCK = 2, 3  # so that threads go on by their step, in the simulator a thread of the host each
GUARD = 64


def values(dtype: torch.dtype, numel: int, generator: torch.Generator) -> torch.Tensor:
    """Any bits of integers and truths; of floats moderate numbers, and among them all that are special."""
    if dtype.is_complex:
        return torch.view_as_complex(values(dtype.to_real(), 2 * numel, generator).view(numel, 2))
    if not dtype.is_floating_point:
        raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        raw[torch.rand(raw.shape, generator=generator) < 0.3] = 0
        return raw.view(dtype)
    result = torch.randn(numel, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, info.max, info.tiny, info.smallest_normal / 4]
    for place in range(0, numel, 3):
        result[place] = special[int(torch.randint(len(special), (1,), generator=generator))]
    return result.to(dtype)


def room(num_bytes: int, offset: int) -> tuple[torch.Tensor, int]:
    """Memory between guards, that begins `offset` bytes behind a multiple of 16; and where that is in the tensor."""
    memory = torch.full((num_bytes + 3 * GUARD,), 0xA5, dtype=torch.uint8)
    begin = GUARD + -(memory.data_ptr() + GUARD) % UNIT_BYTES + offset
    return memory, begin


def on_the_host(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    dtype = parts[0].dtype
    result = torch.empty(parts[0].numel() * dtype.itemsize, dtype=torch.uint8)
    run = reduction.called(reduction.address(dtype, op))
    run([result.data_ptr()], [part.data_ptr() for part in parts], parts[0].numel())
    return result.view(dtype)


def simulated(parts: list[torch.Tensor], op: str, *, place: int | None, offset: int) -> tuple[torch.Tensor, bool]:
    """The result, written `offset` bytes off or into source `place`; and whether nothing else was written."""
    dtype, numel = parts[0].dtype, parts[0].numel()
    num_bytes = numel * dtype.itemsize
    rooms = []
    for part in parts:
        memory, begin = room(num_bytes, 0)
        memory[begin : begin + num_bytes] = part.view(torch.uint8)
        rooms.append((memory, begin))
    target, first = rooms[place] if place is not None else room(num_bytes, offset)
    before = [memory.clone() for memory, _ in rooms], target.clone()
    key = reduction.function_key(dtype, op)
    num_lanes = num_bytes * 8 // cuda_elements.LANE_BITS[key[0]]
    thread = cuda.jit(cuda_elements.kernel(*key, len(parts)))
    sources = tuple(memory.data_ptr() + begin for memory, begin in rooms)
    thread[GRID, BLOCK](sources, target.data_ptr() + first, num_lanes)
    result = target[first : first + num_bytes].clone()
    target[first : first + num_bytes] = before[1][first : first + num_bytes]
    kept = all(map(torch.equal, (memory for memory, _ in rooms), before[0])) and torch.equal(target, before[1])
    return result.view(dtype), kept


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Every bit, but of which NaN it is."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    unlike = (a.view(torch.uint8) != b.view(torch.uint8)).view(-1, a.dtype.itemsize).any(1)
    if a.is_floating_point():
        unlike &= ~(a.isnan() & b.isnan()).view(-1)
    return not unlike.any()


def problems(dtype: torch.dtype) -> Iterator[str]:
    generator = torch.Generator().manual_seed(dtypes.info(dtype).code)
    lane_bytes = dtype.itemsize // (2 if dtype.is_complex else 1)
    lanes = UNIT_BYTES // dtype.itemsize
    for op, num_sources in itertools.product(dtypes.info(dtype).ops, (1, 2, 3, 5)):
        for numel in (1, lanes, 7 * lanes + max(1, lanes - 1)):
            parts = [values(dtype, numel, generator) for _ in range(num_sources)]
            expected = on_the_host(parts, op)
            for place, offset in ((None, 0), (None, lane_bytes % UNIT_BYTES), (num_sources - 1, 0)):
                result, kept = simulated(parts, op, place=place, offset=offset)
                if not (same(result, expected) and kept):
                    case = f"{op} of {num_sources} x {numel}, into {place}, {offset} off"
                    yield f"{case}: {parts} {result} {expected} {kept}"


if __name__ == "__main__":
    assert config.ENABLE_CUDASIM
    warnings.simplefilter("ignore")  # torch on complex32, numba on its old simulator
    with np.errstate(all="ignore"):
        found = {dtypes.short_name(dtype): list(itertools.islice(problems(dtype), 3)) for dtype in reduction.LANES}
    print(json.dumps(found))
