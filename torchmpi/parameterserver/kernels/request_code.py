"""Machine code of a request that a program repeats, from the tensor to the shards (docs/design/parameterserver.md).

As the fast path of a collective, it holds the GIL except while it passes over the shards. Nothing before it takes the
lock of the server has an effect, so that it can return None up to there: the path through Python makes the request.
"""

from __future__ import annotations

from ...shared_memory.compiler.compilation import BYTES, WORD, Function, Wrapper, inner
from ...shared_memory.compiler.cpython import call_with_four, decref, describe_with, new_number, release_gil, take_gil
from ...shared_memory.kernels.fast_path_code import (
    count_write,
    data,
    described_tensor,
    is_for_python,
    is_free,
    is_plain,
    leave_to_python,
    new_reference,
    numel_of,
)
from ...shared_memory.kernels.intrinsics import copy, now, store
from ...shared_memory.kernels.messages import begin_message, end_message
from ...shared_memory.kernels.records import DLTensor, FastPath
from ...shared_memory.memory_layout import ChannelFields
from ...shared_memory.typed_records import Words
from .shard_layout import AGES, DONE, NUM_NUMBERS, Pass, RepeatedRequest, RepeatedRequests, RequestFields
from .shard_passes import pass_over

_PREPARED_BYTES = 8 * (Pass.rows - Pass.shards)


@inner
def find_request(first: RepeatedRequest, key, address) -> RepeatedRequest:
    """Return the request with this key, or 0."""
    request = first
    while request:
        if request.key == key and (request.address == 0 or request.address == address):
            break
        request = request.following
    return request


@inner
def prepare(plan: Pass, request: RepeatedRequest, address):
    """Prepare a pass, as `Actor` does, for data at an address."""
    copy(plan + 8 * Pass.shards, request.prepared + 0, _PREPARED_BYTES)
    copy(plan.coefficients, request.numbers + 0, 8 * NUM_NUMBERS)
    plan.data = address
    plan.row_numel = 0
    return 0


@inner
def end_request(plan: Pass, record: RequestFields, num_bytes):
    """Write the record of a request that has been made."""
    record.versions, record.num_chunks = plan.versions, plan.position
    record.ages = Words(plan.coefficients)[AGES]
    record.total_bytes += num_bytes
    end = now()
    record.total_ns += end - record.begin
    return end_message(ChannelFields(record), end)


@inner
def settle(path: FastPath, record: RequestFields, status, tensor, key, is_receive):
    """Let Python continue a request that waits for a lock; return its handle, or 0 with an exception that is set."""
    number, kind = new_number(status), new_number(is_receive)
    handle = call_with_four(path.settle, number, tensor, key, kind)
    decref(number)
    decref(kind)
    if handle == 0:  # KeyboardInterrupt, perhaps before the first line of Python
        record.begun = record.ended
    return handle


def _entry(*, is_receive: bool) -> Function:
    """Return the function: the tensor of a request that has been made, or its handle, None, or 0 if it has raised."""

    def repeat(server: RepeatedRequests, tensor, key):
        path, described, lock, plan = server.path, DLTensor(described_tensor()), server.run_lock, server.plan
        record = server.receives if is_receive else server.sends
        if not (server.first_receive if is_receive else server.first_send):
            return new_reference(path.none)
        # These may run Python, and other threads: what follows does not, until the lock is taken.
        if not is_plain(path, tensor) or is_for_python(path):
            return leave_to_python(path)
        if describe_with(path.describe, tensor, described) != 0:
            return leave_to_python(path)
        first = server.first_receive if is_receive else server.first_send
        request = find_request(first, key, data(described))
        if not request or numel_of(described, server.dlpack_dtype) != server.numel or not is_free(lock):
            return new_reference(path.none)
        store(lock.entered, 1)
        num_bytes = server.num_bytes
        begin_message(ChannelFields(record), now(), server.dtype, num_bytes)
        prepare(plan, request, data(described))
        thread = release_gil()
        status = pass_over(plan)
        take_gil(thread)
        if status != DONE:
            handle = settle(path, record, status, tensor, key, 1 if is_receive else 0)
            store(lock.entered, 0)
            return handle
        end_request(plan, record, num_bytes)
        store(lock.entered, 0)
        if is_receive and not count_write(path, tensor):
            return 0
        return new_reference(tensor)

    return Function(repeat)


def wrappers(prefix: str) -> list[Wrapper]:
    """Return ``repeat_send(tensor, rule)`` and ``repeat_receive(tensor, key)`` for Python."""
    found = []
    for name, is_receive in (("repeat_send", False), ("repeat_receive", True)):
        wrapper = Wrapper(prefix + name, 2)
        words = [wrapper.builder.ptrtoint(wrapper.argument(index), WORD) for index in range(2)]
        server = wrapper.number(wrapper.function.args[0])
        result = wrapper.call(_entry(is_receive=is_receive), [server, *words])
        wrapper.builder.ret(wrapper.builder.inttoptr(result, BYTES))
        found.append(wrapper)
    return found
