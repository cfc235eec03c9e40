"""Draw the levels of imports of the package, and write them as a table into docs/design/core.md.

    python scripts/draw_levels.py            # write docs/images/levels.svg and the table
    python scripts/draw_levels.py --check    # exit with status 1 if one of them is out of date

The levels and the imports are those of tests/test_architecture.py. An arrow that follows from other arrows is omitted.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
from test_architecture import LEVELS, MODULES, entry_edges  # noqa: E402

IMAGE = ROOT / "docs" / "images" / "levels.svg"
PAGE = ROOT / "docs" / "design" / "core.md"
BEGIN, END = "<!-- levels: written by scripts/draw_levels.py -->", "<!-- end of levels -->"

BOX_WIDTH, BOX_HEIGHT, COLUMN, ROW, MARGIN, LABEL = 164, 30, 184, 62, 22, 40
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
# Where the middle of a box is: the levels from top to bottom, the entries of a level around x = 0.
X = {name: (i - (len(names) - 1) / 2) * COLUMN for names in LEVELS for i, name in enumerate(names)}
Y = {name: (len(LEVELS) - 1 - level) * ROW + ROW / 2 for name, level in LEVEL_OF.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args().check
    changed = stale()
    for path, text in changed.items():
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run scripts/draw_levels.py")
        else:
            path.write_text(text)
    return int(check and bool(changed))


def stale() -> dict[Path, str]:
    """The files that are out of date, each with its new text."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    wanted = {IMAGE: picture(), PAGE: f"{before}{BEGIN}\n{table()}{END}{after}"}
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


def table() -> str:
    """The levels as a table, highest first."""
    lines = ["| level | entry | contents |", "|---|---|---|"]
    for number, names in reversed(list(enumerate(LEVELS))):
        lines += [f"| {number} | `{name}` | {summary(name)} |" for name in names]
    return "\n".join(lines) + "\n"


def summary(entry: str) -> str:
    """The first line of the docstring of an entry, in Markdown."""
    path = MODULES["" if entry == "__init__" else entry]
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].replace("``", "`")


def direct_imports() -> list[tuple[str, str]]:
    """The imports between entries without those that follow from others: the transitive reduction."""
    edges = entry_edges()
    below: dict[str, set[str]] = {}
    reached: dict[str, set[str]] = {}
    for name in [name for names in LEVELS for name in names]:
        below[name] = {target for source, target in edges if source == name and target in reached}
        reached[name] = below[name].union(*(reached[target] for target in below[name]))
    return sorted(
        (source, target)
        for source, targets in below.items()
        for target in targets
        if not any(target in reached[other] for other in targets)
    )


def arrows() -> dict[tuple[str, str], float | None]:
    """Each arrow, and the x at which it passes the boxes of the levels between its ends."""
    most = [max(X[name] for name in names) + BOX_WIDTH / 2 for names in LEVELS]
    least = [-x for x in most]
    found: dict[tuple[str, str], float | None] = {}
    for source, target in sorted(direct_imports(), key=lambda arrow: LEVEL_OF[arrow[0]] - LEVEL_OF[arrow[1]]):
        between, around = slice(LEVEL_OF[target] + 1, LEVEL_OF[source]), slice(LEVEL_OF[target], LEVEL_OF[source] + 1)
        count = len(most[between])
        # On the side of its ends; if they are in the middle, on the side with fewer arrows.
        side = X[source] + X[target] or -sum(least[around]) - sum(most[around])
        if count == 0:
            found[source, target] = None
        elif side > 0:
            x = found[source, target] = max(most[between]) + MARGIN
            most[between] = [x] * count
        else:
            x = found[source, target] = min(least[between]) - MARGIN
            least[between] = [x] * count
    return found


def curve(source: str, target: str, passing: float | None) -> str:
    """The path of an arrow: it turns in the gaps between levels, and is straight beside boxes."""
    begin, end = Y[source] + BOX_HEIGHT / 2, Y[target] - BOX_HEIGHT / 2 - 2
    points = [(aside(source, X[target] if passing is None else passing), begin)]
    if passing is not None:
        points += [(passing, Y[source] + ROW - BOX_HEIGHT / 2), (passing, Y[target] - ROW + BOX_HEIGHT / 2)]
    points.append((aside(target, X[source] if passing is None else passing), end))
    text = f"M{points[0][0]:.0f},{points[0][1]:.0f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        text += f" C{x0:.0f},{(y0 + y1) / 2:.0f} {x1:.0f},{(y0 + y1) / 2:.0f} {x1:.0f},{y1:.0f}"
    return f'<path d="{text}" fill="none" stroke="#555" stroke-width="1.4" marker-end="url(#head)"/>'


def aside(name: str, other: float) -> float:
    """Where an arrow leaves or enters a box: off the middle, on the side of the other end."""
    return X[name] + max(-BOX_WIDTH / 4, min(BOX_WIDTH / 4, (other - X[name]) / 2))


def box(name: str) -> str:
    x, y = X[name], Y[name]
    return (
        f'<rect x="{x - BOX_WIDTH / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" '
        f'rx="5" fill="#dfe9f7" stroke="#456"/>\n<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle">{name}</text>'
    )


def picture() -> str:
    """The drawing, as SVG."""
    lines = arrows()
    reach = max(abs(x) for x in [*(x for x in lines.values() if x is not None), max(X.values()) + BOX_WIDTH / 2])
    left, width, height = -reach - MARGIN - LABEL, 2 * (reach + MARGIN) + LABEL, len(LEVELS) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="{left:.0f} 0 {width:.0f} {height}" font-family="sans-serif" font-size="15">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
    ]
    for level, names in enumerate(LEVELS):
        top, color = Y[names[0]] - ROW / 2, ("#fff", "#f3f5f8")[level % 2]
        parts.append(f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{ROW}" fill="{color}"/>')
        parts.append(f'<text x="{left + MARGIN:.0f}" y="{Y[names[0]] + 5:.0f}" fill="#667">{level}</text>')
    parts += [curve(source, target, passing) for (source, target), passing in lines.items()]
    parts += [box(name) for name in X]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(main())
