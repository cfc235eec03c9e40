"""To a user of long messages: how much of one is sent, in pieces, before others have arrived."""

from __future__ import annotations

from torchmpi.backends.pieces import PieceQueue, piece_sizes


class Network:
    """Pieces that take a time that the test chooses, and what was sent."""

    def __init__(self) -> None:
        self.now, self.sent = 0.0, 0
        self.begun: list[float] = []
        self.queue: PieceQueue[str, int] = PieceQueue(piece_sizes(3, "MPICH"), self.send, lambda size: size, self.time)

    def send(self, size: int) -> str:
        self.sent += size
        self.begun.append(self.now)
        return "sent"

    def time(self) -> float:
        return self.now

    def transfer(self, num_pieces: int, latency: float, seconds: float = 0.0) -> None:
        """Send pieces that arrive after a latency, and at least some seconds after the one before."""
        piece, first = piece_sizes(3, "MPICH").piece, len(self.begun)
        last = self.queue.add([], [[piece] * num_pieces])
        for number, _ in enumerate(self.queue.up_to(last), first):
            self.now = max(self.begun[number] + latency, self.now + seconds)

    @property
    def window(self) -> int:
        return self.queue._window.num_bytes


def test_more_is_in_progress_where_the_latency_is_long_and_less_where_pieces_wait_for_others():
    sizes, network = piece_sizes(3, "MPICH"), Network()
    assert network.window == sizes.fewest
    network.transfer(200, latency=1.0)
    assert network.window == sizes.most
    network.transfer(200, latency=1.0, seconds=0.9)
    assert network.window == sizes.fewest


def test_after_a_pause_the_fastest_piece_of_before_does_not_count():
    """The next messages may go to another rank."""
    sizes, network = piece_sizes(3, "MPICH"), Network()
    network.transfer(1, latency=0.001)
    network.transfer(200, latency=1.0)
    assert network.window == sizes.most


def test_messages_in_both_directions_and_of_different_lengths_are_complete():
    network = Network()
    last = network.queue.add([["a", "b", "c"], ["d"]], [[1, 2], [4, 8, 16]])
    requests = [request for piece in network.queue.up_to(last) for request in piece]
    assert sorted(requests) == ["a", "b", "c", "d", *["sent"] * 5] and network.sent == 31
