"""Results as files, as text and as plots, and the comparison of two files."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any

from ... import files, plots
from ...errors import ArgumentError, JobError
from ..formatting import counted, section, table
from .contestants import COPY
from .options import PEERS, short_size
from .timing import TimingSummary, apart

Row = Mapping[str, Any]
FORMAT = "torchmpi bench 1"
# The columns that identify a line of a file, by kind. Scripts in benchmarks/ write the last four kinds.
KEYS = {
    "collectives": ("ranks", "verb", "dtype", "mode", "bytes", "contestant"),
    "calls": ("ranks", "verb", "dtype", "mode", "bytes", "contestant"),
    "train": ("ranks", "model", "part", "contestant"),
    "parallel": ("ranks", "workload", "size", "batch", "contestant"),
    "starts": ("ranks", "start", "contestant"),
    "leaks": ("ranks", "rank", "part"),
    "memory": ("ranks", "rank", "part"),
    "ps": ("ranks", "verb", "dtype", "bytes", "contestant"),
}


def new_report(kind: str, jobs: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Make one report of all jobs: the conditions of each, and the rows of all."""
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
        files.write(path, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}.") from error


def load(path: str) -> dict[str, Any]:
    """Read a report; raise if the file is not a report."""
    try:
        report: dict[str, Any] = files.parse_json(files.read(path, files.MOST_JSON_BYTES))
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ArgumentError(f"{path} is not JSON ({error}). Pass a file that `torchmpi bench --json` wrote.") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT or report.get("kind") not in KEYS:
        raise ArgumentError(f"{path} was not written by `torchmpi bench --json` of this version.")
    return report


def has_figure(row: Row) -> bool:
    """Return whether the row has a measured time."""
    return "median_us" in row


def timing_of(row: Row) -> TimingSummary:
    """Return the times of a row with a measured time."""
    return TimingSummary(*(row[name] for name in ("median_us", "low_us", "high_us", "num_batches", "calls_per_batch")))


