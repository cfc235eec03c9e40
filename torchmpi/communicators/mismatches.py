"""The error for ranks that made different calls, with the usual reasons."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from types import MappingProxyType

from ..errors import MismatchError

_CALLING = ("torchmpi.", "torch.distributed.")
"""Modules of a thread that is in a call."""


def mismatch_error(message: str, calls: Mapping[int, str]) -> MismatchError:
    """Return the error for ranks that made different calls."""
    error = MismatchError(message)
    error.calls = calls
    return error


def mismatch_message(name: str, calls: Mapping[int, str], left: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return the message for ranks that made different calls; `left` describes the ranks at the end of their programs.

    >>> mismatch_message("world", {0: "barrier()", 1: "stop()"}, {1: "left by sys.exit(3)"})[54:106]
    'rank 0 called barrier(); rank 1 left by sys.exit(3).'
    """
    listing = "; ".join(f"rank {rank} {left.get(rank) or f'called {call}'}" for rank, call in sorted(calls.items()))
    return (
        f"The ranks of communicator {name} made different calls: {listing}. All ranks must make the same calls in the "
        "same order, with the same shape, dtype, operation and root: look for a call under `if rank == ...`, or for a "
        "rank that skipped a step or ran out of data (torchmpi.nn.join)."
        f"{_spare_hint(calls)}{_threads_hint()}{_closure_hint()}"
    )


def _spare_hint(calls: Mapping[int, str]) -> str:
    """Return the usual reason for differing calls if some ranks begin their loop again.

    >>> _spare_hint({0: "barrier()", 1: "stop()"})
    ''
    """
    if not any(call.startswith("begin_again") for call in calls.values()):
        return ""
    return (
        " A loop begins again after a loss, and the other rank was spare: it has left start() only now, and its "
        "program must make no call before the loop. Move the call into the function of mpi.elastic() or "
        "hvd.elastic.run."
    )


def _threads_hint() -> str:
    """Return the usual reason for differing calls if several threads of the program are in calls.

    >>> _threads_hint()
    ''
    """
    frames, calling = sys._current_frames(), []
    for thread in threading.enumerate():
        if isinstance(thread, threading._DummyThread) or thread.name.startswith("torchmpi"):
            continue  # of autograd, which calls for the thread that waits for it; of this package
        frame = frames.get(thread.ident or 0)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(_CALLING):
            frame = frame.f_back
        if frame is not None:
            calling.append(thread.name)
    if len(calling) < 2:
        return ""
    return (
        f" Several threads of this rank are in calls ({', '.join(sorted(calling))}): which one is first may differ "
        "between ranks. Give each thread that communicates a group of its own: dist.new_group(), or "
        "mpi.push_communicator()."
    )


def _closure_hint() -> str:
    """Return the usual reason for differing calls if the current call is made by a closure of an optimizer.

    >>> _closure_hint()
    ''
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "step" and callable(frame.f_locals.get("closure")):
            name = type(frame.f_locals.get("self")).__name__
            return (
                f" The call of this rank was made by the closure of {name}.step(): an optimizer that calls its closure "
                "several times decides by the loss how often, which must return the loss averaged over the "
                "ranks, as the step() of a torchmpi.nn.DistributedOptimizer does."
            )
    return ""
