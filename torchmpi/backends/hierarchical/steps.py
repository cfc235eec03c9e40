"""What spans and hosts have in common: steps on other groups, and what partial results travel in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...communicators.call_log import call_code
from ...communicators.group import Group
from ...communicators.handle import Handle
from ...communicators.plan import Plan
from ...tensors import dtypes
from ..base import Operation

_REDUCING = ("allreduce", "reduce", "reduce_scatter")
# Their results are among their operands: nothing is rounded, so nothing wider need be carried.
_EXACT = ("min", "max")

BindStep = Callable[[Group, str, torch.dtype | None, str | None], Operation]
"""``bind_step(group, verb, dtype, op)``: a flat verb on one group, by the backend that suits the group."""


class Steps:
    """Runs flat verbs on the groups in which the steps of one collective take place."""

    def __init__(self, op: str | None, bind_step: BindStep) -> None:
        self._op = "sum" if op == "avg" else op  # divided once, at the end
        self._bind_step = bind_step

    def run(self, group: Group, collective: str, source: Any, destination: Any = None, root: int = 0) -> Any:
        """One step, in its turn."""
        return group.call(self._plan(group, collective, source, destination), source, destination, root)

    def perform(self, group: Group, collective: str, source: Any, destination: Any = None, root: int = 0) -> Any:
        """One step, by who has the turn on the lane of the group."""
        return group.perform(self._plan(group, collective, source, destination), source, destination, root)

    def _plan(self, group: Group, collective: str, source: Any, destination: Any) -> Plan:
        tensor = destination if source is None else source
        dtype = None if tensor is None else tensor.dtype
        op = self._op if collective in _REDUCING else None
        key = ("step", collective, op, dtype)
        plan: Plan | None = group.plans.get(key)
        if plan is None:
            # No shape: the ranks have compared the call of which this is a step.
            code = call_code(collective, op, dtypes.info(dtype).code if dtype is not None else 0)
            plan = group.plans[key] = Plan(collective, code, self._bind_step(group, collective, dtype, op))
        return plan


def carried_in(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype of partial results, which is wider than that of the result where rounding twice would show.

    >>> carried_in(torch.bfloat16, "sum"), carried_in(torch.bfloat16, "max"), carried_in(torch.float64, "avg")
    (torch.float32, torch.bfloat16, torch.float64)
    """
    accumulator = dtypes.info(dtype).accumulator
    assert accumulator is not None
    return dtype if op in _EXACT else accumulator


def divide(total: torch.Tensor, size: int) -> None:
    """Make an average of a sum, in place."""
    with torch.inference_mode(total.is_inference()):
        values = total.detach()
        (torch.view_as_real(values) if values.is_complex() else values).div_(size)


def pipelined(
    num_pieces: int, before: Callable[[int], Any], across: Callable[[int], Handle | None], after: Callable[[int], Any]
) -> None:
    """For each piece what comes before, across and after; while a piece is on its way across, others are at work.

    `across` begins, and what it returns is waited for. Two pieces are under way at most, so two sets of memory do.

    >>> def say(what): return lambda k: print(what, k)
    >>> pipelined(3, say("before"), say("across"), say("after"))
    before 0
    across 0
    before 1
    across 1
    after 0
    before 2
    across 2
    after 1
    after 2
    """
    on_the_way: Handle | None = None
    for k in range(num_pieces + 1):
        earlier = on_the_way
        if k < num_pieces:
            before(k)
            on_the_way = across(k)
        if k > 0:
            if earlier is not None:
                earlier.wait()
            after(k - 1)
