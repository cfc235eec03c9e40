"""To a user of collectives: one contract for all of collective x op x dtype x shape x strides x out x backend."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import contract
from helpers.joint import try_together
from helpers.outcomes import error_of
from hypothesis import strategies

import torchmpi as mpi
from torchmpi import errors
from torchmpi.launch import mpi_library

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("world")]


GPU_BACKENDS = (None, "ipc", "nccl", "shm", "mpi")


def modes(dtypes):
    """All dtypes synchronously by the default backend and by `mpi`; three dtypes asynchronously and by gloo.

    On CUDA all dtypes synchronously and three asynchronously, by every backend.
    """
    few = (torch.float32, torch.bfloat16, torch.int32)
    cases = [("cpu", dtype, False, backend) for backend in (None, "mpi") for dtype in dtypes]
    cases += [("cpu", dtype, True, None) for dtype in few]
    cases += [("cpu", torch.float32, True, backend) for backend in ("mpi", "gloo")]
    cases += [("cpu", dtype, False, "gloo") for dtype in few]
    if torch.cuda.is_available():
        cases += [("cuda", dtype, False, backend) for backend in GPU_BACKENDS for dtype in dtypes]
        cases += [("cuda", dtype, True, backend) for backend in GPU_BACKENDS for dtype in few]
    else:
        cases += [("cuda", torch.float32, False, None)]
    return [_named(*case) for case in cases]


def _named(place, dtype, asynchronous, backend):
    name = f"{dtype}-{'async' if asynchronous else 'sync'}-{backend or 'default'}".removeprefix("torch.")
    if place == "cpu":
        # By default, ranks of one host do not use MPI, but kernels that tests/unit drives as 2 to 70 ranks.
        of_others = [pytest.mark.any_mpi, *([] if backend == "gloo" else [pytest.mark.ranks(1, 3)])]
        marks = [] if backend == "mpi" else of_others
        return pytest.param(place, dtype, asynchronous, backend, id=name, marks=marks)
    return pytest.param(place, dtype, asynchronous, backend, id=f"cuda-{name}", marks=pytest.mark.gpu)


class Refused:
    """The result of a call that the backend does not have on this device."""


def call(collective, *arguments, asynchronous, **options):
    try:
        if asynchronous:
            return getattr(mpi, f"{collective}_async")(*arguments, **options).wait()
        return getattr(mpi, collective)(*arguments, **options)
    except (errors.BackendUnavailableError, errors.DtypeError):
        if all(argument.is_cpu for argument in arguments if isinstance(argument, torch.Tensor)):
            raise  # these backends of the host have all collectives
        return Refused()


LAYOUTS = tuple(itertools.product((torch.clone, contract.strided), (False, True)))
"""The contiguous tensor and one with strides, each with and without `out`."""


def laid(tensor, device, number):
    """The name of a layout, the tensor in it, and whether the call gets `out`."""
    make, with_out = LAYOUTS[number % len(LAYOUTS)]
    return f"{make.__name__}, out={with_out}", make(tensor.to(device)), with_out


class Judge:
    """Compares results with references: bit by bit, except for sums of NCCL, whose order differs."""

    def __init__(self, agree, device, backend):
        self._agree = agree
        self._may_differ = device.type == "cuda" and backend in (None, "nccl") and mpi.size() > 1
        self.num_seen = 0

    def bits(self, actual, expected, message):
        if not isinstance(actual, Refused):
            self.num_seen += 1
            self._agree.bits(actual.cpu(), expected, message)

    def sum(self, actual, expected, message):
        is_exact = not (expected.is_floating_point() or expected.is_complex())
        if not self._may_differ or is_exact or isinstance(actual, Refused):
            self.bits(actual, expected, message)
        else:
            self.num_seen += 1
            self._agree.close(actual.cpu(), expected, message)

    def end(self, what):
        if not self.num_seen:
            pytest.skip(f"{what} is not available here")


@pytest.mark.parametrize(("device", "dtype", "asynchronous", "backend"), modes(contract.OPS_OF), indirect=["device"])
def test_reductions_match_the_sum_in_rank_order(agree, device, dtype, asynchronous, backend):
    """Each operation with every other shape; layouts alternate, so that each operation has all of them."""
    rank, size, way = mpi.rank(), mpi.size(), {"asynchronous": asynchronous, "backend": backend}
    judge, root = Judge(agree, device, backend), size - 1
    cases = [(shape, [contract.values(shape, dtype, r) for r in range(size)]) for shape in contract.SHAPES]
    assert len(contract.OPS_OF[dtype]) % 2
    for number, ((shape, inputs), op) in enumerate([*itertools.product(cases, contract.OPS_OF[dtype])][::2]):
        expected = contract.reduced(inputs, op)
        layout, tensor, with_out = laid(inputs[rank], device, number)
        case = f"{op} {shape} {layout}"
        out = torch.zeros_like(tensor) if with_out else None
        result = call("allreduce", tensor, out, op=op, **way)
        judge.sum(result, expected, f"allreduce {case}")
        expected_object = out if with_out else tensor
        agree(result is expected_object or isinstance(result, Refused), f"allreduce {case}: not in place")
        if with_out:
            judge.bits(tensor, inputs[rank], f"allreduce {case}: the input was changed")

        tensor = inputs[rank].to(device, copy=True)
        out = torch.zeros_like(tensor) if with_out else None
        result = call("reduce", tensor, root, out, op=op, **way)
        judge.sum(result, expected if rank == root else inputs[rank], f"reduce {op} {shape} out={with_out}")

        result = call("reduce_scatter", inputs[rank].to(device, copy=True), op=op, **way)
        judge.sum(result, contract.rows(expected, rank, size), f"reduce_scatter {op} {shape}")
    judge.end(f"{dtype} by {backend}")


@pytest.mark.parametrize(("device", "dtype", "asynchronous", "backend"), modes(contract.MOVABLE), indirect=["device"])
def test_movements_preserve_every_bit(agree, device, dtype, asynchronous, backend):
    rank, size, way = mpi.rank(), mpi.size(), {"asynchronous": asynchronous, "backend": backend}
    judge = Judge(agree, device, backend)
    for number, shape in enumerate(contract.SHAPES, contract.MOVABLE.index(dtype)):
        inputs = [contract.values(shape, dtype, r) for r in range(size)]
        everything = torch.cat([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in inputs])
        layout, tensor, with_out = laid(inputs[rank], device, number)  # they alternate by shape and by dtype
        case = f"{shape} {layout}"

        for root in {0, size - 1}:
            out = torch.zeros_like(tensor) if with_out else None
            result = call("broadcast", tensor.clone() if not with_out else tensor, root, out, **way)
            judge.bits(result, inputs[root], f"broadcast {case} root={root}")

        out = torch.zeros_like(everything, device=device) if with_out else None
        result = call("allgather", tensor, out, **way)
        judge.bits(result, everything, f"allgather {case}")
        agree(not with_out or result is out or isinstance(result, Refused), f"allgather {case}: out was not used")

        root = size - 1 if with_out else 0
        result = call("gather", tensor, root, **way)
        if rank == root:
            judge.bits(result, everything, f"gather {case} root={root}")
        else:
            agree(result is None or isinstance(result, Refused), f"gather {case} root={root}: a non-root got some")

        if device.type == "cpu" or backend is None:
            result = call("scatter", tensor if rank == root else None, root, **way)
            judge.bits(result, contract.rows(inputs[root], rank, size), f"scatter {case} root={root}")

        result = call("alltoall", tensor, **way)
        expected = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
        judge.bits(result, expected, f"alltoall {case}")
    judge.end(f"{dtype} by {backend}")


def test_calls_are_ordered_with_work_queued_before_and_after(agree, device):
    """Without synchronization of the device in between: on streams of the program, synchronous and asynchronous."""
    size = mpi.size()
    streams = [None, torch.cuda.Stream(device)] if device.type == "cuda" else [None]
    found = []
    for stream, asynchronous, numel in itertools.product(streams, (False, True), (5, 3_000_000)):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(numel, device=device)
            for _ in range(20):
                tensor.add_(1)
            result = call("allreduce", tensor, asynchronous=asynchronous)
            after = result * 2
            tensor.zero_()
            found.append((after.cpu() == 40.0 * size).all().item())
    agree.equal(found, [True] * len(found))


def test_calls_without_a_wait_release_their_memory_and_corrupt_no_other(agree, device):
    kept = torch.full((100_000,), 7.0, device=device)
    for _ in range(30):
        mpi.allreduce_async(torch.ones(100_000, device=device))
        kept = kept + torch.zeros(100_000, device=device)  # takes memory that the call above may have released
    last = mpi.allreduce_async(torch.ones(4, device=device))
    result = last.wait().cpu()
    agree.equal(result.tolist(), [float(mpi.size())] * 4)
    agree((kept.cpu() == 7).all().item(), "a call wrote into memory that was no longer its own")


@pytest.mark.parametrize("backend", (None, "shm", "mpi"))
def test_allreduce_many_on_a_device_equals_single_calls(agree, device, backend):
    """Regression in shm: device addresses were passed to a kernel of the host."""
    inputs = [contract.values((n,), torch.float32, mpi.rank(), seed=n) for n in (3, 1000, 200_000, 1)]
    expected = [mpi.allreduce(tensor.clone(), op="max") for tensor in inputs]
    try:
        together = mpi.allreduce_many([tensor.to(device) for tensor in inputs], op="max", backend=backend)
    except errors.BackendUnavailableError:
        pytest.skip(f"{backend} is not available here")  # shm: the ranks are on several hosts
    for actual, wanted in zip(together, expected, strict=True):
        agree.bits(actual.cpu(), wanted, f"{tuple(wanted.shape)}")


def test_lengths_may_differ_between_ranks(agree):
    rank, size = mpi.rank(), mpi.size()
    inputs = [contract.values((3 * r, 2), torch.float32, r) for r in range(size)]
    gathered, at_root = mpi.allgather(inputs[rank]), mpi.gather(inputs[rank], root=0)
    swapped = mpi.alltoall(inputs[rank])
    agree.equal(gathered, torch.cat(inputs))
    agree.equal(at_root, torch.cat(inputs) if rank == 0 else None)
    agree.equal(swapped, torch.cat([contract.rows(theirs, rank, size) for theirs in inputs]))


def test_bits_do_not_depend_on_size_or_position(agree):
    """A gradient summed alone, in a bucket, or in parts has the same bits: sums are in rank order."""
    for dtype in contract.FLOATS:
        inputs = contract.values((40_000,), dtype, mpi.rank(), seed=3)
        whole = mpi.allreduce(inputs.clone())
        parts = torch.cat([mpi.allreduce(part.clone()) for part in inputs.split([1, 2, 1000, 7, 30_000, 8990])])
        scattered = mpi.allgather(mpi.reduce_scatter(inputs.clone()))
        agree.bits(whole, parts, f"{dtype}: parts differ")
        agree.bits(whole, scattered, f"{dtype}: reduce_scatter differs")


def test_all_ranks_get_the_same_bits_even_for_nan_and_signed_zero(agree):
    special = torch.tensor([float("nan"), 0.0, -0.0, float("inf"), 1.0])
    inputs = special.roll(mpi.rank())
    results = {op: mpi.allreduce(inputs.clone(), op=op) for op in ("sum", "avg", "prod", "min", "max")}
    for op, result in results.items():
        everywhere = mpi.allgather(result.view(1, -1).view(torch.int32))
        agree(bool((everywhere == everywhere[0]).all()), f"{op}: {everywhere}")


def test_small_integers_wrap_around_and_do_not_saturate(agree):
    """Open MPI 5.0 saturates 8 and 16 bit sums in its AVX code, on some elements of a buffer only."""
    for dtype, top in ((torch.int8, 127), (torch.int16, 32767), (torch.uint8, 255), (torch.uint16, 65535)):
        result = mpi.allreduce(torch.full((1000,), top, dtype=torch.int64).to(dtype))
        expected = torch.full((1000,), top * mpi.size(), dtype=torch.int64).to(dtype)
        agree.bits(result, expected, f"{dtype}")


def test_half_precision_is_rounded_once(agree):
    """Summed in 16 bits, the small terms would vanish one by one."""
    size = mpi.size()
    for dtype, big, small in ((torch.bfloat16, 256.0, 0.75), (torch.float16, 2048.0, 0.75)):
        value = big if mpi.rank() == 0 else small
        result = mpi.allreduce(torch.full((5,), value, dtype=dtype))
        expected = torch.full((5,), big + small * (size - 1), dtype=torch.float32).to(dtype)
        agree.equal(result, expected, str(dtype))


def test_numbers_are_returned_as_numbers(agree):
    rank, size = mpi.rank(), mpi.size()
    checks = [
        (mpi.allreduce(rank), sum(range(size))),
        (mpi.allreduce(0.5), 0.5 * size),
        (mpi.allgather(rank, backend="mpi"), list(range(size))),
        (mpi.allreduce(rank, op="avg"), sum(range(size)) / size),
        (mpi.allreduce(rank == 0), 1),
        (mpi.allreduce(rank == 0, op="lor"), True),
        (mpi.allreduce(1j), 1j * size),
        (mpi.broadcast(rank, root=size - 1), size - 1),
        (mpi.allgather(rank), list(range(size))),
        (mpi.gather(float(rank)), [float(r) for r in range(size)] if rank == 0 else None),
        (mpi.reduce(1), size if rank == 0 else 1),
        (mpi.allreduce_async(rank).wait(), sum(range(size))),
        (mpi.allreduce(0.5, backend="mpi"), 0.5 * size),
    ]
    for actual, expected in checks:
        agree.equal(actual, expected)
        agree.equal(type(actual), type(expected))


def test_objects(agree):
    rank, size = mpi.rank(), mpi.size()
    from_last = mpi.broadcast_object({"rank": rank, "data": "x" * 1000}, root=size - 1)
    everybody = mpi.allgather_object(("rank", rank, [None] * rank))
    agree.equal(from_last, {"rank": size - 1, "data": "x" * 1000})
    agree.equal(everybody, [("rank", r, [None] * r) for r in range(size)])
    for dtype in (torch.uint16, torch.float8_e4m3fn, torch.complex32):  # regression: an AttributeError of torch
        parameter = torch.nn.Parameter(torch.arange(8, dtype=torch.uint8).view(dtype), requires_grad=False)
        received = mpi.broadcast_object([parameter])[0]
        agree.equal((type(received), received.dtype), (torch.nn.Parameter, dtype))
        agree.equal(received.view(torch.uint8), parameter.view(torch.uint8))


def test_objects_of_all_lengths():
    """Pickles with and without room in the first call, on some of the ranks or all."""
    rank, size = mpi.rank(), mpi.size()
    lengths = strategies.sampled_from((0, 1, 900, *range(1000, 1020), 1024, 5000, 70_000))

    def check(counts):
        assert mpi.broadcast_object("x" * counts[rank], size - 1) == "x" * counts[size - 1]
        assert mpi.allgather_object("x" * counts[rank]) == ["x" * count for count in counts[:size]]

    try_together(check, strategies.lists(lengths, min_size=4, max_size=4))


def test_messages_longer_than_mpi_counts_are_split(agree):
    """More than 2^31 elements go through the same code with the real limit; here the limit is a few bytes."""
    from torchmpi.backends.mpi import MPIBackend

    config = mpi.Config(message_bytes=64, pipeline_bytes=40)
    backend = MPIBackend(config)
    group = mpi.communicator().intra
    rank, size = mpi.rank(), mpi.size()

    def run(collective, tensor, root=0, op=None, dtype=torch.float32):
        return backend.bind(group, collective, dtype, op).run(tensor, None, root)

    inputs = [contract.values((101, 3), torch.float32, r) for r in range(size)]
    mine, total = inputs[rank], contract.reduced(inputs, "avg")
    uneven = [contract.values((11 * r, 3), torch.float32, r) for r in range(size)]
    results = {
        "allreduce": (run("allreduce", mine.clone(), op="avg"), total),
        "reduce": (run("reduce", mine.clone(), 0, "avg"), total if rank == 0 else mine),
        "reduce_scatter": (run("reduce_scatter", mine.clone(), op="avg"), contract.rows(total, rank, size)),
        "broadcast": (run("broadcast", mine.clone(), size - 1), inputs[-1]),
        "allgather": (run("allgather", uneven[rank]), torch.cat(uneven)),
        "gather": (run("gather", uneven[rank], size - 1), torch.cat(uneven) if rank == size - 1 else None),
        "scatter": (run("scatter", mine if rank == 0 else None), contract.rows(inputs[0], rank, size)),
        "alltoall": (run("alltoall", mine), torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])),
    }
    integers = [contract.values((101,), torch.int32, r) for r in range(size)]
    for collective, wanted in (("allreduce", contract.reduced(integers, "sum")),):
        results[f"{collective} int32"] = (run(collective, integers[rank].clone(), op="sum", dtype=torch.int32), wanted)
    part = run("reduce_scatter", integers[rank].clone(), op="sum", dtype=torch.int32)
    results["reduce_scatter int32"] = (part, contract.rows(contract.reduced(integers, "sum"), rank, size))
    for name, (actual, expected) in results.items():
        if expected is None:
            agree(actual is None, f"{name}: a non-root got {actual}")
        else:
            agree.bits(actual, expected, name)


def test_views_that_hide_a_conjugation_or_sign_are_resolved(agree):
    base = torch.tensor([1 + 2j, 3 - 4j])
    conjugate = mpi.broadcast(base.conj(), 0, torch.empty(2, dtype=torch.complex64))
    imaginary = mpi.allgather(base[:1].conj().imag)
    agree.equal(conjugate, torch.tensor([1 - 2j, 3 + 4j]))
    agree.equal(imaginary, torch.full((mpi.size(),), -2.0))


def test_autograd_detects_in_place_results(agree):
    """A value saved for backward and then overwritten by a collective must be an error, not a wrong gradient."""
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    loss = (y * y).sum()
    mpi.allreduce(y.detach())
    agree.raises(RuntimeError, loss.backward, "modified by an inplace operation")


def test_parameters_are_taken_as_they_are(agree):
    parameter = torch.nn.Parameter(torch.full((3,), float(mpi.rank())))
    mpi.broadcast(parameter, root=mpi.size() - 1)
    agree.equal(parameter.detach(), torch.full((3,), float(mpi.size() - 1)))
    agree(parameter.requires_grad and parameter.is_leaf)


def test_out_that_overlaps_the_input(agree):
    size = mpi.size()
    base = torch.arange(float(4 + 4 * size))
    result = mpi.allgather(base[2:6], base[: 4 * size])
    agree.equal(result, torch.arange(2.0, 6.0).repeat(size))


# --- regressions


@pytest.mark.parametrize("kind", ("leaf", "part of a graph", "inference"))
def test_autograd_neither_records_nor_refuses_a_collective(agree, kind):
    """Regression: torch computed averages and ordered sums on the user's tensor, with a record in the graph."""
    size = mpi.size()
    for op, expected in (("sum", float(size)), ("avg", 1.0), ("max", 1.0)):
        if kind == "leaf":
            tensor = torch.nn.Parameter(torch.ones(3000))
        elif kind == "inference":
            with torch.inference_mode():
                tensor = torch.ones(3000)
        else:
            x = torch.ones(3000, requires_grad=True)
            tensor = x * 2 / 2
        for layout in (tensor, tensor.t() if tensor.dim() > 1 else tensor):
            result = mpi.allreduce(layout, op=op)
        agree(
            bool((result.detach() == (expected if op != "sum" else expected * size)).all()) or op != "sum",
            f"{op} twice",
        )
        many = mpi.allreduce_many([tensor, torch.ones(5)], op=op)
        agree(many[0] is tensor, op)
        if kind == "part of a graph":
            tensor.sum().backward()
            agree.equal(x.grad, torch.ones(3000), f"{op}: the collective became part of the graph")


