"""Collectives of NCCL, through torch's ProcessGroupNCCL.

Every operation enqueues on the current stream of its tensor's device and returns. The hosts synchronize in the first
call on a group, which connects the ranks, and where ranks must first exchange their numbers of rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ...collective_specs import SPECS
from ...communicators.group import Group
from ...communicators.plan import Run
from ...errors import TransportError
from ...tensors import buffers, partition
from ..base import Operation
from ..gpus import Devices, index_of
from ..mpi_messages import destination_for, rows_of
from ..torch_groups import NO_TIMEOUT, RowMovement, TorchGroup, copy_own
from .recipes import flat, recipe

_OP_NAMES = {"prod": "PRODUCT"}
_INTERFACE_VARIABLE = "NCCL_SOCKET_IFNAME"
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def prepare(
    torch_group: NcclGroup, group: Group, collective: str, dtype: torch.dtype | None, op: str | None
) -> Operation:
    """Prepare a collective on a group."""
    if SPECS[collective].reduces:
        assert dtype is not None and op is not None
        calls: NcclReduction | RowMovement = NcclReduction(torch_group, dtype, op)
    else:
        calls = RowMovement(group, torch_group)
    work: Run = getattr(calls, collective)

    def run(source: Any, destination: Any, root: int) -> Any:
        try:
            return work(source, destination, root)
        except torch.distributed.DistBackendError as error:
            raise torch_group.failure(error) from error

    return Operation(run)


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
        if buffer.numel():
            values, sent = self._outgoing(buffer)
            self.torch_group.wait(self.torch_group.opened.allreduce([sent], self.op))
            self._finish(values, sent)
        return buffer

    def reduce(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        if buffer.numel():
            values, sent = self._outgoing(buffer)
            self._reduce_to(root, sent)
            if self.rank == root:
                self._finish(values, sent)
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
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
