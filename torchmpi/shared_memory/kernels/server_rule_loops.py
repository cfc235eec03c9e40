"""The built-in rules of the parameter server: loops over the elements of a chunk, which Numba compiles and vectorizes.

A formula takes the coefficients and, of one element, the value, the sent value and the states. The result is the new
value and the new states. Its numbers are float32 for 16-bit floats, otherwise those of the server.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from ..typed_records import Words
from .compilation import inlined, inner
from .intrinsics import bits_of_float, float_of_bits, half_conversions, pointer_to


@inlined
def _same(number):
    return number


@inlined
def _widened_bfloat(number):
    return float_of_bits(np.uint32(number) << 16)


@inlined
def _narrowed_bfloat(number):
    bits = bits_of_float(number)
    rounded = np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    return rounded if number == number else np.uint16(0xFFFF)  # the NaN that torch writes


_NUMBERS: dict[str, tuple[Any, ...]] = {
    "f64": (types.float64, _same, _same, np.float64),
    "f32": (types.float32, _same, _same, np.float32),
    "f16": (types.uint16, *half_conversions(has_half=True), np.float32),
    "f16 by arithmetic": (types.uint16, *half_conversions(has_half=False), np.float32),
    "bf16": (types.uint16, _widened_bfloat, _narrowed_bfloat, np.float32),
    **{f"i{bits}": (types.Integer.from_bitwidth(bits, True), _same, _same, np.float64) for bits in (8, 16, 32, 64)},
    "u8": (types.uint8, _same, _same, np.float64),
}
"""For each kind of numbers: type in memory, conversions for the formula and back, type of the coefficients."""


# In torch, the position determines which zero of (0, -0), or which NaN, is kept. Here that of the server is kept.


@inlined
def _max(c, v, g):
    return g if (v == v) & (not g <= v) else v


@inlined
def _min(c, v, g):
    return g if (v == v) & (not g >= v) else v


@inlined
def _sgd(c, v, g, m):
    lr, momentum, weight_decay, nesterov = c[:4]
    d = g + weight_decay * v
    m = momentum * m + d
    return v - lr * (d + momentum * m if nesterov != 0 else m), m


@inlined
def _sgd_plain(c, v, g):
    return v - c[0] * (g + c[2] * v)


@inlined
def _adagrad(c, v, g, s):
    lr, eps, weight_decay = c[:3]
    d = g + weight_decay * v
    s = s + d * d
    return v - (lr * d) / (math.sqrt(s) + eps), s


@inlined
def _adam(c, v, g, m, s):
    step, eps, beta1, rest1, beta2, rest2, weight_decay = c
    d = g + weight_decay * v
    m = beta1 * m + rest1 * d
    s = beta2 * s + rest2 * d * d
    return v - (step * m) / (math.sqrt(s) + eps), m, s


_FORMULAS: dict[str, tuple[Any, int]] = {
    "zero": (inlined(lambda c, v, g: v ^ v), 0),
    "copy": (inlined(lambda c, v, g: g), 0),
    "add": (inlined(lambda c, v, g: v + g), 0),
    "max": (_max, 0),
    "min": (_min, 0),
    "scaled_add": (inlined(lambda c, v, g: v + c[0] * g), 0),
    "axpby": (inlined(lambda c, v, g: c[0] * g + c[1] * v), 0),
    "sgd": (_sgd, 1),
    "sgd_plain": (_sgd_plain, 0),
    "adagrad": (_adagrad, 1),
    "adam": (_adam, 2),
}
"""The formula of each rule, and its number of states."""


@inlined
def _as_given(c, steps):
    return c[0], c[1], c[2], c[3], c[4], c[5], 0.0


@inlined
def _with_bias_corrections(c, steps):
    """Apply the bias corrections of Adam to step size and eps, once and in float64, instead of to each element."""
    lr, beta1, beta2, eps, weight_decay = c[0], c[1], c[2], c[3], c[4]
    root = math.sqrt(1.0 - _power(beta2, steps))
    return lr * root / (1.0 - _power(beta1, steps)), eps * root, beta1, 1.0 - beta1, beta2, 1.0 - beta2, weight_decay


@inner
def _power(base, exponent):
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def loop(name: str, kind: str) -> Callable[..., int]:
    """Return the function that applies a rule to numbers of a kind, for Numba to compile (see server_rules)."""
    formula, num_states = _FORMULAS[name]
    in_memory, widened, narrowed, wide = _NUMBERS[kind]
    numbers_at, coefficients_at = pointer_to(in_memory), pointer_to(types.float64)
    states_at = pointer_to(types.float64 if kind == "f64" else types.float32)
    prepared = _with_bias_corrections if name == "adam" else _as_given

    @inner
    def rounded(coefficients, steps):
        a, b, c, d, e, f, g = prepared(coefficients_at(coefficients), steps)
        return wide(a), wide(b), wide(c), wide(d), wide(e), wide(f), wide(g)

    def without_states(arrays: Words, sent, numel, coefficients, steps):
        values, incoming, c = numbers_at(arrays[0]), numbers_at(sent), rounded(coefficients, steps)
        for i in range(numel):
            values[i] = narrowed(formula(c, widened(values[i]), widened(incoming[i])))
        return 0

    def with_one(arrays: Words, sent, numel, coefficients, steps):
        values, incoming, c = numbers_at(arrays[0]), numbers_at(sent), rounded(coefficients, steps)
        first = states_at(arrays[1])
        for i in range(numel):
            value, first[i] = formula(c, widened(values[i]), widened(incoming[i]), first[i])
            values[i] = narrowed(value)
        return 0

    def with_two(arrays: Words, sent, numel, coefficients, steps):
        values, incoming, c = numbers_at(arrays[0]), numbers_at(sent), rounded(coefficients, steps)
        first, second = states_at(arrays[1]), states_at(arrays[2])
        for i in range(numel):
            value, first[i], second[i] = formula(c, widened(values[i]), widened(incoming[i]), first[i], second[i])
            values[i] = narrowed(value)
        return 0

    return (without_states, with_one, with_two)[num_states]
