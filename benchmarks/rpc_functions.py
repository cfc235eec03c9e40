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
        self.calls: dict[str, Callable[[Tensor], Tensor]] = {"rpc": self._add_then_get_in_python}
        self.why_not: dict[str, str] = {}
        self._script: dict[str, Any] = {}
        self._reference: Any = None
        self._index = torch.empty(0, dtype=torch.int64)
        try:
            self._script = {function.__name__: torch.jit.script(function) for function in _SCRIPTED}
        except Exception as error:  # of various types
            self.why_not = dict.fromkeys(
                ("rpc script", "rpc one call"), f"no TorchScript: {' '.join(str(error).split())[:100]}"
            )
        else:
            self.calls |= {"rpc script": self._add_then_get, "rpc one call": self._add_and_get}

    def make(self, shape: list[int]) -> None:
        """Replace the values by zeros, on the server."""
        self.drop()
        _values.append(rpc.remote(SERVER, self._script["zeros"], args=(shape,)) if self._script else torch.zeros(shape))

    def find(self, index: list[int]) -> None:
        """Get a reference to the values of the server, on a client that changes some rows; without any: all."""
        self._index = torch.tensor(index, dtype=torch.int64)
        if self._script:
            self._reference = rpc.rpc_sync(SERVER, give)

    def drop(self) -> None:
        """Release the values."""
        self._reference = None
        _values.clear()

    def get(self) -> Tensor:
        """Return the values."""
        found: Tensor = rpc.rpc_sync(SERVER, get, args=(self._index,))
        return found

    def _add_then_get_in_python(self, gradient: Tensor) -> Tensor:
        rpc.rpc_sync(SERVER, add, args=(gradient, self._index))
        return self.get()

    def _add_then_get(self, gradient: Tensor) -> Tensor:
        rpc.rpc_sync(SERVER, self._script["add_to"], args=(self._reference, gradient, self._index))
        found: Tensor = rpc.rpc_sync(SERVER, self._script["get_from"], args=(self._reference, self._index))
        return found

    def _add_and_get(self, gradient: Tensor) -> Tensor:
        arguments = self._reference, gradient, self._index
        found: Tensor = rpc.rpc_sync(SERVER, self._script["add_and_get"], args=arguments)
        return found


def give() -> Any:
    """Return a reference to the values, on the server."""
    return _values[0]


def add(gradient: Tensor, index: Tensor) -> None:
    """Add to the values, on the server."""
    change(_local(), gradient, index)


def get(index: Tensor) -> Tensor:
    """Return the values, on the server."""
    return chosen(_local(), index)


def _local() -> Tensor:
    values: Any = _values[0]
    found: Tensor = values if isinstance(values, Tensor) else values.local_value()
    return found


# --- TorchScript, compiled on the clients and on the server


def change(values: Tensor, gradient: Tensor, index: Tensor) -> None:
    """Add to rows of values; without an index to all."""
    if index.numel() == 0:
        values.add_(gradient)
    else:
        values.index_add_(0, index, gradient)


def chosen(values: Tensor, index: Tensor) -> Tensor:
    """Return rows of values; without an index the values."""
    return values if index.numel() == 0 else values.index_select(0, index)


def zeros(shape: list[int]) -> Tensor:
    """Make values on the server."""
    return torch.zeros(shape)


def add_to(values: rpc.RRef[Tensor], gradient: Tensor, index: Tensor) -> int:
    """Add to the values on the server."""
    change(values.local_value(), gradient, index)
    return 0


def get_from(values: rpc.RRef[Tensor], index: Tensor) -> Tensor:
    """Return the values on the server."""
    return chosen(values.local_value(), index)


def add_and_get(values: rpc.RRef[Tensor], gradient: Tensor, index: Tensor) -> Tensor:
    """Add to the values on the server, and return them."""
    change(values.local_value(), gradient, index)
    return chosen(values.local_value(), index)


_SCRIPTED = (zeros, add_to, get_from, add_and_get)
