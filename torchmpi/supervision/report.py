"""The report of a job that fails: the reason, and what the other ranks were doing.

It has at most 40 lines besides the traceback of the program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .. import files
from ..communicators.rank_status import RankStatus
from .program_lines import PACKAGE

_MOST_REASON_LINES, _FIRST_REASON_LINES = 24, 8
# In a traceback; those of exception groups begin with bars.
_FRAME, _IN_FRAME = re.compile(r'[ |]*File "(.*)", line \d+'), re.compile(r"[ |]* {4}|[ |]*\[Previous line repeated")
_MOST_GROUPS = 12
_MOST_RANGES = 10


def shortened(reason: str) -> str:
    r"""Leave out the frames of torchmpi of a long reason, and lines in the middle of long text outside of tracebacks.

    >>> shortened("\n".join(map(str, range(100)))).splitlines()[7:10]
    ['7', '  ... 76 lines ...', '84']
    """
    if len(reason.splitlines()) <= _MOST_REASON_LINES + 1:
        return reason
    return "\n".join(line for is_own, lines in _blocks(reason) for line in _shown(lines, is_own))


def _blocks(reason: str) -> Iterator[tuple[bool | None, list[str]]]:
    """Divide text into frames of torchmpi (True), frames of the program (False), and other text (None)."""
    blocks: list[tuple[bool | None, list[str]]] = []
    is_own: bool | None = None
    for line in reason.splitlines():
        if found := _FRAME.match(line):
            is_own = found[1].startswith(PACKAGE)
        elif not _IN_FRAME.match(line):
            is_own = None
        if not blocks or blocks[-1][0] != is_own:
            blocks.append((is_own, []))
        blocks[-1][1].append(line)
    yield from blocks


def _shown(lines: list[str], is_own: bool | None) -> list[str]:
    if is_own:
        return [f"  ... {len(lines)} lines of torchmpi ..."]
    if is_own is False or len(lines) <= _MOST_REASON_LINES + 1:
        return lines
    left_out = len(lines) - _MOST_REASON_LINES
    last = lines[_FIRST_REASON_LINES + left_out :]
    return [*lines[:_FIRST_REASON_LINES], f"  ... {left_out} lines ...", *last]


def by_activity(states: Mapping[int, RankStatus]) -> list[tuple[list[int], RankStatus]]:
    """Put ranks that did the same together, with the longest time; the group with the lowest rank comes first.

    >>> ((ranks, status),) = by_activity({0: RankStatus("barrier()", 1.0), 1: RankStatus("barrier()", 2.0)})
    >>> ranks, str(status)
    ([0, 1], 'barrier(), for 2 s')
    """
    groups: dict[tuple[str, str], tuple[list[int], RankStatus]] = {}
    for rank, status in sorted(states.items()):
        activity = status.problem or status.doing, status.line
        ranks, longest = groups.get(activity, ([], status))
        groups[activity] = [*ranks, rank], max(longest, status, key=lambda each: each.seconds)
    return list(groups.values())


def about_others(states: Mapping[int, RankStatus]) -> list[str]:
    """Return a line for each group of ranks that did the same."""
    groups = by_activity(states)
    lines = [f"  {named(ranks)}: {status}" for ranks, status in groups[:_MOST_GROUPS]]
    if others := sum(len(ranks) for ranks, _ in groups[_MOST_GROUPS:]):
        lines.append(f"  and {others} ranks elsewhere")
    return lines


def named(ranks: Iterable[int]) -> str:
    """Name ranks in ascending order.

    >>> named([3]), named([0, 1, 2, 3, 5, 7, 8])
    ('rank 3', 'ranks 0-3, 5, 7, 8')
    """
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    texts = [text for found in ranges for text in _as_range(found)]
    more = f" and {len(texts) - _MOST_RANGES} more ranges" if len(texts) > _MOST_RANGES else ""
    is_one = len(texts) == 1 and "-" not in texts[0]
    return f"rank{'' if is_one else 's'} {', '.join(texts[:_MOST_RANGES])}{more}"


def _as_range(ranks: list[int]) -> list[str]:
    return [f"{ranks[0]}-{ranks[-1]}"] if len(ranks) > 2 else [str(rank) for rank in ranks]


def write(path: str, first: Mapping[str, Any], states: Mapping[int, RankStatus]) -> None:
    """Write the report as JSON.

    Raises:
        OSError: That is not possible.
    """
    others = [
        {"ranks": ranks, "doing": status.problem or status.doing, "seconds": status.seconds, "line": status.line}
        for ranks, status in by_activity(states)
    ]
    files.write(path, json.dumps({**first, "others": others}, indent=1) + "\n")
