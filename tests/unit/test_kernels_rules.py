"""Native rules compared with references, bit for bit, and with the optimizers of torch."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels_reduction import ALL, COMPLEX, GUARD_BYTES, INTEGERS, REAL, differing, seeded, special_values, values

from torchmpi import errors
from torchmpi.shared_memory.kernels import native_code, server_rule_ir, server_rules
from torchmpi.tensors import dtypes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch calls it experimental

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES_OF = {name: REAL for name in server_rules.BUILT_IN}
DTYPES_OF |= {"zero": (*ALL, *EIGHT_BITS), "copy": (*ALL, *EIGHT_BITS), "add": (*REAL, *COMPLEX, *INTEGERS)}
DTYPES_OF |= {"max": (*REAL, *INTEGERS), "min": (*REAL, *INTEGERS)}
CASES = [(name, dtype) for name, those in DTYPES_OF.items() for dtype in those]
NUMELS = (0, 1, 2, 3, 15, 16, 63, 64, 65, 255, 1000, 1027)
NATIVE = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_void_p)
COEFFICIENTS = {
    "scaled_add": [(0.3,), (-1.0,), (0.0,)],
    "axpby": [(0.1, 0.9), (1.0, -2.5)],
    "sgd": [(0.1, 0.9, 0.01, 1.0), (0.1, 0.9, 0.01, 0.0), (0.3, 0.0, 0.0, 0.0)],
    "adagrad": [(0.1, 1e-10, 0.0), (0.3, 0.1, 0.02)],
    "adam": [(0.01, 0.9, 0.999, 1e-8, 0.0), (0.3, 0.5, 0.6, 0.1, 0.02)],
}


def full(name: str, given: tuple[float, ...], step: int) -> list[float]:
    """All eight coefficients: those that the caller sets for Adam, and numbers that a rule must not use."""
    ends = [1 - given[1] ** step, 1 - given[2] ** step] if name == "adam" else [7e7, -7e7]
    return [*given, *[9e9] * (6 - len(given)), *ends]


def twin(name: str, c: list[float], arrays: list[torch.Tensor], incoming: torch.Tensor) -> list[torch.Tensor]:
    """The new value and states."""
    value, dtype = arrays[0], arrays[0].dtype
    if name in ("zero", "copy"):
        data = incoming.view(torch.uint8)  # torch's copy of a bool converts any byte to 0 or 1
        return [(torch.zeros_like if name == "zero" else torch.clone)(data).view(dtype)]
    if dtype.is_complex:  # add
        parts = twin(name, c, [torch.view_as_real(value)], torch.view_as_real(incoming))
        return [torch.view_as_complex(parts[0])]
    if dtype in INTEGERS:
        a, b = value.numpy(), incoming.numpy()  # torch does not add or compare all of them
        return [torch.from_numpy(a + b if name == "add" else (b > a if name == "max" else b < a).choose([a, b]))]
    wide = server_rules.state_dtype(dtype)
    v, g, states = value.to(wide), incoming.to(wide), arrays[1:]
    if name == "add":
        return [(v + g).to(dtype)]
    if name in ("max", "min"):
        better = (g > v) if name == "max" else (g < v)
        return [torch.where(better | (g.isnan() & ~v.isnan()), g, v).to(dtype)]
    new, *states = FORMULAS[name](c, v, g, *states)
    return [new.to(dtype), *states]


def root(tensor: torch.Tensor) -> torch.Tensor:
    """NumPy's square root, which is correctly rounded. That of torch sometimes differs in the last bit."""
    return torch.from_numpy(np.sqrt(tensor.numpy()))


def sgd(c, v, g, m):
    lr, momentum, weight_decay, nesterov = c[:4]
    d = g + weight_decay * v
    m = momentum * m + d
    return v - lr * (d + momentum * m if nesterov else m), m


def adagrad(c, v, g, s):
    lr, eps, weight_decay = c[:3]
    d = g + weight_decay * v
    s = s + d * d
    return v - lr * d / (root(s) + eps), s