def test_an_out_that_does_not_fit_is_refused_after_the_call_has_ended_everywhere(agree):
    """Regression: the error was raised during the call, so other ranks hung, or the next call got this one's data."""
    rank, size = mpi.rank(), mpi.size()
    calls = {
        "allgather": lambda out: mpi.allgather(torch.full((2,), 100.0 + rank), out),
        "gather": lambda out: mpi.gather(torch.full((2,), 100.0 + rank), 0, out),
        "scatter": lambda out: mpi.scatter(torch.arange(2.0 * size) if rank == 0 else None, 0, out),
        "alltoall": lambda out: mpi.alltoall(torch.full((size,), float(rank)), out),
    }
    for name, call in calls.items():
        refused = False
        try:
            call(torch.empty(99) if rank == 0 else None)
        except mpi.TorchMPIError as error:
            refused = "99" in str(error)
        agree(refused == (rank == 0), f"{name}: {refused}")
        again = call(None)
        if name == "allgather":
            agree.equal(again, torch.arange(100.0, 100 + size).repeat_interleave(2), name)
    try:
        result = mpi.scatter(
            torch.ones(size) if rank == 0 else None, 0, torch.empty(1, dtype=torch.int32) if rank else None
        )
    except mpi.TorchMPIError as error:
        agree(rank > 0 and "int32" in str(error), str(error))
    else:
        agree(rank == 0, f"bytes of another dtype were taken: {result}")


