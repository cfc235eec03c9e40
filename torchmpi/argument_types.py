"""Arguments of wrong types and unknown keywords, refused by the annotations of a function before it runs.

For functions that are not called in every step, where the checks would take a part of the time. Python's own errors
come from the middle of a function, perhaps after other ranks have begun to wait, and name neither argument nor rank.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch

from .errors import ArgumentError, kind_of, rank_prefix, with_article
from .other_names import unknown_keyword

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Test = Callable[[Any], bool]

_UNCHECKED = (
    *("comm", "data_comm", "sharding_communicator", "dataparallel_communicator"),  # the error lists the communicators
    *("named_parameters", "groups"),  # the errors are Horovod's
)
"""Parameters that functions check themselves."""
_ALIASES = {"nn": "mpinn", "parameterserver": "ps", "horovod": "hvd"}
"""The names of packages in the documentation."""
_DECIDED_BY_TYPE = (bool, int, float, str, type(None), torch.nn.Module)
"""Of each type of these an annotation accepts all values or none."""
_MOST_LISTED = 4
"""Values that a message lists; of more, only the type."""
_SEEN_METHODS = ("__call__", "__getitem__", "__iter__", "__len__")


class _Kind(NamedTuple):
    """What an annotation accepts."""

    accepts: _Test
    name: str
    """The noun of the message."""
    is_by_type: bool = False
    """Whether the type of a value decides."""


def checks_types(function: _Function) -> _Function:
    """Refuse arguments that the annotations of a function exclude, and keywords that it does not have.

    Of a class, its ``__init__`` is checked.

    >>> @checks_types
    ... def scale(tensor: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    ...     return tensor * factor
    >>> scale(torch.ones(2), factor="3")
    Traceback (most recent call last):
        ...
    torchmpi.errors.ArgumentError: mpi.scale(factor='3'): expected a number, not a str. See help(mpi.scale).
    """
    if isinstance(function, type):
        kind: Any = function
        kind.__init__ = checks_types(kind.__init__)
        return function
    parameters = inspect.signature(function).parameters
    names = [
        name for name, each in parameters.items() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    # So that a call in a loop costs a fraction of a microsecond: arguments, and whole calls, of which the types decide.
    accepted: set[tuple[str, type]] = set()
    accepted_calls: set[tuple[type | str, ...]] = set()

    def check(arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Refuse arguments; return whether their types decide."""
        is_by_types = True
        for name, value in (*zip(names, arguments, strict=False), *named.items()):
            if (name, type(value)) in accepted:
                continue
            if (kind := kinds_of(function).get(name)) is not None:
                if not kind.accepts(value):
                    raise ArgumentError(_message(_shown(function, arguments), function, name, value, kind))
                if kind.is_by_type or isinstance(value, _DECIDED_BY_TYPE):
                    accepted.add((name, type(value)))
                else:
                    is_by_types = False
            elif name not in parameters and not takes_all:
                shown = _shown(function, arguments)
                raise unknown_keyword(function, {name: value}, shown=shown, is_collective=False)
        return is_by_types

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        types: tuple[type | str, ...] = tuple(map(type, arguments))
        if named:
            types = (*types, *named, *map(type, named.values()))
        if types not in accepted_calls and check(arguments, named):
            accepted_calls.add(types)
        return function(*arguments, **named)

    return cast(_Function, checked)


def check_types(function: Callable[..., Any], **named: Any) -> None:
    """Refuse arguments that the annotations of a function exclude, for one that checks them after an error only."""
    for name, value in named.items():
        kind = kinds_of(function).get(name)
        if kind is not None and not kind.accepts(value):
            raise ArgumentError(_message(_shown(function, ()), function, name, value, kind))


@functools.cache
def kinds_of(function: Callable[..., Any]) -> Mapping[str, _Kind]:
    """Return what the parameters accept, without those that accept everything."""
    hints = typing.get_type_hints(function)
    hints.pop("return", None)
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    fixed = [name for name, each in inspect.signature(function).parameters.items() if each.kind not in variable]
    kinds = {name: _kind_of(hints[name]) for name in fixed if name in hints and name not in _UNCHECKED}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _kind_of(hint: Any) -> _Kind | None:
    """Return what an annotation accepts; None for everything, or if it does not say."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind_of(member) for member in members]
        known = [kind for kind in kinds if kind is not None]
        if len(known) < len(kinds):
            return None
        names = list(dict.fromkeys(kind.name for kind in known))
        by_type = all(kind.is_by_type for kind in known)
        return _Kind(lambda value: any(kind.accepts(value) for kind in known), " or ".join(names), by_type)
    if origin is Literal:  # another value of the same type has an error of its own
        known_kind = _any_of([_kind_of(type(member)) for member in members])
        if known_kind is None or len(members) > _MOST_LISTED:
            return known_kind
        return _Kind(known_kind.accepts, " or ".join(map(repr, members)))
    chosen = origin or hint
    if not isinstance(chosen, type) or chosen in (object, Any) or getattr(chosen, "_is_protocol", False):
        return None
    if chosen in _SIMPLE:
        return _SIMPLE[chosen]
    if issubclass(chosen, collections.abc.Iterable) and chosen.__module__ in ("builtins", "collections.abc"):
        is_one_kind = len(members) == 1 or (len(members) == 2 and members[1] is ...)
        return _iterable(chosen, _kind_of(members[0]) if is_one_kind else None)
    return _Kind(functools.partial(_is_like, chosen), with_article(chosen.__name__))


def _any_of(kinds: list[_Kind | None]) -> _Kind | None:
    known = list(dict.fromkeys(kind for kind in kinds if kind is not None))
    return known[0] if len(known) == 1 else None


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except (TypeError, RuntimeError, ValueError):
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or (hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0)


def _is_flag(value: Any) -> bool:
    return isinstance(value, (bool, numbers.Integral)) or type(value).__name__ in ("bool_", "bool")


_SIMPLE: dict[type, _Kind] = {
    int: _Kind(_is_integer, "an integer"),
    float: _Kind(_is_number, "a number"),
    bool: _Kind(_is_flag, "True or False"),
    str: _Kind(lambda value: isinstance(value, str), "a string", is_by_type=True),
    type(None): _Kind(lambda value: value is None, "None", is_by_type=True),
    os.PathLike: _Kind(lambda value: hasattr(value, "__fspath__"), "a path"),
    type: _Kind(lambda value: isinstance(value, type) or type(value).__module__ != "builtins", "a class"),
    torch.Tensor: _Kind(lambda value: isinstance(value, torch.Tensor), "a tensor", is_by_type=True),
    torch.nn.Module: _Kind(lambda value: isinstance(value, torch.nn.Module), "a module", is_by_type=True),
    torch.dtype: _Kind(lambda value: isinstance(value, torch.dtype), "a torch.dtype", is_by_type=True),
    torch.device: _Kind(lambda value: isinstance(value, torch.device), "a torch.device", is_by_type=True),
    collections.abc.Callable: _Kind(callable, "a function"),  # type: ignore[dict-item]
}


def _iterable(kind: type, of: _Kind | None) -> _Kind:
    """Accept an iterable, of which the members are compared if they can be read again."""
    is_mapping = issubclass(kind, collections.abc.Mapping)
    is_sized = issubclass(kind, collections.abc.Sequence)

    def accepts(value: Any) -> bool:
        if is_mapping:
            return hasattr(value, "keys")
        if not (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
            return False
        if isinstance(value, (list, tuple, str)) and of is not None:
            return all(of.accepts(member) for member in value)
        return True

    noun = "a mapping" if is_mapping else "a list or tuple" if is_sized else "an iterable"
    return _Kind(accepts, noun if of is None else f"{noun} of {_PLURALS.get(of.name, of.name)}")


_PLURALS = {"a tensor": "tensors", "an integer": "integers", "a number": "numbers", "a string": "strings"}


def _is_like(kind: type, value: Any) -> bool:
    """Whether a value is an instance, or has the methods of the class."""
    if isinstance(value, kind):
        return True
    needed = [name for name in vars(kind) if not name.startswith("_") or name in _SEEN_METHODS]
    return bool(needed) and all(hasattr(value, name) for name in needed)


def _shown(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Return the name of a function or class as a program writes it."""
    name = type(arguments[0]).__name__ if function.__name__ == "__init__" and arguments else function.__name__
    package = function.__module__.split(".")[1:2]
    return f"{_ALIASES.get(package[0], package[0]) if package and package[0] in _PACKAGES else 'mpi'}.{name}"


_PACKAGES = (*_ALIASES, "engine")


def _message(shown: str, function: Callable[..., Any], name: str, value: Any, kind: _Kind) -> str:
    found = kind_of(value)
    if isinstance(value, (list, tuple)):
        found += f" of {', '.join(sorted({type(member).__name__ for member in value})) or 'nothing'}"
    is_short = value is None or (isinstance(value, (str, int, float)) and len(repr(value)) < 40)
    return (
        f"{rank_prefix()}{shown}({name}={repr(value) if is_short else '...'}): expected {kind.name}, not {found}. "
        f"{_description(function, name)}See help({shown})."
    )


def _description(function: Callable[..., Any], name: str) -> str:
    """Return the first sentence of the documentation of a parameter."""
    # The class, if this is its __init__.
    holder = inspect.unwrap(function).__globals__.get(function.__qualname__.split(".")[0])
    for text in (inspect.getdoc(function), inspect.getdoc(holder) if holder is not None else None):
        if found := re.search(rf"^    {name}: (.*(?:\n {{8,}}.*)*)", text or "", re.MULTILINE):
            sentence = re.split(r"(?<=[.;])\s", " ".join(found[1].split()))[0].rstrip(";.")
            return f"{name}: {sentence}. "
    return ""