def adam(c, v, g, m, s):
    lr, beta1, beta2, eps, weight_decay, _, correction1, correction2 = c
    d = g + weight_decay * v
    m = beta1 * m + (1 - beta1) * d
    s = beta2 * s + (1 - beta2) * d * d
    bias = correction2**0.5  # into the step and eps: the same as dividing each sqrt(s) by it
    return v - (lr * bias / correction1) * m / (root(s) + eps * bias), m, s


FORMULAS = {
    "scaled_add": lambda c, v, g: (v + c[0] * g,),
    "axpby": lambda c, v, g: (c[0] * g + c[1] * v,),
    "sgd": sgd,
    "adagrad": adagrad,
    "adam": adam,
}


def in_a_room(tensor: torch.Tensor, offset: int) -> tuple[torch.Tensor, int]:
    """Bytes with the tensor's in the middle, `offset` from an aligned address; and where they begin."""
    begin = GUARD_BYTES + offset
    content = tensor.view(torch.uint8)
    room = torch.full((begin + content.numel() + GUARD_BYTES,), 0xA5, dtype=torch.uint8)
    room[begin : begin + content.numel()] = content
    return room, begin


def applied(
    address: int, c: list[float], arrays: list[torch.Tensor], incoming: torch.Tensor, offset: int = 0
) -> list[torch.Tensor]:
    """Call the function, with each buffer at another offset. Only the targets may change."""
    sources = [in_a_room(tensor, offset + index) for index, tensor in enumerate([*arrays, incoming])]
    targets = [in_a_room(torch.full_like(array.view(torch.uint8), 0x5A), offset) for array in arrays]
    before = [room.clone() for room, _ in (*sources, *targets)]
    addresses = [room.data_ptr() + begin for room, begin in sources]
    goals = torch.tensor([room.data_ptr() + begin for room, begin in targets])
    origins, numbers = torch.tensor(addresses[:-1]), torch.tensor(c, dtype=torch.float64)
    NATIVE(address)(goals.data_ptr(), origins.data_ptr(), addresses[-1], incoming.numel(), numbers.data_ptr())
    results = []
    for (room, begin), array in zip(targets, arrays, strict=True):
        end = begin + array.numel() * array.itemsize
        results.append(room[begin:end].clone().view(array.dtype))
        room[begin:end] = 0x5A
    assert all(map(torch.equal, (room for room, _ in (*sources, *targets)), before)), "something else was written"
    return results


def fresh(name: str, value: torch.Tensor) -> list[torch.Tensor]:
    """The arrays of a rule that was not applied yet."""
    states = [torch.zeros(value.numel(), dtype=server_rules.state_dtype(value.dtype))] * server_rules.BUILT_IN[
        name
    ].num_states
    return [value, *states]


def numbers(dtype: torch.dtype, numel: int, generator: torch.Generator) -> torch.Tensor:
    if dtype in EIGHT_BITS:
        return values(torch.uint8, numel, generator).view(dtype)
    return values(dtype, numel, generator)


def runs(name: str) -> Iterator[tuple[float, ...]]:
    yield from COEFFICIENTS.get(name, [()])


