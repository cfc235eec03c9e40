"""Plain-text formatting: aligned columns and wrapped paragraphs of a fixed width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from ..communicators.flight_record import as_ranges

WIDTH = 110


def core_list(cores: Iterable[int]) -> str:
    """Format cores as Linux does.

    >>> core_list([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    return as_ranges(sorted(cores))


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Format a number with its noun.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def duration(seconds: float) -> str:
    """Return a time in the unit in which it is best read.

    >>> duration(0.0123), duration(3.21), duration(75)
    ('12.3 ms', '3.2 s', '75 s')
    """
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def shortened(texts: Iterable[str], *, most: int = 8, separator: str = ", ") -> str:
    """Join texts, and replace those beyond `most` by their number.

    >>> shortened("abcde", most=3)
    'a, b, c and 2 more'
    """
    texts = list(texts)
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def table(rows: Sequence[Sequence[object]], *, right: Iterable[int] | None = None) -> list[str]:
    """Align columns to the left, and those of the given numbers to the right (None: all but the first).

    >>> table([["rank", "host"], [0, "a"], [10, "b"]], right=[0])
    ['rank  host', '   0  a', '  10  b']
    """
    columns = [[str(cell) for cell in column] for column in zip(*rows, strict=True)]
    to_right = set(range(1, len(columns)) if right is None else right)
    for number, column in enumerate(columns):
        width = max(map(len, column))
        columns[number] = [cell.rjust(width) if number in to_right else cell.ljust(width) for cell in column]
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def hanging(prefix: str, text: str) -> list[str]:
    """Wrap a paragraph after a prefix, with a hanging indent of the same width.

    >>> hanging("note  ", "short")
    ['note  short']
    """
    indent = " " * len(prefix)
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
                                   break_on_hyphens=False)  # fmt: skip
    lines = [line for paragraph in text.splitlines() or [""] for line in wrapper.wrap(paragraph)] or [""]
    return [prefix + lines[0][len(prefix) :], *lines[1:]]


def section(title: str, entries: Iterable[tuple[str, str]]) -> list[str]:
    """Format a heading and, indented, names with their values.

    >>> section("MPI", [("library", "MPICH 5.0.2"), ("path", "/usr/lib")])
    ['MPI', '  library  MPICH 5.0.2', '  path     /usr/lib']
    """
    entries = list(entries)
    width = max((len(name) for name, _ in entries), default=0)
    return [title, *(line for name, value in entries for line in hanging(f"  {name:{width}}  ", value))]
