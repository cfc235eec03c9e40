"""To a user of devices: handles, queues and staging keep the order, on a model of a device that is late."""

from __future__ import annotations

import contextlib
import gc
import threading
import types
import weakref
from functools import partial

import pytest
import torch
from helpers.device_model import DEVICE, DeviceTensor, Model, compute, plain

from torchmpi import errors
from torchmpi.collective_specs import SPECS
from torchmpi.collectives import device_staging, prepared
from torchmpi.communicators.call_log import CallLog
from torchmpi.communicators.call_queue import CallQueue
from torchmpi.communicators.handle import DeviceHandle, JoinedHandle
from torchmpi.tensors import streams

SEEDS = range(8)
_CHUNK_BYTES = 64


def test_calls_on_host_tensors_return_plain_handles():
    call_queue = CallQueue("host")
    queued = call_queue.submit(lambda: 7, "call", torch.ones(2))
    assert not isinstance(queued, DeviceHandle)
    assert queued.wait() == 7
    assert call_queue.run(lambda: 8, subject=torch.ones(2)) == 8
    call_queue.close()


@pytest.fixture(params=SEEDS)
def model(request, monkeypatch):
    device = Model(request.param)
    device.install(monkeypatch)
    monkeypatch.setattr(streams, "_own", streams._Own())
    monkeypatch.setattr(streams, "_abandoned", streams._Abandoned())
    return device


def group_of_one() -> types.SimpleNamespace:
    return types.SimpleNamespace(call_queue=CallQueue("model"), rank=0, call_log=CallLog("model", rank=0, size=1))


def doubled(group, pool, tensor: DeviceTensor, out: DeviceTensor | None = None) -> DeviceTensor:
    """A staged call by a backend of the host that doubles its input."""

    def operation(chunk: torch.Tensor, destination: None, root: int) -> None:
        assert type(chunk) is torch.Tensor, "the backend got device memory"
        chunk.mul_(2)

    group.call_log.enter(0, (1,))
    try:
        return device_staging.StagedOperation(SPECS["allreduce"], operation, group, pool).run(tensor, out, 0)
    finally:
        group.call_log.leave()


def host_pool() -> device_staging.StagingPool:
    return device_staging.StagingPool(_CHUNK_BYTES, partial(torch.empty, dtype=torch.uint8), pinned=False)


def seen(tensor: DeviceTensor) -> list[float]:
    """The values that work queued now on the current stream reads."""
    copy = tensor.model.tensor(torch.zeros(tensor.shape))
    copy.copy_(tensor, non_blocking=True)
    tensor.model.current_stream().synchronize()
    return plain(copy).tolist()


NUMEL = 7 * _CHUNK_BYTES // 4 + 3


def test_background_calls_are_ordered_with_the_streams_of_their_thread(model):
    group, pool = group_of_one(), host_pool()
    tensor = model.tensor(torch.zeros(NUMEL))
    user = model.stream()
    with model.use(user):
        compute(tensor, lambda values: values.copy_(torch.arange(float(NUMEL))))
        call = group.call_queue.submit(partial(doubled, group, pool, tensor), "call", tensor)
        result = call.wait()
        compute(tensor, lambda values: values.add_(1))
        found = seen(tensor)
    group.call_queue.close()
    assert result is tensor
    assert found == [2.0 * index + 1 for index in range(NUMEL)]
    assert call.done()


def test_a_call_in_the_callers_thread_is_in_the_order_of_its_stream(model):
    group, pool = group_of_one(), host_pool()
    tensor, out = model.tensor(torch.zeros(NUMEL)), model.tensor(torch.zeros(NUMEL))
    with model.use(model.stream()):
        compute(tensor, lambda values: values.fill_(3))
        group.call_queue.run(partial(doubled, group, pool, tensor, out), subject=tensor)
        compute(tensor, lambda values: values.fill_(5))
        assert seen(out) == [6.0] * NUMEL
        assert seen(tensor) == [5.0] * NUMEL
    group.call_queue.close()


