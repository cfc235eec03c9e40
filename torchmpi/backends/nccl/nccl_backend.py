"""The backend for ranks with a GPU each: NCCL, through torch's ProcessGroupNCCL.

Every operation enqueues on the current stream of its tensor's device and returns. The hosts synchronize in the first
call on a group, which connects the ranks, and where ranks must first exchange their numbers of rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...communicators.group import Group
from ...config import Config
from ...errors import TransportError
from ...tensors import buffers, partition
from ..base import Operation
from ..gpus import Devices, index_of
from ..mpi_messages import destination_for, rows_of
from ..ordered_reduction import REDUCTIONS
from ..torch_groups import NO_TIMEOUT, RowMovement, TorchGroup, copy_own
from .recipes import flat, lacks, recipe

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's variable that allows, from 2.30 on, several ranks on one GPU. NCCL calls it experimental."""
_SHARES_SINCE = (2, 30)
_OP_NAMES = {"prod": "PRODUCT"}
_INTERFACE_VARIABLE = "NCCL_SOCKET_IFNAME"
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def problem() -> str:
    """Return why this process cannot use NCCL; '' if it can."""
    if not torch.cuda.is_available():
        return "this torch or this host has no CUDA"
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return "" if has_nccl else "this torch was built without NCCL"


def version() -> tuple[int, ...]:
    """Return the version of NCCL that torch uses."""
    return tuple(torch.cuda.nccl.version())


class NcclBackend:
    """Collectives of NCCL, on CUDA tensors."""

    name = "nccl"
    announces = False
    enqueues = True

    def __init__(self, config: Config, devices: Devices) -> None:
        self.devices = devices
        self.problem = ""
        self._problems, self._may_share = [""] * len(devices), [False] * len(devices)
        self._torch_groups: WeakKeyDictionary[Group, NcclGroup] = WeakKeyDictionary()

    def is_tested(self, group: Group) -> bool:
        """Return whether such groups have been tested on GPUs: only single ranks."""
        return group.size == 1

    def offer(self) -> tuple[str, bool]:
        """Return the problem of this rank, '' if there is none, and whether it may share its GPU with other ranks."""
        reason = problem()
        may_share = not reason and os.environ.get(SHARING) == "1" and version() >= _SHARES_SINCE
        return reason, may_share

    def agree(self, offers: Sequence[tuple[str, bool]]) -> None:
        """Store the offers of all ranks of the world, so that all give the same answers."""
        self._problems = [
            problem or ("" if device.uuid else "its device is the CPU (start(with_cuda=False), or no visible GPU)")
            for (problem, _), device in zip(offers, self.devices, strict=True)
        ]
        self._may_share = [may_share for _, may_share in offers]
        self.problem = self._problems[0] if all(self._problems) else ""

    def takes(self, device_type: str, collective: str) -> bool:
        """Accept device memory."""
        return device_type == "cuda"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Accept collectives on the device, among ranks that have a GPU each."""
        if device_type != "cuda":
            return "it takes CUDA tensors only"
        if self.problem:
            return self.problem
        if collective == "barrier":
            return "a barrier synchronizes processes, which wait for no GPU"
        return None if group is None else self._why_not_among(group.world_ranks)

    def _why_not_among(self, ranks: Sequence[int]) -> str | None:
        for rank in ranks:
            if self._problems[rank]:
                return f"rank {rank} cannot: {self._problems[rank]}"
        shared = self.devices.first_sharing(ranks)
        if shared is not None and not all(self._may_share[rank] for rank in ranks):
            return f"ranks {shared[0]} and {shared[1]} share a GPU, which NCCL refuses"
        return None

    def lacks(self, collective: str, dtype: torch.dtype | None, op: str | None) -> str | None:
        """Return why NCCL cannot compute a reduction, or None; it moves every dtype."""
        return lacks(dtype, op) if dtype is not None and op is not None else None

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a collective on a group."""
        # Atomic: threads that bind at the same time must not create two groups.
        torch_group = self._torch_groups.setdefault(group, NcclGroup(group, self.devices))
        if collective in REDUCTIONS:
            assert dtype is not None and op is not None
            calls: NcclReduction | RowMovement = NcclReduction(torch_group, dtype, op)
        else:
            calls = RowMovement(group, torch_group)
        operation: Operation = getattr(calls, collective)

        def run(source: Any, destination: Any, root: int) -> Any:
            try:
                return operation(source, destination, root)
            except torch.distributed.DistBackendError as error:
                raise torch_group.failure(error) from error

        return run


