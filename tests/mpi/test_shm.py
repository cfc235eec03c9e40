"""The shared-memory backend, with slots so small that short tensors take every path: against the twins, bit for bit."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import strategies

import torchmpi as mpi
from torchmpi import layout, runtime
from torchmpi.backends import shm
from torchmpi.errors import MismatchError

sys.path.insert(0, str(Path(__file__).parent))
import contract
from joint import try_together

PAGE_SLOTS, LARGE_SLOTS = 4096, 64 << 10


def start(**settings: object) -> None:
    """With the watchdog as these tests have it, and otherwise the settings given."""
    mpi.start(config=dataclasses.replace(mpi.Config.from_environment(), verbose=False, **settings))
    problem = runtime.current().selector.backends["shm"].why_not("allreduce", "cpu", mpi.communicator(0).intra)
    if problem is not None:
        pytest.skip(f"no shared memory: {problem}")


@pytest.fixture(scope="module", params=(PAGE_SLOTS, LARGE_SLOTS), ids=("slots of a page", "slots of 64 KB"))
def slots(request):
    """torchmpi, started with slots of this size; the session's own start is put back afterwards."""
    was_running = runtime.is_running()
    mpi.stop()
    start(slot_bytes=request.param)
    yield request.param
    mpi.stop()
    if was_running:
        mpi.start()


@pytest.fixture
def stopped():
    """For tests that start with settings of their own."""
    before = runtime.current().config if runtime.is_running() else None
    mpi.stop()
    yield
    mpi.stop()
    if before is not None:
        mpi.start(config=before)


