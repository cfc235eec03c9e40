"""Kernels that fill and add staging areas, compiled by NVRTC when they are first used.

torch adds two tensors at a time, and 16-bit floats in a tensor of 32 bits: for p ranks at least 3 (p - 1) reads and
writes of the length of the tensor, where one kernel has p + 1. The bits are those of :func:`rank_order.combine`, which
computes what has no kernel: other dtypes and operations, more ranks, and everything where NVRTC fails.

The kernel that fills an area also publishes a number, which otherwise takes another operation of the stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ...log import logger
from . import driver, nvrtc

NUM_THREADS = 512
_MOST_RANKS = 16
_ADD, _FILL, _PACK_BYTES = "add_areas", "fill_area", 16
_BLOCKS_OF_PROCESSOR = 4  # 2048 threads, as many as multiprocessors of data centers run

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
struct Numbers { volatile long long *of[SIZE - 1]; };

__device__ ITEM result_of(TOTAL total) { return rounded(%(result)s); }

extern "C" __global__ void __launch_bounds__(%(num_threads)d)
add_areas(const Areas areas, void *out, const long long numel) {
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x, step = gridDim.x * (long long)blockDim.x;
    // Areas are aligned to packs; a tensor of the program may not be.
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

// The last block that ends writes the number, for each other rank.
extern "C" __global__ void __launch_bounds__(%(num_threads)d)
fill_area(const void *source, void *area, const long long numel, const Numbers numbers, const long long number,
          unsigned *num_ended) {
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x, step = gridDim.x * (long long)blockDim.x;
    const long long num_packs = (size_t)source %% sizeof(Pack) == 0 ? numel / NUM_ITEMS : 0;
    for (long long index = first; index < num_packs; index += step)
        ((uint4 *)area)[index] = ((const uint4 *)source)[index];
    for (long long index = num_packs * NUM_ITEMS + first; index < numel; index += step)
        ((ITEM *)area)[index] = ((const ITEM *)source)[index];
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence_system();  // for the whole block
    if (atomicAdd(num_ended, 1) != gridDim.x - 1) return;
    *num_ended = 0;
    __threadfence_system();
    for (int other = 0; other < SIZE - 1; ++other) *numbers.of[other] = number;
}
"""


class AreaKernels(NamedTuple):
    """The kernels of a dtype, an operation and a number of ranks, and how to launch them."""

    add: int
    """A CUfunction."""
    fill: int
    most_blocks: int
    numel_of_block: int


def source(dtype: torch.dtype, op: str, size: int) -> str:
    """Return the source of the kernels for the areas of `size` ranks.

    >>> "#define SIZE 3" in source(torch.float32, "sum", 3)
    True
    """
    item, total, conversions = _TYPES[dtype]
    return _SOURCE % {
        "item": item, "total": total, "size": size, "num_items": _PACK_BYTES // dtype.itemsize,
        "conversions": conversions, "result": _RESULTS[op], "num_threads": NUM_THREADS,
    }  # fmt: skip


def exist_for(dtype: torch.dtype, op: str, size: int) -> bool:
    """Return whether there are kernels for the areas of `size` ranks, if NVRTC compiles them.

    >>> exist_for(torch.float32, "avg", 2), exist_for(torch.float32, "max", 2)
    (True, False)
    """
    return dtype in _TYPES and op in _RESULTS and 2 <= size <= _MOST_RANKS


@cache
def area_kernels(dtype: torch.dtype, op: str, size: int, device_index: int) -> AreaKernels | None:
    """Return the kernels for the areas of `size` ranks on a GPU; None if there are none."""
    if not exist_for(dtype, op, size):
        return None
    properties = torch.cuda.get_device_properties(device_index)
    try:
        module = nvrtc.compile_source(source(dtype, op, size), f"sm_{properties.major}{properties.minor}")
        with torch.cuda.device(device_index):
            add, fill = driver.load_functions(module, (_ADD, _FILL))
    except (RuntimeError, OSError, AttributeError) as error:
        logger.info("no kernels for sums of %s on this GPU, operations of torch compute them: %s", dtype, error)
        return None
    most_blocks = properties.multi_processor_count * _BLOCKS_OF_PROCESSOR
    return AreaKernels(add, fill, most_blocks, NUM_THREADS * (_PACK_BYTES // dtype.itemsize))


class Parameters:
    """The parameters of a kernel in memory, each of 64 bits or an array of such, as cuLaunchKernel takes them."""

    def __init__(self, *parameters: int | Sequence[int]) -> None:
        """Store the parameters. A number is the address of a parameter, a sequence is an array."""
        arrays = [number for each in parameters if not isinstance(each, int) for number in each]
        self._memory = np.array([*(0,) * len(parameters), *arrays], np.int64)
        self.address = int(self._memory.ctypes.data)
        place = self.address + 8 * len(parameters)
        for index, each in enumerate(parameters):
            self._memory[index] = each if isinstance(each, int) else place
            place += 0 if isinstance(each, int) else 8 * len(each)


class SumOfAreas:
    """Enqueues the sum of some areas."""

    def __init__(self, kernels: AreaKernels, areas: Sequence[torch.Tensor]) -> None:
        self._kernels, self._values = kernels, np.zeros(2, np.int64)
        address = int(self._values.ctypes.data)
        self._parameters = Parameters([area.data_ptr() for area in areas], address, address + 8)
        self._launch = driver.function(*driver.LAUNCH)
        sizes = (ctypes.c_uint,) * 7
        self._launch.argtypes = (ctypes.c_void_p, *sizes, *(ctypes.c_void_p,) * 3)

    def __call__(self, out: torch.Tensor, stream: int) -> None:
        """Enqueue the sum into a flat tensor on a stream, given by its address.

        Raises:
            RuntimeError: The driver refuses the kernel, for example because the device has failed.
        """
        kernels, numel = self._kernels, out.numel()
        if numel == 0:
            return
        self._values[:] = out.data_ptr(), numel
        num_blocks = min(-(-numel // kernels.numel_of_block), kernels.most_blocks)
        status = self._launch(
            kernels.add, num_blocks, 1, 1, NUM_THREADS, 1, 1, 0, stream, self._parameters.address, None
        )
        if status:
            driver.fail("launch the kernel that adds staging areas", status)
