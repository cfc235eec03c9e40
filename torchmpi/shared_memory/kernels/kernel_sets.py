"""The sets of kernels that are compiled and loaded together, and the arguments of their fast paths."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Entrance(NamedTuple):
    """The way of tensors into a kernel."""

    kernel: str
    enter: str
    """The function that writes down what the kernel wants to know."""
    takes_tensor: bool = True
    takes_out: bool = False
    writes: bool = True
    """Whether the last of the tensors is written to, and autograd must know."""


class KernelSet(NamedTuple):
    """Kernels that are compiled and loaded together."""

    modules: tuple[str, ...]
    names: tuple[str, ...]
    fields: str
    fast_paths: Mapping[str, Entrance] = MappingProxyType({})
    """How kernels can also be entered with tensors."""


SETS = {
    "collectives": KernelSet(
        ("chunk_loop", "movement", "partitioning", "reduce_kernels", "entry"),
        (
            "allreduce",
            "allreduce_many",
            "meet",
            "exchange",
            "broadcast",
            "allgather",
            "reduce_scatter",
            "alltoall",
            "offer",
            "take",
            "scatter",
        ),  # fmt: skip
        "shared-memory kernels",
        {
            "allreduce": Entrance("allreduce", "enter_allreduce"),
            "reduce": Entrance("allreduce", "enter_allreduce"),
            "broadcast": Entrance("broadcast", "enter_broadcast"),
            "allgather": Entrance("allgather", "enter_allgather", takes_out=True),
            "reduce_scatter": Entrance("reduce_scatter", "enter_reduce_scatter", takes_out=True),
            "alltoall": Entrance("alltoall", "enter_alltoall", takes_out=True),
            "gather": Entrance("allgather", "enter_allgather", takes_out=True),
            "give": Entrance("allgather", "enter_give", writes=False),
            "scatter": Entrance("scatter", "enter_scatter", takes_out=True),
            "receive": Entrance("scatter", "enter_receive", takes_tensor=False, takes_out=True),
        },
    ),
    "sharding": KernelSet(
        ("shard_passes",), ("pass_over", "take_chunk", "end_chunk", "take_over"), "parameter-server kernels"
    ),
}
