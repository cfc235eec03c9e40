"""Linear layers of one row, as in generation of one text: machine code that reads the weight at the pace of memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..tensors import modes
from .kernels import compiled

_PLAIN = Tensor, nn.Parameter
_LEAST_NUMEL = 1 << 14
"""Of a weight: with a smaller one, torch takes no longer than the checks of this module."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what ``torch.nn.functional.linear`` does, but for the order of additions.

    >>> row, weight = torch.arange(200.0), torch.eye(200)
    >>> with torch.no_grad():
    ...     torch.equal(linear(row, weight), row)
    True
    """
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or not modes.are_none()
        or weight.numel() < _LEAST_NUMEL
        or input.numel() != (num_inputs := weight.shape[-1])
        or input.shape[-1] != num_inputs
        or not (input.dtype is weight.dtype is torch.float32 and input.is_cpu and weight.is_cpu)
        or not (input.is_contiguous() and weight.is_contiguous())
        or not (type(input) in _PLAIN and type(weight) in _PLAIN)
        or torch.get_num_threads() > 1
        or (multiply := compiled("multiply_row")) is None
    ):
        return functional.linear(input, weight, bias)
    num_outputs = weight.shape[0]
    output = input.new_empty(1, num_outputs)
    multiply(output.data_ptr(), weight.data_ptr(), input.data_ptr(), num_outputs, num_inputs)
    if bias is not None:
        output += bias
    return output if input.dim() == 2 else output.view(*input.shape[:-1], num_outputs)
