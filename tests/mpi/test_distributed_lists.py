"""To a user of collectives with lists: the parts of the ranks arrive at their separate addresses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from helpers.outcomes import error_of
from mpi4py import MPI

import torchmpi as mpi
from torchmpi.errors import TorchMPIError
from torchmpi.session import runtime
from torchmpi.shared_memory import fast_path

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LENGTHS = (0, 1, 3, 500, 4_096, 5_001, 70_000, 300_000)
"""In the payload, in whole slots, in chunks, by direct reads."""
Lists = tuple[list[torch.Tensor], list[torch.Tensor]]

pytestmark = [pytest.mark.ranks(1, 2, 3)]


@pytest.fixture(scope="module", autouse=True)
def torch_world() -> Iterator[None]:
    """torch's default group; torchmpi is restarted for the group, and restored for the other files."""
    was_running = runtime.is_running()
    mpi.stop()
    mpi.start(config=dataclasses.replace(mpi.Config.from_environment(), verbose=False))
    dist.init_process_group("torchmpi")
    yield
    dist.destroy_process_group()
    mpi.stop()
    if was_running:
        mpi.start()


def values(sender: int, receiver: int, numel: int, turn: int = 0) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + 1000.0 * sender + 7.0 * receiver + turn


def blank(numel: int, count: int) -> list[torch.Tensor]:
    """Return tensors that are not adjacent."""
    return [torch.full((numel + 1,), -1.0)[:numel] for _ in range(count)]


def all_gather(numel: int, turn: int, flat: bool) -> Lists:
    outputs = blank(numel, SIZE)
    if flat:
        whole = torch.cat(outputs)
        dist.all_gather_into_tensor(whole, values(RANK, 0, numel, turn))
        outputs = list(whole.split(numel)) if numel else outputs
    else:
        dist.all_gather(outputs, values(RANK, 0, numel, turn))
    return outputs, [values(rank, 0, numel, turn) for rank in range(SIZE)]


def gather(numel: int, turn: int, flat: bool) -> Lists:
    root = turn % SIZE
    outputs = blank(numel, SIZE) if root == RANK else []
    dist.gather(values(RANK, 0, numel, turn), outputs or None, dst=root)
    return outputs, [values(rank, 0, numel, turn) for rank in range(SIZE)] if outputs else []


def scatter(numel: int, turn: int, flat: bool) -> Lists:
    root, output = turn % SIZE, torch.full((numel,), -1.0)
    parts = [values(RANK, rank, numel, turn) for rank in range(SIZE)] if root == RANK else None
    dist.scatter(output, parts, src=root)
    return [output], [values(root, RANK, numel, turn)]


def reduce_scatter(numel: int, turn: int, flat: bool) -> Lists:
    output, parts = torch.full((numel,), -1.0), [values(RANK, rank, numel, turn) for rank in range(SIZE)]
    if flat:
        dist.reduce_scatter_tensor(output, torch.cat(parts))
    else:
        dist.reduce_scatter(output, parts)
    return [output], [sum(values(rank, RANK, numel, turn) for rank in range(SIZE))]


def all_to_all(numel: int, turn: int, flat: bool) -> Lists:
    outputs, parts = blank(numel, SIZE), [values(RANK, rank, numel, turn) for rank in range(SIZE)]
    if flat:
        whole = torch.cat(outputs)
        dist.all_to_all_single(whole, torch.cat(parts))
        outputs = list(whole.split(numel)) if numel else outputs
    else:
        dist.all_to_all(outputs, parts)
    return outputs, [values(rank, RANK, numel, turn) for rank in range(SIZE)]


CALLS: dict[str, Callable[[int, int, bool], Lists]] = {
    call.__name__: call for call in (all_gather, gather, scatter, reduce_scatter, all_to_all)
}


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("name", CALLS)
def test_lists_and_tensors_may_meet(agree, name, numel):
    """Each rank passes lists in some turns and one tensor in others, where torch has a call for that."""
    for turn in range(6):
        outputs, expected = CALLS[name](numel, turn, turn % 3 > 0 and (RANK + turn) % 2 == 0)
        for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
            agree.equal(output, wanted, f"turn {turn}, part {number}")