def check_equal(results: list[torch.Tensor], expected: list[torch.Tensor], what: object) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert not differing(result, wanted), what


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_every_rule_and_size_for_several_steps(name, dtype):
    address = server_rules.address(dtype, name)
    for given_here, numel in itertools.product(runs(name), NUMELS):
        arrays = fresh(name, numbers(dtype, numel, seeded(numel)))
        for step in range(1, 4 if len(arrays) > 1 else 2):
            incoming = numbers(dtype, numel, seeded(numel, step))
            c = full(name, given_here, step)
            results = applied(address, c, arrays, incoming, (numel % 2) * dtype.itemsize)
            check_equal(results, twin(name, c, arrays, incoming), (given_here, numel, step))
            arrays = results


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_size_offset_and_coefficients(data):
    name, dtype = data.draw(st.sampled_from(CASES))
    numel, offset = data.draw(st.integers(0, 2000)), data.draw(st.integers(0, 70))  # also odd bytes
    generator = seeded(data.draw(st.integers(0, 1 << 20)))
    factor, decay = st.floats(-2, 2, width=16), st.floats(0, 0.96875, width=16)
    kinds = {"beta1": decay, "beta2": decay, "eps": st.floats(2**-14, 1, width=16), "nesterov": st.sampled_from([0, 1])}
    given_here = tuple(data.draw(kinds.get(key, factor)) for key in server_rules.BUILT_IN[name].coefficients)
    c = full(name, given_here, data.draw(st.integers(1, 1000)))
    arrays = fresh(name, numbers(dtype, numel, generator))
    arrays[1:] = [values(state.dtype, numel, generator).square() for state in arrays[1:]]
    incoming = numbers(dtype, numel, generator)
    check_equal(
        applied(server_rules.address(dtype, name), c, arrays, incoming, offset), twin(name, c, arrays, incoming), name
    )


@pytest.mark.parametrize("dtype", REAL, ids=dtypes.short_name)
def test_special_values(dtype):
    specials = special_values(dtype)
    v, g = (part.reshape(-1).contiguous() for part in torch.meshgrid(specials, specials, indexing="ij"))
    for name in server_rules.BUILT_IN:
        for given_here in runs(name):
            arrays, c = fresh(name, v), full(name, given_here, 1)
            check_equal(applied(server_rules.address(dtype, name), c, arrays, g, 1), twin(name, c, arrays, g), name)


def test_copy_keeps_every_bit_of_a_nan():
    everything = torch.arange(1 << 16).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        address = server_rules.address(dtype, "copy")
        (result,) = applied(address, [0.0] * 8, [torch.zeros_like(everything.view(dtype))], everything.view(dtype))
        assert torch.equal(result.view(torch.uint16), everything)


OPTIMIZERS = [
    ("sgd", (0.1, 0.0, 0.0, 0.0), partial(torch.optim.SGD, lr=0.1)),
    ("sgd", (0.1, 0.9, 0.0, 0.0), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    ("sgd", (0.1, 0.9, 0.02, 0.0), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.02)),
    ("sgd", (0.1, 0.9, 0.02, 1.0), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.02, nesterov=True)),
    ("adagrad", (0.1, 1e-10, 0.0), partial(torch.optim.Adagrad, lr=0.1)),
    ("adagrad", (0.1, 0.01, 0.02), partial(torch.optim.Adagrad, lr=0.1, eps=0.01, weight_decay=0.02)),
    ("adam", (0.01, 0.9, 0.999, 1e-8, 0.0), partial(torch.optim.Adam, lr=0.01)),
    (
        "adam",
        (0.01, 0.8, 0.95, 0.1, 0.02),
        partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.95), eps=0.1, weight_decay=0.02),
    ),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 3e-6)], ids=str)
@pytest.mark.parametrize(("name", "given_here", "make"), OPTIMIZERS, ids=str)
def test_the_optimizers_of_torch(name, given_here, make, dtype, tolerance):
    arrays = fresh(name, values(dtype, 999, seeded(0)))
    parameter = torch.nn.Parameter(arrays[0].clone())
    optimizer = make([parameter])
    for step in range(1, 11):
        parameter.grad = values(dtype, 999, seeded(step))
        optimizer.step()
        arrays = applied(server_rules.address(dtype, name), full(name, given_here, step), arrays, parameter.grad)
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


