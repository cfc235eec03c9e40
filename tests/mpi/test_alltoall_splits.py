"""To a user of ``alltoall`` with uneven parts: each rank gets its part, and sizes that do not fit raise on all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.functions_entered import python_calls

import torchmpi as mpi
from torchmpi.backends.mpi_messages import check_part_sizes, longest_part
from torchmpi.collectives.exchange import PartsExchange, exchange
from torchmpi.errors import ArgumentError, DeviceError, DtypeError, MismatchError
from torchmpi.session import runtime
from torchmpi.shared_memory import fast_path

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


def sizes(sender: int) -> list[int]:
    return [(2 * sender + receiver) % 4 for receiver in range(mpi.size())]


def rows(sender: int, dtype: torch.dtype) -> torch.Tensor:
    count = sum(sizes(sender))
    return (torch.arange(3 * count).reshape(count, 3) + 100 * sender).to(dtype)


def expected(dtype: torch.dtype) -> torch.Tensor:
    parts = [torch.split(rows(sender, dtype), sizes(sender))[mpi.rank()] for sender in range(mpi.size())]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_rows_of_all_ranks(agree, dtype):
    sent = rows(mpi.rank(), dtype)
    agree.equal(mpi.alltoall(sent, splits=sizes(mpi.rank())), expected(dtype), "list")
    splits = torch.tensor(sizes(mpi.rank()))
    agree.equal(mpi.alltoall(sent, splits=splits), expected(dtype), "tensor")
    agree.equal(mpi.alltoall_async(sent, splits=splits).wait(), expected(dtype), "async")
    agree.equal(mpi.alltoall(sent.t().contiguous().t(), splits=splits), expected(dtype), "strides")
    out = torch.zeros_like(expected(dtype))
    agree(mpi.alltoall(sent, out, splits=splits) is out and mpi.alltoall_async(sent, out, splits=splits).wait() is out)
    agree.equal(out, expected(dtype), "out")
    agree.equal(sent, rows(mpi.rank(), dtype), "the input is unchanged")


def test_repeated_exchanges_of_known_parts_have_the_bits_of_their_twin(agree):
    group, generator = mpi.communicator(0).intra, torch.Generator().manual_seed(7)
    repeated, entered = PartsExchange.of(group, torch.float32), []
    for turn in range(10):
        numels = torch.randint(0, (5, 4000)[turn % 2], (mpi.size(), mpi.size()), generator=generator)
        sent = torch.randn(int(numels[mpi.rank()].sum()))
        sources = list(sent.split(numels[mpi.rank()].tolist()))
        lengths = numels[:, mpi.rank()].tolist()
        results = [torch.full((sum(lengths),), float("nan")) for _ in range(2)]
        exchange(group, sources, list(results[1].split(lengths)))
        for call in (
            lambda: repeated.run(sources, list(results[0].split(lengths)), sent),  # noqa: B023
            lambda: mpi.alltoall(sent, results[0], splits=numels[mpi.rank()]),  # noqa: B023
            lambda: mpi.alltoall_async(sent, results[0], splits=numels[mpi.rank()]).wait(),  # noqa: B023
        ):
            results[0].fill_(float("nan"))
            codes, _ = python_calls(call)
            entered.append({code.co_name for code in codes})
            agree.equal(results[0], results[1], f"turn {turn}")
    has_code = fast_path.exchange is not fast_path._not_built and group.status_board is not None
    agree(not has_code or not any("perform" in names for names in entered[-3:]), f"no machine code: {entered[-3:]}")


def test_no_rows_at_all(agree):
    nothing = mpi.alltoall(torch.ones(0, 2), splits=[0] * mpi.size())
    agree.equal(nothing, torch.ones(0, 2))


def test_the_number_of_received_rows(agree):
    received = mpi.alltoall(torch.tensor(sizes(mpi.rank())))
    agree.equal(received.tolist(), [sizes(sender)[mpi.rank()] for sender in range(mpi.size())])


def test_only_the_ranks_of_a_group(agree):
    with mpi.group([mpi.size() - 1]) as alone:
        if alone:
            agree.equal(mpi.alltoall(torch.arange(3), splits=[3], comm=alone), torch.arange(3))


def test_refusals(agree):
    tensor, even = torch.ones(mpi.size(), 2), [1] * mpi.size()
    agree.raises(ArgumentError, lambda: mpi.alltoall(tensor, splits=[*even[1:], 2]), "add up")
    agree.raises(ArgumentError, lambda: mpi.alltoall(tensor, splits=[*even, 0]), "one number of rows for each rank")
    agree.raises(ArgumentError, lambda: mpi.alltoall(tensor, splits=[0.5] * mpi.size()), "list of integers")
    agree.raises(ArgumentError, lambda: mpi.alltoall(torch.tensor(1.0), splits=even))
    agree.raises(ArgumentError, lambda: mpi.alltoall(tensor, splits=even, backend="mpi"), "Omit backend")
    agree.raises(DtypeError, lambda: mpi.alltoall([1.0], splits=even), "not a tensor")
    agree.raises(DtypeError, lambda: mpi.alltoall(3, splits=even), "a number cannot be split")
    agree.raises(DtypeError, lambda: mpi.alltoall(tensor, tensor.double(), splits=even), "Make out of the same dtype")
    agree.raises(DeviceError, lambda: mpi.alltoall(tensor, tensor.to("meta"), splits=even), f"rank {mpi.rank()}")
    quantized = torch.quantize_per_tensor(tensor, 1.0, 0, torch.qint8)
    for call in (
        lambda: mpi.alltoall(quantized, splits=even),
        lambda: mpi.send_async(quantized, mpi.rank()),
        lambda: mpi.recv_async(quantized, mpi.rank()),
    ):
        agree.raises(DtypeError, call, f"rank {mpi.rank()}: ", "Convert")


@pytest.mark.min_ranks(2)
def test_calls_that_differ_between_the_ranks_raise_on_all(agree):
    splits = [1] * mpi.size()
    wide = torch.ones(mpi.size(), 3 if mpi.rank() else 2)
    other = torch.ones(mpi.size(), 2, dtype=torch.float64 if mpi.rank() else torch.float32)
    for _ in range(2):  # through Python, then by machine code
        for call in (
            lambda: mpi.alltoall(wide, splits=splits),
            lambda: mpi.alltoall_async(wide, splits=splits).wait(),
        ):
            agree.raises(MismatchError, call, "alltoall_splits(float32 [2])", "alltoall_splits(float32 [3])")
        agree.raises(MismatchError, lambda: mpi.alltoall(other, splits=splits), "splits(float64 [2])")
        agree.raises(MismatchError, lambda: mpi.alltoall(torch.ones(mpi.size()), splits=None if mpi.rank() else splits))
        agree.equal(mpi.allreduce(1), mpi.size(), "the communicator works afterwards")
        agree.equal(mpi.alltoall(torch.ones(mpi.size(), 2), splits=splits), torch.ones(mpi.size(), 2))


@pytest.mark.parametrize("wrong", [None, *range(4)])
def test_sizes_of_both_sides_are_compared_by_all_ranks(agree, wrong):
    """Without and with one part for which its receiver has no room, like the table of all sizes."""
    own, size = mpi.rank(), mpi.size()
    room = [sizes(sender)[own] for sender in range(size)]
    sender, receiver = (0 if wrong is None else wrong % size), size - 1
    if wrong is not None and own == receiver:
        room[sender] += 5
    parts = [[torch.empty(8 * number, dtype=torch.uint8) for number in numbers] for numbers in (sizes(own), room)]
    group = runtime.current().world
    table = np.array(mpi.allgather_object([[part.numel() for part in side] for side in parts]))

    def compare():
        check_part_sizes(group, *parts)

    if wrong is None:
        compare()
        agree(longest_part(table, group.where) == 8 * max(number for rank in range(size) for number in sizes(rank)))
        return
    sent = sizes(sender)[receiver]
    room_bytes = 8 * sent + 40
    message = f"rank {sender} of the group sends {8 * sent} bytes to rank {receiver}, which has room for {room_bytes}"
    agree.raises(MismatchError, compare, message)
    agree.raises(MismatchError, lambda: longest_part(table, group.where), message)
