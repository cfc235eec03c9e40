"""The collectives of the backend `gloo`, over torch's ProcessGroupGloo, which connects the ranks by TCP.

Rows travel in messages between pairs of ranks. Reductions are those of :mod:`torchmpi.backends.p2p` over gloo's
alltoall: gloo's own reductions add in an order that depends on the size, and round 16-bit floats at every step.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..collective_specs import SPECS
from ..communicators import algorithms
from ..communicators.group import Group
from ..communicators.plan import Run
from ..config import Config
from ..errors import TorchMPIError, TransportError
from ..launch import network
from ..shared_memory.memory_layout import Block, LogFields
from ..tensors import buffers
from ..tensors.schedule import Round
from . import range_reduction
from .base import Operation, refusal
from .p2p import PipelinedReduction
from .round_messages import TensorOf
from .shm import SharedMemoryBackend
from .torch_groups import NO_TIMEOUT, RowMovement, TorchGroup, copy_own

_TAG, _PROBE_TAG = 0, 1
_ALLTOALL = torch.distributed.AllToAllOptions() if torch.distributed.is_available() else None
# A thread that sleeps loses a tick of the scheduler, 4 ms, when others use its core: poll first.
_POLL_SECONDS = 0.02


def prepare(
    torch_group: GlooGroup,
    group: Group,
    collective: str,
    dtype: torch.dtype | None,
    op: str | None,
    *,
    config: Config,
    shared: SharedMemoryBackend,
) -> Operation:
    """Prepare a collective on a group. Its calls are compared between all ranks before gloo moves data.

    gloo ends a process that receives more bytes than it expects, so the comparison on the status board, which other
    backends make while their calls run, would come too late.
    """
    work = _work(config, group, torch_group, collective, dtype, op)
    compares_by_message = group.log_board is not None and refusal(shared, collective, "cpu", group) is not None

    def run(source: Any, destination: Any, root: int) -> Any:
        if compares_by_message:
            _compare_by_message(group)
        try:
            return work(source, destination, root)
        except BaseException as error:
            is_on_all_ranks = isinstance(error, TorchMPIError) and not isinstance(error, TransportError)
            if not is_on_all_ranks:
                torch_group.abort(error)
            raise

    if group.log_board is None or compares_by_message:  # otherwise compared by a message already, or not at all
        return Operation(run)
    return shared.compared(run, group, collective, dtype, op)


def _work(
    config: Config, group: Group, torch_group: GlooGroup, collective: str, dtype: torch.dtype | None, op: str | None
) -> Run:
    if not SPECS[collective].tensors:
        return torch_group.barrier
    if SPECS[collective].reduces:
        assert dtype is not None and op is not None
        chunk_bytes = min(config.pipeline_bytes, config.message_bytes)  # gloo takes less than 2 GB
        reduction = GlooReduction(group, torch_group, dtype, op, chunk_bytes)
        return range_reduction.operation(group, reduction, collective).run
    movement: Run = getattr(RowMovement(group, torch_group), collective)
    return movement


def _compare_by_message(group: Group) -> None:
    """Compare the current call between all ranks, which have no kernels that compare it in shared memory."""
    assert group.log_board is not None and group.call_log.entered is not None
    seq, code, shape = group.call_log.entered
    # For stall reports; announced when no rank can leave the comparison.
    group.log_board.set(group.rank, Block.entered, seq)
    # Not on group.comm: ranks that chose another backend may make other collective calls of MPI there.
    group.compare_headers(group.side_comm, code, shape)
    group.call_log.announce()


class GlooGroup(TorchGroup):
    """The process group of gloo over the ranks of a group."""

    library = "gloo"
    remedy = f"Choose the network interface with {network.INTERFACE_VARIABLE}, and open the ports between the hosts."

    def open(self, store: Any) -> Any:
        """Connect each rank with every other rank."""
        from torch.distributed import ProcessGroupGloo

        hosts = self.comm.allgather((network.namespace(), network.own_interfaces()))
        names = network.wanted_interfaces()
        address = network.choose(hosts, self.rank)
        options: Any = getattr(ProcessGroupGloo, "_Options")()  # noqa: B009, not in the stubs of torch
        options._timeout, options._threads = NO_TIMEOUT, 1
        create = ProcessGroupGloo.create_device
        options._devices = [create(interface=name) for name in names] or [create(hostname=address or "")]
        return ProcessGroupGloo(store, self.rank, self.size, options)

    def barrier(self, source: Any, destination: Any, root: int) -> None:
        if self.size > 1:
            self.wait(self.opened.barrier())

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        self.log[LogFields.algorithm] = algorithms.DIRECT
        works = []
        for shift in range(1, self.size):
            origin = (self.rank - shift) % self.size
            if origin in receives and receives[origin].numel():
                works.append((origin, self._begin("recv", receives[origin], origin)))
        for shift in range(1, self.size):
            target = (self.rank + shift) % self.size
            if target in sends and sends[target].numel():
                works.append((target, self._begin("send", sends[target], target)))
        copy_own(self.rank, sends, receives)
        for peer, work in works:
            self.wait(work, peer)

    def _begin(self, name: str, tensor: torch.Tensor, peer: int) -> Any:
        return self._checked(partial(getattr(self.opened, name), [buffers.byte_view(tensor)], peer, _TAG), peer)

    def wait(self, work: Any, peer: int | None = None) -> None:
        if peer is None:  # a collective; torch cannot poll messages
            limit = time.monotonic() + _POLL_SECONDS
            while not work.is_completed() and time.monotonic() < limit:
                os.sched_yield()
        self._checked(work.wait, peer)

    def begin_alltoall(
        self, received: torch.Tensor, lengths: list[int], sent: torch.Tensor, sent_lengths: list[int]
    ) -> Any:
        """Begin to send each rank its number of bytes, and to receive its number of bytes from each."""
        return self._checked(partial(self.opened.alltoall_base, received, sent, lengths, sent_lengths, _ALLTOALL), None)

    def _checked(self, call: Any, peer: int | None) -> Any:
        try:
            return call()
        except RuntimeError as error:
            peer = self._lost_peer() if peer is None else peer
            whom = "another rank" if peer is None else f"rank {self.world_ranks[peer]}"
            reason = re.sub(r"^\[\S*\] ", "", str(error)).partition(". ")[0]  # without gloo's file name and advice
            raise TransportError(
                f"gloo lost the connection to {whom} ({reason}). That rank has probably ended: see its output"
            ) from error

    def abort(self, error: BaseException) -> None:
        """Close the connections after a failed call, so that no rank waits for this one. Later calls raise.

        gloo has no function for this (its `abort` does nothing in torch 2.13): connections are closed when no object
        refers to them, such as a work in a variable of the failed call.
        """
        if self._opened is not None:
            self._opened, self._why_closed = None, f"{type(error).__name__}: {error}"
        for failed in (error, error.__cause__):
            traceback.clear_frames(None if failed is None else failed.__traceback__)

    def _lost_peer(self) -> int | None:
        """Return a rank to which gloo refuses to send, since the connection is closed; the error names an address."""
        probe = torch.empty(1, dtype=torch.uint8)
        for peer in range(self.size):
            try:
                if peer != self.rank:
                    self.opened.send([probe], peer, _PROBE_TAG)
            except RuntimeError:
                return peer
        return None


class GlooMessages:
    """Sends and receives the tensors of a round of messages, in one alltoall of gloo."""

    def __init__(self, torch_group: GlooGroup) -> None:
        self.torch_group, self.size = torch_group, torch_group.size

    def begin(self, step: Round, outgoing: TensorOf, incoming: TensorOf) -> list[Any]:
        """Begin all messages of a round with these flat tensors, and return the requests. Collective."""
        if self.size == 1:
            return []
        sent = self._in_rank_order({message.peer: outgoing(message) for message in step.sends})
        received = self._in_rank_order({message.peer: incoming(message) for message in step.receives})
        source, target = _in_one_piece(sent), _in_one_piece(received)
        if source is None:
            source = torch.cat(sent)
        copies: Sequence[torch.Tensor] = ()
        lengths = [part.numel() for part in received]
        if target is None:
            target = torch.empty(sum(lengths), dtype=torch.uint8)
            copies = target.split_with_sizes(lengths)
        work = self.torch_group.begin_alltoall(target, lengths, source, [part.numel() for part in sent])
        return [(work, received, copies, source)]  # gloo reads the source until the work is complete

    def finish(self, requests: list[Any]) -> None:
        for work, received, copies, _ in requests:
            self.torch_group.wait(work)
            for part, copy in zip(received, copies, strict=False):
                if part.numel():
                    buffers.overwrite(part, copy)

    def _in_rank_order(self, messages: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        return [buffers.byte_view(messages[rank]) if rank in messages else _NOTHING for rank in range(self.size)]


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _in_one_piece(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a view of parts that follow each other in one storage, or None."""
    filled = [part for part in parts if part.numel()]
    if not filled:
        return _NOTHING
    first, end = filled[0], filled[0].storage_offset()
    for part in filled:
        if part.storage_offset() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


class GlooReduction(PipelinedReduction):
    """Reductions over gloo's alltoall."""

    def __init__(self, group: Group, torch_group: GlooGroup, dtype: torch.dtype, op: str, chunk_bytes: int) -> None:
        super().__init__(group, GlooMessages(torch_group), dtype, op, chunk_bytes)
        self.torch_group = torch_group

    def _gather_all(self, flat: torch.Tensor) -> None:
        parts = [flat]
        if self.size > 1 and flat.numel():
            numel, sent = flat.numel(), buffers.byte_view(flat)
            memory = self.received.take(0, numel * (self.size - 1))
            lengths = [sent.numel()] * self.size
            lengths[self.rank] = 0
            sent = sent if self.size == 2 else sent.repeat(self.size - 1)
            self.torch_group.wait(self.torch_group.begin_alltoall(buffers.byte_view(memory), lengths, sent, lengths))
            parts = list(memory.view(-1, numel).unbind())
            parts.insert(self.rank, flat)
        self.combine(parts, flat)
