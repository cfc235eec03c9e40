"""What a thread of the reduction kernel computes on the GPU: elements as the bits of 64-bit words.

A thread takes 16 bytes at a time of every source, as two words, whatever the data type. Numbers shorter than a word are
its *lanes*. What is carried from source to source is a tuple of words too: two of them, or four where 16-bit floats
are summed as float32. Everything here also runs under Numba's simulator.

The semantics are those of :mod:`torchmpi.shared_memory.kernels.reduction`, which see.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import cuda as _cuda

from .cuda_intrinsics import (
    UNIT_BYTES,
    Function,
    load,
    multiply_double,
    multiply_single,
    narrow_half,
    store,
    store_lane,
    widen_half,
)

cuda: Any = _cuda  # what it offers differs between Numba's own target, numba-cuda and the simulator

_ZERO, _ONE = np.uint64(0), np.uint64(1)
_16, _32, _48 = (np.uint64(bits) for bits in (16, 32, 48))
_LOW_HALF = np.uint64(0xFFFFFFFF)
_EVEN, _ODD = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFF0000FFFF0000)
_SHORT, _BELOW_HALF = np.uint64(0xFFFF), np.uint64(0x7FFF)

LANE_BITS = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16, "i8": 8, "i16": 16, "i32": 32, "i64": 64}


def kernel(lane: str, op: str, num_parts: int, num_sources: int) -> Function:
    """The function of a thread, for ``cuda.jit``: ``reduce(sources, out, num_lanes)``, all addresses.

    The sources begin at multiples of 16 bytes, and may be read up to the next one behind their end; `out` begins at
    a multiple of its lane and may be one of the sources.
    """
    begin, combine, finish = _steps(lane, op, num_parts, num_sources)
    lane_bytes = LANE_BITS[lane] // 8
    lanes = UNIT_BYTES // lane_bytes
    store_some = _store_some(lane_bytes)

    def reduce(sources: Any, out: Any, num_lanes: Any) -> None:
        unit, step = cuda.grid(1), cuda.gridsize(1)
        num_units = (num_lanes + lanes - 1) // lanes
        is_aligned = out & (UNIT_BYTES - 1) == 0
        while unit < num_units:
            at = unit * UNIT_BYTES
            first, second = load(sources[0] + at)
            state = begin(first, second)
            for index in range(1, num_sources):
                first, second = load(sources[index] + at)
                state = combine(state, first, second)
            first, second = finish(state)
            left = num_lanes - unit * lanes
            if is_aligned and left >= lanes:
                store(out + at, first, second)
            else:
                store_some(out + at, first, second, left)
            unit += step

    return reduce


def _store_some(lane_bytes: int) -> Function:
    """Lane by lane: at the end, or where the output does not begin at a multiple of 16 bytes."""
    store_one, lanes, shift = store_lane(8 * lane_bytes), 8 // lane_bytes, np.uint64(8 * lane_bytes % 64)

    @cuda.jit(device=True)
    def store_some(out: Any, first: Any, second: Any, left: Any) -> None:
        for index in range(lanes):
            if index < left:
                store_one(out + index * lane_bytes, first)
            if index + lanes < left:
                store_one(out + (index + lanes) * lane_bytes, second)
            first, second = first >> shift, second >> shift

    return store_some


class _Steps(NamedTuple):
    """What is carried after the first source, after each other, and its end: two words."""

    begin: Function
    combine: Function
    finish: Function


def _steps(lane: str, op: str, num_parts: int, num_sources: int) -> _Steps:
    if lane in ("f16", "bf16"):
        return _of_short_floats(lane, _on_singles(op), _average_of_singles(op, num_sources))
    if (lane, op) == ("f64", "cprod"):
        return _Steps(_pair, _complex_doubles, _same)
    if lane == "f64":
        return _of_words(_pass_on, _on_doubles(op), _average_of_doubles(op, num_sources))
    if lane == "f32":
        return _of_words(_pass_on, _on_singles(op), _average_of_singles(op, num_sources))
    if op in ("land", "lor", "lxor"):
        return _of_words(_truth(LANE_BITS[lane]), _BITWISE[f"b{op[1:]}"], _pass_on)
    return _of_words(_pass_on, _BITWISE.get(op) or _on_integers(LANE_BITS[lane], op), _pass_on)


# --- from one word to what is carried


@cuda.jit(device=True)
def _pass_on(word: Any) -> Any:
    return word


@cuda.jit(device=True)
def _pair(first: Any, second: Any) -> Any:
    return first, second


@cuda.jit(device=True)
def _same(state: Any) -> Any:
    return state


def _of_words(start: Function, combine_words: Function, end: Function) -> _Steps:
    @cuda.jit(device=True)
    def begin(first: Any, second: Any) -> Any:
        return start(first), start(second)

    @cuda.jit(device=True)
    def combine(state: Any, first: Any, second: Any) -> Any:
        return combine_words(state[0], start(first)), combine_words(state[1], start(second))

    @cuda.jit(device=True)
    def finish(state: Any) -> Any:
        return end(state[0]), end(state[1])

    return _Steps(begin, combine, finish)


def _of_short_floats(lane: str, combine_words: Function, end: Function) -> _Steps:
    widen, narrow = (_widen_halves, _narrow_halves) if lane == "f16" else (_widen_bfloats, _narrow_bfloats)

    @cuda.jit(device=True)
    def begin(first: Any, second: Any) -> Any:
        a, b = widen(first)
        c, d = widen(second)
        return a, b, c, d

    @cuda.jit(device=True)
    def combine(state: Any, first: Any, second: Any) -> Any:
        a, b = widen(first)
        c, d = widen(second)
        return (
            combine_words(state[0], a),
            combine_words(state[1], b),
            combine_words(state[2], c),
            combine_words(state[3], d),
        )

    @cuda.jit(device=True)
    def finish(state: Any) -> Any:
        return narrow(end(state[0]), end(state[1])), narrow(end(state[2]), end(state[3]))

    return _Steps(begin, combine, finish)


# --- two float32 in a word


@cuda.jit(device=True)
def _low(word: Any) -> Any:
    return np.uint32(word & _LOW_HALF).view(np.float32)


@cuda.jit(device=True)
def _high(word: Any) -> Any:
    return np.uint32(word >> _32).view(np.float32)


@cuda.jit(device=True)
def _join(low: Any, high: Any) -> Any:
    return np.uint64(low.view(np.uint32)) | (np.uint64(high.view(np.uint32)) << _32)


def _on_singles(op: str) -> Function:
    if op == "cprod":
        return _complex_singles
    step = _REAL[op]

    @cuda.jit(device=True)
    def combine(a: Any, b: Any) -> Any:
        return _join(step(_low(a), _low(b)), step(_high(a), _high(b)))

    return combine


def _average_of_singles(op: str, num_sources: int) -> Function:
    if op != "avg":
        return _pass_on
    divisor = np.float32(num_sources)

    @cuda.jit(device=True)
    def average(word: Any) -> Any:
        return _join(_low(word) / divisor, _high(word) / divisor)

    return average


@cuda.jit(device=True)
def _complex_singles(a: Any, b: Any) -> Any:
    real = multiply_single(_low(a), _low(b)) - multiply_single(_high(a), _high(b))
    return _join(real, multiply_single(_low(a), _high(b)) + multiply_single(_high(a), _low(b)))


# --- a float64 in a word


def _on_doubles(op: str) -> Function:
    step = _REAL[op]

    @cuda.jit(device=True)
    def combine(a: Any, b: Any) -> Any:
        return step(a.view(np.float64), b.view(np.float64)).view(np.uint64)

    return combine


def _average_of_doubles(op: str, num_sources: int) -> Function:
    if op != "avg":
        return _pass_on
    divisor = np.float64(num_sources)

    @cuda.jit(device=True)
    def average(word: Any) -> Any:
        return (word.view(np.float64) / divisor).view(np.uint64)

    return average


@cuda.jit(device=True)
def _complex_doubles(state: Any, first: Any, second: Any) -> Any:
    a, b = state[0].view(np.float64), state[1].view(np.float64)
    c, d = first.view(np.float64), second.view(np.float64)
    real = multiply_double(a, c) - multiply_double(b, d)
    imaginary = multiply_double(a, d) + multiply_double(b, c)
    return real.view(np.uint64), imaginary.view(np.uint64)


# --- steps on numbers


@cuda.jit(device=True)
def _add(a: Any, b: Any) -> Any:
    return a + b


@cuda.jit(device=True)
def _multiply(a: Any, b: Any) -> Any:
    return a * b


@cuda.jit(device=True)
def _least(a: Any, b: Any) -> Any:
    """The first NaN, if there is one; of two zeros also the first."""
    return b if a == a and not b >= a else a


@cuda.jit(device=True)
def _most(a: Any, b: Any) -> Any:
    return b if a == a and not b <= a else a


_REAL = {"sum": _add, "avg": _add, "prod": _multiply, "min": _least, "max": _most}


# --- four 16-bit floats in a word, as twice two float32


@cuda.jit(device=True)
def _widen_bfloats(word: Any) -> Any:
    """Those at even places, and those at odd ones: a bfloat16 is the upper half of a float32."""
    return (word & _EVEN) << _16, word & _ODD


@cuda.jit(device=True)
def _narrow_bfloats(even: Any, odd: Any) -> Any:
    low = _round_bfloat(even & _LOW_HALF) | (_round_bfloat(even >> _32) << _32)
    high = _round_bfloat(odd & _LOW_HALF) | (_round_bfloat(odd >> _32) << _32)
    return low | (high << _16)


@cuda.jit(device=True)
def _round_bfloat(bits: Any) -> Any:
    """The bfloat16 next to a float32, ties to even; every NaN becomes the one of torch's own conversion."""
    number = np.uint32(bits).view(np.float32)
    rounded = (bits + _BELOW_HALF + ((bits >> _16) & _ONE)) >> _16
    return rounded if number == number else _SHORT


