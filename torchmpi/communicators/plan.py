"""The plan of a call on a group: its function, and the part of its signature that does not change between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..timeline import events
from .algorithms import algorithm_name
from .call_log import call_names

Shape = tuple[int, ...]
Backends = events.Backends
Run = Callable[[Any, Any, int], Any]
"""``run(tensor, out, root) -> result``"""


def no_shape(tensor: Any) -> Shape:
    """Compare no shape between the ranks."""
    return ()


class Plan:
    """A call that :meth:`~torchmpi.communicators.group.Group.perform` can run.

    Attributes:
        collective: Name of the collective, one of :data:`~torchmpi.collective_specs.SPECS`.
        code: The signature that the ranks compare, without root and shape
            (see :func:`~torchmpi.communicators.call_log.call_code`).
        run: The function that does the work: ``run(tensor, out, root)``.
        shape_of: Which shape of the tensor is part of the signature; None means its whole shape.
        backends: The backends of the call, each with the largest size in bytes for which it is used (None: any).
    """

    __slots__ = ("backends", "code", "collective", "run", "shape_of")

    def __init__(
        self, collective: str, code: int, run: Run, shape_of: Callable[[Any], Shape] | None = no_shape
    ) -> None:
        self.collective, self.code, self.run, self.shape_of = collective, code, run, shape_of
        self.backends: Backends = ()

    @staticmethod
    def names(code: int) -> tuple[str, str, str, int]:
        """Return collective, operation, dtype and root of a signature; '' or -1 for none."""
        return call_names(code)

    algorithm = staticmethod(algorithm_name)
