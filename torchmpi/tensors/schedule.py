"""Plans of messages between ranks, for each algorithm and rank. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..collective_specs import Flow

# The payload of a collective is split into blocks, one for each rank. A plan is a sequence of rounds of one rank; all
# messages of a round are in progress together, and the next round begins when they have completed.


class Message(NamedTuple):
    """`num_blocks` blocks from `first` on, counted cyclically, that a rank sends to or receives from `peer`."""

    peer: int
    first: int
    num_blocks: int = 1


class Round(NamedTuple):
    """The messages of one rank that are in progress together."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


def exchange(rank: int, size: int) -> Round:
    """Plan a reduce-scatter without the addition: every rank's version of block j is sent to rank j.

    Each rank sends (size - 1) / size of its vector, as in a ring, but receives all versions of its block and can add
    them in rank order. The order of the peers differs between ranks, so that no rank receives from all others at the
    same time.

    >>> exchange(1, 3)
    Round(sends=(Message(peer=2, first=2, num_blocks=1), Message(peer=0, first=0, num_blocks=1)), \
receives=(Message(peer=0, first=1, num_blocks=1), Message(peer=2, first=1, num_blocks=1)))
    """
    return Round(
        tuple(Message(peer, peer) for peer in _peers_after(rank, size)),
        tuple(Message(peer, rank) for peer in _peers_before(rank, size)),
    )


class Relay(NamedTuple):
    """A round of :func:`relayed_exchange`: blocks at these positions are sent to one rank and received from another.

    Position j has the block for the rank j after this one (backward: before it), on its way there.
    """

    target: int
    origin: int
    positions: tuple[int, ...]


def relayed_exchange(rank: int, size: int, *, backward: bool = False) -> list[Relay]:
    """Plan the same exchange in log2(size) rounds of one message, in which ranks pass on blocks of others.

    A block for the rank j after its own moves by the powers of two of which j is the sum (Bruck et al., 1997). Half of
    the blocks move in each round: log2(size) / 2 times the bytes of `exchange`, but few messages. In the end position j
    has the block of the rank j before this one. `backward`: the same towards lower ranks, with the peers of `doubling`.

    >>> relayed_exchange(0, 3)
    [Relay(target=1, origin=2, positions=(1,)), Relay(target=2, origin=1, positions=(2,))]
    """
    distances = [1 << k for k in range((size - 1).bit_length())]
    return [
        Relay((rank + moved) % size, (rank - moved) % size, tuple(j for j in range(size) if j & distance))
        for distance in distances
        for moved in (-distance if backward else distance,)
    ]


def spread(rank: int, size: int) -> Round:
    """Plan an allgather in one round: rank j sends block j to all ranks.

    >>> spread(1, 2)
    Round(sends=(Message(peer=0, first=1, num_blocks=1),), receives=(Message(peer=0, first=0, num_blocks=1),))
    """
    return Round(
        tuple(Message(peer, rank) for peer in _peers_after(rank, size)),
        tuple(Message(peer, peer) for peer in _peers_before(rank, size)),
    )


def doubling(rank: int, size: int) -> list[Round]:
    """Plan an allgather in log2(size) rounds, for short messages.

    After the round at distance d a rank has the 2 d blocks from its own on, or all blocks.

    >>> for step in doubling(0, 3): print(*step.sends, *step.receives)
    Message(peer=2, first=0, num_blocks=1) Message(peer=1, first=1, num_blocks=1)
    Message(peer=1, first=0, num_blocks=1) Message(peer=2, first=2, num_blocks=1)
    """
    rounds, distance = [], 1
    while distance < size:
        count = min(distance, size - distance)
        left, right = (rank - distance) % size, (rank + distance) % size
        rounds.append(Round((Message(left, rank, count),), (Message(right, right, count),)))
        distance *= 2
    return rounds


class Carried(NamedTuple):
    """A round of :func:`carried`: how many blocks follow the header to one rank, and from where they come."""

    target: int
    num_sent: int
    """Of the blocks at the first positions."""
    origin: int
    position: int
    """Where the received blocks go,"""
    num_received: int
    """and their number."""


def carried(rank: int, size: int, flow: Flow, root: int) -> list[Carried]:
    """Plan which blocks the messages of `doubling` carry, all of which are sent, whatever they carry.

    Blocks that go to all ranks are those of `doubling`, position j for the rank j after this one. To a root they go
    along a binomial tree, and the other messages carry none. The block of a root has one position, at every rank.

    >>> [step.num_sent for step in carried(1, 3, "all to all", 0)], carried(1, 3, "all to root", 0)[0][:2]
    ([1, 1], (0, 1))
    >>> for rank in range(3): print([step[1::3] for step in carried(rank, 3, "root to all", 0)])
    [(1, 0), (1, 0)]
    [(0, 0), (0, 1)]
    [(0, 1), (0, 0)]
    """
    rounds, distance = [], 1
    for (sent,), (received,) in doubling(rank, size):
        num_sent = num_received = sent.num_blocks
        position = distance
        if flow == "root to all":
            to_root, position = (root - rank) % size, 0
            num_sent, num_received = int(to_root < num_sent), int(distance <= to_root < distance + num_received)
        elif flow == "all to root":
            num_sent *= (rank - root) % size % (2 * distance) == distance
            num_received *= (rank + distance - root) % size % (2 * distance) == distance
        rounds.append(Carried(sent.peer, num_sent, received.peer, position, num_received))
        distance *= 2
    return rounds


def tree(rank: int, size: int, root: int) -> list[Round]:
    """Plan a broadcast in log2(size) rounds along a binomial tree; the whole payload is block 0.

    >>> tree(0, 4, 0)
    [Round(sends=(Message(peer=1, first=0, num_blocks=1),), receives=()), \
Round(sends=(Message(peer=2, first=0, num_blocks=1),), receives=())]
    """
    position, rounds, distance = (rank - root) % size, [], 1
    while distance < size:
        if position < distance and position + distance < size:
            rounds.append(Round(sends=(Message((rank + distance) % size, 0),)))
        elif distance <= position < 2 * distance:
            rounds.append(Round(receives=(Message((rank - distance) % size, 0),)))
        distance *= 2
    return rounds


def chain(rank: int, size: int, root: int) -> Round:
    """Plan a broadcast along a chain; with many chunks, each rank sends one while it receives the next.

    >>> chain(1, 3, 0), chain(2, 3, 0).sends
    (Round(sends=(Message(peer=2, first=0, num_blocks=1),), receives=(Message(peer=0, first=0, num_blocks=1),)), ())
    """
    before, after = (rank - 1) % size, (rank + 1) % size
    return Round(
        (Message(after, 0),) if after != root else (),
        (Message(before, 0),) if rank != root else (),
    )


def collect(rank: int, size: int, root: int) -> Round:
    """Plan a gather: rank j sends block j to the root.

    >>> collect(1, 2, 0)
    Round(sends=(Message(peer=0, first=1, num_blocks=1),), receives=())
    """
    if rank != root:
        return Round(sends=(Message(root, rank),))
    return Round(receives=tuple(Message(peer, peer) for peer in _peers_before(rank, size)))


def _peers_after(rank: int, size: int) -> Iterator[int]:
    return ((rank + shift) % size for shift in range(1, size))


def _peers_before(rank: int, size: int) -> Iterator[int]:
    return ((rank - shift) % size for shift in range(1, size))
