"""The modes of a thread that change what torch's functions do with the tensors of a call."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_num_function_modes, num_dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack

is_key_active, _KEYS = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey
PRE_DISPATCH = _KEYS.PreDispatch
"""Active while make_fx traces before dispatch."""
get_tracing_state = torch._C._get_tracing_state
"""Returns None unless torch.jit.trace records this thread; the lengths of tensors are no numbers then."""
_RECORDING: Any = _KEYS.Python, PRE_DISPATCH, torch._C._parse_dispatch_key("Tracer")  # which no attribute has
WATCHING_KEYS = tuple(torch._C.DispatchKeySet(key).raw_repr() for key in _RECORDING)
"""The dispatch keys that are active while modes watch operators or torch.jit.trace records them, as numbers of C++."""
_TELLER = "_ZN3c104impl31tls_is_dispatch_keyset_includedENS_14DispatchKeySetE"


def are_watching() -> bool:
    """Return whether modes of this thread watch operators of torch: as make_fx, and many others.

    >>> are_watching()
    False
    """
    return bool(num_dispatch_modes() or is_key_active(PRE_DISPATCH))


_RECORDERS = {torch._C._TorchDispatchModeKey.PROXY: "make_fx", torch._C._TorchDispatchModeKey.FAKE: "FakeTensorMode"}


def recorder() -> str:
    """Return the name of the mode that records or simulates what this thread computes; '' if there is none.

    >>> recorder()
    ''
    """
    if not are_watching():
        return ""
    if is_key_active(PRE_DISPATCH):
        return "make_fx"
    active = (name for key, name in _RECORDERS.items() if torch._C._get_dispatch_mode(key) is not None)
    return next(active, "")


@cache
def key_teller() -> int:
    """Return the address of the C++ function that tells whether dispatch keys are active; 0 if torch has none."""
    function = getattr(ctypes.CDLL(torch._C.__file__), _TELLER, None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def are_active() -> bool:
    """Return whether functions of torch do something else in this thread than in a new one.

    >>> are_active()
    False
    >>> with torch.inference_mode():
    ...     are_active()
    True
    """
    return bool(
        _num_function_modes()
        or num_dispatch_modes()
        or torch.is_inference_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
