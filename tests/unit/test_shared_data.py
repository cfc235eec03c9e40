"""To a user of shared_dataset(): the format, the memory, and pickles of multiprocessing, without ranks."""

from __future__ import annotations

import collections
import gc
import io
import json
import os
import pickle
import struct
import weakref
import zlib
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.processes import child, output_of

from torchmpi.datasets import data_format
from torchmpi.shared_memory.read_only import ReadOnlyMemory, anonymous_file, withdraw_all

Pair = collections.namedtuple("Pair", "first second")
RECORDS = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i4"), ("b", ">f8")])


def shared(value: object) -> ReadOnlyMemory:
    file = anonymous_file("test")
    data_format.write(file, data_format.describe(value))
    return ReadOnlyMemory.sealed(file)


def passed(value: object) -> object:
    """The value after a pickle of multiprocessing."""
    return pickle.loads(bytes(ForkingPickler.dumps(value)))


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


VALUES = {
    "containers": {"a": [1, 2.5, None, True, "text"], 3: (), "pair": Pair([torch.ones(2)], {"x": np.arange(3)})},
    "transposed": [
        torch.arange(12.0).view(3, 4).t(),
        np.arange(12).reshape(3, 4)[:, ::-2],
        torch.ones(4, 4).narrow(1, 1, 2),
    ],
    "no elements": (torch.empty(0, 3), np.empty((2, 0)), torch.tensor(7), np.array(7.5)),
    "arrays": [RECORDS, np.array(["a", "bcd"]), np.array(["2026-01-01"], "M8[D]"), np.array([1 + 2j]), np.float16([1])],
    "complex": [torch.tensor([1 + 2j]).conj(), torch.tensor([1.0 + 1j]).conj().imag],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_read_as_they_were(name):
    found = data_format.read(shared(VALUES[name]))
    assert same(found, VALUES[name])


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype):
    bits = torch.arange(48, dtype=torch.uint8) % 2
    values = bits.view(dtype)
    (found,) = data_format.read(shared([values]))
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), bits)


def test_one_tensor_twice_is_one_leaf():
    values = torch.arange(5)
    first, second = data_format.read(shared([values, values]))
    assert first.data_ptr() == second.data_ptr()


def test_each_tensor_has_a_storage_of_its_own():
    """torch.save() writes whole storages."""
    small, _ = data_format.read(shared([torch.ones(3), torch.ones(10_000)]))
    file = io.BytesIO()
    torch.save(small, file)
    assert len(file.getvalue()) < 10_000


def test_leaves_are_dropped_one_after_the_other():
    """The maker needs memory for the data once, and for the largest tensor."""
    value = [torch.ones(1000, dtype=torch.uint8), torch.ones(2000, dtype=torch.uint8)]
    alive = [0, 0]

    def note(index: int) -> None:
        alive[index] = 0

    for index, tensor in enumerate(value):
        alive[index] = 1
        weakref.finalize(tensor, note, index)
    del tensor
    description, seen = data_format.describe(value), []
    del value
    data_format.write(anonymous_file("test"), description, lambda written: seen.append((written, *alive)))
    assert alive == [0, 0] and [first for _, first, _ in seen][-1] == 0 and seen[-1][0] == description.offsets[1] + 2000


