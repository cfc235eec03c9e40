"""Hook points of the engines: lists of functions that are called with the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import HookError
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
    """One list of functions per hook point. Each function is called with the :class:`State`, in list order.

    Raises:
        HookError: On access to a name that is not in ``HOOK_NAMES``, or on assignment of anything but a list.

    Example:
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
        """Return the list of one hook point.

        Args:
            name: One of ``HOOK_NAMES``.

        Returns:
            The list itself, not a copy.

        Raises:
            HookError: No hook point has this name.

        Example:
            >>> Hooks().at("on_start")
            []
        """
        hooks: list[Hook] = getattr(self, name)
        return hooks

    def call(self, name: str, state: State) -> None:
        """Call the functions of one hook point. Exceptions of the functions propagate.

        Args:
            name: One of ``HOOK_NAMES``.
            state: Argument of the functions.

        Example:
            >>> Hooks().call("on_start", State(nn.Linear(2, 1), nn.MSELoss(), []))
        """
        # A copy, so that a function may remove itself from the list.
        for hook in tuple(self.at(name)):
            hook(state)
