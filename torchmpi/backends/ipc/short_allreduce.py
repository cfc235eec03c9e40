"""Allreduces that fit into half of a staging area, in one call of machine code.

The general path, which other ranks may take in the same call, is the plan of :mod:`torchmpi.backends.ipc.chunk_plan`.
Here the last step of that plan is left out: the next call publishes that the areas have been read.
"""

from __future__ import annotations

import numpy as np
import torch

from ...communicators.algorithms import ONE_SHOT
from ...shared_memory.kernels import load, records
from ...shared_memory.memory_layout import BLOCK_BYTES, FIELD_BYTES, STAGE_BITS, LogFields
from . import area_kernels, chunk_plan, driver
from .chunk_plan import EMPTIED, FILLED, stage_number
from .stage_sync import StageSync
from .staging_areas import Staging

_FILLED, _EMPTIED = stage_number(0, FILLED), stage_number(0, EMPTIED)


class ShortAllreduce:
    """The allreduces of one dtype and operation on a group, as long as it has these staging areas.

    Attributes:
        staging: The staging areas. If their waits are released, the result is undefined.
    """

    def __init__(
        self,
        sync: StageSync,
        staging: Staging,
        kernels: area_kernels.AreaKernels,
        dtype: torch.dtype,
        most_bytes: int,
    ) -> None:
        group = sync.group
        assert group.status_board is not None
        others = self._others = chunk_plan.others(group.rank, group.size)
        self._allreduce, self._add = (load()[name] for name in ("allreduce_on_gpu", "add_on_gpu"))
        self.staging, self._sync = staging, sync
        self._log_fields, self._device = group.call_log.log_fields, staging.device.device
        self._current_stream, self._is_capturing = staging.device.current_stream, staging.device.is_capturing
        self._most_numel = most_bytes // dtype.itemsize
        first_block = group.status_board.segment.address
        blocks = [first_block + rank * BLOCK_BYTES for rank in range(group.size)]
        self._blocks = np.array([blocks[other] for other in others], np.int64)
        self._waits = staging.operations(awaits=others)
        self._record = records.GpuCall.new()
        self._address = int(self._record)
        tensor, numel, number = (
            self._address + field * FIELD_BYTES
            for field in (records.GpuCall.tensor, records.GpuCall.numel, records.GpuCall.number)
        )
        areas = [[area.data_ptr() for area in staging.areas(dtype, half)] for half in range(2)]
        ended, numbers = [staging.num_ended_blocks.data_ptr()], staging.addresses_of_numbers()
        self._fill = [
            area_kernels.Parameters(tensor, [each[group.rank]], numel, numbers, number, ended) for each in areas
        ]
        self._sum = [area_kernels.Parameters(each, tensor, numel) for each in areas]
        operate, launch = staging.device.driver_functions()
        self._record.write(
            stream_operations=operate,
            launch_kernel=launch,
            waits=self._waits.address,
            num_waits=self._waits.count,
            own_block=blocks[group.rank],
            others=self._blocks.ctypes.data,
            fill_kernel=kernels.fill,
            add_kernel=kernels.add,
            kernel_threads=area_kernels.NUM_THREADS,
            most_blocks=kernels.most_blocks,
            numel_of_block=kernels.numel_of_block,
        )
        for half in range(2):
            self._record.fill_parameters[half] = self._fill[half].address
            self._record.add_parameters[half] = self._sum[half].address

    def run(self, tensor: torch.Tensor) -> bool:
        """Enqueue an allreduce in place on the current stream; return False if the call must take the general path.

        Raises:
            MismatchError: Another rank has aborted the call.
            RuntimeError: The driver refuses the work, for example because the device has failed.
        """
        sync, numel, address = self._sync, tensor.numel(), tensor.data_ptr()
        seq, is_free = self._log_fields[LogFields.sequence], sync.is_free
        half = seq & 1
        if not (
            0 < numel <= self._most_numel
            and address  # 0: a tensor whose memory was freed, for which torch has an error
            and is_free[half]
            and not (sync.has_failed() or self._is_capturing())
            and tensor.device == self._device
        ):
            return False
        first, self._log_fields[LogFields.algorithm] = seq << STAGE_BITS, ONE_SHOT
        sync.seq, sync.last_use[half], is_free[half] = seq, first | _EMPTIED, False  # also if the call fails
        number, stream = first | _FILLED, self._current_stream()
        status = self._allreduce(self._address, half, stream, address, numel, number)
        if status:
            self._continue(status, half, stream, number)
        sync.unpublished, is_free[1 - half] = first | _EMPTIED, True
        return True

    def _continue(self, status: int, half: int, stream: int, number: int) -> None:
        """Finish a call from which machine code has returned early."""
        if status == records.IS_LATE:
            self._sync.wait_for(self._others, number)
            status = self._add(self._address, half, stream)
        if status:
            driver.fail("enqueue an allreduce", status)
