"""Calls of a process group that are like earlier ones: machine code makes them before Python checks their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ..collective_specs import SPECS, CollectiveSpec
from ..tensors import writable
from ..tensors.modes import are_watching, get_tracing_state
from ..tensors.writable import known
from . import dispatched_calls
from .arguments import in_order
from .torch_calls import FORMS, TorchCall
from .torch_names import WithoutFunctionModes, has_function_mode, is_asynchronous
from .work import COMPLETED, PendingWork

Method = TypeVar("Method", bound=Callable[..., Any])

NO_LIMIT = timedelta(0)
"""Greater is the timeout of a call that has one of its own."""


def repeated(name: str, kind: type[Any], *fields: str, are_listed: bool = False) -> Callable[[Method], Method]:
    """Let machine code make the calls of a method that are like earlier ones, and the method all others.

    Machine code looks whether the tensors are plain, of one dtype and apart, whether their lengths fit, and whether
    modes of torch are active; its call ends at the timeout of the group. Only what it cannot see is checked before: a
    timeout of the call, and read-only memory, but not that of a synchronous all_reduce. The look at a new tensor takes
    half as long as a short one, and native calls have no such look.

    Args:
        name: The collective, a key of :data:`~.torch_calls.FORMS`.
        kind: The type of torch's options, the last argument.
        fields: What its second overload takes in their place; see :func:`~.arguments.in_order`.
        are_listed: Whether each of the other arguments is a list of one entry, for the one device of a rank.
    """
    spec = SPECS[FORMS[name].collective]
    is_rooted, reduces, is_as_native = spec.is_rooted, spec.reduces, spec.reduces_to_all
    has_number = hasattr(kind, "rootTensor")
    places = _places(spec, is_root=False), _places(spec, is_root=True)

    def decorate(method: Any) -> Any:
        ordered = in_order(method, kind, fields)
        num_arguments = method.__code__.co_argcount - 1
        has_sizes = num_arguments > 3

        def through_python(group: Any, arguments: tuple[Any, ...]) -> Any:
            if are_watching() and not dispatched_calls.below.is_running:
                return dispatched_calls.call(method.__name__, group, arguments)
            return method(group, *arguments)

        @functools.wraps(method)
        def call(group: Any, *arguments: Any, **named: Any) -> Any:
            # One function: each further one takes 2 % of a short call.
            if has_function_mode():
                with WithoutFunctionModes():
                    return call(group, *arguments, **named)
            if named or len(arguments) != num_arguments or type(arguments[-1]) is not kind:
                arguments = ordered(group, arguments, named)
            if has_sizes and (arguments[2] or arguments[3]):
                return through_python(group, arguments)
            options, ranks, root, number, given, received = arguments[-1], group._group, 0, None, None, None
            if options.timeout > NO_LIMIT or (has_number and options.rootTensor):
                return through_python(group, arguments)
            if is_rooted:
                root = options.rootRank
            if reduces:
                number = hash(options.reduceOp)
            given_at, received_at = places[is_rooted and root == ranks.rank]
            if given_at is not None:
                given = arguments[given_at]
                if are_listed:
                    if len(given) != 1:
                        return through_python(group, arguments)
                    given = given[0]
                if type(given) is list:
                    given = [*given]  # the program may change its own
            if received_at is not None:
                received = arguments[received_at]
                if are_listed:
                    if len(received) != 1:
                        return through_python(group, arguments)
                    received = received[0]
                if type(received) is list:
                    received = [*received]
            first = received if given is None else given
            if type(first) is list and first:
                first = first[0]
            bound: TorchCall | None = ranks.plans.get((name, number, getattr(first, "dtype", None), root))
            if bound is None:
                return through_python(group, arguments)
            is_later = is_asynchronous(options)
            if (is_later or not is_as_native) and (written := given if bound.changes else received) is not None:
                seen = known.get(id(written))  # as in writable.refuse_read_only(), without a call
                if (seen is None or seen() is not written) and not _has_memory(group, name, written):
                    return through_python(group, arguments)
            if not is_later:
                if bound.entry(given, received, bound, ranks, None) is None:
                    return through_python(group, arguments)
                return COMPLETED
            if is_as_native and group.may_be_moved(given):
                return through_python(group, arguments)
            if bound.find(given, received, bound, ranks, None) is None:
                return through_python(group, arguments)
            outputs = given if received is None else received
            tensors = outputs if type(outputs) is list else [] if outputs is None else [outputs]
            return PendingWork(bound.begin(given, received), tensors, group._works)

        return call

    return decorate


def _places(spec: CollectiveSpec, *, is_root: bool) -> tuple[int | None, int | None]:
    """Return which argument a rank passes, and which it receives apart from that: of two, the first one."""
    if not spec.tensors:
        return None, None
    if spec.in_place:
        return 0, None
    return (1 if spec.passes(is_root) else None), (0 if spec.receives(is_root) else None)


def _has_memory(group: Any, name: str, written: torch.Tensor | list[torch.Tensor]) -> bool:
    """Raise if a tensor that is written is in read-only memory; return False if torch may have made it without any."""
    tensors = written if isinstance(written, list) else [written]
    for tensor in tensors:
        seen = known.get(id(tensor))
        if seen is None or seen() is not tensor:
            if are_watching() or get_tracing_state() is not None:
                return False
            writable.refuse_read_only(group._where, name, tensor)
    return True
