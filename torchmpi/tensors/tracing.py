"""When ``torch.jit.trace`` records a function, by private names of torch (2.7 to 2.14): it has no public hook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_RECORDING = (
    *((torch._C, f"_create_{name}") for name in ("graph_by_tracing", "function_from_trace")),
    (torch._C, "_create_function_from_trace_with_dict"),
    *((torch._C.ScriptModule, f"_create_method_from_trace{end}") for end in ("", "_with_dict")),
)
"""The functions below which all kinds of traces run."""


def call_around_traces(when: Callable[[bool], None]) -> None:
    """Call ``when(True)`` before a function is recorded, and ``when(False)`` after it."""
    for holder, name in _RECORDING:
        if (original := getattr(holder, name, None)) is not None:
            setattr(holder, name, _between(original, when))


def _between(original: Callable[..., Any], when: Callable[[bool], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def record(*arguments: Any, **named: Any) -> Any:
        when(True)
        try:
            return original(*arguments, **named)
        finally:
            when(False)

    return record
