"""To a user of several hosts: short and long calls are right by machine code, through Python, and by both at once."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.outcomes import error_of
from helpers.shm_rig import shared
from mpi4py import MPI

import torchmpi as mpi
from torchmpi.backends.call_comparison import MOST_LONG_BYTES
from torchmpi.backends.compared_calls import ComparedCall
from torchmpi.backends.long_calls import LongCall
from torchmpi.backends.mpi_messages import PARTS_TAG
from torchmpi.backends.number_exchange import most_together
from torchmpi.backends.rank_order import accumulator_of
from torchmpi.collective_specs import SPECS
from torchmpi.collectives.exchange import PartsExchange
from torchmpi.config import Config
from torchmpi.distributed.torch_calls import TorchCall
from torchmpi.errors import MismatchError, StallError, TransportError
from torchmpi.session import runtime
from torchmpi.shared_memory import fast_path
from torchmpi.shared_memory.memory_layout import MAX_LOG_DIMS, Block

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.ranks(2, 4),
    pytest.mark.skipif(SIZE == 1, reason="needs another rank"),
]

# The host of each rank: a host each; two hosts of two ranks; three hosts, of which one has ranks that are no neighbors.
PLACEMENTS = {"each": "abc"} if SIZE < 4 else {"block": "aabb", "three": "abca"}
PLACEMENTS = {hosts[:SIZE]: name for name, hosts in PLACEMENTS.items() if len(set(hosts[:SIZE])) > 1}  # each once
COLLECTIVES = ("broadcast", "allreduce", "reduce", "allgather", "gather", "reduce_scatter", "alltoall")
MESSAGE_BYTES = 1 << 20
OPS = {torch.float32: ("sum", "avg"), torch.float64: ("prod",), torch.bfloat16: ("sum", "max"), torch.int16: ("bxor",)}


@pytest.fixture(params=PLACEMENTS, ids=PLACEMENTS.get, scope="module")
def placement(request) -> Iterator[str]:
    """torchmpi, started on these hosts."""
    was_running = runtime.is_running()
    mpi.stop()
    config = Config.from_environment()
    mpi.start(config=dataclasses.replace(config, host_name=request.param[RANK], message_bytes=MESSAGE_BYTES))
    yield request.param
    mpi.stop()
    if was_running:
        mpi.start()


def has_fast_path() -> bool:
    local = runtime.current().world.intra_host
    lacks_memory = mpi.allreduce(local is not None and local.status_board is None, op="max")
    return not (
        lacks_memory or fast_path.allreduce is fast_path._not_built or runtime.current().context.sleeps_before_mpi
    )


@contextlib.contextmanager
def through_python() -> Iterator[None]:
    """Let no call of this rank be cached."""
    fast_path.pause(True)
    try:
        yield
    finally:
        fast_path.pause(False)


def inputs(collective: str, numel: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """The tensor of each rank; if the rows are divided, so many for each rank, and one more for the first."""
    width = 3 if numel == 999 else 1
    rows = numel // width * SIZE + 1 if SPECS[collective].divides else numel // width
    return [contract.values((rows, width) if width > 1 else (rows,), dtype, rank, seed) for rank in range(SIZE)]


def expected(collective: str, given: list[torch.Tensor], op: str | None, root: int, hosts: str) -> torch.Tensor | None:
    """The result of this rank; None if it gets none."""
    spec = SPECS[collective]
    if not spec.receives(root == RANK):
        return None
    if spec.reduces:
        by_host = [[rank for rank in range(SIZE) if hosts[rank] == name] for name in dict.fromkeys(hosts[:SIZE])]
        assert op is not None
        total = contract.reduced_by_host(given, op, by_host)
        return contract.rows(total, RANK, SIZE) if spec.divides else total
    if spec.divides:
        given = [contract.rows(tensor, RANK, SIZE) for tensor in given]
    return torch.cat(given) if spec.gathers else given[root]


def run(
    collective: str, tensor: torch.Tensor, op: str | None = None, root: int = 0, *, mode: str = "", **options: Any
) -> Any:
    """Run a collective; return its result, None if this rank gets none."""
    spec = SPECS[collective]
    options |= {"op": op} if spec.reduces else {}
    options |= {"root": root} if spec.is_rooted else {}
    result = getattr(mpi, collective + mode)(tensor, **options)
    result = result.wait() if mode else result
    return result if spec.receives(root == RANK) else None


def fast(collective: str, tensor: torch.Tensor, result: torch.Tensor | None, op: str | None, root: int) -> Any:
    """Run a call by the fast path, with memory for such a result; return None if Python must make the call."""
    spec, key = SPECS[collective], op if SPECS[collective].reduces else 0
    if spec.is_rooted:
        key = root if op is None else fast_path.joint_key(op, root)
    out = None if spec.in_place or result is None else torch.empty_like(result)
    which = "give" if collective == "gather" and root != RANK else collective
    return fast_path.entry(which)(tensor, out, key, None, None)


def cached(collective: str, given: list[torch.Tensor], op: str | None, root: int, hosts: str) -> None:
    """Make a call twice, of which the fast path has cached the first."""
    result = expected(collective, given, op, root, hosts)
    for _ in range(2):
        options = {} if SPECS[collective].in_place or result is None else {"out": torch.empty_like(result)}
        run(collective, given[RANK].clone(), op, root, **options)


def default_backend(collective: str, hosts: str) -> str:
    """The backend of a call without ``backend=``; with it, Python makes the call."""
    if len(set(hosts)) == SIZE:
        return "p2p" if SPECS[collective].reduces else "mpi"
    return "mpi" if collective in ("gather", "alltoall") else "hierarchical"


def has_long_calls(collective: str, hosts: str) -> bool:
    """Whether values that the comparison does not carry are sent in a message to each other host."""
    are_columns = len({hosts.count(name) for name in hosts}) == 1 and list(hosts) == sorted(hosts)
    return collective in ("gather", "alltoall") or (are_columns and collective in ("allgather", "reduce_scatter"))


def lengths(collective: str, sent_bytes: int, hosts: str) -> Iterator[tuple[int, bool]]:
    """Numbers of elements, and whether the fast path makes such a call."""
    comparison, spec = runtime.current().world.comparison, SPECS[collective]
    most, units = comparison.most_carried, 1
    if spec.gathers or spec.divides:
        most_ranks = max(map(hosts.count, hosts))
        num_hosts = len(set(hosts))
        most, units = (
            most_together(num_hosts, divides=spec.divides, gathers=spec.gathers),
            num_hosts * most_ranks ** (spec.gathers + spec.divides),
        )
    limit = most // units // sent_bytes - spec.divides
    yield from ((1, True), (2, True), (999, True), (limit, True), (limit + 1, has_long_calls(collective, hosts)))
    if sent_bytes == 4 and has_long_calls(collective, hosts):
        yield MESSAGE_BYTES // sent_bytes + 1, False


# The placement decides what is where, and the dtype how it is combined: all dtypes on one placement.
CASES = [
    (hosts, collective, dtype)
    for number, hosts in enumerate(PLACEMENTS)
    for collective in COLLECTIVES
    for dtype in (OPS if number == min(1, len(PLACEMENTS) - 1) and SPECS[collective].reduces else (torch.float32,))
]


@pytest.mark.parametrize(("placement", "collective", "dtype"), CASES, ids=str, indirect=["placement"], scope="module")
def test_all_paths_have_the_result_of_a_loop(agree, placement, collective, dtype):
    can_be_fast, spec = has_fast_path(), SPECS[collective]
    for op in OPS[dtype] if spec.reduces else (None,):
        # Sums that are sent between hosts of several ranks may be wider than the tensor.
        sent = accumulator_of(dtype, op) if op is not None and len(set(placement)) < SIZE else dtype
        for number, (numel, may_be_fast) in enumerate(lengths(collective, sent.itemsize, placement)):
            given = inputs(collective, numel, dtype)
            for root in range(SIZE) if spec.is_rooted and number == 1 else (number % SIZE,):
                result, what = expected(collective, given, op, root, placement), f"{op} {numel} root={root}"
                tensors = [given[RANK].clone() for _ in range(4)]
                with through_python():
                    found = [run(collective, tensors[0], op, root)]
                found.append(run(collective, tensors[1], op, root, mode="_async"))
                cached(collective, given, op, root, placement)
                quick = fast(collective, tensors[2], result, op, root)
                is_fast = quick is not None
                agree.equal(is_fast, can_be_fast and may_be_fast, f"{what}: by the fast path")
                found.append(quick if is_fast else run(collective, tensors[3], op, root))
                for path, each in zip(("through Python", "asynchronous", "repeated"), found, strict=True):
                    if result is not None:
                        agree.bits(each, result, f"{what}, {path}")
                for tensor in () if spec.changes(root == RANK) else tensors:
                    agree.bits(tensor, given[RANK], f"{what}: the tensor was changed")


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_ranks_of_both_paths_meet(agree, placement, collective):
    if not has_fast_path():
        pytest.skip("no fast path here")
    op = "sum" if SPECS[collective].reduces else None
    numels = (5, 5001 if op else 2001)  # 5001 are relayed between three hosts and more
    for root, numel in zip((0, SIZE - 1, 0), (*numels, 200_000 // SIZE), strict=True):
        if numel > numels[1] and not has_long_calls(collective, placement):
            continue
        given = inputs(collective, numel, torch.float32)
        result = expected(collective, given, op, root, placement)
        cached(collective, given, op, root, placement)
        for odd in range(SIZE):
            tensor = given[RANK].clone()
            if odd != RANK:
                found = fast(collective, tensor, result, op, root)
                agree(found is not None, "not by the fast path")
            else:
                found = run(collective, tensor, op, root, backend=default_backend(collective, placement))
            if result is not None:
                agree.bits(found, result, f"{numel}, rank {odd} through Python")


@pytest.mark.parametrize("collective", ("allgather", "gather", "alltoall"))
def test_ranks_may_have_different_numbers_of_rows(agree, placement, collective):
    """One has more than the others: no more than their messages carry, or more, or none. And again none has."""
    for odd in range(SIZE):
        for rows in (3, 0, 300_000):
            even = [contract.values((2 * SIZE, 2), torch.float32, rank) for rank in range(SIZE)]
            cached(collective, even, None, 1, placement)
            given = [
                contract.values((rows, 2), torch.float32, rank) if rank == odd else even[rank] for rank in range(SIZE)
            ]
            for tensors in (given, even):
                found, result = (
                    run(collective, tensors[RANK], root=1),
                    expected(collective, tensors, None, 1, placement),
                )
                if result is not None:
                    agree.bits(found, result, f"{rows} rows of rank {odd}")


@pytest.mark.min_ranks(3)
@pytest.mark.parametrize("collective", ("allgather", "gather"))
def test_rows_of_the_result_are_no_source_if_ranks_differ_in_their_number(agree, placement, collective):
    """Regression: machine code accepts the own rows in their place, and then rows of other lengths went over them."""
    even = [contract.values((2, 50), torch.float32, rank) for rank in range(SIZE)]
    cached(collective, even, None, 1, placement)
    given = [contract.values((2 + (rank == 0) - (rank == 2), 50), torch.float32, rank) for rank in range(SIZE)]
    result, tensor, options = expected(collective, given, None, 1, placement), given[RANK], {}
    if result is not None:
        options = {"out": torch.zeros_like(result)}
        if len(tensor) == 2:
            tensor = options["out"][2 * RANK :][:2].copy_(tensor)
    found = run(collective, tensor, root=1, **options)
    if result is not None:
        agree.bits(found, result, "the result")
        agree.bits(options["out"], result, "out")


LONG_CALLS: tuple[tuple[str, str, torch.dtype, tuple[int, ...]], ...] = (
    ("reduce_scatter", "avg", torch.bfloat16, (80_001, 3)), ("reduce_scatter", "bxor", torch.int16, (400_001,)),
    ("reduce_scatter", "sum", torch.float32, (1, 200_000 // SIZE)), ("reduce_scatter", "sum", torch.int8, (1, 300_000)),
    ("alltoall", "", torch.float32, (1, 200_000 // SIZE)), ("alltoall", "", torch.float32, (SIZE + 1, 80_000 // SIZE)),
    ("allgather", "", torch.float32, (100_000, 2)),
)  # fmt: skip
"""Rows that do not divide evenly, partial results that are wider, ranks that get nothing, and too few rows for that."""


@pytest.mark.parametrize(("collective", "op", "dtype", "shape"), LONG_CALLS, ids=str)
def test_long_calls(agree, placement, collective, op, dtype, shape):
    """Through Python at no rank, at one, and at all. Where tensors are shared, Python maps them within the call."""
    given = [contract.values(shape, dtype, rank) for rank in range(SIZE)]
    result = expected(collective, given, op, 0, placement)
    assert result is not None
    for odd in (-1, 0, SIZE - 1, SIZE):
        for is_shared in (False, True):
            tensor, out = given[RANK].clone(), torch.zeros_like(result)
            if is_shared:
                tensor, out = shared(tensor, RANK + 1), shared(out, RANK + 1)
            with through_python() if odd in (RANK, SIZE) else contextlib.nullcontext():
                for _ in range(2):
                    found = run(collective, tensor, op, out=out.zero_())
                    agree.bits(found, result, f"shared: {is_shared}, rank {odd} through Python")
            agree.bits(tensor, given[RANK], "the tensor was changed")


def test_there_is_memory_for_all_sums_of_long_calls(agree, placement):
    """Regression: of a tensor of one row, messages were received behind the memory."""
    group = runtime.current().world
    plan = ComparedCall(
        group, group.comparison, "reduce_scatter", torch.float32, "sum", mpi.barrier, message_bytes=MOST_LONG_BYTES
    )
    if plan.long_calls is None:
        pytest.skip("no long calls on these hosts")
    for num_rows in range(1, SIZE + 1):
        source = torch.empty(num_rows, MOST_LONG_BYTES // 4 // num_rows)
        is_long = plan.long_calls.takes(source)
        agree.equal(is_long, num_rows == SIZE, f"{num_rows} rows")
        if is_long:
            last = plan.long_calls._block(source, 2 * len(set(placement)) - 1, 1)
            agree.equal(last.shape, source[:1].shape, "the last block")


def test_a_group_is_refused_after_an_error_of_mpi(agree, placement, monkeypatch):
    """Regressions: only after a timeout. What has not arrived would be taken for a message of the next call.

    And the tensors of a list, for which messages may arrive yet, were freed.
    """
    if not has_fast_path():
        pytest.skip("no machine code, whose errors these are")
    group, tensor, longer, requests = mpi.group(range(SIZE)), torch.ones(200_000), torch.ones(200_001), []
    received = [torch.empty_like(tensor) for _ in range(SIZE)] if RANK == 0 else None
    call = partial(TorchCall(group, "gather", None, torch.float32, 0).run, tensor, received)
    for _ in range(3):
        call()
    if RANK == SIZE - 1:
        send = lambda *_: requests.append(group.intra.comm.Isend(longer.numpy(), 0, PARTS_TAG))  # noqa: E731
        monkeypatch.setattr(LongCall, "_exchange", send)
        with through_python():
            call()
    elif RANK == 0:
        agree.raises(TransportError, call, "truncated")
        agree.raises(StallError, call, "cannot be used any more")
        kept = weakref.ref(received[1])
        del call, received
        gc.collect()
        agree(kept() is not None, "a tensor of the list has been freed")
    else:
        call()
    MPI.COMM_WORLD.Barrier()
    agree.equal(mpi.allreduce(1), SIZE, "another group")


Lengths = Callable[[int, int], int]
LENGTHS: dict[str, Lengths] = {
    "short": lambda sender, receiver: (2 * sender + receiver) % 4,
    "none": lambda sender, receiver: 0,
    "long": lambda sender, receiver: 300 * sender + 1000 * receiver,
    "equal and long": lambda sender, receiver: 200_000,
    "equal at one rank": lambda sender, receiver: 3 if 0 in (sender, receiver) else sender + receiver,
    "longer than a message": lambda sender, receiver: (
        300_000 if (sender, receiver) == (0, SIZE - 1) else 5 + sender + receiver
    ),
}
"""The elements of the part that a rank sends to another one."""


def exchange_of(length: Lengths, more: int = 0) -> tuple[PartsExchange, list[torch.Tensor], list[torch.Tensor]]:
    """An exchange that machine code can run, the parts to send, and those to receive; of the last rank `more` long."""

    def part(sender: int, receiver: int) -> torch.Tensor:
        return contract.values((length(sender, receiver),), torch.float32, sender, receiver)

    call = PartsExchange(runtime.current().communicators.default.intra, torch.float32)
    call.cache()
    expected = [part(other, RANK) for other in range(SIZE)]
    if more and RANK == SIZE - 1:
        expected[0] = torch.empty(len(expected[0]) + more)
    return call, [part(RANK, other) for other in range(SIZE)], expected


@pytest.mark.parametrize("lengths", LENGTHS)
def test_parts_of_any_length(agree, placement, lengths):
    """By machine code, and with one rank through Python. A rank whose parts are equal and short takes no frames."""
    can_be_fast, is_equal = has_fast_path(), lengths == "equal at one rank"
    for odd in (-1, *range(SIZE), SIZE):
        call, given, expected = exchange_of(LENGTHS[lengths])
        received = [torch.full_like(part, -1.0) for part in expected]
        if odd in (RANK, SIZE):
            with through_python():
                call.run(given, received)
        else:
            is_fast = call.run_fast(given, received) is not None
            agree.equal(is_fast, can_be_fast and not (is_equal and RANK == 0), "by the fast path")
            if not is_fast:
                call.run(given, received)
        for other in range(SIZE):
            agree.bits(received[other], expected[other], f"from {other}, rank {odd} through Python")


def test_a_list_of_shared_tensors_keeps_what_has_arrived_before_they_are_mapped(agree, placement):
    """Regression: Python went on with other memory, without the rows of the host whose turn was the first."""
    call = TorchCall(runtime.current().communicators.default, "all_gather", None, torch.float32, 0)
    given = [contract.values((100_000,), torch.float32, rank) for rank in range(SIZE)]
    for make_given, make in ((torch.clone, torch.clone),) * 2 + ((torch.clone, shared), (shared, shared)):
        received = [make(torch.zeros_like(each)) for each in given]
        call.run(make_given(given[RANK]), received)
        for rank in range(SIZE):
            agree.bits(received[rank], given[rank], f"rank {rank}")


def test_equal_parts_of_long_tensors_through_python(agree, placement):
    """Regression: rows of a tensor are a tuple, which was taken for a tensor."""
    _, given, expected = exchange_of(LENGTHS["equal and long"])
    call = TorchCall(runtime.current().communicators.default, "all_to_all_single", None, torch.float32, 0)
    received = torch.empty(sum(map(len, expected)))
    with through_python():
        call.run(torch.cat(given), received)
    agree.bits(received, torch.cat(expected), "received")


@pytest.mark.parametrize("lengths", ["short", "long"])
def test_parts_of_other_sizes_than_expected_are_an_error_on_all_ranks(agree, placement, lengths):
    for odd in (-1, 0, SIZE - 1, SIZE):
        call, given, expected = exchange_of(LENGTHS[lengths], more=5)
        received = [torch.full_like(part, -1.0) for part in expected]
        run_call = lambda: call.run(given, received)  # noqa: E731, B023
        if odd in (RANK, SIZE):
            with through_python():
                agree.raises(MismatchError, run_call, f"to rank {SIZE - 1}, which has room for")
        else:
            agree.raises(MismatchError, run_call, f"to rank {SIZE - 1}, which has room for")
        agree(all(bool((part == -1).all()) for part in received), "a tensor was changed")
        agree.raises(MismatchError, mpi.barrier if RANK == SIZE - 1 else run_call, "alltoall")
        agree.equal(mpi.allreduce(1), SIZE, "the next call")


SHAPES = ((5,), (2 * SIZE + 1, 3), (700, 2), (600_000 * SIZE,), (1, 0), (2,) + (1,) * 14)
"""Of a scatter: frames have room for the values of some; the part of a rank is longer than a message, or empty."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_scatter_of_which_the_root_alone_knows_the_shape(agree, placement, shape):
    """With `out` and without it; through Python at all ranks, at one, and at none."""
    can_be_fast = has_fast_path() and len(shape) <= MAX_LOG_DIMS and 0 not in shape
    for root, odd in ((0, SIZE), (SIZE - 1, -1), (0, 0), (1, 0)):
        whole = contract.values(shape, torch.bfloat16, root)
        expected, given = contract.rows(whole, RANK, SIZE), whole if root == RANK else None
        is_odd, out = odd in (RANK, SIZE), torch.full_like(expected, -1.0)
        for _ in range(2):
            with through_python() if is_odd else contextlib.nullcontext():
                agree.bits(mpi.scatter(given, root), expected, f"root {root}, rank {odd} through Python")
                agree(mpi.scatter(given, root, out.fill_(-1.0)) is out, "out")
            agree.bits(out, expected, f"root {root}, rank {odd} through Python, out")
        if odd == -1 and can_be_fast:
            function = fast_path.entry("receive" if given is None else "scatter")
            agree(function(given, out.fill_(-1.0), root, None, None) is not None, "not by the fast path")
            agree.bits(out, expected, "by the fast path")
        wrong = torch.empty(3, 3, dtype=whole.dtype) if RANK == SIZE - 1 else out
        error = error_of(mpi.scatter, given, root, wrong)
        agree.equal("out" in error, RANK == SIZE - 1, error)
        out.fill_(-1.0)
        other = lambda: mpi.scatter(given, root, out)  # noqa: E731, B023
        for call in (mpi.barrier, lambda: mpi.scatter(whole, 1 - root % 2)):  # noqa: B023
            agree.raises(MismatchError, call if odd == RANK or (RANK == 0 and odd in (-1, SIZE)) else other, "scatter")
            agree(bool((out == -1).all()), "the result was changed")
        agree.equal(mpi.allreduce(1), SIZE, "the next call")


