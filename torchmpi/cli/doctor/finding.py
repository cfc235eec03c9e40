"""The result of one check of the doctor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from ..facts import Facts

Verdict = Literal["ok", "warning", "problem"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check, and the remedy unless the verdict is ok."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


Check = Callable[[Facts], Finding | None]
"""Returns a finding from the facts, without side effects, or None where the check does not apply."""
