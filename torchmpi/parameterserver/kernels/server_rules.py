"""Built-in update rules of the parameter server in machine code, for a chunk of a shard and its states.

The arguments of a rule are integers of 64 bits. Kernels call a rule as follows (see `intrinsics.call_rule`)::

    rule(arrays, sent, numel, coefficients, steps)

* `arrays` is the address of the addresses of the values and of each state of the rule, which are replaced; `sent` that
  of the sent values, which may not overlap them.
* `numel` counts elements, 0 is allowed. `coefficients` is the address of six float64, of which a rule uses the first.
  `steps` counts the rules with states that were applied to the chunk, this one included.
* A rule does not allocate, fail, or need the GIL.

A row of `BUILT_IN` has the formula of a rule: a function of the coefficients and, of one element, the value, the sent
value and the states, which begin as 0. It returns the new value, and the new states. Numba compiles the formula
(`server_rule_loops`): for float32 if the server has 16-bit floats, otherwise for its dtype. Integers wrap around.

The optimizers compute the formulas of torch.optim; the last bits may differ, since torch fuses some operations and
these rules fuse none. 16-bit floats are computed in float32 and rounded once; coefficients are rounded to float32 for
all but float64.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ...errors import DtypeError
from ...tensors import dtypes


class BuiltIn(NamedTuple):
    """Properties of a rule for its callers."""

    formula: Callable[..., Any]
    coefficients: tuple[str, ...] = ()
    num_states: int = 0
    floats_only: bool = False
    keeps_bits: bool = False
    """Whether it computes nothing, and keeps all bits of a NaN."""
    corrects_bias: bool = False
    """Whether the coefficients are those of :func:`server_rule_loops.with_bias_corrections`."""
    without: str = ""
    """A coefficient without which, if it is 0, the rule has another formula and no state."""
    plain: Callable[..., Any] | None = None
    """That formula."""

    def is_plain(self, coefficients: tuple[float, ...]) -> bool:
        """Return whether the rule has no state with these coefficients.

        >>> BUILT_IN["sgd"].is_plain((0.1, 0.0, 0.0, 0.0)), BUILT_IN["adagrad"].is_plain((0.1, 0.0, 0.0))
        (True, False)
        """
        return bool(self.without) and coefficients[self.coefficients.index(self.without)] == 0


# In torch, the position determines which zero of (0, -0), or which NaN, is kept. Here that of the server is kept.


def _max(c: Any, v: Any, g: Any) -> Any:
    return g if (v == v) & (not g <= v) else v


def _min(c: Any, v: Any, g: Any) -> Any:
    return g if (v == v) & (not g >= v) else v


def _sgd(c: Any, v: Any, g: Any, m: Any) -> Any:
    lr, momentum, weight_decay, nesterov = c[:4]
    d = g + weight_decay * v
    m = momentum * m + d
    return v - lr * (d + momentum * m if nesterov != 0 else m), m


def _sgd_plain(c: Any, v: Any, g: Any) -> Any:
    return v - c[0] * (g + c[2] * v)  # without m, in which an infinite gradient would stay


def _adagrad(c: Any, v: Any, g: Any, s: Any) -> Any:
    lr, eps, weight_decay = c[:3]
    d = g + weight_decay * v
    s = s + d * d
    return v - (lr * d) / (math.sqrt(s) + eps), s


def _adam(c: Any, v: Any, g: Any, m: Any, s: Any) -> Any:
    step, eps, beta1, rest1, beta2, rest2, weight_decay = c
    d = g + weight_decay * v
    m = beta1 * m + rest1 * d
    s = beta2 * s + rest2 * d * d
    return v - (step * m) / (math.sqrt(s) + eps), m, s


def _buffered(c: Any, v: Any, g: Any, m: Any, s: Any) -> Any:
    weight, lr, size = c[:3]
    nothing = s - s
    m = m + weight * g
    s = s + 1
    return (v - lr * (m / size), nothing, nothing) if s >= size else (v, m, s)


_Row, _OfFloats = BuiltIn, partial(BuiltIn, floats_only=True)
BUILT_IN: dict[str, BuiltIn] = {
    "zero": _Row(lambda c, v, g: v ^ v, keeps_bits=True),
    "copy": _Row(lambda c, v, g: g, keeps_bits=True),
    "add": _Row(lambda c, v, g: v + g),
    "max": _Row(_max),
    "min": _Row(_min),
    "scaled_add": _OfFloats(lambda c, v, g: v + c[0] * g, ("alpha",)),
    "axpby": _OfFloats(lambda c, v, g: c[0] * g + c[1] * v, ("a", "b")),
    "sgd": _OfFloats(_sgd, ("lr", "momentum", "weight_decay", "nesterov"), 1, without="momentum", plain=_sgd_plain),
    "adagrad": _OfFloats(_adagrad, ("lr", "eps", "weight_decay"), 1),
    "buffered": _OfFloats(_buffered, ("weight", "lr", "size"), 2),
    "adam": _OfFloats(_adam, ("lr", "beta1", "beta2", "eps", "weight_decay"), 2, corrects_bias=True),
}
"""All built-in rules by name."""
PLAIN = "_plain"

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

    The first call for a combination compiles it, or loads the result of an earlier process. The name of a rule that is
    to be applied without its state ends with `PLAIN`.

    Raises:
        DtypeError: The rule is not defined for the dtype.

    >>> address(torch.int8, "copy") == address(torch.uint8, "copy")
    True
    """
    rule_name = name.removesuffix(PLAIN)
    if BUILT_IN[rule_name].floats_only and not dtype.is_floating_point:
        known = ", ".join(known for known, rule in BUILT_IN.items() if not rule.floats_only)
        raise DtypeError(
            f"rule={rule_name!r} is not defined for {dtypes.short_name(dtype)}. It needs float64, float32, float16 or "
            f"bfloat16; other dtypes have {known}."
        )
    kind = f"i{8 * dtype.itemsize}" if BUILT_IN[rule_name].keeps_bits else KINDS[dtype]
    symbol = f"torchmpi_rule_{kind}_{name}"
    with _compiling:
        if symbol not in _addresses:
            _addresses[symbol] = _compiled(symbol, name, kind)
        return _addresses[symbol]


def _compiled(symbol: str, name: str, kind: str) -> int:
    from ...shared_memory.compiler import native_code
    from ...shared_memory.kernels import source_digest  # here, so that programs without a server need no llvmlite

    compiler, recipe = native_code.compiler(), source_digest(__package__)
    if not compiler.load(symbol, recipe):
        from ...shared_memory.compiler import compilation
        from . import server_rule_loops

        if kind == "f16" and not compiler.llvm.has_half:
            kind = "f16 by arithmetic"
        rule = BUILT_IN[name.removesuffix(PLAIN)]
        formula, num_states = (rule.plain, 0) if name.endswith(PLAIN) else (rule.formula, rule.num_states)
        assert formula is not None
        function = server_rule_loops.loop(formula, num_states, kind, corrects_bias=rule.corrects_bias)
        compiler.build(symbol, recipe, compilation.link_function(symbol, function))
    return compiler.find(symbol)
