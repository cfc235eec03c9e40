"""The states of a loop that begins again after a loss.

begin  ->  attempt  ->  confirm  ->  end
  ^           |            |
  +- recover -+------------+   a rank is lost, also in begin and in recover
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..session import recovery

T = TypeVar("T")


def repeat(
    begin: Callable[[], Any],
    attempt: Callable[[], T],
    recovered: Callable[[tuple[int, ...]], Any],
    timeout_seconds: float,
) -> T:
    """Return the result of an attempt during which no rank was lost. Collective.

    Args:
        begin: Gives all ranks the same state. Collective; called before each attempt.
        attempt: The work of the program, on all ranks.
        recovered: Called after a loss on the remaining ranks, with the result of `recover()`; not collective.
        timeout_seconds: As for `recover()`.

    Raises:
        Exception: An error of `begin` or `attempt` while no rank is lost; errors of `recover()`.
    """
    while True:
        try:
            begin()
            result = attempt()
            recovery.confirm()  # so that no rank goes on while others must begin again
            return result
        except Exception:  # also of torch, whose code between the program and a call hides the RankLostError
            if not recovery.is_rank_lost():
                raise
        # Not inside the clause, where the error keeps all that the attempt has made.
        recovered(recovery.recover(timeout_seconds))