class NcclGroup(TorchGroup):
    """The process group of NCCL over the ranks of a group."""

    library = "NCCL"
    remedy = f"NCCL_DEBUG=WARN prints more; {_INTERFACE_VARIABLE} chooses the network interface."

    def __init__(self, group: Group, devices: Devices) -> None:
        super().__init__(group)
        self._context, self._aborting = group.context, threading.Lock()
        self._abort: threading.Thread | None = None
        self._uuid, self._is_on_one_host = devices[group.world_ranks[group.rank]].uuid, devices.num_hosts == 1

    @cached_property
    def device(self) -> torch.device:  # type: ignore[override]  # determined at its first use
        """The GPU of this rank."""
        return torch.device("cuda", index_of(self._uuid))

    def open(self, store: Any) -> Any:
        """Create the communicator of NCCL, from an id that rank 0 of the group creates."""
        from torch.distributed import ProcessGroupNCCL

        if self._is_on_one_host:  # NCCL then listens on the loopback interface only
            os.environ.setdefault(_INTERFACE_VARIABLE, "lo")
        if self._context.raises_lost_ranks:  # otherwise a thread of torch ends the process when a peer does not answer
            os.environ.setdefault(_ERROR_HANDLING, "0")
        with torch.cuda.device(self.device):
            options = ProcessGroupNCCL.Options()
            options._timeout = NO_TIMEOUT
            opened = ProcessGroupNCCL(store, self.rank, self.size, options)
            opened.eager_connect_single_device(self.device)  # now, while the ranks exchange the keys of the store
        return opened

    def wait(self, work: Any, peer: int | None = None) -> None:
        """Make the current stream wait for a work of NCCL; raise TransportError if it has failed."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.failure(error) from error

    def failure(self, error: RuntimeError) -> TransportError:
        """Return the error that a call raises for one of NCCL."""
        return TransportError(f"NCCL reports: {error}. {self.remedy}")

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send a tensor to each rank of `sends` and receive one from each of `receives`; both may include this rank."""
        for tensor in (*sends.values(), *receives.values()):
            self.check(tensor)
        copy_own(self.rank, sends, receives)
        if self.size > 1:
            self.wait(self.opened.alltoall(self._for_all_ranks(receives), self._for_all_ranks(sends)))

    def _for_all_ranks(self, messages: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return a tensor of bytes for every rank, empty where there is no message to another rank."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        return [
            buffers.byte_view(messages[rank]) if rank in messages and rank != self.rank else nothing
            for rank in range(self.size)
        ]

    def allgather(self, source: torch.Tensor, destination: torch.Tensor, rows: Sequence[int]) -> None:
        """Concatenate the rows of all ranks; those of equal length by the allgather of NCCL."""
        if min(rows) == max(rows) and destination.numel():
            self.check(source)
            self.wait(self.opened._allgather_base(buffers.byte_view(destination), buffers.byte_view(source)))
        else:
            super().allgather(source, destination, rows)

    def abort_device_work(self) -> None:
        """Begin to abort the communicator of NCCL, whose kernels wait for a rank that is lost or missing.

        In a thread, because the abort of one communicator may wait for the kernels of another one
        (https://github.com/pytorch/pytorch/issues/119797).
        """
        with self._aborting:
            if self._opened is not None and self._abort is None:
                self._why_closed = self._context.loss or "its process group was aborted"
                self._abort = threading.Thread(target=self._opened.abort, name="torchmpi abort of NCCL", daemon=True)
                self._abort.start()

    def close(self) -> None:
        """Release the communicator of NCCL, after the work that is enqueued; if a rank is lost, without waiting."""
        if self._opened is not None:
            if self._context.loss:
                self.abort_device_work()
            if self._abort is not None:
                self._abort.join(timeout=10)  # a daemon, which may wait for other communicators
            else:
                torch.cuda.synchronize(self.device)
                self._opened.shutdown()
        with self._aborting:
            super().close()


class NcclReduction:
    """Reductions of one dtype and operation on one group."""

    def __init__(self, torch_group: TorchGroup, dtype: torch.dtype, op: str) -> None:
        self.torch_group, self.rank, self.size = torch_group, torch_group.rank, torch_group.size
        self.carrier, nccl_op, self.encode, self.decode = recipe(dtype, op, torch_group.size)
        self.op = getattr(torch.distributed.ReduceOp, _OP_NAMES.get(nccl_op, nccl_op.upper()))

    def allreduce(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        """Reduce in place on all ranks."""
        if buffer.numel():
            values, sent = self._outgoing(buffer)
            self.torch_group.wait(self.torch_group.opened.allreduce([sent], self.op))
            self._finish(values, sent)
        return buffer

    def reduce(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        """Reduce in place on the root; the buffers of other ranks are unchanged."""
        if buffer.numel():
            values, sent = self._outgoing(buffer)
            self._reduce_to(root, sent)
            if self.rank == root:
                self._finish(values, sent)
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Reduce the rows of `source`, split dim 0 evenly, and return this rank's rows of the result."""
        num_rows, _ = rows_of(source)
        rows = partition.even_partition(num_rows, self.size)
        destination = destination_for(source, rows[self.rank][1], destination)
        if source.numel():
            _, sent = self._outgoing(source)
            values = flat(destination)
            received = torch.empty(values.shape, dtype=self.carrier, device=values.device) if self.encode else values
            # A process group requires parts of equal length; otherwise one reduction to each owner.
            if num_rows % self.size == 0:
                self.torch_group.wait(self.torch_group.opened._reduce_scatter_base(received, sent, self._options()))
            else:
                row_numel = sent.numel() // num_rows
                for owner, (first, count) in enumerate(rows):
                    part = sent[first * row_numel : (first + count) * row_numel]
                    if owner == self.rank:
                        buffers.overwrite(received, part)
                        part = received
                    if part.numel():
                        self._reduce_to(owner, part)
            self._finish(values, received)
        return destination

    def _options(self) -> Any:
        options = torch.distributed.ReduceScatterOptions()
        options.reduceOp = self.op
        return options

    def _reduce_to(self, root: int, tensor: torch.Tensor) -> None:
        """Reduce in place on the root. Torch does not promise to leave the tensors of other ranks unchanged."""
        if self.rank != root and self.encode is None:
            tensor = tensor.clone()
        options = torch.distributed.ReduceOptions()
        options.rootRank, options.reduceOp = root, self.op
        self.torch_group.wait(self.torch_group.opened.reduce([tensor], options))

    def _outgoing(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of a tensor, and the numbers for NCCL: the same memory if they need no conversion."""
        self.torch_group.check(buffer)
        values = flat(buffer)
        return values, values if self.encode is None else self.encode(values)

    def _finish(self, values: torch.Tensor, result: torch.Tensor) -> None:
        """Convert the result of NCCL and store it in `values`."""
        if self.decode is not None:
            with torch.inference_mode(result.is_inference()):
                result = self.decode(result)
        if result is not values:
            buffers.overwrite(values, result)
