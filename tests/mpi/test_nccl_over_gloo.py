"""To a user of NCCL: the code of the backend, on host memory, with a group of gloo in the place of NCCL's.

The tests on GPUs are in test_nccl.py.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import contract

import torchmpi as mpi
from torchmpi.backends.base import Operation, refusal
from torchmpi.backends.gloo import GlooGroup
from torchmpi.backends.gpus import Devices, RankDevice
from torchmpi.backends.nccl.nccl_backend import NcclBackend
from torchmpi.backends.nccl.nccl_group import NcclGroup, NcclReduction
from torchmpi.backends.nccl.recipes import lacks
from torchmpi.backends.selector import Choice
from torchmpi.backends.torch_groups import RowMovement, TorchGroup
from torchmpi.collectives import exchange
from torchmpi.communicators.call_codes import ON_DEVICE
from torchmpi.config import Config
from torchmpi.errors import DeviceError, TransportError
from torchmpi.session import runtime
from torchmpi.supervision.lost_ranks import LossWatch

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(3), pytest.mark.usefixtures("world")]
OPS = {dtype: [op for op in ops if lacks(dtype, op) is None] for dtype, ops in contract.OPS_OF.items()}


class OverGloo(GlooGroup, NcclGroup):
    """The group of NCCL on a process group of gloo, which has no alltoall of lists of tensors."""

    device, close = torch.device("cpu"), TorchGroup.close


class Closed(OverGloo):
    """A group that is closed like that of NCCL."""

    close = NcclGroup.close


@pytest.fixture
def group():
    made = runtime.current().world.duplicate("over gloo")
    yield made
    made.free()


@pytest.fixture
def torch_group(group):
    return OverGloo(group, fake_devices(*"abcdefgh"[: group.size]))


def fake_devices(*uuids):
    return Devices(RankDevice(0, uuid, frozenset(filter(None, uuids))) for uuid in uuids)


def close(agree, dtype, actual, expected, case):
    if dtype.is_floating_point or dtype.is_complex:
        agree.close(actual, expected, case, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    else:
        agree.bits(actual, expected, case)


@pytest.mark.parametrize("dtype", [dtype for dtype in OPS if OPS[dtype]], ids=str)
def test_reductions(agree, group, torch_group, dtype):
    rank, size = group.rank, group.size
    # Each operation on two of the shapes, in turn.
    shapes = itertools.cycle(((), (0,), (7,), (65, 3)))
    for op, shape in zip([*OPS[dtype]] * 2, shapes, strict=False):
        calls, case = NcclReduction(torch_group, dtype, op), f"{op} {shape}"
        inputs = [contract.values(shape, dtype, r) for r in range(size)]
        expected = contract.reduced(inputs, op)

        buffer = inputs[rank].clone()
        agree(calls.allreduce(buffer, None, 0) is buffer)
        close(agree, dtype, buffer, expected, f"allreduce {case}")

        buffer = inputs[rank].clone()
        calls.reduce(buffer, None, size - 1)
        close(agree, dtype, buffer, expected if rank == size - 1 else inputs[rank], f"reduce {case}")

        own = contract.rows(expected, rank, size)
        for given in (None, torch.zeros_like(own)):
            source = inputs[rank].clone()
            result = calls.reduce_scatter(source, given, 0)
            close(agree, dtype, result, own, f"reduce_scatter {case}")
            agree.bits(source, inputs[rank], f"reduce_scatter {case}: the input was changed")
            agree(given is None or result is given, f"reduce_scatter {case}: out was not used")


@pytest.mark.parametrize("dtype", (torch.float32, torch.complex64, torch.bool, torch.float8_e5m2), ids=str)
def test_movements(agree, group, torch_group, dtype):
    rank, size = group.rank, group.size
    calls, root = RowMovement(group, torch_group), size - 1
    for shape, is_uneven in itertools.product(((), (0,), (7,), (65, 3)), (False, True)):
        # Uneven: rank r has r rows more, or none on rank 1.
        rows = [None if not is_uneven else (0 if r == 1 else (shape[0] if shape else 1) + r) for r in range(size)]
        shapes = [shape if count is None else (count, *shape[1:]) for count in rows]
        inputs = [contract.values(shapes[r], dtype, r) for r in range(size)]
        everything = torch.cat([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in inputs])
        given = torch.zeros_like(everything)
        agree(calls.allgather(inputs[rank], given, 0) is given, f"allgather {shapes}: out was not used")
        agree.bits(given, everything, f"allgather {shapes}")
        gathered = calls.gather(inputs[rank], None, root)
        agree((gathered is None) == (rank != root), f"gather {shapes}")
        if gathered is not None:
            agree.bits(gathered, everything, f"gather {shapes}")
        expected = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
        agree.bits(calls.alltoall(inputs[rank], None, 0), expected, f"alltoall {shapes}")
        part = calls.scatter(inputs[rank] if rank == root else None, None, root)
        agree.bits(part, contract.rows(inputs[root], rank, size), f"scatter {shapes}")
        if not is_uneven:
            agree.bits(calls.broadcast(inputs[rank].clone(), None, root), inputs[root], f"broadcast {shapes}")


def test_parts_of_any_length(agree, group, torch_group):
    rank, size = group.rank, group.size

    def part(origin, target):
        length = max(0, 3 * origin + target - 1)
        return contract.values((length,), torch.float32, 10 * origin + target)

    outgoing, expected = [part(rank, other) for other in range(size)], [part(other, rank) for other in range(size)]
    incoming = [torch.empty_like(tensor) for tensor in expected]
    RowMovement(group, torch_group).exchange_parts(outgoing, incoming, 0)
    for origin, (actual, wanted) in enumerate(zip(incoming, expected, strict=True)):
        agree.bits(actual, wanted, f"from rank {origin}")


def test_a_process_group_exchanges_without_staging(agree, group, torch_group, monkeypatch):
    """Regression: exchanges of torch.distributed went through the host on every device."""
    rank, size = mpi.rank(), mpi.size()
    movement = RowMovement(group, torch_group)
    backend = NcclBackend(Config(), Devices(map(RankDevice, range(size))))
    monkeypatch.setattr(backend, "bind", lambda *_: Operation(movement.exchange_parts))
    monkeypatch.setattr(runtime.current().selector, "select", lambda *_, **__: [Choice(None, backend)])
    outgoing = [torch.full((1 + rank, 2), 10.0 * rank + other).t() for other in range(size)]  # not contiguous
    incoming = [torch.zeros(2, 1 + other) for other in range(size)]
    exchange.exchange(group, outgoing, incoming)
    for other, part in enumerate(incoming):
        agree.equal(part, torch.full((2, 1 + other), 10.0 * other + rank), f"from rank {other}")
    (plan,) = [plan for key, plan in group.plans.items() if key.collective == "exchange_parts"]
    agree(plan.is_on_device and plan.code & ON_DEVICE)


def test_the_loss_of_a_rank_ends_the_work_on_the_device(agree, group, monkeypatch):
    """Regression: closing a group waited for the device, whose kernels wait for the lost rank."""
    context, torch_group = group.context, Closed(group, fake_devices(*"abcdefgh"[: group.size]))
    calls = NcclReduction(torch_group, torch.float32, "sum")
    calls.allreduce(torch.ones(2), None, 0)
    monkeypatch.setattr(context, "groups", [group])
    monkeypatch.setattr(context, "loss", "")
    monkeypatch.setattr(context, "raises_lost_ranks", False)
    watch = LossWatch(context)
    watch.note("rank 7 has ended")
    message = ""
    while not message:
        try:
            assert torch_group.opened
        except TransportError as error:
            message = str(error)
    watch.close()
    torch_group.close()
    agree("rank 7 has ended" in message, message)


def test_abort_of_a_process_group_ends_the_work_on_the_device(default_group, agree):
    """Regression: it waited for the device, whose kernels wait for the missing rank."""
    aborted = dist.new_group()
    torch_group = Closed(aborted._group, fake_devices(*"abcdefgh"[: aborted.size()]))
    NcclReduction(torch_group, torch.float32, "sum").allreduce(torch.ones(2), None, 0)
    aborted.abort()
    agree(aborted._group.call_queue.closed)
    with pytest.raises(TransportError, match="was aborted"):
        assert torch_group.opened


def test_tensors_of_autograd_and_of_inference_mode(agree, torch_group):
    calls = NcclReduction(torch_group, torch.float16, "avg")  # with a conversion before and after it
    leaf = torch.ones(3, dtype=torch.float16, requires_grad=True)
    calls.allreduce(leaf, None, 0)
    with torch.inference_mode():
        frozen = torch.full((3,), 2.0, dtype=torch.float16)
        calls.allreduce(frozen, None, 0)
    calls.allreduce(frozen, None, 0)
    agree.equal(leaf.tolist(), [1.0] * 3)
    agree.equal(frozen.tolist(), [2.0] * 3)


def test_a_tensor_on_another_device_is_refused(torch_group):
    with pytest.raises(DeviceError, match=r"tensor is on meta, but .* cpu"):
        NcclReduction(torch_group, torch.float32, "sum").allreduce(torch.ones(2, device="meta"), None, 0)


def test_why_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def why(devices, offers, ranks=None, collective="allreduce", device_type="cuda"):
        backend = NcclBackend(Config(), devices)
        backend.agree(offers)
        among = None if ranks is None else SimpleNamespace(world_ranks=ranks)
        return refusal(backend, collective, device_type, among)

    apart, shared = fake_devices("a", "b"), fake_devices("a", "a", "b", "")
    fine = [("", False)] * 4
    assert why(apart, fine[:2], (0, 1)) is None
    assert why(apart, fine[:2], (0, 1), device_type="cpu") == "it takes CUDA tensors only"
    assert why(shared, fine, (0, 1)) == "ranks 0 and 1 share a GPU, which NCCL refuses"
    assert why(shared, fine, (0, 2)) is None and why(shared, fine) is None
    assert why(shared, [("", True)] * 4, (0, 1)) is None  # experimental in NCCL, if all ranks ask for it
    assert "share a GPU" in why(shared, [("", True), *fine[1:]], (0, 1))
    assert why(shared, fine, (2, 3)).startswith("rank 3 cannot: its device is the CPU")
    assert why(apart, [("", False), ("no NCCL", False)], (0, 1)) == "rank 1 cannot: no NCCL"
    assert why(apart, [("no NCCL", False)] * 2) == "no NCCL"
    assert why(apart, fine[:2], (0, 1), collective="scatter") is None
    assert "it has no barrier" in why(apart, fine[:2], (0, 1), collective="barrier")


def test_the_table_of_backends_has_the_reason(agree):
    table = mpi.collective_availability()
    agree.equal(table["nccl", "allreduce", "cpu", "sync"], "unavailable: it takes CUDA tensors only")
    if not torch.cuda.is_available():
        agree.equal(table["nccl", "allreduce", "cuda", "sync"], "unavailable: this torch or this host has no CUDA")
