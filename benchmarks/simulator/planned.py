"""Plans of messages on simulated links, as data: no thread for a rank, no vectors, so that thousands of ranks run.

A program is a generator of one rank. It begins messages, and yields those for which it waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torchmpi.backends.number_exchange import most_carried, most_gathered
from torchmpi.backends.p2p import SHORT_BYTES, SWAP_BYTES, chunk_bytes
from torchmpi.backends.pieces import PieceQueue, piece_sizes
from torchmpi.backends.plan_cost import HEADER_BYTES, most_relayed_bytes
from torchmpi.backends.selection_table import Key, default_rule
from torchmpi.config import Config
from torchmpi.parameterserver.simulation.coroutines import Event, Programs
from torchmpi.tensors import partition, schedule

from .messages import SimulatedMPI
from .network import Links, Message, Network

_ITEM_BYTES = 4
"""Vectors are of float32."""
Program = Iterator[Sequence[Event]]


class Sent(NamedTuple):
    """A message that a rank is to send."""

    peer: int
    num_bytes: int
    content: Any = None
    """What the receiver can check."""


class PlannedMessage(Message):
    """One side of a message, with what it stands for."""

    content: Any = None


class Ranks(Protocol):
    """Ranks between which programs send messages."""

    size: int
    is_whole: bool
    """Whether all ranks are simulated, so that contents can be compared."""

    @property
    def clock(self) -> float:
        """The virtual time of the rank that runs."""

    def begin(self, rank: int, receives: Iterable[tuple[int, int]], sends: Iterable[Sent]) -> list[PlannedMessage]:
        """Begin messages, the receives (peer, bytes) first."""


class PlannedRanks:
    """Ranks that run programs, placed host by host."""

    def __init__(
        self,
        size: int,
        ranks_of_host: int,
        network: Network,
        *,
        is_cyclic: bool,
        late: Mapping[int, float] | None = None,
    ) -> None:
        """Prepare the ranks.

        `is_cyclic`: whether all ranks do the same in relation to their own number. Then only those of one host, or of
        one switch, are simulated, if no rank is late, no link is slow, and all hosts and switches are full.
        """
        self.size, self.ranks_of_host, self.network = size, ranks_of_host, network
        self.late = late or {}
        period = ranks_of_host * (network.hosts_per_switch or 1)
        is_even = is_cyclic and size % period == 0 and not self.late and not network.slow_hosts
        self.num_simulated = period if is_even else size
        self.is_whole = self.num_simulated == size
        self.order = Programs()
        self.links = Links(network, self.order, -(-self.num_simulated // ranks_of_host))
        self._posted: dict[tuple[int, int], deque[PlannedMessage]] = defaultdict(deque)
        self._meetings: dict[int, tuple[Event, int]] = {}

    def run(self, program: Callable[[PlannedRanks, int], Program]) -> float:
        """Run the program of each rank, and return when the last one ends; check that every message is received."""
        ends = self.order.run([self._begun(program, rank) for rank in range(self.num_simulated)])
        left = [message.description for queue in self._posted.values() for message in queue]
        if left:
            raise RuntimeError(f"{len(left)} messages have not been completed: {'; '.join(left[:8])}")
        return max(ends)

    def _begun(self, program: Callable[[PlannedRanks, int], Program], rank: int) -> Program:
        self.order.advance(self.late.get(rank, 0.0))
        yield from program(self, rank)

    def begin(self, rank: int, receives: Iterable[tuple[int, int]], sends: Iterable[Sent]) -> list[PlannedMessage]:
        """Begin messages, the receives (peer, bytes) first."""
        return [
            *[self._post(rank, Sent(peer, num_bytes), is_send=False) for peer, num_bytes in receives],
            *[self._post(rank, sent, is_send=True) for sent in sends],
        ]

    @property
    def clock(self) -> float:
        """The virtual time of the rank that runs."""
        return self.order.clock

    def meet(self, rank: int, num_bytes: int) -> Program:
        """Take a step of the ranks of a host, in its memory."""
        host = rank // self.ranks_of_host
        meeting, num_missing = self._meetings.pop(host, (Event(f"ranks of host {host}"), self.ranks_of_host))
        if num_missing > 1:
            self._meetings[host] = meeting, num_missing - 1
            yield [meeting]
        else:
            self.order.advance(self.network.in_host(num_bytes * self.ranks_of_host))
            self.order.finish(meeting, self.order.clock)

    def _post(self, rank: int, sent: Sent, *, is_send: bool) -> PlannedMessage:
        self.order.advance(self.network.overhead)
        origin, target = (rank, sent.peer) if is_send else (sent.peer, rank)
        on_hosts = origin // self.ranks_of_host, target // self.ranks_of_host
        described = f"{origin} to {target}: {sent.num_bytes} bytes"
        message = PlannedMessage(described, is_send, sent.num_bytes, on_hosts, self.order.clock)
        message.content = sent.content
        self.links.begin(message)
        # To a rank that is not simulated: what the rank in its place receives from the one that does the same.
        shift = target - target % self.num_simulated
        queue = self._posted[(origin - shift) % self.size, target - shift]
        if not queue or queue[0].is_send == is_send:
            queue.append(message)
            return message
        other = queue.popleft()
        leaving, received = (message, other) if is_send else (other, message)
        if leaving.num_bytes != received.num_bytes:
            raise RuntimeError(f"different lengths: {leaving.description}; {received.description}")
        received.content = leaving.content
        self.links.match(leaving, received)
        return message


class MessagesInPieces:
    """Sends the messages of a rank in pieces, as that of torchmpi.backends.p2p does."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank, sizes = ranks, rank, piece_sizes(ranks.size, SimulatedMPI.get_vendor()[0])
        self._piece_bytes = sizes.piece
        self._pieces: PieceQueue[PlannedMessage, Sent] = PieceQueue(
            sizes, lambda sent: ranks.begin(rank, [], [sent])[0], lambda sent: sent.num_bytes, lambda: ranks.clock
        )
        self.finish = self._pieces.up_to

    def begin(self, receives: Iterable[tuple[int, int]], sends: Iterable[Sent]) -> tuple[int, list[PlannedMessage]]:
        """Begin messages; return the number of the last piece, and the first piece of each that is received."""
        posted = [
            self._ranks.begin(self._rank, [(peer, count) for count in self._lengths(num_bytes)], [])
            for peer, num_bytes in receives
        ]
        pieces = [[sent._replace(num_bytes=count) for count in self._lengths(sent.num_bytes)] for sent in sends]
        return self._pieces.add(posted, pieces), [messages[0] for messages in posted if messages]

    def _lengths(self, num_bytes: int) -> list[int]:
        return [count for _, count in partition.chunks(num_bytes, self._piece_bytes)]


