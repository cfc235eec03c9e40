"""To a user of the backend `ipc`: collectives through staging areas, in memory of the host, equal references."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import contract
from helpers.ipc_ranks import COLLECTIVES, Call, Devices, HostDevice, HostDriver, Rig, ops_for
from helpers.outcomes import error_of

import torchmpi as mpi
from torchmpi import Config
from torchmpi.backends import rank_order
from torchmpi.backends.base import refusal
from torchmpi.backends.ipc import ipc_backend as ipc
from torchmpi.backends.ipc import staging_areas
from torchmpi.errors import MismatchError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]
# Of each kind of arithmetic one, in all lengths. GPUs have all dtypes, below and in test_collectives.py.
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.complex128, torch.int8, torch.uint16, torch.uint64, torch.bool),
    torch.float8_e5m2,
)


@pytest.fixture(params=("torch", "kernels", "both"))
def rig(request) -> Iterator[Rig]:
    """The backend with operations of torch, with kernels that machine code launches, or a mixture on the ranks."""
    uses_kernels = request.param == "kernels" or (request.param == "both" and mpi.rank() % 2 == 0)
    made = Rig(device=HostDriver if uses_kernels else HostDevice)
    yield made
    made.group.free()


# --- in memory of the host


@pytest.mark.ranks(2, 3)  # two make an allreduce in one round of copies, three in two
@pytest.mark.parametrize(
    ("rig", "dtype"),
    [*(("both", dtype) for dtype in DTYPES), ("torch", torch.float32), ("kernels", torch.float32)],
    indirect=["rig"],
    ids=str,
)
def test_every_collective_and_operation(rig, agree, dtype):
    """In a mixture, each of them computes on some rank."""
    for number, (collective, shape) in enumerate(itertools.product(COLLECTIVES, (*contract.SHAPES, (70_001,)))):
        ops = ops_for(collective, dtype)
        for op in ops if collective == "allreduce" else ops[number % max(1, len(ops)) :][:1]:
            Call(rig, collective, dtype, op, shape, number).check(rig, agree)


def test_tensors_larger_than_a_half(rig, agree):
    """Many chunks, in any order of collectives."""
    choice = random.Random(3)
    for number in range(6):
        numel = choice.choice((5, 100_000, 700_001, 1_500_000))
        Call(rig, choice.choice(COLLECTIVES), torch.float32, "sum", (numel,), number).check(rig, agree)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_single_elements_with_any_stride(rig, agree, collective):
    """Regression: a single element counts as contiguous whatever its stride, and torch refused to view it as bytes."""
    call = Call(rig, collective, torch.float32, "sum", (1,), 0)
    if call.tensor.numel() == 1:  # in an allgather each rank has another number of elements
        call.tensor = contract.strided(call.tensor)
        agree(call.tensor.stride() == (2,) and call.tensor.is_contiguous())
    call.check(rig, agree)


def test_inference_tensors(rig, agree):
    with torch.inference_mode():
        made_there = torch.ones(1000)
        rig.run("allreduce", torch.ones(3))  # makes the areas
    for _ in range(3):
        rig.run("allreduce", made_there)
    agree.equal(made_there.tolist(), [float(rig.size**3)] * 1000)
    # Regression: plans made in inference mode could not be used outside of it.
    agree.equal(rig.run("allreduce", torch.ones(3)).tolist(), [float(rig.size)] * 3)


def test_freeing_the_group_releases_everything(rig, agree):
    Call(rig, "allreduce", torch.float32, "sum", (1000,), 0).check(rig, agree)
    device = rig.staged.staging.device
    rig.staged.close()
    agree(rig.staged.staging is None and not device.segments)
    Call(rig, "allreduce", torch.float32, "sum", (1000,), 1).check(rig, agree)


class Poor(HostDevice):
    def allocate(self, num_bytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory")


class Closed(HostDevice):
    def open(self, handle: Any) -> torch.Tensor:
        raise RuntimeError("cudaIpcOpenMemHandle: invalid argument")


class Mistaken(HostDevice):
    def open(self, handle: Any) -> torch.Tensor:
        return torch.zeros_like(super().open(handle))


@pytest.mark.parametrize(
    ("kind", "failing", "reason"),
    [
        (Poor, -1, "CUDA out of memory"),
        pytest.param(Closed, 0, "cudaIpcOpenMemHandle", marks=pytest.mark.min_ranks(2)),
        pytest.param(Mistaken, 0, "other bytes were read", marks=pytest.mark.min_ranks(2)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_rank_that_cannot_share_memory_is_an_error_on_all(rig, agree, kind, failing, reason):
    failing %= rig.size
    device = (kind if rig.rank == failing else HostDevice)()
    rig.backend.make_device = lambda _: device
    message = error_of(rig.run, "allreduce", torch.ones(5))
    agree(f"rank {failing} of the group: " in message and reason in message, message)
    agree(rig.group.key in rig.backend.refused, "it would be chosen again")
    agree(not device.segments, "something is left")
    agree(reason in staging_areas.trial(rig.group.comm, device), "the trial at start did not notice")
    agree.equal(staging_areas.trial(rig.group.comm, HostDevice()), "")
    rig.staged.make_device = HostDevice
    Call(rig, "allreduce", torch.float32, "sum", (1000,), 0).check(rig, agree)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("check", (None, "off", "strict"))
def test_a_rank_that_fails_in_the_middle_ends_the_call_on_all_and_the_next_ones_are_right(agree, monkeypatch, check):
    rig = Rig(check=check)
    Call(rig, "allreduce", torch.float32, "sum", (1_000_000,), 0).check(rig, agree)
    message = ""
    with monkeypatch.context() as patch:
        if rig.rank == mpi.size() - 1:
            calls: list[int] = []

            def failing(parts: list[torch.Tensor], op: str) -> Any:
                combine = rank_order.combination(parts, op)

                def run(out: torch.Tensor, stream: int) -> None:
                    calls.append(1)
                    if len(calls) == 3:
                        raise RuntimeError("CUDA error: for the test.")
                    combine(out)

                return run

            patch.setattr(rig.staged.staging.device, "reduction", failing)
        try:
            rig.run("allreduce", torch.ones(2_000_000))
        except MismatchError as error:
            message = str(error)
            agree("has aborted it" in message, message)
        except RuntimeError as error:
            message = str(error)
            agree(rig.rank == mpi.size() - 1)
    agree(message, "no error on this rank")
    for collective in COLLECTIVES:
        Call(rig, collective, torch.float32, "sum", (600_000,), 1).check(rig, agree)
    rig.group.free()


def test_calls_raise_after_the_waits_of_the_device_were_released(agree):
    """A result might have been computed before the other ranks had filled their areas."""
    rig = Rig()
    rig.run("allreduce", torch.ones(3))
    rig.group.abort_device_work()
    message = error_of(rig.run, "allreduce", torch.ones(3))
    agree("cannot be used" in message or "has aborted" in message, message)
    rig.group.free()


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("collective", ("allgather", "allreduce"))
def test_a_tensor_on_another_device_is_an_error_on_all_ranks(rig, agree, collective):
    Call(rig, collective, torch.float32, "sum", (100,), 0).check(rig, agree)
    is_wrong = rig.rank == mpi.size() - 1
    message = error_of(rig.run, collective, torch.ones(5, device="meta" if is_wrong else "cpu"))
    agree(("Keep the tensors of a communicator on one GPU" if is_wrong else "aborted") in message, message)
    Call(rig, collective, torch.float32, "sum", (100,), 1).check(rig, agree)


@pytest.mark.min_ranks(2)
def test_different_calls_raise_on_all_ranks(rig, agree):
    if rig.group.log_board is None:
        pytest.skip("no shared memory here")
    rig.run("allreduce", torch.ones(3))
    # Two collectives in which all ranks wait: the root of a broadcast may return before the other ranks arrive.
    message = error_of(rig.run, "reduce_scatter" if rig.rank == 0 else "allreduce", torch.ones(50))
    agree(message, "no error on this rank")
    Call(rig, "reduce_scatter", torch.bfloat16, "avg", (300, 7), 1).check(rig, agree)


@pytest.mark.ranks(2)
@pytest.mark.min_ranks(2)
@pytest.mark.parametrize(("rig", "is_first"), [("torch", False), ("kernels", True)], indirect=["rig"])
def test_a_wait_for_a_missing_rank_ends_with_the_timeout(rig, agree, is_first):
    if rig.group.log_board is None:
        pytest.skip("no shared memory here")
    from mpi4py import MPI

    if not is_first:
        rig.run("allreduce", torch.ones(3))
    rig.group.timeout_seconds = 0.2
    late, message = rig.rank == 0, ""
    if not late:
        message = error_of(rig.run, "allreduce", torch.ones(4))
    MPI.COMM_WORLD.Barrier()
    rig.group.timeout_seconds = 0.0
    if late:
        message = error_of(rig.run, "allreduce", torch.ones(4))
    agree("aborted" in message or "timeout" in message, message)
    Call(rig, "allreduce", torch.float32, "sum", (100,), 1).check(rig, agree)


def test_abort_of_a_process_group_ends_a_wait_for_a_missing_rank(default_group, agree):
    """Regression: only waits in shared memory of the host ended, so that abort() never did."""
    aborted = dist.new_group()
    rig, message = Rig(group=aborted._group), ""
    rig.run("allreduce", torch.ones(3))
    if rig.rank == 0 and rig.size > 1:
        handle = rig.group.call_queue.submit(lambda: rig.run("allreduce", torch.ones(4)), "alone")
        aborted.abort()
        message = repr(handle.error)
    else:
        aborted.abort()
    agree("StallError" in message or rig.rank > 0 or rig.size == 1, message)


def test_groups_in_threads_do_not_mix(agree):
    import threading

    rigs = [Rig() for _ in range(2)]
    problems: list[str] = []

    def work(rig: Rig, seed: int) -> None:
        choice = random.Random(seed)
        try:
            for number in range(30):
                shape = (choice.choice((0, 3, 5000, 400_000)),)
                call = Call(rig, choice.choice(COLLECTIVES), torch.int32, "max", shape, number)
                result = rig.run(call.collective, call.tensor, root=call.root, op=call.op)
                problems.extend([] if contract.same_bits(result, call.expected) else [call.what])
        except Exception as error:
            problems.append(repr(error))

    # The first call of a group exchanges handles by MPI, which some libraries let only one thread do at a time.
    for rig in rigs:
        rig.run("allreduce", torch.ones(1))
    threads = [threading.Thread(target=work, args=(rig, seed)) for seed, rig in enumerate(rigs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    agree(not problems, "; ".join(problems))
    for rig in rigs:
        rig.group.free()


def test_reasons_why_ipc_is_unavailable(rig, agree, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    size, group, config = rig.size, rig.group, Config(staging_bytes=1 << 20)

    def reason(devices: Any = None, collective: str = "allreduce", device: str = "cuda", **settings: Any) -> str | None:
        made = ipc.IpcBackend(settings.pop("config", config), devices or Devices(size), **settings)
        return refusal(made, collective, device, group)

    agree.equal(reason(), None)
    agree.equal(reason(device="cpu"), "it takes CUDA tensors only")
    agree("it has no alltoall, only" in str(reason(collective="alltoall")))
    agree.equal(reason(config=Config(staging_bytes=0)), "it is switched off (staging_bytes=0)")
    agree.equal(reason(problem="no IPC in this container"), "no IPC in this container")
    agree("has no GPU" in str(reason(Devices(size, uuids=("GPU-0",) * (size - 1) + ("",)))))
    if size > 1:
        agree.equal(reason(Devices(size, apart=(0, 1))), "the GPUs of ranks 0 and 1 cannot reach each other")
    several = Devices(size)
    several.hosts = tuple(range(size))
    agree.equal(reason(several), "its ranks are on several hosts" if size > 1 else None)


class Late(HostDriver):
    """A device that enqueues its copies late, so that the others continue in Python."""

    def launch(self, kernel: int, *arguments: int) -> int:
        time.sleep(0.01)
        return super().launch(kernel, *arguments)


class Refusing(HostDriver):
    """A driver that refuses kernels from the third one on."""

    def launch(self, kernel: int, *arguments: int) -> int:
        return 700 if self.num_sums >= 2 else super().launch(kernel, *arguments)


def test_short_allreduces_run_in_one_call_of_machine_code(agree):
    """Also between other calls, from which they leave out the last publication of a stage."""
    rig = Rig(device=HostDriver)
    choice = random.Random(5)
    for number in range(60):
        collective = choice.choice(("allreduce", "allreduce", *COLLECTIVES))
        shape = (choice.choice((0, 1, 5, 1000, 20_000, 300_000)),)
        Call(rig, collective, choice.choice((torch.float32, torch.bfloat16, torch.int32)), "sum", shape, number).check(
            rig, agree
        )
    if rig.size > 1:
        assert rig.staged.staging is not None
        device = rig.staged.staging.device
        rig.run("allreduce", torch.ones(3))
        before = device.num_sums
        for _ in range(100):  # longer than the ring of the call log
            rig.run("allreduce", torch.ones(3))
        agree.equal(device.num_sums, before + 100)
    rig.group.free()


def test_ranks_that_are_late_by_turns(agree):
    rig = Rig(device=Late if mpi.rank() % 2 else HostDriver)
    for number in range(20):
        Call(rig, "allreduce", torch.float32, "avg", (1000,), number).check(rig, agree)
    rig.group.free()


@pytest.mark.min_ranks(2)
def test_an_error_of_the_driver_ends_the_call_on_all_ranks_and_the_next_ones_are_right(agree):
    rig = Rig(device=Refusing if mpi.rank() == mpi.size() - 1 else HostDriver)
    device, messages = None, []
    for _ in range(5):
        try:
            rig.run("allreduce", torch.ones(10))
        except (RuntimeError, MismatchError) as error:
            messages.append(str(error))
        device = device or rig.staged.staging.device
    is_last = rig.rank == rig.size - 1
    agree(not is_last or "cannot enqueue an allreduce: error 700" in messages[0], str(messages))
    agree(is_last or all("has aborted" in message for message in messages), str(messages))
    device.num_sums = -100
    for number in range(3):
        for collective in COLLECTIVES:
            Call(rig, collective, torch.float32, "sum", (1000,), number).check(rig, agree)
    rig.group.free()


@pytest.mark.min_ranks(2)
def test_a_short_allreduce_that_is_interrupted_keeps_its_half_for_the_others(agree, monkeypatch):
    """Regression: the half counted as free, although other ranks may still read it, and the next call wrote to it."""
    from mpi4py import MPI

    rig = Rig(device=HostDriver)
    for _ in range(3):
        rig.run("allreduce", torch.ones(3))
    sync, message = rig.staged.sync, ""
    with monkeypatch.context() as patch:
        if rig.rank == 0:

            def interrupted(ranks: Any, number: int) -> None:
                raise TimeoutError("for the test")

            patch.setattr(sync, "wait_for", interrupted)
        else:
            MPI.COMM_WORLD.Recv(torch.zeros(1).numpy(), 0)  # until rank 0 has ended
        message = error_of(rig.run, "allreduce", torch.ones(3))
        if rig.rank == 0:
            agree.equal(sync.is_free[sync.seq & 1], False)
            for other in range(1, rig.size):
                MPI.COMM_WORLD.Send(torch.zeros(1).numpy(), other)
    agree(rig.rank != 0 or "for the test" in message, message)
    for number in range(4):
        for collective in COLLECTIVES:
            Call(rig, collective, torch.float32, "sum", (1000,), number).check(rig, agree)
    rig.group.free()
