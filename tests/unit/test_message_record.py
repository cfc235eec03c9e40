"""To whoever reads flight records of messages: one channel for each other rank, direction and tag."""

from __future__ import annotations

from array import array

import pytest

from torchmpi.communicators import message_record
from torchmpi.communicators.message_record import ANY_RANK, MANY_TAGS, NO_TAG, NUMBER_MASK, Channels
from torchmpi.shared_memory.memory_layout import FIELD_BYTES, RECORD_LENGTH, ChannelFields, RecordFields

HEAD_FIELDS = 5  # before the entries


class Memory:
    def __init__(self, number: int) -> None:
        self.fields = memoryview(array("q", bytes(FIELD_BYTES * (HEAD_FIELDS + RECORD_LENGTH * RecordFields.FIELDS))))
        self.address = 10**6 * number

    def entry(self, index: int) -> list[int]:
        begin = HEAD_FIELDS + index * RecordFields.FIELDS
        return self.fields[begin : begin + RecordFields.FIELDS].tolist()


@pytest.fixture
def memories() -> list[Memory]:
    return []


@pytest.fixture
def channels(memories) -> Channels[Memory]:
    def make() -> Memory:
        memories.append(Memory(len(memories) + 1))
        return memories[-1]

    return Channels(make)


def test_each_channel_has_an_entry_of_its_own(channels, memories):
    keys = [(peer, is_receive, tag) for peer in (0, 3) for is_receive in (False, True) for tag in (NO_TAG, 7)]
    made = [channels.channel(peer, is_receive=is_receive, tag=tag) for peer, is_receive, tag in keys]
    assert [channels.channel(peer, is_receive=is_receive, tag=tag) for peer, is_receive, tag in keys] == made
    assert [each.address for each in made] == [10**6 + index * RecordFields.FIELDS * FIELD_BYTES for index in range(8)]
    for index, (key, channel) in enumerate(zip(keys, made, strict=True)):
        assert [channel.begin(2, 100 + index), channel.begin(2, 100 + index)] == [1, 2]
        channel.end()
        entry = memories[0].entry(index)
        assert (entry[ChannelFields.peer], entry[ChannelFields.is_receive], entry[ChannelFields.tag]) == key
        assert (entry[ChannelFields.begun], entry[ChannelFields.ended]) == (2, 1)
        assert (entry[ChannelFields.dtype], entry[ChannelFields.num_bytes]) == (2, 100 + index)
    assert not any(memories[0].entry(len(keys)))


def test_a_receive_that_is_withdrawn_is_not_counted(channels, memories):
    channel = channels.channel(1, is_receive=True)
    channel.begin(0, 0), channel.begin(0, 0)
    channel.withdraw()
    assert memories[0].entry(0)[ChannelFields.begun] == 1 and channel.begin(0, 0) == 2


def test_numbers_have_31_bits(channels, memories):
    channel = channels.channel(1, is_receive=False)
    memories[0].fields[HEAD_FIELDS + ChannelFields.begun] = NUMBER_MASK - 1
    assert [channel.begin(0, 0) for _ in range(3)] == [2**31 - 1, 0, 1]


def test_further_channels_get_more_memory(channels, memories):
    for peer in range(RECORD_LENGTH + 1):
        channels.channel(peer, is_receive=False)
    assert len(memories) == 2 and memories[1].entry(0)[ChannelFields.peer] == RECORD_LENGTH
    assert channels.close() == memories


def test_ever_new_tags_share_a_channel(channels):
    most = message_record._MOST_TAGS
    made = [channels.channel(1, is_receive=True, tag=tag) for tag in range(most + 2)]
    assert len(set(map(id, made))) == most + 1 and made[-1] is made[-2]
    assert made[-1] is channels.channel(1, is_receive=True, tag=MANY_TAGS)
    assert all(each.is_exact for each in made[:most]) and not made[-1].is_exact


def test_numbers_of_receives_are_exact_unless_receives_from_any_rank_take_messages(channels):
    first, other_tag = (channels.channel(1, is_receive=True, tag=tag) for tag in (4, 5))
    sends = channels.channel(1, is_receive=False, tag=4)
    assert first.is_exact and other_tag.is_exact and sends.is_exact
    assert not channels.channel(ANY_RANK, is_receive=True, tag=4).is_exact
    assert not first.is_exact and other_tag.is_exact and sends.is_exact
    assert not channels.channel(2, is_receive=True, tag=4).is_exact
    assert (
        channels.channel(2, is_receive=True, tag=6).is_exact and channels.channel(2, is_receive=False, tag=4).is_exact
    )
    channels.channel(ANY_RANK, is_receive=True, tag=MANY_TAGS)
    assert not other_tag.is_exact and not channels.channel(3, is_receive=True, tag=8).is_exact
    assert sends.is_exact and channels.channel(3, is_receive=False, tag=8).is_exact


def test_a_message_may_end_after_the_memory_has_another_use(channels, memories):
    channel = channels.channel(1, is_receive=False)
    channel.begin(0, 8)
    assert channels.close() == memories and channels.close() == []
    before = memories[0].fields.tolist()
    channel.end()
    assert memories[0].fields.tolist() == before
