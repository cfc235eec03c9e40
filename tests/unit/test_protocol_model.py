"""To who changes kernels: all executions of their protocol for two and three ranks are right, and faults are found."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.protocol_kernels import FIELD
from helpers.protocol_model import Call, Explorer, Failure, Scenario

BARRIER = Call("barrier")


def allreduce(length: int, root: int = -1) -> Call:
    return Call("allreduce", length, root)


def broadcast(length: int, root: int = 0, breaks: int | None = None) -> Call:
    return Call("broadcast", length, root, breaks)


MOVEMENT = Call("allgather", 3), Call("alltoall", 6), Call("reduce_scatter", 6)
SHORT_RING = (("RING_LENGTH", 4),)

SCENARIOS = {
    "barriers that use an entry of the ring twice": Scenario(3, (BARRIER,) * 6, constants=SHORT_RING),
    "allreduce in the payload": Scenario(2, (allreduce(2),) * 6, 2, FIELD, constants=SHORT_RING),
    "allreduce as a whole": Scenario(3, (allreduce(2), allreduce(3, root=1), allreduce(2)), 3),
    "movement as a whole": Scenario(3, (broadcast(2, 1), Call("allgather", 2), broadcast(2)), 2),
    "allreduce of three chunks, then of one": Scenario(2, (allreduce(6), allreduce(2))),
    "allreduce of four chunks, then of one": Scenario(2, (allreduce(7), allreduce(2))),
    "waits as loops": Scenario(2, (allreduce(2), broadcast(2)), polls=True),
    "allreduce past the caches, last chunk shorter": Scenario(2, (allreduce(7), allreduce(3)), hints=(7,)),
    "calls that are divided differently": Scenario(2, (allreduce(8), allreduce(2)), hints=(7,), chunk_lines=4),
    "ranks differ in how they write": Scenario(2, (allreduce(4),), hints=(0, 7)),
    "ranks differ in how they write three chunks": Scenario(2, (allreduce(6),), hints=(0, 7)),
    "allreduce of two chunks": Scenario(3, (allreduce(6), allreduce(2))),
    "reduce of two chunks": Scenario(3, (allreduce(6, root=2),)),
    "reduce of three chunks": Scenario(2, (allreduce(5, root=1),)),
    "reduce of four chunks": Scenario(2, (allreduce(7, root=1),)),
    "broadcast of more chunks than slots": Scenario(2, (broadcast(9), broadcast(3, 1))),
    "movement in chunks": Scenario(3, (broadcast(4, 2), *MOVEMENT, broadcast(4, 1))),
    "reduce_scatter in chunks, twice": Scenario(3, (Call("reduce_scatter", 6),) * 2),
    "all kinds of calls": Scenario(2, (broadcast(3), allreduce(4), *MOVEMENT, BARRIER, allreduce(2))),
    "an entry of the ring is used again after calls of MPI": Scenario(
        2, (allreduce(2), *(Call("mpi"),) * 3, allreduce(2), allreduce(2)), 2, FIELD, constants=SHORT_RING
    ),
}
FAILING = {
    "barrier that times out": Scenario(2, (BARRIER,) * 3, expires=((0, 1),)),
    "allreduces of one chunk that time out": Scenario(2, (allreduce(2), allreduce(2)), expires=((0, 1),)),
    "allreduce of two chunks that times out": Scenario(2, (allreduce(4), allreduce(2)), expires=((0, 1),)),
    "one broadcast that times out on both": Scenario(2, (broadcast(3),), expires=((0, 1), (1, 1))),
    "broadcast that times out on both": Scenario(2, (broadcast(3), broadcast(2)), expires=((0, 1), (1, 1))),
    "broadcast of one chunk that fails after its kernel": Scenario(2, (broadcast(2, breaks=1), broadcast(2))),
    "broadcast that fails after its kernel": Scenario(2, (broadcast(3, breaks=1), broadcast(2), allreduce(2))),
    "different calls": Scenario(2, ((broadcast(3, 0), allreduce(2)), (broadcast(3, 1), allreduce(2)))),
    "barrier of three that times out": Scenario(3, (BARRIER,), expires=((1, 1),)),
}
LONG = {
    "allreduce of four chunks, then of one",
    "allreduce past the caches, last chunk shorter",
    "ranks differ in how they write three chunks",
    "reduce of four chunks",
    "allreduce of two chunks that times out",
    "broadcast that times out on both",
    "broadcast that fails after its kernel",
    "barrier of three that times out",
}
"""Scenarios of more than ten thousand states, of which others have the same steps with fewer calls or chunks."""


def named(scenarios: dict[str, Scenario]) -> list[Any]:
    """The names of the scenarios as parameters of a test; the long ones are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in scenarios]


