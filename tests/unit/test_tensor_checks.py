"""What the collectives check of a tensor or a number before they communicate."""

from __future__ import annotations

import mmap
import warnings

import pytest
import torch

from torchmpi.errors import DtypeError
from torchmpi.tensors import numbers, sparse, writable


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
    assert numbers.as_tensor(number).item() == number
    with pytest.raises(DtypeError, match="64 bits"):
        numbers.as_tensor(number + (1 if number > 0 else -1))


def test_sums_of_sparse_tensors_are_rounded_once():
    """Of entries with the same index, in the dtype of partial results; and the divisor counts."""
    parts = [torch.tensor([value], dtype=torch.bfloat16).to_sparse() for value in (256.0, 1.0, 1.0)]
    rows = iter([torch.cat([sparse.entries(part)[which] for part in parts]) for which in (0, 1)] * 2)
    indices, values = sparse.entries(parts[0])
    total = sparse.total(indices, values, (1,), lambda _: next(rows))
    assert total.dtype == torch.bfloat16 and total.to_dense().item() == 258
    assert sparse.total(indices, values, (1,), lambda _: next(rows), divisor=3).to_dense().item() == 86
