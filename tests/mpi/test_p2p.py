"""To a user of the backend `p2p`: short and long tensors, with few and many chunks, equal references."""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from helpers import contract
from mpi4py import MPI

import torchmpi as mpi
from torchmpi import config, errors
from torchmpi.backends import mpi_messages, p2p, round_messages
from torchmpi.backends.compared_calls import ComparedCall
from torchmpi.backends.mpi_messages import can_call_from_kernels
from torchmpi.backends.p2p import P2PReduction
from torchmpi.backends.pieces import PieceQueue
from torchmpi.session import runtime
from torchmpi.tensors import schedule

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usefixtures("world")]

# Below and above the limit where all ranks gather everything, uneven, and more chunks than are in progress together.
NUMELS = (0, 1, 5, 1000, 4099, 20_011)
# Of each kind of arithmetic one; the bits of all floats are compared with those of the backend `mpi` below.
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.uint64, torch.bool)
COMPILED = ("even", 0), ("all", 0), ("all", 1)
SMALL_CHUNKS = config.Config(pipeline_bytes=4096, message_bytes=3000)


def bound(collective, dtype=None, op=None, settings=SMALL_CHUNKS):
    """Bind the operation directly, with chunks so small that short vectors use the algorithms for long ones."""
    run = p2p.prepare(settings, runtime.current().world, collective, dtype, op).run
    compared = getattr(run, "__self__", None)  # where each rank has a host of its own
    return compared.longer if isinstance(compared, ComparedCall) else run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions_are_those_in_rank_order(agree, dtype):
    rank, size = mpi.rank(), mpi.size()
    cases = [(numel, [contract.values((numel,), dtype, r) for r in range(size)]) for numel in NUMELS]
    assert len(contract.OPS_OF[dtype]) % 2  # each operation with every other length
    for number, ((numel, inputs), op) in enumerate([*itertools.product(cases, contract.OPS_OF[dtype])][::2]):
        expected, root = contract.reduced(inputs, op), (0, size - 1)[number % 2]
        result = bound("allreduce", dtype, op)(inputs[rank].clone(), None, 0)
        agree.bits(result, expected, f"allreduce {op} {numel}")
        result = bound("reduce", dtype, op)(inputs[rank].clone(), None, root)
        agree.bits(result, expected if rank == root else inputs[rank], f"reduce {op} {numel} root={root}")
        source = inputs[rank].clone()
        result = bound("reduce_scatter", dtype, op)(source, None, 0)
        agree.bits(result, contract.rows(expected, rank, size), f"reduce_scatter {op} {numel}")
        agree.bits(source, inputs[rank], f"reduce_scatter {op} {numel}: the input was changed")


def relayed(dtype, op):
    """The allreduce that is chosen for many ranks: it relays each vector that is not short enough to be gathered."""
    operation = bound("allreduce", dtype, op)
    operation.__self__.relayed_bytes, operation.__self__._is_short = 1 << 30, lambda flat: flat.numel() == 0
    return operation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relayed_allreduces_are_those_in_rank_order(agree, dtype):
    rank, size = mpi.rank(), mpi.size()
    for numel in (0, 1, size - 1, size + 1, 1000, 4099):
        inputs = [contract.values((numel,), dtype, r) for r in range(size)]
        for op in contract.OPS_OF[dtype]:
            result = relayed(dtype, op)(inputs[rank].clone(), None, 0)
            agree.bits(result, contract.reduced(inputs, op), f"{op} {numel}")


@pytest.mark.parametrize("dtype", (torch.float8_e5m2, torch.bfloat16, torch.int32, torch.complex128), ids=str)
def test_movements_preserve_every_bit(agree, dtype):
    rank, size = mpi.rank(), mpi.size()
    for numel in (*NUMELS, 60_000):
        inputs = [contract.values((numel + r,), dtype, r) for r in range(size)]
        result = bound("allgather")(inputs[rank], None, 0)
        agree.bits(result, torch.cat(inputs), f"allgather {numel}")
        for root in {0, size - 1}:
            value = inputs[root] if rank == root else torch.zeros_like(inputs[root])
            result = bound("broadcast")(value, None, root)
            agree.bits(result, inputs[root], f"broadcast {numel} root={root}")


