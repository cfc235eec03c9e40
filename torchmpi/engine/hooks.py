"""The points of a run at which an engine calls functions of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torchmpi.errors import HookError

from .state import State

Hook = Callable[[State], Any]

HOOK_NAMES = (
    "on_start",
    "on_start_epoch",
    "on_sample",
    "on_forward",
    "on_forward_criterion",
    "on_backward_criterion",
    "on_backward",
    "on_update",
    "on_end_epoch",
    "on_end",
)


class Hooks:
    """One list of functions per hook point; each is called with the :class:`State`, in the order of the list.

    >>> hooks = Hooks()
    >>> hooks.on_update.append(lambda state: print(state.t))
    """

    __slots__ = HOOK_NAMES

    on_start: list[Hook]
    on_start_epoch: list[Hook]
    on_sample: list[Hook]
    on_forward: list[Hook]
    on_forward_criterion: list[Hook]
    on_backward_criterion: list[Hook]
    on_backward: list[Hook]
    on_update: list[Hook]
    on_end_epoch: list[Hook]
    on_end: list[Hook]

    def __init__(self) -> None:
        for name in HOOK_NAMES:
            setattr(self, name, [])

    def __getattr__(self, name: str) -> NoReturn:
        raise HookError(f"no hook point {name!r}; there are {', '.join(HOOK_NAMES)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in HOOK_NAMES:
            self.__getattr__(name)
        if not isinstance(value, list):
            raise HookError(f"hooks.{name} is a list: use hooks.{name}.append(function), not an assignment")
        object.__setattr__(self, name, value)

    def at(self, name: str) -> list[Hook]:
        """The list of one hook point.

        >>> Hooks().at("on_start")
        []
        """
        hooks: list[Hook] = getattr(self, name)
        return hooks

    def call(self, name: str, state: State) -> None:
        """Call what is in one list; what a hook raises ends the run.

        >>> Hooks().call("on_start", state=None)
        """
        # A copy, so that a hook may take itself off the list.
        for hook in tuple(self.at(name)):
            hook(state)