def test_half_precision_without_the_processors_help(monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")  # which on x86 has none
    compiler = native_code.Compiler()
    everything = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
    for name in ("max", "axpby", "sgd"):
        code = server_rules.BUILT_IN[name]
        sizes = (code.num_coefficients, code.num_states)
        text_of = partial(server_rule_ir.module_text, "f16", name, 1, sizes, has_half=False)
        assert undefined_symbols(compiler._compile(text_of())) == []
        address = compiler.function(f"test_{name}", lambda text_of=text_of, **_: text_of())
        for other in (1.0, 6e-8, 60000.0):
            incoming, arrays = torch.full_like(everything, other), fresh(name, everything)
            c = full(name, COEFFICIENTS.get(name, [()])[0], 1)
            check_equal(applied(address, c, arrays, incoming), twin(name, c, arrays, incoming), (name, other))


@pytest.mark.parametrize("processor", ["this", "generic"])
def test_no_rule_calls_anything(processor, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    if processor == "generic":
        monkeypatch.setenv("NUMBA_CPU_NAME", processor)
    compiler = native_code.Compiler()
    cases = CASES if processor == "this" else [case for case in CASES if case[1] in REAL]
    keys = {(server_rules._function_key(dtype, name), server_rules.BUILT_IN[name]) for name, dtype in cases}
    for (lane, op, num_parts), code in keys:
        sizes = (code.num_coefficients, code.num_states)
        compiler.function(f"{lane}_{op}_{num_parts}", partial(server_rule_ir.module_text, lane, op, num_parts, sizes))
    kept = list(tmp_path.iterdir())
    assert len(kept) == len(keys)
    assert {path.name: undefined_symbols(path.read_bytes()[32:]) for path in kept} == {path.name: [] for path in kept}
    calling = 'declare double @"sin"(double)\ndefine double @"f"(double %x) {\n%y = call double @"sin"(double %x)\n'
    assert undefined_symbols(compiler._compile(calling + "ret double %y\n}")) == ["sin"]


def test_dtypes_whose_bits_are_treated_alike_share_a_function():
    address = server_rules.address
    assert address(torch.int32, "add") == address(torch.uint32, "add") != address(torch.int64, "add")
    assert address(torch.int8, "max") != address(torch.uint8, "max") != address(torch.uint8, "min")
    assert address(torch.float16, "copy") == address(torch.bfloat16, "copy") == address(torch.int16, "copy")
    assert address(torch.float64, "zero") == address(torch.complex64, "zero") != address(torch.float64, "copy")


def test_concurrent_requests_compile_once():
    compiler, compiled, found = native_code.Compiler(), [], []

    def text_of(**_: bool) -> str:
        compiled.append(1)
        time.sleep(0.05)
        return server_rule_ir.module_text("f32", "sum", 1)

    def ask() -> None:
        found.append(compiler.function("test_threads", text_of))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and len(found) == 4 and len(set(found)) == 1


REFUSED = [
    ("sgd", torch.int32, "float32"),
    ("adam", torch.complex64, "float32"),
    ("scaled_add", torch.uint8, "zero, copy, add, max, min"),
    ("add", torch.bool, "uint8"),
    ("max", torch.complex64, "no order"),
    ("add", torch.float8_e5m2, "bfloat16"),
    ("copy", torch.quint8, "Convert"),
]


@pytest.mark.parametrize(("name", "dtype", "remedy"), REFUSED, ids=str)
def test_invalid_arguments_are_refused_with_the_remedy(name, dtype, remedy):
    with pytest.raises(errors.DtypeError, match=remedy):
        server_rules.address(dtype, name)


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(errors.ArgumentError, match="scaled_add, axpby, sgd, adagrad, adam"):
        server_rules.address(torch.float32, "nadam")


def test_properties_of_a_rule():
    codes = {
        name: (code.num_coefficients, code.num_states, code.floats_only) for name, code in server_rules.BUILT_IN.items()
    }
    assert codes["add"] == codes["copy"] == (0, 0, False)
    assert codes["axpby"] == (2, 0, True) and codes["sgd"] == (4, 1, True) and codes["adam"] == (5, 2, True)
    assert server_rules.state_dtype(torch.float64) is torch.float64
    assert server_rules.state_dtype(torch.float16) is server_rules.state_dtype(torch.float32) is torch.float32
