"""State of the process-wide random generators of Python, NumPy and torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
