"""Which message goes to which receive, without a socket: what comes is put into the inbox by hand."""

from __future__ import annotations

import itertools

import pytest

from torchmpi.distributed.sockets.requests import ANY, CommunicationError, Receive, Status
from torchmpi.distributed.sockets.socket_endpoint import Endpoint

CONTEXT = 4
WORLD = {rank: rank for rank in range(4)}


@pytest.fixture
def endpoint():
    """Rank 3 of a world in which nobody else exists: all that comes is made up."""
    endpoint = Endpoint(3, 4, {}, eager_seconds=0)
    yield endpoint
    endpoint.close()


@pytest.fixture
def inbox(endpoint):
    return endpoint.inbox


@pytest.fixture
def receive(endpoint):
    def post(source=ANY, tag=ANY, *, length=8, context=CONTEXT, members=WORLD, from_all=False):
        view = None if length is None else memoryview(bytearray(b"." * length))
        request = Receive(
            endpoint.poller, context, source, tag,
            view=view, members=members, withdraw=endpoint.inbox.withdraw, from_all=from_all,
        )  # fmt: skip
        endpoint.inbox.post(request)
        return request

    return post


def arrive(inbox, source, tag, text, context=CONTEXT):
    inbox.arrive(source, context, tag, memoryview(text.encode()))


def text(request):
    request.Wait()
    return bytes(request.view).decode().rstrip(".")


def counted(request):
    status = Status()
    request.Wait(status)
    return status.Get_source(), status.Get_tag(), status.Get_count()


@pytest.mark.parametrize("posted_first", (True, False))
def test_messages_of_a_pair_keep_their_order(inbox, receive, posted_first):
    requests = [receive(0, 1) for _ in range(3)] if posted_first else []
    for field in ("one", "two", "three"):
        arrive(inbox, 0, 1, field)
    requests = requests or [receive(0, 1) for _ in range(3)]
    assert [text(request) for request in requests] == ["one", "two", "three"]


@pytest.mark.parametrize("posted_first", (True, False))
def test_tags_sources_and_contexts_do_not_mix(inbox, receive, posted_first):
    wanted = [(0, 1, 4), (0, 2, 4), (1, 1, 4), (0, 1, 8)]
    requests = [receive(source, tag, context=context) for source, tag, context in wanted] if posted_first else []
    for source, tag, context in reversed(wanted):
        arrive(inbox, source, tag, f"{source}{tag}{context}", context)
    requests = requests or [receive(source, tag, context=context) for source, tag, context in wanted]
    assert [text(request) for request in requests] == ["014", "024", "114", "018"]


def test_any_takes_the_first_to_come(inbox, receive):
    for source, tag in ((2, 5), (1, 5), (1, 6), (2, 6)):
        arrive(inbox, source, tag, f"{source}{tag}")
    assert counted(receive(ANY, 6)) == (1, 6, 2)
    assert counted(receive(2, ANY)) == (2, 5, 2)
    assert counted(receive(ANY, ANY)) == (1, 5, 2)
    assert counted(receive(ANY, ANY)) == (2, 6, 2)


def test_the_receive_posted_first_gets_the_message(inbox, receive):
    requests = [receive(ANY, 1), receive(0, 1), receive(0, ANY)]
    for field in ("a", "b", "c"):
        arrive(inbox, 0, 1, field)
    assert [text(request) for request in requests] == ["a", "b", "c"]


@pytest.mark.parametrize("posted_first", (True, False))
def test_a_short_message_is_counted_and_a_long_one_refused(inbox, receive, posted_first):
    requests = [receive(0, 1), receive(0, 1), receive(0, 1)] if posted_first else []
    for field in ("abc", "too long for it", "next"):
        arrive(inbox, 0, 1, field)
    short, long, following = requests or [receive(0, 1), receive(0, 1), receive(0, 1)]
    assert counted(short) == (0, 1, 3) and bytes(short.view) == b"abc....."
    with pytest.raises(CommunicationError, match="truncated: rank 0 sent 15 bytes, for which there are 8"):
        long.Wait()
    assert bytes(long.view) == b"........"
    assert text(following) == "next"


def test_within_a_collective_a_short_message_is_refused_too(inbox, receive):
    request = receive(0, 1, from_all=True)
    arrive(inbox, 0, 1, "abc")
    with pytest.raises(CommunicationError, match="rank 0 sent 3 bytes where 8 were expected"):
        request.Wait()


def test_without_memory_any_length_is_taken(inbox, receive):
    request = receive(0, 1, length=None)
    arrive(inbox, 0, 1, "of any length at all")
    request.Wait()
    assert request.memory == b"of any length at all"


def test_sources_are_ranks_of_the_communicator(inbox, receive):
    arrive(inbox, 2, 1, "abc")
    assert counted(receive(2, 1, members={3: 0, 2: 1})) == (1, 1, 3)


# --- long messages, which come in parts


def bring(body, data):
    """What the reader does with the rest of a body."""
    for byte in data:
        body.missing()[:1] = bytes([byte])
        body.filled += 1


def same_memory(one, other):
    other[0] ^= 1
    changed = one[0] == other[0]
    other[0] ^= 1
    return changed and one.nbytes <= other.nbytes


def test_a_posted_long_message_goes_straight_to_its_place(inbox, receive):
    request = receive(0, 1)
    body = inbox.begin(0, CONTEXT, 1, 6)
    assert same_memory(body.target, request.view)
    body.fill(memoryview(b"ab"))
    bring(body, b"cdef")
    assert not request.is_done
    inbox.finish(body)
    assert counted(request) == (0, 1, 6) and text(request) == "abcdef"


