"""Plain-text formatting: aligned columns and wrapped paragraphs of a fixed width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 110


def core_list(cores: Iterable[int]) -> str:
    """Format cores as Linux does.

    >>> core_list([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def counted(number: int, noun: str) -> str:
    """Format a number with its noun.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shortened(texts: Iterable[str], *, most: int = 8, separator: str = ", ") -> str:
    """Join texts, and replace those beyond `most` by their number.

    >>> shortened("abcde", most=3)
    'a, b, c and 2 more'
    """
    texts = list(texts)
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Align columns; columns of integers (below the heading, the first row) are aligned to the right.

    >>> table([["rank", "host"], [0, "a"], [10, "b"]])
    ['rank  host', '   0  a', '  10  b']
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(len(str(cell)) for cell in column) for column in columns]
    right = [all(isinstance(cell, int) for cell in column[1:]) for column in columns]
    lines = []
    for row in rows:
        cells = zip(map(str, row), widths, right, strict=True)
        aligned = (cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in cells)
        lines.append("  ".join(aligned).rstrip())
    return lines


def hanging(prefix: str, text: str) -> list[str]:
    """Wrap a paragraph after a prefix, with a hanging indent of the same width.

    >>> hanging("note  ", "short")
    ['note  short']
    """
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        lines += textwrap.wrap(
            paragraph,
            WIDTH,
            initial_indent=" " * len(prefix) if lines else prefix,
            subsequent_indent=" " * len(prefix),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def section(title: str, entries: Iterable[tuple[str, str]]) -> list[str]:
    """Format a heading and, indented, names with their values.

    >>> section("MPI", [("library", "MPICH 5.0.2"), ("path", "/usr/lib")])
    ['MPI', '  library  MPICH 5.0.2', '  path     /usr/lib']
    """
    entries = list(entries)
    width = max((len(name) for name, _ in entries), default=0)
    return [title, *(line for name, value in entries for line in hanging(f"  {name:{width}}  ", value))]
