"""To an author of kernels: Python and kernels read the same fields by name, and typical mistakes do not compile."""

from __future__ import annotations

import pytest
from helpers.kernel_rig import compiled
from hypothesis import given
from hypothesis import strategies as st
from numba.core.errors import NumbaError

from torchmpi.shared_memory.compiler.compilation import inner
from torchmpi.shared_memory.kernels.intrinsics import load_acquire, store_release
from torchmpi.shared_memory.kernels.records import FastPath, GroupRecord
from torchmpi.shared_memory.typed_records import Array, Atomic, Embedded, Pointer, Record, Word
from torchmpi.tensors import modes

words = st.integers(-(1 << 63), (1 << 63) - 1)


class Inner(Record):
    first = Word()
    second = Word()


class Outer(Record):
    number = Word()
    one = Embedded(Inner)
    several = Embedded(Inner, 3, at=8)
    row = Array(2)
    pointed = Pointer(Inner)
    itself: Pointer[Outer] = Pointer("Outer")
    polled = Atomic()
    rest = Array(0)


class Derived(Outer):
    more = Word()


def test_fields_are_numbered_in_the_order_of_their_declaration():
    assert (Outer.number, Outer.one, Outer.several, Outer.row, Outer.pointed) == (0, 1, 8, 14, 16)
    assert (Outer.itself, Outer.polled, Outer.rest, Derived.more) == (17, 18, 19, 19)
    assert (Outer.FIELDS, Outer.BYTES, Inner.BYTES) == (19, 152, 16)


def test_a_field_cannot_have_the_name_of_something_else():
    with pytest.raises(TypeError, match="Wrong cannot have a field with the name cells"):

        class Wrong(Record):
            cells = Word()


@given(words, words, words)
def test_what_is_written_through_a_name_is_read_by_number_and_through_another_view(first, second, third):
    outer, pointed = Outer.new(extra=2), Inner.new()
    outer.number, outer.row[1], outer.one.second, outer.several[2].first = first, second, third, first
    outer.pointed, outer.itself, outer.rest[1] = pointed, outer, third
    outer.itself.pointed.second = second
    assert pointed.second == second
    seen = Outer(int(outer))
    assert (seen.number, seen.row[1], seen.one.second, seen.several[2].first) == (first, second, third, first)
    assert outer.cells[0] == first and outer.cells[15] == second and outer.cells[12] == first
    assert outer.cells[20] == third and seen.polled - int(outer) == 18 * 8
    assert seen.itself == outer and hash(seen) == hash(outer) and seen and not Inner(0)


@inner
def sum_of(each: Inner):
    return each.first + each.second


@inner
def everything(outer: Outer, index):
    outer.number += 1
    outer.row[index & 1] = outer.several[index].first
    outer.pointed.second = outer.rest[index]
    if outer.itself:
        outer.itself = Outer(0)
    store_release(outer.polled, load_acquire(outer.polled) + Outer.pointed)
    return sum_of(outer.pointed) + (outer.one.second if index > 1 else 0)


kernel = compiled(everything)


@given(st.integers(0, 2), st.integers(-1000, 1000))
def test_a_kernel_does_the_same_as_python(index, number):
    outer, twin, pointed = Outer.new(extra=3), Outer.new(extra=3), (Inner.new(), Inner.new())
    for each, own in zip((outer, twin), pointed, strict=True):
        each.pointed, each.itself, each.one.second, own.first = own, each, 7, number
        each.several[index].first, each.rest[index] = number + 1, number + 2
    found = kernel.everything(int(outer), index)
    twin.number += 1
    twin.row[index & 1] = twin.several[index].first
    twin.pointed.second = twin.rest[index]
    twin.itself = Outer(0)
    twin.cells[Outer.polled] += Outer.pointed
    assert found == number + number + 2 + (7 if index > 1 else 0)
    own, other = list(outer.cells), list(twin.cells)
    own[Outer.pointed] = other[Outer.pointed] = 0
    assert own == other and [each.second for each in pointed] == [number + 2] * 2


@inner
def passes_another_record(outer: Outer):
    return sum_of(outer)


@inner
def passes_a_number(outer: Outer):
    return sum_of(outer.number)


@inner
def returns_another_record(outer: Outer) -> Inner:
    return outer


@inner
def assigns_a_number(outer: Outer):
    outer.pointed = outer.number
    return 0


@inner
def assigns_another_record(outer: Outer):
    outer.pointed = outer
    return 0


@inner
def assigns_what_has_an_order(outer: Outer):
    outer.polled = 1
    return 0


@inner
def reads_a_field_of_another_record(outer: Outer):
    return outer.second


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (passes_another_record, "each is of type InnerAddress, and a call passes OuterAddress"),
        (passes_a_number, "each is of type InnerAddress, and a call passes int64"),
        (returns_another_record, "returns OuterAddress instead of InnerAddress"),
        (assigns_a_number, "Cannot cast int64 to InnerAddress"),
        (assigns_another_record, "Cannot cast OuterAddress to InnerAddress"),
        (assigns_what_has_an_order, "Outer.polled is an address and cannot be assigned"),
        (reads_a_field_of_another_record, "second"),
    ],
)
def test_the_wrong_record_does_not_compile(function, message):
    with pytest.raises(NumbaError, match=message):
        function.native()


def test_the_records_of_the_fast_path_hold_nothing_but_words():
    """Machine code reads them at 8 bytes times the number of the field."""
    assert 8 * GroupRecord.operands == GroupRecord.BYTES
    assert [FastPath.first_call, FastPath.watching_keys] == [0, FastPath.FIELDS - len(modes.WATCHING_KEYS)]
