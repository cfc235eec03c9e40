"""The algorithms of collectives: the backend that has chosen one stores its number in the call log of the group.

Timelines show the name. A call that stores none has the number 0: its library has chosen.
"""

from __future__ import annotations

from ..backend_specs import BACKENDS
from ..shared_memory import memory_layout

_NAMES = {
    0: "",
    memory_layout.IN_RING: "ring entries",
    memory_layout.IN_WHOLE_SLOTS: "whole slots",
    memory_layout.IN_CHUNKS: "slots in chunks",
    memory_layout.IN_SHARED_TENSORS: "shared tensors",
    memory_layout.BY_DIRECT_READS: "direct reads",
    memory_layout.WITH_COMPARISON: "messages of the comparison",
}
_MESSAGES = (
    "whole tensors to all", "swap of whole tensors", "relayed parts", "exchange of parts", "whole tensors to the root",
    "tree", "chain", "doubling", "direct messages",
)  # fmt: skip
_AREAS = ("one shot", "two shots")
_OVER_HOSTS = ("slices of all ranks", "first ranks of the hosts")
ALGORITHMS = (*_NAMES.values(), *_MESSAGES, *_AREAS, *_OVER_HOSTS)
"""The name of each number."""
(
    WHOLE_TO_ALL, SWAP, RELAYED, PARTS, WHOLE_TO_ROOT, TREE, CHAIN, DOUBLING, DIRECT,
    ONE_SHOT, TWO_SHOTS, SLICES, FIRST_RANKS,
) = range(len(_NAMES), len(ALGORITHMS))  # fmt: skip
_LIBRARIES = tuple(row.name for row in BACKENDS.values() if row.is_library)
LIBRARY = "library"


def algorithm_name(number: int, backend: str) -> str:
    """Return the name of an algorithm; '' if none is known.

    >>> algorithm_name(TREE, "p2p"), algorithm_name(0, "mpi"), algorithm_name(0, "hierarchical")
    ('tree', 'library', '')
    """
    return ALGORITHMS[number] or (LIBRARY if backend in _LIBRARIES else "")
