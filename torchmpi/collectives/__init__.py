"""The public collectives and messages, and their dispatch to a backend."""

from .objects import allgather_object, broadcast_object
from .operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from .operations_async import (
    allgather_async,
    allreduce_async,
    alltoall_async,
    broadcast_async,
    gather_async,
    reduce_async,
    reduce_scatter_async,
    scatter_async,
)
from .point_to_point import recv, recv_async, send, send_async, sendreceive, sendreceive_async
from .tensor_lists import allreduce_many, allreduce_many_async

__all__ = [
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "allreduce_many",
    "allreduce_many_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "gather",
    "gather_async",
    "recv",
    "recv_async",
    "reduce",
    "reduce_async",
    "reduce_scatter",
    "reduce_scatter_async",
    "scatter",
    "scatter_async",
    "send",
    "send_async",
    "sendreceive",
    "sendreceive_async",
]