@pytest.mark.parametrize("come", range(7))
def test_posted_in_the_middle_it_takes_over(inbox, receive, come):
    body = inbox.begin(0, CONTEXT, 1, 6)
    assert inbox.probe(CONTEXT, 0, 1).num_bytes == 6
    body.fill(memoryview(b"abcdef"[:come]))
    request = receive(0, 1)
    assert inbox.probe(CONTEXT, 0, 1) is None
    bring(body, b"abcdef"[come:])
    assert same_memory(body.target, request.view) == (come < 6)  # with all there already, there is nothing to take over
    inbox.finish(body)
    assert counted(request) == (0, 1, 6) and text(request) == "abcdef"


@pytest.mark.parametrize("when", ("before", "in the middle", "after"))
def test_a_long_message_that_does_not_fit_is_read_and_refused(inbox, receive, when):
    request = receive(0, 1, length=4) if when == "before" else None
    body = inbox.begin(0, CONTEXT, 1, 6)
    body.fill(memoryview(b"ab"))
    request = receive(0, 1, length=4) if when == "in the middle" else request
    bring(body, b"cdef")
    inbox.finish(body)
    request = request or receive(0, 1, length=4)
    with pytest.raises(CommunicationError, match="rank 0 sent 6 bytes, for which there are 4"):
        request.Wait()
    assert bytes(request.view) == b"...."


@pytest.mark.parametrize("when", ("before", "in the middle", "after"))
def test_a_long_message_without_memory(inbox, receive, when):
    request = receive(0, 1, length=None) if when == "before" else None
    body = inbox.begin(0, CONTEXT, 1, 6)
    request = receive(0, 1, length=None) if when == "in the middle" else request
    bring(body, b"abcdef")
    inbox.finish(body)
    request = request or receive(0, 1, length=None)
    request.Wait()
    assert bytes(request.memory) == b"abcdef"


def test_a_long_message_keeps_its_turn(inbox, receive):
    """A receive posted while it comes must not get the one behind it."""
    body = inbox.begin(0, CONTEXT, 1, 4)
    arrive(inbox, 1, 1, "late")
    requests = [receive(ANY, 1), receive(ANY, 1)]
    bring(body, b"long")
    inbox.finish(body)
    assert [text(request) for request in requests] == ["long", "late"]


# --- what ends otherwise


def test_a_posted_receive_can_be_cancelled(inbox, receive):
    first, second = receive(0, 1), receive(0, 1)
    first.Cancel()
    arrive(inbox, 0, 1, "abc")
    status = Status()
    first.Wait(status)
    assert status.Is_cancelled() and text(second) == "abc"


def test_a_receive_that_has_its_message_cannot(inbox, receive):
    request = receive(0, 1)
    body = inbox.begin(0, CONTEXT, 1, 3)
    request.Cancel()
    assert not request.is_done
    bring(body, b"abc")
    inbox.finish(body)
    assert text(request) == "abc"


def lost(request):
    """Whether it has failed, and names the rank."""
    if request.is_done:
        with pytest.raises(CommunicationError, match="rank 1 is gone"):
            request.Wait()
    return request.is_done


@pytest.mark.parametrize("posted_first", (True, False))
def test_a_lost_rank_ends_what_depends_on_it(inbox, receive, posted_first):
    def make():
        return {
            "from it": receive(1, 1),
            "from any": receive(ANY, 1),
            "in a collective with it": receive(0, 1, from_all=True),
            "from another": receive(0, 1),
            "from any of others": receive(ANY, 1, members={0: 0, 3: 1}),
            "in a collective of others": receive(0, 1, members={0: 0, 3: 1}, from_all=True),
        }

    requests = make() if posted_first else {}
    inbox.lose(1, "rank 1 is gone", said_goodbye=False, body=None)
    requests = requests or make()
    assert [what for what, request in requests.items() if lost(request)] == [
        "from it", "from any", "in a collective with it",
    ]  # fmt: skip


def test_a_rank_that_said_goodbye_ends_only_what_was_to_come_from_it(inbox, receive):
    requests = [receive(1, 1), receive(ANY, 1), receive(0, 1, from_all=True)]
    inbox.lose(1, "rank 1 is gone", said_goodbye=True, body=None)
    assert [lost(request) for request in requests] == [True, False, False]


def test_what_a_lost_rank_has_sent_can_still_be_received(inbox, receive):
    arrive(inbox, 1, 1, "last")
    half = inbox.begin(1, CONTEXT, 1, 6)
    half.fill(memoryview(b"ab"))
    inbox.lose(1, "rank 1 is gone", said_goodbye=False, body=half)
    assert text(receive(1, 1)) == "last"
    assert lost(receive(1, 1))


@pytest.mark.parametrize("posted_first", (True, False))
def test_half_a_message_fails_its_receive(inbox, receive, posted_first):
    request = receive(1, 1) if posted_first else None
    half = inbox.begin(1, CONTEXT, 1, 6)
    request = request or receive(1, 1)
    inbox.lose(1, "rank 1 is gone", said_goodbye=False, body=half)
    assert lost(request)


def test_every_order_of_posting_and_arriving_gives_the_same(endpoint, receive):
    """All interleavings of three messages and three receives, in contexts of their own."""
    for context, pattern in enumerate(set(itertools.permutations("pppaaa"))):
        fields, requests = iter("abc"), []
        for step in pattern:
            if step == "p":
                requests.append(receive(0, 1, context=100 + context))
            else:
                arrive(endpoint.inbox, 0, 1, next(fields), 100 + context)
        assert [text(request) for request in requests] == ["a", "b", "c"], pattern
