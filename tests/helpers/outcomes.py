"""What an action has raised, for tests whose ranks must all go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def error_of(action: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Return the class and the text of the exception; '' without one."""
    try:
        action(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusal(action: Callable[[], object]) -> str:
    """The same, for calls that must raise."""
    return error_of(action) or "nothing was raised"