# --- parts of programs: plans of torchmpi.tensors.schedule


def swap(ranks: Ranks, rank: int, sent: Sent, received: tuple[int, int]) -> Program:
    """Send a message and receive another."""
    yield ranks.begin(rank, [received], [sent])


def compare(ranks: Ranks, rank: int) -> Program:
    """Compare the calls of all ranks."""
    for (sent,), (received,) in schedule.doubling(rank, ranks.size):
        yield from swap(ranks, rank, Sent(sent.peer, HEADER_BYTES), (received.peer, HEADER_BYTES))


def doubling(ranks: Ranks, rank: int, block_bytes: int, header_bytes: int = 0) -> Program:
    """Gather blocks on all ranks; each message has a header."""
    held = 1 << rank
    for (sent,), (received,) in schedule.doubling(rank, ranks.size):
        blocks = _blocks(sent, ranks.size)
        if ranks.is_whole and blocks & ~held:
            raise RuntimeError(f"rank {rank} sends a block that it does not have")
        messages = ranks.begin(
            rank,
            [(received.peer, header_bytes + received.num_blocks * block_bytes)],
            [Sent(sent.peer, header_bytes + sent.num_blocks * block_bytes, blocks)],
        )
        yield messages
        if ranks.is_whole and held & messages[0].content:
            raise RuntimeError(f"rank {rank} gets a block twice")
        held |= messages[0].content
    if ranks.is_whole and held != (1 << ranks.size) - 1:
        raise RuntimeError(f"rank {rank} has not got all blocks")


