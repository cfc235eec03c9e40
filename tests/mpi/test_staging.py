"""To a user of devices: staging in chunks through host buffers gives the bits of the whole, on every backend.

Here the device is host memory.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import contract
from helpers.device_model import Model, plain
from helpers.outcomes import error_of

import torchmpi as mpi
from torchmpi.backends.base import bind
from torchmpi.backends.mpi import MPIMovement
from torchmpi.collective_specs import SPECS
from torchmpi.collectives import device_staging
from torchmpi.collectives.short_messages import PACKED_BYTES
from torchmpi.communicators.call_codes import ON_DEVICE, call_code
from torchmpi.communicators.plan import Plan, compared_shape
from torchmpi.session import runtime
from torchmpi.tensors.dtypes import info

pytestmark = pytest.mark.usefixtures("world")
BACKENDS = ("mpi", "shm", "p2p")
_PIECE_BYTES = 200  # no multiple of any chunk, and longer than the payload of a call log entry


def pool(*, shared: bool = True) -> device_staging.StagingPool:
    allocate = runtime.current().empty_shared if shared else lambda shape, dtype: torch.empty(shape, dtype=dtype)
    return device_staging.StagingPool(_PIECE_BYTES, lambda num_bytes: allocate((num_bytes,), torch.uint8), pinned=False)


def staged(name: str, collective: str, dtype: torch.dtype, op: str | None, buffers: device_staging.StagingPool):
    """Run a collective through a backend in chunks, as a call of the group."""
    running, group = runtime.current(), mpi.communicator(0).intra
    backend = running.selector.backends[name]
    run = bind(backend, group, collective, dtype, op).run
    staged_run = device_staging.StagedOperation(SPECS[collective], run, group, buffers).run
    code = call_code(collective, op, info(dtype).code) | ON_DEVICE
    plan = Plan(collective, code, staged_run, compared_shape(collective))

    def call(tensor: torch.Tensor, out: torch.Tensor | None = None, root: int = 0) -> torch.Tensor:
        return group.call(plan, tensor, out, root)

    return call


def usable(name: str) -> bool:
    return runtime.current().selector.backends[name].why_not("allreduce", "cpu", mpi.communicator(0).intra) is None


@pytest.mark.parametrize("name", BACKENDS)
def test_chunks_have_the_bits_of_the_whole(agree, name):
    if not usable(name):
        pytest.skip(f"{name} cannot be had here")
    rank, size = mpi.rank(), mpi.size()
    buffers = pool()
    shapes = ((), (0,), (7,), (50,), (3, 17), (401,))
    kinds = ((torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.int8, "sum"), (torch.complex128, "sum"))
    for (dtype, op), shape, with_out in itertools.product(kinds, shapes, (False, True)):
        inputs = [contract.values(shape, dtype, r) for r in range(size)]
        expected = contract.reduced(inputs, op)
        for make in (torch.clone, contract.strided):
            case = f"{name} {dtype} {shape} {make.__name__} out={with_out}"
            tensor = make(inputs[rank])
            out = make(torch.zeros_like(tensor)) if with_out else None
            result = staged(name, "allreduce", dtype, op, buffers)(tensor, out)
            agree.bits(result, expected, f"allreduce {case}")
            agree(result is (out if with_out else tensor), f"allreduce {case}: another tensor came back")
            agree(not with_out or contract.same_bits(tensor, inputs[rank]), f"allreduce {case}: the input has changed")
    agree(buffers.num_made <= 3, f"{buffers.num_made} buffers")


@pytest.mark.parametrize("name", BACKENDS)
def test_rooted_collectives_in_chunks(agree, name):
    if not usable(name):
        pytest.skip(f"{name} cannot be had here")
    rank, size = mpi.rank(), mpi.size()
    buffers = pool(shared=False)
    for root, shape, with_out in itertools.product({0, size - 1}, ((0,), (7,), (1025,)), (False, True)):
        inputs = [contract.values(shape, torch.float64, r) for r in range(size)]
        expected = contract.reduced(inputs, "sum")
        case = f"{name} root={root} {shape} out={with_out}"

        tensor = inputs[rank].clone()
        out = torch.zeros_like(tensor) if with_out else None
        result = staged(name, "reduce", torch.float64, "sum", buffers)(tensor, out, root)
        agree.bits(result, expected if rank == root else inputs[rank], f"reduce {case}")

        tensor = inputs[rank].clone()
        out = torch.zeros_like(tensor) if with_out else None
        result = staged(name, "broadcast", torch.float64, None, buffers)(tensor, out, root)
        agree.bits(result, inputs[root], f"broadcast {case}")
        agree(not with_out or result is out, f"broadcast {case}: out was not used")
        agree(not with_out or contract.same_bits(tensor, inputs[rank]), f"broadcast {case}: the input has changed")


def test_chunks_next_to_whole_calls(agree):
    """Each chunk is a call of its own in the call log; the calls after it still match."""
    size = mpi.size()
    buffers = pool()
    call = staged("shm" if usable("shm") else "mpi", "allreduce", torch.float32, "sum", buffers)
    for round_ in range(40):  # more calls than the ring of the board has entries
        many = call(torch.full((333,), float(round_)))
        one = mpi.allreduce(torch.full((333,), 1.0))
        mpi.barrier()
        agree.equal(many, torch.full((333,), float(round_ * size)), f"round {round_}")
        agree.equal(one, torch.full((333,), float(size)), f"round {round_}, whole")


def test_inference_tensors_in_chunks(agree):
    with torch.inference_mode():
        tensor = torch.ones(333)
        inside = staged("mpi", "allreduce", torch.float32, "sum", pool())(torch.ones(333))
    result = staged("mpi", "allreduce", torch.float32, "sum", pool())(tensor)
    agree.equal(result.tolist(), [float(mpi.size())] * 333)
    agree.equal(inside.tolist(), [float(mpi.size())] * 333)


@pytest.mark.parametrize("message_bytes", [8, 1 << 20])
def test_mpi_moves_bytes_of_any_shape_and_of_inference_tensors(agree, message_bytes):
    """Regression: ranks copied their own part with Tensor.copy_, which refuses both, and the other ranks waited."""
    size, rank = mpi.size(), mpi.rank()
    movement = MPIMovement(mpi.communicator().intra, message_bytes)
    sources = [torch.full((2, 3), float(rank)) for _ in range(size)]
    with torch.inference_mode():
        targets = [torch.zeros(6) for _ in range(size)]
        gathered, scattered = torch.zeros(2 * size, 3), torch.zeros(2, 3)
    movement.exchange_parts(sources, targets, 0)
    movement.allgather(sources[0], gathered, 0)
    everything = torch.arange(float(size)).repeat_interleave(6).view(-1, 3)
    movement.scatter(everything if rank == 0 else None, scattered, 0)
    for sender in range(size):
        agree.equal(targets[sender], torch.full((6,), float(sender)))
    agree.equal(gathered, everything)
    agree.equal(scattered, torch.full((2, 3), float(rank)))


def test_a_device_on_one_rank_only_is_a_mismatch_on_all(agree):
    """Otherwise a call in chunks and a whole call would exchange wrong bytes."""
    if mpi.size() == 1 or not usable("shm"):
        pytest.skip("in shared memory alone all ranks of a mismatch get away with an error")
    group = mpi.communicator(0).intra.duplicate("mixed devices")
    run = bind(runtime.current().selector.backends["shm"], group, "allreduce", torch.float32, "sum").run
    code = call_code("allreduce", "sum", info(torch.float32).code)
    plan = Plan("allreduce", code | (ON_DEVICE if mpi.rank() == 0 else 0), run, shape_of=None)
    said = error_of(group.call, plan, torch.ones(400), None, 0)
    mpi.barrier()
    group.free()
    agree("on cuda" in said or "aborted it" in said, said or "no error")
    agree(mpi.rank() > 1 or "on cuda" in said, said)


def test_mpi_gets_device_memory_after_the_copies_into_it(agree, monkeypatch):
    """On a model of a device that runs no work before a synchronization."""
    device = Model(seed=0)
    device.install(monkeypatch)
    rank, size = mpi.rank(), mpi.size()
    backend = runtime.current().selector.backends["mpi"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "is_cuda_aware", True)

    gathered = device.tensor(torch.full((50 * size,), -1.0))
    movement = MPIMovement(mpi.communicator(0).intra, message_bytes=64)  # so that the parts are broadcast one by one
    movement.allgather(device.tensor(torch.full((50,), float(rank))), gathered, 0)

    numel = PACKED_BYTES  # short tensors are packed in host memory
    tensor = device.tensor(torch.zeros(numel))
    tensor.copy_(device.tensor(torch.full((numel,), float(rank))))
    mpi.sendreceive(tensor, src=(rank - 1) % size, dst=(rank + 1) % size)
    device.default.synchronize()
    agree.equal(plain(gathered).tolist(), [float(r) for r in range(size) for _ in range(50)])
    agree.equal(plain(tensor).tolist(), [float((rank - 1) % size)] * numel)