def numels(itemsize: int, slot_bytes: int) -> list[int]:
    """Lengths on both sides of every border."""
    size = mpi.size()
    borders = [
        0,
        layout.PAYLOAD_BYTES - 8,
        layout.PAYLOAD_BYTES,
        size * (layout.PAYLOAD_BYTES - 8),
        shm._WHOLE_BYTES,
        slot_bytes,
        slot_bytes * size,
        2 * slot_bytes,
        5 * slot_bytes + 64,
    ]
    around = {border // itemsize + more for border in borders for more in (-1, 0, 1)}
    return sorted(numel for numel in around | {7, 3001} if numel >= 0)


def shared(values: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The same values in shared memory, so many elements into it."""
    memory = mpi.empty_shared(values.numel() + offset + 3, dtype=values.dtype)
    return memory[offset : offset + values.numel()].view(values.shape).copy_(values)


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [contract.values(shape, dtype, rank, seed) for rank in range(mpi.size())]


# --- every verb, on both sides of every border


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, "sum"),
        (torch.bfloat16, "avg"),
        (torch.float64, "max"),
        (torch.complex128, "prod"),
        (torch.int8, "sum"),
        (torch.bool, "lor"),
    ],
    ids=str,
)
def test_reductions_of_every_length(slots, agree, dtype, op):
    rank, size = mpi.rank(), mpi.size()
    for numel in numels(dtype.itemsize, slots):
        inputs = inputs_of((numel,), dtype)
        mine, expected, case = inputs[rank], contract.reduced(inputs, op), f"{numel} {dtype} {op}"
        result = mpi.allreduce(mine.clone(), op=op, backend="shm")
        agree.bits(result, expected, f"allreduce of {case}")
        for root in range(size):
            result = mpi.reduce(mine.clone(), root, op=op, backend="shm")
            agree.bits(result, expected if rank == root else mine, f"reduce of {case}, root {root}")
        result = mpi.reduce_scatter(mine.clone(), op=op, backend="shm")
        agree.bits(result, contract.rows(expected, rank, size), f"reduce_scatter of {case}")


@pytest.mark.parametrize("dtype", (torch.uint8, torch.float16, torch.complex128), ids=str)
def test_movements_of_every_length(slots, agree, dtype):
    rank, size = mpi.rank(), mpi.size()
    for numel in numels(dtype.itemsize, slots):
        inputs = inputs_of((numel,), dtype)
        mine, everything = inputs[rank], torch.cat(inputs)
        result = mpi.allgather(mine, backend="shm")
        agree.bits(result, everything, f"allgather of {numel}")
        result = mpi.alltoall(mine, backend="shm")
        wanted = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
        agree.bits(result, wanted, f"alltoall of {numel}")
        for root in range(size):
            result = mpi.broadcast(mine.clone(), root, backend="shm")
            agree.bits(result, inputs[root], f"broadcast of {numel}, root {root}")
            result = mpi.gather(mine, root, backend="shm")
            fits = result is None if rank != root else contract.same_bits(result, everything)
            agree(fits, f"gather of {numel}, root {root}")
            result = mpi.scatter(mine if rank == root else None, root, backend="shm")
            agree.bits(result, contract.rows(inputs[root], rank, size), f"scatter of {numel} by {root}")


def test_rows_of_odd_length(slots, agree):
    """A row of 3 elements lies across the borders of slots and of lines."""
    rank, size = mpi.rank(), mpi.size()
    for num_rows in (1, 2, size + 1, 500, slots // 4 + 1):
        inputs = inputs_of((num_rows, 3), torch.float32)
        expected = contract.reduced(inputs, "sum")
        result = mpi.reduce_scatter(inputs[rank].clone(), backend="shm")
        agree.bits(result, contract.rows(expected, rank, size), f"reduce_scatter of {num_rows} rows")
        result = mpi.alltoall(inputs[rank], backend="shm")
        wanted = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
        agree.bits(result, wanted, f"alltoall of {num_rows} rows")
        result = mpi.scatter(inputs[rank] if rank == 0 else None, 0, backend="shm")
        agree.bits(result, contract.rows(inputs[0], rank, size), f"scatter of {num_rows} rows")


def test_ranks_that_bring_different_lengths(slots, agree):
    rank, size = mpi.rank(), mpi.size()
    lengths = [
        [3 * r for r in range(size)],
        [slots // 8 * (size - r) + r for r in range(size)],
        [0] * (size - 1) + [slots],
        [5 * slots] + [1] * (size - 1),
    ]
    for numbers in lengths:
        inputs = [contract.values((numbers[r], 2), torch.float32, r) for r in range(size)]
        everything = torch.cat(inputs)
        result = mpi.allgather(inputs[rank], backend="shm")
        agree.bits(result, everything, f"allgather of {numbers} rows")
        result = mpi.alltoall(inputs[rank], backend="shm")
        wanted = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
        agree.bits(result, wanted, f"alltoall of {numbers} rows")
        for root in range(size):
            result = mpi.gather(inputs[rank], root, backend="shm")
            fits = result is None if rank != root else contract.same_bits(result, everything)
            agree(fits, f"gather of {numbers} rows, root {root}")


def test_a_scatter_of_more_dimensions_than_can_be_announced_is_refused_on_all_ranks(slots, agree):
    tensor = torch.ones((1,) * 13)
    try:
        mpi.scatter(tensor if mpi.rank() == 0 else None, 0, backend="shm")
    except mpi.TorchMPIError as error:
        agree(("13 dimensions" in str(error)) == (mpi.rank() == 0), str(error))
    else:
        agree(False, "accepted")
    agree.equal(mpi.allreduce(1), mpi.size(), "the next call")


# --- tensors in shared memory


@pytest.mark.parametrize("who", ("all", "the first", "the last", "all but the first"))
def test_shared_tensors_have_the_bits_of_others(slots, agree, who):
    rank, size = mpi.rank(), mpi.size()
    chosen = {"all": range(size), "the first": [0], "the last": [size - 1], "all but the first": range(1, size)}[who]
    for dtype, op in ((torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.int8, "max")):
        for numel in numels(dtype.itemsize, slots)[-12:]:
            inputs = inputs_of((numel,), dtype)
            expected, case = contract.reduced(inputs, op), f"{numel} {dtype} {op}"

            def mine(inputs=inputs):
                return shared(inputs[rank], rank + 1) if rank in chosen else inputs[rank].clone()

            result = mpi.allreduce(mine(), op=op, backend="shm")
            agree.bits(result, expected, f"allreduce of {case}")
            result = mpi.allreduce_async(mine(), op=op, backend="shm").wait()
            agree.bits(result, expected, f"allreduce_async of {case}")
            root = size - 1
            result = mpi.reduce(mine(), root, op=op, backend="shm")
            agree.bits(result, expected if rank == root else inputs[rank], f"reduce of {case}")


def test_shared_memory_beside_a_view_is_left_alone(slots, agree):
    numel = 3 * slots
    for kind in ("allreduce", "reduce"):
        memory = mpi.empty_shared(numel + 20).fill_(-1.0)
        view = memory[7 : 7 + numel].fill_(1.0)
        getattr(mpi, kind)(view, backend="shm")
        wanted = float(mpi.size()) if kind == "allreduce" or mpi.rank() == 0 else 1.0
        agree.equal(view, torch.full((numel,), wanted), kind)
        agree.equal(memory[:7].tolist() + memory[7 + numel :].tolist(), [-1.0] * 20, kind)


def test_shared_tensors_in_every_verb(slots, agree):
    rank, size = mpi.rank(), mpi.size()
    inputs = inputs_of((slots, 2), torch.float32)
    results = [
        (mpi.broadcast(shared(inputs[rank]), size - 1), inputs[-1]),
        (mpi.allgather(shared(inputs[rank]), shared(torch.cat(inputs) * 0)), torch.cat(inputs)),
        (mpi.reduce_scatter(shared(inputs[rank])), contract.rows(contract.reduced(inputs, "sum"), rank, size)),
        (mpi.scatter(shared(inputs[rank]) if rank == 0 else None), contract.rows(inputs[0], rank, size)),
        (mpi.alltoall(shared(inputs[rank])), torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])),
        (mpi.allreduce(shared(inputs[rank]).t()).t(), contract.reduced(inputs, "sum")),
    ]
    for index, (actual, expected) in enumerate(results):
        agree.bits(actual, expected, f"result {index}")


def test_shapes_of_shared_tensors(slots, agree):
    for shape, dtype in (((), torch.float64), ((0,), torch.int8), ((2, 0, 3), torch.bool), ((3, 5), torch.bfloat16)):
        tensor = mpi.empty_shared(*shape, dtype=dtype)
        agree.equal((tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()), (shape, dtype, True))
    agree.equal(tuple(mpi.empty_shared((2, 3)).shape), (2, 3))
    agree.equal(mpi.empty_shared(2).dtype, torch.get_default_dtype())
    for wrong in (-1, (3, -2), 2.5, "3"):
        try:
            tensor = mpi.empty_shared(wrong)
        except (TypeError, ValueError, RuntimeError):
            pass
        else:
            agree(False, f"a shape of {wrong!r} was accepted: {tuple(tensor.shape)}")


def open_segments() -> tuple[int, int]:
    """Descriptors of this process, and mappings of shared tensors."""
    gc.collect()
    with open("/proc/self/maps") as file:
        mapped = sum("torchmpi-tensor" in line for line in file)
    return len(os.listdir("/proc/self/fd")), mapped


def test_shared_tensors_that_come_and_go_leave_nothing(slots, agree):
    def use(times: int) -> None:
        for index in range(times):
            tensor = mpi.empty_shared(slots + index).fill_(1.0)
            mpi.allreduce(tensor, backend="shm")
            agree(bool((tensor == mpi.size()).all()), f"wrong sum in round {index}")

    use(20)
    before = open_segments()
    use(100)
    after = open_segments()
    agree(after[0] <= before[0], f"descriptors {before[0]} -> {after[0]}")
    agree(after[1] <= before[1], f"mappings {before[1]} -> {after[1]}")


def test_more_shared_tensors_than_a_group_remembers(slots, agree):
    rank, size = mpi.rank(), mpi.size()
    tensors = [mpi.empty_shared(slots) for _ in range(70)]
    for _ in range(2):
        for index, tensor in enumerate(tensors):
            mpi.allreduce(tensor.fill_(rank + index), backend="shm")
    for index, tensor in enumerate(tensors):
        agree(bool((tensor == sum(range(size)) + size * index).all()), f"tensor {index}")


def test_shared_tensors_outlive_stop(stopped, agree):
    start(slot_bytes=PAGE_SLOTS)
    old = mpi.empty_shared(5000).fill_(2.0)
    mpi.allreduce(old)
    mpi.stop()
    agree.equal(old[0].item(), 2.0 * mpi_size())
    old.fill_(3.0)
    start(slot_bytes=PAGE_SLOTS)
    new = mpi.empty_shared(5000).fill_(1.0)
    mpi.allreduce(old)
    mpi.allreduce(new)
    agree(bool((old == 3 * mpi.size()).all()), "the old tensor")
    agree(bool((new == mpi.size()).all()), "a new one")
    before = open_segments()[1]
    del old, new
    agree(open_segments()[1] < before, "their memory was not given back")


def mpi_size() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


# --- the same bits on all ways


@pytest.mark.parametrize("dtype", contract.FLOATS, ids=str)
def test_bits_depend_neither_on_the_way_nor_on_the_length(slots, agree, dtype):
    inputs = contract.values((5 * slots // dtype.itemsize + 11,), dtype, mpi.rank(), seed=3)
    for op in ("sum", "avg", "prod"):
        expected = mpi.allreduce(inputs.clone(), op=op, backend="mpi")
        pieces = inputs.clone().split([1, 2, 28, 29, 1000, inputs.numel() - 1060])
        results = {
            "shm": mpi.allreduce(inputs.clone(), op=op, backend="shm"),
            "async": mpi.allreduce_async(inputs.clone(), op=op, backend="shm").wait(),
            "shared": mpi.allreduce(shared(inputs), op=op, backend="shm"),
            "pieces": torch.cat([mpi.allreduce(piece.clone(), op=op, backend="shm") for piece in pieces]),
            "many": torch.cat(list(mpi.allreduce_many([piece.clone() for piece in pieces], op=op))),
            "scattered": mpi.allgather(mpi.reduce_scatter(inputs.clone(), op=op, backend="shm")),
        }
        for way, result in results.items():
            agree.bits(result, expected, f"{op}, {way}")


def test_memory_that_overlaps(slots, agree):
    size = mpi.size()
    base = torch.arange(float(slots * (size + 1)))
    result = mpi.allgather(base[5 : 5 + slots], base[: slots * size], backend="shm")
    agree.equal(result, torch.arange(5.0, 5.0 + slots).repeat(size), "allgather")
    base = torch.arange(float(2 * slots))
    result = mpi.allreduce(base[: slots + 1], base[1 : slots + 2], backend="shm")
    agree.equal(result, torch.arange(float(slots + 1)) * size, "allreduce")


# --- calls in any order

VERBS = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall", "barrier")
KINDS = ((torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.int32, "max"), (torch.uint8, "bxor"))


class Call:
    """One call of one verb, with what must come of it. Numbers beyond what there is are taken modulo."""

    def __init__(self, verb: str, numel: int, kind: int, root: int, comm: object = None) -> None:
        self.verb, self.comm = verb, comm
        group = mpi.communicator(comm).intra if comm is not None else mpi.communicator().intra
        self.rank, self.size = group.rank, group.size
        self.root, (self.dtype, self.op) = root % self.size, KINDS[kind % len(KINDS)]
        self.inputs = [contract.values((numel,), self.dtype, rank, seed=numel % 97) for rank in range(self.size)]

    def make(self, *, backend: str | None = None, asynchronous: bool = False, is_shared: bool = False):
        """Its result, or the handle."""
        if self.verb == "barrier":
            return mpi.barrier(comm=self.comm)
        mine = self.inputs[self.rank]
        tensor = shared(mine, 1) if is_shared else mine.clone()
        if self.verb == "scatter" and self.rank != self.root:
            tensor = None
        options = {"op": self.op} if self.verb in ("allreduce", "reduce", "reduce_scatter") else {}
        if self.verb in ("reduce", "broadcast", "gather", "scatter"):
            options["root"] = self.root
        name = f"{self.verb}_async" if asynchronous else self.verb
        return getattr(mpi, name)(tensor, comm=self.comm, backend=backend, **options)

    def expected(self) -> torch.Tensor | None:
        rank, root, inputs = self.rank, self.root, self.inputs
        if self.verb in ("allreduce", "reduce", "reduce_scatter"):
            total = contract.reduced(inputs, self.op)
            if self.verb == "reduce_scatter":
                return contract.rows(total, rank, self.size)
            return total if self.verb == "allreduce" or rank == root else inputs[rank]
        if self.verb == "broadcast":
            return inputs[root]
        if self.verb == "scatter":
            return contract.rows(inputs[root], rank, self.size)
        if self.verb == "alltoall":
            return torch.cat([contract.rows(theirs, rank, self.size) for theirs in inputs])
        return torch.cat(inputs) if self.verb == "allgather" or rank == root else None

    def fits(self, result: torch.Tensor | None) -> bool:
        if self.verb == "barrier":
            return result is None
        expected = self.expected()
        return result is None if expected is None else contract.same_bits(result, expected)


WAYS = strategies.fixed_dictionaries(
    {
        "backend": strategies.sampled_from((None, "shm", "shm", "mpi")),
        "asynchronous": strategies.booleans(),
        "is_shared": strategies.booleans(),
    }
)
LENGTHS = strategies.sampled_from((0, 1, 3, 27, 28, 29, 112, 113, 1000, 1025, 4097, 20_001))
CALLS = strategies.tuples(
    strategies.sampled_from(VERBS), LENGTHS, strategies.integers(0, 3), strategies.integers(0, 11), WAYS
)


def test_any_sequence_of_calls(slots):
    def play(calls):
        made = []
        for verb, numel, kind, root, way in calls:
            call = Call(verb, numel, kind, root)
            result = call.make(**way)
            made.append((call, way, result))
            if random.Random(numel + root).random() < 0.3:
                result.wait() if way["asynchronous"] and verb != "barrier" else None
        problems = []
        for call, way, result in made:
            if way["asynchronous"] and call.verb != "barrier":
                result = result.wait()
            if not call.fits(result):
                problems.append(f"{call.verb} of {call.inputs[0].numel()} {call.dtype} root {call.root} {way}")
        assert not problems, problems

    try_together(play, strategies.lists(CALLS, min_size=8, max_size=30))


def test_four_communicators_from_four_threads(slots, agree):
    if not runtime.current().threads_allowed:
        pytest.skip("this MPI library takes one thread at a time")
    levels = []
    for index in range(4):
        levels.append(mpi.push_communicator(0, name=f"thread {index}"))
        mpi.set_communicator(0)
    problems: list[str] = []

    def work(level: int) -> None:
        choice = random.Random(level)
        try:
            for number in range(60):
                call = Call(choice.choice(VERBS), choice.choice((0, 5, 29, 500, 5000)), number, number, comm=level)
                way = {"asynchronous": choice.random() < 0.3 and call.verb != "barrier", "is_shared": number % 5 == 0}
                result = call.make(backend=choice.choice(("shm", None)), **way)
                if not call.fits(result.wait() if way["asynchronous"] else result):
                    problems.append(f"level {level}, call {number}: {call.verb} {way}")
        except Exception as error:
            problems.append(f"level {level}: {error!r}")

    threads = [threading.Thread(target=work, args=(level,)) for level in levels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    agree(not problems, "; ".join(problems))


def test_a_sync_call_keeps_its_place_behind_asynchronous_ones(slots, agree):
    rank, size = mpi.rank(), mpi.size()
    tensor = torch.full((slots,), float(rank))
    handles = [mpi.allreduce_async(tensor, backend="shm") for _ in range(3)]
    mpi.broadcast(tensor, 0, backend="shm")
    handles.append(mpi.allreduce_async(tensor, op="avg", backend="shm"))
    total = mpi.allreduce(tensor, backend="shm")
    agree.equal(total[0].item(), float(sum(range(size)) * size**2 * size))
    agree(all(handle.done() for handle in handles))


# --- ranks that disagree

LONG = 20_000
DISAGREEMENTS = {
    "verb": (
        lambda: mpi.broadcast(torch.ones(LONG)),
        lambda: mpi.allreduce(torch.ones(LONG)),
        ("broadcast(float32 [20000], root=0)", "allreduce(float32 [20000], sum)"),
    ),
    "short and long": (
        lambda: mpi.allreduce(torch.ones(2)),
        lambda: mpi.allreduce(torch.ones(LONG)),
        ("float32 [2]", "float32 [20000]"),
    ),
    "dtype": (
        lambda: mpi.allreduce(torch.ones(LONG, dtype=torch.float64)),
        lambda: mpi.allreduce(torch.ones(LONG)),
        ("float64 [20000]", "float32 [20000]"),
    ),
    "operation": (
        lambda: mpi.allreduce(torch.ones(3), op="max"),
        lambda: mpi.allreduce(torch.ones(3)),
        ("[3], max)", "[3], sum)"),
    ),
    "root": (
        lambda: mpi.gather(torch.ones(3), mpi.size() - 1),
        lambda: mpi.gather(torch.ones(3), 0),
        ("gather(float32 [], root=", "root=0)"),
    ),
    "columns": (
        lambda: mpi.allgather(torch.ones(2, 3)),
        lambda: mpi.allgather(torch.ones(2, 0)),
        ("allgather(float32 [3])", "allgather(float32 [0])"),
    ),
    "shared or not": (
        lambda: mpi.allreduce(mpi.empty_shared(LONG + 1)),
        lambda: mpi.allreduce(torch.ones(LONG)),
        ("float32 [20001]", "float32 [20000]"),
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_a_disagreement_is_an_error_on_all_ranks_and_the_next_calls_are_right(slots, agree, what):
    if mpi.size() == 1:
        return
    one, others, names = DISAGREEMENTS[what]
    others()  # known calls take a shorter way
    message = ""
    try:
        one() if mpi.rank() == mpi.size() - 1 else others()
    except MismatchError as error:
        message = str(error)
    agree(all(name in message for name in names), f"instead of {names}: {message!r}")
    for verb in VERBS:
        call = Call(verb, 3 * slots, 0, 1)
        agree(call.fits(call.make(backend="shm")), f"the next {verb}")


def test_a_rank_that_fails_alone_in_the_middle_of_a_call(slots, agree, monkeypatch):
    """Who ended that call well had then put more through its slots than this rank knew of; who came late was told."""
    if mpi.size() == 1:
        return
    was_told = False

    def no_memory(*arguments: object) -> torch.Tensor:
        raise MemoryError("nothing left")

    with monkeypatch.context() as patch:
        if mpi.rank() == 0:
            patch.setattr(shm, "destination_for", no_memory)
        try:
            mpi.gather(torch.ones(700), 0, backend="shm")
        except MemoryError:
            agree(mpi.rank() == 0)
            was_told = True
        except MismatchError as error:
            agree(mpi.rank() != 0 and "rank 0 has given it up" in str(error))
            was_told = True
    from mpi4py import MPI

    everybody_knows = all(MPI.COMM_WORLD.allgather(was_told))
    refused = False
    try:
        mpi.allreduce(torch.ones(LONG), backend="shm")
    except MismatchError as error:
        refused = "an earlier call failed" in str(error)
    agree(refused is not everybody_knows, "ranks went on as if nothing had happened")
    for verb in VERBS:
        call = Call(verb, 3 * slots, 0, 1)
        agree(call.fits(call.make(backend="shm")), f"the next {verb}")


@pytest.mark.parametrize("check", ("off", "strict"))
def test_kernels_among_other_transports_whatever_is_compared(stopped, agree, check):
    """The ranks notice each other in kernels alone: after more than a ring of other calls they waited for ever."""
    start(slot_bytes=PAGE_SLOTS, check=check)
    size = mpi.size()
    for number_of_others in (1, 31, 32, 100):
        for verb in VERBS:
            call = Call(verb, 3000, number_of_others, 1)
            agree(call.fits(call.make(backend="shm")), f"{verb} after {number_of_others} others")
        for _ in range(number_of_others):
            mpi.broadcast(torch.ones(3), 0, backend="mpi")
    if check == "strict" and size > 1:
        try:
            mpi.allreduce(torch.ones(3 + mpi.rank()), backend="shm")
        except MismatchError as error:
            agree("float32 [3]" in str(error) and "float32 [4]" in str(error), str(error))
        else:
            agree(False, "accepted")
        agree.equal(mpi.allreduce(1), size)


def test_a_refusal_on_one_rank_reaches_the_others_even_if_nothing_is_compared(stopped, agree):
    """It was noted only where calls are compared: elsewhere the others waited for ever."""
    start(slot_bytes=PAGE_SLOTS, check="off")
    if mpi.size() > 1:
        try:
            mpi.scatter(torch.ones((1,) * 13) if mpi.rank() == 0 else None, 0, backend="shm")
        except mpi.TorchMPIError:
            pass
        else:
            agree(False, "accepted")
    agree.equal(mpi.allreduce(1), mpi.size())


def test_settings_of_any_slot_size(stopped, agree):
    """Chunks are whole lines: with slots that are not, they ran into the next slot."""
    for slot_bytes in (1, 5000, 12_345):
        start(slot_bytes=slot_bytes)
        for numel in (2500, 2501, 10_000):
            inputs = inputs_of((numel,), torch.float32)
            result = mpi.allreduce(inputs[mpi.rank()].clone(), backend="shm")
            agree.bits(result, contract.reduced(inputs, "sum"), f"{numel} with slots of {slot_bytes}")
        mpi.stop()


# --- how data goes into the slots


@pytest.mark.parametrize("who", ("all", "one"))
def test_writing_past_the_caches_brings_the_same_bits(agree, slots, who):
    """Each rank decides for itself, from what it measures: forced here, whatever this machine is like."""
    rank, size = mpi.rank(), mpi.size()
    group = mpi.communicator().intra
    for numel in (5_003, 70_001):
        inputs = [contract.values((numel,), torch.float32, r) for r in range(size)]
        expected = contract.reduced(inputs, "sum")
        group.page.set(rank, layout.FETCHES_SLOWLY, int(who == "all" or rank == 0))
        agree.bits(mpi.allreduce(inputs[rank].clone(), backend="shm"), expected, f"allreduce {numel}")
        agree.bits(mpi.broadcast(inputs[rank].clone(), size - 1, backend="shm"), inputs[-1], "broadcast")
        agree.bits(mpi.allgather(inputs[rank], backend="shm"), torch.cat(inputs), f"allgather {numel}")
        mine = contract.rows(expected, rank, size)
        agree.bits(mpi.reduce_scatter(inputs[rank].clone(), backend="shm"), mine, "reduce_scatter")
        group.page.set(rank, layout.FETCHES_SLOWLY, 0)


def test_streams_that_go_past_the_caches_whatever_is_measured(agree, stopped):
    """With the usual slots: longer than all caches of a core, and not in whole lines."""
    start()
    rank, size = mpi.rank(), mpi.size()
    numel = (4 << 20) // 8 + 3
    inputs = [torch.arange(numel, dtype=torch.int64) * size + r for r in range(size)]
    root = size - 1
    agree.bits(mpi.broadcast(inputs[rank].clone(), root, backend="shm"), inputs[root], "broadcast")
    agree.bits(mpi.allgather(inputs[rank], backend="shm"), torch.cat(inputs), "allgather")
    uneven = mpi.allgather(inputs[rank][rank:], backend="shm")
    agree.bits(uneven, torch.cat([part[r:] for r, part in enumerate(inputs)]), "uneven allgather")
    gathered = mpi.gather(inputs[rank], root, backend="shm")
    agree.bits(gathered if rank == root else torch.cat(inputs), torch.cat(inputs), "gather")
    agree.bits(mpi.allreduce(inputs[rank].clone(), backend="shm"), contract.reduced(inputs, "sum"), "allreduce")
