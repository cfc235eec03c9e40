"""Checkpoint files: atomic replacement, and refusal of invalid files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from torchmpi.engine import SGDEngine
from torchmpi.engine.checkpoint import Saved, digest, read, write
from torchmpi.engine.coordination import SingleProcess
from torchmpi.errors import ArgumentError, CheckpointError

WEIGHTS = {"weight": torch.arange(5000.0)}
SAVED = Saved(common={"epoch": 3}, own={"kept": {"a": {"x": 1}}}, trees={"network": WEIGHTS})


class TwoRanks(SingleProcess):
    """Rank 0 of two equal ranks."""

    size = 2

    def gather(self, value):
        return [value, value]


@pytest.fixture
def path(tmp_path) -> Path:
    write(tmp_path / "a.ckpt", SAVED, SingleProcess())
    return tmp_path / "a.ckpt"


def test_round_trip(path):
    saved = read(path, SingleProcess())
    assert (saved.common, saved.own) == (SAVED.common, SAVED.own)
    assert torch.equal(saved.trees["network"]["weight"], WEIGHTS["weight"])
    assert torch.equal(torch.load(path, weights_only=True)["network"]["weight"], WEIGHTS["weight"])


def test_overwriting_is_atomic(path, monkeypatch):
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="disk full"):
        write(path, Saved({"epoch": 4}, {}, {}), SingleProcess())
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_mode_follows_the_umask(path):
    mask = os.umask(0o027)
    try:
        write(path, SAVED, SingleProcess())
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o640


def test_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"No such file.*b\.ckpt"):
        read(tmp_path / "b.ckpt", SingleProcess())
    with pytest.raises(CheckpointError, match="No such file"):
        write(tmp_path / "no" / "b.ckpt", SAVED, SingleProcess())


@pytest.mark.parametrize("length", [0, 10, 1000, -1])
def test_truncated(path, length):
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"a\.ckpt .* is no checkpoint, or is truncated"):
        read(path, SingleProcess())


def test_one_flipped_bit(path):
    content = bytearray(path.read_bytes())
    place = content.find(WEIGHTS["weight"].numpy().tobytes()) + 4003
    assert place > 4003
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        read(path, SingleProcess())


def test_other_files_of_torch(path):
    torch.save({"weight": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="no checkpoint of an engine"):
        read(path, SingleProcess())
    torch.save(nn.Linear(1, 1), path)  # would run code
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read(path, SingleProcess())


def test_other_number_of_ranks(path):
    with pytest.raises(CheckpointError, match=r"written by 1 rank\(s\) and cannot be resumed by 2"):
        read(path, TwoRanks())


def test_unreadable_state_is_refused_when_saving(tmp_path):
    own = {"kept": {"fine": {"x": [1, 2.0, "three", None, torch.zeros(1)]}, "mine": {"f": Path("x")}}}
    with pytest.raises(CheckpointError, match=r"state_dict\(\) of 'mine'"):
        write(tmp_path / "a.ckpt", Saved({}, own, {}), SingleProcess())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_digest_depends_on_bits_shapes_and_types(dtype):
    zeros = torch.zeros(2, 3, dtype=dtype)
    changed = zeros.clone()
    changed[1, 2] = 1
    different = [zeros, changed, zeros.reshape(6), zeros[:, :0], [zeros], {"a": zeros}, None, 0, 0.0, "0"]
    assert len({digest(value) for value in different}) == len(different)
    assert digest(changed.t().contiguous().t()) == digest(changed)


@pytest.mark.parametrize("hook", ["on_sample", "on_forward", "on_backward"])
def test_not_in_the_middle_of_an_update(hook, tmp_path):
    engine = SGDEngine(progress=False)
    engine.on(hook)(lambda state: engine.save_checkpoint(tmp_path / "a.ckpt"))
    with pytest.raises(ArgumentError, match="in the middle of an update"):
        engine.train(network=nn.Linear(1, 1), criterion=nn.MSELoss(), iterator=[(torch.zeros(1, 1),) * 2], lr=0.1)
    with pytest.raises(ArgumentError, match="outside of train"):
        engine.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ArgumentError, match="every=0"):
        engine.checkpoint(tmp_path / "a.ckpt", every=0)
