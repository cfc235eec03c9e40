"""The C functions of DLPack's exchange API, with which machine code reads the description of a tensor."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

_NAME = b"dlpack_exchange_api"
_MAJOR = 1
# struct DLPackExchangeAPI: version, predecessor, then functions; the fourth fills in a DLTensor and owns nothing.
_DESCRIBE = 5
_TENSOR_FIELDS, _DTYPE_WORD = 6, 2


@lru_cache(maxsize=1)
def describer() -> int:
    """Return the address of ``int describe(PyObject *tensor, DLTensor *out)``; 0 if this torch has none."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        address = get(capsule, _NAME)
    except ValueError:  # the attribute belongs to another library
        return 0
    table = (ctypes.c_uint64 * (_DESCRIBE + 1)).from_address(address)
    is_known = table[0] & 0xFFFFFFFF == _MAJOR
    return table[_DESCRIBE] if is_known else 0


@lru_cache(maxsize=64)
def dtype_number(dtype: torch.dtype) -> int:
    """Return DLPack's code, bits and lanes of a dtype as one number, as in the description of a tensor.

    >>> dtype_number(torch.float32) == dtype_number(torch.float64) or describer() == 0
    False
    """
    words = (ctypes.c_int64 * _TENSOR_FIELDS)()
    describe = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(describer())
    describe(torch.empty(0, dtype=dtype, device="cpu"), ctypes.addressof(words))
    return words[_DTYPE_WORD] >> 32