def test_operations_are_reused_for_any_size(agree):
    """Memory of an earlier, longer call must not affect a later one."""
    rank, size = mpi.rank(), mpi.size()
    operations = {
        collective: bound(collective, torch.bfloat16, "avg") for collective in ("allreduce", "reduce", "reduce_scatter")
    }
    for numel in (20_011, 3, 5000, 0, 20_011, 1):
        inputs = [contract.values((numel,), torch.bfloat16, r, seed=numel) for r in range(size)]
        expected = contract.reduced(inputs, "avg")
        whole = operations["allreduce"](inputs[rank].clone(), None, 0)
        at_root = operations["reduce"](inputs[rank].clone(), None, 0)
        part = operations["reduce_scatter"](inputs[rank].clone(), None, 0)
        agree.bits(whole, expected, f"{numel}")
        agree.bits(at_root, expected if rank == 0 else inputs[rank], f"{numel}")
        agree.bits(part, contract.rows(expected, rank, size), f"{numel}")


def test_bits_do_not_depend_on_size_chunks_or_backend(agree):
    """Also compared with the `mpi` backend: the choice of the backend must not change a run."""
    for dtype in contract.FLOATS:
        inputs = contract.values((100_000,), dtype, mpi.rank(), seed=3)
        whole = mpi.allreduce(inputs.clone(), backend="p2p")
        parts = torch.cat([mpi.allreduce(t.clone(), backend="p2p") for t in inputs.split([1, 2, 1000, 7, 98_990])])
        cut = bound("allreduce", dtype, "sum")(inputs.clone(), None, 0)
        by_mpi = mpi.allreduce(inputs.clone(), backend="mpi")
        for name, other in (("parts", parts), ("small chunks", cut), ("mpi", by_mpi)):
            agree.bits(whole, other, f"{dtype}: {name} differ")


def test_through_the_verbs_with_strides_out_rows_and_handles(agree):
    rank, size = mpi.rank(), mpi.size()
    for shape in ((), (7,), (3, 5), (65, 33)):
        inputs = [contract.values(shape, torch.float32, r) for r in range(size)]
        expected = contract.reduced(inputs, "sum")
        out = torch.zeros(shape)
        mpi.allreduce(contract.strided(inputs[rank]), out, backend="p2p")
        part = mpi.reduce_scatter_async(contract.strided(inputs[rank]), backend="p2p").wait()
        handle = mpi.allreduce_async(inputs[rank].clone(), backend="p2p")
        everything = mpi.allgather(contract.strided(inputs[rank]), backend="p2p")
        agree.bits(out, expected, f"{shape}: out")
        agree.bits(handle.wait(), expected, f"{shape}: asynchronous")
        agree.bits(part, contract.rows(expected, rank, size), f"{shape}")
        agree.equal(everything, torch.cat([t.reshape(1) if t.dim() == 0 else t for t in inputs]), f"{shape}")


