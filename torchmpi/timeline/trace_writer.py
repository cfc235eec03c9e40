"""The trace file of a rank: Chrome's JSON format, compressed, and readable at any time, also after a kill.

The file consists of gzip members, each of which is written by one call of ``write()``, so that a killed process leaves
whole members. The JSON array is closed by ``stop()``; viewers accept it without the end.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from operator import attrgetter
from pathlib import Path
from typing import Any

from .. import files
from .clocks import ClockSample
from .events import BACKGROUND_MESSAGE, MESSAGE, PART, CallRecord, GroupInfo, MessageRecord, Record, SliceRecord, now
from .observer import Observer

FORMAT = 2
FIRST_ROW = 1000
"""The number of the first row of a rank, that of the main thread. Perfetto takes 0 for the idle thread of the machine:
it puts the rows 0 of all ranks together, and drops slices that overlap there. It takes a row with the number of a
process for its main thread."""
_MOST_TEXTS = 10_000
_MOST_PARTS = 1000
_COMPRESSION = 1  # of 9: events are alike, so that more effort hardly pays
QUEUED = "queued"


class TraceWriter(Observer):
    """Writes the events of one rank to a file."""

    def __init__(
        self, path: Path, job: dict[str, Any], samples: list[ClockSample], flush_seconds: float | None = None
    ) -> None:
        """Create the file, compressed if its name ends in ``.gz``; `job` describes this rank, `samples` its clock."""
        super().__init__(f"the timeline {path}", flush_seconds)
        self.rank: int = job["rank"]
        self.path, self._is_compressed = path, path.suffix == ".gz"
        self._tracks: dict[str, int] = {}
        self._fixed: dict[tuple[object, ...], tuple[str, str]] = {}
        self._parts: dict[int, list[SliceRecord]] = {}
        """Of each thread, the parts of a call that has not been written."""
        self._after: dict[str, int] = {}
        """Of each queue of messages, the time after the last one: slices of a row must not overlap."""
        self._main_thread = threading.main_thread().ident or 0
        self._file = files.create(self.path)
        self._begin = "[\n"
        epoch = (time.time_ns() - now()) // 1000
        name = f"rank {self.rank} on {job['host']}"
        self._lines = [self._metadata("process_name", name=name, start_time_since_epoch_in_micros=epoch)]
        self._lines += [self._metadata("process_sort_index", sort_index=self.rank)]
        self._lines += [self._metadata("torchmpi_job", format=FORMAT, **job)]
        self._samples = deque(samples)
        self._track("")  # the first row
        try:
            self.write([])
            self.start()
        except BaseException:
            os.close(self._file)
            raise

    def add_sample(self, sample: ClockSample) -> None:
        """Write a measurement of the clock, which any thread has made."""
        self._samples.append(sample)

    def write(self, records: list[Record]) -> None:
        """Write records as one gzip member: a job that makes calls without a pause loses the last one if it is killed.

        On an error the file ends, like that of a killed rank.
        """
        for record in records:
            if isinstance(record, CallRecord):
                self._format_call(record)
            elif isinstance(record, MessageRecord):
                self._format_message(record)
            elif record.category == PART:
                self._parts.setdefault(record.thread, []).append(record)
            else:
                self._format_slice(record)
        for thread, parts in list(self._parts.items()):
            # Calls come after their parts, possibly in the next flush. Of some there is no record.
            self._parts[thread] = parts[-_MOST_PARTS:]
            if not parts:
                del self._parts[thread]
        self._write(last=False)

    def end(self) -> None:
        """Write the end of the file, unless writing has failed before."""
        try:
            if not self.has_failed:
                self._write(last=True)
        finally:
            os.close(self._file)

    def _write(self, *, last: bool) -> None:
        if samples := [self._samples.popleft() for _ in range(len(self._samples))]:
            self._lines.append(self._metadata("torchmpi_clock", samples=[list(each) for each in samples]))
        if self.num_lost or last:
            self._lines.append(self._metadata("torchmpi_lost", events=self.num_lost))
        if last:
            self._lines.append(self._metadata("torchmpi_end"))
        if not self._lines:
            return
        text = self._begin + ",\n".join(self._lines) + ("\n]\n" if last else ",\n")
        self._begin, self._lines = "", []
        data = text.encode()
        rest = memoryview(gzip.compress(data, _COMPRESSION, mtime=0) if self._is_compressed else data)
        while rest:  # a disk that is almost full takes a part, and then raises an error
            rest = rest[os.write(self._file, rest) :]

    def _metadata(self, kind: str, tid: int = FIRST_ROW, **details: Any) -> str:
        return json.dumps({"ph": "M", "name": kind, "pid": self.rank, "tid": tid, "ts": 0, "args": details})

    def _track(self, name: str) -> int:
        """Return the number of a row of the trace; the rows of threads come first."""
        number = self._tracks.get(name)
        if number is None:
            number = self._tracks[name] = FIRST_ROW + len(self._tracks)
            self._lines.append(self._metadata("thread_name", number, name=name or "main thread"))
            self._lines.append(self._metadata("thread_sort_index", number, sort_index=number))
        return number

    def _thread_track(self, thread: int) -> int:
        return self._track("" if thread == self._main_thread else f"thread {thread}")

    def _group_track(self, group: GroupInfo) -> int:
        name = f"{group.name} #{group.key:x}"
        if name not in self._tracks:
            number = self._track(name)
            details = {**group._asdict(), "ranks": list(group.ranks)}
            self._lines.append(self._metadata("torchmpi_group", number, **details))
        return self._tracks[name]

    def _format_call(self, record: CallRecord) -> None:
        tid = self._group_track(record.group)
        begin, queued = _microseconds(record.begin), record.origin.queued
        head, tail = self._fixed_text(tid, record)
        if queued:
            name = f'"cat":"{QUEUED}","pid":{self.rank},"tid":{tid},"id":"{record.group.key:x}.{record.seq}"'
            name += f',"name":"{QUEUED}: {record.collective}"'
            self._lines.append(f'{{"ph":"b","ts":{_microseconds(queued)},{name}}}')
            self._lines.append(f'{{"ph":"e","ts":{begin},{name}}}')
            tail = f',"queued":{_microseconds(queued)}{tail}'
        duration = (record.end - record.begin) / 1000
        self._lines.append(f'{head},"ts":{begin},"dur":{duration},"args":{{"call":{record.seq}{tail}')
        if record.thread in self._parts:
            self._format_parts(record, tid)

    def _format_parts(self, call: CallRecord, tid: int) -> None:
        """Write the parts of a call on its row; those of a call around it are left."""
        parts, details = self._parts[call.thread], {"group": f"{call.group.key:x}", "call": call.seq}
        first = bisect_left(parts, call.begin, key=attrgetter("begin"))  # the parts of a thread follow each other
        end = bisect_right(parts, call.end, lo=first, key=attrgetter("end"))
        for each in parts[first:end]:
            self._complete(each.name, PART, tid, each.begin, each.end, details)
        del parts[first:end]

    def _fixed_text(self, tid: int, record: CallRecord) -> tuple[str, str]:
        """Return the text of a call before and after its numbers, which is the same for equal calls."""
        origin = record.origin
        key = (
            tid, record.collective, record.op, record.dtype, record.root, record.num_bytes, record.backend,
            record.algorithm, record.thread, origin.line, origin.label, record.error,
        )  # fmt: skip
        known = self._fixed.get(key)
        if known is None:
            if len(self._fixed) > _MOST_TEXTS:
                self._fixed.clear()
            known = self._fixed[key] = self._make_text(tid, record)
        return known

    def _make_text(self, tid: int, record: CallRecord) -> tuple[str, str]:
        group, origin = record.group, record.origin
        details: dict[str, Any] = {"communicator": group.name, "group": f"{group.key:x}", "bytes": record.num_bytes}
        details["thread"] = self._thread_track(record.thread)
        optional = {
            "op": record.op, "dtype": record.dtype, "backend": record.backend, "algorithm": record.algorithm,
            "line": origin.line, "label": origin.label, "error": record.error,
        }  # fmt: skip
        details |= {name: value for name, value in optional.items() if value}
        if record.root >= 0:
            details["root"] = record.root
        name = json.dumps(record.collective)
        head = f'{{"ph":"X","name":{name},"cat":"collective","pid":{self.rank},"tid":{tid}'
        return head, f",{json.dumps(details)[1:]}}}"

    def _format_message(self, record: MessageRecord) -> None:
        """Write a message on the row of its queue, where it is shown after the end of the one before."""
        group, origin = record.group, record.origin
        details: dict[str, Any] = {
            "bytes": record.num_bytes, "line": origin.line, "dtype": record.dtype, "communicator": group.name,
            "group": f"{group.key:x}",
        }  # fmt: skip
        for rank, number, known in (("to", "sent", record.sent), ("from", "received", record.received)):
            if known is not None:
                details |= {rank: known.rank, number: known.number}
        if origin.queued:
            details[QUEUED] = _microseconds(origin.queued)
        optional = {"peer": record.peer, "tag": record.tag, "error": record.error}
        details |= {name: value for name, value in optional.items() if value not in (-1, "")}
        after = self._after.get(record.queue, 0)
        begin = min(max(record.begin, after), record.end)
        self._after[record.queue] = max(after, record.end + 1)
        category = BACKGROUND_MESSAGE if record.is_background else MESSAGE
        self._format_slice(SliceRecord(record.name, category, record.queue, begin, record.end, record.thread, details))

    def _format_slice(self, record: SliceRecord) -> None:
        tid = self._track(record.track) if record.track else self._thread_track(record.thread)
        details = {**record.details, "thread": self._thread_track(record.thread)}
        self._complete(record.name, record.category, tid, record.begin, record.end, details)

    def _complete(self, name: str, category: str, tid: int, begin: int, end: int, details: dict[str, Any]) -> None:
        event = {
            "ph": "X", "name": name, "cat": category, "pid": self.rank, "tid": tid, "ts": _microseconds(begin),
            "dur": (end - begin) / 1000, "args": details,
        }  # fmt: skip
        self._lines.append(json.dumps(event))


def path_for(folder: Path, rank: int) -> Path:
    """Return the file of a rank.

    >>> path_for(Path("traces"), 3).as_posix()
    'traces/rank3.json.gz'
    """
    return folder / f"rank{rank}.json.gz"


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000  # exact to a nanosecond for 100 days after the start of the machine
