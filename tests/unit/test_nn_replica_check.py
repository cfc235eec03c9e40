"""To a user of check_with_allreduce(): its checksum differs where the bits of tensors differ."""

from __future__ import annotations

import random
import types

import pytest
import torch

from torchmpi.nn import replica_check
from torchmpi.nn.replica_check import checksum

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def slow_checksum(tensor: torch.Tensor) -> int:
    """Compute the checksum with Python integers, word by word."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)
    total = tensor.numel()
    for index in range(len(data) // 8):
        word = int.from_bytes(data[index * 8 : index * 8 + 8], "little")
        mixed = (word + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        total += mixed ^ mixed >> 31
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 33, 259])
def test_equals_the_slow_checksum(dtype, numel, monkeypatch):
    """In machine code, and by the operations of torch."""
    tensor = (torch.arange(numel) % 5 - 2).to(dtype)
    expected = slow_checksum(tensor)
    assert checksum(tensor) == expected
    monkeypatch.setattr(replica_check, "compiled", lambda name: None)
    assert checksum(tensor) == expected


def test_chunks_do_not_matter(monkeypatch):
    tensor = torch.randn(1000)
    whole = checksum(tensor)
    monkeypatch.setattr(replica_check, "compiled", lambda name: None)
    monkeypatch.setattr(replica_check, "_CHUNK_WORDS", 7)
    assert checksum(tensor) == whole


def test_every_single_bit_matters():
    tensor = torch.randn(9)
    sums = {checksum(tensor)}
    for byte in range(36):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(torch.uint8)[byte] ^= 1 << bit
            sums.add(checksum(changed))
    assert len(sums) == 1 + 36 * 8


def test_two_flipped_signs_do_not_cancel():
    tensor = torch.ones(4, dtype=torch.float64)
    assert checksum(tensor * torch.tensor([-1.0, -1, 1, 1])) != checksum(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_views_at_any_offset(dtype):
    values = torch.arange(20).to(dtype)
    for begin in range(9):
        assert checksum(values[begin : begin + 8]) == checksum(values[begin : begin + 8].clone())


def test_conjugate_and_negative_views():
    values = torch.complex(torch.arange(3.0), torch.ones(3))
    for view in (values.conj(), values.conj().imag):
        assert checksum(view) == checksum(view.clone())
        assert checksum(view) != checksum(view.neg())


def test_order_length_and_layout():
    tensor = torch.arange(6.0).view(2, 3)
    assert checksum(tensor) != checksum(tensor.flip(0))
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor), "values count, not strides"


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_a_single_element_of_a_larger_tensor(dtype):
    """Regression: torch refuses to view it as bytes, because of its stride."""
    single = torch.arange(4).to(dtype)[2:][::2]
    assert single.stride() == (2,)
    assert checksum(single) == checksum(single.clone(memory_format=torch.contiguous_format))


def test_tensors_of_a_device_are_summed_together(monkeypatch):
    """The digest of tensors that are put together depends on each bit and each place, whatever is put together."""
    monkeypatch.setattr(replica_check, "_MOST_TOGETHER_BYTES", 100)
    on_device = [types.SimpleNamespace(is_cpu=False, device="cuda", nbytes=each.nbytes, words=each) for each in (
        torch.arange(9), torch.arange(20), torch.arange(3)
    )]  # fmt: skip
    monkeypatch.setattr(replica_check, "_words", lambda each: getattr(each, "words", each))
    digest = replica_check._digest(on_device)  # type: ignore[arg-type]
    assert digest == replica_check._digest(on_device) != replica_check._digest(on_device[::-1])  # type: ignore[arg-type]
    on_device[1].words[7] += 1
    assert digest != replica_check._digest(on_device)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(10))
def test_differences_name_the_same_tensors_on_all_ranks(seed):
    """Ranks of two pairs of shards; each rank that differs is told which tensor it should have."""
    choose = random.Random(seed)
    shared, holder = [choose.randrange(2) for _ in range(4)], [1, 2, 1, 2]
    found = [{"w": (shared[rank], 0), "part": (choose.randrange(2), holder[rank])} for rank in range(4)]
    told = [replica_check.differences(found, rank) for rank in range(4)]
    assert len({tuple((name, each.text) for name, each in of_rank.items()) for of_rank in told}) == 1
    for rank, of_rank in enumerate(told):
        for name in ("w", "part"):
            alike = [other for other in range(4) if found[other][name][1] == found[rank][name][1]]
            sums = [found[other][name][0] for other in alike]
            assert (name in of_rank) == any(
                found[one][name][0] != found[two][name][0] and found[one][name][1] == found[two][name][1]
                for one in range(4) for two in range(4)
            )  # fmt: skip
            if len(set(sums)) > 1:
                model = of_rank[name].model
                assert model in alike and sums.count(found[model][name][0]) >= len(sums) / 2
                assert all(told[other][name].model == model for other in alike)
            elif name in of_rank:
                assert of_rank[name].model is None
