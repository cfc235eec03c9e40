"""The target of Numba's compiler for kernels: functions of numbers and addresses, without Python objects.

Numba's own target loads what it knows about arrays, strings, lists and random numbers, a quarter of a second, and tries
much of it for each operation on two numbers. Its functions such as `min` are compiled and optimized one by one.
What is known here in addition is in `TYPING` and `LOWERING`, so that Numba in the program of the user remains as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import types
from numba.core import cpu, imputils, registry, typing
from numba.core.datamodel import models
from numba.core.errors import NumbaTypeError
from numba.core.typing import templates
from numba.core.utils import threadsafe_cached_property

# mypy knows only some of Numba's functions.
_types: Any = types
_models: Any = models
_cpu: Any = cpu
_imputils: Any = imputils
_registry: Any = registry
_typing: Any = typing
_templates: Any = templates

TYPING = _templates.Registry()
"""What is known about types, before what Numba knows."""
LOWERING = _imputils.Registry("torchmpi")
"""How that is compiled."""


class _TypingContext(_typing.BaseContext):  # type: ignore[misc]
    """Which types and functions are known."""

    _numba: Any = None

    def load_additional_registries(self) -> None:
        """Add functions of `math`."""
        from numba.core.typing import mathdecl

        self.install_registry(TYPING)
        self.install_registry(mathdecl.registry)

    def _load_builtins(self) -> None:
        """Add the functions of Numba itself, without methods of its own types, which would load its own target.

        Without `min` and `max`, of which :mod:`.compilation` has others.
        """
        if self._numba is None:
            from numba.core.typing import builtins  # noqa: F401 importing adds

            known = _templates.builtin_registry
            self._numba = _templates.Registry()
            self._numba.functions = known.functions
            self._numba.globals = [each for each in known.globals if each[0] not in (min, max)]
            methods = _templates._OverloadAttributeTemplate
            self._numba.attributes = [each for each in known.attributes if not issubclass(each, methods)]
            self.install_registry(self._numba)

    def resolve_value_type(self, val: Any) -> Any:
        """Return the type of a constant; functions first, for which Numba formats an error before it finds them."""
        return (self._lookup_global(val) if callable(val) else None) or super().resolve_value_type(val)

    def resolve_value_type_prefer_literal(self, value: Any) -> Any:
        """Return the type of a constant, which contains its value if it can; that of a function cannot."""
        if callable(value):
            return self.resolve_value_type(value)
        return super().resolve_value_type_prefer_literal(value)


class _TargetContext(_cpu.CPUContext):  # type: ignore[misc]
    """How they are compiled to LLVM code."""

    def load_additional_registries(self) -> None:
        """Add what is known about numbers, ranges, tuples and slices of them."""
        from numba.cpython import builtins, mathimpl, numbers, rangeobj, slicing, tupleobj  # noqa: F401 importing adds

        self.install_registry(LOWERING)
        self.install_registry(mathimpl.registry)

    @cache  # noqa: B019 the context lives as long as the process
    def get_abi_sizeof(self, ty: Any) -> int:
        """Return the size of a type of LLVM, for which llvmlite compiles a module."""
        return int(super().get_abi_sizeof(ty))

    def post_lowering(self, module: Any, library: Any) -> None:
        """Leave out Numba's runtime, which counts references."""


class _Target(_registry.CPUTarget):  # type: ignore[misc]
    @threadsafe_cached_property
    def _toplevel_target_context(self) -> Any:
        return _TargetContext(self.typing_context, self._target_name)

    @threadsafe_cached_property
    def _toplevel_typing_context(self) -> Any:
        return _TypingContext()


TARGET = _Target("cpu")


# --- functions of numbers that generate their code ------------------------------------------------------------------


class _IntrinsicType(_types.Callable, _types.Opaque):  # type: ignore[misc]
    """The type of an intrinsic, which has one signature."""

    def __init__(self, intrinsic: Intrinsic) -> None:
        self.intrinsic = intrinsic
        super().__init__(f"{intrinsic.name} at {id(intrinsic):#x}")

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        """Check the arguments, and return the signature."""
        signature = self.intrinsic.signature
        if kws or len(args) != len(signature.args):
            raise NumbaTypeError(f"{self.intrinsic.name} takes {len(signature.args)} arguments by position")
        for given, expected in zip(args, signature.args, strict=True):
            if given != expected and context.can_convert(given, expected) is None:
                raise NumbaTypeError(f"{self.intrinsic.name} takes {expected}, and a call passes {given}")
        return signature

    def get_call_signatures(self) -> Any:
        """Return the only one."""
        return [self.intrinsic.signature], False

    def get_impl_key(self, sig: Any) -> Any:
        """Return the key of the implementation."""
        return self.intrinsic


_models.register_default(_IntrinsicType)(_models.OpaqueModel)


class Intrinsic:
    """A function of numbers that generates the code of its calls.

    Args:
        name: Its name in messages.
        signature: Types of the result and of the arguments.
        generate: Function of Numba's context, an IR builder, the signature and the arguments; returns the result.
    """

    def __init__(self, name: str, signature: Any, generate: Callable[..., Any]) -> None:
        self.name, self.signature = name, signature
        LOWERING.lower(self, *signature.args)(generate)
        self._numba_type_ = _IntrinsicType(self)


def intrinsic(define: Callable[..., Any]) -> Any:
    """Make an intrinsic of a function that returns its signature and generator; the parameters are for readers.

    Numba's own decorator is for functions whose signatures depend on the arguments, and takes longer for each call.
    """
    return Intrinsic(define.__name__, *define(*[None] * define.__code__.co_argcount))


# --- operations on words --------------------------------------------------------------------------------------------


class _OnWords(_templates.AbstractTemplate):  # type: ignore[misc]
    """An operation on words. Numba would compare them with all types that it knows."""

    result: Any

    def generic(self, args: Any, kws: Any) -> Any:
        """Return the signature if all arguments are words."""
        are_words = all(each == _types.int64 for each in args)
        return _typing.signature(self.result, *args) if args and are_words else None


class _ToWord(_OnWords):
    result = _types.int64


class _ToCondition(_OnWords):
    result = _types.boolean


_ARITHMETIC = (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod),
    *(operator.iadd, operator.isub, operator.imul, operator.ifloordiv, operator.imod),
    *(operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift),
    *(operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
)
for _operation in _ARITHMETIC:
    TYPING.register_global(_operation)(_ToWord)
for _operation in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
    TYPING.register_global(_operation)(_ToCondition)
