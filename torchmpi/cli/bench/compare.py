"""``torchmpi bench compare``: compare two files of results line by line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import ArgumentError
from .options import short_size
from .report import KEYS, Row, has_figure, load, microseconds, numeric_table, timing_of
from .timing import TimingSummary, apart

_FASTER, _SLOWER = "faster", "slower"


class Change(NamedTuple):
    """A line that both reports contain."""

    key: tuple[Any, ...]
    before: TimingSummary
    after: TimingSummary

    @property
    def ratio(self) -> float:
        """Return the time after over the time before."""
        return self.after.median_us / self.before.median_us if self.before.median_us else float("inf")

    @property
    def verdict(self) -> str:
        """Return faster, slower, or '' if the quartiles overlap."""
        if not apart(self.before, self.after):
            return ""
        return _FASTER if self.ratio < 1 else _SLOWER


def compare_files(before: str, after: str) -> str:
    """Compare two files, and return the result as text."""
    first, second = load(before), load(after)
    if first["kind"] != second["kind"]:
        raise ArgumentError(
            f"{before} has results of `{first['kind']}`, {after} of `{second['kind']}`. Compare files of one kind."
        )
    if not any(map(has_figure, first["rows"])):
        raise ArgumentError(f"{before}: files of `{first['kind']}` hold no times that could be compared.")
    found = changes(first, second)
    if not found:
        raise ArgumentError(
            f"{before} and {after} have no line in common. Measure the same collectives, sizes and ranks."
        )
    only = [_measured(report) - {change.key for change in found} for report in (first, second)]
    return as_text(first["kind"], found, (before, after), (len(only[0]), len(only[1])))


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the lines that both reports contain, in the order of the first."""
    later = {_key(row, after["kind"]): row for row in after["rows"] if has_figure(row)}
    return [
        Change(key, timing_of(row), timing_of(later[key]))
        for row in before["rows"]
        if has_figure(row) and (key := _key(row, before["kind"])) in later
    ]


def _key(row: Row, kind: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEYS[kind])


def _measured(report: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    return {_key(row, report["kind"]) for row in report["rows"] if has_figure(row)}


def as_text(kind: str, found: list[Change], files: tuple[str, str], num_only: tuple[int, int]) -> str:
    """Format a table, and count the lines that have changed."""
    rows = [[*KEYS[kind], "A us", "B us", "B/A", ""]]
    for change in found:
        key = [short_size(part) if name == "bytes" else str(part)
               for name, part in zip(KEYS[kind], change.key, strict=True)]  # fmt: skip
        rows.append([*key, *map(_time, (change.before, change.after)), f"{change.ratio:.2f}", change.verdict])
    lines = [f"A: {files[0]}", f"B: {files[1]}", "", *numeric_table(rows), ""]
    counts = [sum(change.verdict == verdict for change in found) for verdict in (_FASTER, _SLOWER)]
    lines.append(f"{len(found)} lines in both: {counts[0]} faster, {counts[1]} slower, beyond the quartiles of both.")
    if any(num_only):
        lines.append(f"Only in A: {num_only[0]} lines, only in B: {num_only[1]}.")
    return "\n".join(lines)


def _time(timing: TimingSummary) -> str:
    return f"{microseconds(timing.median_us)} ({timing.spread:.0%})"
