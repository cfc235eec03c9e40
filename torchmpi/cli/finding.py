"""The outcome of one check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from .facts import Facts

Verdict = Literal["ok", "warning", "problem"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found, and how to mend it unless it is ok."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


Check = Callable[[Facts], Finding | None]
"""Judges facts and touches nothing; None where it does not apply."""
