"""Results as text, and as a file that can be read again."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, JobError
from ..layout import counted, section, table
from .samples import Sample

Row = Mapping[str, Any]
FORMAT = "torchmpi bench 1"
# What tells the lines of a file from each other, by kind.
KEYS = {
    "collectives": ("ranks", "verb", "dtype", "mode", "bytes", "contestant"),
    "train": ("ranks", "model", "part", "contestant"),
    "starts": ("ranks", "start", "contestant"),
    "leaks": ("ranks", "rank", "part"),
    "memory": ("ranks", "rank", "part"),
    "ps": ("ranks", "verb", "dtype", "bytes", "contestant"),
}


def new_report(kind: str, jobs: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """One report of all jobs, each with its own conditions, and the rows of all."""
    return {
        "format": FORMAT,
        "kind": kind,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "options": dict(options),
        "jobs": [{name: value for name, value in job.items() if name != "rows"} for job in jobs],
        "rows": [row for job in jobs for row in job["rows"]],
    }


def save(report: Mapping[str, Any], path: str) -> None:
    """Write a report as JSON."""
    try:
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}.") from error


def load(path: str) -> dict[str, Any]:
    """Read a report, or refuse."""
    try:
        report: dict[str, Any] = json.loads(Path(path).read_text())
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ArgumentError(f"{path} is no JSON ({error}). Pass a file that `torchmpi bench --json` wrote.") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT or report.get("kind") not in KEYS:
        raise ArgumentError(f"{path} was not written by `torchmpi bench --json` of this version.")
    return report


def has_figure(row: Row) -> bool:
    """Whether the row was measured."""
    return "median_us" in row


def sample_of(row: Row) -> Sample:
    """The figures of a row that has some."""
    return Sample(*(row[name] for name in ("median_us", "low_us", "high_us", "num_batches", "calls_per_batch")))


def grouped(rows: Sequence[Row], names: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Rows with equal values of some columns, in the order in which they come first.

    >>> [(key, len(rows)) for key, rows in grouped([{"a": 1}, {"a": 2}, {"a": 1}], ["a"])]
    [((1,), 2), ((2,), 1)]
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    yield from groups.items()


def microseconds(value: float) -> str:
    """Three digits are enough.

    >>> [microseconds(value) for value in (0.61234, 12.34, 1234.5, 123456.0)]
    ['0.61', '12.3', '1234', '123456']
    """
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def header(report: Mapping[str, Any]) -> list[str]:
    """Versions, machine and binding: without them the figures say nothing."""
    first = report["jobs"][0]["facts"]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    entries = [("date", report["date"]), ("software", versions), ("processor", first["processor"])]
    if first.get("device", "cpu") != "cpu":
        entries.append(("device", first["device"]))
    for job in report["jobs"]:
        facts = job["facts"]
        cores = " | ".join(facts["cores"][:8]) + (" ..." if len(facts["cores"]) > 8 else "")
        entries.append(
            (
                counted(facts["ranks"], "rank"),
                f"{facts['mpi']}, {facts['ranks_per_core']:g} per core, cores {cores}, "
                f"{counted(facts['threads_per_rank'], 'thread')} each, {facts['binding']}"
                + (f", {facts['hosts']} hosts" if facts["hosts"] > 1 else ""),
            )
        )
    if first["settings"]:
        entries.append(("settings", ", ".join(f"{name}={value}" for name, value in first["settings"].items())))
    return section(f"torchmpi bench {report['kind']}", dict.fromkeys(entries))


def reasons(rows: Sequence[Row], column: str) -> list[str]:
    """Why there are no figures, each reason once; with the values of a column, where they are not all the same.

    >>> rows = [{"contestant": "a", "verb": "gather", "why_not": "none"}, {"contestant": "b", "verb": "reduce"}]
    >>> reasons(rows, "verb")
    ['a: none (gather)']
    """
    found: dict[tuple[str, str], list[str]] = {}
    everything = dict.fromkeys(str(row[column]) for row in rows)
    for row in rows:
        if "why_not" in row:
            found.setdefault((row["contestant"], row["why_not"]), []).append(str(row[column]))
    return [
        f"{contestant}: {reason}" + (f" ({', '.join(dict.fromkeys(where))})" if {*where} != {*everything} else "")
        for (contestant, reason), where in found.items()
    ]


def numeric_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned to the right, the first to the left; rows of text.

    >>> numeric_table([["bytes", "us"], ["4", "1.5"]])
    ['bytes   us', '4      1.5']
    """
    columns = [[str(cell) for cell in column] for column in zip(*rows, strict=True)]
    padded = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns[1:]]
    return table(list(zip(columns[0], *padded, strict=True)))
