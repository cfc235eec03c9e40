"""Sets of kernels that are compiled and loaded together: those of the collectives, and how fast paths call them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

ENABLE_CHECKS = os.environ.get("TORCHMPI_KERNEL_CHECKS", "").lower() not in ("", "0", "false", "no", "off")
"""Whether kernels are compiled with checks of addresses and counters (see :mod:`.access`)."""

DELAYS = os.environ.get("TORCHMPI_KERNEL_DELAYS", "")
"""Seed with which kernels are compiled that pause at random between their accesses to shared memory; '' for none."""


class FastPathKernel(NamedTuple):
    """How the fast path of a collective calls its kernel."""

    kernel: str
    enter: str
    """Function that checks the tensors and writes the arguments of the kernel."""
    takes_tensor: bool = True
    takes_out: bool = False
    writes: bool = True
    """Whether the last tensor is written, so that its version for autograd increases."""
    takes_list: bool = False
    takes_out_list: bool = False
    """Whether the parts of the ranks may be tensors of a list, of a bound call."""
    is_of_list: bool = False
    """Whether it is a call on a list of tensors (see :mod:`.list_calls`)."""
    any_length: bool = False
    """Whether these tensors may differ in length."""


class KernelSet(NamedTuple):
    """Kernels that are compiled and loaded together."""

    name: str
    package: str
    """The package of the modules."""
    modules: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...]
    """The names of the kernels, by the file into which they are compiled: ranks of a host compile different files."""
    description: str
    seconds: int
    """Expected duration of the compilation of all parts by one rank on an idle core."""
    fast_paths: Mapping[str, FastPathKernel] = MappingProxyType({})
    brief: frozenset[str] = frozenset()
    """Kernels that neither wait nor move data, so that they keep the GIL."""
    entries: str = ""
    """The module whose ``wrappers(prefix)`` returns further functions for Python."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all kernels."""
        return tuple(name for part in self.parts for name in part)


COLLECTIVES = KernelSet(
    "collectives",
    __name__.rpartition(".")[0],
    (
        "chunk_loop",
        "movement",
        "reduce_kernels",
        "logged_calls",
        "fast_path_code",
        "list_calls",
        "messages",
        "ring_messages",
        "host_calls",
        "message_pieces",
        "gpu_calls",
    ),
    # Two thirds of all functions in each: most functions are called by both, so that a third part saves little.
    (
        (
            "allreduce",
            "barrier",
            "compare_only",
            "reduce_scatter",
            "broadcast",
            "allgather",
            "alltoall",
            "any_barrier",
            "any_allreduce",
            "any_broadcast",
            "any_allgather",
            "any_reduce_scatter",
            "any_alltoall",
            "compare_over_hosts",
            "call_over_hosts",
            "read_ticks",
            "announce",
        ),
        (
            "allreduce_list",
            "exchange",
            "offer",
            "take",
            "scatter",
            "any_scatter",
            "any_exchange",
            "any_message",
            "advance",
            "add_pieces",
            "finish_pieces",
            "allreduce_in_pieces",
            "allreduce_on_gpu",
            "add_on_gpu",
        ),
    ),
    "shared-memory kernels",
    8,
    {
        "allreduce": FastPathKernel("any_allreduce", "enter_allreduce"),
        "reduce": FastPathKernel("any_allreduce", "enter_allreduce"),
        "allreduce_into": FastPathKernel("any_allreduce", "enter_allreduce_into", takes_out=True),
        "allreduce_many": FastPathKernel("allreduce_list", "", is_of_list=True),
        "broadcast": FastPathKernel("any_broadcast", "enter_broadcast"),
        "broadcast_into": FastPathKernel("any_broadcast", "enter_broadcast_into", takes_out=True),
        "allgather": FastPathKernel("any_allgather", "enter_allgather", takes_out=True, takes_out_list=True),
        "reduce_scatter": FastPathKernel("any_reduce_scatter", "enter_reduce_scatter", takes_out=True, takes_list=True),
        "alltoall": FastPathKernel(
            "any_alltoall", "enter_alltoall", takes_out=True, takes_list=True, takes_out_list=True
        ),
        "exchange": FastPathKernel(
            "any_exchange",
            "enter_exchange",
            takes_out=True,
            writes=False,
            takes_list=True,
            takes_out_list=True,
            any_length=True,
        ),
        "alltoall_splits": FastPathKernel("any_alltoall", "enter_alltoall_splits", takes_out=True),
        "gather": FastPathKernel("any_allgather", "enter_allgather", takes_out=True, takes_out_list=True),
        "give": FastPathKernel("any_allgather", "enter_give", writes=False),
        "scatter": FastPathKernel("any_scatter", "enter_scatter", takes_out=True, takes_list=True),
        "receive": FastPathKernel("any_scatter", "enter_receive", takes_tensor=False, takes_out=True),
        "barrier": FastPathKernel("any_barrier", "enter_barrier", takes_tensor=False, writes=False),
        "sendreceive": FastPathKernel("any_message", "enter_message"),
        "send": FastPathKernel("any_message", "enter_message", writes=False),
        "recv": FastPathKernel("any_message", "enter_message"),
    },
    brief=frozenset(("read_ticks", "announce")),
)