def _blocks(message: schedule.Message, size: int) -> int:
    """Return a number with a bit for each block of a message."""
    bits = (1 << message.num_blocks) - 1 << message.first
    return bits & (1 << size) - 1 | bits >> size


def relays(ranks: Ranks, rank: int, block_bytes: int, header_bytes: int = 0) -> Program:
    """Bring the blocks of all ranks to the ranks that combine them; messages with a header go to lower ranks."""
    size, way = ranks.size, -1 if header_bytes else 1
    held = [(rank, (rank + way * position) % size) for position in range(size if ranks.is_whole else 0)]
    for relay in schedule.relayed_exchange(rank, size, backward=way < 0):
        num_bytes = header_bytes + len(relay.positions) * block_bytes
        moved = [held[position] for position in relay.positions] if ranks.is_whole else None
        messages = ranks.begin(rank, [(relay.origin, num_bytes)], [Sent(relay.target, num_bytes, moved)])
        yield messages
        if ranks.is_whole:
            for position, block in zip(relay.positions, messages[0].content, strict=True):
                held[position] = block
    if ranks.is_whole and held != [((rank - way * position) % size, rank) for position in range(size)]:
        raise RuntimeError(f"rank {rank} has not got its block of all ranks")


def in_parts(ranks: Ranks, rank: int, numel: int, chunk_numel: int) -> Program:
    """Send each rank its part, and the combined part to all: the next chunk is sent while one is awaited."""
    size = ranks.size
    lengths = [count for _, count in partition.chunks(numel, chunk_numel)]

    pieces = MessagesInPieces(ranks, rank)

    def begin(step: schedule.Round, k: int) -> tuple[int, list[PlannedMessage]]:
        receives = [(peer, _part_bytes(ranks, lengths[k], part)) for peer, part, _ in step.receives]
        sends = [Sent(peer, _part_bytes(ranks, lengths[k], part), part) for peer, part, _ in step.sends]
        return pieces.begin(receives, sends)

    def check(messages: Sequence[PlannedMessage], expected: Sequence[int]) -> None:
        found = sorted(message.content for message in messages)
        if ranks.is_whole and found != sorted(expected):
            raise RuntimeError(f"rank {rank} got the parts {found} instead of {expected}")

    exchange, spread = schedule.exchange(rank, size), schedule.spread(rank, size)
    exchanges = deque([begin(exchange, 0)])
    following: deque[tuple[int, list[PlannedMessage]]] = deque()
    for k in range(len(lengths)):
        if k + 1 < len(lengths):
            exchanges.append(begin(exchange, k + 1))
        last, messages = exchanges.popleft()
        yield from pieces.finish(last)
        check(messages, [rank] * (size - 1))
        following.append(begin(spread, k))
        while len(following) > (k + 1 < len(lengths)):
            last, messages = following.popleft()
            yield from pieces.finish(last)
            check(messages, [part for part in range(size) if part != rank])


def wholes(ranks: Ranks, rank: int, numel: int, chunk_numel: int) -> Program:
    """Swap whole vectors between two ranks."""
    if numel * _ITEM_BYTES <= SWAP_BYTES:
        yield from swap(ranks, rank, Sent(1 - rank, numel * _ITEM_BYTES), (1 - rank, numel * _ITEM_BYTES))
        return
    pieces, swaps = MessagesInPieces(ranks, rank), deque[int]()
    for _, count in partition.chunks(numel, chunk_numel):
        num_bytes = count * _ITEM_BYTES
        swaps.append(pieces.begin([(1 - rank, num_bytes)], [Sent(1 - rank, num_bytes)])[0])
        if len(swaps) > 1:
            yield from pieces.finish(swaps.popleft())
    for last in swaps:
        yield from pieces.finish(last)