@pytest.mark.parametrize("name", named(SCENARIOS))
def test_every_execution_is_right(name):
    """With weak memory, so with strong memory as well."""
    explorer = Explorer(SCENARIOS[name]).run()
    assert len(explorer.outcomes) == 1 and explorer.num_states > 10


@pytest.mark.parametrize("name", named(FAILING))
def test_every_execution_with_a_failing_call_is_right(name):
    explorer = Explorer(FAILING[name]).run()
    by_rank = {each for outcomes in explorer.outcomes for rank in outcomes for each in rank}
    assert by_rank > {"ok"}, "no call has failed"


def test_a_rank_that_fails_after_a_barrier_ends_it_on_no_other_rank():
    """Regression: one that looked for arrivals, and then for aborts, raised an error although all had arrived.

    Other backends compare their calls by a barrier before they begin: a rank waited for one that had raised there.
    """
    explorer = Explorer(Scenario(3, (Call("barrier", breaks=1),)), is_tso=True).run()
    assert explorer.outcomes == {(("ok",), ("MemoryError",), ("ok",))}


FAULTS = {
    "the chunk loop does not wait before it reuses a slot": (
        ("chunk_loop", "wait_all(group, Block.reduced, chunk) if index > 0 else 0", "0"),
        "movement in chunks",
    ),
    "a transfer is announced before the data is there": (
        ("chunk_loop", "num_put, since = 0, now()", "num_put, since = 0, publish(group, Block.ready, chunk + 1)"),
        "broadcast of more chunks than slots",
    ),
    "operands are announced before they are there": (
        (
            "reduce_kernels",
            "    put_range(group, target, base,",
            "    publish(group, Block.ready, chunk + 1)\n    put_range(group, target, base,",
        ),
        "allreduce of two chunks",
    ),
    "three chunks in progress share two slots": (
        ("reduce_kernels", "_MAX_IN_PROGRESS = 2", "_MAX_IN_PROGRESS = 3"),
        "allreduce of four chunks, then of one",
    ),
    "the last chunk is reduced before the one before is copied out": (
        ("reduce_kernels", " and (num_combined + 1 < num_chunks or num_out == num_combined)", ""),
        "calls that are divided differently",
    ),
    "results are copied out before they are there": (
        (
            "reduce_kernels",
            "num_combined > num_out and have_all(group, Block.reduced, base + num_out + 1)",
            "num_combined > num_out",
        ),
        "allreduce of two chunks",
    ),
    "the last chunk is divided at other offsets": (
        (
            "reduce_kernels",
            "min(part_begin(group.chunk_bytes, group.size, rank), num_bytes)",
            "part_begin(num_bytes, group.size, rank)",
        ),
        "allreduce past the caches, last chunk shorter",
    ),
    "consecutive calls use one slot": (
        ("access", "rank + (chunk & 1)", "rank"),
        "allreduce as a whole",
    ),
    "a transfer ends before the others have read": (
        ("chunk_loop", "wait_all(group, Block.reduced, base + num_rounds - 1) if num_rounds > 1 else 0", "0"),
        "movement in chunks",
    ),
    "a reduce_scatter ends before the others have read": (
        ("movement", "wait_all(group, Block.reduced, base + num_rounds - 1) if num_rounds > 1 else 0", "0"),
        "reduce_scatter in chunks, twice",
    ),
    "an entry of the ring is written while others read it": (
        (
            "arrival",
            "wait_all(group, Block.entered, seq - _RING_REUSE) if seq > group.free_until else 0",
            "0",
        ),
        "an entry of the ring is used again after calls of MPI",
    ),
    "a rank does not wait for the others": (
        ("arrival", "status = wait(group, theirs.sequence, seq)", "status = 0"),
        "allreduce in the payload",
    ),
    "no fence after non-temporal stores": (
        ("copying", "    if group.cache_bypass != 0:\n        fence()\n", ""),
        "allreduce past the caches, last chunk shorter",
    ),
    "a rank waits for a chunk that nobody makes": (
        (
            "reduce_kernels",
            "counter = Block.reduced if num_combined > num_out else Block.ready",
            "counter = Block.reduced",
        ),
        "allreduce of two chunks",
    ),
    "slots are written while others are in the failed call": (
        ("arrival", "status = wait_all(group, Block.entered, aborted + 1)", "status = 0"),
        "allreduce of two chunks that times out",
    ),
    "a call after one that failed on some ranks is not refused": (
        ("arrival", "signature ^= sign_chunks(group.chunks)", ""),
        "broadcast that fails after its kernel",
    ),
}
ORDERS = {
    "READY and REDUCED are plain stores": (
        (
            "access",
            "store_release(field_address(own_block(group), counter), value)",
            "own_block(group).cells[counter] = value",
        ),
        "waits as loops",
    ),
    "the sequence number is a plain store": (
        ("arrival", "store_release(mine.sequence", "store(mine.sequence"),
        "waits as loops",
    ),
    "waits are plain loads": (
        ("arrival", "while load_acquire(address) <", "while load(address) <"),
        "waits as loops",
    ),
    "the entry of a call of MPI is published by a plain store": (
        ("arrival", "store_release(entry.sequence, seq)", "store(entry.sequence, seq)"),
        "an entry of the ring is used again after calls of MPI",
    ),
    "a call of MPI is entered by a plain store": (
        ("arrival", "store_release(own.entered, seq)", "store(own.entered, seq)"),
        "an entry of the ring is used again after calls of MPI",
    ),
    "calls of MPI are compared after a plain load": (
        ("arrival", "if load_acquire(theirs.sequence) != seq", "if load(theirs.sequence) != seq"),
        "an entry of the ring is used again after calls of MPI",
    ),
}


