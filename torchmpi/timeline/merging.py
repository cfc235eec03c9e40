"""One trace of all ranks: times on one clock, the phases of each call, and flows that connect its parts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .. import files
from .aligned_calls import AlignedCall, AlignedCalls
from .events import BACKGROUND_MESSAGE, PART
from .trace_reader import Event, RankTrace

_COMPRESSION = 6
_AT_ONCE = 10_000
"""Events whose times are converted together."""


def merge(traces: Sequence[RankTrace], path: Path) -> int:
    """Write the traces of all ranks to one file; return the number of events."""
    number = 0
    with files.replacing(path) as raw, gzip.open(raw, "wt", _COMPRESSION, encoding="utf-8") as file:
        for number, event in enumerate(merged_events(traces), 1):
            file.write(("[\n" if number == 1 else ",\n") + json.dumps(event))
        file.write("\n]\n")
    return number


def merged_events(traces: Sequence[RankTrace]) -> Iterator[Event]:
    """Return the events of all ranks in microseconds since the first one, with phases and flows."""
    aligned = AlignedCalls(traces)
    first, with_parts = float("inf"), set[tuple[int, str, int]]()
    for trace in traces:
        for event, seconds in _timed(trace):
            if event["ph"] != "M":
                first = min(first, seconds)
            if event.get("cat") == PART:
                with_parts.add(_call_of(trace, event))
    ready: dict[tuple[int, str, int], float] = {}
    for each in aligned if with_parts else ():
        keys = {rank: (rank, call.group, call.seq) for rank, call in each.calls.items()}
        ready.update({key: each.ready(rank) for rank, key in keys.items() if key in with_parts})
    tracks: dict[tuple[int, str], int] = {}
    for trace in traces:
        for event, seconds in _timed(trace):
            if event["ph"] == "M":
                yield event
                if event["name"] == "torchmpi_group":
                    tracks[trace.rank, f"{event['args']['key']:x}"] = event["tid"]
            else:
                shifted = {**event, "ts": _microseconds(seconds - first)}
                if event.get("cat") == PART:  # that of a call recorded since the file was read is not divided
                    yield from _divided(shifted, _microseconds(ready.get(_call_of(trace, event), first) - first))
                else:
                    yield shifted
    for number, each in enumerate(aligned, 1):
        yield from _phases(each, tracks, first)
        yield from _flow(each, tracks, first, number)
    yield from _message_flows(traces, first, len(aligned) + 1)


def _timed(trace: RankTrace) -> Iterator[tuple[Event, float]]:
    """Return the events of a rank with their times and durations on the clock of rank 0."""
    events = trace.events
    while some := list(islice(events, _AT_ONCE)):
        begins = trace.seconds([each["ts"] for each in some]).tolist()
        ends = trace.seconds([each["ts"] + each.get("dur", 0.0) for each in some]).tolist()
        for event, begin, end in zip(some, begins, ends, strict=True):
            if "dur" in event:
                event["dur"] = _microseconds(end - begin)
            yield event, begin


def _call_of(trace: RankTrace, part: Event) -> tuple[int, str, int]:
    return trace.rank, part["args"]["group"], part["args"]["call"]


def _divided(event: Event, limit: float) -> Iterator[Event]:
    """Divide a part of a call where its waiting ends, as slices of a row must not overlap.

    >>> [each["dur"] for each in _divided({"ts": 1.0, "dur": 4.0}, 2.0)]
    [1.0, 3.0]
    """
    begin, end = event["ts"], event["ts"] + event["dur"]
    if not begin < limit < end:
        yield event
        return
    yield {**event, "dur": round(limit - begin, 3)}
    yield {**event, "ts": limit, "dur": round(end - limit, 3)}


def _phases(aligned: AlignedCall, tracks: dict[tuple[int, str], int], first: float) -> Iterator[Event]:
    """Divide each part of a call into waiting for another rank, and moving data."""
    for rank, call in aligned.calls.items():
        awaited, ready = aligned.awaited(rank), aligned.ready(rank)
        if awaited is None:
            continue
        place = {"ph": "X", "pid": rank, "tid": tracks[rank, call.group], "cat": "phase"}
        if ready > call.begin:
            begin, seconds = _microseconds(call.begin - first), _microseconds(ready - call.begin)
            yield {**place, "name": f"waiting for rank {awaited}", "ts": begin, "dur": seconds}
        if ready < call.end:
            begin, seconds = _microseconds(ready - first), _microseconds(call.end - ready)
            yield {**place, "name": "moving", "ts": begin, "dur": seconds}


def _flow(aligned: AlignedCall, tracks: dict[tuple[int, str], int], first: float, number: int) -> Iterator[Event]:
    """Connect the parts of a call, from the first rank that arrived to the last one."""
    parts = sorted(aligned.calls.items(), key=lambda item: item[1].begin)
    if len(parts) < 2:
        return
    for index, (rank, call) in enumerate(parts):
        kind = "s" if index == 0 else "f" if index == len(parts) - 1 else "t"
        event = {
            "ph": kind, "name": "call", "cat": "call", "id": number, "pid": rank, "tid": tracks[rank, call.group],
            "ts": _microseconds(call.begin - first),
        }  # fmt: skip
        yield {**event, "bp": "e"} if kind == "f" else event


def _message_flows(traces: Sequence[RankTrace], first: float, first_id: int) -> Iterator[Event]:
    """Connect each send with its receive: the message with the same number of the same channel."""
    sends: dict[tuple[Any, ...], tuple[Event, float]] = {}
    receives: dict[tuple[Any, ...], tuple[Event, float]] = {}
    for trace in traces:
        for event, seconds in _timed(trace):
            if event.get("cat") in ("message", BACKGROUND_MESSAGE):
                details = event["args"]
                group, tag = details.get("group"), details.get("tag")
                if "sent" in details:
                    sends[group, trace.rank, details["to"], tag, details["sent"]] = event, seconds - first
                if "received" in details:
                    receives[group, details["from"], trace.rank, tag, details["received"]] = event, seconds - first
    for number, key in enumerate(sends.keys() & receives.keys(), first_id):
        (send, sent), (receive, begin) = sends[key], receives[key]
        # The arrow ends inside the slice of the receive, not before its start, nor before the message was sent.
        at = min(max(_microseconds(begin), _microseconds(sent)), _microseconds(begin) + receive["dur"] - 0.001)
        if at < _microseconds(sent):  # by the error of the clocks: viewers show no arrow backwards in time
            continue
        flow = {"name": "message", "cat": "message", "id": number}
        yield {**flow, "ph": "s", "pid": send["pid"], "tid": send["tid"], "ts": _microseconds(sent)}
        yield {**flow, "ph": "f", "bp": "e", "pid": receive["pid"], "tid": receive["tid"], "ts": at}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
