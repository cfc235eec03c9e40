"""Collectives through staging areas: in memory of the host, and on GPUs."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchmpi as mpi
from torchmpi import Config
from torchmpi.backends import rank_order
from torchmpi.backends.base import announced
from torchmpi.backends.ipc import ipc_backend as ipc
from torchmpi.backends.ipc import staging_areas
from torchmpi.collectives import prepared
from torchmpi.communicators.call_log import call_code
from torchmpi.communicators.group import Group
from torchmpi.errors import BackendUnavailableError, DeviceError, MismatchError, StallError
from torchmpi.session import runtime
from torchmpi.tensors import dtypes

sys.path.insert(0, str(Path(__file__).parent))
import contract
from ipc_rig import HostDevice, HostDriver

pytestmark = pytest.mark.usefixtures("world")
COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
REDUCING = ("allreduce", "reduce", "reduce_scatter")
# Of each kind of arithmetic one, in all lengths. GPUs have all dtypes, below and in test_collectives.py.
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.complex128, torch.int8, torch.uint16, torch.uint64, torch.bool),
    torch.float8_e5m2,
)


def ops_for(collective: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The operations of a collective; one that does not reduce is called once."""
    return contract.OPS_OF.get(dtype, ()) if collective in REDUCING else ("sum",)


class Devices:
    """All ranks of a host on one GPU."""

    def __init__(self, size: int, *, uuids: tuple[str, ...] = (), apart: tuple[int, int] = (-1, -1)) -> None:
        self.uuids, self.hosts, self._apart = uuids or ("GPU-0",) * size, (0,) * size, apart

    def reaches(self, a: int, b: int) -> bool:
        return (a, b) != self._apart


class Rig:
    """The backend on a group of its own, over memory of the host."""

    def __init__(
        self,
        *,
        backend: Any = None,
        check: str | None = None,
        group: Group | None = None,
        device: type[HostDevice] = HostDevice,
    ) -> None:
        world = mpi.communicator().intra
        self.group = group or Group(world.comm.Dup(), "staged", world.world_ranks, world.context, check=check)
        self.rank, self.size = self.group.rank, self.group.size
        self.backend = backend
        if backend is None:
            self.backend = ipc.IpcBackend(Config(staging_bytes=1 << 20), Devices(self.size))
            self.backend.make_device = device
        self._plans: dict[Any, prepared.PreparedPlan] = {}

    def run(self, collective: str, tensor: torch.Tensor, *, root: int = 0, op: str = "sum") -> torch.Tensor:
        op_of_collective = op if collective in REDUCING else None
        key = collective, tensor.dtype, op_of_collective
        if key not in self._plans:
            code = call_code(collective, op_of_collective, dtypes.info(tensor.dtype).code)
            operation = announced(self.group, self.backend.bind(self.group, collective, tensor.dtype, op_of_collective))
            self._plans[key] = prepared.PreparedPlan(collective, code, operation)
        result: torch.Tensor = self.group.call(self._plans[key], tensor, None, root)
        return result

    @property
    def staged(self) -> ipc.StagedGroup:
        return next(item for item in self.group.attachments if isinstance(item, ipc.StagedGroup))


@pytest.fixture(params=("torch", "kernels", "both"))
def rig(request) -> Iterator[Rig]:
    """The backend with operations of torch, with kernels that machine code launches, or a mixture on the ranks."""
    uses_kernels = request.param == "kernels" or (request.param == "both" and mpi.rank() % 2 == 0)
    made = Rig(device=HostDriver if uses_kernels else HostDevice)
    yield made
    made.group.free()


class Call:
    """A call with its expected result."""

    def __init__(
        self, rig: Rig, collective: str, dtype: torch.dtype, op: str, shape: tuple[int, ...], root: int
    ) -> None:
        self.collective, self.dtype, self.op, self.root = collective, dtype, op, root % rig.size
        self.what = f"{collective} {op} {dtype} {shape} root {self.root}"
        rank, size = rig.rank, rig.size
        shapes = [shape] * size
        if collective == "allgather" and shape:
            shapes = [((shape[0] * (r + root)) % (2 * shape[0] + 1), *shape[1:]) for r in range(size)]
        inputs = [contract.values(shape, dtype, r, seed=root) for r, shape in enumerate(shapes)]
        self.tensor = inputs[rank].clone()
        self.expected = inputs[rank]
        if collective == "broadcast":
            self.expected = inputs[self.root]
        elif collective == "allgather":
            self.expected = torch.cat([part.reshape(1) if part.dim() == 0 else part for part in inputs])
        elif collective == "reduce_scatter":
            self.expected = contract.rows(contract.reduced(inputs, op), rank, size)
        elif collective == "allreduce" or rank == self.root:
            self.expected = contract.reduced(inputs, op)

    def check(self, rig: Rig, agree: Any) -> None:
        agree.bits(rig.run(self.collective, self.tensor, root=self.root, op=self.op), self.expected, self.what)


