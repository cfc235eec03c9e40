"""State of the generators of a ``DataLoader`` and its samplers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CheckpointError


def owners(iterator: Any) -> list[Any]:
    """Return an iterator and, if it is a ``DataLoader``, its samplers, each once.

    >>> len(owners([1, 2])), len(owners(torch.utils.data.DataLoader([1, 2])))
    (1, 3)
    """
    sampler, batch_sampler = getattr(iterator, "sampler", None), getattr(iterator, "batch_sampler", None)
    found = (iterator, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(owner): owner for owner in found if owner is not None}.values())


def generators(iterator: Any) -> list[torch.Generator]:
    """Return the generators that were passed to a ``DataLoader`` and its samplers, each once.

    >>> loader = torch.utils.data.DataLoader([1, 2], shuffle=True, generator=torch.Generator())
    >>> len(generators(loader))
    1
    """
    found = (getattr(owner, "generator", None) for owner in owners(iterator))
    unique: dict[int, torch.Generator] = {id(g): g for g in found if isinstance(g, torch.Generator)}
    return list(unique.values())


def capture_generators(iterator: Any) -> list[torch.Tensor]:
    """Return the states of ``generators(iterator)``.

    >>> capture_generators([1, 2, 3])
    []
    """
    return [generator.get_state() for generator in generators(iterator)]


def restore_generators(iterator: Any, states: Sequence[torch.Tensor]) -> None:
    """Restore ``generators(iterator)`` to captured states.

    >>> restore_generators([1, 2, 3], [])
    """
    found = generators(iterator)
    if len(found) != len(states):
        raise CheckpointError(
            f"the checkpoint has the state of {len(states)} generator(s) of a DataLoader, but the iterator "
            f"has {len(found)}: make the iterator as in the run that is resumed"
        )
    for generator, state in zip(found, states, strict=True):
        generator.set_state(state)
