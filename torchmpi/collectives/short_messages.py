"""Exchanges of short messages by the fast path: `sendreceive` without Python code in between.

The kernel packs the header and the values into one message and calls MPI_Sendrecv, so that these messages are in one
order with all others. It takes the run locks of both queues, of messages to one rank and from the other.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..backends.mpi_messages import SENDRECV, STATUS_BYTES, kernel_fields
from ..communicators.call_log import CallLog, call_code, describe
from ..communicators.group import Group
from ..shared_memory import fast_path, kernels
from ..shared_memory.kernels import records
from ..tensors import dtypes

HEADER_TAG = 1
MOST_HEADER_BYTES = 8 * 66  # dtype, number of dims, and up to 64 dims, the limit of torch
PACKED_BYTES = 4096
"""Values of at most this size are sent behind their header, in one message."""
_MOST_EXCHANGES = 64  # of a group, as the fast path looks through all of them

Settle = Callable[[int, torch.Tensor, npt.NDArray[np.uint8]], torch.Tensor]
"""Ends an exchange with an error, given the status of the kernel, the tensor and the received message."""


def cached_exchange(
    group: Group, src: int, dst: int, dtype: torch.dtype, settle: Settle
) -> fast_path.CachedCall | None:
    """Return the exchange for the fast path; None if the group is closed, or has too many."""
    queues = group.peer_queue("receive", src), group.peer_queue("send", dst)
    if any(queue.closed for queue in queues):
        return None
    exchanges, key = queues[0].fast_calls, (dst, dtype)
    if key not in exchanges:
        if sum(len(queue.fast_calls) for queue in list(group.peer_queues.values())) >= _MOST_EXCHANGES:
            return None
        exchanges[key] = _Exchange(group, src, dst, dtype, settle)
    exchange = exchanges[key]
    assert isinstance(exchange, _Exchange)
    return exchange.cached_call


class _Exchange:
    """The memory of the messages to one rank and from another, of one dtype, and the record of the kernel."""

    def __init__(self, group: Group, src: int, dst: int, dtype: torch.dtype, settle: Settle) -> None:
        self._peer, self._settle = src, settle
        self._call_log, self._counts = CallLog(group.name, group.rank, group.size), group.context.call_counts
        self._counts.add_exchanges(group.name, self._call_log)
        self._known: tuple[object, str] = None, ""
        self._messages = np.zeros((2, MOST_HEADER_BYTES + PACKED_BYTES), np.uint8)
        sent, self._received = self._messages
        self._status = np.zeros(STATUS_BYTES, np.uint8)
        ranks, channel = group.world_ranks, group.channels.channel
        code, queues = dtypes.info(dtype).code, (group.peer_queue("receive", src), group.peer_queue("send", dst))
        self._record = array("q", bytes(8 * records.SendReceive.FIELDS))
        values = {
            **kernel_fields(group.context.MPI, group.side_comm, self._status, SENDRECV),
            records.KernelCall.item_bytes: dtype.itemsize,
            records.Exchange.sent_dtype: code,
            records.Exchange.sent: sent.ctypes.data,
            records.Exchange.received: self._received.ctypes.data,
            records.Exchange.received_bytes: self._received.nbytes,
            records.Exchange.value_bytes: PACKED_BYTES,
            records.Exchange.send_to: dst,
            records.Exchange.receive_from: src,
            records.Exchange.tag: HEADER_TAG,
            records.Exchange.send_lock: queues[1].run_lock.address,
            records.Exchange.call_log: self._call_log.log_fields.buffer_info()[0],
            records.SendReceive.send_channel: channel(ranks[dst], is_receive=False).address,
            records.SendReceive.receive_channel: channel(ranks[src], is_receive=True).address,
        }
        for field, value in values.items():
            self._record[field] = value
        code = call_code("sendreceive", None, code)
        self.cached_call = fast_path.CachedCall(
            self._record.buffer_info()[0], self._call_log, queues[0].run_lock, code, code, self.settle, self.abort
        )

    def doing(self) -> str | None:
        """Return the description of the exchange that is running, the same object as long as it runs."""
        current = self._call_log.current
        if current is None:
            return None
        if current != self._known[0]:
            self._known = current, f"{describe(*current[1:])} from rank {self._peer}"
        return self._known[1]

    def close(self) -> None:
        """Keep the counts of the exchanges, but not their call log."""
        self._counts.free_exchanges(self._call_log)

    def settle(self, status: int, tensor: torch.Tensor, _: Any) -> torch.Tensor:
        """End an exchange that has failed."""
        self.abort()
        return self._settle(status, tensor, self._received)

    def abort(self) -> None:
        """Remove the exchange from the call log."""
        self._call_log.take_over(kernels.load()["read_ticks"]())
        self._call_log.abandon()
