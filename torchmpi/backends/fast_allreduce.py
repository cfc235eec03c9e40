"""Short allreduces over hosts as calls of the fast path: the record of the kernel, and the end of calls that fail."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ..communicators.call_log import call_code
from ..communicators.group import Group
from ..shared_memory import fast_path, kernels
from ..shared_memory.kernels import records, reduction
from ..shared_memory.memory_layout import LOG_ACTIVE
from ..tensors import dtypes
from .mpi_messages import STATUS_BYTES, kernel_fields

Finish = Callable[[int, int, torch.Tensor], torch.Tensor]
"""Ends a call in Python: ``finish(step, status, tensor)``, given the step in which the kernel has failed."""


class Exchange(Protocol):
    """The messages between hosts: see :class:`torchmpi.backends.comparison.NumberExchange`."""

    comm: Any
    rounds: list[tuple[int, int, int, int]]
    tag: int

    @property
    def memory(self) -> tuple[int, int, int]:
        """Addresses of the memory to send and to receive, and the length of the latter."""


class FastAllreduce:
    """A short allreduce over hosts that the kernel `allreduce_over_hosts` runs."""

    def __init__(
        self,
        group: Group,
        backend: str,
        dtype: torch.dtype,
        op: str,
        most_bytes: int,
        exchange: Exchange | None,
        finish: Finish,
        steps: Sequence[fast_path.CachedCall] = (),
    ) -> None:
        """Prepare the calls of a group.

        Args:
            group: The group.
            backend: The name of the backend.
            dtype: The dtype of the tensors, and of partial results.
            op: The operation.
            most_bytes: The size of the longest tensor.
            exchange: The messages between hosts; None on ranks that send none.
            finish: Ends a call that has failed.
            steps: The reduce and the broadcast within the host, with root 0.
        """
        self._group, self._finish, self._steps = group, finish, steps
        self._read_ticks = kernels.load()["read_ticks"]
        num_hosts = len(group.placement.groups)
        self._status, self._operands = np.zeros(STATUS_BYTES, np.uint8), np.zeros(num_hosts, np.int64)
        self._rounds = np.array([] if exchange is None else exchange.rounds, np.int64)
        self._record = array("q", bytes(8 * records.HOSTS_FIELDS))
        self._code = call_code("allreduce", op, dtypes.info(dtype).code)
        values = {
            records.VALUE_BYTES: most_bytes,
            records.EXCHANGE_LOG: group.call_log.log_fields.buffer_info()[0],
            records.HOSTS_CODE: self._code,
        }
        if exchange is not None:
            sent, received, received_bytes = exchange.memory
            values |= kernel_fields(group.context.MPI, exchange.comm, self._status)
            values |= {
                records.SENT: sent,
                records.RECEIVED: received,
                records.RECEIVED_BYTES: received_bytes,
                records.MESSAGE_TAG: exchange.tag,
                records.ROUNDS: self._rounds.ctypes.data,
                records.NUM_ROUNDS: len(exchange.rounds),
                records.NUM_HOSTS: num_hosts,
                records.OWN_HOST: exchange.comm.rank,
                records.OPERANDS: self._operands.ctypes.data,
            }
        for first, step in zip((records.REDUCE_STEP, records.BROADCAST_STEP), self._steps, strict=False):
            values[records.LOCAL_LOG] = step.call_log.log_fields.buffer_info()[0]
            values[first + records.STEP_CALL] = step.record
            values[first + records.STEP_CODE] = step.code
            values[first + records.STEP_SIGNED_CODE] = step.signed_code
        for field, value in values.items():
            self._record[field] = value
        self._call = array("q", bytes(8 * records.CALL_FIELDS))
        self._call[records.ITEM_BYTES], self._call[records.REDUCER] = dtype.itemsize, reduction.address(dtype, op)
        self._call[records.HOSTS] = self._record.buffer_info()[0]
        self._info = group.fast_call_info(self._code, backend, self._read_ticks)

    def cached_call(self) -> fast_path.CachedCall:
        """Return the call for the fast path."""
        return fast_path.CachedCall(
            self._call.buffer_info()[0], self._group.call_log, self._group.call_queue.run_lock, self._code, 0,
            self._settle, self._abort, self._info, bool(self._steps),
        )  # fmt: skip

    def _settle(self, status: int, tensor: torch.Tensor, _: Any) -> torch.Tensor:
        step = self._record[records.FAILED_STEP]
        return self._group.settle(self._info, self._read_ticks(), lambda: self._finish(step, status, tensor))

    def _abort(self) -> None:
        for step in self._steps:
            if step.call_log.log_fields[LOG_ACTIVE]:
                step.abort()
        self._group.call_log.take_over(self._read_ticks())
        self._group.call_log.abandon()