@pytest.mark.min_ranks(2)
def test_a_root_that_runs_ahead_waits_for_the_comparison(agree):
    """Regression: after 64 calls the root overwrote entries that had not been compared, and missed a mismatch."""
    import time

    world = mpi.communicator(0).intra
    if mpi.rank() == mpi.size() - 1:
        time.sleep(0.3)
    for _ in range(200):
        mpi.reduce(torch.ones(4), root=mpi.size() - 1)
        mpi.broadcast(torch.ones(4), root=0)
    if world.log_board is not None:
        ahead = max(world.log_board.get(row, 0) for row in range(mpi.size())) - world.call_log.seq
        agree(ahead <= 64, f"{ahead} calls ahead")


def test_bools_of_any_byte(agree):
    """A view makes bools of bytes other than 0 and 1; bitwise operations took 2 and 1 for different."""
    mine = torch.tensor([2 - mpi.rank() % 2, 0], dtype=torch.uint8).view(torch.bool)
    both = mpi.allreduce(mine.clone(), op="band")
    odd = mpi.allreduce(mine.clone(), op="bxor")
    agree.equal(both.tolist(), [True, False])
    agree.equal(odd.tolist(), [mpi.size() % 2 == 1, False])


def test_the_default_device_does_not_apply_to_internal_tensors(agree):
    torch.set_default_device("meta")
    try:
        results = (
            mpi.allreduce(torch.ones(5, device="cpu", dtype=torch.bfloat16)),
            mpi.allgather(mpi.rank()),
            mpi.broadcast_object("x"),
        )
    finally:
        torch.set_default_device(None)
    agree.equal(results[0].tolist(), [float(mpi.size())] * 5)
    agree.equal(results[1:], (list(range(mpi.size())), "x"))


