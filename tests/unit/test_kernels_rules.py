"""To a user of rules of servers: compiled ones have the bits of references, and of the optimizers of torch."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.kernel_values import GUARD_BYTES, REAL, differing, seeded, special_values, values
from helpers.rule_references import COEFFICIENTS, OPTIMIZERS, twin
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmpi import errors
from torchmpi.parameterserver.kernels import server_rules
from torchmpi.shared_memory.compiler import native_code
from torchmpi.shared_memory.kernels import source_digest
from torchmpi.tensors import dtypes

CASES = [
    (name, dtype)
    for name, rule in server_rules.BUILT_IN.items()
    for dtype in server_rules.KINDS
    if dtype.is_floating_point or not rule.floats_only
]
NUMELS = (0, 1, 2, 3, 15, 16, 63, 64, 65, 255, 1000, 1027)
COMPILED = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
"""Numba's calling convention: first the places of the result and of an exception."""


def full(given: tuple[float, ...]) -> list[float]:
    """Return six coefficients; those after the given ones must not be used by a rule."""
    return [*given, *[9e9] * (6 - len(given))]


def in_a_room(tensor: torch.Tensor, offset: int) -> tuple[torch.Tensor, int]:
    """Return memory that contains the bytes of the tensor, `offset` from an aligned address, and their position."""
    begin = GUARD_BYTES + offset
    content = tensor.view(torch.uint8)
    room = torch.full((begin + content.numel() + GUARD_BYTES,), 0xA5, dtype=torch.uint8)
    room[begin : begin + content.numel()] = content
    return room, begin


def applied(
    address: int,
    c: tuple[float, ...],
    arrays: list[torch.Tensor],
    incoming: torch.Tensor,
    offset: int = 0,
    *,
    step: int = 1,
) -> list[torch.Tensor]:
    """Call the function, with each buffer at another offset. Only the arrays may change."""
    rooms = [in_a_room(tensor, offset + index) for index, tensor in enumerate([*arrays, incoming])]
    before = [room.clone() for room, _ in rooms]
    addresses = torch.tensor([room.data_ptr() + begin for room, begin in rooms])
    numbers, places = torch.tensor(full(c), dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    COMPILED(address)(
        *(places.data_ptr(), places[1:].data_ptr(), addresses.data_ptr(), int(addresses[-1])),
        *(incoming.numel(), numbers.data_ptr(), step),
    )
    results = []
    for (room, begin), old, array in zip(rooms, before, arrays, strict=False):
        end = begin + array.numel() * array.itemsize
        results.append(room[begin:end].clone().view(array.dtype))
        room[begin:end] = old[begin:end]
    assert all(map(torch.equal, (room for room, _ in rooms), before)), "something else was written"
    return results


def fresh(name: str, value: torch.Tensor) -> list[torch.Tensor]:
    """Return the arrays of a rule before its first application."""
    num_states = 0 if name == "sgd_plain" else server_rules.BUILT_IN[name].num_states
    return [value, *[torch.zeros(value.numel(), dtype=server_rules.state_dtype(value.dtype))] * num_states]


def runs(name: str) -> Iterator[tuple[float, ...]]:
    yield from COEFFICIENTS.get(name, [()])


def check_equal(results: list[torch.Tensor], expected: list[torch.Tensor], what: object) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert not differing(result, wanted), what


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_every_rule_and_size_for_several_steps(name, dtype):
    address = server_rules.address(dtype, name)
    for c, numel in itertools.product(runs(name), NUMELS):
        arrays = fresh(name, values(dtype, numel, seeded(numel)))
        for step in range(1, 4 if len(arrays) > 1 else 2):
            incoming = values(dtype, numel, seeded(numel, step))
            results = applied(address, c, arrays, incoming, (numel % 2) * dtype.itemsize, step=step)
            check_equal(results, twin(name, c, arrays, incoming, step), (c, numel, step))
            arrays = results


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_size_offset_and_coefficients(data):
    name, dtype = data.draw(st.sampled_from(CASES))
    numel, offset = data.draw(st.integers(0, 2000)), data.draw(st.integers(0, 70))  # also odd bytes
    generator = seeded(data.draw(st.integers(0, 1 << 20)))
    factor, decay = st.floats(-2, 2, width=16), st.floats(0, 0.96875, width=16)
    kinds = {"beta1": decay, "beta2": decay, "eps": st.floats(2**-14, 1, width=16), "nesterov": st.sampled_from([0, 1])}
    c = tuple(data.draw(kinds.get(key, factor)) for key in server_rules.BUILT_IN[name].coefficients)
    step = data.draw(st.integers(1, 1000))
    arrays = fresh(name, values(dtype, numel, generator))
    arrays[1:] = [values(state.dtype, numel, generator).square() for state in arrays[1:]]
    incoming = values(dtype, numel, generator)
    found = applied(server_rules.address(dtype, name), c, arrays, incoming, offset, step=step)
    check_equal(found, twin(name, c, arrays, incoming, step), name)


def check_special_values(name: str, dtype: torch.dtype, address: int) -> None:
    specials = special_values(dtype)
    v, g = (part.reshape(-1).contiguous() for part in torch.meshgrid(specials, specials, indexing="ij"))
    for c in runs(name):
        arrays = fresh(name, v)
        check_equal(applied(address, c, arrays, g, 1), twin(name, c, arrays, g), name)


@pytest.mark.parametrize("dtype", REAL, ids=dtypes.short_name)
def test_special_values(dtype):
    for name in server_rules.BUILT_IN:
        check_special_values(name, dtype, server_rules.address(dtype, name))


def test_copy_keeps_every_bit_of_a_nan():
    everything = torch.arange(1 << 16).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        address = server_rules.address(dtype, "copy")
        (result,) = applied(address, (), [torch.zeros_like(everything.view(dtype))], everything.view(dtype))
        assert torch.equal(result.view(torch.uint16), everything)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 3e-6)], ids=str)
