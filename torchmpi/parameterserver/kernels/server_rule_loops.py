"""Loops over the elements of a chunk, which Numba compiles and vectorizes, for the rules of `server_rules`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from ...shared_memory.compiler.compilation import inlined, inner
from ...shared_memory.kernels.intrinsics import bits_of_float, float_of_bits, half_conversions, pointer_to
from ...shared_memory.typed_records import Words


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


@inlined
def _as_given(c, steps):
    return c[0], c[1], c[2], c[3], c[4], c[5], 0.0


@inlined
def with_bias_corrections(c, steps):
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


def loop(given: Callable[..., Any], num_states: int, kind: str, *, corrects_bias: bool) -> Callable[..., int]:
    """Return the function that applies a formula to numbers of a kind, for Numba to compile (see server_rules)."""
    formula = inlined(given)
    in_memory, widened, narrowed, wide = _NUMBERS[kind]
    numbers_at, coefficients_at = pointer_to(in_memory), pointer_to(types.float64)
    states_at = pointer_to(types.float64 if kind == "f64" else types.float32)
    prepared = with_bias_corrections if corrects_bias else _as_given

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
