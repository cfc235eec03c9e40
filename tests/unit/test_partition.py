"""To whoever divides elements: even partitions and chunks agree with their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmpi.errors import TorchMPIError
from torchmpi.tensors import partition


def check_partition(numel: int, parts: int) -> None:
    spans = partition.even_partition(numel, parts)
    assert spans == [partition.part_of(numel, parts, index) for index in range(parts)]
    end = 0
    for offset, length in spans:
        assert offset == end and length >= 0
        end = offset + length
    assert end == numel
    lengths = [length for _, length in spans]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize("parts", range(1, 65))
def test_partition_up_to_64_parts(parts: int) -> None:
    for numel in (0, 1, parts - 1, parts, parts + 1, 3 * parts - 1, 1000, 2**31 + 7, 2**40 + 1):
        check_partition(numel, parts)


@given(st.integers(0, 2**62), st.integers(1, 300))
def test_partition_of_random_numbers(numel: int, parts: int) -> None:
    check_partition(numel, parts)


@given(st.integers(1, 2**40), st.integers(0, 300), st.integers(0, 2**40))
def test_chunks_cover_everything_in_order(max_numel: int, num_full: int, rest: int) -> None:
    numel = num_full * max_numel + rest % max_numel
    found = partition.chunks(numel, max_numel)
    assert [offset for offset, _ in found] == [i * max_numel for i in range(len(found))]
    assert all(length == max_numel for _, length in found[:-1])
    assert all(0 < length <= max_numel for _, length in found)
    assert sum(length for _, length in found) == numel


def test_more_elements_than_an_mpi_count_holds() -> None:
    assert partition.chunks(2**31 + 5, 2**30) == [(0, 2**30), (2**30, 2**30), (2**31, 5)]


@pytest.mark.parametrize("numel, parts, index", [(-1, 2, 0), (5, 0, 0), (5, 2, 2), (5, 2, -1)])
def test_invalid_parts_are_refused(numel: int, parts: int, index: int) -> None:
    with pytest.raises(TorchMPIError, match="part"):
        partition.part_of(numel, parts, index)


def test_invalid_partitions_and_chunks_are_refused() -> None:
    with pytest.raises(TorchMPIError, match="parts"):
        partition.even_partition(5, 0)
    with pytest.raises(TorchMPIError, match="chunks"):
        partition.chunks(5, 0)
    with pytest.raises(TorchMPIError, match="chunks"):
        partition.chunks(-1, 5)
