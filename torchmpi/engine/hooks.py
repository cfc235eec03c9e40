"""Hook points of the engines: lists of functions that are called with the state."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from ..errors import HookError, kind_of
from .state import State

Hook = Callable[[State], Any]

HookName = Literal[
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
]
HOOK_NAMES: tuple[HookName, ...] = get_args(HookName)


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

    if not TYPE_CHECKING:  # otherwise type checkers would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            raise HookError(_unknown(name))

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in HOOK_NAMES:
                self.__getattr__(name)
            if not isinstance(value, list):
                raise HookError(f"hooks.{name} is a list: use hooks.{name}.append(function), not an assignment")
            object.__setattr__(self, name, value)

    def add(self, callback: object) -> None:
        """Append the functions of a mapping, or the methods of an object, to the hook points of their names.

        Args:
            callback: A mapping from names of hook points to functions, or an object with methods of these names.

        Raises:
            HookError: A key, or a method that begins with ``on_``, is no hook point; there is none; or `callback` is a
                class. Nothing is appended then.

        Example:
            >>> hooks = Hooks()
            >>> hooks.add({"on_update": lambda state: print(state.t)})
        """
        if isinstance(callback, type):
            raise HookError(f"add() takes an object, not the class {callback.__name__}: add({callback.__name__}(...))")
        if isinstance(callback, Mapping):
            found = dict(callback)
        else:
            members = ((name, getattr(callback, name)) for name in dir(callback) if name.startswith("on_"))
            found = {name: member for name, member in members if callable(member)}
        kind = type(callback).__name__
        if not found:
            raise HookError(f"add(): the {kind} has no method that is named like a hook point: {', '.join(HOOK_NAMES)}")
        for name, function in found.items():
            if name not in HOOK_NAMES:
                raise HookError(f"add(), {kind}: {_unknown(name)}")
            if not callable(function):
                raise HookError(f"add(), {kind}: {name} is {kind_of(function)}, not a function of the state")
        for name, function in found.items():
            self.at(name).append(function)

    def at(self, name: HookName) -> list[Hook]:
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

    def call(self, name: HookName, state: State) -> None:
        """Call the functions of one hook point. Exceptions of the functions propagate.

        Args:
            name: One of ``HOOK_NAMES``.
            state: Argument of the functions.

        Example:
            >>> from torch import nn
            >>> Hooks().call("on_start", State(nn.Linear(2, 1), nn.MSELoss(), []))
        """
        # A copy, so that a function may remove itself from the list.
        for hook in tuple(self.at(name)):
            hook(state)


def _unknown(name: object) -> str:
    nearest = difflib.get_close_matches(str(name), HOOK_NAMES, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"no hook point {name!r}.{hint} There are {', '.join(HOOK_NAMES)}"
