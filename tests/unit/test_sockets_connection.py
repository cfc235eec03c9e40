"""One stream: frames cut out of what arrives however it is chopped, and written as far as there is room."""

from __future__ import annotations

import random
import socket

import pytest

from torchmpi.distributed.sockets import wire
from torchmpi.distributed.sockets.connection import Connection, StreamError
from torchmpi.distributed.sockets.requests import CommunicationError, Request
from torchmpi.distributed.sockets.socket_endpoint import Endpoint

CONTEXT = 8


@pytest.fixture
def endpoint():
    """Somewhere to put what arrives."""
    endpoint = Endpoint(0, 3, {}, eager_seconds=0)
    yield endpoint
    endpoint.close()


@pytest.fixture
def ends():
    """The two ends of a stream."""
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def frame(tag, data, kind=wire.MESSAGE):
    return wire.head(CONTEXT, tag, len(data), kind) + data


def no_abort(rank, status):
    raise AssertionError("nobody has aborted")


def arrived(endpoint, tag):
    """All whole messages with a tag that wait for a receive."""
    found = []
    while (arrival := endpoint.inbox.probe(CONTEXT, 1, tag)) is not None and arrival.is_whole:
        found.append(bytes(arrival.memory))
        endpoint.inbox._box(CONTEXT).remove(arrival)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_cut_out_however_the_stream_is_chopped(endpoint, ends, seed):
    chance = random.Random(seed)
    lengths = [chance.choice((0, 1, 7, 200, 3000, 70_000)) for _ in range(12)]
    messages = [chance.randbytes(length) for length in lengths]
    stream = b"".join(frame(1, message) for message in messages) + wire.head(0, 0, 0, wire.GOODBYE)
    reader, staging = Connection(ends[1], 1), memoryview(bytearray(4096))
    while stream:
        length = chance.choice((1, 2, 23, 24, 25, 100, 5000))
        ends[0].sendall(stream[:length])
        stream = stream[length:]
        for _ in range(1 + length // 4096 + 1):
            reader.read(endpoint.inbox, staging, no_abort)
    assert reader.said_goodbye
    assert arrived(endpoint, 1) == messages


def test_the_end_of_the_stream_is_told(endpoint, ends):
    reader, staging = Connection(ends[1], 1), memoryview(bytearray(4096))
    ends[0].sendall(frame(1, b"abc") + frame(1, b"half")[:-2])
    ends[0].close()
    reader.read(endpoint.inbox, staging, no_abort)
    with pytest.raises(StreamError, match="without a goodbye"):
        reader.read(endpoint.inbox, staging, no_abort)
    assert arrived(endpoint, 1) == [b"abc"] and reader.body is not None and not reader.said_goodbye


def test_an_abort_is_told_with_its_status_and_who_began_it(endpoint, ends):
    told = []
    reader, staging = Connection(ends[1], 1), memoryview(bytearray(4096))
    ends[0].sendall(wire.head(2, 17, 0, wire.ABORT))
    reader.read(endpoint.inbox, staging, lambda rank, status: told.append((rank, status)))
    assert told == [(2, 17)]


def drain(sock, writer, endpoint):
    """Everything that comes through, with the writer getting its chance."""
    sock.setblocking(False)
    data, ended = b"", []
    while True:
        ended += writer.flush()
        try:
            data += sock.recv(1 << 20)
        except BlockingIOError:
            if not writer.has_outgoing:
                return data, ended


def test_what_there_is_no_room_for_is_written_later_and_in_order(endpoint, ends):
    wanted = []
    writer = Connection(ends[0], 1, wanted.append)
    messages = [bytes([k]) * length for k, length in enumerate((10, 3_000_000, 20, 0, 1_000_000))]
    requests = [Request(endpoint.poller) for _ in messages]
    done = [
        writer.send(wire.head(CONTEXT, 1, len(message)), memoryview(message), request)
        for message, request in zip(messages, requests, strict=True)
    ]
    assert done == [True, False, False, False, False]
    assert wanted and all(wanted)
    data, ended = drain(ends[1], writer, endpoint)
    assert data == b"".join(frame(1, message) for message in messages)
    assert ended == [(request, None) for request in requests[1:]]
    assert wanted[-1] is False


def test_an_abort_overtakes_what_has_not_been_begun(endpoint, ends):
    writer = Connection(ends[0], 1)
    messages = [b"a" * 3_000_000, b"b" * 10]
    for message in messages:
        writer.send(wire.head(CONTEXT, 1, len(message)), memoryview(message))
    writer.send_first(wire.head(0, 3, 0, wire.ABORT))
    data, _ = drain(ends[1], writer, endpoint)
    assert data == frame(1, messages[0]) + wire.head(0, 3, 0, wire.ABORT) + frame(1, messages[1])


def test_sending_to_a_closed_end_fails_with_the_rank(endpoint, ends):
    writer, request = Connection(ends[0], 1), Request(endpoint.poller)
    big = memoryview(bytes(3_000_000))
    assert not writer.send(wire.head(CONTEXT, 1, len(big)), big, request)
    ends[1].close()
    ended = writer.flush()
    assert [failed for failed, _ in ended] == [request] and "rank 1 is gone" in ended[0][1]
    with pytest.raises(CommunicationError, match="rank 1 is gone"):
        writer.send(wire.head(CONTEXT, 1, 0), memoryview(b""))


def test_after_refusing_nothing_is_sent(endpoint, ends):
    writer, request = Connection(ends[0], 1), Request(endpoint.poller)
    big = memoryview(bytes(3_000_000))
    writer.send(wire.head(CONTEXT, 1, len(big)), big, request)
    assert writer.refuse("rank 1 is gone: gone fishing") == [request]
    with pytest.raises(CommunicationError, match="gone fishing"):
        writer.send(wire.head(CONTEXT, 1, 0), memoryview(b""))
    writer.send_first(wire.head(0, 1, 0, wire.ABORT))  # without a word
    assert writer.flush() == []