def grouped(rows: Sequence[Row], names: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Group rows by the values of some columns, in order of first appearance.

    >>> [(key, len(rows)) for key, rows in grouped([{"a": 1}, {"a": 2}, {"a": 1}], ["a"])]
    [((1,), 2), ((2,), 1)]
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    yield from groups.items()


def microseconds(value: float) -> str:
    """Format a time with three digits.

    >>> [microseconds(value) for value in (0.61234, 12.34, 1234.5, 123456.0)]
    ['0.61', '12.3', '1234', '123456']
    """
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def time_and_spread(row: Row) -> str:
    """Format the time of a row in microseconds, with its spread."""
    return f"{microseconds(row['median_us'])} ({timing_of(row).spread:.0%})" if has_figure(row) else "-"


def header(report: Mapping[str, Any]) -> list[str]:
    """Format versions, machine and binding."""
    first = report["jobs"][0]["facts"]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    entries = [("date", report["date"]), ("software", versions), ("processor", first["processor"])]
    if first.get("device", "cpu") != "cpu":
        entries.append(("device", first["device"]))
    for facts in (job["facts"] for job in report["jobs"]):
        cores = " | ".join(facts["cores"][:8]) + (" ..." if len(facts["cores"]) > 8 else "")
        text = (
            f"{facts['mpi']}, {facts['ranks_per_core']:g} per core, cores {cores}, "
            f"{counted(facts['threads_per_rank'], 'thread')} each, {facts['binding']}"
        )
        hosts = f", {facts['hosts']} hosts" if facts["hosts"] > 1 else ""
        entries.append((counted(facts["ranks"], "rank"), text + hosts))
    if first["settings"]:
        entries.append(("settings", ", ".join(f"{name}={value}" for name, value in first["settings"].items())))
    return section(report.get("title", f"torchmpi bench {report['kind']}"), dict.fromkeys(entries))


def reasons(rows: Sequence[Row], column: str) -> list[str]:
    """List why times are missing, each reason once, with the values of a column unless it applies to all.

    >>> rows = [{"contestant": "a", "verb": "gather", "why_not": "none"}, {"contestant": "b", "verb": "reduce"}]
    >>> reasons(rows, "verb")
    ['a: none (gather)']
    """
    everything = {str(row[column]) for row in rows}
    lines = []
    for (contestant, reason), found in grouped([row for row in rows if "why_not" in row], ("contestant", "why_not")):
        where = dict.fromkeys(str(row[column]) for row in found)
        lines.append(f"{contestant}: {reason}" + (f" ({', '.join(where)})" if {*where} != everything else ""))
    return lines


def titled(title: str, lines: Sequence[str]) -> list[str]:
    """Put a title above a table."""
    return ["", title, "", *(f"  {line}" for line in lines)]


def page(report: Mapping[str, Any], tables: Sequence[str], legend: Sequence[str], column: str) -> str:
    """Format header, tables and legend, and why times are missing, with the values of a column."""
    missing = reasons(report["rows"], column)
    absent = ["", "no figures", *(f"  {line}" for line in missing)] if missing else []
    return "\n".join([*header(report), *tables, *(["", *legend] if legend else []), *absent])


# --- comparison ---------------------------------------------------------------------------------------------


def compare_files(before: str, after: str) -> str:
    """Compare two files, and return the result as text."""
    first, second = load(before), load(after)
    kind = first["kind"]
    if kind != second["kind"]:
        raise ArgumentError(
            f"{before} has results of `{kind}`, {after} of `{second['kind']}`. Compare files of one kind."
        )
    old, new = (
        {tuple(row[name] for name in KEYS[kind]): timing_of(row) for row in report["rows"] if has_figure(row)}
        for report in (first, second)
    )
    if not old:
        raise ArgumentError(f"{before}: files of `{kind}` hold no times that could be compared.")
    common = [key for key in old if key in new]
    if not common:
        raise ArgumentError(
            f"{before} and {after} have no line in common. Measure the same collectives, sizes and ranks."
        )
    rows, verdicts = [[*KEYS[kind], "A us", "B us", "B/A", ""]], []
    for key in common:
        a, b = old[key], new[key]
        ratio = b.median_us / a.median_us if a.median_us else float("inf")
        verdicts.append("" if not apart(a, b) else "faster" if ratio < 1 else "slower")
        cells = [short_size(part) if name == "bytes" else str(part) for name, part in zip(KEYS[kind], key, strict=True)]
        times = [f"{microseconds(timing.median_us)} ({timing.spread:.0%})" for timing in (a, b)]
        rows.append([*cells, *times, f"{ratio:.2f}", verdicts[-1]])
    faster, slower = verdicts.count("faster"), verdicts.count("slower")
    lines = [f"A: {before}", f"B: {after}", "", *table(rows), ""]
    lines.append(f"{len(common)} lines in both: {faster} faster, {slower} slower, beyond the quartiles of both.")
    only = [len(found) - len(common) for found in (old, new)]
    return "\n".join([*lines, *([f"Only in A: {only[0]} lines, only in B: {only[1]}."] if any(only) else [])])


# --- plots --------------------------------------------------------------------------------------------------

_PANELS = ("ranks", "verb", "dtype", "mode")
_INCHES = (4.6, 3.2)
_SHORT_BYTES, _SHORT = 16 << 10, "16 KB"


def check_can_plot() -> None:
    """Raise if matplotlib is missing, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ArgumentError("--plot needs matplotlib. Install it with `pip install matplotlib`.")


def draw(report: Mapping[str, Any], path: str) -> None:
    """Plot times over sizes, one panel for each call that has sizes, dtype and number of ranks."""
    panels = list(grouped([row for row in report["rows"] if has_figure(row) and row["bytes"]], _PANELS))
    if not panels:
        raise ArgumentError("--plot: nothing that was measured has a size.")
    columns = min(2 if len(panels) <= 4 else 3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plots.new_figure(_INCHES[0] * columns, _INCHES[1] * rows + 0.9, rows, columns)
    for axis, (panel, found) in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel, found)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    first = report["jobs"][0]["facts"]
    source = f"{first['mpi']}, torch {first['versions']['torch']}, {first['processor']}; bands: quartiles"
    plots.state(figure, finding(report["rows"]), source)
    plots.legend(figure, axes)
    plots.save(figure, path)


def finding(rows: Sequence[Row]) -> str:
    """State how fast torchmpi is beside each other library, for short and for long tensors: medians over all calls.

    >>> times = {"auto": 2.0, "mpi4py": 3.0, "gloo": 9.0}
    >>> finding([{"verb": "reduce", "bytes": 4, "contestant": name, "median_us": us} for name, us in times.items()])
    'torchmpi is 1.5 times as fast as mpi4py, 4.5 times as fast as gloo (medians up to 16 KB)'
    """
    names = [name for name in (*_PANELS, "bytes") if rows and name in rows[0]]
    ratios: dict[str, dict[bool, list[float]]] = {}
    for _, found in grouped([row for row in rows if has_figure(row)], names):
        ours = [row["median_us"] for row in found if not _is_peer(row["contestant"]) and row["contestant"] != COPY]
        for row in found:
            if row["contestant"] in PEERS and ours:  # the first of ours is the one that a program calls
                by_length = ratios.setdefault(row["contestant"], {})
                by_length.setdefault(row["bytes"] > _SHORT_BYTES, []).append(row["median_us"] / ours[0])
    if not ratios:
        return "Time of a call over the size of its tensor"
    lengths = sorted({is_long for by_length in ratios.values() for is_long in by_length})
    words = {False: f"up to {_SHORT}", True: "above" if len(lengths) > 1 else f"above {_SHORT}"}
    where = " and ".join(words[each] for each in lengths)
    parts = [
        f"{' and '.join(_ratio(median(found)) for _, found in sorted(by_length.items()))} times as fast as {peer}"
        for peer, by_length in ratios.items()
    ]
    return f"torchmpi is {', '.join(parts)} (medians {where})"


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _is_peer(contestant: str) -> bool:
    return contestant.split()[0] in PEERS  # also "mpi4py in place"


def _draw_panel(axis: Any, panel: tuple[Any, ...], rows: Sequence[Row]) -> None:
    ranks, collective, dtype, mode = panel
    for (name,), points in grouped(rows, ("contestant",)):
        style = ":" if name == COPY else "--" if _is_peer(name) else "-"
        sizes, times, low, high = ([row[key] for row in points] for key in ("bytes", "median_us", "low_us", "high_us"))
        color = plots.color_of(name)
        axis.plot(sizes, times, style, label=name, color=color, marker=None if name == COPY else "o", markersize=3.5)
        axis.fill_between(sizes, low, high, alpha=0.15, color=color, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({row["bytes"] for row in rows})[::2]
    axis.set_xticks(ticks, [short_size(tick) for tick in ticks])
    axis.set(xlabel="bytes", ylabel="microseconds")
    title = f"{collective} {dtype}, {counted(ranks, 'rank')}" + (f", {mode}" if mode != "sync" else "")
    axis.set_title(title, fontsize=10)
