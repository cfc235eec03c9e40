"""Rounds of messages between ranks, for each algorithm and rank. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# The payload of a collective is cut into blocks, one for each rank. A plan is what one rank does, round by round;
# within a round all receives and sends are under way at once, and the next begins when they are done.


class Message(NamedTuple):
    """`num_rows` blocks from `first` on, counted cyclically, that a rank sends to or receives from `peer`."""

    peer: int
    first: int
    num_rows: int = 1


class Round(NamedTuple):
    """The messages of one rank that are under way together."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


def exchange(rank: int, size: int) -> Round:
    """Everybody's version of block j goes to rank j: a reduce-scatter, but for the adding.

    Each rank sends (size - 1) / size of its vector, like a ring, but gets all versions of its block and can so add
    them in rank order. Peers come in another order on each rank, so that not all send to the same one.

    >>> exchange(1, 3)
    Round(sends=(Message(peer=2, first=2, num_rows=1), Message(peer=0, first=0, num_rows=1)), \
receives=(Message(peer=0, first=1, num_rows=1), Message(peer=2, first=1, num_rows=1)))
    """
    return Round(
        tuple(Message(peer, peer) for peer in _peers_after(rank, size)),
        tuple(Message(peer, rank) for peer in _peers_before(rank, size)),
    )


def spread(rank: int, size: int) -> Round:
    """Block j goes from rank j to everybody: an allgather in one round.

    >>> spread(1, 2)
    Round(sends=(Message(peer=0, first=1, num_rows=1),), receives=(Message(peer=0, first=0, num_rows=1),))
    """
    return Round(
        tuple(Message(peer, rank) for peer in _peers_after(rank, size)),
        tuple(Message(peer, peer) for peer in _peers_before(rank, size)),
    )


def doubling(rank: int, size: int) -> list[Round]:
    """An allgather in log2(size) rounds: what a rank has doubles in each. For short messages, where rounds count.

    After the round at distance d a rank has the 2 d blocks from its own on, or all of them.

    >>> for step in doubling(0, 3): print(*step.sends, *step.receives)
    Message(peer=2, first=0, num_rows=1) Message(peer=1, first=1, num_rows=1)
    Message(peer=1, first=0, num_rows=1) Message(peer=2, first=2, num_rows=1)
    """
    rounds, distance = [], 1
    while distance < size:
        count = min(distance, size - distance)
        left, right = (rank - distance) % size, (rank + distance) % size
        rounds.append(Round((Message(left, rank, count),), (Message(right, right, count),)))
        distance *= 2
    return rounds


def tree(rank: int, size: int, root: int) -> list[Round]:
    """A broadcast in log2(size) rounds, the whole payload being block 0: who has it passes it on.

    >>> tree(0, 4, 0)
    [Round(sends=(Message(peer=1, first=0, num_rows=1),), receives=()), \
Round(sends=(Message(peer=2, first=0, num_rows=1),), receives=())]
    """
    place, rounds, distance = (rank - root) % size, [], 1
    while distance < size:
        if place < distance and place + distance < size:
            rounds.append(Round(sends=(Message((rank + distance) % size, 0),)))
        elif distance <= place < 2 * distance:
            rounds.append(Round(receives=(Message((rank - distance) % size, 0),)))
        distance *= 2
    return rounds


def chain(rank: int, size: int, root: int) -> Round:
    """A broadcast from neighbour to neighbour; cut into many pieces, each rank sends one while it receives the next.

    >>> chain(1, 3, 0), chain(2, 3, 0).sends
    (Round(sends=(Message(peer=2, first=0, num_rows=1),), receives=(Message(peer=0, first=0, num_rows=1),)), ())
    """
    before, after = (rank - 1) % size, (rank + 1) % size
    return Round(
        (Message(after, 0),) if after != root else (),
        (Message(before, 0),) if rank != root else (),
    )


def collect(rank: int, size: int, root: int) -> Round:
    """Block j goes from rank j to the root: a gather.

    >>> collect(1, 2, 0)
    Round(sends=(Message(peer=0, first=1, num_rows=1),), receives=())
    """
    if rank != root:
        return Round(sends=(Message(root, rank),))
    return Round(receives=tuple(Message(peer, peer) for peer in _peers_before(rank, size)))


def _peers_after(rank: int, size: int) -> Iterator[int]:
    return ((rank + shift) % size for shift in range(1, size))


def _peers_before(rank: int, size: int) -> Iterator[int]:
    return ((rank - shift) % size for shift in range(1, size))
