"""The compiled code of `torchmpi.nn`: the checksum of replicas, and products with one row."""

from collections.abc import Callable
from functools import cache

from ...shared_memory.kernels import load
from ...shared_memory.kernels.kernel_sets import KernelSet

NN = KernelSet(
    "nn", __name__, ("checksum_code", "row_product_code"), (("sum_words", "multiply_row"),), "kernels of torchmpi.nn", 1
)


@cache
def compiled(name: str) -> Callable[..., int] | None:
    """Return a kernel; None without a compiler."""
    try:
        return load(which=NN)[name]
    except (ImportError, OSError, RuntimeError):  # no LLVM, or none for this processor
        return None