def test_numpys_scalars_and_ranks(agree):
    import numpy as np

    agree.equal(mpi.allreduce(np.float64(0.5)), 0.5 * mpi.size())
    agree.equal(mpi.allreduce(np.bool_(True), op="land"), True)
    agree.equal(mpi.broadcast(7, root=np.int64(0)), 7)
    rank, size = mpi.rank(), mpi.size()
    left, right = np.int64((rank - 1) % size), np.int64((rank + 1) % size)
    agree.equal(mpi.sendreceive(rank, src=left, dst=right), int(left))
    agree.equal([mpi.allreduce(value, op="avg") for value in (True, np.bool_(False))], [1.0, 0.0])


def test_out_is_not_checked_where_nothing_is_received(agree):
    root, size = mpi.size() - 1, mpi.size()
    for call, shape in ((mpi.reduce, (3,)), (mpi.gather, (3 * size,))):
        out = torch.zeros(shape) if mpi.rank() == root else torch.zeros(1, dtype=torch.int16).expand(7)
        call(torch.ones(3), root, out)
        expected = torch.full(shape, float(size) if call is mpi.reduce else 1.0)
        agree.equal(out, expected if mpi.rank() == root else torch.zeros(7, dtype=torch.int16))


@pytest.mark.parametrize("backend", ("shm", "mpi"))
def test_scatter_ignores_tensors_of_other_ranks(agree, backend):
    """Regression: this dtype and shape were used for the root's, so more bytes were received than the memory holds."""
    rank, size = mpi.rank(), mpi.size()
    if mpi.collective_availability()[backend, "scatter", "cpu", "sync"] != "available":
        pytest.skip(f"no {backend} here")
    room = torch.zeros(16)
    rows = torch.arange(4.0 * size, dtype=torch.float64)
    given, out = (rows, None) if rank == 0 else (torch.zeros(1), room[:2])
    problem = error_of(mpi.scatter, given, 0, out, backend=backend)
    agree(bool(problem) is (rank > 0), problem or "eight-byte numbers in a tensor of four-byte ones")
    agree.equal(room, torch.zeros(16), "what is behind out")
    result = mpi.scatter(rows if rank == 0 else torch.zeros(1), 0, backend=backend)
    agree.equal(result, rows[4 * rank : 4 * rank + 4], "the right call after it")


def test_reduce_with_a_library_that_cannot_reduce_in_place(agree, monkeypatch):
    """Regression: MPI_Reduce of MPICH 4.0.3 crashed with IN_PLACE on a root other than 0."""
    monkeypatch.setattr(mpi_library.load(), "get_vendor", lambda: ("MPICH", (4, 0, 3)))
    mpi.push_communicator("all")  # its calls are not prepared yet
    rank, size = mpi.rank(), mpi.size()
    tensor = torch.full((2000,), float(rank))
    mpi.reduce(tensor, size - 1, backend="mpi")
    mpi.set_communicator(0)
    expected = sum(range(size)) if rank == size - 1 else rank
    agree.bits(tensor, torch.full((2000,), float(expected)), "reduce")


def test_a_receiver_of_a_scatter_may_pass_a_tensor_of_any_shape(agree):
    """Regression: its dimensions were counted, although it is ignored."""
    given = torch.arange(float(mpi.size())) if mpi.rank() == 0 else torch.ones((1,) * 20)
    agree.equal(mpi.scatter(given, 0), torch.tensor([float(mpi.rank())]))
