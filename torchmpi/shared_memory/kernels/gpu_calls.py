"""Short allreduces on a GPU that the ranks share, in one call from Python: calls of the CUDA driver, without the GIL.

The same steps as the plan of one shot (torchmpi.backends.ipc.chunk_plan), so that ranks of both paths meet.
"""

from __future__ import annotations

from ..compiler.compilation import inner, kernel
from ..memory_layout import STAGE_BITS, Block
from .intrinsics import (
    call_batch,
    call_launch,
    give_way,
    load_acquire,
    now,
    pause,
    store_release,
)
from .records import IS_LATE, GpuCall

# Polling takes a fraction of a microsecond. Later the core is offered to others, and then Python continues.
_NUM_POLLS, _PATIENCE_NANOSECONDS = 50, 500_000


@inner
def have_others_enqueued(call: GpuCall, number):
    """Wait until all other ranks have published a number, for a limited time; return whether they have.

    A rank in a later call has completed this one, or aborted it: Python examines that.
    """
    begin, num_polls = 0, 0
    for index in range(call.num_waits):
        block = Block(call.others[index])
        while load_acquire(block.enqueued) < number:
            num_polls += 1
            if num_polls < _NUM_POLLS:
                pause()
                continue
            if begin == 0:
                begin = now()
            elif now() - begin > _PATIENCE_NANOSECONDS:
                return False
            give_way()
        if load_acquire(block.enqueued) >> STAGE_BITS != number >> STAGE_BITS:
            return False
    return True


@inner
def launch(call: GpuCall, kernel, parameters, stream):
    """Launch a kernel for the elements of the tensor; return the error of CUDA."""
    numel_of_block = call.numel_of_block
    num_blocks = (call.numel + numel_of_block - 1) // numel_of_block
    return call_launch(
        call.launch_kernel, kernel, min(num_blocks, call.most_blocks),
        call.kernel_threads, stream, parameters,
    )  # fmt: skip


@kernel
def add_on_gpu(call: GpuCall, half, stream):
    """Make the stream wait for the areas of the other ranks, and add all areas; return the error of CUDA."""
    waits, count, number = (
        call.waits,
        call.num_waits,
        call.number,
    )
    for index in range(count):
        waits[index].value = number
    error = call_batch(call.stream_operations, stream, count, waits)
    if error == 0:
        error = launch(call, call.add_kernel, call.add_parameters[half], stream)
    if error == 0:
        store_release(call.own_block.completed, number >> STAGE_BITS)
    return error


@kernel
def allreduce_on_gpu(call: GpuCall, half, stream, address, numel, number):
    """Enqueue an allreduce in place through a half of the areas; `number`: of the stage *filled*.

    Returns 0, the error of CUDA, or IS_LATE before the stream waits for other ranks: then `add_on_gpu` is left.
    """
    call.tensor = address
    call.numel = numel
    call.number = number
    error = launch(call, call.fill_kernel, call.fill_parameters[half], stream)
    if error != 0:
        return error
    store_release(call.own_block.enqueued, number)
    return add_on_gpu(call, half, stream) if have_others_enqueued(call, number) else IS_LATE
