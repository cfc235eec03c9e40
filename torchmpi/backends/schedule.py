"""How work is cut and who sends what to whom: partitions, chunks, rounds of messages. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..errors import ArgumentError


def part_of(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of one part of an even partition; the first parts take the remainder, one each.

    >>> part_of(10, 3, 0), part_of(10, 3, 2)
    ((0, 4), (7, 3))
    """
    if numel < 0 or parts < 1 or not 0 <= index < parts:
        raise ArgumentError(f"cannot take part {index} of {numel} elements in {parts} parts.")
    least, num_larger = divmod(numel, parts)
    return index * least + min(index, num_larger), least + (index < num_larger)


def even_partition(numel: int, parts: int) -> list[tuple[int, int]]:
    """Offset and length of every part; lengths differ by at most one, the longer ones come first.

    >>> even_partition(10, 3)
    [(0, 4), (4, 3), (7, 3)]
    >>> even_partition(2, 3)
    [(0, 1), (1, 1), (2, 0)]
    """
    if parts < 1:
        raise ArgumentError(f"cannot cut {numel} elements into {parts} parts; at least one is needed.")
    return [part_of(numel, parts, index) for index in range(parts)]


def rows(dim0: int, size: int) -> list[tuple[int, int]]:
    """First row and number of rows that each of `size` ranks gets of a tensor with `dim0` rows.

    The split of `scatter`, `reduce_scatter` and `alltoall`, as `t.narrow(0, first, num_rows)` takes it.

    >>> rows(7, 4)
    [(0, 2), (2, 2), (4, 2), (6, 1)]
    """
    return even_partition(dim0, size)


def chunks(numel: int, max_numel: int) -> list[tuple[int, int]]:
    """Offset and length of pieces of at most `max_numel` elements; all but the last are full.

    MPI counts are 32 bit in the interface that every library has, so that larger tensors travel in chunks.

    >>> chunks(10, 4)
    [(0, 4), (4, 4), (8, 2)]
    >>> chunks(0, 4)
    []
    """
    if numel < 0 or max_numel < 1:
        raise ArgumentError(f"cannot cut {numel} elements into chunks of at most {max_numel}.")
    return [(offset, min(max_numel, numel - offset)) for offset in range(0, numel, max_numel)]


# --- messages between ranks ------------------------------------------------------------------------------
#
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
