"""Allreduces that fit into half of a staging area, in one call of machine code.

The longer way, which other ranks may take in the same call, is the plan of :mod:`torchmpi.backends.ipc.chunk_plan`.
Here the last step of that plan is left out: the next call publishes that the areas have been read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ...shared_memory import kernels
from ...shared_memory.kernels import records
from ...shared_memory.memory_layout import BLOCK_FIELDS, ENQUEUED, FIELD_BYTES
from . import driver, sum_kernels
from .chunk_plan import EMPTIED, FILLED, stage_number

if TYPE_CHECKING:
    from .ipc_backend import StagedGroup

_FILLED, _EMPTIED = stage_number(0, FILLED), stage_number(0, EMPTIED)


class ShortAllreduce:
    """The allreduces of one dtype and operation on a group."""

    def __init__(self, staged: StagedGroup, kernel: sum_kernels.SumKernel, dtype: torch.dtype) -> None:
        assert staged.staging is not None
        loaded, staging = kernels.load(), staged.staging
        self._allreduce, self._combine = loaded["allreduce_on_gpu"], loaded["combine_on_gpu"]
        self._staged, self._staging = staged, staging
        self._item_bytes, self._most_numel = dtype.itemsize, staged.short_bytes // dtype.itemsize
        board = staged.group.status_board
        assert board is not None
        stages = [board.segment.address + (rank * BLOCK_FIELDS + ENQUEUED) * FIELD_BYTES for rank in range(staged.size)]
        self._stages = np.array([stages[other] for other in staged.others], np.int64)
        self._operations = staging.operations(publishes=True), staging.operations(awaits=staged.others)
        self._record = np.zeros(records.GPU_CALL_FIELDS, np.int64)
        self._address = int(self._record.ctypes.data)
        halves = [staging.areas(dtype, half) for half in range(2)]
        cells = [self._address + field * FIELD_BYTES for field in (records.SUM_OUT, records.SUM_NUMEL)]
        self._parameters = [sum_kernels.parameters(areas, *cells) for areas in halves]
        copies, batches, launches = staging.device.driver_functions()
        publications, waits = self._operations
        values = {
            records.COPY_MEMORY: copies,
            records.STREAM_OPERATIONS: batches,
            records.LAUNCH_KERNEL: launches,
            records.PUBLICATIONS: publications.address,
            records.NUM_PUBLICATIONS: publications.count,
            records.WAITS: waits.address,
            records.NUM_WAITS: waits.count,
            records.OWN_STAGE: stages[staged.rank],
            records.STAGES_OF_OTHERS: self._stages.ctypes.data,
            records.SUM_KERNEL: kernel.function,
            records.SUM_THREADS: sum_kernels.NUM_THREADS,
            records.MOST_SUM_BLOCKS: kernel.most_blocks,
            records.NUMEL_OF_SUM_BLOCK: kernel.numel_of_block,
        }
        for half in range(2):
            values[records.OWN_AREA + half] = halves[half][staged.rank].data_ptr()
            values[records.SUM_PARAMETERS + half] = self._parameters[half].ctypes.data
        for field, value in values.items():
            self._record[field] = value

    def run(self, tensor: torch.Tensor) -> bool:
        """Enqueue an allreduce in place on the current stream; return False if the call must take the longer way.

        Raises:
            MismatchError: Another rank has aborted the call.
            RuntimeError: The driver refuses the work, for example because the device has failed.
        """
        staged, staging, numel = self._staged, self._staging, tensor.numel()
        if not 0 < numel <= self._most_numel or staged.staging is not staging:
            return False
        half = staged.begin_short(tensor)
        if half < 0:
            return False
        sync, stream, address = staged.sync, staging.device.current_stream(), tensor.data_ptr()
        number = sync.number(_FILLED)
        arguments = self._address, half, stream, address, numel, number
        status = self._allreduce(*arguments, numel * self._item_bytes)
        if status == driver.NO_CONTEXT:  # of the first function, so that nothing is enqueued
            driver.make_context(stream)
            status = self._allreduce(*arguments, numel * self._item_bytes)
        if status == records.IS_LATE:
            sync.wait_for(staged.others, number)
            status = self._combine(*arguments)
        if status:
            driver.fail("enqueue an allreduce", status)
        staged.end_short(half, sync.number(_EMPTIED))
        return True
