"""To a user of NCCL: the backend equals references on GPUs; skipped where there are none that NCCL takes."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import contract

import torchmpi as mpi
from torchmpi import errors
from torchmpi.backends.nccl.recipes import lacks
from torchmpi.session import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("world", "can_nccl")]
OPS = [(dtype, op) for dtype, ops in contract.OPS_OF.items() for op in ops if lacks(dtype, op) is None]
LONG_CYCLES = 2_000_000_000


@pytest.fixture
def can_nccl(world):
    reason = runtime.current().selector.backends["nccl"].why_not("allreduce", "cuda", runtime.current().world)
    if reason is not None:
        pytest.skip(f"no NCCL among these ranks: {reason}")


def put(tensor):
    return tensor.to(mpi.device())


def close(agree, actual, expected, case):
    actual = actual.cpu()
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        agree.close(actual, expected, case, rtol=2 * torch.finfo(expected.dtype).eps, atol=1e-5)
    else:
        agree.bits(actual, expected, case)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("dtype", "op"), OPS, ids=lambda case: str(case).removeprefix("torch."))
def test_reductions(agree, dtype, op, asynchronous):
    rank, size = mpi.rank(), mpi.size()

    def call(collective, *arguments):
        options = {"op": op, "backend": "nccl"}
        if asynchronous:
            return getattr(mpi, f"{collective}_async")(*arguments, **options).wait()
        return getattr(mpi, collective)(*arguments, **options)

    for shape in contract.SHAPES:
        inputs = [contract.values(shape, dtype, r) for r in range(size)]
        expected = contract.reduced(inputs, op)
        result = call("allreduce", put(inputs[rank]))
        close(agree, result, expected, f"allreduce {shape}")
        everybody = mpi.allgather_object(result.cpu().reshape(-1).view(torch.uint8).tolist())
        agree(all(bits == everybody[0] for bits in everybody), f"allreduce {shape}: different bits on the ranks")
        result = call("reduce", put(inputs[rank]), size - 1)
        close(agree, result, expected if rank == size - 1 else inputs[rank], f"reduce {shape}")
        result = call("reduce_scatter", put(inputs[rank]))
        close(agree, result, contract.rows(expected, rank, size), f"reduce_scatter {shape}")


@pytest.mark.parametrize("dtype", contract.MOVABLE, ids=str)
def test_movements(agree, dtype):
    rank, size, way = mpi.rank(), mpi.size(), {"backend": "nccl"}
    for shape, is_uneven in itertools.product(contract.SHAPES, (False, True)):
        shapes = [(r, *shape[1:]) if is_uneven else shape for r in range(size)]
        inputs = [contract.values(shapes[r], dtype, r) for r in range(size)]
        everything = torch.cat([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in inputs])
        own, case = put(inputs[rank]), f"{shapes}"
        agree.bits(mpi.allgather(own, **way).cpu(), everything, f"allgather {case}")
        gathered = mpi.gather(own, size - 1, **way)
        agree((gathered is None) == (rank != size - 1), f"gather {case}")
        if gathered is not None:
            agree.bits(gathered.cpu(), everything, f"gather {case}")
        expected = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
        agree.bits(mpi.alltoall(own, **way).cpu(), expected, f"alltoall {case}")
        part = mpi.scatter(own if rank == size - 1 else None, size - 1, **way)
        agree.bits(part.cpu(), contract.rows(inputs[size - 1], rank, size), f"scatter {case}")
        if not is_uneven:
            agree.bits(mpi.broadcast(own.clone(), size - 1, **way).cpu(), inputs[size - 1], f"broadcast {case}")


def test_nan_wins_on_every_rank(agree):
    rank, size = mpi.rank(), mpi.size()
    for op, dtype in itertools.product(("min", "max"), contract.FLOATS):
        tensor = torch.full((3,), float(rank), dtype=dtype)
        tensor[1] = float("nan") if rank == size - 1 else 0.0
        result = mpi.allreduce(put(tensor), op=op, backend="nccl").cpu()
        agree(bool(result[1].isnan()) and not bool(result[0].isnan()), f"{op} {dtype}: {result}")


def test_it_is_the_default(agree):
    selector, world = runtime.current().selector, runtime.current().world
    chosen = selector.select("allreduce", "cuda", world, dtype=torch.float32, op="sum")
    agree.equal([choice.backend.name for choice in chosen], ["nccl"])
    chosen = selector.select("allreduce", "cuda", world, dtype=torch.int32, op="bxor")
    agree("nccl" not in [choice.backend.name for choice in chosen])
    agree.equal(mpi.allreduce(put(torch.tensor([1])), op="bxor").tolist(), [mpi.size() % 2])


def test_a_call_returns_before_the_device_has_begun(agree):
    tensor = put(torch.ones(1000))
    mpi.allreduce(tensor, backend="nccl")  # makes the communicator
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    mpi.allreduce(tensor, backend="nccl")
    behind = torch.cuda.current_stream().record_event()
    has_waited = behind.query()
    agree(not has_waited, "the host has waited for the device")
    agree.equal(tensor.tolist(), [float(mpi.size() ** 2)] * 1000)


def test_calls_follow_the_stream_that_is_current(agree):
    size, side = mpi.size(), torch.cuda.Stream()
    results = []
    for stream in (side, torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG_CYCLES // 20)
            tensor = torch.full((1 << 20,), 2.0, device=mpi.device())
            mpi.allreduce(tensor, backend="nccl")
            results.append(tensor * 3)
    torch.cuda.synchronize()
    for result in results:
        agree.equal(result.unique().tolist(), [6.0 * size])


def test_a_graph_replays_a_call(agree):
    tensor, side, graph = put(torch.zeros(1000)), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mpi.allreduce(tensor, backend="nccl")  # makes the communicator; the capture uses yet another stream
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        tensor.mul_(2)  # on one rank NCCL enqueues nothing
        mpi.allreduce(tensor, backend="nccl")
        tensor.add_(1)
    for step in range(3):
        tensor.fill_(step + mpi.rank())
        graph.replay()
        mpi.allreduce(tensor, backend="nccl")  # outside, in order
        total = 2 * sum(range(step, step + mpi.size())) + 1
        agree.equal(tensor.tolist(), [float(total * mpi.size())] * 1000)


def test_groups_give_their_memory_back(agree):
    world, backend = runtime.current().world, runtime.current().selector.backends["nccl"]

    def cycle(number):
        group = world.duplicate(f"cycle {number}")
        tensor = put(torch.ones(10))
        backend.bind(group, "allreduce", torch.float32, "sum").run(tensor, None, 0)
        torch.cuda.synchronize()
        group.free()
        return tensor.tolist()

    results = [cycle(number) for number in range(3)]
    mpi.barrier()
    free, _ = torch.cuda.mem_get_info()
    results += [cycle(number) for number in range(10)]
    mpi.barrier()
    left, _ = torch.cuda.mem_get_info()
    agree(left > free - (32 << 20), f"{(free - left) >> 20} MiB of device memory are gone")
    agree(all(result == [float(mpi.size())] * 10 for result in results))


def test_a_tensor_on_another_gpu_is_refused(agree):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU in sight")
    mpi.allreduce(put(torch.ones(2)), backend="nccl")
    elsewhere = torch.device("cuda", (mpi.device().index + 1) % torch.cuda.device_count())
    try:
        mpi.allreduce(torch.ones(2, device=elsewhere), backend="nccl")
    except errors.DeviceError as error:
        agree("Keep the tensors" in str(error) and str(elsewhere) in str(error), str(error))
    else:
        agree(False, "accepted")
