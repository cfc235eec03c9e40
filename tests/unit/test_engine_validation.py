"""To a user of validation: metrics, early stop, best weights, and schedulers that need a metric."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers.small_nets import Accuracy, make_batches, network
from torch import nn

from torchmpi.engine import AverageValueMeter, ClassErrorMeter, EarlyStop, SGDEngine, SummedMetric
from torchmpi.engine.early_stop import BestEpoch
from torchmpi.errors import ArgumentError


def train(net, engine=None, **options):
    options = {"validate": make_batches(3, 1), "lr": 0.5, "max_epochs": 4, **options}
    engine = engine or SGDEngine(progress=False)
    return engine.train(network=net, criterion=nn.CrossEntropyLoss(), iterator=make_batches(3, 0), **options)


def test_metrics_of_objects():
    engine, net, accuracy = SGDEngine(progress=False), network(), Accuracy()
    metrics = {"accuracy": accuracy, "second": ClassErrorMeter(topk=(2,))}
    for _ in range(2):  # the metrics are reset
        result = engine.test(network=net, criterion=nn.CrossEntropyLoss(), iterator=make_batches(3, 0), metrics=metrics)
    assert result.metrics["accuracy"] == pytest.approx(1 - result.error.value(1) / 100)
    assert accuracy.num_total == 18
    assert result.value("second") == class_error(net, 2)
    assert result.value("loss") == result.loss.value() and result.value("error") == result.error.value(1)
    with pytest.raises(ArgumentError, match="no metric 'acc'; there are loss, error, accuracy, second"):
        result.value("acc")


def class_error(net, k):
    meter = ClassErrorMeter(topk=(k,))
    for x, y in make_batches(3, 0):
        meter.add(net(x), y)
    return meter.value()


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (AverageValueMeter(), r"AverageValueMeter has no update\(\), compute\(\)"),
        (Accuracy, "it is a class"),
        (lambda output, target: 0.0, r"has no reset\(\), update\(\), compute\(\)"),
    ],
)
def test_objects_that_are_no_metrics_are_refused(metric, message):
    with pytest.raises(ArgumentError, match=message):
        SGDEngine().test(network=network(), criterion=nn.MSELoss(), iterator=[], metrics={"m": metric})


def test_sums_that_are_not_named_are_refused():
    with pytest.raises(ArgumentError, match="name the attributes"):
        SummedMetric(Accuracy())
    metric = SummedMetric(Accuracy(), "num_correct")
    metric.reset()
    with pytest.raises(ArgumentError, match="changed num_total, which would remain local"):
        metric.update(torch.eye(3), torch.arange(3))


@pytest.mark.parametrize("counts", [[0, 0], {0: 0}, np.zeros(2), np.int64(0), torch.zeros(2)], ids=repr)
def test_changed_elements_are_found(counts):
    """Regression: only changes of the length of lists and dicts were, and none of numbers and arrays of NumPy."""

    class Counts(Accuracy):
        def update(self, output, target):
            super().update(output, target)
            if isinstance(self.counts, np.int64):
                self.counts += 1
            else:
                self.counts[0] += 1

    metric = SummedMetric(Counts(), "num_correct", "num_total")
    metric.reset()
    metric.metric.counts = copy.deepcopy(counts)
    with pytest.raises(ArgumentError, match="changed counts, which would remain local"):
        metric.update(torch.eye(3), torch.arange(3))


def test_validation_after_each_epoch():
    engine, net, seen = SGDEngine(progress=False), network(), []

    @engine.on("on_end_epoch")
    def look(state):
        expected = engine.test(
            network=copy.deepcopy(net), criterion=nn.CrossEntropyLoss(), iterator=make_batches(3, 1)
        ).loss.value()
        seen.append((state.validation.loss.value() == expected, state.validation.value("accuracy")))

    state = train(net, engine, metrics={"accuracy": Accuracy()})
    assert [equal for equal, _ in seen] == [True] * 4
    assert state.validation.value("accuracy") == seen[-1][1]
    assert net.training


class Scripted(Accuracy):
    """A metric with a given value for each epoch."""

    def __init__(self, engine: SGDEngine, values: list[float]) -> None:
        self.values = values
        engine.on("on_start_epoch")(lambda state: setattr(self, "epoch", state.epoch))

    def compute(self):
        return self.values[self.epoch]


VALUES = [3.0, 2.0, 1.0, 1.5, 1.2, 0.5]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("keep_best", [True, False])
def test_early_stop_and_best_weights(mode, keep_best):
    engine, net, weights = SGDEngine(progress=False), network(), []
    metric = Scripted(engine, VALUES if mode == "min" else [-value for value in VALUES])
    engine.on("on_end_epoch")(lambda state: weights.append(copy.deepcopy(state.network.state_dict())))
    stop_early = EarlyStop(patience=2, metric="scripted", mode=mode, keep_best=keep_best)
    state = train(net, engine, max_epochs=9, metrics={"scripted": metric}, stop_early=stop_early)
    assert (state.best_epoch, state.epoch, len(weights)) == (2, 5, 5)
    expected = weights[2 if keep_best else 4]
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in expected.items())
    assert not torch.equal(weights[2]["0.weight"], weights[4]["0.weight"])


def test_rule_of_early_stop():
    best = BestEpoch(EarlyStop(patience=2, min_delta=0.1))
    over = []
    for epoch, value in enumerate([1.0, 0.95, 0.8, math.nan, 0.75]):
        best.add(value, epoch)
        over.append(best.is_over)
    assert over == [False, False, False, False, True]
    assert (best.epoch, best.value) == (2, 0.8)


def test_infinite_values_are_no_improvement():
    best = BestEpoch(EarlyStop(patience=2))
    assert [best.add(value, epoch) for epoch, value in enumerate([math.inf, math.inf, 1.0, 1.0])] == [1, 0, 1, 0]
    best = BestEpoch(EarlyStop(patience=2))
    for epoch in range(3):
        best.add(math.inf, epoch)
    assert best.is_over


def test_resuming_a_run_with_validation(tmp_path):
    def run(max_epochs, resume=None):
        net, engine = network(), SGDEngine(progress=False)
        engine.checkpoint(tmp_path / "a")
        stop_early = EarlyStop(patience=2, metric="scripted", keep_best=True)
        metrics = {"scripted": Scripted(engine, VALUES)}
        state = train(net, engine, max_epochs=max_epochs, metrics=metrics, stop_early=stop_early, resume=resume)
        return net[0].weight, (state.epoch, state.best_epoch)

    whole, ends = run(9)
    assert ends == (5, 2)
    again, ends = run(9, tmp_path / "a")  # has stopped already
    assert ends == (5, 2) and torch.equal(again, whole)
    run(4)
    resumed, ends = run(9, tmp_path / "a")
    assert ends == (5, 2) and torch.equal(resumed, whole)


def test_a_plateau_gets_the_validation():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    metrics = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metric):
            metrics.append(metric)
            super().step(metric)

    engine, losses = SGDEngine(progress=False), []
    engine.on("on_end_epoch")(lambda state: losses.append(state.validation.loss.value()))
    train(net, engine, lr=None, optimizer=optimizer, scheduler=Plateau(optimizer, patience=0))
    assert metrics == losses and len(metrics) == 4
    assert optimizer.param_groups[0]["lr"] < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validate": None, "metrics": {"a": Accuracy()}}, "need validate="),
        ({"validate": None, "stop_early": EarlyStop()}, "need validate="),
        ({"validate": []}, "no batch after epoch 0"),
        ({"stop_early": EarlyStop(metric="acc")}, "no metric 'acc'; there are loss, error"),
        ({"metrics": {"loss": Accuracy()}}, "'loss' and 'error' are the names"),
        (
            {"validate": None, "scheduler": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)},
            "ReduceLROnPlateau, which needs",
        ),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        train(network(), **options)


@pytest.mark.parametrize("options", [{"patience": 0}, {"mode": "least"}, {"min_delta": -1.0}])
def test_wrong_rules_are_refused(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        EarlyStop(**options)


def test_the_least_patience_is_one_epoch_and_a_rule_does_not_change():
    best = BestEpoch(EarlyStop(patience=1))
    assert best.add(1.0, 0) and not best.add(2.0, 1) and best.is_over
    with pytest.raises(ArgumentError, match="patience=0"):
        EarlyStop(patience=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        EarlyStop().patience = 2  # type: ignore[misc]
