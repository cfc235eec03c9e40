"""One rank's end of a group on NCCL."""

from __future__ import annotations

from functools import cached_property

import torch

from ...communicators.group import Group
from ...errors import DeviceError, TransportError
from ..gpus import Devices, index_of
from . import nccl_library
from .nccl_library import NcclCommunicator


class NcclGroup:
    """This rank's end of a group: NCCL's communicator, made at the first call and closed with the group."""

    def __init__(self, group: Group, devices: Devices) -> None:
        self.rank, self.size, self.where = group.rank, group.size, group.where
        self._comm, self._attachments = group.comm, group.attachments
        self._uuid, self._is_alone = devices[group.world_ranks[group.rank]].uuid, devices.num_hosts == 1
        self._communicator: NcclCommunicator | None = None

    def ready(self, tensor: torch.Tensor) -> tuple[NcclCommunicator, int]:
        """The communicator, and the stream on which to enqueue: the current one of the tensor's device."""
        if tensor.device != self.device:
            raise DeviceError(
                f"{self.where}: the tensor is on {tensor.device}, but start() has chosen {self.device} for this rank. "
                "Keep the tensors that a rank communicates on mpi.device()."
            )
        if self._communicator is None:
            self._open()
        assert self._communicator is not None
        self._communicator.check()
        return self._communicator, torch.cuda.current_stream(self.device).cuda_stream

    @cached_property
    def device(self) -> torch.device:
        """The GPU of this rank."""
        return torch.device("cuda", index_of(self._uuid))

    def _open(self) -> None:
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
        with torch.cuda.device(self.device):
            self._communicator = NcclCommunicator(nccl_library.load(), ticket, self.size, self.rank, where=self.where)
        self._attachments.append(self)

    def close(self) -> None:
        """Give the communicator back, when what is enqueued on it has been done."""
        if self._communicator is not None:
            with torch.cuda.device(self.device):
                self._communicator.close()
            self._communicator = None
