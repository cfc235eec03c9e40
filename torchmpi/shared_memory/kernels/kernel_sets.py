"""The sets of kernels that are compiled and loaded together, and how fast paths call them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

ENABLE_CHECKS = os.environ.get("TORCHMPI_KERNEL_CHECKS", "").lower() not in ("", "0", "false", "no", "off")
"""Whether kernels are compiled with checks of addresses and counters (see :mod:`.access`)."""


class FastPathKernel(NamedTuple):
    """How the fast path of a collective calls its kernel."""

    kernel: str
    enter: str
    """Function that checks the tensors and writes the arguments of the kernel."""
    takes_tensor: bool = True
    takes_out: bool = False
    writes: bool = True
    """Whether the last tensor is written, so that its version for autograd increases."""


class KernelSet(NamedTuple):
    """Kernels that are compiled and loaded together."""

    modules: tuple[str, ...]
    names: tuple[str, ...]
    description: str
    seconds: int
    """Expected duration of the compilation on an idle core."""
    fast_paths: Mapping[str, FastPathKernel] = MappingProxyType({})


SETS = {
    "collectives": KernelSet(
        ("chunk_loop", "movement", "reduce_kernels", "fast_path_code"),
        (
            "allreduce",
            "allreduce_list",
            "barrier",
            "exchange",
            "broadcast",
            "allgather",
            "reduce_scatter",
            "alltoall",
            "offer",
            "take",
            "scatter",
        ),
        "shared-memory kernels",
        10,
        {
            "allreduce": FastPathKernel("allreduce", "enter_allreduce"),
            "reduce": FastPathKernel("allreduce", "enter_allreduce"),
            "broadcast": FastPathKernel("broadcast", "enter_broadcast"),
            "allgather": FastPathKernel("allgather", "enter_allgather", takes_out=True),
            "reduce_scatter": FastPathKernel("reduce_scatter", "enter_reduce_scatter", takes_out=True),
            "alltoall": FastPathKernel("alltoall", "enter_alltoall", takes_out=True),
            "gather": FastPathKernel("allgather", "enter_allgather", takes_out=True),
            "give": FastPathKernel("allgather", "enter_give", writes=False),
            "scatter": FastPathKernel("scatter", "enter_scatter", takes_out=True),
            "receive": FastPathKernel("scatter", "enter_receive", takes_tensor=False, takes_out=True),
        },
    ),
    "sharding": KernelSet(("shard_passes",), ("pass_over", "end_chunk"), "parameter-server kernels", 1),
}
