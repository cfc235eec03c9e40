"""The messages of a rank in its flight record: an entry per *channel*, with the last message and the numbers of all.

A channel is a direction, another rank of a group, and a tag. MPI keeps the messages of a channel in order, so the
message with a number is the same one on both ranks: timelines connect its two parts, and the analysis of a flight
record knows whether the message for which a rank waits has been sent. Only the first tags have channels of their own:
a program that counts its messages by tags would otherwise need ever more memory. The fields of an entry are
those of :class:`torchmpi.shared_memory.memory_layout.ChannelFields`; the fast path writes them too.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..shared_memory.memory_layout import FIELD_BYTES, RECORD_LENGTH, ChannelFields, RecordFields
from ..tensors.dtype_codes import name_of

ANY_RANK = -1
"""The other rank of receives from any rank."""
NO_TAG = -1
"""The tag of messages of `send` and `recv`."""
MANY_TAGS = -2
"""The tag of a channel for all further tags of a program that uses ever new ones."""
_MOST_TAGS = 256
"""Tags of a direction and another rank that have a channel each."""
NUMBER_MASK = (1 << 31) - 1
"""Of the number of a message in timelines."""


class Memory(Protocol):
    """The ring of a flight record, here a table of channels."""

    fields: memoryview
    address: int
    """The address of the first entry."""


M = TypeVar("M", bound=Memory)


class Channel:
    """The messages to or from one rank with one tag."""

    __slots__ = ("_at", "_fields", "_lock", "address", "is_exact")

    def __init__(self, memory: Memory, index: int, *, is_receive: bool, peer: int, tag: int) -> None:
        fields = memory.fields
        self._fields, self._at = fields, len(fields) - (RECORD_LENGTH - index) * RecordFields.FIELDS
        self.address = memory.address + index * RecordFields.FIELDS * FIELD_BYTES
        self._lock = threading.Lock()
        self.is_exact = peer != ANY_RANK
        """Whether the numbers of receives are those of the sender."""
        fields[self._at + ChannelFields.is_receive], fields[self._at + ChannelFields.peer] = is_receive, peer
        fields[self._at + ChannelFields.tag] = tag

    def begin(self, dtype: int, num_bytes: int) -> int:
        """Count a message that begins now; return its number."""
        with self._lock:
            fields, at = self._fields, self._at
            fields[at + ChannelFields.dtype], fields[at + ChannelFields.num_bytes] = dtype, num_bytes
            fields[at + ChannelFields.begin] = monotonic_ns()
            number = fields[at + ChannelFields.begun] = fields[at + ChannelFields.begun] + 1
        return number & NUMBER_MASK

    @property
    def number(self) -> int:
        """The number of the last message that has begun."""
        return self._fields[self._at + ChannelFields.begun] & NUMBER_MASK

    def end(self) -> None:
        """Count a message that ends now."""
        with self._lock:
            fields, at = self._fields, self._at
            fields[at + ChannelFields.end] = monotonic_ns()
            fields[at + ChannelFields.ended] += 1

    def withdraw(self) -> None:
        """Do not count a receive that has begun and has taken no message."""
        with self._lock:
            self._fields[self._at + ChannelFields.begun] -= 1

    def close(self) -> None:
        """Leave the memory to another group: a message of torch.distributed may end later."""
        with self._lock:
            self._fields, self._at = memoryview(array("q", bytes(FIELD_BYTES * RecordFields.FIELDS))), 0


class Channels(Generic[M]):
    """The channels of a rank on one group. `make_memory` returns memory for RECORD_LENGTH of them."""

    def __init__(self, make_memory: Callable[[], M]) -> None:
        self._make_memory = make_memory
        self._memories: list[M] = []
        self._channels: dict[tuple[bool, int, int], Channel] = {}
        self._num_tags: Counter[tuple[bool, int]] = Counter()
        self._inexact: set[int] = set()
        """Tags with receives from any rank, which may take the messages of receives from one rank."""
        self._lock = threading.Lock()

    def channel(self, peer: int, *, is_receive: bool, tag: int = NO_TAG) -> Channel:
        """Return a channel; `peer` is the other rank in the world, or ANY_RANK."""
        key = is_receive, peer, tag
        found = self._channels.get(key)
        return self._make(key) if found is None else found

    def close(self) -> list[M]:
        """End the use of the memory, and return it; channels that are made later get memory of their own."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            memories, self._memories = self._memories, []
            return memories

    def _make(self, key: tuple[bool, int, int]) -> Channel:
        is_receive, peer, tag = key
        with self._lock:
            if key not in self._channels and tag != NO_TAG and self._num_tags[is_receive, peer] >= _MOST_TAGS:
                tag = MANY_TAGS
                key = is_receive, peer, tag
            if key not in self._channels:
                self._num_tags[is_receive, peer] += 1
                index = len(self._channels) % RECORD_LENGTH
                if index == 0 or not self._memories:
                    self._memories.append(self._make_memory())
                made = Channel(self._memories[-1], index, is_receive=is_receive, peer=peer, tag=tag)
                if is_receive and peer == ANY_RANK:
                    self._inexact.add(tag)
                    for (receives, _, other_tag), channel in self._channels.items():
                        channel.is_exact = channel.is_exact and not (receives and tag in (other_tag, MANY_TAGS))
                made.is_exact = tag != MANY_TAGS and not (is_receive and self._inexact & {tag, MANY_TAGS})
                self._channels[key] = made
            return self._channels[key]


class LoggedMessages(NamedTuple):
    """The messages of a channel, as a flight record has them."""

    key: int
    """That of the group."""
    group: str
    peer: int
    """The other rank, as a number in the world, or ANY_RANK."""
    is_receive: bool
    tag: int
    """NO_TAG for messages of `send` and `recv`."""
    num_begun: int
    num_ended: int
    num_bytes: int
    """Of the last message."""
    dtype: str
    begin: float
    """Nanoseconds of the monotonic clock at which the last message began."""
    end: float
    """The same at which a message ended last; 0 if none has ended."""

    def __str__(self) -> str:
        what = f"{self.dtype}, {self.num_bytes} bytes" if self.dtype else f"{self.num_bytes} bytes"
        whom = "any rank" if self.peer == ANY_RANK else f"rank {self.peer}"
        tag = "" if self.tag == NO_TAG else ", of many tags" if self.tag == MANY_TAGS else f", tag {self.tag}"
        return f"{'recv from' if self.is_receive else 'send to'} {whom}{tag} ({what})"


def messages_in(key: int, group: str, fields: Sequence[int]) -> list[LoggedMessages]:
    """Return the messages of the channels with these fields."""
    at, first = ChannelFields, len(fields) - RECORD_LENGTH * RecordFields.FIELDS
    entries = (fields[begin : begin + RecordFields.FIELDS] for begin in range(first, len(fields), RecordFields.FIELDS))
    return [
        LoggedMessages(
            key, group, entry[at.peer], bool(entry[at.is_receive]), entry[at.tag], entry[at.begun], entry[at.ended],
            entry[at.num_bytes], name_of(entry[at.dtype]), float(entry[at.begin]), float(entry[at.end]),
        )
        for entry in entries
        if entry[at.begun] > 0
    ]  # fmt: skip
