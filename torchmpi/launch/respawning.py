"""New ranks in place of lost ones: what ``torchmpi run --respawns`` tells the ranks in their environment."""

from __future__ import annotations

import os

LIMIT_VARIABLE = "TORCHMPI_RESPAWNS"
"""How many ranks may be started in place of lost ones."""
NEWCOMER_VARIABLE = "TORCHMPI_NEWCOMER"
"""Set in a rank that was started in place of a lost one: a number that no other rank of the job has had."""


def limit() -> int:
    """Return how many ranks may be started in place of lost ones."""
    return int(os.environ.get(LIMIT_VARIABLE) or 0)


def is_newcomer() -> bool:
    """Return whether this process was started in place of a lost rank."""
    return NEWCOMER_VARIABLE in os.environ
