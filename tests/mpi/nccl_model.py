"""NCCL's semantics on memory of the host, over MPI: what its header promises, and checks of what it demands.

For finding errors of protocol without a GPU: ranks that differ in count, type, operation or root, messages of unequal
length, a group that is not closed. A real NCCL would hang, or write where it must not.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from torchmpi.backends.nccl.nccl_library import DTYPES, FUNCTIONS, OPS

_TYPES = {number: dtype for dtype, number in DTYPES.items()}
_OPS = {number: op for op, number in OPS.items()}
_WRAPPING = {torch.uint32: torch.int32, torch.uint64: torch.int64}


def reduced_by_nccl(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """In the order of a ring that begins anywhere, each step in the dtype itself; min and max drop a NaN."""
    dtype = inputs[0].dtype
    if op == "avg":
        assert dtype.is_floating_point, "a mean of integers"
        inputs = [tensor * torch.tensor(1 / len(inputs), dtype=dtype) for tensor in inputs]
        op = "sum"
    begin = len(inputs) // 2
    first, *others = inputs[begin:] + inputs[:begin]
    result = first.clone()
    for other in others:
        result = _step(result, other, op)
    return result


def _step(one: torch.Tensor, other: torch.Tensor, op: str) -> torch.Tensor:
    if one.dtype.is_floating_point and op in ("min", "max"):
        return (torch.fmin if op == "min" else torch.fmax)(one, other)
    if one.dtype in _WRAPPING:  # torch computes little on them
        if op in ("sum", "prod"):
            signed = _WRAPPING[one.dtype]
            return _step(one.view(signed), other.view(signed), op).view(one.dtype)
        pairs = zip(one.tolist(), other.tolist(), strict=True)
        return torch.tensor([(min if op == "min" else max)(pair) for pair in pairs], dtype=one.dtype)
    steps = {"sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}
    return steps[op](one, other)


def at(address: int, count: int, kind: int) -> torch.Tensor:
    """The memory at an address."""
    dtype = _TYPES[kind]
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def _bytes(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.view(torch.uint8).numpy())


def _from_bytes(data: bytearray, kind: int) -> torch.Tensor:
    return torch.frombuffer(data, dtype=_TYPES[kind]) if data else torch.empty(0, dtype=_TYPES[kind])


class HostCommunicator:
    """What `Communicator` is to the verbs, for the ranks of an MPI communicator."""

    def __init__(self, MPI, comm) -> None:
        self.MPI, self.comm = MPI, comm
        self._queue: list[tuple[str, tuple[int, ...]]] | None = None
        self.calls: list[str] = []
        """What was called, for tests that ask by which way something went."""

    def run(self, name: str, *arguments: int, stream: int) -> None:
        assert len(arguments) + 2 == len(FUNCTIONS[name]), f"{name} takes other arguments"
        assert all(type(argument) is int for argument in arguments), arguments
        self.calls.append(name)
        if self._queue is not None:
            self._queue.append((name, arguments))
        else:
            assert name not in ("ncclSend", "ncclRecv"), "messages outside of a group may wait for each other"
            getattr(self, name)(*arguments)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        assert self._queue is None
        self._queue = []
        yield
        queue, self._queue = self._queue, None
        requests = []
        for name, arguments in queue:
            if name in ("ncclSend", "ncclRecv"):
                requests.append(self._message(name, *arguments))
        for name, arguments in queue:
            if name not in ("ncclSend", "ncclRecv"):
                getattr(self, name)(*arguments)
        for request, room in requests:
            status = self.MPI.Status()
            request.Wait(status)
            assert room is None or status.Get_count(self.MPI.BYTE) == room, "a message of another length"

    def _message(self, name: str, address: int, count: int, kind: int, peer: int):
        assert count, "NCCL wants no empty message, and no rank is to wait for one"
        num_bytes = count * _TYPES[kind].itemsize
        memory = (self.MPI.buffer.fromaddress(address, num_bytes), self.MPI.BYTE)
        if name == "ncclSend":
            return self.comm.Isend(memory, peer, 5), None
        return self.comm.Irecv(memory, peer, 5), num_bytes

    def _agree(self, *what: object) -> None:
        everybody = self.comm.allgather(what)
        assert len(set(everybody)) == 1, f"ranks differ: {everybody}"

    def _everybody(self, address: int, count: int, kind: int) -> list[torch.Tensor]:
        everybody = self.comm.allgather(_bytes(at(address, count, kind)))
        return [_from_bytes(data, kind) for data in everybody]

    def ncclAllReduce(self, source, target, count, kind, op):
        self._agree("allreduce", count, kind, op)
        at(target, count, kind).copy_(reduced_by_nccl(self._everybody(source, count, kind), _OPS[op]))

    def ncclReduce(self, source, target, count, kind, op, root):
        self._agree("reduce", count, kind, op, root)
        everybody = self._everybody(source, count, kind)
        if self.comm.rank == root:
            at(target, count, kind).copy_(reduced_by_nccl(everybody, _OPS[op]))

    def ncclBroadcast(self, source, target, count, kind, root):
        self._agree("broadcast", count, kind, root)
        data = self.comm.bcast(_bytes(at(source, count, kind)) if self.comm.rank == root else None, root)
        at(target, count, kind).copy_(_from_bytes(data, kind))

    def ncclAllGather(self, source, target, count, kind):
        self._agree("allgather", count, kind)
        everybody = self._everybody(source, count, kind)
        at(target, count * self.comm.size, kind).copy_(torch.cat(everybody))

    def ncclReduceScatter(self, source, target, count, kind, op):
        self._agree("reduce_scatter", count, kind, op)
        everybody = self._everybody(source, count * self.comm.size, kind)
        sums = reduced_by_nccl(everybody, _OPS[op])
        at(target, count, kind).copy_(sums[self.comm.rank * count :][:count])
