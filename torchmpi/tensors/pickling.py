"""Pickles of objects with tensors of every dtype."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from typing import Any

import torch

_PICKLED_BY_TORCH = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip


def dumps(value: Any) -> bytes:
    """Return a pickle, for ``pickle.loads``. ``pickle.dumps`` fails on dtypes that have no class of storage.

    >>> pickle.loads(dumps([torch.ones(2, dtype=torch.uint16)]))
    [tensor([1, 1], dtype=torch.uint16)]
    """
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.dtype in _PICKLED_BY_TORCH:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return _load, (buffer.getvalue(),)


def _load(saved: bytes) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(io.BytesIO(saved), weights_only=True)
    return tensor


_REDUCERS: ChainMap[Any, Any] = ChainMap({torch.Tensor: _reduce, torch.nn.Parameter: _reduce}, copyreg.dispatch_table)


class _Pickler(pickle.Pickler):
    dispatch_table = _REDUCERS
