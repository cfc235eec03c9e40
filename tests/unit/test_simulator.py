"""To a user of many ranks: on simulated ones results are in rank order, all messages arrive, no deadlock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import simulate
import torch
from simulator import planned
from simulator.messages import Comm, World
from simulator.network import Network
from simulator.plans import Ranks
from simulator.servers import ServerRank, request_cost, virtual_time
from simulator.start import started

from torchmpi.backends import p2p, pieces, round_messages
from torchmpi.config import Config
from torchmpi.parameterserver.simulation.coroutines import DeadlockError
from torchmpi.tensors import partition, schedule

SMALL_CHUNKS = Config(pipeline_bytes=4096)


def run_collectives(backend: str, hosts: Sequence[int], lengths: Sequence[int], **settings: Any) -> World:
    """Run all reductions, broadcast and allgather, and compare the bits of all ranks with those of a loop."""
    size, root = len(hosts), len(hosts) // 2
    generator = torch.Generator().manual_seed(size)
    data = {numel: [torch.randn(numel, generator=generator) for _ in hosts] for numel in lengths}
    world = World(hosts, seed=size)

    def work(comm: Comm) -> dict[tuple[str, int], torch.Tensor]:
        ranks, results = Ranks(comm, config=SMALL_CHUNKS, **settings), {}
        for collective in ("allreduce", "reduce", "reduce_scatter", "broadcast", "allgather"):
            op = "sum" if "reduce" in collective else None
            call = ranks.prepare(collective, backend, torch.float32, op)
            for numel in lengths:
                tensor = data[numel][comm.rank].clone()
                results[collective, numel] = call(tensor, None, root if collective in ("reduce", "broadcast") else 0)
        return results

    for rank, results in enumerate(world.run(work)):
        for numel, vectors in data.items():
            total = in_order(vectors, hosts if backend == "hierarchical" else range(size))
            first, count = partition.part_of(numel, size, rank)
            assert torch.equal(results["allreduce", numel], total)
            assert torch.equal(results["reduce", numel], total if rank == root else vectors[rank])
            assert torch.equal(results["reduce_scatter", numel], total[first : first + count])
            assert torch.equal(results["broadcast", numel], vectors[root])
            assert torch.equal(results["allgather", numel], torch.cat(vectors))
    return world


def in_order(vectors: Sequence[torch.Tensor], hosts: Sequence[int]) -> torch.Tensor:
    """Add in rank order within the hosts, then the hosts."""
    by_host: dict[int, torch.Tensor] = {}
    for vector, host in zip(vectors, hosts, strict=True):
        by_host[host] = by_host[host] + vector if host in by_host else vector
    first, *others = by_host.values()
    for vector in others:
        first = first + vector
    return first


@pytest.mark.parametrize("size", [*range(1, 10), 16, 17, pytest.param(33, marks=pytest.mark.slow)])
def test_p2p_adds_in_rank_order(size: int) -> None:
    # Gathered, relayed from 16 ranks on, in parts, in several chunks; and in the messages of the comparison.
    for compared in (False, True):
        run_collectives("p2p", range(size), (1, 700, 2500), compared=compared)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_few_pieces_are_in_progress_and_peers_take_turns(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = pieces.PieceSizes(128, 3 * 128, 1 << 20)
    monkeypatch.setattr(round_messages, "piece_sizes", lambda size, vendor: sizes)
    monkeypatch.setattr(p2p, "SWAP_BYTES", 512)
    send, wait_all = Comm.Isend, World.wait_all
    in_progress, most, targets = [0] * size, [0] * size, []

    def counted(comm: Comm, message: Any, dest: int, tag: int) -> Any:
        request = send(comm, message, dest, tag)
        if request.num_bytes <= 128:
            in_progress[comm.rank] += request.num_bytes
            most[comm.rank] = max(most[comm.rank], in_progress[comm.rank])
            targets.extend([(comm.rank, dest)] if request.num_bytes == 128 else [])  # the header of a call is shorter
        return request

    def finished(world: World, requests: Sequence[Any]) -> None:
        wait_all(world, requests)
        for request in requests:
            in_progress[request.comm.rank] -= request.num_bytes * (request.is_send and request.num_bytes <= 128)

    monkeypatch.setattr(Comm, "Isend", counted)
    monkeypatch.setattr(World, "wait_all", finished)
    run_collectives("p2p", range(size), (3000, 3001), compared=False)
    assert set(most) == {3 * 128} or size == 7, "parts of seven ranks are shorter"
    of_first = [dest for rank, dest in targets if rank == 0]
    if size in (3, 4):
        assert of_first[: 2 * (size - 1)] == [*range(1, size)] * 2


@pytest.mark.parametrize("size", [*range(1, 18), 24, 31, 33, 48, 64])
def test_allreduce_of_any_number_of_ranks(size: int) -> None:
    vectors = torch.randn(size, 600, generator=torch.Generator().manual_seed(size))

    def work(comm: Comm) -> torch.Tensor:
        call = Ranks(comm).prepare("allreduce", "p2p", torch.float32, "sum")
        result: torch.Tensor = call(vectors[comm.rank].clone())
        return result

    total = in_order(list(vectors), range(size))
    assert all(torch.equal(result, total) for result in World(range(size)).run(work))


# For short reductions the rule takes the MPI library, of which the simulator has the allreduce alone.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "inter"),
    [
        *((hosts, "p2p") for hosts in ("aabb", "abab", "aab", "abbc", "aaabbbccc", "abcabcabc")),
        *((hosts, "rule") for hosts in ("abbc", "abcabc", "aaabc", "aabbccddeeff")),
    ],
)
def test_hierarchical_adds_within_the_hosts_first(hosts: str, inter: str) -> None:
    for compared in (False, True):
        lengths = (1, 700, 9000)  # in the messages of the comparison, or in steps
        run_collectives("hierarchical", [ord(host) for host in hosts], lengths, inter=inter, compared=compared)


@pytest.mark.parametrize("hosts", ["abab", "aaabbb", "aab", "abbc"])
def test_partial_results_over_hosts_are_rounded_once(hosts: str) -> None:
    """By all steps of `splits.ALLREDUCES`: short and long slices, totals of first ranks, one and several chunks."""
    lengths, generator = (3000, 5000, 8200, 9000, 40_000), torch.Generator().manual_seed(1)
    data = {numel: torch.randn(len(hosts), numel, generator=generator).bfloat16() for numel in lengths}

    def work(comm: Comm) -> list[torch.Tensor]:
        ranks = Ranks(comm, compared=False, inter="p2p", config=Config(pipeline_bytes=64 << 10))
        call = ranks.prepare("allreduce", "hierarchical", torch.bfloat16, "avg")
        return [call(values[comm.rank].clone()) for values in data.values()]

    means = [in_order(list(values.float()), [ord(host) for host in hosts]) / len(hosts) for values in data.values()]
    for results in World([ord(host) for host in hosts]).run(work):
        assert all(torch.equal(result, mean.bfloat16()) for result, mean in zip(results, means, strict=True))


def test_an_allreduce_over_hosts_sends_each_byte_no_more_than_necessary() -> None:
    hosts = [rank // 4 for rank in range(32)]
    num_bytes, world = 8 << 20, World(hosts)

    def work(comm: Comm) -> None:
        Ranks(comm, compared=False).prepare("allreduce", "hierarchical", torch.float32, "sum")(
            torch.ones(num_bytes // 4)
        )

    world.run(work)
    for host in range(8):
        sent = sum(count for (origin, target), count in world.sent_bytes.items() if origin == host != target)
        assert sent == 2 * 7 * num_bytes // 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "backend"), [(100, "p2p"), pytest.param(400, "p2p", marks=pytest.mark.release), (256, "hierarchical")]
)
def test_many_ranks(size: int, backend: str) -> None:
    hosts = [rank // 8 if backend == "hierarchical" else rank for rank in range(size)]
    vectors = torch.randn(size, 300, generator=torch.Generator().manual_seed(1))

    def work(comm: Comm) -> torch.Tensor:
        call = Ranks(comm, inter="p2p").prepare("allreduce", backend, torch.float32, "sum")
        result: torch.Tensor = call(vectors[comm.rank].clone())
        return result

    total = in_order(list(vectors), hosts)
    assert all(torch.equal(result, total) for result in World(hosts).run(work))


def test_a_cycle_of_sends_is_a_deadlock() -> None:
    def work(comm: Comm) -> None:
        memory = torch.ones(1)
        message = (memory.data_ptr(), 4)
        request = comm.Isend(message, (comm.rank + 1) % 3, 5)
        comm.world.wait_all([request])
        comm.world.wait_all([comm.Irecv(message, (comm.rank - 1) % 3, 5)])

    with pytest.raises(DeadlockError, match="4 bytes to rank"):
        World(range(3)).run(work)


def test_a_buffer_that_is_overwritten_before_the_wait_is_found() -> None:
    def work(comm: Comm) -> float:
        memory = torch.full((1,), 3.0)
        message = (memory.data_ptr(), 4)
        request = (comm.Isend if comm.rank == 0 else comm.Irecv)(message, 1 - comm.rank, 5)
        comm.world.meet("both", comm, None, len)
        if comm.rank == 0:
            memory.fill_(7.0)  # too early
        comm.world.meet("both", comm, None, len)
        comm.world.wait_all([request])
        return memory.item()

    assert World(range(2)).run(work) == [7.0, 7.0]


def test_messages_that_are_too_long_or_never_received_are_found() -> None:
    def send(comm: Comm, num_bytes: int) -> None:
        memory = torch.ones(2)
        if comm.rank == 0:
            comm.Isend((memory.data_ptr(), 8), 1, 5)
        elif num_bytes:
            comm.world.wait_all([comm.Irecv((memory.data_ptr(), num_bytes), 0, 5)])

    with pytest.raises(RuntimeError, match="message too long"):
        World(range(2)).run(lambda comm: send(comm, 4))
    with pytest.raises(RuntimeError, match="1 messages have not been completed: rank 0: 8 bytes to rank 1"):
        World(range(2)).run(lambda comm: send(comm, 0))


# Virtual time.

NETWORK = Network(rate=1e6, header_share=0.0, latency=0.01, overhead=1e-4, host_latency=0.0)


@pytest.mark.parametrize("header_share", [0.0, 0.1])
def test_a_message_takes_its_latency_and_its_bytes(header_share: float) -> None:
    def work(comm: Comm) -> float:
        memory = torch.zeros(50_000, dtype=torch.uint8)
        message = (memory.data_ptr(), memory.nbytes)
        requests = [comm.Irecv(message, 1 - comm.rank, 5)] if comm.rank else [comm.Isend(message, 1, 5)]
        comm.world.wait_all(requests)
        return comm.world.turns.clock

    sent, received = World(range(2), network=NETWORK._replace(header_share=header_share)).run(work)
    assert sent == pytest.approx(1e-4) and received == pytest.approx(1e-4 + 0.01 + 0.05 * (1 + header_share))


@pytest.mark.parametrize(("num_hosts", "ranks_of_host"), [(2, 1), (4, 1), (4, 2), (3, 4)])
def test_an_allreduce_takes_the_time_of_the_bytes_of_its_busiest_link(num_hosts: int, ranks_of_host: int) -> None:
    hosts = [rank // ranks_of_host for rank in range(num_hosts * ranks_of_host)]
    num_bytes = 4 << 20
    plan, network = "p2p" if ranks_of_host == 1 else "hierarchical", NETWORK._replace(long_bytes=1 << 30)
    seconds, uplink = simulate.predict(plan, hosts, num_bytes, network, {})
    least = 2 * (num_hosts - 1) / num_hosts * num_bytes
    assert least <= uplink < 1.001 * least
    assert least / 1e6 < seconds < 1.02 * least / 1e6
    late, _ = simulate.predict(plan, hosts, num_bytes, network, {1: 5.0})
    assert 5.0 + least / 1e6 / 2 < late < 5.0 + 1.5 * least / 1e6  # no rank can end without the late one
    slow, _ = simulate.predict(plan, hosts, num_bytes, network._replace(slow_hosts=((0, 0.5),)), {})
    assert 2 * least / 1e6 < slow < 2.2 * least / 1e6


def test_a_long_message_is_announced_behind_the_messages_before_it() -> None:
    """Rank 0 sends 50,000 bytes to rank 1 before it announces 100,000 bytes to rank 2."""

    def work(comm: Comm) -> float:
        short, long = torch.zeros(50_000, dtype=torch.uint8), torch.zeros(100_000, dtype=torch.uint8)
        messages = [(memory.data_ptr(), memory.nbytes) for memory in (short, long)]
        if comm.rank == 0:
            comm.world.wait_all([comm.Isend(messages[peer - 1], peer, 5) for peer in (1, 2)])
        else:
            comm.world.wait_all([comm.Irecv(messages[comm.rank - 1], 0, 5)])
        return comm.world.turns.clock

    *_, received = World(range(3), network=NETWORK).run(work)
    assert received == pytest.approx(1e-4 + 0.05 + 3 * 0.01 + 0.1)


def test_switches_share_their_uplinks() -> None:
    """Of 8 hosts, 4 under a switch: each sends 4 of 7 parts to the other switch."""
    network, num_bytes = NETWORK._replace(hosts_per_switch=4, oversubscription=4.0), 1 << 20
    seconds, uplink = simulate.predict("direct", range(8), num_bytes, network, {})
    over_switch = 2 * 4 * 4 * num_bytes / 8 / (4e6 / 4)
    assert over_switch < seconds < 1.2 * over_switch
    assert uplink == 2 * 7 * num_bytes // 8


# Plans as data.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "sizes", "tolerance"),
    [
        *((plan, [(16, 1 << 11), (12, 3 << 18)], 1e-9) for plan in ("ring", "tree", "doubling", "direct", "relayed")),
        ("direct", [(2, 9 << 20)], 1e-9),
        # Ranks that leave a step at the same moment may be served in another order.
        ("p2p", [(16, 1 << 10), (12, 3 << 20)], 0.05),
        ("hierarchical", [(16, 1 << 10), (16, 32 << 10), (8, 1 << 20), (4, 1 << 20)], 0.05),
    ],
)
def test_plans_as_data_take_the_time_of_the_code(plan: str, sizes: list[tuple[int, int]], tolerance: float) -> None:
    network = Network(hosts_per_switch=2, oversubscription=2.0, slow_hosts=((1, 0.5),))
    for size, num_bytes in sizes:
        late, hosts = {rank: 1e-3 + 1.37e-5 * rank for rank in range(size)}, [rank // 2 for rank in range(size)]
        seconds, uplink = planned.predict(plan, size, 2, num_bytes, network, late)
        expected, expected_uplink = simulate.predict(plan, hosts, num_bytes, network, late)
        assert seconds == pytest.approx(expected, rel=tolerance)
        assert uplink == expected_uplink


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        ("tree", 1024),
        ("gather", 200),
        pytest.param("gather", 1024, marks=pytest.mark.release),
        ("relayed", 200),
        pytest.param("relayed", 1024, marks=pytest.mark.release),
    ],
)
def test_blocks_of_many_ranks(plan: str, size: int) -> None:
    """Every block that is sent is there, each arrives once, and no ranks wait for each other."""
    ranks = planned.PlannedRanks(size, 8, Network(), is_cyclic=False)
    assert ranks.run(lambda ranks, rank: planned.ALLREDUCES[plan](ranks, rank, 4096)) > 7 * Network().latency


def test_a_plan_that_sends_what_it_does_not_have_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(rank: int, size: int) -> list[schedule.Round]:
        return [
            schedule.Round((sent._replace(first=(sent.first + 1) % size),), (received,))
            for (sent,), (received,) in doubling(rank, size)
        ]

    doubling = schedule.doubling
    monkeypatch.setattr(planned.schedule, "doubling", shifted)
    with pytest.raises(RuntimeError, match="sends a block that it does not have"):
        planned.predict("gather", 8, 1, 4, Network(), {0: 1e-6})


def test_ranks_that_wait_for_each_other_as_data() -> None:
    def program(ranks: planned.PlannedRanks, rank: int) -> planned.Program:
        yield ranks.begin(rank, [((rank - 1) % ranks.size, 4)], [])
        yield ranks.begin(rank, [], [planned.Sent((rank + 1) % ranks.size, 4)])

    with pytest.raises(DeadlockError, match="3 functions wait for each other: 0 to 1: 4 bytes"):
        planned.PlannedRanks(3, 1, Network(), is_cyclic=False).run(program)


# Start, barriers, servers.


def test_a_simulated_start_has_the_calls_of_its_cost() -> None:
    hosts = [rank // 2 for rank in range(6)]
    with started(hosts, NETWORK) as start:
        assert [each.num_hosts for each in start.runtimes] == [3] * 6
        assert [each.local_rank for each in start.runtimes] == [0, 1] * 3
        costs = [call.cost(6, 2) for call in start.world.library_calls]
        sent = start.world.sent_by[0]
        assert start.seconds > sum(call.ranks == "all" for call in start.world.library_calls) * NETWORK.latency
    assert sent[0] == sum(cost.messages for cost in costs)
    # Rank 0 passes on objects of other ranks, of other lengths.
    assert sent[1] == pytest.approx(sum(cost.num_bytes for cost in costs), rel=0.05)


def test_a_start_makes_the_same_calls_whatever_the_number_of_hosts() -> None:
    calls = []
    for num_hosts in (2, 4):
        with started([rank // 2 for rank in range(2 * num_hosts)]) as start:
            calls.append([(call.name, call.ranks) for call in start.world.library_calls])
    assert calls[0] == calls[1]


def test_clients_and_servers() -> None:
    size, numel = 5, 300_000
    values = torch.arange(numel, dtype=torch.float32)
    world = World(range(size), network=Network())

    def work(comm: Comm) -> tuple[torch.Tensor, tuple[int, int]]:
        rank, out = ServerRank(comm, values), torch.zeros(numel)
        before = world.sent_by[comm.rank]
        if comm.rank == 1:
            rank.send(torch.ones(numel), "add")
            rank.receive(out)
        after = world.sent_by[comm.rank]
        rank.stop()
        return out, (after[0] - before[0], after[1] - before[1])

    with virtual_time(world):
        results = world.run(work)
    out, sent = results[1]
    first, count = partition.part_of(numel, size, 1)
    expected = values + 1
    expected[first : first + count] = 0  # the own shard is not remote
    assert torch.equal(out, expected)
    cost = request_cost(size, size - 1, 4 * numel)
    assert sent[0] == cost.messages + size - 1  # and the requests of the receive
