"""Write lines of a table of results/places.md, which scripts print.

    scripts/test_containers.sh | python scripts/place_table.py containers

Lines that begin with "|" replace those with the same first column, or are added before <!-- end of containers -->. All
lines are printed, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent / "results" / "places.md"


def written(text: str, section: str, lines: Iterable[str], *, is_sorted: bool = False) -> str:
    """Return the page with the lines in the table of a section, alphabetically if asked; the others as they were."""
    before, end, after = text.partition(f"<!-- end of {section} -->")
    if not end:
        raise ValueError(f"the page has no table {section!r}")
    begin = before.rfind("<!-- end of ") + 1  # other sections may have lines with the same first column
    others, before = before[:begin], before[begin:]
    for line in lines:
        name = line.split("|")[1].strip()
        pattern = re.compile(rf"^\| {re.escape(name)} \|.*\n", re.MULTILINE)
        if pattern.search(before):
            before = pattern.sub(lambda _, line=line: f"{line}\n", before)
        else:
            before += f"{line}\n"
    if is_sorted:
        *head, rows = re.split(r"(?<=\|---\|\n)", before)
        before = "".join([*head, *sorted(rows.splitlines(keepends=True), key=str.casefold)])
    return others + before + end + after


def write(section: str, lines: Iterable[str], page: Path = TABLE, *, is_sorted: bool = False) -> None:
    """Write the lines into a page."""
    page.write_text(written(page.read_text(), section, lines, is_sorted=is_sorted))


if __name__ == "__main__":
    for printed in sys.stdin:
        print(printed, end="", flush=True)
        if printed.startswith("| "):  # at once: a script may be interrupted
            write(sys.argv[1], [printed.rstrip()])
