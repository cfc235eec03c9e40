"""The plan of a call on a group: all that is known before its tensors are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

import torch

from ..collective_specs import SPECS
from ..shared_memory.memory_layout import CHECKSUM_MODULUS
from ..tensors import dtypes
from ..timeline import events
from .algorithms import algorithm_name
from .call_codes import as_many, call_code, call_names

Shape = tuple[int, ...]
Backends = events.Backends
Run = Callable[[Any, Any, int], Any]
"""``run(tensor, out, root) -> result``"""

Place = Literal["plain", "cpu", "plain cuda", "cuda"]
"""Where the tensors of a call are: in plain memory, which a backend can use as it is, or in other memory."""
PLAIN: Place = "plain"
"""Contiguous host memory of tensors that need no further checks."""
PLAIN_ON: dict[str, Place] = {"cpu": PLAIN, "cuda": "plain cuda"}
"""Plain memory, by the type of the device."""


class PlanKey(NamedTuple):
    """The arguments of a call by which its plan is found: calls with equal keys have the same plan."""

    collective: str
    op: str | None
    dtype: torch.dtype | None
    """None if this rank passes no tensor."""
    place: str
    """A Place, or the type of a device without backends."""
    backend: str | None = None
    mode: Hashable = "sync"
    """``sync`` or ``async``, for which the table of backends has different rows; of a step, its variant."""

    @property
    def device_type(self) -> str:
        """The type of the device of the tensors."""
        return next((device for device, place in PLAIN_ON.items() if place == self.place), self.place)

    @property
    def is_plain(self) -> bool:
        """Whether a backend can use the memory of the tensors as it is."""
        return self.place in PLAIN_ON.values()


def no_shape(tensor: Any) -> Shape:
    """Compare no shape between the ranks."""
    return ()


def _row_shape(tensor: torch.Tensor) -> Shape:
    return tensor.shape[1:]


def compared_shape(collective: str) -> Callable[[Any], Shape] | None:
    """Return which shape of the tensor of a collective the ranks compare; None for its whole shape."""
    return {"shape": None, "rows": _row_shape, "nothing": no_shape}[SPECS[collective].compared]


class Plan:
    """A call that :meth:`~torchmpi.communicators.group.Group.perform` can run.

    Attributes:
        collective: Name of the collective, one of :data:`~torchmpi.collective_specs.SPECS`.
        code: The signature that the ranks compare, without root and shape
            (see :func:`~torchmpi.communicators.call_codes.call_code`).
        run: The function that does the work: ``run(tensor, out, root)``.
        shape_of: Which shape of the tensor is part of the signature; None means its whole shape.
        backends: The backends of the call, each with the largest size in bytes for which it is used (None: any).
        is_on_device: Whether the tensors are on a device, so that the caller's stream matters.
        enqueues: Whether the call enqueues its work on the device of its tensors and returns.
        cached_call: ``cached_call(root, None)`` returns the call for the fast path, or None; None if it cannot run it.
        bound: What begins asynchronous calls, by fast path, root and dtype.
        many: The allreduce of a :class:`~torchmpi.collectives.tensor_lists.TensorList`, if the backend reduces tensors
            at separate addresses.
    """

    __slots__ = (
        "backends", "bound", "cached_call", "code", "collective", "enqueues", "is_on_device", "many", "run", "shape_of",
    )  # fmt: skip

    def __init__(
        self, collective: str, code: int, run: Run, shape_of: Callable[[Any], Shape] | None = no_shape
    ) -> None:
        self.collective, self.code, self.run, self.shape_of = collective, code, run, shape_of
        self.backends: Backends = ()
        self.is_on_device = self.enqueues = False
        self.cached_call: Callable[[int, int | None], Any] | None = None
        self.bound: dict[Hashable, Any] = {}
        self.many: Plan | None = None

    def for_many(self, shapes: tuple[Shape, ...]) -> Plan:
        """Return the plan of an allreduce of a flat tensor that packs tensors of these shapes."""
        checksum = hash(shapes) % CHECKSUM_MODULUS
        return self._announcing(
            "allreduce_many", as_many(self.code), lambda tensor: (tensor.numel(), len(shapes), checksum)
        )

    def announcing(self, dtype: torch.dtype, *shape: int, collective: str = "") -> Plan:
        """Return the same plan with a dtype and shape to compare that this rank expects, and as another collective."""
        name = collective or self.collective
        return self._announcing(name, call_code(name, None, dtypes.info(dtype).code), lambda tensor: shape)

    def _announcing(self, collective: str, code: int, shape_of: Callable[[Any], Shape]) -> Plan:
        plan = copy.copy(self)
        plan.collective, plan.code, plan.shape_of = collective, code, shape_of
        return plan

    @staticmethod
    def names(code: int) -> tuple[str, str, str, int]:
        """Return collective, operation, dtype and root of a signature; '' or -1 for none."""
        return call_names(code)

    algorithm = staticmethod(algorithm_name)