Call = tuple[str, int, str, int]
"""Collective, elements of each rank, operation, root."""
CALLS: tuple[Call, ...] = (
    ("broadcast", 6, "", 0), ("broadcast", 6, "", 1), ("broadcast", 300_000, "", 0), ("reduce", 6, "sum", 0),
    ("reduce", 6, "sum", 1), ("reduce", 6, "max", 0), ("allreduce", 6, "sum", 0), ("allgather", 6, "", 0),
    ("gather", 6, "", 0), ("gather", 6, "", 1), ("reduce_scatter", 6, "sum", 0), ("alltoall", 6, "", 0),
    ("reduce_scatter", 50_000, "sum", 0), ("allgather", 50_000, "", 0), ("alltoall", 50_000, "", 0),
    ("barrier", 0, "", 0),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda number: "-".join(map(str, CALLS[number])))
def test_different_calls_are_an_error_on_all_ranks(agree, placement, number):
    """No tensor is changed by then. Each call meets the next two."""
    for other in (1, 2):
        for odd in (0, SIZE - 1):
            collective, numel, op, root = CALLS[(number + other * (odd == RANK)) % len(CALLS)]
            tensor = torch.full((numel * SIZE,), RANK + 1.0)
            out = torch.full((numel * SIZE * (SIZE if collective in ("allgather", "gather") else 1),), -1.0)
            with_out = SPECS[collective].gathers and SPECS[collective].receives(root == RANK)
            call: Callable[[], object]
            if collective == "barrier":
                call = mpi.barrier
            else:
                options = {"out": out} if with_out else {}
                call = lambda: run(collective, tensor, op, root, **options)  # noqa: E731, B023
            for _ in range(2):  # the second time by the fast path, where it may have been cached
                agree.raises(MismatchError, call, CALLS[number][0], CALLS[(number + other) % len(CALLS)][0])
                agree(bool((tensor == RANK + 1).all() and (out == -1).all()), "a tensor was changed")
                agree.equal(mpi.allreduce(1), SIZE, "the next call")


