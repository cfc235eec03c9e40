"""The verbs of the backend `nccl` over a model of NCCL: who gives which address, length and root to which function.

What NCCL itself does on GPUs is in test_nccl.py.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torchmpi as mpi
from torchmpi import errors
from torchmpi.backends.gpus import Devices, RankDevice
from torchmpi.backends.nccl.nccl_backend import NcclBackend
from torchmpi.backends.nccl.nccl_collectives import NcclMovement, NcclReduction
from torchmpi.backends.nccl.recipes import lacks
from torchmpi.config import Config
from torchmpi.session import runtime

sys.path.insert(0, str(Path(__file__).parent))
import contract
from nccl_model import HostCommunicator

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.once]
OPS = [(dtype, op) for dtype, ops in contract.OPS_OF.items() for op in ops if lacks(dtype, op) is None]


class ModelEnd:
    """An `End` whose communicator is the model. All ranks must be ready for the same calls: making it is collective."""

    def __init__(self, group):
        self.rank, self.size, self.where = group.rank, group.size, group.where
        self.communicator = HostCommunicator(group.context.MPI, group.comm)
        self.device, self.num_ready = torch.device("cpu"), 0

    def ready(self, tensor):
        assert isinstance(tensor, torch.Tensor)
        self.num_ready += 1
        return self.communicator, 0


@pytest.fixture
def group():
    return runtime.current().world


@pytest.fixture
def end(group):
    return ModelEnd(group)


def close(agree, dtype, actual, expected, case):
    if dtype.is_floating_point or dtype.is_complex:
        agree.close(actual, expected, case, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    else:
        agree.bits(actual, expected, case)


@pytest.mark.parametrize(("dtype", "op"), OPS, ids=lambda case: str(case).removeprefix("torch."))
def test_reductions(agree, group, end, dtype, op):
    rank, size = group.rank, group.size
    calls = NcclReduction(end, dtype, op)
    for shape in contract.SHAPES:
        inputs = [contract.values(shape, dtype, r) for r in range(size)]
        expected = contract.reduced(inputs, op)

        buffer = inputs[rank].clone()
        agree(calls.allreduce(buffer, None, 0) is buffer)
        close(agree, dtype, buffer, expected, f"allreduce {shape}")
        results = group.comm.allgather(buffer.reshape(-1).view(torch.uint8).numpy().tobytes())
        agree.equal(len(set(results)), 1, f"allreduce {shape}: different bits on the ranks")

        for root in {0, size - 1}:
            buffer = inputs[rank].clone()
            calls.reduce(buffer, None, root)
            close(agree, dtype, buffer, expected if rank == root else inputs[rank], f"reduce {shape} to {root}")

        mine = contract.rows(expected, rank, size)
        for given in (None, torch.zeros_like(mine), torch.zeros(3, dtype=dtype)):
            source = inputs[rank].clone()
            result = calls.reduce_scatter(source, given, 0)
            close(agree, dtype, result, mine, f"reduce_scatter {shape}")
            agree.bits(source, inputs[rank], f"reduce_scatter {shape}: the input was changed")
            fits = given is not None and given.shape == mine.shape
            agree(not fits or result is given, f"reduce_scatter {shape}: out was not used")
    agree.equal(len(set(group.comm.allgather(end.num_ready))), 1, "ranks were not ready for the same calls")


@pytest.mark.parametrize("dtype", contract.MOVABLE, ids=str)
def test_movements(agree, group, end, dtype):
    rank, size = group.rank, group.size
    calls = NcclMovement(group, end)
    for shape, is_uneven in itertools.product(contract.SHAPES, (False, True)):
        # Uneven: rank r has r rows more, or none on rank 1.
        rows = [None if not is_uneven else (0 if r == 1 else (shape[0] if shape else 1) + r) for r in range(size)]
        shapes = [shape if count is None else (count, *shape[1:]) for count in rows]
        inputs = [contract.values(shapes[r], dtype, r) for r in range(size)]
        everything = torch.cat([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in inputs])
        case = f"{shapes}"

        agree.bits(calls.allgather(inputs[rank], None, 0), everything, f"allgather {case}")
        given = torch.zeros_like(everything)
        agree(calls.allgather(inputs[rank], given, 0) is given, f"allgather {case}: out was not used")
        agree.bits(given, everything, f"allgather {case}, out")
        for root in {0, size - 1}:
            gathered = calls.gather(inputs[rank], None, root)
            if rank == root:
                agree.bits(gathered, everything, f"gather {case} to {root}")
            else:
                agree(gathered is None, f"gather {case} to {root}: a result elsewhere")
        expected = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
        agree.bits(calls.alltoall(inputs[rank], None, 0), expected, f"alltoall {case}")
        for root in {0, size - 1}:
            part = calls.scatter(inputs[rank] if rank == root else None, None, root)
            agree.bits(part, contract.rows(inputs[root], rank, size), f"scatter {case} from {root}")
        if not is_uneven:
            for root in {0, size - 1}:
                buffer = inputs[rank].clone()
                agree(calls.broadcast(buffer, None, root) is buffer)
                agree.bits(buffer, inputs[root], f"broadcast {case} from {root}")
    agree.equal(len(set(group.comm.allgather(end.num_ready))), 1, "ranks were not ready for the same calls")


def test_parts_of_any_length(agree, group, end):
    rank, size = group.rank, group.size
    calls = NcclMovement(group, end)

    def part(origin, target):
        length = max(0, 3 * origin + target - 1)
        return contract.values((length,), torch.float32, 10 * origin + target)

    outgoing, incoming = [part(rank, other) for other in range(size)], [part(other, rank) for other in range(size)]
    room = [torch.empty_like(tensor) for tensor in incoming]
    calls.exchange_parts(outgoing, room, 0)
    for other in range(size):
        agree.bits(room[other], incoming[other], f"from {other}")
    if size > 1:
        room = [torch.empty(7) for _ in range(size)]
        try:
            calls.exchange_parts(outgoing, room, 0)
        except errors.MismatchError as error:
            agree("which has room for 28" in str(error), str(error))
        else:
            agree(False, "a wrong length was accepted")


def test_equal_parts_go_in_one_call(agree, group, end):
    movement, reduction = NcclMovement(group, end), NcclReduction(end, torch.float32, "sum")
    movement.allgather(torch.ones(2), None, 0)
    reduction.reduce_scatter(torch.ones(2 * group.size), None, 0)
    reduction.allreduce(torch.ones(2), None, 0)
    agree.equal(end.communicator.calls, ["ncclAllGather", "ncclReduceScatter", "ncclAllReduce"])


def test_what_autograd_and_inference_mode_think_of_a_tensor_does_not_matter(agree, group, end):
    size = group.size
    calls = NcclReduction(end, torch.float16, "avg")  # which goes through a copy, and back
    leaf = torch.ones(3, dtype=torch.float16, requires_grad=True)
    calls.allreduce(leaf, None, 0)
    with torch.inference_mode():
        frozen = torch.ones(3, dtype=torch.float16)
        calls.allreduce(frozen, None, 0)
    calls.allreduce(frozen, None, 0)
    means = NcclReduction(end, torch.float32, "avg")
    with torch.inference_mode():
        frozen = torch.full((3,), 2.0)
    means.allreduce(frozen, None, 0)
    agree.equal(leaf.tolist(), [1.0] * 3)
    agree.equal(frozen.tolist(), [2.0] * 3, f"among {size}")


def fake_devices(*uuids):
    return Devices(RankDevice(0, uuid, frozenset(filter(None, uuids))) for uuid in uuids)


def test_why_not():
    def why(devices, offers, ranks=None, collective="allreduce", device_type="cuda"):
        backend = NcclBackend(Config(), devices)
        backend.agree(offers)
        among = None if ranks is None else SimpleNamespace(world_ranks=ranks)
        return backend.why_not(collective, device_type, among)

    apart, shared = fake_devices("a", "b"), fake_devices("a", "a", "b", "")
    fine = [("", False)] * 4
    assert why(apart, fine[:2], (0, 1)) is None
    assert why(apart, fine[:2], (0, 1), device_type="cpu") == "it takes CUDA tensors only"
    assert why(shared, fine, (0, 1)) == "ranks 0 and 1 share a GPU, which NCCL refuses"
    assert why(shared, fine, (0, 2)) is None and why(shared, fine) is None
    assert why(shared, [("", True)] * 4, (0, 1)) is None  # an experiment of NCCL's, where all ranks ask for it
    assert "share a GPU" in why(shared, [("", True), *fine[1:]], (0, 1))
    assert why(shared, fine, (2, 3)).startswith("rank 3 cannot: its device is the CPU")
    assert why(apart, [("", False), ("no NCCL", False)], (0, 1)) == "rank 1 cannot: no NCCL"
    assert why(apart, [("no NCCL", False)] * 2) == "no NCCL"
    assert why(apart, fine[:2], (0, 1), collective="scatter") is None
    assert "synchronizes processes" in why(apart, fine[:2], (0, 1), collective="barrier")


def test_here_it_is_in_the_table_with_its_reason(agree):
    table = mpi.collective_availability()
    agree.equal(table["nccl", "allreduce", "cpu", "sync"], "unavailable: it takes CUDA tensors only")
    if not torch.cuda.is_available():
        agree.equal(table["nccl", "allreduce", "cuda", "sync"], "unavailable: this torch or this host has no CUDA")
    try:
        mpi.allreduce(torch.ones(2), backend="nccl")
    except errors.BackendUnavailableError as error:
        agree("it takes CUDA tensors only" in str(error) and f"rank {mpi.rank()}" in str(error), str(error))
    else:
        agree(False, "a CPU tensor was accepted")
