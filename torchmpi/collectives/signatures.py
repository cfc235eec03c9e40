"""The types of the collectives that take numbers too: one protocol for each list of parameters, with its overloads.

A protocol is generic in the results for a tensor, for numbers, and for a scalar of NumPy. The decorators at the end
declare that a function has the parameters of another one: they give it a type for type checkers and its parameters for
``help()``, and return the function itself, so that a call costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, overload

import numpy as np
import torch

from ..communicators.handle import Handle
from ..communicators.levels import Comm
from ..config import BackendName, NoAverage, Operation
from ..other_names import refuses_keywords

Values = torch.Tensor | complex | np.generic
"""What such a collective takes: a tensor, a Python number or a scalar of NumPy."""

_Tensor = torch.Tensor
_OfTensor = TypeVar("_OfTensor", covariant=True)
_OfBool = TypeVar("_OfBool", covariant=True)
_OfInt = TypeVar("_OfInt", covariant=True)
_OfFloat = TypeVar("_OfFloat", covariant=True)
_OfComplex = TypeVar("_OfComplex", covariant=True)
_OfScalar = TypeVar("_OfScalar", covariant=True)
_Signature = TypeVar("_Signature")


class Reduction(Protocol[_OfTensor, _OfInt, _OfFloat, _OfComplex, _OfScalar]):
    """Combines the values of all ranks for every rank."""

    @overload
    def __call__(
        self,
        tensor: _Tensor,
        out: _Tensor | None = None,
        *,
        op: Operation = "sum",
        comm: Comm = None,
        backend: BackendName | None = None,
    ) -> _OfTensor: ...
    @overload
    def __call__(
        self, tensor: float, *, op: Literal["avg"], comm: Comm = None, backend: BackendName | None = None
    ) -> _OfFloat: ...
    @overload
    def __call__(
        self, tensor: int, *, op: NoAverage = "sum", comm: Comm = None, backend: BackendName | None = None
    ) -> _OfInt: ...
    @overload
    def __call__(
        self, tensor: float, *, op: NoAverage = "sum", comm: Comm = None, backend: BackendName | None = None
    ) -> _OfFloat: ...
    @overload
    def __call__(
        self, tensor: complex, *, op: NoAverage = "sum", comm: Comm = None, backend: BackendName | None = None
    ) -> _OfComplex: ...
    @overload
    def __call__(
        self,
        tensor: complex | np.generic,
        *,
        op: Operation = "sum",
        comm: Comm = None,
        backend: BackendName | None = None,
    ) -> _OfScalar: ...


class RootedReduction(Protocol[_OfTensor, _OfInt, _OfFloat, _OfComplex, _OfScalar]):
    """Combines the values of all ranks for the root."""

    @overload
    def __call__(
        self,
        tensor: _Tensor,
        root: int = 0,
        out: _Tensor | None = None,
        *,
        op: Operation = "sum",
        comm: Comm = None,
        backend: BackendName | None = None,
    ) -> _OfTensor: ...
    @overload
    def __call__(
        self, tensor: float, root: int = 0, *, op: Literal["avg"], comm: Comm = None, backend: BackendName | None = None
    ) -> _OfFloat: ...
    @overload
    def __call__(
        self,
        tensor: int,
        root: int = 0,
        *,
        op: NoAverage = "sum",
        comm: Comm = None,
        backend: BackendName | None = None,
    ) -> _OfInt: ...
    @overload
    def __call__(
        self,
        tensor: float,
        root: int = 0,
        *,
        op: NoAverage = "sum",
        comm: Comm = None,
        backend: BackendName | None = None,
    ) -> _OfFloat: ...
    @overload
    def __call__(
        self,
        tensor: complex,
        root: int = 0,
        *,
        op: NoAverage = "sum",
        comm: Comm = None,
        backend: BackendName | None = None,
    ) -> _OfComplex: ...
    @overload
    def __call__(
        self,
        tensor: complex | np.generic,
        root: int = 0,
        *,
        op: Operation = "sum",
        comm: Comm = None,
        backend: BackendName | None = None,
    ) -> _OfScalar: ...


class Movement(Protocol[_OfTensor, _OfBool, _OfInt, _OfFloat, _OfComplex, _OfScalar]):
    """Moves the values of all ranks to every rank."""

    @overload
    def __call__(
        self, tensor: _Tensor, out: _Tensor | None = None, *, comm: Comm = None, backend: BackendName | None = None
    ) -> _OfTensor: ...
    @overload
    def __call__(self, tensor: bool, *, comm: Comm = None, backend: BackendName | None = None) -> _OfBool: ...
    @overload
    def __call__(self, tensor: int, *, comm: Comm = None, backend: BackendName | None = None) -> _OfInt: ...
    @overload
    def __call__(self, tensor: float, *, comm: Comm = None, backend: BackendName | None = None) -> _OfFloat: ...
    @overload
    def __call__(self, tensor: complex, *, comm: Comm = None, backend: BackendName | None = None) -> _OfComplex: ...
    @overload
    def __call__(self, tensor: np.generic, *, comm: Comm = None, backend: BackendName | None = None) -> _OfScalar: ...


class RootedMovement(Protocol[_OfTensor, _OfBool, _OfInt, _OfFloat, _OfComplex, _OfScalar]):
    """Moves values from the root or to it."""

    @overload
    def __call__(
        self,
        tensor: _Tensor,
        root: int = 0,
        out: _Tensor | None = None,
        *,
        comm: Comm = None,
        backend: BackendName | None = None,
    ) -> _OfTensor: ...
    @overload
    def __call__(
        self, tensor: bool, root: int = 0, *, comm: Comm = None, backend: BackendName | None = None
    ) -> _OfBool: ...
    @overload
    def __call__(
        self, tensor: int, root: int = 0, *, comm: Comm = None, backend: BackendName | None = None
    ) -> _OfInt: ...
    @overload
    def __call__(
        self, tensor: float, root: int = 0, *, comm: Comm = None, backend: BackendName | None = None
    ) -> _OfFloat: ...
    @overload
    def __call__(
        self, tensor: complex, root: int = 0, *, comm: Comm = None, backend: BackendName | None = None
    ) -> _OfComplex: ...
    @overload
    def __call__(
        self, tensor: np.generic, root: int = 0, *, comm: Comm = None, backend: BackendName | None = None
    ) -> _OfScalar: ...


class _Typed(Generic[_Signature]):
    """A decorator: declares the type of a function, and its parameters as ``refuses_keywords`` does."""

    def __call__(self, function: Callable[..., Any]) -> _Signature:
        return cast(_Signature, refuses_keywords(function))


like_allreduce = _Typed[Reduction[_Tensor, int, float, complex, Any]]()
like_allreduce_async = _Typed[Reduction[Handle[_Tensor], Handle[int], Handle[float], Handle[complex], Handle[Any]]]()
like_reduce = _Typed[RootedReduction[_Tensor, int, float, complex, Any]]()
like_reduce_async = _Typed[RootedReduction[Handle[_Tensor], Handle[int], Handle[float], Handle[complex], Handle[Any]]]()
like_broadcast = _Typed[RootedMovement[_Tensor, bool, int, float, complex, Any]]()
like_broadcast_async = _Typed[
    RootedMovement[Handle[_Tensor], Handle[bool], Handle[int], Handle[float], Handle[complex], Handle[Any]]
]()
like_allgather = _Typed[Movement[_Tensor, list[bool], list[int], list[float], list[complex], list[Any]]]()
like_allgather_async = _Typed[
    Movement[
        Handle[_Tensor],
        Handle[list[bool]],
        Handle[list[int]],
        Handle[list[float]],
        Handle[list[complex]],
        Handle[list[Any]],
    ]
]()
like_gather = _Typed[
    RootedMovement[
        _Tensor | None, list[bool] | None, list[int] | None, list[float] | None, list[complex] | None, list[Any] | None
    ]
]()
like_gather_async = _Typed[
    RootedMovement[
        Handle[_Tensor | None],
        Handle[list[bool] | None],
        Handle[list[int] | None],
        Handle[list[float] | None],
        Handle[list[complex] | None],
        Handle[list[Any] | None],
    ]
]()