SLOW_FAULTS = {"slots are written while others are in the failed call"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_FAULTS else name for name in FAULTS]
)
def test_a_fault_is_found(name):
    """Also with strong memory, so with weak memory as well."""
    fault, scenario = FAULTS[name]
    with pytest.raises(Failure):
        Explorer({**SCENARIOS, **FAILING}[scenario], is_tso=True, faults=[fault]).run()


def test_ranks_that_poll_for_ever_are_found():
    scenario = Scenario(2, (allreduce(4),), polls=True)
    fault, _ = FAULTS["a rank waits for a chunk that nobody makes"]
    with pytest.raises(Failure, match="the ranks wait for each other"):
        Explorer(scenario, is_tso=True, faults=[fault]).run()
    Explorer(scenario, is_tso=True).run()


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_a_missing_order_is_found_for_weak_memory_and_harmless_for_strong(name):
    fault, scenario = ORDERS[name]
    with pytest.raises(Failure, match=r"at the same time|MismatchError"):
        Explorer(SCENARIOS[scenario], faults=[fault]).run()
    Explorer(SCENARIOS[scenario], is_tso=True, faults=[fault]).run()


def test_the_kernels_are_those_that_are_compiled():
    """A fault whose text is not in the sources is an error, so that the list above follows the kernels."""
    with pytest.raises(AssertionError, match="0 times"):
        Explorer(SCENARIOS["waits as loops"], faults=[("arrival", "no such text", "")])
