"""To a user of TensorBoard: it gets the scalars of a run."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from torchmpi.engine import SGDEngine, TensorBoard, tensorboard
from torchmpi.errors import ArgumentError


class Writer:
    def __init__(self):
        self.values = {}

    def add_scalar(self, name, value, step):
        self.values.setdefault(name, []).append((step, value))


def train(target):
    torch.manual_seed(0)
    engine, losses = SGDEngine(progress=False), []
    engine.add(TensorBoard(target))
    engine.hooks.on_update.append(lambda state: losses.append((state.t, state.loss.item())))
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(5)]
    net = nn.Linear(4, 1)
    engine.train(network=net, criterion=nn.MSELoss(), iterator=batches, lr=0.1, max_epochs=2, validate=batches)
    return losses


def test_each_update_has_its_scalars():
    writer = Writer()
    losses = train(writer)
    assert writer.values["loss"] == losses
    assert len(losses) == 10
    steps = [step for step, _ in losses]
    assert writer.values["lr"] == [(step, 0.1) for step in steps]
    for name in ("seconds/calls", "seconds/waited", "seconds/moved", "bytes/calls", "stalls"):
        assert writer.values[name] == [(step, 0.0) for step in steps]  # no ranks
    assert [step for step, _ in writer.values["seconds/update"]] == steps
    assert all(seconds > 0 for _, seconds in writer.values["seconds/update"])


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="pip install tensorboard"):
        TensorBoard("runs")
    TensorBoard(Writer())


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="the package tensorboard is not installed")
def test_files_are_read_by_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = train(tmp_path)
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [
        (step, pytest.approx(loss)) for step, loss in losses
    ]
