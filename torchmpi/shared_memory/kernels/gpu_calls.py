"""Short allreduces on a GPU that the ranks share, in one call from Python: calls of the CUDA driver, without the GIL.

The same steps as the plan of one shot (torchmpi.backends.ipc.chunk_plan), so that ranks of both paths meet.
"""

from __future__ import annotations

from ..memory_layout import COMPLETED, ENQUEUED, STAGE_BITS
from .compilation import inner, kernel
from .intrinsics import (
    call_batch,
    call_launch,
    give_way,
    load_field,
    load_field_acquire,
    now,
    pause,
    store_field,
    store_field_release,
)
from .records import (
    ADD_KERNEL,
    ADD_PARAMETERS,
    BLOCKS_OF_OTHERS,
    FILL_KERNEL,
    FILL_PARAMETERS,
    GPU_NUMBER,
    GPU_NUMEL,
    GPU_TENSOR,
    IS_LATE,
    KERNEL_THREADS,
    LAUNCH_KERNEL,
    MOST_BLOCKS,
    NUM_STREAM_WAITS,
    NUMEL_OF_BLOCK,
    OPERATION_FIELDS,
    OPERATION_VALUE,
    OWN_BLOCK,
    STREAM_OPERATIONS,
    STREAM_WAITS,
)

# Polling takes a fraction of a microsecond. Later the core is offered to others, and then Python continues.
_NUM_POLLS, _PATIENCE_NANOSECONDS = 50, 500_000


@inner
def have_others_enqueued(call, number):
    """Wait until all other ranks have published a number, for a limited time; return whether they have.

    A rank in a later call has completed this one, or aborted it: Python examines that.
    """
    blocks, begin, num_polls = load_field(call, BLOCKS_OF_OTHERS), 0, 0
    for index in range(load_field(call, NUM_STREAM_WAITS)):
        block = load_field(blocks, index)
        while load_field_acquire(block, ENQUEUED) < number:
            num_polls += 1
            if num_polls < _NUM_POLLS:
                pause()
                continue
            if begin == 0:
                begin = now()
            elif now() - begin > _PATIENCE_NANOSECONDS:
                return False
            give_way()
        if load_field_acquire(block, ENQUEUED) >> STAGE_BITS != number >> STAGE_BITS:
            return False
    return True


@inner
def launch(call, kernel, parameters, stream):
    """Launch a kernel for the elements of the tensor; return the error of CUDA."""
    numel_of_block = load_field(call, NUMEL_OF_BLOCK)
    num_blocks = (load_field(call, GPU_NUMEL) + numel_of_block - 1) // numel_of_block
    return call_launch(
        load_field(call, LAUNCH_KERNEL), load_field(call, kernel), min(num_blocks, load_field(call, MOST_BLOCKS)),
        load_field(call, KERNEL_THREADS), stream, load_field(call, parameters),
    )  # fmt: skip


@kernel
def add_on_gpu(call, half, stream):
    """Make the stream wait for the areas of the other ranks, and add all areas; return the error of CUDA."""
    waits, count, number = (
        load_field(call, STREAM_WAITS),
        load_field(call, NUM_STREAM_WAITS),
        load_field(call, GPU_NUMBER),
    )
    for index in range(count):
        store_field(waits, index * OPERATION_FIELDS + OPERATION_VALUE, number)
    error = call_batch(load_field(call, STREAM_OPERATIONS), stream, count, waits)
    if error == 0:
        error = launch(call, ADD_KERNEL, ADD_PARAMETERS + half, stream)
    if error == 0:
        store_field_release(load_field(call, OWN_BLOCK), COMPLETED, number >> STAGE_BITS)
    return error


@kernel
def allreduce_on_gpu(call, half, stream, address, numel, number):
    """Enqueue an allreduce in place through a half of the areas; `number`: of the stage *filled*.

    Returns 0, the error of CUDA, or IS_LATE before the stream waits for other ranks: then `add_on_gpu` is left.
    """
    store_field(call, GPU_TENSOR, address)
    store_field(call, GPU_NUMEL, numel)
    store_field(call, GPU_NUMBER, number)
    error = launch(call, FILL_KERNEL, FILL_PARAMETERS + half, stream)
    if error != 0:
        return error
    store_field_release(load_field(call, OWN_BLOCK), ENQUEUED, number)
    return add_on_gpu(call, half, stream) if have_others_enqueued(call, number) else IS_LATE