@cuda.jit(device=True)
def _widen_halves(word: Any) -> Any:
    low = _join(widen_half(word & _SHORT), widen_half((word >> _16) & _SHORT))
    return low, _join(widen_half((word >> _32) & _SHORT), widen_half(word >> _48))


@cuda.jit(device=True)
def _narrow_halves(low: Any, high: Any) -> Any:
    first = narrow_half(_low(low)) | (narrow_half(_high(low)) << _16)
    return first | (narrow_half(_low(high)) << _32) | (narrow_half(_high(high)) << _48)


# --- integers in a word


@cuda.jit(device=True)
def _and(a: Any, b: Any) -> Any:
    return a & b


@cuda.jit(device=True)
def _or(a: Any, b: Any) -> Any:
    return a | b


@cuda.jit(device=True)
def _exclusive_or(a: Any, b: Any) -> Any:
    return a ^ b


_BITWISE = {"band": _and, "bor": _or, "bxor": _exclusive_or}


def _top_bits(bits: int) -> np.uint64:
    """The highest bit of each lane."""
    return np.uint64(sum(1 << (bits * lane + bits - 1) for lane in range(64 // bits)))


def _truth(bits: int) -> Function:
    """1 in each lane that is not 0, for all lanes at once."""
    top, rest, shift = _top_bits(bits), ~_top_bits(bits), np.uint64(bits - 1)

    @cuda.jit(device=True)
    def truth(word: Any) -> Any:
        return ((((word & rest) + rest) | word) & top) >> shift

    return truth


def _on_integers(bits: int, op: str) -> Function:
    if op == "sum":
        return _sum_of_lanes(bits)
    step = {"prod": _multiply, "umin": _lower, "umax": _higher, "smin": _lower, "smax": _higher}[op]
    lanes, width, mask = 64 // bits, np.uint64(bits), np.uint64((1 << bits) - 1)
    # Signed numbers are in the order of unsigned ones with the sign turned.
    turned = np.uint64(1 << (bits - 1)) if op in ("smin", "smax") else _ZERO

    @cuda.jit(device=True)
    def combine(a: Any, b: Any) -> Any:
        result, at = _ZERO, _ZERO
        for _ in range(lanes):
            lane = step(((a >> at) & mask) ^ turned, ((b >> at) & mask) ^ turned) & mask
            result |= (lane ^ turned) << at
            at += width
        return result

    return combine


def _sum_of_lanes(bits: int) -> Function:
    """All lanes at once: the carry out of a lane's highest bit is dropped."""
    top, rest = _top_bits(bits), ~_top_bits(bits)

    @cuda.jit(device=True)
    def combine(a: Any, b: Any) -> Any:
        return ((a & rest) + (b & rest)) ^ ((a ^ b) & top)

    return combine


@cuda.jit(device=True)
def _lower(a: Any, b: Any) -> Any:
    return b if b < a else a


@cuda.jit(device=True)
def _higher(a: Any, b: Any) -> Any:
    return b if b > a else a
