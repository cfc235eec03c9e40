"""The modes of a thread that change what torch's functions do with the tensors of a call."""

from __future__ import annotations

import torch

_num_function_modes, _num_dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


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
        or _num_dispatch_modes()
        or torch.is_inference_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
