"""State of the process-wide random generators of Python, NumPy and torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError


def capture(device: torch.device) -> dict[str, Any]:
    """Return the state of all global generators, as plain numbers and tensors that a checkpoint can hold.

    >>> sorted(capture(torch.device("cpu")))
    ['device', 'numpy', 'python', 'torch']
    """
    version, numbers, gauss = random.getstate()
    numpy_state = _numpy_state()
    inner = {name: _plain(value) for name, value in numpy_state["state"].items()}
    return {
        "python": [version, list(numbers), gauss],
        "numpy": {**numpy_state, "state": inner},
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Restore all global generators to a captured state.

    >>> cpu = torch.device("cpu")
    >>> before = capture(cpu); x = torch.rand(1); restore(before, cpu); torch.equal(x, torch.rand(1))
    True
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    inner = {
        name: value.numpy().astype(np.uint32) if isinstance(value, Tensor) else value
        for name, value in state["numpy"]["state"].items()
    }
    np.random.set_state({**state["numpy"], "state": inner})
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)


def fingerprint() -> tuple[Any, ...]:
    """Return a value that changes whenever a global generator of the host is used; cheap to compute.

    >>> before = fingerprint(); x = random.random(); before == fingerprint()
    False
    """
    numpy_state = _numpy_state()
    inner = [value.tobytes() if isinstance(value, np.ndarray) else value for value in numpy_state["state"].values()]
    return random.getstate(), inner, numpy_state["has_gauss"], torch.get_rng_state().numpy().tobytes()


def _numpy_state() -> dict[str, Any]:
    state: dict[str, Any] = np.random.get_state(legacy=False)
    return state


def _plain(value: Any) -> Any:
    # As a tensor of a dtype that every version of torch can load; the numbers have 32 bits.
    return torch.from_numpy(value.astype(np.int64)) if isinstance(value, np.ndarray) else value


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