def test_memory_of_inference_mode_and_of_parameters(agree):
    """The library's memory outlives the mode in which the first call was made."""
    size = mpi.size()
    for operation in (bound("allreduce", torch.float32, "sum"), relayed(torch.float32, "sum")):
        with torch.inference_mode():
            values = torch.ones(9000)
            operation(values, None, 0)
        operation(values, None, 0)
        leaf = torch.nn.Parameter(torch.ones(9000))
        for _ in range(2):
            operation(leaf, None, 0)
        agree.equal(leaf.detach(), torch.full((9000,), float(size) ** 2))
    gathered = bound("allgather")
    with torch.inference_mode():
        gathered(torch.ones(3, dtype=torch.uint8), None, 0)
    agree.equal(gathered(torch.ones(3, dtype=torch.uint8), None, 0), torch.ones(3 * size, dtype=torch.uint8))


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize(
    ("compiled_at", "dtype"),
    [("none", torch.float32), *(("even", dtype) for dtype in (torch.float32, torch.int8, torch.complex128)),
     ("all", torch.complex128)],
    ids=str,
)  # fmt: skip
def test_compiled_pieces_meet_those_of_python(agree, monkeypatch, compiled_at, dtype):
    """Pieces of 3000 bytes and of 32 KB, and more of them than there is room for at first."""
    rank, size = mpi.rank(), mpi.size()
    compiles = can_call_from_kernels(runtime.current().world) and (
        compiled_at == "all" or (compiled_at == "even" and rank % 2 == 0)
    )
    monkeypatch.setattr(round_messages, "can_call_from_kernels", lambda group: compiles)
    monkeypatch.setattr(round_messages, "_NUM_PIECES", 8)
    for settings in (SMALL_CHUNKS, config.Config(pipeline_bytes=4 << 20)):
        operations = {each: bound(each, dtype, "sum", settings) for each in ("allreduce", "reduce", "reduce_scatter")}
        gather = bound("allgather", settings=settings)
        is_compiled = isinstance(operations["allreduce"].__self__.messages, round_messages.CompiledPieces)
        agree(is_compiled == compiles, f"{compiled_at}: {is_compiled}")
        for numel in (5000, 0, 9, 600_000 // dtype.itemsize):
            inputs = [contract.values((numel,), dtype, r) for r in range(size)]
            expected = contract.reduced(inputs, "sum")
            total = operations["allreduce"](inputs[rank].clone(), None, 0)
            at_root = operations["reduce"](inputs[rank].clone(), None, size - 1)
            part = operations["reduce_scatter"](inputs[rank].clone(), None, 0)
            agree.bits(total, expected, f"allreduce {numel}")
            agree.bits(at_root, expected if rank == size - 1 else inputs[rank], f"reduce {numel}")
            agree.bits(part, contract.rows(expected, rank, size), f"reduce_scatter {numel}")
            agree.bits(gather(inputs[rank], None, 0), torch.cat(inputs), f"allgather {numel}")


def test_the_room_for_pieces_grows_with_a_call_and_not_with_their_number(agree):
    operation = bound("allreduce", torch.float32, "sum").__self__
    rooms = []
    for _ in range(30):
        operation.allreduce(torch.ones(20_011), None, 0)
        pieces = getattr(operation.messages, "_pieces", ())
        # Crowded ranks sleep before MPI, and make their pieces in Python.
        is_queue = isinstance(pieces, PieceQueue)
        rooms.append(len(pieces._waiting) + len(pieces._begun) if is_queue else len(pieces))
    agree.equal(rooms[1:], rooms[1:2] * 29)


def test_an_error_of_mpi_in_a_piece_is_raised(agree):
    """A rank that does not exist: MPI returns an error to compiled code, which ends there."""
    pieces = bound("allreduce", torch.float32, "sum").__self__.messages
    peer = schedule.Message(mpi.size(), 0, 1)
    with pytest.raises(runtime.current().MPI.Exception, match=r"MPI_ERR_RANK|[Ii]nvalid rank"):
        pieces.begin(schedule.Round(sends=(peer,)), lambda _: torch.ones(9000), lambda _: torch.ones(9000))


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("form", ["compiled", "pieces", "whole", "exchange"])
def test_after_an_error_of_mpi_memory_is_kept_and_the_group_is_refused(agree, monkeypatch, form):
    """Regression: MPI went on to receive into freed memory, and the next call sent what was left of it.

    Rank 0 receives a message that is too long from each other rank, and nothing after it. It has arrived before, when
    Waitall of Open MPI returned no error.
    """
    rank, last, group = mpi.rank(), mpi.size() - 1, mpi.group(range(mpi.size())).intra
    monkeypatch.setattr(round_messages, "can_call_from_kernels", lambda _: form == "compiled")
    monkeypatch.setattr(group.context, "sends_whole", form == "whole")
    memory, too_long = np.ones(20_011, np.float32), np.ones(800, np.float32)
    tensor, kept = torch.from_numpy(memory), weakref.ref(memory)
    if form == "exchange":
        call, tag = partial(mpi_messages.exchange, group, [(last, tensor[:500])], [], 3000), mpi_messages.PARTS_TAG
    else:
        settings = config.Config(pipeline_bytes=2000, message_bytes=3000)
        call = partial(P2PReduction(group, torch.float32, "sum", settings).allreduce, tensor, None, 0)
        tag = round_messages._TAG
    senders = [last] if form == "exchange" else range(1, mpi.size())
    if rank in senders:
        group.comm.Send(too_long, 0, tag)
    elif rank == 0:
        for sender in senders:
            group.comm.Probe(sender, tag)
        agree.raises(MPI.Exception, call)  # that the message is too long; of several, that one has an error
        agree.raises(errors.StallError, call, "cannot be used any more")
        del call, tensor, memory
        gc.collect()
        agree(kept() is not None, "MPI receives into memory that has been freed")
    MPI.COMM_WORLD.Barrier()
    agree.equal(mpi.allreduce(1), mpi.size(), "another group")


def test_calls_of_other_backends_in_between(agree):
    """The messages of one call are not received by another."""
    rank, size = mpi.rank(), mpi.size()
    for k in range(20):
        backend = ("p2p", "mpi")[k % 2]
        total = mpi.allreduce(torch.full((k * 500 + 1,), float(rank + k)), backend=backend)
        agree(bool((total == sum(range(size)) + k * size).all()), f"call {k} by {backend}: {total}")
        root = k % size
        value = mpi.broadcast(torch.full((k * 900,), float(rank + k)), root, backend=backend)
        agree(bool((value == root + k).all()), f"call {k} by {backend}: {value}")


def test_unsupported_calls_are_refused_with_the_reason(agree):
    with pytest.raises(errors.BackendUnavailableError, match="it has no alltoall"):
        mpi.alltoall(torch.ones(4), backend="p2p")
    agree(mpi.collective_availability()["p2p", "allreduce", "cpu", "sync"] == "available")
