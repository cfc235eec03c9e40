"""Reductions on the GPU: for each dtype and operation a kernel that combines any number of sources in their order.

It reads every source once and writes the result once. The semantics, to the bit, are those of the reductions on the
host (:mod:`torchmpi.shared_memory.kernels.reduction`), but for which NaN a sum or a 16-bit float is; ranks on GPUs of
one kind have
the same bits. The code of a thread is in :mod:`torchmpi.backends.ipc.cuda_elements`; Numba compiles it to PTX, and the
driver
that to what the device runs. Numba's own launch is not used: it prepares every argument anew, in Python.
"""

# mypy: disable-error-code="no-untyped-call, attr-defined"
from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import BackendUnavailableError
from ...shared_memory.kernels.reduction import function_key
from ...tensors import dtypes

_NUM_THREADS = 512
_BLOCKS_PER_MULTIPROCESSOR = 4  # 2048 threads, all that run at once; each then goes on by as many units
_UNIT_BYTES = 16

Reducer = Callable[[Sequence[int], int, int, int], None]
"""``reduce(sources, out, num_bytes, stream)``: enqueues it, on addresses."""


def reducer(device: Any, dtype: torch.dtype, op: str, num_sources: int) -> Reducer:
    """Return the reduction of `num_sources` areas on a device, whose context is current.

    Sources begin at multiples of 16 bytes and are read up to the next such multiple behind their end.
    """
    dtypes.check_reduction(dtype, op)
    function = _function(device.index, function_key(dtype, op), num_sources, device)
    lane_bytes = dtype.itemsize // (2 if dtype.is_complex else 1)
    most_blocks = device.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR

    def reduce(sources: Sequence[int], out: int, num_bytes: int, stream: int) -> None:
        num_units = -(-num_bytes // _UNIT_BYTES)
        num_rows = min(most_blocks, -(-num_units // _NUM_THREADS))
        device.launch(function, num_rows, _NUM_THREADS, stream, (*sources, out, num_bytes // lane_bytes))

    return reduce


_functions: dict[tuple[int, tuple[str, str, int], int], int] = {}


def _function(index: int, key: tuple[str, str, int], num_sources: int, device: Any) -> int:
    place = index, key, num_sources
    if place not in _functions:
        code = ptx(key, num_sources, device.capability)
        found = re.search(r"\.visible \.entry (\w+)\(", code)
        assert found is not None
        _functions[place] = device.load(code, found[1])
    return _functions[place]


@functools.cache
def ptx(key: tuple[str, str, int], num_sources: int, capability: tuple[int, int]) -> str:
    """The PTX of a kernel for devices of a compute capability."""
    try:
        from numba import cuda, types

        from . import cuda_elements

        signature = types.UniTuple(types.int64, num_sources), types.int64, types.int64
        code, _ = cuda.compile_ptx(cuda_elements.kernel(*key, num_sources), signature, cc=capability, device=False)
    except Exception as error:  # whatever Numba, NVVM or their libraries do not like here
        raise BackendUnavailableError(
            f"kernels for the GPU cannot be compiled here ({type(error).__name__}: {error}). Install numba-cuda "
            "with the toolkit of your driver, as in `pip install numba-cuda[cu13]`, or pass another backend=."
        ) from error
    text: str = code
    return text