def test_different_calls_of_the_fast_path_are_an_error_on_all_ranks(agree, placement):
    """Regression: a rank requested the call of another one of its host, which took half a second, for no message."""
    calls = [each for each in CALLS if 0 < each[1] < 1000]
    if not has_fast_path():
        pytest.skip("no fast path here")
    local = runtime.current().world.intra_host
    requests = lambda: local and local.call_log.log_board.get(local.rank, Block.asked)  # noqa: E731
    num_requests = requests()
    given = {each: inputs(each[0], each[1], torch.float32) for each in calls}
    for collective, numel, op, root in calls:
        cached(collective, given[collective, numel, op, root], op or None, root, placement)
    for number in range(len(calls)):
        for odd in range(SIZE):
            collective, numel, op, root = each = calls[(number + (odd == RANK)) % len(calls)]
            tensor, result = given[each][RANK].clone(), expected(collective, given[each], op or None, root, placement)
            out = None if SPECS[collective].in_place or result is None else torch.full_like(result, -1.0)
            which = "give" if collective == "gather" and out is None else collective
            key: Any = fast_path.joint_key(op, root) if collective == "reduce" else op if op else root
            call = lambda: fast_path.entry(which)(tensor, out, key, None, None)  # noqa: E731, B023
            agree.raises(MismatchError, call, calls[number][0], calls[(number + 1) % len(calls)][0])
            agree.bits(tensor, given[each][RANK], "the tensor was changed")
            agree(out is None or bool((out == -1).all()), "the result was changed")
            result = expected("allreduce", inputs("allreduce", 6, torch.float32), "sum", 0, placement)
            following = inputs("allreduce", 6, torch.float32)[RANK].clone()
            agree(
                fast("allreduce", following, following, "sum", 0) is following, "the next call is not by the fast path"
            )
            agree.bits(following, result, "the next call")
    agree.equal(requests(), num_requests, "requests")


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_rank_whose_neighbor_has_given_up_does_not_compare_the_calls(agree, placement, is_fast):
    """Regression: it waited without end for the other ranks, which had raised an error, or had the result."""
    local = [rank for rank in range(SIZE) if placement[rank] == placement[0]]
    if len(local) < 2:
        pytest.skip("needs a host of two ranks")
    group, error = mpi.group(range(SIZE)), ""
    call = lambda: mpi.allreduce(torch.ones(6), comm=group)  # noqa: E731
    with contextlib.nullcontext() if is_fast else through_python():
        for _ in range(3):
            call()
        if local[1] == RANK:
            steps = group.intra.intra_host
            last = steps.call_log.seq + 2  # the one after the messages, for which its host waits

            def give_up() -> None:
                while steps.call_log.current is None or steps.call_log.current[0] < last:
                    time.sleep(0.001)
                steps.end_call()

            thread = threading.Thread(target=give_up)
            thread.start()
            error = error_of(call)
            thread.join()
        for rank in set(range(SIZE)).difference(local):  # late ones
            if local[1] == RANK:
                MPI.COMM_WORLD.send(None, rank)
            elif rank == RANK:
                MPI.COMM_WORLD.recv(source=local[1])
        if local[1] != RANK:
            error = error_of(call)
    wanted = {local[0]: "MismatchError: .*rank 1 has aborted it", local[1]: "StallError"}.get(RANK, "$")
    agree(re.match(wanted, error), error)


