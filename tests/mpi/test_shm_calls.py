"""To a user of one host: calls through shared memory keep their order, beside other ways, and mismatches raise."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.outcomes import error_of
from helpers.shm_rig import BY_PYTHON, PAGE_SLOTS, any_slots, start

import torchmpi as mpi
from torchmpi.backends import shm
from torchmpi.errors import MismatchError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(3)]

COLLECTIVES = (
    "allreduce",
    "reduce",
    "broadcast",
    "allgather",
    "reduce_scatter",
    "gather",
    "scatter",
    "alltoall",
    "barrier",
)
KINDS = ((torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.int32, "max"), (torch.uint8, "bxor"))


class Call:
    """One call of a collective, with its expected result. Numbers out of range are taken modulo."""

    def __init__(self, collective: str, numel: int, kind: int, root: int) -> None:
        self.collective, self.rank, self.size = collective, mpi.rank(), mpi.size()
        self.root, (self.dtype, self.op) = root % self.size, KINDS[kind % len(KINDS)]
        self.inputs = [contract.values((numel,), self.dtype, rank, seed=numel % 97) for rank in range(self.size)]

    def make(self, *, backend: str | None = None):
        if self.collective == "barrier":
            return mpi.barrier()
        tensor = self.inputs[self.rank].clone()
        if self.collective == "scatter" and self.rank != self.root:
            tensor = None
        options = {"op": self.op} if self.collective in ("allreduce", "reduce", "reduce_scatter") else {}
        if self.collective in ("reduce", "broadcast", "gather", "scatter"):
            options["root"] = self.root
        return getattr(mpi, self.collective)(tensor, backend=backend, **options)

    def expected(self) -> torch.Tensor | None:
        rank, root, inputs = self.rank, self.root, self.inputs
        if self.collective in ("allreduce", "reduce", "reduce_scatter"):
            total = contract.reduced(inputs, self.op)
            if self.collective == "reduce_scatter":
                return contract.rows(total, rank, self.size)
            return total if self.collective == "allreduce" or rank == root else inputs[rank]
        if self.collective == "broadcast":
            return inputs[root]
        if self.collective == "scatter":
            return contract.rows(inputs[root], rank, self.size)
        if self.collective == "alltoall":
            return torch.cat([contract.rows(theirs, rank, self.size) for theirs in inputs])
        return torch.cat(inputs) if self.collective == "allgather" or rank == root else None

    def fits(self, result: torch.Tensor | None) -> bool:
        if self.collective == "barrier":
            return result is None
        expected = self.expected()
        return result is None if expected is None else contract.same_bits(result, expected)


@any_slots
def test_a_sync_call_keeps_its_place_behind_asynchronous_ones(slots, agree):
    rank, size = mpi.rank(), mpi.size()
    tensor = torch.full((slots,), float(rank))
    handles = [mpi.allreduce_async(tensor, backend=BY_PYTHON) for _ in range(3)]
    mpi.broadcast(tensor, 0, backend=BY_PYTHON)
    handles.append(mpi.allreduce_async(tensor, op="avg", backend=BY_PYTHON))
    total = mpi.allreduce(tensor, backend=BY_PYTHON)
    agree.equal(total[0].item(), float(sum(range(size)) * size**2 * size))
    agree(all(handle.done() for handle in handles))


# --- mismatched calls

LONG = 20_000
DISAGREEMENTS = {
    "collective": (
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


@any_slots
@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_a_mismatch_is_an_error_on_all_ranks_and_the_next_calls_are_right(slots, agree, what):
    one, others, names = DISAGREEMENTS[what]
    others()  # prepared calls take a shorter path
    message = error_of(lambda: one() if mpi.rank() == mpi.size() - 1 else others())
    agree(all(name in message for name in names), f"instead of {names}: {message!r}")
    for collective in COLLECTIVES:
        call = Call(collective, 3 * slots, 0, 1)
        agree(call.fits(call.make(backend=BY_PYTHON)), f"the next {collective}")


@any_slots
@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("when", ("before the kernel", "between two kernels"))
def test_a_rank_that_fails_alone_in_the_middle_of_a_call(slots, agree, monkeypatch, when):
    """Regression: ranks that completed the call had used more slots than this rank had counted."""
    was_told = False

    def no_memory(*arguments: object) -> torch.Tensor:
        raise MemoryError("nothing left")

    with monkeypatch.context() as patch:
        if mpi.rank() == 0:
            patch.setattr(shm, "destination_for", no_memory)
        try:
            if when == "before the kernel":
                mpi.gather(torch.ones(700), 0, backend=BY_PYTHON)
            else:
                mpi.scatter(torch.ones(700) if mpi.rank() == 0 else None, 0, backend=BY_PYTHON)
        except MemoryError:
            agree(mpi.rank() == 0)
            was_told = True
        except MismatchError as error:
            agree(mpi.rank() != 0 and "rank 0 has aborted it" in str(error))
            was_told = True
    from mpi4py import MPI

    everybody_knows = all(MPI.COMM_WORLD.allgather(was_told))
    refused = False
    try:
        mpi.allreduce(torch.ones(LONG), backend=BY_PYTHON)
    except MismatchError as error:
        refused = "an earlier call failed" in str(error)
    agree(refused is not everybody_knows, "ranks went on as if nothing had happened")
    for collective in COLLECTIVES:
        call = Call(collective, 3 * slots, 0, 1)
        agree(call.fits(call.make(backend=BY_PYTHON)), f"the next {collective}")


@pytest.mark.parametrize("collective", ("allgather", "alltoall", "gather"))
def test_data_of_the_call_after_an_aborted_one_are_not_used(stopped, agree, monkeypatch, collective):
    """Regression: the rank writes the first chunk of its next call before it synchronizes, with a greater chunk count.
    Ranks still in the aborted call read that chunk, and returned it without an error."""
    start()
    from mpi4py import MPI

    rank, size, root = mpi.rank(), mpi.size(), mpi.size() - 1
    numbers = [(8 if other == 0 else 1000) * size for other in range(size)]  # runs two kernels
    find, wrong = shm.destination_for, []
    for number in range(4):
        made = []

        def fail_second(*arguments: Any, made: list[int] = made) -> torch.Tensor:
            made.append(1)
            if len(made) == 2:
                raise MemoryError("nothing left")
            return find(*arguments)

        inputs = [torch.full((count,), 1000.0 * number + other) for other, count in enumerate(numbers)]
        expected = torch.cat(inputs)
        if collective == "alltoall":
            expected = torch.cat([contract.rows(theirs, rank, size) for theirs in inputs])
        call = getattr(mpi, collective)
        with monkeypatch.context() as patch:
            if rank == (root if collective == "gather" else 0):
                patch.setattr(shm, "destination_for", fail_second)
            try:
                where = (root,) if collective == "gather" else ()
                result = call(inputs[rank], *where, backend=BY_PYTHON)
                if result is not None and not torch.equal(result, expected):
                    wrong.append((number, result.unique().tolist()))
            except (MemoryError, MismatchError):
                pass
        for _ in range(2):  # the first call fails unless all ranks have detected the abort
            with suppress(MismatchError):
                mpi.allgather(torch.full((1000,), -7.0), backend=BY_PYTHON)
        MPI.COMM_WORLD.Barrier()
    agree.equal(wrong, [], "values of another call")
    agree.equal(float(mpi.allreduce(torch.ones(LONG), backend=BY_PYTHON)[0]), float(size), "the next call")


@pytest.mark.parametrize("check", ("off", "strict"))
def test_kernels_among_other_transports_with_any_checking(stopped, agree, check):
    """Regression: ranks synchronize in kernels only, and waited forever after more other calls than ring entries."""
    start(slot_bytes=PAGE_SLOTS, check=check)
    size = mpi.size()
    for number_of_others in (1, 31, 32, 100):
        for collective in COLLECTIVES:
            call = Call(collective, 3000, number_of_others, 1)
            agree(call.fits(call.make(backend=BY_PYTHON)), f"{collective} after {number_of_others} others")
        for _ in range(number_of_others):
            mpi.broadcast(torch.ones(3), 0, backend="mpi")
    if check == "strict" and size > 1:
        problem = error_of(mpi.allreduce, torch.ones(3 + mpi.rank()), backend=BY_PYTHON)
        agree("float32 [3]" in problem and "float32 [4]" in problem, problem)
        agree.equal(mpi.allreduce(1), size)


def test_an_abort_on_one_rank_reaches_the_others_without_checking(stopped, agree):
    """Regression: the abort was published only if calls are compared; otherwise the other ranks waited forever."""
    start(slot_bytes=PAGE_SLOTS, check="off")
    if mpi.size() > 1:
        rows = torch.ones((1,) * 13) if mpi.rank() == 0 else None
        agree(error_of(mpi.scatter, rows, 0, backend=BY_PYTHON), "accepted")
    agree.equal(mpi.allreduce(1), mpi.size())
