"""To a user of GPUs of one host: collectives through staging areas on them have the bits of those on the host."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.ipc_ranks import COLLECTIVES, REDUCING, Call, Rig, ops_for

import torchmpi as mpi
from torchmpi.backends import rank_order
from torchmpi.backends.ipc import staging_areas
from torchmpi.backends.ipc.staged_group import StagedGroup
from torchmpi.errors import BackendUnavailableError, DeviceError
from torchmpi.session import runtime

pytestmark = pytest.mark.usefixtures("world")


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
    monkeypatch.setattr(StagedGroup, "run", lambda *arguments, **options: longer.append(1))
    for _ in range(100):
        mpi.allreduce(tensor, op="avg", backend="ipc")
    agree(not longer, f"{len(longer)} calls took the general path")


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
