"""Sums and means of staging areas in one kernel, which PyTorch compiles by NVRTC when it is first used.

torch adds two tensors at a time, and 16-bit floats in a tensor of 32 bits: for p ranks at least 3 (p - 1) reads and
writes of the length of the tensor, where one kernel has p + 1. The bits are those of :func:`rank_order.combine`, which
computes what has no kernel: other dtypes and operations, more ranks, or a PyTorch that does not compile kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ...log import logger
from . import driver

NUM_THREADS, MOST_SIZE = 512, 16
_NAME, _PACK_BYTES = "sum_areas", 16
_BLOCKS_OF_PROCESSOR = 4  # 2048 threads, as many as a multiprocessor runs

# Without the header files of CUDA, which need not be installed: float16 by instructions, bfloat16 by its bits.
_SAME = """
__device__ TOTAL widened(ITEM item) { return item; }
__device__ ITEM rounded(TOTAL total) { return total; }
"""
_HALF = """
__device__ float widened(unsigned short bits) { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x; }
__device__ unsigned short rounded(float total) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(total));
    return bits;
}
"""
_BFLOAT = """
__device__ float widened(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ unsigned short rounded(float total) {
    const unsigned bits = __float_as_uint(total);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // NaN
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, of two the even one
}
"""
_TYPES = {
    torch.float32: ("float", "float", _SAME),
    torch.float64: ("double", "double", _SAME),
    torch.float16: ("unsigned short", "float", _HALF),
    torch.bfloat16: ("unsigned short", "float", _BFLOAT),
}
"""The type of an element, that of partial results, and the conversions."""
_RESULTS = {"sum": "total", "avg": "total / (TOTAL)SIZE"}
_SOURCE = """
typedef %(item)s ITEM;
typedef %(total)s TOTAL;
#define SIZE %(size)d
#define NUM_ITEMS %(num_items)d
%(conversions)s
union Pack { uint4 bits; ITEM items[NUM_ITEMS]; };
struct Areas { const void *at[SIZE]; };

__device__ ITEM result_of(TOTAL total) { return rounded(%(result)s); }

extern "C" __global__ void %(name)s(const Areas areas, void *out, const long long numel) {
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x, step = gridDim.x * (long long)blockDim.x;
    // The areas begin at multiples of the size of a pack, other than a part of a tensor of the program.
    const long long num_packs = (size_t)out %% sizeof(Pack) == 0 ? numel / NUM_ITEMS : 0;
    for (long long index = first; index < num_packs; index += step) {
        Pack packs[SIZE], sums;
        #pragma unroll
        for (int rank = 0; rank < SIZE; ++rank) packs[rank].bits = ((const uint4 *)areas.at[rank])[index];
        #pragma unroll
        for (int item = 0; item < NUM_ITEMS; ++item) {
            TOTAL total = widened(packs[0].items[item]);
            #pragma unroll
            for (int rank = 1; rank < SIZE; ++rank) total += widened(packs[rank].items[item]);
            sums.items[item] = result_of(total);
        }
        ((uint4 *)out)[index] = sums.bits;
    }
    for (long long index = num_packs * NUM_ITEMS + first; index < numel; index += step) {
        TOTAL total = widened(((const ITEM *)areas.at[0])[index]);
        #pragma unroll
        for (int rank = 1; rank < SIZE; ++rank) total += widened(((const ITEM *)areas.at[rank])[index]);
        ((ITEM *)out)[index] = result_of(total);
    }
}
"""


class SumKernel(NamedTuple):
    """A kernel that adds areas, and how to launch it."""

    function: int
    """The CUfunction."""
    most_blocks: int
    numel_of_block: int


def source(dtype: torch.dtype, op: str, size: int) -> str:
    """Return the source of a kernel for the areas of `size` ranks.

    >>> "#define SIZE 3" in source(torch.float32, "sum", 3)
    True
    """
    item, total, conversions = _TYPES[dtype]
    return _SOURCE % {
        "item": item, "total": total, "size": size, "num_items": _PACK_BYTES // dtype.itemsize, "name": _NAME,
        "conversions": conversions.replace("TOTAL", total).replace("ITEM", item), "result": _RESULTS[op],
    }  # fmt: skip


@cache
def sum_kernel(dtype: torch.dtype, op: str, size: int, device_index: int) -> SumKernel | None:
    """Return the kernel for the areas of `size` ranks on a GPU; None if there is none."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None or dtype not in _TYPES or op not in _RESULTS or not 2 <= size <= MOST_SIZE:
        return None
    try:
        with torch.cuda.device(device_index):
            function = compile_kernel(source(dtype, op, size), _NAME).func.value
    except Exception as error:  # a private function: torch's operations compute the same
        logger.debug("no kernel adds %s of %d ranks: %s: %s", dtype, size, type(error).__name__, error)
        return None
    num_processors = torch.cuda.get_device_properties(device_index).multi_processor_count
    return SumKernel(function, num_processors * _BLOCKS_OF_PROCESSOR, NUM_THREADS * (_PACK_BYTES // dtype.itemsize))


def parameters(areas: Sequence[torch.Tensor], out: int, numel: int) -> np.ndarray:
    """Return the addresses of the parameters of a kernel, and behind them the addresses of the areas.

    `out` and `numel`: addresses of memory for the address of the result and for the number of its elements.
    """
    table = np.array([0, out, numel, *(area.data_ptr() for area in areas)], np.int64)
    table[0] = table[3:].ctypes.data
    return table


class SumOfAreas:
    """Enqueues the sum of some areas."""

    def __init__(self, kernel: SumKernel, areas: Sequence[torch.Tensor]) -> None:
        self._kernel, self._values = kernel, np.zeros(2, np.int64)
        address = int(self._values.ctypes.data)
        self._parameters = parameters(areas, address, address + self._values.itemsize)
        self._launch = driver.function(*driver.LAUNCH)
        sizes = (ctypes.c_uint,) * 7
        self._launch.argtypes = (ctypes.c_void_p, *sizes, *(ctypes.c_void_p,) * 3)

    def __call__(self, out: torch.Tensor, stream: int) -> None:
        """Enqueue the sum into a flat tensor on a stream, given by its address.

        Raises:
            RuntimeError: The driver refuses the kernel, for example because the device has failed.
        """
        function, most_blocks, numel_of_block = self._kernel
        numel = out.numel()
        if numel == 0:
            return
        self._values[:] = out.data_ptr(), numel
        num_blocks = min(-(-numel // numel_of_block), most_blocks)
        address = self._parameters.ctypes.data
        status = self._launch(function, num_blocks, 1, 1, NUM_THREADS, 1, 1, 0, stream, address, None)
        if status:
            driver.fail("launch the kernel that adds staging areas", status)
