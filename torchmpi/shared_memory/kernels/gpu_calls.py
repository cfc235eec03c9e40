"""Short allreduces on a GPU that the ranks share, in one call from Python: calls of the CUDA driver, without the GIL.

The same steps as the plan of one shot (torchmpi.backends.ipc.chunk_plan), so that ranks of both paths meet.
"""

from __future__ import annotations

from ..memory_layout import STAGE_BITS
from .compilation import inner, kernel
from .intrinsics import (
    call_batch,
    call_copy,
    call_launch,
    give_way,
    load_acquire,
    load_field,
    now,
    pause,
    store_field,
    store_release,
)
from .records import (
    COPY_MEMORY,
    IS_LATE,
    LAUNCH_KERNEL,
    MOST_SUM_BLOCKS,
    NUM_PUBLICATIONS,
    NUM_WAITS,
    NUMEL_OF_SUM_BLOCK,
    OPERATION_FIELDS,
    OPERATION_VALUE,
    OWN_AREA,
    OWN_STAGE,
    PUBLICATIONS,
    STAGES_OF_OTHERS,
    STREAM_OPERATIONS,
    SUM_KERNEL,
    SUM_NUMEL,
    SUM_OUT,
    SUM_PARAMETERS,
    SUM_THREADS,
    WAITS,
)

# Polling takes a fraction of a microsecond. Later the core is offered to others, and then Python continues.
_NUM_POLLS, _PATIENCE_NANOSECONDS = 50, 500_000


@inner
def enqueue_operations(call, stream, operations, count, number):
    """Enqueue operations of a stream with a number; return the error of CUDA."""
    for index in range(count):
        store_field(operations, index * OPERATION_FIELDS + OPERATION_VALUE, number)
    return call_batch(load_field(call, STREAM_OPERATIONS), stream, count, operations) if count != 0 else 0


@inner
def have_others_enqueued(call, number):
    """Wait until all other ranks have published a number, for a limited time; return whether they have.

    A rank in a later call has completed this one, or aborted it: Python examines that.
    """
    stages, begin, num_polls = load_field(call, STAGES_OF_OTHERS), 0, 0
    for index in range(load_field(call, NUM_WAITS)):
        stage = load_field(stages, index)
        while load_acquire(stage) < number:
            num_polls += 1
            if num_polls < _NUM_POLLS:
                pause()
                continue
            if begin == 0:
                begin = now()
            elif now() - begin > _PATIENCE_NANOSECONDS:
                return False
            give_way()
        if load_acquire(stage) >> STAGE_BITS != number >> STAGE_BITS:
            return False
    return True


@kernel
def combine_on_gpu(call, half, stream, address, numel, number):
    """Make the stream wait for the areas of the other ranks, and add all areas; return the error of CUDA."""
    error = enqueue_operations(call, stream, load_field(call, WAITS), load_field(call, NUM_WAITS), number)
    if error != 0:
        return error
    store_field(call, SUM_OUT, address)
    store_field(call, SUM_NUMEL, numel)
    numel_of_block = load_field(call, NUMEL_OF_SUM_BLOCK)
    num_blocks = min((numel + numel_of_block - 1) // numel_of_block, load_field(call, MOST_SUM_BLOCKS))
    return call_launch(
        load_field(call, LAUNCH_KERNEL), load_field(call, SUM_KERNEL), num_blocks, load_field(call, SUM_THREADS),
        stream, load_field(call, SUM_PARAMETERS + half),
    )  # fmt: skip


@kernel
def allreduce_on_gpu(call, half, stream, address, numel, number, num_bytes):
    """Enqueue an allreduce in place through a half of the areas; `number`: of the stage *filled*.

    Returns 0, the error of CUDA, or IS_LATE before the stream waits for other ranks: then `combine_on_gpu` is left.
    """
    area = load_field(call, OWN_AREA + half)
    error = call_copy(load_field(call, COPY_MEMORY), area, address, num_bytes, stream)
    if error != 0:
        return error
    error = enqueue_operations(call, stream, load_field(call, PUBLICATIONS), load_field(call, NUM_PUBLICATIONS), number)
    if error != 0:
        return error
    store_release(load_field(call, OWN_STAGE), number)
    return combine_on_gpu(call, half, stream, address, numel, number) if have_others_enqueued(call, number) else IS_LATE
