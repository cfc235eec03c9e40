"""What an action has raised, for tests whose ranks must all go on."""

from __future__ import annotations

from collections.abc import Callable


def refusal(action: Callable[[], object]) -> str:
    """Return the class and the text of the exception."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
