"""To an author of kernels: operations on words and intrinsics compute as told, and little is loaded for them."""

from __future__ import annotations

import operator

import pytest
from helpers.kernel_rig import compiled
from helpers.processes import output_of
from hypothesis import example, given
from hypothesis import strategies as st
from numba.core.errors import NumbaError
from numba.core.registry import cpu_target

from torchmpi.shared_memory.compiler.compilation import inner
from torchmpi.shared_memory.kernels.intrinsics import load

words = st.integers(-(1 << 63), (1 << 63) - 1)


@inner
def arithmetic(which, a, b):
    if which < 3:
        return a + b if which == 0 else a - b if which == 1 else a * b
    if which < 6:
        return a & b if which == 3 else a | b if which == 4 else a ^ b
    return min(a, b) if which == 6 else max(a, b)


@inner
def divided(which, a, b):
    if which < 2:
        return a // b if which == 0 else a % b
    return a << (b & 63) if which == 2 else a >> (b & 63)


@inner
def compared(a, b):
    smaller, equal, larger = a < b, a == b, a > b
    if (a <= b) != (smaller or equal) or (a >= b) != (larger or equal) or (a != b) == equal:
        return -1
    return 1 if smaller else 2 if equal else 4


kernel = compiled(arithmetic, divided, compared)


def as_word(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@given(words, words)
@example(-1, 1)
@example(5, 5)
def test_operations_on_words_are_those_of_python_modulo_two_to_the_power_of_64(a, b):
    expected = [a + b, a - b, a * b, a & b, a | b, a ^ b, min(a, b), max(a, b)]
    assert [kernel.arithmetic(which, a, b) for which in range(8)] == [as_word(each) for each in expected]
    assert kernel.compared(a, b) == (1 if a < b else 2 if a == b else 4)
    assert kernel.divided(2, a, b) == as_word(a << (b & 63)) and kernel.divided(3, a, b) == a >> (b & 63)


@given(words, words.filter(lambda number: number not in (0, -1)))
@example(-7, 2)
@example(7, -2)
def test_divisions_round_down(a, b):
    assert [kernel.divided(which, a, b) for which in range(2)] == [operator.floordiv(a, b), operator.mod(a, b)]


@inner
def passes_too_much(address):
    return load(address, address)


@inner
def passes_a_tuple(address):
    return load((address, address))


@pytest.mark.parametrize(
    ("function", "message"),
    [(passes_too_much, "load takes 1 arguments"), (passes_a_tuple, "load takes int64, and a call passes UniTuple")],
)
def test_wrong_arguments_of_an_intrinsic_do_not_compile(function, message):
    with pytest.raises(NumbaError, match=message):
        function.native()


def compile_some_kernels() -> None:
    from torchmpi.parameterserver.kernels import shard_passes
    from torchmpi.shared_memory.kernels import movement

    for kernel in (movement.barrier, movement.broadcast, shard_passes.pass_over):
        kernel.native()
    print(len(cpu_target.target_context._registries), len(cpu_target.typing_context._registries))


@pytest.mark.slow
def test_kernels_are_compiled_without_what_numba_knows_about_objects():
    """A quarter of a second, and more for every operation."""
    assert output_of(compile_some_kernels) == (0, "0 0\n")