# --- in memory of the host


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective_and_operation(rig, agree, dtype):
    for number, (collective, shape) in enumerate(itertools.product(COLLECTIVES, (*contract.SHAPES, (70_001,)))):
        ops = ops_for(collective, dtype)
        for op in ops if collective == "allreduce" else ops[number % max(1, len(ops)) :][:1]:
            Call(rig, collective, dtype, op, shape, number).check(rig, agree)


def test_tensors_larger_than_a_half(rig, agree):
    """Many chunks, in any order of collectives."""
    choice = random.Random(3)
    for number in range(24):
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
    [(Poor, -1, "CUDA out of memory"), (Closed, 0, "cudaIpcOpenMemHandle"), (Mistaken, 0, "other bytes were read")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_rank_that_cannot_share_memory_is_an_error_on_all(rig, agree, kind, failing, reason):
    failing %= rig.size
    if rig.size == 1 and kind is not Poor:
        return
    device = (kind if rig.rank == failing else HostDevice)()
    rig.backend.make_device = lambda _: device
    message = ""
    try:
        rig.run("allreduce", torch.ones(5))
    except BackendUnavailableError as error:
        message = str(error)
    agree(f"rank {failing} of the group: " in message and reason in message, message)
    agree(rig.group.key in rig.backend.refused, "it would be chosen again")
    agree(not device.segments, "something is left")
    agree(reason in staging_areas.trial(rig.group.comm, device), "the trial at start did not notice")
    agree.equal(staging_areas.trial(rig.group.comm, HostDevice()), "")
    rig.backend.make_device = HostDevice
    Call(rig, "allreduce", torch.float32, "sum", (1000,), 0).check(rig, agree)


@pytest.mark.parametrize("check", (None, "off", "strict"))
def test_a_rank_that_fails_in_the_middle_ends_the_call_on_all_and_the_next_ones_are_right(agree, monkeypatch, check):
    if mpi.size() == 1:
        return
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
    message = ""
    try:
        rig.run("allreduce", torch.ones(3))
    except (StallError, MismatchError) as error:  # of this rank, or because another one has it
        message = str(error)
    agree("cannot be used" in message or "has aborted" in message, message)
    rig.group.free()


@pytest.mark.parametrize("collective", ("allgather", "allreduce"))
def test_a_tensor_on_another_device_is_an_error_on_all_ranks(rig, agree, collective):
    if mpi.size() == 1:
        return
    Call(rig, collective, torch.float32, "sum", (100,), 0).check(rig, agree)
    is_wrong, message = rig.rank == mpi.size() - 1, ""
    try:
        rig.run(collective, torch.ones(5, device="meta" if is_wrong else "cpu"))
    except (DeviceError, MismatchError) as error:
        message = str(error)
    agree(("Keep the tensors of a communicator on one GPU" if is_wrong else "aborted") in message, message)
    Call(rig, collective, torch.float32, "sum", (100,), 1).check(rig, agree)


def test_different_calls_raise_on_all_ranks(rig, agree):
    if mpi.size() == 1 or rig.group.log_board is None:
        return
    rig.run("allreduce", torch.ones(3))
    message = ""
    try:
        # Two collectives in which all ranks wait: the root of a broadcast may return before the other ranks arrive.
        rig.run("reduce_scatter" if rig.rank == 0 else "allreduce", torch.ones(50))
    except MismatchError as error:
        message = str(error)
    agree(message, "no error on this rank")
    Call(rig, "reduce_scatter", torch.bfloat16, "avg", (300, 7), 1).check(rig, agree)


@pytest.mark.parametrize("is_first", (False, True))
def test_a_wait_for_a_missing_rank_ends_with_the_timeout(rig, agree, is_first):
    if mpi.size() == 1 or rig.group.log_board is None:
        return
    from mpi4py import MPI

    if not is_first:
        rig.run("allreduce", torch.ones(3))
    rig.group.timeout_seconds = 1.0
    late, message = rig.rank == 0, ""
    if not late:
        try:
            rig.run("allreduce", torch.ones(4))
        except (StallError, MismatchError) as error:
            message = str(error)
    MPI.COMM_WORLD.Barrier()
    rig.group.timeout_seconds = 0.0
    if late:
        try:
            rig.run("allreduce", torch.ones(4))
        except MismatchError as error:
            message = str(error)
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
        return made.why_not(collective, device, group)

    agree.equal(reason(), None)
    agree.equal(reason(device="cpu"), "it is for CUDA tensors")
    agree.equal(reason(collective="alltoall"), "it has no alltoall")
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


def test_an_error_of_the_driver_ends_the_call_on_all_ranks_and_the_next_ones_are_right(agree):
    if mpi.size() == 1:
        return
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


def test_a_short_allreduce_that_is_interrupted_keeps_its_half_for_the_others(agree, monkeypatch):
    """Regression: the half counted as free, although other ranks may still read it, and the next call wrote to it."""
    if mpi.size() == 1:
        return
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
        try:
            rig.run("allreduce", torch.ones(3))
        except (TimeoutError, MismatchError) as error:
            message = str(error)
        if rig.rank == 0:
            agree.equal(sync.is_free[sync.seq & 1], False)
            for other in range(1, rig.size):
                MPI.COMM_WORLD.Send(torch.zeros(1).numpy(), other)
    agree(rig.rank != 0 or "for the test" in message, message)
    for number in range(4):
        for collective in COLLECTIVES:
            Call(rig, collective, torch.float32, "sum", (1000,), number).check(rig, agree)
    rig.group.free()


# --- on a GPU


def gpu_group() -> None:
    """Skips where the backend cannot be had, with the reason."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU: this torch or this host has no CUDA")
    try:
        mpi.broadcast(torch.ones(1, device=mpi.device()), backend="ipc")
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def on_gpu(call: Call, **options: Any) -> torch.Tensor:
    options |= {"op": call.op} if call.collective in REDUCING else {}
    options |= {"root": call.root} if call.collective in ("reduce", "broadcast") else {}
    result: torch.Tensor = getattr(mpi, call.collective)(call.tensor.to(mpi.device()), backend="ipc", **options)
    return result


class World:
    """Rank and size, for Call."""

    def __init__(self) -> None:
        self.rank, self.size = mpi.rank(), mpi.size()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", contract.MOVABLE, ids=str)
def test_every_collective_and_operation_on_the_gpu(agree, dtype):
    gpu_group()
    for number, (collective, shape) in enumerate(itertools.product(COLLECTIVES, (*contract.SHAPES, (300_001,)))):
        for op in ops_for(collective, dtype):
            call = Call(World(), collective, dtype, op, shape, number)
            agree.bits(on_gpu(call).cpu(), call.expected, call.what)


FLOATS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
"""The dtypes for which there are kernels, with integers of the same size."""


@pytest.mark.gpu
@pytest.mark.parametrize("op", ("sum", "avg"))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernels_give_the_bits_of_torch_on_the_gpu(agree, dtype, op):
    """All bits at random: infinities, NaN, subnormal numbers."""
    gpu_group()
    if mpi.size() == 1:
        return
    integers, choice = FLOATS[dtype], torch.Generator().manual_seed(3)
    limits = torch.iinfo(integers)
    for numel in (1, 1000, 70_001, 5_000_011):
        shape = mpi.size(), numel
        bits = torch.randint(limits.min, limits.max, shape, generator=choice, dtype=integers).to(mpi.device())
        expected = torch.empty(numel, dtype=dtype, device=mpi.device())
        rank_order.combine(list(bits.view(dtype)), op, expected)
        result = mpi.allreduce(bits[mpi.rank()].view(dtype).clone(), op=op, backend="ipc")
        is_number = ~expected.isnan()
        agree(torch.equal(result.isnan(), ~is_number), f"{numel}: NaN elsewhere")
        same = torch.equal(result.view(integers)[is_number], expected.view(integers)[is_number])
        agree(same, f"{numel}: other bits")


@pytest.mark.gpu
def test_short_allreduces_run_in_one_call_of_machine_code_on_the_gpu(agree, monkeypatch):
    gpu_group()
    if mpi.size() == 1:
        return
    tensor = torch.ones(1000, device=mpi.device())
    for _ in range(3):
        mpi.allreduce(tensor, backend="ipc")
    longer: list[int] = []
    monkeypatch.setattr(ipc.StagedGroup, "run", lambda *arguments, **options: longer.append(1))
    for _ in range(100):
        mpi.allreduce(tensor, op="avg", backend="ipc")
    agree(not longer, f"{len(longer)} calls took the longer way")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.uint8), ids=str)
def test_outputs_at_any_address_on_the_gpu(agree, dtype):
    gpu_group()
    for first, numel in itertools.product((0, 1, 3, 7), (1, 64, 70_000)):
        call = Call(World(), "allreduce", dtype, "sum", (numel,), first)
        room = torch.full((numel + 16,), 9, device=mpi.device()).to(dtype)
        before = room.clone()
        room[first : first + numel] = call.tensor.to(room.device)
        mpi.allreduce(room[first : first + numel], backend="ipc")
        agree.bits(room[first : first + numel].cpu(), call.expected, f"{first} {numel}")
        room[first : first + numel] = before[first : first + numel]
        agree(torch.equal(room, before), "something besides the result was written")


@pytest.mark.gpu
def test_many_chunks_on_the_gpu(agree):
    gpu_group()
    numel = 40_000_003  # 160 MB, several halves
    ours = torch.full((numel,), float(mpi.rank() + 1), device=mpi.device())
    ours[::1000] += torch.arange(numel, device=ours.device)[::1000] % 7
    expected = mpi.size() * (torch.arange(numel, device=ours.device)[::1000] % 7) + sum(range(1, mpi.size() + 1))
    result = mpi.allreduce(ours.clone(), backend="ipc")
    agree.equal(result[::1000].cpu(), expected.float().cpu())
    agree.equal(result[1].item(), float(sum(range(1, mpi.size() + 1))))
    sent = mpi.broadcast(ours.clone(), mpi.size() - 1, backend="ipc")
    agree.equal(sent[1].item(), float(mpi.size()))
    gathered = mpi.allgather(ours[: 10_000_002 + mpi.rank()], backend="ipc")
    agree.equal(gathered[-1].item(), float(mpi.size()))


@pytest.mark.gpu
def test_calls_are_ordered_with_the_streams_around_them_on_the_gpu(agree):
    """The host does not wait for the device: the input of a call may not be computed yet, on any current stream."""
    gpu_group()
    numel, rounds = 3_000_000, 20
    results = []
    for number in range(rounds):
        stream = torch.cuda.Stream() if number % 3 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000 if mpi.rank() == number % mpi.size() else 1000)
            tensor = torch.full((numel,), float(mpi.rank() + number), device=mpi.device())
            mpi.allreduce(tensor, backend="ipc")
            results.append((tensor, tensor.clone()))
            tensor.fill_(-1.0)
        torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    for number, (_, result) in enumerate(results):
        expected = float(sum(range(mpi.size())) + number * mpi.size())
        agree(bool((result == expected).all()), f"round {number}: {result[:3]} instead of {expected}")


@pytest.mark.gpu
def test_a_capture_is_refused_and_the_next_calls_are_right_on_the_gpu(agree):
    gpu_group()
    tensor = torch.ones(1000, device=mpi.device())

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            mpi.allreduce(tensor, backend="ipc")

    agree.raises(DeviceError, capture, "cannot be captured in a CUDA graph")
    mpi.barrier()
    for _ in range(3):
        mpi.allreduce(tensor, backend="ipc")
    agree.equal(tensor.tolist(), [float(mpi.size() ** 3)] * 1000)


@pytest.mark.gpu
def test_the_first_allreduce_of_a_communicator_in_a_capture_leaves_no_memory_of_the_graph_on_the_gpu(agree):
    gpu_group()
    rig = Rig(backend=runtime.current().selector.backends["ipc"])
    tensor = torch.ones(1000, device=mpi.device())
    rig.run("broadcast", tensor)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            rig.run("allreduce", tensor)

    agree.raises(DeviceError, capture, "cannot be captured in a CUDA graph")
    for _ in range(4):
        rig.run("allreduce", tensor)
    agree.equal(tensor.tolist(), [float(mpi.size() ** 4)] * 1000)
    rig.group.free()


@pytest.mark.gpu
def test_a_stream_that_waits_for_a_lost_rank_is_released_on_the_gpu(agree):
    gpu_group()
    if mpi.size() == 1:
        return
    from mpi4py import MPI

    rig = Rig(backend=runtime.current().selector.backends["ipc"])
    tensor = torch.ones(1000, device=mpi.device())
    rig.run("allreduce", tensor)
    torch.cuda.synchronize()
    staging, late = rig.staged.staging, rig.rank == 0
    number = 1 << 40
    if not late:
        staging.operations(awaits=(0,))(staging.device.current_stream(), number)
        agree(not torch.cuda.current_stream().query(), "the stream does not wait")
    MPI.COMM_WORLD.Barrier()
    if not late:
        rig.group.abort_device_work()
    rig.group.free()


@pytest.mark.gpu
def test_many_communicators_in_different_orders_on_the_gpu(agree):
    """Streams that share a queue of the hardware must not wait for work that is not enqueued yet."""
    gpu_group()
    rigs = [Rig(backend=runtime.current().selector.backends["ipc"]) for _ in range(12)]
    tensors = [torch.full((10_000,), float(mpi.rank() + 1), device=mpi.device()) for _ in rigs]
    for rig, tensor in zip(rigs, tensors, strict=True):
        rig.run("allreduce", tensor)
    for number in range(20):
        order = random.Random(number * mpi.size() + mpi.rank()).sample(range(len(rigs)), len(rigs))
        handles = [
            rigs[at].group.call_queue.submit(
                partial(rigs[at].run, "allreduce", tensors[at], op="max"), "max", tensors[at]
            )
            for at in order
        ]
        for handle in handles:
            handle.wait()
    torch.cuda.synchronize()
    total = float(sum(range(1, mpi.size() + 1)))
    agree(all(bool((tensor == total).all()) for tensor in tensors))
    for rig in rigs:
        rig.group.free()


class ClosedOnTheLast(staging_areas.CudaDevice):
    """A GPU whose memory the last rank cannot open."""

    def open(self, handle: Any) -> torch.Tensor:
        if mpi.rank() == mpi.size() - 1:
            raise RuntimeError("cudaIpcOpenMemHandle: invalid argument")
        return super().open(handle)


@pytest.mark.gpu
def test_memory_that_one_rank_cannot_open_is_freed_on_the_gpu(agree):
    """Regression: torch kept the memory for the process that had not opened it."""
    gpu_group()
    if mpi.size() == 1:
        return
    comm = mpi.communicator().intra.comm
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        problem = staging_areas.trial(comm, ClosedOnTheLast(mpi.device()))
        agree("cudaIpcOpenMemHandle" in problem, problem)
    agree.equal(torch.cuda.memory_allocated(), before)
    agree.equal(staging_areas.trial(comm, staging_areas.CudaDevice(mpi.device())), "")


@pytest.mark.gpu
def test_memory_is_constant_over_calls_and_released_on_the_gpu(agree):
    gpu_group()
    tensor = torch.ones(100_000, device=mpi.device())

    def cycle() -> None:
        moment = Rig(backend=runtime.current().selector.backends["ipc"])
        moment.run("allreduce", tensor)
        moment.group.free()

    from mpi4py import MPI

    def free_bytes() -> int:
        torch.cuda.synchronize()
        MPI.COMM_WORLD.Barrier()
        found = torch.cuda.mem_get_info()[0]
        MPI.COMM_WORLD.Barrier()
        return found

    for _ in range(300):
        mpi.allreduce(tensor, op="avg", backend="ipc")
    before = free_bytes()
    for _ in range(1000):
        mpi.allreduce(tensor, op="avg", backend="ipc")
    agree(free_bytes() >= before - (8 << 20), "memory went with the calls")
    cycle()
    before = free_bytes()
    for _ in range(100):
        cycle()
    agree(free_bytes() >= before - (8 << 20), "memory went with the groups")