def test_a_result_may_overlap_the_input(model):
    """Regression: the result of a chunk overwrote a later chunk before it was copied to the host."""
    group, pool = group_of_one(), host_pool()
    base = model.tensor(torch.zeros(2 * NUMEL))
    tensor, out = base[:NUMEL], base[NUMEL // 2 : NUMEL // 2 + NUMEL]
    with model.use(model.stream()):
        compute(tensor, lambda values: values.copy_(torch.arange(float(NUMEL))))
        group.call_queue.run(partial(doubled, group, pool, tensor, out), subject=tensor)
        assert seen(out) == [2.0 * index for index in range(NUMEL)]
    group.call_queue.close()


def test_a_timeout_names_the_awaited_ranks(model):
    call_queue, held = CallQueue("model"), threading.Event()
    with model.use(model.stream()):
        handle = call_queue.submit(held.wait, "call", model.tensor(torch.zeros(1)))
    handle.awaited = lambda: "rank 3"
    with pytest.raises(errors.StallError, match=r"call has not ended after 0\.01 s: it waits for rank 3"):
        handle.wait(0.01)
    held.set()
    call_queue.close()


def test_the_buffers_do_not_keep_a_runtime_alive():
    class Runtime:
        resources, config = contextlib.ExitStack(), types.SimpleNamespace(pipeline_bytes=_CHUNK_BYTES)

    runtime = Runtime()
    reference = weakref.ref(runtime)
    assert prepared._pool(runtime) is prepared._pool(runtime)
    runtime.resources.close()
    del runtime
    assert reference() is None


def test_a_synchronous_call_behind_asynchronous_ones_keeps_their_order(model):
    group, pool = group_of_one(), host_pool()
    tensor = model.tensor(torch.ones(NUMEL))
    held = threading.Event()
    with model.use(model.stream()):
        blocked = group.call_queue.submit(held.wait, "something slow")
        first = group.call_queue.submit(partial(doubled, group, pool, tensor), "first", tensor)
        threading.Timer(0.001, held.set).start()
        first_result = first.wait()
        compute(tensor, lambda values: values.add_(1))
        group.call_queue.run(partial(doubled, group, pool, tensor), subject=tensor)
        assert seen(tensor) == [6.0] * NUMEL
    assert first_result is tensor and blocked.wait()
    group.call_queue.close()


def test_two_queues_share_the_buffers(model):
    """A buffer that is released while its last copy is still queued is used by another stream next."""
    pool = host_pool()
    groups = [group_of_one() for _ in range(2)]
    tensors = [model.tensor(torch.full((NUMEL,), float(index + 1))) for index in range(6)]
    calls = [
        groups[index % 2].call_queue.submit(partial(doubled, groups[index % 2], pool, tensor), "call", tensor)
        for index, tensor in enumerate(tensors)
    ]
    for call in calls:
        call.wait()
    found = [seen(tensor) for tensor in tensors]
    for group in groups:
        group.call_queue.close()
    assert found == [[2.0 * (index + 1)] * NUMEL for index in range(6)]
    assert pool.num_made <= 6


def test_a_buffer_whose_last_copy_is_still_queued_is_not_overwritten_by_another_stream(model):
    group, pool = group_of_one(), host_pool()
    tensors = [model.tensor(torch.full((5,), float(index + 1))) for index in range(6)]
    for tensor in tensors:
        with model.use(model.stream()):
            group.call_queue.run(partial(doubled, group, pool, tensor), subject=tensor)
    for stream in list(model._streams):
        stream.synchronize()
    group.call_queue.close()
    assert [plain(tensor).tolist() for tensor in tensors] == [[2.0 * (index + 1)] * 5 for index in range(6)]
    assert pool.num_made == 1


def test_callbacks_run_behind_the_call_and_not_on_the_default_stream(model):
    group = group_of_one()
    tensor, copy = model.tensor(torch.zeros(4)), model.tensor(torch.zeros(4))
    current: list[object] = []
    called = threading.Event()

    def task() -> DeviceTensor:
        compute(tensor, lambda values: values.fill_(9))  # enqueued, as a transport of the device does
        return tensor

    def callback() -> None:
        current.append(model.current_stream())
        copy.copy_(tensor, non_blocking=True)
        model.current_stream().synchronize()
        called.set()

    call = group.call_queue.submit(task, "call", tensor)
    call.when_done(callback)
    assert called.wait(10)
    group.call_queue.close()
    assert plain(copy).tolist() == [9.0] * 4
    assert current[0] is not model.default


def test_callbacks_share_the_stream_of_their_thread(model):
    """torch has 32 streams: with a new one for each callback, work that has nothing to do with it shares its stream."""
    group, tensor = group_of_one(), model.tensor(torch.zeros(4))
    found: list[object] = []

    def note() -> None:
        found.append(model.current_stream())

    held = threading.Event()
    group.call_queue.submit(held.wait, "something slow")
    calls = [group.call_queue.submit(note, "call", tensor) for _ in range(3)]
    for call in calls:
        call.when_done(note)  # in the worker
    held.set()
    for call in calls:
        call.wait()
    num_streams = len(model._streams)
    group.call_queue.close()
    for call in calls:
        call.when_done(note)  # here
    assert len(set(found[:6])) == len(set(found[6:])) == 1
    assert num_streams == len(model._streams) == 2, "the stream of the worker, which has ended, is used again"


def test_done_waits_for_the_device(model):
    group = group_of_one()
    tensor = model.tensor(torch.zeros(4))
    gate = model.stream().record_event()
    gate.has_happened = False
    opened = threading.Event()

    def task() -> DeviceTensor:
        model.current_stream().queue.append(opened.is_set)
        return tensor

    call = group.call_queue.submit(task, "call", tensor)
    assert call.wait() is tensor  # queued: the host does not wait for the device
    before = call.done()
    opened.set()
    model.current_stream().synchronize()
    group.call_queue.close()
    assert (before, call.done()) == (False, True)


def test_errors_are_raised_and_marked_as_seen(model):
    group = group_of_one()
    tensor = model.tensor(torch.zeros(4))

    def fail() -> None:
        raise errors.MismatchError("different")

    call = group.call_queue.submit(fail, "call", tensor)
    called = threading.Event()
    call.when_done(called.set)
    assert called.wait(10)
    assert isinstance(call.unseen_error, errors.MismatchError)
    with pytest.raises(errors.MismatchError, match="different"):
        call.wait()
    assert call.done() and call.unseen_error is None
    group.call_queue.close()


@pytest.mark.parametrize("elsewhere", (False, True), ids=("nobody waits", "waited for on another stream"))
def test_memory_in_use_by_the_device_is_kept(model, elsewhere):
    """The memory of an abandoned call must not be reused while the device works on it."""
    group = group_of_one()
    tensor = model.tensor(torch.zeros(4))
    opened = threading.Event()
    alive: list[bool] = []

    class Kept:
        """A replacement of memory."""

        def __del__(self) -> None:
            alive.append(opened.is_set())

    def task(kept: Kept) -> None:
        model.current_stream().queue.append(opened.is_set)

    call = group.call_queue.submit(partial(task, Kept()), "call", tensor)
    if elsewhere:
        with model.use(model.stream()):
            call.wait()
    del call
    group.call_queue.drain()
    gc.collect()
    early = list(alive)
    opened.set()
    for stream in list(model._streams):
        stream.synchronize()
    streams._abandoned.sweep()
    gc.collect()
    group.call_queue.close()
    assert early == [] and alive == [True]


PACKS = {"alone": lambda rows: rows, "tuple": lambda rows: (rows, [4]), "list": lambda rows: [[4], rows]}


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS.keys())
def test_memory_of_results_is_not_reused_while_a_stream_reads_it(model, pack):
    group, tensor, copy = group_of_one(), model.tensor(torch.zeros(4)), model.tensor(torch.zeros(4))
    background: list[object] = []

    def task() -> object:
        background.append(model.current_stream())
        rows = model.temporary(torch.zeros(4))
        compute(rows, lambda values: values.fill_(9))
        return pack(rows)

    with model.use(model.stream()):
        call = group.call_queue.submit(task, "call", tensor)
        result = call.wait()
        copy.copy_(next(part for part in (result, *result) if isinstance(part, DeviceTensor)), non_blocking=True)
        group.call_queue.drain()
        del call, result
        gc.collect()
        background[0].synchronize()
        model.current_stream().synchronize()
    group.call_queue.close()
    assert plain(copy).tolist() == [9.0] * 4


