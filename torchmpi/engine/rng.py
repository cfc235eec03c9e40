"""The process-wide random generators a training step may draw from: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """State of all global generators, as plain numbers and tensors that a checkpoint can hold.

    >>> sorted(capture(torch.device("cpu")))
    ['device', 'numpy', 'python', 'torch']
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Bring all global generators back to a captured state.

    >>> cpu = torch.device("cpu")
    >>> before = capture(cpu); x = torch.rand(1); restore(before, cpu); torch.equal(x, torch.rand(1))
    True
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)


def fingerprint() -> tuple[Any, ...]:
    """Something cheap that changes whenever the host's global generators are drawn from.

    >>> before = fingerprint(); x = random.random(); before == fingerprint()
    False
    """
    _, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()


def generators(iterator: Any) -> list[torch.Generator]:
    """The generators a ``DataLoader`` was given for itself and its samplers, each once.

    >>> loader = torch.utils.data.DataLoader([1, 2], shuffle=True, generator=torch.Generator())
    >>> len(generators(loader))
    1
    """
    sampler, batch_sampler = getattr(iterator, "sampler", None), getattr(iterator, "batch_sampler", None)
    owners = (iterator, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(owner, "generator", None) for owner in owners)
    unique: dict[int, torch.Generator] = {id(g): g for g in found if isinstance(g, torch.Generator)}
    return list(unique.values())


def capture_generators(iterator: Any) -> list[torch.Tensor]:
    """States of ``generators(iterator)``.

    >>> capture_generators([1, 2, 3])
    []
    """
    return [generator.get_state() for generator in generators(iterator)]


def restore_generators(iterator: Any, states: Iterable[torch.Tensor]) -> None:
    """Bring ``generators(iterator)`` back to the states captured before.

    >>> restore_generators([1, 2, 3], [])
    """
    for generator, state in zip(generators(iterator), states, strict=True):
        generator.set_state(state)
