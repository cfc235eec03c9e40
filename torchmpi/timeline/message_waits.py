"""The messages of all ranks side by side: how long a receive waited for its sender to begin to send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .clocks import IntArray
from .trace_reader import Floats, MessageKind, RankTrace

_NUMBER_BITS = 31
"""Of the number of a message in its channel."""
_Channel = tuple[Any, ...]


class MessageWaits:
    """For the messages of each rank, by ranks: the sender that they receive from, and when it had begun to send.

    A send is taken to wait for nobody: how long it waits for room or for its receiver depends on the transport.

    Attributes:
        sender: The rank from which a message is received; -1 of a send, or if it is not known.
        ready: When that rank had begun to send: from then on data move. The end of a receive whose send no trace has.
        clock_error: The bound of the error of the wait in seconds.
    """

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self.sender: dict[int, IntArray] = {}
        self.ready: dict[int, Floats] = {}
        self.clock_error: dict[int, Floats] = {}
        self._numbers: defaultdict[_Channel, int] = defaultdict(lambda: len(self._numbers))
        sent = [self._keys(trace, is_receive=False) for trace in traces]
        keys = np.append(np.concatenate(sent), -2)  # the last one belongs to no message
        order = np.argsort(keys, kind="stable")
        begin, error = (
            np.append(np.concatenate([getattr(trace.messages, name) for trace in traces]), 0.0)[order]
            for name in ("begin", "clock_error")
        )
        leaders = [trace.job.get("leader", trace.rank) for trace in traces]
        leader = np.append(np.repeat(leaders, [len(trace.messages) for trace in traces]), -1)[order]
        keys = keys[order]
        for trace in traces:
            own, messages = self._keys(trace, is_receive=True), trace.messages
            self.sender[trace.rank] = messages.of_kinds([_sender(kind) for kind in messages.kinds])
            at = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
            is_matched = (own >= 0) & (keys[at] == own)
            is_receive = self.sender[trace.rank] >= 0
            since = np.where(is_matched, np.clip(begin[at], messages.begin, messages.end), messages.end)
            self.ready[trace.rank] = np.where(is_receive, since, messages.begin)
            is_near = ~is_matched | (leader[at] == trace.job.get("leader", trace.rank))
            self.clock_error[trace.rank] = np.where(is_near, 0.0, messages.clock_error + error[at])

    def _keys(self, trace: RankTrace, *, is_receive: bool) -> npt.NDArray[np.int64]:
        """Return channel and number of each message in one number; -1 if it has none."""
        messages, channels = trace.messages, []
        for kind in messages.kinds:
            about = kind.details
            ends = (about.get("from"), trace.rank) if is_receive else (trace.rank, about.get("to"))
            channel = about["group"], *ends, about.get("tag")
            channels.append(-1 if None in ends else self._numbers[channel])
        of_message, number = messages.of_kinds(channels), messages.received if is_receive else messages.sent
        return np.where(of_message < 0, -1, (of_message << _NUMBER_BITS) + number)


def _sender(kind: MessageKind) -> int:
    """Return the rank from which messages are received; -1 if there is none, or it is not known."""
    sender: int = kind.details.get("peer", -1)
    return -1 if kind.name == "send" else sender