def test_a_callback_that_follows_a_call_does_not_keep_its_memory(model):
    """As in the handle of several calls, which follows them in a worker thread, and then in that of the user."""
    group, kept = group_of_one(), model.tensor(torch.zeros(4))
    with model.use(model.stream()):
        call = group.call_queue.submit(partial(compute, kept, lambda values: values.add_(1)), "call", kept)
        joined = JoinedHandle([call], None, "calls")
        joined.wait()
        alive = weakref.ref(kept)
        del kept
        model.current_stream().synchronize()
        group.call_queue.drain()
        gc.collect()
    group.call_queue.close()
    assert alive() is None and joined.done()


def test_stop_waits_for_the_memory_of_dropped_calls(model):
    group, kept = group_of_one(), model.tensor(torch.zeros(4))
    alive = weakref.ref(kept)
    group.call_queue.submit(partial(compute, kept, lambda values: values.add_(1)), "call", kept)
    group.call_queue.close()
    del kept
    gc.collect()
    streams.release()
    gc.collect()
    assert alive() is None


def test_work_on_changing_streams_stays_in_order(model):
    order, tensor = streams.Order(), model.tensor(torch.zeros(1))
    steps = 6
    for index in range(steps):
        with model.use(model.stream()):
            order.enter(tensor)
            compute(tensor, lambda values, index=index: values.mul_(2).add_(index))
    with model.use(model.stream()):
        order.enter(tensor)
        found = seen(tensor)
    expected = 0.0
    for index in range(steps):
        expected = expected * 2 + index
    assert found == [expected]


def test_a_captured_stream_waits_for_no_work_outside_of_the_graph(model):
    """A graph would be invalid otherwise; calls outside of it stay in order."""
    order, tensor, captured = streams.Order(), model.tensor(torch.zeros(1)), model.stream()
    with model.use(model.stream()):
        order.enter(tensor)
        compute(tensor, lambda values: values.add_(1))
    model.captured = captured
    with model.use(captured):
        order.enter(tensor)
    model.captured = None
    with model.use(model.stream()):
        order.enter(tensor)
        assert seen(tensor) == [1.0]


def test_in_order_follows_queued_work_in_another_thread(model):
    tensor = model.tensor(torch.zeros(3))
    found: list[list[float]] = []

    def task() -> None:
        host = torch.zeros(3)
        host.copy_(tensor, non_blocking=True)
        model.current_stream().synchronize()
        found.append(host.tolist())

    with model.use(model.stream()):
        compute(tensor, lambda values: values.fill_(4))
        ordered = streams.in_order(tensor, task)
        ordered()
        thread = threading.Thread(target=ordered)
        thread.start()
        thread.join()
    assert found == [[4.0] * 3] * 2
    assert tensor.device == DEVICE
