"""To a user of validation: metrics cover the data of all ranks, and all ranks stop together."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.small_nets import Accuracy, make_batches, network
from torch import Tensor, nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.engine import AllReduceSGDEngine, ClassErrorMeter, EarlyStop, SGDEngine, SummedMetric
from torchmpi.errors import ArgumentError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]


def parts() -> list[list[tuple[Tensor, Tensor]]]:
    return [make_batches((3, 0, 2, 4)[rank % 4], seed=rank) for rank in range(mpi.size())]


def test_metrics_cover_the_data_of_all_ranks(agree):
    data = parts()
    engine = AllReduceSGDEngine(progress=False)
    metrics = {
        "second": ClassErrorMeter(topk=(2,)),
        "accuracy": SummedMetric(Accuracy(), "num_correct", "num_total"),
    }
    if mpi.rank() == 0:  # in any order
        metrics = dict(reversed(metrics.items()))
    criterion = nn.CrossEntropyLoss()
    for _ in range(2):
        result = engine.test(network=network(), criterion=criterion, iterator=data[mpi.rank()], metrics=metrics)
    expected = SGDEngine(progress=False).test(
        network=network(),
        criterion=criterion,
        iterator=[batch for part in data for batch in part],
        metrics={"accuracy": Accuracy()},
        topk=(2,),
    )
    agree.equal(result.metrics["accuracy"], expected.metrics["accuracy"])
    agree.equal(result.metrics["second"], expected.error.value(2))


@pytest.mark.min_ranks(2)
def test_a_metric_of_one_rank_is_refused(agree):
    engine = AllReduceSGDEngine(progress=False)
    arguments = dict(network=network(), criterion=nn.CrossEntropyLoss(), iterator=make_batches(1, 0))
    with pytest.raises(ArgumentError, match=r"Accuracy has no synchronize.*SummedMetric\(metric"):
        engine.test(**arguments, metrics={"accuracy": Accuracy()})
    name = f"error of rank {mpi.rank()}"
    with pytest.raises(ArgumentError, match=r"rank 0 has \['error of rank 0'\], but rank 1 has"):
        engine.test(**arguments, metrics={name: ClassErrorMeter()})


def test_all_ranks_stop_after_the_same_epoch_with_the_best_weights(agree):
    """The validation data of the ranks differ, so that each one alone would stop at another epoch."""
    data = parts()
    engine, losses, weights = AllReduceSGDEngine(progress=False), [], []

    @engine.on("on_end_epoch")
    def look(state):
        losses.append(state.validation.loss.value())
        weights.append(state.network[0].weight.detach().clone())

    net = network()
    state = engine.train(
        network=net,
        criterion=nn.CrossEntropyLoss(),
        iterator=make_batches(2, seed=100 + mpi.rank()),
        lr=0.5,
        max_epochs=60,
        validate=data[mpi.rank()],
        stop_early=EarlyStop(patience=2, keep_best=True),
    )
    for theirs in mpi.allgather_object((state.best_epoch, losses)):
        agree.equal(theirs, (state.best_epoch, losses))
    agree(3 <= len(losses) < 60, f"{len(losses)} epochs")
    agree.equal(losses.index(min(losses)), state.best_epoch)
    agree.equal(net[0].weight.detach(), weights[state.best_epoch])
    mpinn.check_with_allreduce(net)


def test_sums_may_be_numbers_of_numpy(agree):
    """Regression: only those of 64 bits that Python's float is a base of were accepted, the others after an epoch."""

    class Count:
        def reset(self) -> None:
            self.total = np.int64(0)

        def update(self, output: int, target: int) -> None:
            self.total += output

        def compute(self) -> int:
            return int(self.total)

    metric = SummedMetric(Count(), "total")
    metric.reset()
    metric.update(mpi.rank() + 1, 0)
    metric.synchronize()
    agree.equal(metric.compute(), sum(range(1, mpi.size() + 1)))
