"""The view of a job as lines of text, of any width from 80 columns."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..formatting import counted, duration

LEAST_WIDTH = 60
_MOST_HOST = 10
Entry = Mapping[str, Any]


class RankOrder(NamedTuple):
    """An order of the ranks: its key, and what it is by."""

    name: str
    key: Callable[[Entry], Any]


ORDERS = {
    "r": RankOrder("rank", lambda each: each["rank"]),
    "w": RankOrder("waiting, least first", lambda each: (_or_zero(each["waiting"]), each["rank"])),
    "c": RankOrder("computing, most first", lambda each: (-_or_zero(each["computing"]), each["rank"])),
    "s": RankOrder("step, last first", lambda each: (_or_zero(each["step"]), each["rank"])),
    "m": RankOrder("memory, most first", lambda each: (-_or_zero(each["memory_bytes"]), each["rank"])),
    "h": RankOrder("host", lambda each: (each["host"], each["rank"])),
}
"""By the key that chooses it."""


class Line(NamedTuple):
    """A line, and whether it is of the late rank, or a heading."""

    text: str
    style: str = ""


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None else value


def wants_color(is_terminal: bool) -> bool:
    """Return whether lines may have colors: on a terminal that has them, unless NO_COLOR is set (no-color.org)."""
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def painted(line: Line, *, color: bool) -> str:
    """Return a line with the escapes of a terminal for its style.

    >>> painted(Line("rank 3 is late", "late"), color=False)
    'rank 3 is late'
    """
    codes = {"late": "1;33", "head": "7", "title": "1"}
    return f"\x1b[{codes[line.style]}m{line.text}\x1b[0m" if color and line.style else line.text


def head(view: Entry, width: int) -> list[Line]:
    """Return the lines above the table: the job, and the verdict."""
    job, ranks = view["job"], view["ranks"]
    seen = counted(job["size"], "rank")
    seen = seen if job["seen"] == job["size"] else f"{job['seen']} of {seen}"
    total = sum(_or_zero(each["samples_per_second"]) for each in ranks)
    steps = [each["step"] for each in ranks if each["step"] is not None]
    seconds = [each["step_seconds"] for each in ranks if each["step_seconds"]]
    losses = [each["loss"] for each in ranks if each["loss"] is not None]
    facts = [
        f"step {max(steps)}" if steps else "",
        f"{duration(max(seconds))} a step" if seconds else "",
        f"{_number(total)} samples/s" if total else "",
        f"loss {sum(losses) / len(losses):.4g}" if losses else "",
        time.strftime("%H:%M:%S", time.localtime(view["time"])),
    ]
    lines = [Line(_cut(f"{seen}: {job['program']}", width), "title"), Line(_cut("  ".join(filter(None, facts)), width))]
    if view["late"] is not None:
        lines += [Line(part, "late") for part in textwrap.wrap(view["late"]["text"], width)]
    else:
        lines.append(Line("no rank is late" if len(ranks) > 1 else ""))
    lines += [Line(part) for part in textwrap.wrap(job["note"], width)]
    return lines


def table(view: Entry, width: int, order: str = "r") -> tuple[Line, list[Line]]:
    """Return the heading and one line per rank."""
    ranks = sorted(view["ranks"], key=ORDERS[order].key)
    hosts = {each["host"] for each in ranks}
    titles = ["", "rank", *(["host"] if len(hosts) > 1 or width >= 100 else []), "cores", "step", "smp/s", "comp",
              "comm", "wait", "mem"]  # fmt: skip
    rows = [titles, *(_cells(each, titles) for each in ranks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    left = {titles.index(name) for name in ("", "host", "cores") if name in titles}
    used = sum(widths) + len(widths)
    lines = []
    for row, where in zip(rows, ["in", *map(_where, ranks)], strict=True):
        cells = [
            cell.ljust(size) if column in left else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(_cut(f"{' '.join(cells)} {_cut(where, max(8, width - used))}", width))
    styles = ["late" if each["late"] else "" for each in ranks]
    return Line(lines[0].ljust(width), "head"), [Line(*each) for each in zip(lines[1:], styles, strict=True)]


def _cells(each: Entry, titles: Sequence[str]) -> list[str]:
    found = {
        "": "*" if each["late"] else " ",
        "rank": str(each["rank"]),
        "host": _cut(each["host"], _MOST_HOST),
        "cores": _cut(each["cores"], 7),
        "step": "-" if each["step"] is None else str(each["step"]),
        "smp/s": "-" if each["samples_per_second"] is None else _number(each["samples_per_second"]),
        "mem": "-" if each["memory_bytes"] is None else _bytes(each["memory_bytes"]),
        **{short: _percent(each[name]) for short, name in zip(("comp", "comm", "wait"), _SHARES, strict=True)},
    }
    return [found[title] for title in titles]


_SHARES = ("computing", "communicating", "waiting")


def _where(each: Entry) -> str:
    """Return what a rank is in: its call with the time if that is long, the work, and the line of the program."""
    call = each["call"].partition("(")[0]
    if call and each["call_seconds"] >= 1:
        call += f" {duration(each['call_seconds'])}"
    doing = call or each["work"]
    stopped = "stopped" if each["state"] in ("T", "t") else ""
    return " ".join(filter(None, (stopped, doing, each["place"])))


def _cut(text: str, width: int) -> str:
    """Shorten a text to a width.

    >>> _cut("allreduce", 5), _cut("all", 5)
    ('allr~', 'all')
    """
    return text if len(text) <= width else text[: max(0, width - 1)] + "~"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def _bytes(number: float) -> str:
    """Return a size with a unit.

    >>> _bytes(512), _bytes(123_456_789)
    ('512', '118M')
    """
    for unit in ("", "K", "M", "G"):
        if number < 1000:
            return f"{number:.0f}{unit}" if number >= 10 or not unit else f"{number:.1f}{unit}"
        number /= 1024
    return f"{number:.1f}T"


def page(view: Entry, width: int, order: str = "r") -> str:
    """Return all of the view, as plain text."""
    heading, lines = table(view, max(width, LEAST_WIDTH), order)
    return "\n".join(line.text.rstrip() for line in [*head(view, max(width, LEAST_WIDTH)), heading, *lines])