def test_both_paths_leave_the_same_records(agree, placement):
    if not has_fast_path():
        pytest.skip("no fast path here")
    world = runtime.current().world
    groups = [group for group in (world, world.intra_host) if group is not None]
    for collective in COLLECTIVES:
        op = "sum" if SPECS[collective].reduces else None
        numel = 200_000 // SIZE if has_long_calls(collective, placement) else 5
        given, seen = inputs(collective, numel, torch.float32), []
        result = expected(collective, given, op, SIZE - 1, placement)
        cached(collective, given, op, SIZE - 1, placement)
        for is_fast in (True, False):
            seqs, calls = [group.call_log.seq for group in groups], num_calls()
            if is_fast:
                agree(fast(collective, given[RANK].clone(), result, op, SIZE - 1) is not None, "not by the fast path")
            else:
                backend = default_backend(collective, placement)
                run(collective, given[RANK].clone(), op, SIZE - 1, backend=backend)
            added = [group.call_log.seq - seq for group, seq in zip(groups, seqs, strict=True)]
            steps = groups[-1].call_log.recent(2) if len(groups) > 1 else []
            last = world.call_log.recent(1)[0][1:]
            seen.append((added, num_calls() - calls, [(each.code, type(each.shape)) for each in steps], last))
            agree(all(group.call_log.current is None for group in groups), "still active")
        agree.equal(
            str(seen[0]).replace("torch.Size", "tuple"), str(seen[1]).replace("torch.Size", "tuple"), collective
        )
    times = mpi.metrics()["calls"]["world"]["allreduce"]
    agree.equal(round(times["waited"] + times["moved"], 9), round(times["seconds"], 9), "the parts of a call")


def num_calls() -> Counter[tuple[str, str]]:
    """The metrics of this rank: its calls, and steps of them, by group and collective."""
    metrics = mpi.metrics()
    return Counter(
        {
            (group, name): numbers["calls"]
            for kind in ("calls", "steps")
            for group, of_group in metrics[kind].items()
            for name, numbers in of_group.items()
        }
    )
