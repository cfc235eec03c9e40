"""Process groups of torch over the ranks of a group: opening them, and moving rows with them.

The backends `gloo` and `nccl` construct torch's C++ process groups directly. ``torch.distributed`` is not initialized,
and no port is opened for a store: the ranks exchange addresses through the communicator of the group.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ..communicators.group import Group, GroupResource
from ..errors import DeviceError, TransportError
from ..tensors import buffers, partition
from .mpi_messages import broadcast_header, check_part_sizes, destination_for, row_counts, rows_of

if TYPE_CHECKING or torch.distributed.is_available():
    from torch._C._distributed_c10d import Store
else:  # a torch without process groups: the backends are unavailable
    Store = object

NO_TIMEOUT = timedelta(days=365)
"""The timeout of torch's process groups: the watchdog of torchmpi reports a stall first."""


class GroupStore(Store):
    """The store through which the ranks of a group open a process group of torch.

    Every `set`, and every `get` of a key that this rank does not have, exchanges all keys that were set since, in one
    allgather. So the ranks take part in the same number of exchanges if they open the process group in steps, in each
    of which a rank sets one key or waits for the key of another: with gloo each rank sets its address, with NCCL rank 0
    sets an id. In other threads and after `close` the store is a dictionary of this process.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self._comm, self._thread = comm, threading.get_ident()
        self._values: dict[str, bytes] = {}

    def close(self) -> None:
        """End the exchanges."""
        self._comm = None

    def set(self, key: str, value: str | bytes) -> None:
        value = value.encode() if isinstance(value, str) else value
        self._values[key] = value
        self._exchange({key: value})

    def get(self, key: str) -> bytes:
        if key not in self._values:
            self._exchange({})
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until these keys have values."""
        for key in keys:
            self.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys."""
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Return whether this rank has values of all these keys."""
        return all(key in self._values for key in keys)

    def _exchange(self, values: dict[str, bytes]) -> None:
        if self._comm is not None and threading.get_ident() == self._thread:
            for others in self._comm.allgather(values):
                self._values |= others


class TorchGroup(GroupResource, ABC):
    """A process group of torch over the ranks of a group: opened by the first call, closed with the group."""

    library: str
    remedy: str
    """Advice if the ranks cannot connect."""
    device = torch.device("cpu")
    """The device of the tensors."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.world_ranks, self.comm = group.rank, group.size, group.world_ranks, group.comm
        self._attachments, self._where, self._opened = group.attachments, group.where, None
        self.log = group.call_log.log_fields
        self._why_closed = ""
        """Why calls are refused: the error of the call after which this rank has closed its connections."""

    @property
    def opened(self) -> Any:
        """The process group. Collective when it is read for the first time."""
        if self._why_closed:
            raise TransportError(
                f"{self._where} has closed the connections of {self.library} on this communicator after an error "
                f"({self._why_closed}). Use another communicator or backend"
            )
        if self._opened is None:
            self._store = GroupStore(self.comm)  # torch keeps no reference to the Python object
            try:
                self._opened = self.open(self._store)
            except RuntimeError as error:
                raise TransportError(f"{self.library} cannot connect the ranks: {error}. {self.remedy}") from error
            finally:
                self._store.close()
            self._attachments.append(self)
        return self._opened

    @abstractmethod
    def open(self, store: Any) -> Any:
        """Construct the process group."""

    def check(self, tensor: torch.Tensor) -> None:
        """Raise if a tensor is not on the device of this rank."""
        if tensor.device != self.device:
            raise DeviceError(
                f"{self._where}: the tensor is on {tensor.device}, but start() has chosen {self.device} for this rank. "
                "Keep the tensors that a rank communicates on mpi.device()."
            )

    def broadcast(self, buffer: torch.Tensor, root: int) -> None:
        """Copy the root's values to all ranks."""
        self.check(buffer)
        self.wait(self.opened.broadcast(buffers.byte_view(buffer), root))

    def allgather(self, source: torch.Tensor, destination: torch.Tensor, rows: Sequence[int]) -> None:
        """Concatenate the rows of all ranks, given their numbers."""
        parts = destination.detach().split_with_sizes(list(rows))
        self.exchange(dict.fromkeys(range(self.size), source), dict(enumerate(parts)))

    @abstractmethod
    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send a tensor to each rank of `sends` and receive one from each of `receives`; both may include this rank.

        An empty tensor is not sent, and not received.
        """

    @abstractmethod
    def wait(self, work: Any, peer: int | None = None) -> None:
        """Wait until torch's work is complete, or enqueued; raise TransportError if it fails."""

    def close(self) -> None:
        """Release the process group."""
        self._opened = None


class RowMovement:
    """Collectives that move rows. The numbers of rows are exchanged through the communicator of the group."""

    def __init__(self, group: Group, torch_group: TorchGroup) -> None:
        self.group, self.rank, self.size, self.torch_group = group, group.rank, group.size, torch_group

    def broadcast(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        """Copy the root's values to all ranks, in place."""
        if buffer.numel() and self.size > 1:
            self.torch_group.broadcast(buffer, root)
        return buffer

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Concatenate the rows of all ranks on all ranks."""
        rows = row_counts(self.group, source)
        destination = destination_for(source, sum(rows), destination)
        self.torch_group.allgather(source, destination, rows)
        return destination

    def gather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor | None:
        """Concatenate the rows of all ranks on the root."""
        rows = row_counts(self.group, source)
        if self.rank != root:
            self.torch_group.exchange({root: source}, {})
            return None
        destination = destination_for(source, sum(rows), destination)
        parts = destination.detach().split_with_sizes(rows)
        self.torch_group.exchange({root: source}, dict(enumerate(parts)))
        return destination

    def scatter(self, source: torch.Tensor | None, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Split the root's rows evenly over the ranks."""
        source = source if self.rank == root else None  # the tensors of other ranks are ignored
        shape, dtype = broadcast_header(self.group, source, root)
        counts = [num_rows for _, num_rows in partition.even_partition(shape[0], self.size)]
        like = torch.empty((0, *shape[1:]), dtype=dtype, device=self.torch_group.device) if source is None else source
        destination = destination_for(like, counts[self.rank], destination)
        parts = () if source is None else source.view(shape).split_with_sizes(counts)
        self.torch_group.exchange(dict(enumerate(parts)), {root: destination})
        return destination

    def alltoall(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Send part j of the rows to rank j, and concatenate the parts received."""
        num_rows, _ = rows_of(source)
        sent = [count for _, count in partition.even_partition(num_rows, self.size)]
        received = [partition.part_of(count, self.size, self.rank)[1] for count in row_counts(self.group, source)]
        destination = destination_for(source, sum(received), destination)
        outgoing = source.view(num_rows, *source.shape[1:]).split_with_sizes(sent)
        incoming = destination.detach().split_with_sizes(received)
        self.torch_group.exchange(dict(enumerate(outgoing)), dict(enumerate(incoming)))
        return destination

    def exchange_parts(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], root: int) -> None:
        """Send part j of `sources` to rank j, and receive part j of `destinations` from rank j."""
        check_part_sizes(self.group, sources, destinations)
        self.torch_group.exchange(dict(enumerate(sources)), dict(enumerate(destinations)))


def copy_own(rank: int, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
    """Copy the tensor that a rank sends to itself."""
    if rank in receives and receives[rank].numel():
        buffers.overwrite(receives[rank], sends[rank].view(receives[rank].shape))
