"""The checksum of :func:`torchmpi.nn.replica_check.checksum` in machine code, over whole words."""

from __future__ import annotations

from ...shared_memory.compiler.compilation import kernel
from ...shared_memory.kernels.intrinsics import load
from ..splitmix import FIRST, SECOND, STEP

_LOW_34, _LOW_37, _LOW_33 = (1 << 34) - 1, (1 << 37) - 1, (1 << 33) - 1


@kernel
def sum_words(address, num_words):
    """Return the sum of the scrambled words at an address; multiplications and sums wrap around."""
    total, offset = 0, 0
    for index in range(num_words):
        offset += STEP
        mixed = load(address + 8 * index) + offset
        mixed = (mixed ^ (mixed >> 30) & _LOW_34) * FIRST
        mixed = (mixed ^ (mixed >> 27) & _LOW_37) * SECOND
        total += mixed ^ (mixed >> 31) & _LOW_33
    return total
