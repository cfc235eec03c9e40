"""To whoever passes a tensor or a number: what cannot be sent is refused before anything is."""

from __future__ import annotations

import mmap
import warnings

import pytest
import torch

from torchmpi.errors import ArgumentError, DtypeError
from torchmpi.tensors import buffers, numbers, sparse, writable


@pytest.mark.parametrize("offset", range(8))
def test_memory_of_a_file_that_is_mapped_for_reading_cannot_be_written(tmp_path, offset):
    """At any address: the system looks at the four bytes around it."""
    (tmp_path / "file").write_bytes(bytes(2 * mmap.PAGESIZE))
    with open(tmp_path / "file", "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that the memory cannot be written
        kinds = {mmap.ACCESS_READ: False, mmap.ACCESS_COPY: True}
        for access, can_write in kinds.items():
            memory = mmap.mmap(file.fileno(), 0, access=access)
            assert writable.is_writable(torch.frombuffer(memory, dtype=torch.uint8)[offset:]) == can_write


def test_tensors_that_were_tested_are_not_tested_again(monkeypatch):
    tensor, tested = torch.ones(3), []
    monkeypatch.setattr(writable, "_can_write", lambda address: not tested.append(address))
    assert writable.is_writable(tensor) and writable.is_writable(tensor) and writable.is_writable(torch.empty(0))
    assert tested == [tensor.data_ptr()]


@pytest.mark.parametrize("number", [-(1 << 63), (1 << 63) - 1])
def test_numbers_of_64_bits_and_no_others(number):
    assert numbers.as_tensor(number, "send").item() == number
    with pytest.raises(DtypeError, match=r"^rank 3: send: .* 64 bits"):
        numbers.as_tensor(number + (1 if number > 0 else -1), "rank 3: send")


def test_sums_of_sparse_tensors_are_rounded_once():
    """Of entries with the same index, in the dtype of partial results; and the divisor counts."""
    parts = [torch.tensor([value], dtype=torch.bfloat16).to_sparse() for value in (256.0, 1.0, 1.0)]
    rows = iter([torch.cat([sparse.entries(part)[which] for part in parts]) for which in (0, 1)] * 2)
    indices, values = sparse.entries(parts[0])
    total = sparse.total(indices, values, (1,), lambda _: next(rows))
    assert total.dtype == torch.bfloat16 and total.to_dense().item() == 258
    assert sparse.total(indices, values, (1,), lambda _: next(rows), divisor=3).to_dense().item() == 86


def test_tensors_with_an_element_in_common():
    matrix = torch.zeros(4, 6)
    flat = matrix.view(-1)
    apart = [matrix[:, :2], matrix[:, 2:3], matrix[:, 3:]]
    assert not buffers.overlap_of_any(apart) and not buffers.overlap_of_any([flat[:3], flat[3:]])
    assert not buffers.overlap_of_any([matrix]) and not buffers.overlap_of_any([matrix[:0], matrix[:0]])
    for others in ([flat[:4], flat[3:]], [matrix[0], matrix[:, 0]], [*apart, matrix[3, 5:]], [flat[5:6], matrix]):
        assert buffers.overlap_of_any(others) and buffers.overlap_of_any(others[::-1])
    assert buffers.overlap_of_any([torch.ones(1), matrix[0, :1], matrix[0, :1]])


def test_only_elements_that_share_memory_make_a_tensor_expanded():
    one = torch.ones(1, 3)
    for tensor in (one.expand(1, 3), torch.ones(3, 1).as_strided((3, 1), (1, 0)), one[:0].expand(0, 3)):
        assert buffers.check(tensor, "allreduce", written=True) is tensor
    expanded = one.expand(2, 3)
    assert buffers.check(expanded, "allreduce", written=False) is expanded
    with pytest.raises(ArgumentError, match="is expanded"):
        buffers.check(expanded, "allreduce", written=True)


def test_a_tensor_that_was_written_is_no_saved_value():
    for write in (buffers.touch, lambda tensor: buffers.touch_all([tensor])):
        factor = torch.ones(2)
        before = factor._version
        total = (torch.ones(2, requires_grad=True) * factor).sum()
        write(factor)
        assert factor._version == before + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
