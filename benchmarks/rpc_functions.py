"""Functions of a parameter server with ``torch.distributed.rpc``, and three forms of calls that add and receive.

``rpc`` calls Python functions, as in PyTorch's tutorials. ``rpc script`` calls TorchScript functions, which do
not need the interpreter lock of the server. ``rpc one call`` is one TorchScript function for both, which saves a round
trip. The server has one thread for requests: no two of them add concurrently, so no update is lost, and no lock is
needed.

Imported by rpc_process.py, if RPC is available.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

SERVER = "0"
_values: list[Any] = []


class Forms:
    """The forms of calls of a client; this Python may lack TorchScript."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[[Tensor], Tensor]] = {"rpc": _add_then_get}
        self.why_not: dict[str, str] = {}
        self._script: dict[str, Any] = {}
        self._reference: Any = None
        try:
            self._script = {function.__name__: torch.jit.script(function) for function in _SCRIPTED}
        except Exception as error:  # of various types
            self.why_not = dict.fromkeys(
                ("rpc script", "rpc one call"), f"no TorchScript: {' '.join(str(error).split())[:100]}"
            )
        else:
            self.calls |= {"rpc script": self._add_then_get, "rpc one call": self._add_and_get}

    def make(self, numel: int) -> None:
        """Replace the values by zeros, on the server."""
        self.drop()
        _values.append(rpc.remote(SERVER, self._script["zeros"], args=(numel,)) if self._script else torch.zeros(numel))

    def find(self) -> None:
        """Get a reference to the values of the server, on a client."""
        if self._script:
            self._reference = rpc.rpc_sync(SERVER, give)

    def drop(self) -> None:
        """Release the values."""
        self._reference = None
        _values.clear()

    def _add_then_get(self, gradient: Tensor) -> Tensor:
        rpc.rpc_sync(SERVER, self._script["add_to"], args=(self._reference, gradient))
        found: Tensor = rpc.rpc_sync(SERVER, self._script["get_from"], args=(self._reference,))
        return found

    def _add_and_get(self, gradient: Tensor) -> Tensor:
        found: Tensor = rpc.rpc_sync(SERVER, self._script["add_and_get"], args=(self._reference, gradient))
        return found


def _add_then_get(gradient: Tensor) -> Tensor:
    rpc.rpc_sync(SERVER, add, args=(gradient,))
    found: Tensor = rpc.rpc_sync(SERVER, get)
    return found


def give() -> Any:
    """Return a reference to the values, on the server."""
    return _values[0]


def add(gradient: Tensor) -> None:
    """Add to the values, on the server."""
    _local().add_(gradient)


def get() -> Tensor:
    """Return the values, on the server."""
    return _local()


def _local() -> Tensor:
    values: Any = _values[0]
    found: Tensor = values if isinstance(values, Tensor) else values.local_value()
    return found


# --- TorchScript, compiled on the clients and on the server


def zeros(numel: int) -> Tensor:
    """Make values on the server."""
    return torch.zeros([numel])


def add_to(values: rpc.RRef[Tensor], gradient: Tensor) -> int:
    """Add to the values on the server."""
    values.local_value().add_(gradient)
    return 0


def get_from(values: rpc.RRef[Tensor]) -> Tensor:
    """Return the values on the server."""
    found: Tensor = values.local_value()
    return found


def add_and_get(values: rpc.RRef[Tensor], gradient: Tensor) -> Tensor:
    """Add to the values on the server, and return them."""
    found: Tensor = values.local_value().add_(gradient)
    return found


_SCRIPTED = (zeros, add_to, get_from, add_and_get)
