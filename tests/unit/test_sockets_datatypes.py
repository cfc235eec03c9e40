"""What may be passed as a buffer, and how reductions combine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchmpi.distributed.sockets.datatypes import DATATYPES, OPS, blocks_of, buffer, buffer_of, combine
from torchmpi.distributed.sockets.requests import CommunicationError
from torchmpi.tensors import dtypes

BYTE, INT64 = DATATYPES["BYTE"], DATATYPES["INT64_T"]


@pytest.mark.parametrize(
    "given",
    [
        np.arange(6, dtype=np.int64),
        (np.arange(6, dtype=np.int64), INT64),
        [np.arange(6, dtype=np.int64), BYTE],
        (np.arange(9, dtype=np.int64), 6, INT64),
        np.arange(6, dtype=np.int64).tobytes(),
        bytearray(np.arange(6, dtype=np.int64).tobytes()),
        np.arange(6, dtype=np.int64).reshape(2, 3),
    ],
)
def test_forms_of_a_buffer(given):
    assert bytes(buffer_of(given).view) == np.arange(6, dtype=np.int64).tobytes()


def test_memory_by_address_is_the_memory():
    tensor = torch.arange(4, dtype=torch.float32)
    found = buffer_of((buffer.fromaddress(tensor.data_ptr(), 16), 4, DATATYPES["FLOAT"]), written=True)
    found.array()[:] = 7
    assert tensor.tolist() == [7.0] * 4
    nothing = buffer.fromaddress(0, 0)
    assert len(nothing) == 0 and len(buffer_of((nothing, BYTE), written=True).view) == 0


def test_the_type_of_an_array_is_found():
    assert buffer_of(np.zeros(2, np.float64)).datatype is DATATYPES["DOUBLE"]
    assert buffer_of(np.zeros((), np.complex64)).view.nbytes == 8
    with pytest.raises(CommunicationError, match="no MPI type for float16"):
        buffer_of(np.zeros(2, np.float16))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((np.zeros(2), 3, DATATYPES["DOUBLE"]), "3 elements of <DOUBLE> are more than the 16 bytes"),
        ((np.zeros((4, 4))[:, 1], DATATYPES["DOUBLE"]), "contiguous"),
        ((np.zeros(2), "d"), "no buffer"),
    ],
)
def test_wrong_buffers_are_refused(given, message):
    with pytest.raises(CommunicationError, match=message):
        buffer_of(given)


def test_memory_that_cannot_be_written_is_refused_to_receive_into():
    with pytest.raises(CommunicationError, match="cannot be written"):
        buffer_of((b"abc", BYTE), written=True)


def test_blocks():
    memory = np.arange(6, dtype=np.int64)
    assert [block.nbytes for block in blocks_of((memory, INT64), 3)] == [16] * 3
    blocks = blocks_of((memory, [1, 0, 3], [5, 0, 1], INT64), 3)
    assert [np.frombuffer(block, np.int64).tolist() for block in blocks] == [[5], [], [1, 2, 3]]
    with pytest.raises(CommunicationError, match="cannot be split evenly between 5"):
        blocks_of((memory, INT64), 5)
    with pytest.raises(CommunicationError, match="exceed the 48 bytes"):
        blocks_of((memory, [4], [3], INT64), 1)


def test_every_type_that_a_reduction_asks_for_is_there():
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int8, torch.int16, torch.int32,
                  torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool):  # fmt: skip
        name = dtypes.info(dtype).mpi_name
        assert name is not None and DATATYPES[name].itemsize == dtype.itemsize


@pytest.mark.parametrize("num_parts", (1, 2, 3, 5))
@pytest.mark.parametrize("op", OPS)
def test_reductions_combine_in_the_order_given(op, num_parts):
    generator = np.random.default_rng(0)
    kinds = (np.int32, np.uint8) if op.startswith(("B", "L")) else (np.float32, np.int64, np.uint8)
    for kind in kinds:
        parts = [(generator.standard_normal(50) * 100).astype(kind) for _ in range(num_parts)]
        expected = parts[0]
        for part in parts[1:]:
            expected = OPS[op].ufunc(expected, part).astype(kind)
        for place in range(num_parts):  # the result may lie where one of the parts does
            own = [part.copy() for part in parts]
            combine(own, OPS[op], own[place])
            assert own[place].tobytes() == expected.tobytes()


def test_of_objects():
    assert OPS["MAX"](3, 7) == 7 and OPS["SUM"]("a", "b") == "ab" and OPS["LAND"](1, 0) is False