def _part_bytes(ranks: Ranks, numel: int, part: int) -> int:
    """Return the size of a part of a vector; where ranks stand for others, all parts are equal."""
    part_numel = partition.part_of(numel, ranks.size, part)[1] if ranks.is_whole else -(-numel // ranks.size)
    return part_numel * _ITEM_BYTES


# --- allreduces


def direct(ranks: Ranks, rank: int, num_bytes: int) -> Program:
    """Run the allreduce of `p2p` in parts."""
    run = wholes if ranks.size == 2 else in_parts
    return run(ranks, rank, num_bytes // _ITEM_BYTES, chunk_bytes(ranks.size, Config().pipeline_bytes) // _ITEM_BYTES)


def relayed(ranks: Ranks, rank: int, num_bytes: int, header_bytes: int = 0) -> Program:
    """Run the relayed allreduce of `p2p`, or that of a comparison, whose messages have a header."""
    width = -(-num_bytes // _ITEM_BYTES // ranks.size) * _ITEM_BYTES
    yield from relays(ranks, rank, width, header_bytes)
    yield from doubling(ranks, rank, width, header_bytes)


def with_comparison(ranks: Ranks, rank: int, num_bytes: int) -> Program:
    """Run a short allreduce whose vectors are sent in the messages of the comparison."""
    run = doubling if num_bytes <= most_gathered(ranks.size) else relayed
    yield from run(ranks, rank, num_bytes, HEADER_BYTES)


def in_rank_order(ranks: Ranks, rank: int, num_bytes: int) -> Program:
    """Run the allreduce that `p2p` chooses."""
    if num_bytes * ranks.size <= SHORT_BYTES:
        yield from doubling(ranks, rank, num_bytes)
    elif num_bytes <= most_relayed_bytes(ranks.size, 1 << 20):
        yield from relayed(ranks, rank, num_bytes)
    else:
        yield from direct(ranks, rank, num_bytes)


def p2p(ranks: PlannedRanks, rank: int, num_bytes: int) -> Program:
    """Run the allreduce that `p2p` chooses, with the comparison of the call."""
    if ranks.ranks_of_host > 1:
        yield from compare_in_steps(ranks, rank)
    elif num_bytes <= most_carried(ranks.size):
        yield from with_comparison(ranks, rank, num_bytes)
        return
    else:
        yield from compare(ranks, rank)
    yield from in_rank_order(ranks, rank, num_bytes)


def ring(ranks: Ranks, rank: int, num_bytes: int) -> Program:
    """Run the messages of a ring allreduce."""
    size, numel = ranks.size, num_bytes // _ITEM_BYTES
    left, right = (rank - 1) % size, (rank + 1) % size
    for k in range(2 * (size - 1)):
        sent, received = (_part_bytes(ranks, numel, (rank - step) % size) for step in (k, k + 1))
        yield from swap(ranks, rank, Sent(right, sent), (left, received))


def whole_doubling(ranks: Ranks, rank: int, num_bytes: int) -> Program:
    """Run the messages of an allreduce that sends the whole vector in each of log2 rounds."""
    for (sent,), (received,) in schedule.doubling(rank, ranks.size):
        yield from swap(ranks, rank, Sent(sent.peer, num_bytes), (received.peer, num_bytes))


def tree(ranks: Ranks, rank: int, num_bytes: int) -> Program:
    """Run the messages of a reduce and a broadcast along a binomial tree."""
    down = schedule.tree(rank, ranks.size, 0)
    up = [schedule.Round(sends=step.receives, receives=step.sends) for step in reversed(down)]
    for step in (*up, *down):
        receives = [(message.peer, num_bytes) for message in step.receives]
        yield ranks.begin(rank, receives, [Sent(message.peer, num_bytes) for message in step.sends])


def compare_in_steps(ranks: PlannedRanks, rank: int) -> Program:
    """Compare the calls of all ranks: within the hosts, and between their first ranks."""
    yield from ranks.meet(rank, 0)
    host, position = divmod(rank, ranks.ranks_of_host)
    if position == 0:
        yield from compare(_InterHost(ranks, position), host)
    yield from ranks.meet(rank, 0)


def in_steps(ranks: PlannedRanks, rank: int, num_bytes: int) -> Program:
    """Run the allreduce in steps over hosts, all with the same number of ranks, of up to one chunk."""
    intra = partial(ranks.meet, rank)
    host, position = divmod(rank, ranks.ranks_of_host)
    inter = _InterHost(ranks, position)
    if num_bytes <= most_carried(inter.size, in_steps=True):
        yield from intra(num_bytes)
        if position == 0:
            yield from with_comparison(inter, host, num_bytes)
        yield from intra(num_bytes)
        return
    yield from compare_in_steps(ranks, rank)
    if num_bytes <= SHORT_BYTES:
        yield from intra(num_bytes)
        if position == 0:
            yield from _between_hosts(inter, host, num_bytes)
        yield from intra(num_bytes)
        return
    if num_bytes > Config().pipeline_bytes:
        raise NotImplementedError("steps over hosts with several chunks")
    yield from intra(num_bytes)
    yield from _between_hosts(inter, host, num_bytes // ranks.ranks_of_host)
    yield from intra(num_bytes)


def _between_hosts(ranks: Ranks, rank: int, num_bytes: int) -> Program:
    """Run a step between hosts with the backend that the default rule chooses."""
    key = Key("allreduce", "cpu", "across", "sync")
    rule = default_rule(key, {"mpi", "p2p"}.__contains__, compared=False)
    backend = next(name for limit, name in rule if limit is None or num_bytes <= limit)
    if backend == "p2p":
        yield from in_rank_order(ranks, rank, num_bytes)
    elif ranks.size == 2:
        yield ranks.begin(rank, [(1 - rank, num_bytes)], [Sent(1 - rank, num_bytes)])
    elif num_bytes * ranks.size <= SHORT_BYTES:
        yield from doubling(ranks, rank, num_bytes)
    else:
        step, part = schedule.exchange(rank, ranks.size), -(-num_bytes // ranks.size)
        yield ranks.begin(
            rank, [(peer, part) for peer, *_ in step.receives], [Sent(peer, part) for peer, *_ in step.sends]
        )
        yield from doubling(ranks, rank, part)


class _InterHost:
    """The ranks with the same position on each host, by the numbers of the hosts."""

    def __init__(self, ranks: PlannedRanks, position: int) -> None:
        self._ranks, self._width, self._position = ranks, ranks.ranks_of_host, position
        self.size, self.is_whole = ranks.size // ranks.ranks_of_host, ranks.is_whole

    @property
    def clock(self) -> float:
        """The virtual time of the rank that runs."""
        return self._ranks.clock

    def begin(self, rank: int, receives: Iterable[tuple[int, int]], sends: Iterable[Sent]) -> list[PlannedMessage]:
        """Begin messages, the receives (peer, bytes) first."""
        received = [(self._place(peer), num_bytes) for peer, num_bytes in receives]
        sent = [each._replace(peer=self._place(each.peer)) for each in sends]
        return self._ranks.begin(self._place(rank), received, sent)

    def _place(self, rank: int) -> int:
        return rank * self._width + self._position


ALLREDUCES: dict[str, Callable[[PlannedRanks, int, int], Program]] = {
    "ring": ring, "doubling": whole_doubling, "tree": tree, "gather": doubling, "direct": direct, "relayed": relayed,
    "p2p": p2p, "hierarchical": in_steps,
}  # fmt: skip


def predict(
    name: str, size: int, ranks_of_host: int, num_bytes: int, network: Network, late: Mapping[int, float]
) -> tuple[float, int]:
    """Return the seconds of an allreduce until the last rank has ended, and the bytes of the busiest uplink."""
    ranks = PlannedRanks(size, ranks_of_host, network, is_cyclic=name != "tree", late=late)
    seconds = ranks.run(lambda ranks, rank: ALLREDUCES[name](ranks, rank, num_bytes))
    return seconds, max((count for (kind, _), count in ranks.links.carried.items() if kind == "out"), default=0)
