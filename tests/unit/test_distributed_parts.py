"""To a user of torch.distributed: what the backend decides and converts without another process is right."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.outcomes import error_of
from hypothesis import given
from hypothesis import strategies as st

from torchmpi.communicators.handle import Handle
from torchmpi.distributed import arguments, membership, registration, rendezvous, rows, torch_names, work
from torchmpi.errors import ArgumentError, LaunchError, StallError
from torchmpi.launch import tcp_store

ReduceOp = dist.ReduceOp


# --- works ------------------------------------------------------------------------------------------------------------


def pending(limit_seconds: float = 0.0):
    handle, outputs = Handle("a call"), [torch.ones(2)]
    return handle, outputs, work.PendingWork(handle, outputs, work.GroupWorks(), limit_seconds)


def test_a_work_before_and_after_its_call_has_ended():
    handle, outputs, pending_work = pending()
    assert not pending_work.is_completed() and not pending_work.is_success() and pending_work.exception() is None
    handle.end(None)
    assert pending_work.is_completed() and pending_work.is_success() and pending_work.wait()
    assert pending_work.result()[0] is outputs[0]


def test_a_work_of_a_call_that_failed():
    handle, _, pending_work = pending()
    future = pending_work.get_future()
    chained = future.then(lambda future: future.value())
    handle.end(error=ValueError("bad sample"))
    assert pending_work.is_completed() and not pending_work.is_success()
    assert isinstance(pending_work.exception(), ValueError)
    with pytest.raises(ValueError, match="bad sample"):
        pending_work.wait()
    # Futures raise an error of C++, which has no ValueError, and must not return a value.
    for failed in (future, chained, pending_work.get_future()):
        assert failed.done()
        with pytest.raises(Exception, match="bad sample"):
            failed.wait()


def test_a_wait_that_takes_too_long_raises_and_may_be_repeated():
    handle, _, pending_work = pending(limit_seconds=0.01)
    for timeout in (None, timedelta(0), timedelta(milliseconds=5)):
        with pytest.raises(StallError):
            pending_work.wait(timeout)
    handle.end(None)
    assert pending_work.wait()


def test_the_future_of_a_work_is_one_and_has_its_tensors():
    handle, outputs, pending_work = pending()
    early = pending_work.get_future()
    seen: list[torch.Tensor] = []
    early.add_done_callback(lambda future: seen.extend(future.value()))
    assert not early.done()
    handle.end(None)
    assert seen[0] is outputs[0] and early.wait()[0] is outputs[0]
    late = work.PendingWork(handle, outputs, work.GroupWorks()).get_future()
    assert late.done() and late.value()[0] is outputs[0]


def test_futures_requested_while_the_call_ends():
    """Two threads request futures at the same time: every future completes, and callbacks run once."""
    for _ in range(300):
        handle, _, pending_work = pending()
        called: list[int] = []
        barrier = threading.Barrier(2)

        def ask(pending_work=pending_work, called=called, barrier=barrier):
            barrier.wait()
            pending_work.get_future().add_done_callback(lambda future: called.append(1))

        thread = threading.Thread(target=ask)
        thread.start()
        barrier.wait()
        handle.end(None)
        thread.join()
        pending_work.get_future().wait()
        assert called == [1]


def test_the_work_of_a_call_that_had_ended():
    ended = work.COMPLETED
    assert ended.wait() and ended.is_completed() and ended.is_success() and ended.exception() is None
    assert ended.get_future().done()


# --- reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dtype", "name"),
    [
        (ReduceOp.SUM, torch.float32, "sum"),
        (ReduceOp.AVG, torch.bfloat16, "avg"),
        (ReduceOp.PRODUCT, torch.int8, "prod"),
        (ReduceOp.MIN, torch.float64, "min"),
        (ReduceOp.MAX, torch.bool, "max"),
        (ReduceOp.BAND, torch.int32, "band"),
        (ReduceOp.BOR, torch.uint8, "bor"),
        (ReduceOp.BXOR, torch.bool, "bxor"),
        (ReduceOp.SUM, torch.bool, "lor"),
        (ReduceOp.PRODUCT, torch.bool, "land"),
    ],
)
def test_every_operation_has_a_name(op, dtype, name):
    assert arguments.op_name(ReduceOp(op), dtype) == name


def test_the_factor_of_a_sum():
    half = dist._make_nccl_premul_sum(0.5)
    tensor = torch.full((3,), 4.0, requires_grad=True)
    assert arguments.is_scaled(half) and not arguments.is_scaled(ReduceOp(ReduceOp.SUM))
    scaled = arguments.scaled(tensor, half)
    assert scaled.tolist() == [2.0] * 3 and not scaled.requires_grad and tensor.tolist() == [4.0] * 3
    with pytest.raises(ArgumentError, match="floating point"):
        arguments.op_name(half, torch.int32)
    factor = dist._make_nccl_premul_sum(torch.tensor([2.0]))
    for tensor in (torch.ones((), dtype=torch.float16), torch.ones(3, dtype=torch.bfloat16)):
        scaled = arguments.scaled(tensor, factor)
        assert torch.equal(scaled, 2 * tensor) and scaled.dtype is tensor.dtype, "a tensor as factor"


# --- lists as rows ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=0, max_size=3), st.booleans(), st.booleans())
def test_lists_become_rows_and_back(num_parts, shape, is_whole, is_transposed):
    """Each part receives its row, for parts in any memory, and no other memory is written."""
    whole = torch.zeros((num_parts + 2, *shape))
    parts = list(whole[1:-1].unbind()) if is_whole else [torch.zeros(shape) for _ in range(num_parts)]
    if is_transposed:
        order = tuple(reversed(range(len(shape))))
        parts = [torch.zeros(tuple(reversed(shape))).permute(order) for _ in parts]
    target = rows.result_rows(parts, num_parts)
    numel = parts[0].numel()
    assert target.shape == (num_parts, numel)
    values = torch.arange(1.0, num_parts * numel + 1).view(num_parts, numel)
    target.copy_(values)
    rows.deliver(target, parts)
    for part, expected in zip(parts, values, strict=True):
        assert torch.equal(part.reshape(-1), expected)
    assert not whole[0].any() and not whole[-1].any(), "written beside the parts"
    if is_whole and not is_transposed and numel:
        assert target.data_ptr() == parts[0].data_ptr(), "copied where the memory itself would do"


def test_parts_out_of_order_or_with_gaps_are_not_one_tensor():
    whole = torch.zeros(4, 3)
    for parts in ([whole[1], whole[0]], [whole[0], whole[2]], [whole[0], whole[0]], [whole[2], whole[3], whole[0]]):
        assert rows.result_rows(parts, len(parts)).data_ptr() != parts[0].data_ptr()
    first, second = torch.zeros(3), torch.zeros(3)
    beyond = [first, torch.as_strided(first, (3,), (1,)), second]
    assert rows.result_rows(beyond, 3).data_ptr() != first.data_ptr()


def test_results_are_received_into_contiguous_memory_directly():
    direct, strided = torch.zeros(2, 3), torch.zeros(3, 2).t()
    assert rows.result_rows([direct], 2).data_ptr() == direct.data_ptr()
    target = rows.result_rows([strided], 2)
    assert target.data_ptr() != strided.data_ptr()
    target.copy_(torch.arange(6.0).view(2, 3))
    rows.deliver(target, [strided])
    assert torch.equal(strided, torch.arange(6.0).view(2, 3))


def test_one_tensor_per_rank():
    tensor = torch.ones(1)
    assert arguments.single([tensor]) is tensor and arguments.single(tensor) is tensor
    for wrong in ([], [tensor, tensor]):
        with pytest.raises(ArgumentError, match=f"{len(wrong)} tensors"):
            arguments.single(wrong)


# --- rendezvous and registration --------------------------------------------------------------------------------------


def test_the_numbers_in_a_url():
    assert rendezvous._numbers("env://?rank=3&world_size=8") == {"rank": 3, "world_size": 8}
    assert rendezvous._numbers("mpi://") == {}
    rendezvous._check_numbers("env://?rank=-1&world_size=-1", 2, 4)
    rendezvous._check_numbers("env://?rank=2&world_size=4", 2, 4)
    for url in ("env://?rank=3&world_size=4", "env://?rank=2&world_size=5"):
        with pytest.raises(ArgumentError, match="rank 2 of 4"):
            rendezvous._check_numbers(url, 2, 4)


def test_the_call_of_the_tutorial_for_mpi_without_a_launcher(monkeypatch):
    url, given = "env://?rank=0&use_libuv=0&world_size=0", {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    for name in (*given, "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    _store, rank, size = next(rendezvous.through_environment(lambda url: iter([url]), url))
    assert (rank, size) == (0, 1), "alone"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert next(rendezvous.through_environment(lambda url: iter([url]), url)) == "env://?use_libuv=0", "torchrun"


@pytest.mark.parametrize("loopback", ("127.0.0.1", "::1"))
def test_addresses_that_are_offered_and_reached(loopback, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    assert not {"127.0.0.1", "::1"} & set(rendezvous._own_addresses())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert loopback in rendezvous._own_addresses()
    listener = rendezvous._listen(loopback)
    assert listener is not None
    with listener:
        assert rendezvous._reaches(*listener.getsockname()[:2])
    assert rendezvous._listen("192.0.2.77") is None, "an address that no host has"


def test_registering_twice_is_harmless():
    before = dist.Backend._plugins.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registration.register()
        first = dist.Backend._plugins["TORCHMPI"]
        registration.register()
    assert dist.Backend._plugins["TORCHMPI"] is first
    assert set(dist.Backend._plugins) == {*before, "TORCHMPI"}


def test_a_failure_to_register_is_a_warning(monkeypatch):
    def fail() -> None:
        raise ImportError("no such private name")

    monkeypatch.setattr(registration, "_register", fail)
    with pytest.warns(UserWarning, match="no such private name"):
        registration.register()


def test_untested_versions_of_torch_give_a_warning(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in torch_names.TESTED:
            monkeypatch.setattr(torch, "__version__", f"{version}.7+cu130")
            torch_names.check_version()
    monkeypatch.setattr(torch, "__version__", "3.1.0")
    with pytest.warns(UserWarning, match=rf"tested with torch {torch_names.TESTED[0]}, .*this is 3\.1\.0"):
        torch_names.check_version()


def test_torch_2_6_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0+debian")
    with pytest.raises(LaunchError, match=r"needs torch 2\.7 or newer, and this is 2\.6\.0\+debian.*torchmpi\.nn"):
        torch_names.check_version()


def test_a_store_where_torch_was_built_without_libuv(monkeypatch):
    """Debian's builds raise if the store is opened with torch's default."""
    store = tcp_store.TCPStore

    def without_libuv(*arguments: object, use_libuv: bool = True, **options: object) -> object:
        if use_libuv:
            raise RuntimeError("use_libuv was requested but PyTorch was build without libuv support")
        return store(*arguments, use_libuv=False, **options)

    monkeypatch.setattr(tcp_store, "TCPStore", without_libuv)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, own_end = listener.getsockname()[1], os.dup(listener.fileno())
    minute = timedelta(minutes=1)
    server = tcp_store.open_tcp_store("127.0.0.1", port, 2, True, minute, master_listen_fd=own_end)
    client = tcp_store.open_tcp_store("127.0.0.1", port, 2, False, minute)
    server.set("key", "value")
    assert client.get("key") == b"value"


def test_a_call_from_a_thread_without_python_frames():
    """Regression: with GPUs, DDP's reducer calls from threads of autograd, where the caller has no caller in Python."""
    answers = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def allreduce(_: object) -> None:
        answers.append(torch_names.is_bucket_of_ddp(torch.ones(3)))

    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, allreduce, None) == 0
    libc.pthread_join(thread, None)
    assert answers == [False]


