"""To a user of the MNIST examples: data are read and divided right, and error messages name the file."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "mnist"

from mnist_data import Batches, Split, load  # noqa: E402
from mnist_files import DataError, read_idx  # noqa: E402


def idx(array: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + b"".join(length.to_bytes(4, "big") for length in array.shape)
    return header + array.astype(np.uint8).tobytes()


def images(num: int) -> np.ndarray:
    return np.random.RandomState(num).randint(256, size=(num, 4, 3))


def labels(num: int) -> np.ndarray:
    return np.arange(num) % 10


def write(directory: Path, name: str, array: np.ndarray) -> Path:
    path = directory / name
    path.write_bytes(gzip.compress(idx(array), mtime=0) if name.endswith(".gz") else idx(array))
    return path


@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_reads_mnist_under_all_file_names(tmp_path, dot, suffix):
    for prefix, num in (("train", 30), ("t10k", 10)):
        write(tmp_path, f"{prefix}-images{dot}idx3-ubyte{suffix}", images(num))
        write(tmp_path, f"{prefix}-labels{dot}idx1-ubyte{suffix}", labels(num))
    data = load(str(tmp_path))
    assert (len(data.train), len(data.test), data.num_inputs) == (30, 10, 12)
    assert torch.equal(data.train.target, torch.arange(30) % 10)
    expected = torch.from_numpy(images(30).reshape(30, 12)).float() / 255
    assert torch.equal(data.train.input, expected)
    assert "30 training and 10 test images" in data.origin and "split" not in data.origin


def test_splits_the_test_files_if_there_are_no_others(tmp_path):
    write(tmp_path, "t10k-images-idx3-ubyte", images(50))
    write(tmp_path, "t10k-labels-idx1-ubyte", labels(50))
    data = load(str(tmp_path))
    assert (len(data.train), len(data.test)) == (40, 10)
    assert "only the t10k files are there" in data.origin
    rows = torch.cat([data.train.input, data.test.input])
    assert sorted(rows.tolist()) == sorted((torch.from_numpy(images(50).reshape(50, 12)).float() / 255).tolist())
    assert torch.equal(load(str(tmp_path)).train.input, data.train.input)  # the same split each time


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found an empty file"),
        (b"<html>", "expected an IDX file of bytes with 1 dimension.*found 3c 68 74 6d"),
        (idx(images(2)), "with 1 dimension.*found 00 00 08 03"),
        (idx(labels(5))[:6], "expected a header of 8 bytes, found a file of 6"),
        (idx(labels(5))[:-1], r"expected 5 bytes of data for shape \(5,\), found 4: .*truncated"),
        (idx(labels(5)) + b"x", "expected 5 bytes of data .* found 6"),
        (gzip.compress(idx(labels(500)), mtime=0)[:-9], "found: "),
        (gzip.compress(idx(labels(500)), mtime=0)[:20] + b"\xff" * 30, "found: "),
        (idx(labels(5) + 7), "expected labels from 0 to 9, found 11"),
        (idx(labels(4)), "expected 5 labels, one for each image of .*images-idx3-ubyte, found 4"),
    ],
)
def test_wrong_files_are_named(tmp_path, content, message):
    write(tmp_path, "t10k-images-idx3-ubyte", images(5))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=f"labels-idx1-ubyte: .*{message}"):
        load(str(tmp_path))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match="nowhere: expected a directory"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"expected one of t10k-images-idx3-ubyte, .*found none"):
        load(str(tmp_path))
    write(tmp_path, "t10k-images-idx3-ubyte", images(5))
    write(tmp_path, "t10k-labels-idx1-ubyte", labels(5))
    write(tmp_path, "train-images-idx3-ubyte", images(5))
    with pytest.raises(DataError, match="expected one of train-labels-idx1-ubyte"):
        load(str(tmp_path))


def test_huge_shape_is_refused_before_reading(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes((0, 0, 8, 3)) + b"\xff" * 12 + b"data")
    with pytest.raises(DataError, match=f"expected {(2**32 - 1) ** 3} bytes"):
        read_idx(path, 3)


@pytest.mark.slow
def test_digits():
    pytest.importorskip("sklearn", reason="the built-in digits are part of scikit-learn")
    data = load()
    assert (len(data.train), len(data.test), data.num_inputs) == (1437, 360, 64)
    assert data.train.input.min() == 0 and data.train.input.max() == 1
    assert set(data.train.target.tolist()) == set(data.test.target.tolist()) == set(range(10))
    assert torch.equal(load().test.input, data.test.input)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num", [1, 10, 23])
def test_ranks_share_the_same_global_batches(num, size):
    split = Split(torch.arange(num * 2.0).reshape(num, 2), torch.arange(num))
    whole = Batches(split, 5, seed=3)
    parts = [Batches(split, 5, seed=3, rank=rank, size=size) for rank in range(size)]
    orders = []
    for epoch in range(2):
        for batches in (whole, *parts):
            batches.set_epoch(epoch)
        slices = list(zip(*parts, strict=True))
        assert len(slices) == len(whole) == -(-num // 5)
        for (x, y), ranks in zip(whole, slices, strict=True):
            assert torch.equal(torch.cat([part[0] for part in ranks]), x)
            assert torch.equal(torch.cat([part[1] for part in ranks]), y)
            assert max(len(part[1]) for part in ranks) - min(len(part[1]) for part in ranks) <= 1
        orders.append(torch.cat([y for _, y in whole]).tolist())
        assert sorted(orders[-1]) == list(range(num))
    assert num == 1 or orders[0] != orders[1]


def test_parts_cover_everything():
    split = Split(torch.zeros(11, 2), torch.arange(11))
    assert torch.equal(torch.cat([split.part(rank, 4).target for rank in range(4)]), split.target)
