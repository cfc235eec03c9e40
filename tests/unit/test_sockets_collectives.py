"""Collective calls of communicators over sockets, against numpy. Ranks are threads."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from sockets_rig import on_all, world

from torchmpi.distributed.sockets.datatypes import DATATYPES, IN_PLACE, OPS
from torchmpi.distributed.sockets.requests import UNDEFINED

SIZES = (1, 2, 3, 4, 5)
FLOAT, INT64, BYTE = DATATYPES["FLOAT"], DATATYPES["INT64_T"], DATATYPES["BYTE"]


@pytest.fixture(scope="module", params=SIZES)
def comms(request):
    with world(request.param) as comms:
        yield comms


def values(rank, numel, seed=0):
    return np.random.default_rng(100 * seed + rank).standard_normal(numel).astype(np.float32)


def in_rank_order(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def equal(results, expected):
    return all(isinstance(result, np.ndarray) and result.tobytes() == expected.tobytes() for result in results)


@pytest.mark.parametrize("numel", (0, 1, 7, 5000, 300_001))
def test_allreduce_adds_in_rank_order_to_the_same_bits(comms, numel):
    expected = in_rank_order([values(rank, numel) for rank in range(len(comms))])

    def in_place(comm):
        memory = values(comm.rank, numel)
        comm.Allreduce(IN_PLACE, (memory, FLOAT), OPS["SUM"])
        return memory

    def apart(comm):
        source, target = values(comm.rank, numel), np.empty(numel, np.float32)
        comm.Allreduce(source, target, OPS["SUM"])
        assert source.tobytes() == values(comm.rank, numel).tobytes()
        return target

    for action in (in_place, apart):
        results = on_all(comms, action)
        assert equal(results, expected), results


@pytest.mark.parametrize("numel", (0, 3, 5000))
def test_reduce(comms, numel):
    size = len(comms)
    expected = in_rank_order([values(rank, numel) for rank in range(size)])
    for root in {0, size - 1}:

        def reduce(comm, root=root):
            memory = values(comm.rank, numel)
            if comm.rank == root:
                comm.Reduce(IN_PLACE, (memory, FLOAT), OPS["SUM"], root)
            else:
                comm.Reduce((memory, FLOAT), None, OPS["SUM"], root)
            return memory

        results = on_all(comms, reduce)
        for rank, result in enumerate(results):
            wanted = expected if rank == root else values(rank, numel)
            assert equal([result], wanted), (root, rank, result)


def test_reduce_scatter(comms):
    size = len(comms)
    counts = [rank * 3 for rank in range(size)]
    expected = in_rank_order([values(rank, sum(counts)) for rank in range(size)])

    def run(comm):
        out = np.empty(counts[comm.rank], np.float32)
        comm.Reduce_scatter(values(comm.rank, sum(counts)), out, counts, OPS["SUM"])
        return out

    begins = np.cumsum([0, *counts])
    for rank, result in enumerate(on_all(comms, run)):
        assert equal([result], expected[begins[rank] : begins[rank + 1]]), (rank, result)


@pytest.mark.parametrize("numel", (0, 1, 1000, 200_000))
def test_movement(comms, numel):
    size = len(comms)
    everything = np.concatenate([values(rank, numel) for rank in range(size)])

    def allgather(comm):
        out = np.empty(numel * size, np.float32)
        comm.Allgather((values(comm.rank, numel), FLOAT), (out, FLOAT))
        return out

    def bcast(comm):
        out = values(comm.rank, numel)
        comm.Bcast((out, FLOAT), size - 1)
        return out

    def alltoall(comm):
        out = np.empty(numel * size, np.float32)
        comm.Alltoall(np.concatenate([values(comm.rank, numel, seed=to) for to in range(size)]), out)
        return out

    assert equal(on_all(comms, allgather), everything)
    assert equal(on_all(comms, bcast), values(size - 1, numel))
    for rank, result in enumerate(on_all(comms, alltoall)):
        assert equal([result], np.concatenate([values(other, numel, seed=rank) for other in range(size)]))


@pytest.mark.parametrize("scale", (1, 3000))
def test_movement_of_uneven_blocks(comms, scale):
    size = len(comms)
    counts = [(rank % 3) * scale for rank in range(size)]
    begins = np.concatenate(([0], np.cumsum(counts)[:-1])).tolist()
    everything = np.concatenate([values(rank, counts[rank]) for rank in range(size)])
    root = size - 1

    def allgather(comm):
        out = np.empty(sum(counts), np.float32)
        comm.Allgatherv((values(comm.rank, counts[comm.rank]), FLOAT), (out, counts, begins, FLOAT))
        return out

    def in_place(comm):
        out = np.empty(sum(counts), np.float32)
        out[begins[comm.rank] : begins[comm.rank] + counts[comm.rank]] = values(comm.rank, counts[comm.rank])
        comm.Allgatherv(IN_PLACE, (out, counts, begins, FLOAT))
        return out

    def gather(comm):
        out = np.empty(sum(counts), np.float32)
        target = (out, counts, begins, FLOAT) if comm.rank == root else None
        comm.Gatherv((values(comm.rank, counts[comm.rank]), FLOAT), target, root=root)
        return out if comm.rank == root else everything

    def scatter(comm):
        out = np.empty(counts[comm.rank], np.float32)
        comm.Scatterv((everything, counts, begins, FLOAT) if comm.rank == root else None, (out, FLOAT), root)
        return out

    def alltoall(comm):
        outgoing, incoming = [counts[comm.rank]] * size, counts
        ends = [np.concatenate(([0], np.cumsum(part)[:-1])).tolist() for part in (outgoing, incoming)]
        out = np.empty(sum(counts), np.float32)
        source = np.concatenate([values(comm.rank, counts[comm.rank])] * size)
        comm.Alltoallv((source, outgoing, ends[0], FLOAT), (out, incoming, ends[1], FLOAT))
        return out

    for action in (allgather, in_place, gather, alltoall):
        results = on_all(comms, action)
        assert equal(results, everything), (action, results)
    for rank, result in enumerate(on_all(comms, scatter)):
        assert equal([result], values(rank, counts[rank])), (rank, result)


def test_objects(comms):
    size = len(comms)
    assert (
        on_all(comms, lambda comm: comm.allgather({"rank": comm.rank, "b": b"x" * comm.rank}))
        == [[{"rank": rank, "b": b"x" * rank} for rank in range(size)]] * size
    )
    assert on_all(comms, lambda comm: comm.bcast(["root", comm.rank], root=size - 1)) == [["root", size - 1]] * size
    assert on_all(comms, lambda comm: comm.allreduce(comm.rank, OPS["MAX"])) == [size - 1] * size


def test_a_barrier_waits_for_the_last(comms):
    arrived = []

    def meet(comm):
        time.sleep(0.01 * comm.rank)  # the later ones would be missed by one that does not wait
        arrived.append(comm.rank)
        comm.Barrier()
        return len(arrived)

    assert on_all(comms, meet) == [len(comms)] * len(comms)


def test_nobody_needs_to_look_after_a_barrier_begun(comms):
    """Rank 0 begins it and does not call again until the others are through."""
    size = len(comms)
    begun = comms[0].Ibarrier()
    assert on_all(comms[1:], lambda comm: comm.Barrier()) == [None] * (size - 1)
    begun.Wait()


def test_barriers_do_not_overtake_other_calls(comms):
    """A barrier is under way while other calls are made: each call has messages of its own."""

    def run(comm):
        request = comm.Ibarrier()
        gathered = [comm.allgather((step, comm.rank)) for step in range(3)]
        request.Wait()
        return gathered

    size = len(comms)
    assert on_all(comms, run) == [[[(step, rank) for rank in range(size)] for step in range(3)]] * size


def test_a_mismatch_in_length_raises_and_spoils_nothing(comms):
    if len(comms) == 1:
        pytest.skip("takes two")

    def wrong(comm):
        if comm.rank:
            comm.Gatherv((np.zeros(10, np.uint8), BYTE), None)
        else:
            comm.Gatherv((np.zeros(20, np.uint8), BYTE), (np.zeros(20 * comm.size, np.uint8), BYTE))

    first, *others = on_all(comms, wrong)
    assert "sent 10 bytes where 20 were expected" in str(first) and others == [None] * len(others)
    assert on_all(comms, lambda comm: comm.bcast(5)) == [5] * len(comms)


# --- communicators


def test_split(comms):
    size = len(comms)

    def split(comm):
        part = comm.Split(comm.rank % 2, -comm.rank)
        found = part.rank, part.size, part.allgather(comm.rank)
        part.Free()
        return found

    for rank, result in enumerate(on_all(comms, split)):
        same = [other for other in reversed(range(size)) if other % 2 == rank % 2]
        assert result == (same.index(rank), len(same), same)


def test_who_gives_no_colour_is_in_no_part(comms):
    results = on_all(comms, lambda comm: comm.Split(UNDEFINED if comm.rank == 0 else 1, 0))
    assert results[0] is None and [part.size for part in results[1:]] == [len(comms) - 1] * (len(comms) - 1)


def test_split_by_host(comms):
    assert on_all(comms, lambda comm: comm.Split_type(1, comm.rank).rank) == list(range(len(comms)))


def test_messages_of_communicators_do_not_meet(comms):
    """The same source, destination and tag, in three communicators at once."""

    def run(comm):
        copies = [comm, comm.Dup(), comm.Dup()]
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        requests = [copy.isend(place, right, 5) for place, copy in reversed(list(enumerate(copies)))]
        found = [copy.recv(source=left, tag=5) for copy in copies]
        for request in requests:
            request.wait()
        return found

    assert on_all(comms, run) == [[0, 1, 2]] * len(comms)


def test_a_group_is_made_by_its_members_alone(comms):
    size = len(comms)
    ranks = list(reversed(range(1, size))) or [0]

    def make(comm):
        part = comm.Create_group(comm.Get_group().Incl(ranks), 77)
        return part.allgather(comm.rank)

    members = [comm for comm in comms if comm.rank in ranks]
    assert on_all(members, make) == [ranks] * len(ranks)


def test_groups_made_at_once_in_two_threads_are_apart(comms):
    """Two parents, duplicated at the same time by two threads of each rank, in whatever order."""
    size = len(comms)
    parents = on_all(comms, lambda comm: (comm.Dup(), comm.Dup()))
    flat = [pair[place] for place in (0, 1) for pair in parents]
    copies = on_all(flat, lambda parent: parent.Dup())
    contexts = [copy._context for copy in copies]
    assert len(set(contexts[:size])) == 1 and len(set(contexts[size:])) == 1 and contexts[0] != contexts[size]
