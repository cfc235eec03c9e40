"""Built-in update rules of the parameter server in machine code, for a chunk of a shard and its states.

The signature of a rule, in C and in Numba (see `address`)::

    void rule(uint8_t **targets, uint8_t **arrays, const uint8_t *incoming, int64_t numel, const double *coefficients);
    types.void(table, table, types.CPointer(types.uint8), types.int64, types.CPointer(types.float64))
    table = types.CPointer(types.CPointer(types.uint8))

* `arrays` are the addresses of the values and of each state of the rule; `targets` those of the new values and states.
  No target overlaps an array or `incoming`. No address needs an alignment.
* `numel` counts elements, 0 is allowed. `coefficients` are always 8: those of the rule, and for `adam` in the last
  two places 1 - beta1**t and 1 - beta2**t, where t counts its steps from 1.
* It does not allocate, call other functions, fail, or need the GIL.

For each element, with value v, incoming g, and states that begin as 0:

========== ============================== ===========================================================================
zero, copy                                v = 0; v = g
add        max, min: as in a reduction    v + g (integers wrap around); the larger or smaller; of two zeros, or of
                                          several NaN, v
scaled_add alpha                          v + alpha g
axpby      a, b                           a g + b v
sgd        lr, momentum, weight_decay,    d = g + weight_decay v; m = momentum m + d; if nesterov is not 0:
           nesterov                       d = d + momentum m, else d = m; v = v - lr d
adagrad    lr, eps, weight_decay          d as before; s = s + d d; v = v - lr d / (sqrt(s) + eps)
adam       lr, beta1, beta2, eps,         d as before; m = beta1 m + (1 - beta1) d; s = beta2 s + (1 - beta2) d d;
           weight_decay                   v = v - lr / (1 - beta1**t) m / (sqrt(s / (1 - beta2**t)) + eps)
========== ============================== ===========================================================================

The optimizers are those of torch.optim, in the numbers if not in the last bit: torch fuses some of its operations, and
nothing is fused here. 16-bit floats are computed in float32 and rounded once; coefficients are rounded to float32 for
all but float64.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from ...errors import ArgumentError, DtypeError
from ...tensors import dtypes
from .reduction import LANES


class RuleCode(NamedTuple):
    """Properties of a rule that its callers need."""

    coefficients: tuple[str, ...] = ()
    num_states: int = 0
    floats_only: bool = False

    @property
    def num_coefficients(self) -> int:
        """Number of coefficients that a user gives, of the eight."""
        return len(self.coefficients)


BUILT_IN: dict[str, RuleCode] = {
    "zero": RuleCode(),
    "copy": RuleCode(),
    "add": RuleCode(),
    "max": RuleCode(),
    "min": RuleCode(),
    "scaled_add": RuleCode(("alpha",), 0, True),
    "axpby": RuleCode(("a", "b"), 0, True),
    "sgd": RuleCode(("lr", "momentum", "weight_decay", "nesterov"), 1, True),
    "adagrad": RuleCode(("lr", "eps", "weight_decay"), 1, True),
    "adam": RuleCode(("lr", "beta1", "beta2", "eps", "weight_decay"), 2, True),
}

_addresses: dict[tuple[str, str, int], int] = {}


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states; float32 also for dtypes without such rules, so that all shards have one layout.

    >>> state_dtype(torch.bfloat16), state_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype is torch.float64 else torch.float32


def address(dtype: torch.dtype, name: str) -> int:
    """Return the address of the function that applies a built-in rule to `dtype`, valid until the process ends.

    The first call for a combination compiles it, or loads the result of an earlier process. From Python, for a test::

        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_void_p)
        function = kind(address(torch.float32, "add"))
        function(targets.data_ptr(), arrays.data_ptr(), incoming.data_ptr(), numel, coefficients.data_ptr())

    >>> address(torch.int32, "add") == address(torch.uint32, "add")
    True
    """
    check(dtype, name)
    key = _function_key(dtype, name)
    if key not in _addresses:
        _addresses[key] = _compiled(key, BUILT_IN[name])  # thread-safe
    return _addresses[key]


def check(dtype: torch.dtype, name: str) -> None:
    """Raise unless there is a function for the rule and dtype.

    >>> check(torch.int64, "max")
    """
    if name not in BUILT_IN:
        raise ArgumentError(f"rule={name!r} is not built in. Use one of: {', '.join(BUILT_IN)}.")
    row = dtypes.info(dtype)
    if name in ("zero", "copy") or dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return
    short = dtypes.short_name(dtype)
    if not row.ops:
        remedy = "It can be sent with rule='copy' or 'zero'; for others convert the tensor to bfloat16 or float32."
    elif BUILT_IN[name].floats_only:
        known = [known for known, code in BUILT_IN.items() if not code.floats_only]
        remedy = f"It needs float64, float32, float16 or bfloat16; other dtypes have {', '.join(known)}."
    elif dtype is torch.bool:
        remedy = "Use rule='copy' or 'zero', or make the server of a uint8 tensor."
    elif dtype.is_complex and name != "add":
        remedy = "Complex numbers have no order: use rule='add' or 'copy', or a server of .abs()."
    else:
        return
    raise DtypeError(f"rule={name!r} is not defined for {short}. {remedy}")


def _function_key(dtype: torch.dtype, name: str) -> tuple[str, str, int]:
    """Return (kind of lane, operation, lanes per element), equal for dtypes that the same function can handle.

    >>> _function_key(torch.uint8, "max"), _function_key(torch.bfloat16, "copy"), _function_key(torch.complex64, "add")
    (('i8', 'umax', 1), ('i16', 'copy', 1), ('f32', 'sum', 2))
    """
    if name in ("zero", "copy"):
        num_parts = 2 if dtype.itemsize > 8 else 1
        return f"i{8 * dtype.itemsize // num_parts}", name, num_parts
    if name == "add":
        return LANES[dtype], "sum", 2 if dtype.is_complex else 1
    if name in ("max", "min") and not dtype.is_floating_point:
        return LANES[dtype], ("s" if dtype.is_signed else "u") + name, 1
    return LANES[dtype], name, 1


def _compiled(key: tuple[str, str, int], code: RuleCode) -> int:
    # Imported here, so that programs without a server do not load LLVM.
    from . import native_code, server_rule_ir

    lane, op, num_parts = key
    text_of = partial(server_rule_ir.module_text, lane, op, num_parts, (code.num_coefficients, code.num_states))
    return native_code.compiler().function(f"torchmpi_rule_{lane}_{op}_{num_parts}", text_of)