def test_the_versions_of_all_parts_increase(agree):
    for _ in range(3):
        outputs, inputs = blank(5, SIZE), [torch.ones(5) for _ in range(SIZE)]
        dist.all_to_all(outputs, inputs)
        dist.all_gather(outputs, inputs[0])
        agree.equal([part._version for part in outputs], [2] * SIZE)
        agree.equal([part._version for part in inputs], [0] * SIZE)


def test_parts_that_share_memory(agree):
    """A part that is the input, one part in all places, and parts that overlap the input."""
    for turn in range(3):
        whole = blank(6, SIZE)
        whole[RANK].copy_(values(RANK, 0, 6, turn))
        dist.all_gather(whole, whole[RANK])
        for rank in range(SIZE):
            agree.equal(whole[rank], values(rank, 0, 6, turn), f"the input is part {RANK}; part {rank}")
        same = torch.empty(6)
        dist.all_gather([same] * SIZE, values(RANK, 0, 6, turn))
        agree.equal(same, values(SIZE - 1, 0, 6, turn), "the last one remains")
        output, given = torch.empty(6), values(RANK, 0, 6, turn)
        dist.reduce_scatter(output, [given] * SIZE)
        agree.equal(output, sum(values(rank, 0, 6, turn) for rank in range(SIZE)))
        tensors = [torch.full((6,), float(10 * RANK + rank + turn)) for rank in range(SIZE)]
        dist.all_to_all(tensors, tensors)
        for rank in range(SIZE):
            agree.equal(tensors[rank], torch.full((6,), float(10 * rank + RANK + turn)), "in place")


def test_calls_behind_pending_ones(agree):
    """The input is written by a call that has not ended when the next one is made."""
    for turn in range(4):
        tensor, outputs, twice = torch.full((40_000,), float(turn)), blank(40_000, SIZE), blank(40_000, SIZE)
        works = [dist.all_reduce(tensor, async_op=True), dist.all_gather(outputs, tensor, async_op=True)]
        dist.all_gather(twice, tensor)
        for work in works:
            work.wait()
        for part in (*outputs, *twice):
            agree.equal(part, torch.full((40_000,), float(turn * SIZE)), f"turn {turn}")


@pytest.mark.parametrize("asynchronous", (False, True))
def test_lists_that_are_not_plain(agree, asynchronous):
    """Strided parts, and inference tensors, which have no versions."""
    for turn in range(3):
        strided = [torch.full((4, 3), -1.0).t() for _ in range(SIZE)]
        given = values(RANK, 0, 12, turn).view(3, 4)
        with torch.inference_mode():
            frozen = [torch.full((3, 4), -1.0) for _ in range(SIZE)]
        for outputs in (strided, frozen):
            work = dist.all_gather(outputs, given, async_op=asynchronous)
            if work is not None:
                work.wait()
            for rank in range(SIZE):
                agree.equal(outputs[rank].contiguous(), values(rank, 0, 12, turn).view(3, 4), f"turn {turn}")


@pytest.mark.ranks(2, 4)
def test_ranks_with_other_lengths_raise(agree):
    """Then the next call is right."""
    for turn in range(4):
        numel = 5 + (RANK == 1 and turn == 2)
        for name in ("reduce_scatter", "scatter"):
            error = ""
            try:
                outputs, expected = CALLS[name](numel, 1, False)
            except TorchMPIError as failed:
                error = str(failed)
            if turn == 2:
                agree("rank" in error, f"{name}: no error")
            else:
                agree(not error, f"{name}: {error}")
                agree.equal(outputs[0], expected[0])


def test_refusals(agree):
    for _ in range(2):
        agree(error_of(dist.all_gather, blank(3, SIZE + 1), torch.ones(3)), "too many parts")
        agree(error_of(dist.all_gather, [torch.ones(3).double() for _ in range(SIZE)], torch.ones(3)), "dtypes")
        agree(error_of(dist.reduce_scatter, torch.ones(3), blank(3, SIZE + 1)), "too many parts")
        dist.all_gather(blank(3, SIZE), torch.ones(3))