LOOP: list[object] = []
LOOP.append(LOOP)
REFUSED = {
    "object": ([{"a": object()}], "the value[0]['a'] is of type object. Return tensors"),
    "set": ({"a": {1}}, "the value['a'] is of type set"),
    "key": ({(1, 2): 3}, "has the key (1, 2)"),
    "sparse": ([torch.eye(3).to_sparse()], "the value[0] is a tensor that has no plain memory of the host (sparse_coo"),
    "meta": (torch.empty(2, device="meta"), "that has no plain memory of the host (strided, torch.float32, on meta)"),
    "objects": (Pair(1, np.array([None])), "the value.second is an array of Python objects"),
    "masked": (np.ma.array([1]), "is of type MaskedArray. Use numpy.asarray()"),
    "loop": (LOOP, "more than 30 containers"),
    "NumPy's number": ([np.float32(1)], "the value[0] is of type float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_named(name):
    value, words = REFUSED[name]
    with pytest.raises(TypeError) as caught:
        data_format.describe(value)
    assert words in str(caught.value)


def with_header(**changes: object) -> bytes:
    header = {"value": {"leaf": 0}, "leaves": [["tensor", "float32", [2], 0]]} | changes
    text = json.dumps(header).encode()
    return (b"torchmpi data 1\n" + struct.pack("<QI", len(text), zlib.crc32(text))).ljust(32, b"\0") + text


WRONG = {
    "short": (b"torchmpi data 1\n", "no JSON"),
    "another file": (bytes(8192), "does not begin"),
    "checksum": (with_header()[:-1] + b"?", "header is damaged"),
    "length": (b"torchmpi data 1\n" + struct.pack("<QI", 1 << 60, 0), "header is damaged"),
    "truncated": (with_header(leaves=[["tensor", "float32", [2000], 0]]), "truncated"),
    "many": (with_header(leaves=[["tensor", "float32", [0, 1 << 62, 1 << 62], 0]]), "header is wrong"),
    "negative": (with_header(leaves=[["array", "'<f4'", [-1], 0]]), "wrong shape"),
    "no dtype": (with_header(leaves=[["tensor", "load", [2], 0]]), "unknown dtype 'load'"),
    "objects": (with_header(leaves=[["array", "'|O'", [2], 0]]), "unknown dtype"),
    "code": (with_header(leaves=[["array", "__import__('os').getpid()", [2], 0]]), "malformed node"),
    "no leaf": (with_header(value={"leaf": 5}), "header is wrong"),
    "kind": (with_header(value={"call": "x"}), "unknown kind 'call'"),
    "no named tuple": (with_header(value={"named": ["os", "system", ["command"], ["exit"]]}), "os.system('command',)"),
    "another module": (with_header(value={"named": ["antigravity", "X", ["a"], [1]]}), "Define it at the top"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_data_are_refused_without_running_code(name):
    content, words = WRONG[name]
    file = anonymous_file("test")
    os.write(file, content)
    os.ftruncate(file, 8192)
    with pytest.raises(ValueError) as caught:
        data_format.read(ReadOnlyMemory.sealed(file))
    assert words in str(caught.value)


# --- read-only memory


def test_nothing_can_write():
    memory = shared({"x": torch.zeros(4), "y": np.zeros(4)})
    value = data_format.read(memory)
    with pytest.raises(ValueError, match="read-only"):
        value["y"][0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        value["y"].flags.writeable = True
    file = os.open(memory.ticket.path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 8)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    assert os.fstat(file).st_mode & 0o777 == 0o600
    os.close(file)


def test_a_write_to_a_tensor_ends_the_process():
    (tensor,) = data_format.read(shared([torch.zeros(4)]))

    def write() -> None:
        tensor[0] = 1

    status, _ = output_of(write)
    assert status == -11 and tensor[0] == 0


def test_memory_is_freed_with_the_last_view():
    gc.collect()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("torchmpi-test")

    before = held()
    value = data_format.read(shared([torch.zeros(4), np.zeros(4), torch.zeros(2, 2)]))
    views = value[0][1:], value[1][1:].T
    del value
    assert held() > before and float(views[0].sum()) == 0
    withdraw_all()
    assert held() == (before[0] + 1, before[1] + 1)  # the map of Python has a descriptor of its own
    del views
    assert held() == before


def test_pickles_of_multiprocessing_contain_the_place():
    values = {"x": torch.arange(30_000.0).view(100, 300), "y": np.arange(30_000)}
    value = data_format.read(shared(values))
    views = [value["x"], value["x"][3:, ::2].t(), value["y"][::-3], value["x"].to(torch.int8), value["x"].clone()[:1]]
    with child(lambda: None):  # a process whose files are others
        found = passed(views)
    assert all(same(one, other) for one, other in zip(found, views, strict=True))
    pointers = [each.data_ptr() if isinstance(each, torch.Tensor) else each.ctypes.data for each in found]
    assert pointers[:3] == [views[0].data_ptr(), views[1].data_ptr(), views[2].ctypes.data]
    assert len(ForkingPickler.dumps(value)) < 2000


def test_another_process_maps_the_same_memory():
    memory = shared({"x": torch.arange(1000.0), "y": np.arange(1000)})
    value = data_format.read(memory)
    pickled = bytes(ForkingPickler.dumps([value["x"][5:], value["y"][::-1]]))

    def look() -> None:
        from torchmpi.shared_memory import read_only

        read_only._mapped.clear()  # as in a process that was spawned
        tensor, array = pickle.loads(pickled)
        (opened,) = read_only._mapped.values()
        print(float(tensor[0]), int(array[0]), opened.address != memory.address, opened.ticket == memory.ticket)

    assert output_of(look) == (0, "5.0 999 True True\n")


def test_after_withdraw_pickles_contain_copies():
    memory = shared([torch.arange(5.0), np.arange(5)])
    tensor, array = data_format.read(memory)
    ticket = memory.ticket
    memory.withdraw()
    copies = passed([tensor, array])
    assert same(copies, [tensor, array]) and copies[1].ctypes.data != array.ctypes.data
    with pytest.raises(OSError):
        ReadOnlyMemory.open(ticket._replace(inode=0))


def test_without_files_in_memory_there_is_an_error(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no files in memory"):
        anonymous_file("test")
