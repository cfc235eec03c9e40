"""Built-in update rules of the parameter server in machine code, for a chunk of a shard and its states.

The arguments of a rule are integers of 64 bits. Kernels call a rule as follows (see `intrinsics.call_rule`)::

    rule(arrays, sent, numel, coefficients, steps)

* `arrays` is the address of the addresses of the values and of each state of the rule, which are replaced; `sent` that
  of the sent values, which may not overlap them.
* `numel` counts elements, 0 is allowed. `coefficients` is the address of six float64, of which a rule uses the first.
  `steps` counts the rules with states that were applied to the chunk, this one included.
* A rule does not allocate, fail, or need the GIL.

For each element, with value v, sent value g, and states that begin as 0:

========== ============================== ===========================================================================
zero, copy                                v = 0; v = g
add                                       v + g; integers wrap around
max, min                                  the larger or smaller, or NaN; of two zeros, or of several NaN, v
scaled_add alpha                          v + alpha g
axpby      a, b                           a g + b v
sgd        lr, momentum, weight_decay,    d = g + weight_decay v; m = momentum m + d; if nesterov is not 0:
           nesterov                       d = d + momentum m, else d = m; v = v - lr d
sgd_plain  the same                       the same without momentum and m, in which an infinite gradient would stay
adagrad    lr, eps, weight_decay          d as before; s = s + d d; v = v - lr d / (sqrt(s) + eps)
adam       lr, beta1, beta2, eps,         d as before; m = beta1 m + (1 - beta1) d; s = beta2 s + (1 - beta2) d d;
           weight_decay                   v = v - lr / (1 - beta1**t) m / (sqrt(s / (1 - beta2**t)) + eps); t: `steps`
========== ============================== ===========================================================================

The optimizers compute the formulas of torch.optim; the last bits may differ, since torch fuses some operations and
these rules fuse none. 16-bit floats are computed in float32 and rounded once; coefficients are rounded to float32 for
all but float64.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from ...errors import DtypeError
from ...tensors import dtypes


class BuiltIn(NamedTuple):
    """Properties of a rule for its callers."""

    coefficients: tuple[str, ...] = ()
    num_states: int = 0
    floats_only: bool = False


BUILT_IN: dict[str, BuiltIn] = {
    "zero": BuiltIn(),
    "copy": BuiltIn(),
    "add": BuiltIn(),
    "max": BuiltIn(),
    "min": BuiltIn(),
    "scaled_add": BuiltIn(("alpha",), 0, True),
    "axpby": BuiltIn(("a", "b"), 0, True),
    "sgd": BuiltIn(("lr", "momentum", "weight_decay", "nesterov"), 1, True),
    "adagrad": BuiltIn(("lr", "eps", "weight_decay"), 1, True),
    "adam": BuiltIn(("lr", "beta1", "beta2", "eps", "weight_decay"), 2, True),
}

KINDS = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
"""The dtypes of servers, and their names in `server_rule_loops`."""

_compiling = threading.Lock()
_addresses: dict[str, int] = {}


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states; float32 also for dtypes without such rules, so that all shards have one layout.

    >>> state_dtype(torch.bfloat16), state_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype is torch.float64 else torch.float32


def address(dtype: torch.dtype, name: str) -> int:
    """Return the address of the function that applies a built-in rule to `dtype`, valid until the process ends.

    The first call for a combination compiles it, or loads the result of an earlier process.

    Raises:
        DtypeError: The rule is not defined for the dtype.

    >>> address(torch.int8, "copy") == address(torch.uint8, "copy")
    True
    """
    rule_name = name.removesuffix("_plain")
    if BUILT_IN[rule_name].floats_only and not dtype.is_floating_point:
        known = ", ".join(known for known, rule in BUILT_IN.items() if not rule.floats_only)
        raise DtypeError(
            f"rule={rule_name!r} is not defined for {dtypes.short_name(dtype)}. It needs float64, float32, float16 or "
            f"bfloat16; other dtypes have {known}."
        )
    # All bits are kept, including those of a NaN.
    kind = f"i{8 * dtype.itemsize}" if name in ("zero", "copy") else KINDS[dtype]
    symbol = f"torchmpi_rule_{kind}_{name}"
    with _compiling:
        if symbol not in _addresses:
            _addresses[symbol] = _compiled(symbol, name, kind)
        return _addresses[symbol]


def _compiled(symbol: str, name: str, kind: str) -> int:
    from . import native_code, source_digest  # here, so that programs without a server need no llvmlite

    compiler, recipe = native_code.compiler(), source_digest()
    if not compiler.load(symbol, recipe):
        from . import compilation, server_rule_loops

        if kind == "f16" and not compiler.llvm.has_half:
            kind = "f16 by arithmetic"
        function = server_rule_loops.loop(name, kind)
        compiler.build(symbol, recipe, compilation.link_function(symbol, function))
    return compiler.find(symbol)
