"""The backend for ranks with a GPU each: NVIDIA's NCCL, whose ranks find each other through MPI.

Every operation enqueues on the current stream of its tensor's device and returns. Hosts meet in the first call on a
group, which makes NCCL's communicator, and where ranks must first tell each other how many rows they have.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .. import buffers, schedule
from ..config import Config
from ..devices import Devices, uuid_of
from ..errors import DeviceError, TransportError
from . import Operation, nccl_library
from .mpi import Movement, destination_for, longest_part, rows_of
from .nccl_library import BYTE, DTYPES, OPS, Communicator
from .nccl_values import flat, lacks, recipe

_REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
_MEETINGS = {
    "barrier": "a barrier is a meeting of the hosts, which wait for no GPU",
    "scatter": "only the root of a scatter has a tensor, so that the others cannot know that it is on a GPU",
}
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's variable that allows, from 2.30 on, several ranks on one GPU. They call it experimental."""
_SHARES_SINCE = (2, 30)


class NcclBackend:
    """Collectives of NCCL, on CUDA tensors."""

    name = "nccl"
    announces = False
    enqueues = True

    def __init__(self, config: Config, devices: Devices) -> None:
        self.devices = devices
        self.problem = ""
        self._problems, self._may_share = [""] * len(devices), [False] * len(devices)
        self._ends: WeakKeyDictionary[Any, End] = WeakKeyDictionary()

    def offer(self) -> tuple[str, bool]:
        """What is against NCCL on this rank, '' if nothing is, and whether it may have a GPU in common with others."""
        if not torch.cuda.is_available():
            return "this torch or this host has no CUDA", False
        try:
            library = nccl_library.load()
        except TransportError as error:
            return str(error), False
        return "", library.version >= _SHARES_SINCE and os.environ.get(SHARING) == "1"

    def agree(self, offers: Sequence[tuple[str, bool]]) -> None:
        """Take note of what all ranks of the world have to offer, so that all give the same answers."""
        self._problems = [
            problem or ("" if device.uuid else "its device is the CPU (start(with_cuda=False), or no GPU in sight)")
            for (problem, _), device in zip(offers, self.devices, strict=True)
        ]
        self._may_share = [may_share for _, may_share in offers]
        self.problem = self._problems[0] if all(self._problems) else ""

    def takes(self, device_type: str) -> bool:
        """Device memory."""
        return device_type == "cuda"

    def why_not(self, verb: str, device_type: str, group: Any = None) -> str | None:
        """It has what is done on the device, among ranks that have a GPU each."""
        if device_type != "cuda":
            return "it takes CUDA tensors only"
        if self.problem:
            return self.problem
        if verb in _MEETINGS:
            return _MEETINGS[verb]
        return None if group is None else self._why_not_among(group.world_ranks)

    def _why_not_among(self, ranks: Sequence[int]) -> str | None:
        for rank in ranks:
            if self._problems[rank]:
                return f"rank {rank} cannot: {self._problems[rank]}"
        shared = self.devices.first_sharing(ranks)
        if shared is not None and not all(self._may_share[rank] for rank in ranks):
            return f"ranks {shared[0]} and {shared[1]} share a GPU, which NCCL refuses"
        return None

    def lacks(self, verb: str, dtype: torch.dtype | None, op: str | None) -> str | None:
        """What NCCL cannot compute; it moves everything."""
        return lacks(dtype, op) if dtype is not None and op is not None else None

    def bind(self, group: Any, verb: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a verb on a group."""
        # In one step: threads that bind at the same time must not make two communicators.
        end = self._ends.setdefault(group, End(group, self.devices))
        if verb in _REDUCTIONS:
            assert dtype is not None and op is not None
            calls: Any = Reduction(end, dtype, op)
        else:
            calls = DeviceMovement(group, end)
        operation: Operation = getattr(calls, verb)
        return operation


class End:
    """This rank's end of a group: NCCL's communicator, made at the first call and closed with the group."""

    def __init__(self, group: Any, devices: Devices) -> None:
        self.rank, self.size, self.where = group.rank, group.size, group.where
        self._comm, self._attachments = group.comm, group.attachments
        self._uuid, self._is_alone = devices[group.world_ranks[group.rank]].uuid, devices.num_hosts == 1
        self._communicator: Communicator | None = None
        self._index = -1

    def ready(self, tensor: torch.Tensor) -> tuple[Communicator, int]:
        """The communicator, and the stream on which to enqueue: the current one of the tensor's device."""
        device = tensor.device
        if device.index != self._index and (self._communicator is not None or uuid_of(device.index) != self._uuid):
            raise DeviceError(
                f"{self.where}: the tensor is on {device}, which is not the GPU that start() has chosen for this rank. "
                "Keep the tensors that a rank communicates on mpi.device()."
            )
        if self._communicator is None:
            self._open(device)
        assert self._communicator is not None
        self._communicator.check()
        return self._communicator, torch.cuda.current_stream(device).cuda_stream

    def _open(self, device: torch.device) -> None:
        """Make the communicator, from an id that rank 0 of the group makes and MPI passes on. Collective."""
        if self._is_alone:
            nccl_library.stay_on_this_host()
        ticket: bytes | str = ""
        if self.rank == 0:
            try:
                ticket = nccl_library.load().unique_id()
            except TransportError as error:
                ticket = str(error)
        ticket = self._comm.bcast(ticket)
        if isinstance(ticket, str):
            raise TransportError(f"{self.where}: {ticket}")
        with torch.cuda.device(device):
            self._communicator = Communicator(nccl_library.load(), ticket, self.size, self.rank)
        self._index = device.index
        self._attachments.append(self)

    def close(self) -> None:
        """Give the communicator back, when what is enqueued on it has been done."""
        if self._communicator is not None:
            with torch.cuda.device(self._index):
                self._communicator.close()
            self._communicator = None


class Reduction:
    """Reductions of one dtype and operation on one group."""

    def __init__(self, end: End, dtype: torch.dtype, op: str) -> None:
        self.end, self.rank, self.size = end, end.rank, end.size
        self.carrier, nccl_op, self.encode, self.decode = recipe(dtype, op, end.size)
        self._type, self._op = DTYPES[self.carrier], OPS[nccl_op]

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the result, in place."""
        if buffer.numel():
            communicator, stream = self.end.ready(buffer)
            values, sent = self._outgoing(buffer)
            address = sent.data_ptr()
            communicator.run("ncclAllReduce", address, address, sent.numel(), self._type, self._op, stream=stream)
            self._put(values, sent)
        return buffer

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """The root gets the result in place; the others' buffers stay as they are."""
        if buffer.numel():
            communicator, stream = self.end.ready(buffer)
            values, sent = self._outgoing(buffer)
            is_root = self.rank == root
            target = sent.data_ptr() if is_root else 0
            self._reduce_to(root, communicator, stream, sent, target)
            if is_root:
                self._put(values, sent)
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Split dim 0 of `source` evenly and give each rank the reduced rows that are its."""
        num_rows, _ = rows_of(source)
        spans = schedule.rows(num_rows, self.size)
        destination = destination_for(source, spans[self.rank][1], destination)
        if source.numel():
            communicator, stream = self.end.ready(source)
            _, sent = self._outgoing(source)
            values = flat(destination)
            got = values if self.encode is None else torch.empty(values.shape, dtype=self.carrier, device=values.device)
            self._scatter_sums(communicator, stream, sent, got, spans, num_rows)
            self._put(values, got)
        return destination

    def _scatter_sums(
        self,
        communicator: Communicator,
        stream: int,
        sent: torch.Tensor,
        got: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        num_rows: int,
    ) -> None:
        if num_rows % self.size == 0:
            address, target = sent.data_ptr(), got.data_ptr()
            communicator.run("ncclReduceScatter", address, target, got.numel(), self._type, self._op, stream=stream)
            return
        row_numel = sent.numel() // num_rows
        with communicator.group():  # NCCL knows equal parts only: one reduction to each owner, all at once
            for owner, (first, count) in enumerate(spans):
                if count:
                    part = sent[first * row_numel : (first + count) * row_numel]
                    target = got.data_ptr() if owner == self.rank else 0
                    self._reduce_to(owner, communicator, stream, part, target)

    def _reduce_to(self, root: int, communicator: Communicator, stream: int, sent: torch.Tensor, target: int) -> None:
        arguments = sent.data_ptr(), target, sent.numel(), self._type, self._op, root
        communicator.run("ncclReduce", *arguments, stream=stream)

    def _outgoing(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of a tensor, and what of them NCCL is given, which is the same memory where they go as is."""
        values = flat(buffer)
        return values, values if self.encode is None else self.encode(values)

    def _put(self, values: torch.Tensor, got: torch.Tensor) -> None:
        """The result, where it belongs."""
        if self.decode is not None:
            with torch.inference_mode(got.is_inference()):
                got = self.decode(got)
        if got is not values:
            buffers.overwrite(values, got)


class DeviceMovement(Movement):
    """Verbs that move bytes and compute nothing. How many rows there are goes by MPI, the rows by NCCL."""

    def __init__(self, group: Any, end: End) -> None:
        super().__init__(group, message_bytes=0)
        self._end = end

    def broadcast(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the root's values, in place."""
        if buffer.numel():
            communicator, stream = self._end.ready(buffer)
            address = buffer.data_ptr()
            communicator.run("ncclBroadcast", address, address, buffer.nbytes, BYTE, root, stream=stream)
        return buffer

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Everybody's rows in rank order, to everybody."""
        rows, row_bytes = self._rows(source)
        destination = destination_for(source, int(rows.sum()), destination)
        if not destination.nbytes:
            return destination
        communicator, stream = self._end.ready(source)
        address, target = source.data_ptr(), destination.data_ptr()
        if (rows == rows[0]).all():
            communicator.run("ncclAllGather", address, target, source.nbytes, BYTE, stream=stream)
            return destination
        with communicator.group():  # NCCL knows equal parts only: one broadcast of each, all at once
            for origin, num_bytes in enumerate((rows * row_bytes).tolist()):
                if num_bytes:
                    communicator.run("ncclBroadcast", address, target, num_bytes, BYTE, origin, stream=stream)
                target += num_bytes
        return destination

    def gather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor | None:
        """Everybody's rows in rank order, to the root."""
        rows, _ = self._rows(source)
        line = self._end.ready(source)
        if self.rank != root:
            self._exchange(line, {root: source}, {})
            return None
        destination = destination_for(source, int(rows.sum()), destination)
        parts = dict(enumerate(destination.detach().split(rows.tolist())))
        own = parts.pop(root)
        buffers.overwrite(own, source.view(own.shape))
        self._exchange(line, {}, parts)
        return destination

    def alltoall(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Part j of everybody's rows goes to rank j."""
        num_rows, _ = rows_of(source)
        everybody, _ = self._rows(source)
        sent = [count for _, count in schedule.rows(num_rows, self.size)]
        received = [schedule.part_of(count, self.size, self.rank)[1] for count in everybody.tolist()]
        destination = destination_for(source, sum(received), destination)
        outgoing = source.view(num_rows, *source.shape[1:]).split(sent)
        incoming = destination.detach().split(received)
        self._swap(outgoing, incoming)
        return destination

    def exchange_parts(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], root: int) -> None:
        """Part j of `sources` goes to rank j; part j of `destinations` is filled by it."""
        sizes = np.array([[part.nbytes for part in parts] for parts in (sources, destinations)], np.int64)
        everybody = np.empty((self.size, 2, self.size), np.int64)
        self.comm.Allgather((sizes, self.MPI.INT64_T), (everybody, self.MPI.INT64_T))
        longest_part(torch.from_numpy(everybody), self.where)
        self._swap(sources, destinations)

    def _swap(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        line = self._end.ready(outgoing[self.rank])
        sends, receives = dict(enumerate(outgoing)), dict(enumerate(incoming))
        buffers.overwrite(receives.pop(self.rank), sends.pop(self.rank))
        self._exchange(line, sends, receives)

    def _exchange(
        self, line: tuple[Communicator, int], sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
    ) -> None:
        """Messages to and from ranks, all at once. Empty ones are none, at both ends."""
        communicator, stream = line
        with communicator.group():
            for name, messages in (("ncclRecv", receives), ("ncclSend", sends)):
                for peer, tensor in messages.items():
                    if tensor.nbytes:
                        communicator.run(name, tensor.data_ptr(), tensor.nbytes, BYTE, peer, stream=stream)