def native(whole: torch.Tensor, given: torch.Tensor, sent: list[int], asynchronous: bool, turn: int) -> torch.Tensor:
    """Exchange parts by the call of torchmpi, in some turns into memory of its own."""
    out = whole if (RANK + turn) % 3 else None
    if asynchronous:
        return mpi.alltoall_async(given, out, splits=sent).wait()
    return mpi.alltoall(given, out, splits=sent)


def exchanged(sizes: list[list[int]], turn: int, asynchronous: bool, in_lists: bool, is_native: bool = False) -> Lists:
    """Exchange parts with these numbers of elements, by sender and receiver."""
    sent, received, work = sizes[RANK], [sizes[sender][RANK] for sender in range(SIZE)], None
    parts = [values(RANK, rank, numel, turn) for rank, numel in enumerate(sent)]
    outputs = [torch.full((numel,), -1.0) for numel in received]
    whole = torch.cat(outputs)
    if is_native:
        whole = native(whole, torch.cat(parts), sent, asynchronous, turn)
    elif in_lists:
        work = dist.all_to_all(outputs, parts, async_op=asynchronous)
    else:
        work = dist.all_to_all_single(whole, torch.cat(parts), received, sent, async_op=asynchronous)
    if work is not None:
        work.wait()
    if is_native or not in_lists:
        assert whole._version > 0 or (is_native and (RANK + turn) % 3 == 0)
        outputs = list(whole.split(received))
    return outputs, [values(sender, RANK, numel, turn) for sender, numel in enumerate(received)]


@pytest.mark.parametrize("scale", (1, 700, 30_000))
@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("is_native", (False, True))
def test_parts_of_any_length(agree, asynchronous, scale, is_native):
    """Some ranks have parts of one length, and no part, and make other calls than the others in the same turn."""
    for turn in range(8):
        sizes = [[scale * ((sender + 2 * receiver + turn) % 4) for receiver in range(SIZE)] for sender in range(SIZE)]
        if turn % 2:  # only the last rank has parts of different lengths, that for itself is longer
            sizes = [[2 * scale] * SIZE for _ in range(SIZE)]
            sizes[-1][-1] = 5 * scale
        is_queued = asynchronous and (RANK + turn) % 3 > 0
        outputs, expected = exchanged(sizes, turn, is_queued, (RANK + turn) % 4 == 0, is_native)
        for sender, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
            agree.equal(output, wanted, f"turn {turn} from {sender}")


@pytest.mark.ranks(2, 4)
def test_parts_that_their_receiver_does_not_expect_raise_on_all_ranks(agree):
    for turn in range(4):
        sizes, error = [[1 + (sender + receiver) % 3 for receiver in range(SIZE)] for sender in range(SIZE)], ""
        if turn == 2 and RANK == 1:
            sizes[0][1] += 1
        try:
            outputs, expected = exchanged(sizes, turn, False, False)
        except TorchMPIError as failed:
            error = f"{type(failed).__name__}: {failed}"
        if turn == 2:
            is_named = "rank 0" in error and "rank 1" in error
            agree("MismatchError" in error and (is_named or "has aborted it" in error), error or "no error")
        else:
            agree(not error, error)
            for output, wanted in zip(outputs, expected, strict=True):
                agree.equal(output, wanted, f"turn {turn}")


@pytest.mark.min_ranks(2)
def test_machine_code_finds_what_begins_calls_on_lists(agree):
    """And leaves to Python those whose tensors share memory, differ in dtype, or are not one for each rank."""
    outputs, given = blank(5, SIZE), torch.full((5,), float(RANK))
    for _ in range(3):
        dist.all_gather(outputs, given, async_op=True).wait()
        agree.equal(torch.stack(outputs), torch.arange(float(SIZE)).repeat_interleave(5).view(SIZE, 5))
    group = dist.group.WORLD.communicator.intra
    call = group.plans["all_gather", None, torch.float32, 0]
    if not fast_path.takes_calls() or group.shared is None:
        pytest.skip("no machine code for these calls here")
    found = [
        call.find(given, received, call, group, None) is call
        for received in (outputs, [given] * SIZE, [*outputs[1:], torch.zeros(5).int()], [*outputs, outputs[0]])
    ]
    agree.equal(found, [True, False, False, False])
