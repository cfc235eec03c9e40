"""Parts of the running call, which backends report to the recorder of a timeline."""

from __future__ import annotations

from ..timeline import events


def begin() -> int:
    """Return the time; 0 without a recorder."""
    return 0 if events.recorder is None else events.now()


def end(name: str, since: int) -> None:
    """Report a part that has begun at `since`, if that is not 0."""
    recorder = events.recorder
    if since and recorder is not None and not recorder.note_interval(events.PART, name, since):
        recorder.interval(events.PART, name, since)