def test_dynamo_excludes_the_package_once_it_is_loaded():
    """Loading torch._dynamo takes a second, which must not be added to `import torch`."""
    known = set(sys.meta_path)
    torch_names.keep_dynamo_out("hypothesis")  # any package
    rules = importlib.import_module("torch._dynamo.trace_rules")
    assert any(folder.rstrip("/").endswith("/hypothesis") for folder in rules.SKIP_DIRS)
    assert set(sys.meta_path) <= known, "the finder stays behind"


def test_a_timeout_of_zero_is_no_limit_when_ranks_connect(monkeypatch):
    """As with gloo; such a group of torchmpi was not created, since no other rank had connected at once."""
    seconds: list[float] = []
    monkeypatch.setattr(
        "torchmpi.launch.launcherless.connect", lambda *_, timeout_seconds: seconds.append(timeout_seconds)
    )
    monkeypatch.setattr(membership.mpi_library, "adopt", lambda stand_in: None)
    options = torch_names.BackendOptions()
    options.store, options.group_rank, options.group_size = torch_names.HashStore(), 0, 2
    for options.timeout in (timedelta(0), timedelta(seconds=5)):
        membership.Membership.__new__(membership.Membership)._connect(options)
    assert seconds == [1800, 5]


def test_threads_of_one_process_are_not_ranks():
    """They connected to each other, and waited for ever. Here the first one waits for the second until its limit."""
    store = torch_names.HashStore()

    def join(rank: int) -> str:
        options = torch_names.BackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, 2
        options.timeout, options.global_ranks_in_group = timedelta(seconds=0.5), []
        return error_of(membership.current, options)

    with ThreadPoolExecutor(2) as threads:
        late, refused = sorted(threads.map(join, range(2)), reverse=True)
    assert late.startswith("LaunchError") and refused.startswith("ArgumentError"), (late, refused)
    assert "start a process for each rank" in refused