@pytest.mark.parametrize(("name", "c", "make"), OPTIMIZERS, ids=str)
def test_the_optimizers_of_torch(name, c, make, dtype, tolerance):
    arrays = fresh(name, values(dtype, 999, seeded(0)))
    parameter = torch.nn.Parameter(arrays[0].clone())
    optimizer = make([parameter])
    for step in range(1, 11):
        parameter.grad = values(dtype, 999, seeded(step))
        optimizer.step()
        arrays = applied(server_rules.address(dtype, name), c, arrays, parameter.grad, step=step)
        torch.testing.assert_close(arrays[0], parameter.detach(), rtol=tolerance, atol=tolerance)


def undefined_symbols(image: bytes) -> list[str]:
    """The undefined symbols of a 64-bit ELF object file."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, table + index * size) for index in range(count)]
    found = []
    for section in sections:
        if section[1] == 2:  # a table of symbols, whose names are in the section that it links to
            names = sections[section[6]][4]
            for place in range(section[4], section[4] + section[5], 24):
                name, _, _, defined_in, _, _ = struct.unpack_from("<IBBHQQ", image, place)
                if name and not defined_in:
                    found.append(image[names + name : image.index(b"\0", names + name)].decode())
    return found


@pytest.mark.parametrize("name", ("max", "axpby", "sgd"))
def test_half_precision_without_instructions_of_the_processor(name, monkeypatch):
    monkeypatch.setattr(native_code.compiler().llvm, "has_half", False)
    symbol = f"test_without_half_{name}"
    address = server_rules._compiled(symbol, name, "f16")
    check_special_values(name, torch.float16, address)
    everything = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
    for other in (1.0, 6e-8, 60000.0):
        incoming, arrays, c = torch.full_like(everything, other), fresh(name, everything), next(runs(name))
        check_equal(applied(address, c, arrays, incoming), twin(name, c, arrays, incoming), (name, other))
    assert undefined_symbols(native_code.compiler()._read(symbol, source_digest(server_rules.__package__))) == []


def test_processors_that_convert_half_precision(monkeypatch):
    assert native_code.Compiler().llvm.has_half == ("f16c" in Path("/proc/cpuinfo").read_text())
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")  # which on x86 does not
    assert not native_code.Compiler().llvm.has_half


def test_rules_call_no_function_of_numba():
    for name, dtype in (*CASES, *(("sgd" + server_rules.PLAIN, dtype) for dtype in REAL)):
        server_rules.address(dtype, name)
    images = {
        symbol: native_code.compiler()._read(symbol, source_digest(server_rules.__package__))
        for symbol in server_rules._addresses
    }
    called = {symbol: undefined_symbols(image) for symbol, image in images.items()}
    rules = server_rules.BUILT_IN
    num_copying = 4 * sum(rule.keeps_bits for rule in rules.values())  # they depend on the size of a number alone
    num_computing = sum(not rules[name].keeps_bits for name, _ in CASES)
    assert len(called) == num_copying + num_computing + 4 * sum(bool(rule.plain) for rule in rules.values())
    assert {name for names in called.values() for name in names} <= {"memcpy", "memmove", "memset"}


def test_concurrent_requests_compile_once(monkeypatch):
    found: list[int] = []
    monkeypatch.setattr(server_rules, "_addresses", {})
    monkeypatch.setattr(server_rules, "_compiled", lambda *arguments: time.sleep(0.05) or len(found) + 1)
    threads = [
        threading.Thread(target=lambda: found.append(server_rules.address(torch.float32, "add"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 4


@pytest.mark.parametrize("name", ("sgd", "scaled_add"))
def test_rules_for_floating_point_numbers_refuse_others_with_the_remedy(name):
    with pytest.raises(errors.DtypeError, match=r"It needs float64.* other dtypes have zero, copy, add, max, min"):
        server_rules.address(torch.int32, name)
