"""The facts about each collective, one row each. All that the package knows of a collective by its name, it reads here.

A new collective is a row here, its name in :data:`CollectiveName`, a public function, and a method of
each backend that has it. The number of a row is its code in the signatures that ranks compare: new rows go to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Flow = Literal["all to all", "root to all", "all to root", "neighbor", "none"]
"""From which ranks data come to which."""
Kind = Literal["collective", "message", "form", "exchange", "action"]
"""A collective with public functions; a message; another form of a collective, or one on lists of one tensor for each
rank; a step of the package itself."""


@dataclass(frozen=True)
class CollectiveSpec:
    """One collective.

    >>> SPECS["scatter"].is_rooted, SPECS["scatter"].compared, SPECS["allreduce"].compared, SPECS["gather"].compared
    (True, 'nothing', 'shape', 'rows')
    """

    name: str
    flow: Flow = "all to all"
    tensors: bool = True
    """Whether it has tensors at all."""
    reduces: bool = False
    """Whether tensors are combined, by an operation."""
    divides: bool = False
    """Whether the rows of a tensor are divided among the ranks; a number cannot be."""
    gathers: bool = False
    """Whether a result has rows of several ranks."""
    has_async: bool = True
    kind: Kind = "collective"
    form_of: str = ""
    """The collective of which this is another form."""
    mpi_name: str = ""
    """The method of mpi4py, if not the capitalized name."""
    torch_name: str = ""
    """The function of torch.distributed, if not of the same name."""

    @cached_property
    def is_rooted(self) -> bool:
        """Whether it has an argument `root`."""
        return self.flow in ("root to all", "all to root")

    @cached_property
    def only_root_passes(self) -> bool:
        """Whether the other ranks pass no tensor; a rank without one knows no device, dtype and shape."""
        return self.flow == "root to all" and self.divides

    @cached_property
    def is_everywhere(self) -> bool:
        """Whether every rank passes a tensor."""
        return self.tensors and not self.only_root_passes

    @cached_property
    def in_place(self) -> bool:
        """Whether the result has the shape of the tensor, and overwrites it unless `out` is given."""
        return self.is_everywhere and not (self.divides or self.gathers)

    @cached_property
    def reduces_to_all(self) -> bool:
        """Whether every rank gets the combination of the tensors of all, in place: an allreduce, and its forms."""
        return self.reduces and self.in_place and self.flow == "all to all"

    @cached_property
    def reduces_to_root(self) -> bool:
        """Whether the root alone gets it."""
        return self.reduces and self.in_place and self.flow == "all to root"

    @cached_property
    def compared(self) -> Literal["shape", "rows", "nothing"]:
        """What must be equal on all ranks: the shape of the tensor, the shape of its rows, or neither."""
        if not self.is_everywhere or self.kind == "exchange":
            return "nothing"
        return "shape" if self.in_place or self.reduces else "rows"

    @cached_property
    def grows(self) -> int:
        """How the result compares with the tensor: 1 if it has the rows of all ranks, -1 if those of one, else 0."""
        return self.gathers - self.divides

    def passes(self, is_root: bool) -> bool:
        """Return whether a rank passes a tensor."""
        return self.is_everywhere or (self.tensors and is_root)

    def receives(self, is_root: bool) -> bool:
        """Return whether a rank gets a result."""
        return is_root or self.flow != "all to root"

    def writes(self, is_root: bool) -> bool:
        """Return whether a rank's memory for the result is written; the root of a broadcast has it already."""
        return self.receives(is_root) and not (is_root and self.in_place and self.flow == "root to all")

    def changes(self, is_root: bool) -> bool:
        """Return whether a rank's tensor is overwritten if `out` is not given.

        >>> [SPECS[name].changes(is_root=True) for name in ("allreduce", "broadcast", "reduce", "gather")]
        [True, False, True, False]
        """
        return self.in_place and self.writes(is_root)

    @cached_property
    def changed_by(self) -> tuple[bool, bool]:
        """What `changes` returns for the other ranks and for the root, without a call."""
        return self.changes(is_root=False), self.changes(is_root=True)

    def sources(self, rank: int, root: int, ranks: Sequence[int]) -> Sequence[int]:
        """Return the ranks, of all `ranks`, whose data a rank receives.

        >>> [SPECS[name].sources(1, 0, (0, 1, 2)) for name in ("allreduce", "broadcast", "reduce", "sendreceive")]
        [(0, 1, 2), (0,), (), (0,)]
        """
        found: dict[Flow, Callable[[], Sequence[int]]] = {
            "all to all": lambda: ranks,
            "root to all": lambda: (root,),
            "all to root": lambda: ranks if rank == root else (),
            "neighbor": lambda: (ranks[ranks.index(rank) - 1],),
            "none": lambda: (),
        }
        return found[self.flow]()

    @property
    def name_in_mpi(self) -> str:
        """The method of mpi4py."""
        return self.mpi_name or self.name.capitalize()


def _action(name: str, flow: Flow = "all to all") -> CollectiveSpec:
    return CollectiveSpec(name, flow, tensors=False, kind="action")


_Row = CollectiveSpec
_COMPARED = (
    _Row("barrier", tensors=False, has_async=False),
    _Row("allreduce", reduces=True, torch_name="all_reduce"),
    _Row("reduce", "all to root", reduces=True),
    _Row("broadcast", "root to all", mpi_name="Bcast"),
    _Row("allgather", gathers=True, torch_name="all_gather"),
    _Row("reduce_scatter", reduces=True, divides=True, mpi_name="Reduce_scatter_block"),
    _Row("gather", "all to root", gathers=True),
    _Row("scatter", "root to all", divides=True),
    _Row("alltoall", divides=True, gathers=True, torch_name="all_to_all"),
    _action("stop", "none"),
    _action("split"),
    _Row("allreduce_many", reduces=True, kind="form", form_of="allreduce"),
    _action("server_init"),
    _action("server_free"),
    _action("server_save"),
    _action("server_load"),
    _action("group"),
    _action("free", "none"),
    _Row("alltoall_splits", divides=True, gathers=True, kind="form", form_of="alltoall"),
    _Row("sendreceive", "neighbor", kind="message", mpi_name="Sendrecv_replace"),
    _Row("send", "none", kind="message"),
    _Row("recv", "none", kind="message"),
    _action("confirm"),
    _action("begin_again"),
    _action("recover"),
)
"""The calls that ranks compare, or that the fast path counts, in the order of their codes."""
_OTHERS = (_Row("exchange_parts", divides=True, gathers=True, kind="exchange", form_of="alltoall"),)
"""What backends bind in addition."""
SPECS = {row.name: row for row in (*_COMPARED, *_OTHERS)}
"""All rows by name."""
_UNKNOWN = _action("other")


def spec_of(name: str) -> CollectiveSpec:
    """Return the row of a name that was read from a record, where names of other calls occur too."""
    return SPECS.get(name, _UNKNOWN)


def names(rows: Iterable[CollectiveSpec]) -> tuple[str, ...]:
    """Return the names of some rows."""
    return tuple(row.name for row in rows)


CODES = names(_COMPARED)
"""The name of each code in signatures."""
COLLECTIVES = names(row for row in _COMPARED if row.kind == "collective")
"""The collectives with public functions."""
CollectiveName = Literal[
    "barrier", "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall"
]
"""The same names, as a type."""
IN_PLACE = names(row for row in _COMPARED if row.kind == "collective" and row.in_place)
SAME_SHAPE = names(row for row in _COMPARED if row.kind == "collective" and row.compared == "shape")
"""Collectives whose tensors have the same shape on all ranks, so that all ranks select the same line of a rule."""
