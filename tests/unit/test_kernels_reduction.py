"""To a user of reductions: native ones have the bits of their reference, for all positions of elements."""

from __future__ import annotations

import itertools
import os
import resource
import time
from functools import partial

import numpy as np
import pytest
import torch
from helpers.kernel_values import ALL, COMPLEX, GUARD_BYTES, REAL, differing, seeded, special_values, values
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmpi import errors
from torchmpi.backends import rank_order
from torchmpi.shared_memory.compiler import native_code
from torchmpi.shared_memory.kernels import reduction, reduction_ir
from torchmpi.shared_memory.kernels.reduction_key import FunctionKey
from torchmpi.tensors import dtypes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # experimental according to torch

NUM_SOURCES = (1, 2, 3, 5, 8)
NUMELS = (0, 1, 2, 3, 63, 64, 65, 1000, 4099)
ALL_SOURCES = -1  # positions of the result: each of the sources
_NUMPY = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
_NUMPY |= {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
_NUMPY_BOOL = {"min": np.logical_and, "band": np.logical_and, "land": np.logical_and}
_NUMPY_BOOL |= {"max": np.logical_or, "bor": np.logical_or, "lor": np.logical_or, "bxor": np.logical_xor}


def twin(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    dtype = parts[0].dtype
    if dtype.is_complex and op != "prod":
        # Part by part, since torch multiplies by 1 + 0j before it adds complex numbers: inf + 1j would become nan.
        return torch.view_as_complex(twin([torch.view_as_real(part) for part in parts], op))
    if dtype.is_complex or (op in ("sum", "avg", "prod") and dtype.is_floating_point):
        result = torch.empty_like(parts[0])
        rank_order.combine(parts, op, result)
        return result
    if dtype.is_floating_point:
        result = parts[0].clone()
        for part in parts[1:]:
            better = part < result if op == "min" else part > result
            result = torch.where(better | (part.isnan() & ~result.isnan()), part, result)
        return result
    arrays = [part.view(torch.uint8).numpy() if dtype is torch.bool else part.numpy() for part in parts]
    if dtype is torch.bool or op in ("land", "lor"):
        total = arrays[0] != 0
        for array in arrays[1:]:
            total = _NUMPY_BOOL[op](total, array != 0)
        return torch.from_numpy(total.astype(arrays[0].dtype)).view(dtype)
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = _NUMPY[op](total, array)
    return torch.from_numpy(total)


def reduced(parts: list[torch.Tensor], address: int, place: int | None, offset: int) -> torch.Tensor:
    """Call the function with every source `offset` bytes from an aligned address, and the result in source `place`.

    `place` may be all sources or, if None, other memory. Only the result may change, not the memory around the result
    or any other source.
    """
    dtype, numel = parts[0].dtype, parts[0].numel()
    begin = GUARD_BYTES + offset
    end = begin + numel * dtype.itemsize
    rooms = []  # of bytes: torch would make 0 or 1 of a bool
    for part in [*parts, parts[0]]:
        room = torch.full((end + GUARD_BYTES,), 0xA5, dtype=torch.uint8)
        room[begin:end] = part.view(torch.uint8)
        rooms.append(room)
    before = [room.clone() for room in rooms]
    addresses = [room.data_ptr() + begin for room in rooms]
    written = [len(parts)] if place is None else list(range(len(parts))) if place == ALL_SOURCES else [place]
    reduction.called(address)([addresses[index] for index in written], addresses[: len(parts)], numel)
    results = [rooms[index][begin:end].clone() for index in written]
    for index in written:
        rooms[index][begin:end] = before[index][begin:end]
    assert all(map(torch.equal, rooms, before)), "something besides the result was written"
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0].view(dtype)


def places(num_sources: int) -> list[int | None]:
    return [None, ALL_SOURCES, *sorted({0, num_sources // 2, num_sources - 1})]


@pytest.mark.parametrize("dtype", ALL, ids=dtypes.short_name)
def test_every_operation_size_and_place(dtype):
    for op, num_sources in itertools.product(dtypes.info(dtype).ops, NUM_SOURCES):
        address = reduction.address(dtype, op)
        longest = [values(dtype, max(NUMELS), seeded(num_sources, source)) for source in range(num_sources)]
        whole = twin(longest, op)
        for numel in NUMELS:
            parts = [part[:numel] for part in longest]
            # All places for some sizes, one place for other sizes: all combinations would take minutes.
            for place in places(num_sources) if numel in (3, 65, 1000) else [ALL_SOURCES, numel % num_sources]:
                result = reduced(parts, address, place, offset=(numel % 2) * dtype.itemsize)
                assert not differing(result, whole[:numel]), (op, num_sources, numel, place)


@pytest.mark.parametrize("dtype", COMPLEX, ids=dtypes.short_name)
@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
def test_finite_complex_numbers_have_the_bits_of_combine(dtype, op):
    parts = [values(dtype, 1025, seeded(source)) for source in range(3)]
    expected = torch.empty_like(parts[0])
    rank_order.combine(parts, op, expected)
    assert not differing(reduced(parts, reduction.address(dtype, op), None, 0), expected)


@pytest.mark.parametrize("dtype", REAL, ids=dtypes.short_name)
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
def test_special_values(dtype, op):
    specials = special_values(dtype)
    parts = [part.reshape(-1).contiguous() for part in torch.meshgrid(specials, specials, specials, indexing="ij")]
    for num_sources in (1, 2, 3):
        expected = twin(parts[:num_sources], op)
        result = reduced(parts[:num_sources], reduction.address(dtype, op), None, 1)
        assert not differing(result, expected), num_sources


@pytest.mark.parametrize("dtype", COMPLEX, ids=dtypes.short_name)
@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
def test_special_values_of_complex_numbers(dtype, op):
    real = special_values(dtype.to_real())
    real, imaginary = (part.reshape(-1) for part in torch.meshgrid(real, real, indexing="ij"))
    numbers = torch.view_as_complex(torch.stack((real, imaginary), 1))
    parts = [numbers, numbers.view(torch.uint8).view(-1, dtype.itemsize).flip(0).reshape(-1).view(dtype)]
    for shift in (0, 1, 20):
        rolled = [parts[0], torch.view_as_complex(torch.view_as_real(parts[1]).roll(shift, 0).contiguous())]
        assert not differing(reduced(rolled, reduction.address(dtype, op), 0, 0), twin(rolled, op)), shift


@pytest.mark.parametrize("dtype", REAL, ids=dtypes.short_name)
def test_min_and_max_agree_with_torch_but_for_the_sign_of_zero(dtype):
    specials = special_values(dtype)
    a, b = (part.reshape(-1).contiguous() for part in torch.meshgrid(specials, specials, indexing="ij"))
    for op, function in (("min", torch.minimum), ("max", torch.maximum)):
        result = reduced([a, b], reduction.address(dtype, op), None, 0)
        torch.testing.assert_close(result, function(a, b), rtol=0, atol=0, equal_nan=True)


def test_min_and_max_keep_the_first_nan_and_the_first_zero_anywhere():
    first, second = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00001, 0x7FC00002))
    zero, one = torch.zeros(1), torch.ones(1)
    for op, (a, b, kept) in itertools.product(
        ("min", "max"),
        ((first, second, first), (one, second, second), (first, one, first), (zero, -zero, zero), (-zero, zero, -zero)),
    ):
        result = reduced([a.repeat(199), b.repeat(199)], reduction.address(torch.float32, op), None, 0)
        assert torch.equal(result.view(torch.int32), kept.repeat(199).view(torch.int32)), (op, a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtypes.short_name)
def test_16_bit_floats_survive_widening_and_rounding(dtype):
    everything = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    result = reduced([everything], reduction.address(dtype, "sum"), 0, 0)
    assert not differing(result, everything)
    if dtype is torch.bfloat16:  # with one NaN only, which is that of torch's conversion on x86
        assert (result[everything.isnan()].view(torch.int16) == -1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex32], ids=dtypes.short_name)
def test_partial_results_are_those_of_torch_in_any_place(dtype):
    wide = dtypes.info(dtype).accumulator
    everything = torch.arange(1 << 16).to(torch.uint16)[: (1 << 16) - 3 * (dtype is not torch.complex32)].view(dtype)
    widened = torch.empty_like(everything, dtype=wide)
    reduction.called(reduction.converter(dtype, wide))([widened.data_ptr()], [everything.data_ptr()], len(everything))
    assert not differing(widened, everything.to(wide))
    for divisor in (1, 2, 3):
        total = widened.view(torch.float32) * 1.7
        expected = torch.empty_like(everything)
        expected.view(dtype.to_real() if dtype.is_complex else dtype).copy_(total / divisor)
        finish = reduction.called(reduction.converter(wide, dtype, divides=divisor > 1))
        finish([total.data_ptr()] * divisor, [total.data_ptr()], len(everything))  # in place
        assert not differing(total.view(torch.uint8)[: everything.nbytes].view(dtype), expected), divisor


@pytest.mark.parametrize("op", ["sum", "prod", "avg", "max"])
def test_half_precision_without_instructions_of_the_processor(op):
    compiler = native_code.Compiler()

    def text_of(**_: bool) -> str:
        return reduction_ir.module_text(reduction.function_key(torch.float16, op), has_half=False)

    address = compiler.function("test_half", op, text_of)
    everything = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
    for other in (1.0, 2.0**-12, 6e-8, 60000.0, -0.5, 3.0):
        parts = [everything, torch.full_like(everything, other), everything.flip(0)]
        for num_sources in (1, 2, 3):
            assert not differing(reduced(parts[:num_sources], address, 0, 0), twin(parts[:num_sources], op)), other
    assert not any(
        name.encode() in compiler._compile("test_half", text_of) for name in ("__extendhfsf2", "__truncsfhf2")
    )


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_size_and_offset(data):
    dtype = data.draw(st.sampled_from(ALL))
    op = data.draw(st.sampled_from(dtypes.info(dtype).ops))
    num_sources = data.draw(st.integers(1, 12))
    numel, offset = data.draw(st.integers(0, 3000)), data.draw(st.integers(0, 70))  # also odd bytes
    place = data.draw(st.none() | st.integers(0, num_sources - 1))
    generator = seeded(data.draw(st.integers(0, 1 << 20)))
    parts = [values(dtype, numel, generator) for _ in range(num_sources)]
    assert not differing(reduced(parts, reduction.address(dtype, op), place, offset), twin(parts, op))


def test_equivalent_combinations_share_a_function():
    address = reduction.address
    assert address(torch.int32, "sum") == address(torch.uint32, "sum") != address(torch.int64, "sum")
    assert address(torch.int8, "max") != address(torch.uint8, "max")
    assert address(torch.bool, "max") == address(torch.uint8, "lor") != address(torch.uint8, "bor")
    assert address(torch.float32, "sum") != address(torch.float32, "avg")


@pytest.mark.parametrize(("dtype", "op"), [(torch.int32, "avg"), (torch.complex64, "max"), (torch.float8_e5m2, "sum")])
def test_invalid_arguments_are_refused(dtype, op):
    with pytest.raises(errors.DtypeError):
        reduction.address(dtype, op)


PRODUCT_TEXT = partial(reduction_ir.module_text, FunctionKey("f32", "prod"))
SUM_TEXT = partial(reduction_ir.module_text, FunctionKey("f32", "sum"))


def adds(address: int) -> bool:
    parts = [values(torch.float32, 99, seeded(source)) for source in range(2)]
    return not differing(reduced(parts, address, None, 0), twin(parts, "sum"))


def test_the_second_process_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert adds(native_code.Compiler().function("total", "recipe", SUM_TEXT))
    (kept,) = tmp_path.iterdir()
    monkeypatch.setattr(native_code.Compiler, "llvm", property(lambda self: pytest.fail("loaded LLVM")))
    assert adds(native_code.Compiler().function("total", "recipe", SUM_TEXT))
    monkeypatch.undo()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kept.write_bytes(kept.read_bytes()[:-100])  # such as a full disk
    assert adds(native_code.Compiler().function("total", "recipe", SUM_TEXT))
    assert len(list(tmp_path.iterdir())) == 1


def test_other_code_and_other_processors_have_other_files(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    native_code.Compiler().function("same_name", "sum", SUM_TEXT)
    native_code.Compiler().function("same_name", "product", PRODUCT_TEXT)
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert adds(native_code.Compiler().function("same_name", "sum", SUM_TEXT))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    """Regression: the temporary file stayed, one for each start."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    compiler = native_code.Compiler()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # Python ignores SIGXFSZ
    try:
        address = compiler.function("total", "recipe", SUM_TEXT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert adds(address) and not list(tmp_path.iterdir())


def test_files_unused_for_a_long_time_are_removed(tmp_path, monkeypatch):
    """Regression: the files of old versions were never removed."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    native_code.Compiler().function("total", "recipe", SUM_TEXT)
    (used,) = tmp_path.iterdir()
    days = {"torchmpi_old.native": 31, ".torchmpi_killed.1.tmp": 0, "torchmpi_young.native": 29, "old.native": 999}
    for name, age in days.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, times=(time.time() - age * 24 * 3600,) * 2)
    os.utime(used, times=(0, 0))
    native_code.Compiler().function("total", "recipe", SUM_TEXT)  # loads it
    native_code.Compiler().function("product", "recipe", PRODUCT_TEXT)
    left = {path.name for path in tmp_path.iterdir()}
    assert {"torchmpi_young.native", "old.native", used.name} < left and len(left) == 4


def test_without_a_writable_folder_the_compiler_keeps_code_in_memory(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert adds(native_code.Compiler().function("total", "recipe", SUM_TEXT))
