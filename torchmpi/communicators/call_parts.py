"""Parts of the running call, which backends report to the recorder of a timeline."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from ..timeline import events


def begin() -> int:
    """Return the time; 0 without a recorder."""
    return 0 if events.recorder is None else events.now()


def end(name: str, since: int) -> None:
    """Report a part that has begun at `since`, if that is not 0."""
    recorder = events.recorder
    if since and recorder is not None:
        recorder.slice(name, events.PART, since)


def add(name: str, times: Iterable[Sequence[int]]) -> None:
    """Report parts that have ended: the begin and the end of each."""
    recorder = events.recorder
    if recorder is not None:
        thread = threading.get_ident()
        for begin, end in times:
            recorder.report(events.SliceRecord(name, events.PART, "", begin, end, thread, {}))
