"""To a user of fit(): training in one call gives the result of one process on the whole batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.small_nets import network
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.engine import AllReduceSGDEngine, ClassErrorMeter, SGDEngine, fit
from torchmpi.engine.fit import DividedBatches
from torchmpi.errors import ArgumentError
from torchmpi.timeline.trace_reader import MAIN_THREAD, read_folder

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]


def test_the_parts_of_a_run_are_ranges_of_a_timeline(agree, tmp_path):
    folder = Path(mpi.broadcast_object(str(tmp_path)))
    engine = AllReduceSGDEngine(progress=False)
    engine.checkpoint(folder / "run.ckpt")
    with mpi.timeline.start(folder):
        fit(network(), tensors(), batch_size=15, max_epochs=2, lr=0.1, validate=tensors(7), engine=engine)
    mpi.barrier()
    found = read_folder(folder)[mpi.rank()].intervals("range")
    counts = Counter(each.name for each in found if each.thread == MAIN_THREAD)
    for name in ("backward", "synchronize gradients", "optimizer step"):
        agree.equal(counts[name], 6, f"{name}: {counts}")
    agree.equal((counts["validation"], counts["checkpoint"], counts["epoch 1"], counts["epoch 2"]), (2, 2, 1, 1))
    agree(counts["forward"] == counts["criterion"] > 6, f"those of the validation too: {counts}")
    agree(counts["wait for a batch"] >= 8, str(counts))
    loaded = [each for each in found if each.name == "load a batch"]
    agree.equal(len(loaded), counts["wait for a batch"])
    (first,), backward = [each for each in found if each.name == "epoch 1"], [e for e in found if e.name == "backward"]
    agree.equal(sum(first.begin <= each.begin and each.end <= first.end for each in backward), 3)


def tensors(num: int = 45) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, 4, generator=generator), torch.randint(3, (num,), generator=generator)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_one_process_on_whole_batches(agree, accumulate):
    """45 examples: the last batch has 5, of which some ranks have fewer than others, or none."""
    data, held_out = tensors(), tensors(7)
    engine, net = AllReduceSGDEngine(progress=False), network()
    result = fit(
        net,
        data if accumulate == 1 else TensorDataset(*data),
        batch_size=8,
        max_epochs=2,
        lr=0.3,
        validate=held_out,
        engine=engine,
        accumulate=accumulate,
        clip_grad_norm=0.5,
        metrics={"second": ClassErrorMeter(topk=(2,))},
    )
    reference, losses = network(), []
    single = SGDEngine(progress=False)

    @single.on("on_forward_criterion")
    def count(state):
        if state.training:
            losses.append(state.loss.item() * state.sample.num_rows)

    whole = DataLoader(TensorDataset(*data), batch_sampler=DividedBatches(45, 8, 0, 1, seed=0))
    state = single.train(
        network=reference,
        criterion=nn.CrossEntropyLoss(),
        iterator=whole,
        lr=0.3,
        max_epochs=2,
        accumulate=accumulate,
        weight="example",
        clip_grad_norm=0.5,
        validate=[held_out],
    )
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        agree.close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    mpinn.check_with_allreduce(net)
    agree.equal((result.network is net, result.rank, len(result.history)), (True, mpi.rank(), 2))
    first, last = result.history
    agree(abs(first["loss"] - sum(losses[:6]) / 45) < 1e-5, "loss of epoch 0")
    agree(abs(last["loss"] - sum(losses[6:]) / 45) < 1e-5, "loss of epoch 1")
    agree(abs(last["validation"]["loss"] - state.validation.value("loss")) < 1e-5, "loss of the validation")
    agree.equal(last["validation"]["error"], state.validation.value("error"))
    agree(0 <= last["validation"]["second"] <= last["validation"]["error"], "error of the two best")
    agree.equal([hooks for hooks in (engine.hooks.on_start_epoch, engine.hooks.on_end_epoch) if hooks], [])
    agree.equal(engine._kept, {})


def test_parts_of_all_ranks_are_the_whole_batches(agree):
    size = mpi.size()
    for seed in (None, 3):
        samplers = [DividedBatches(23, size + 2, rank, size, seed) for rank in range(size)]
        whole = DividedBatches(23, size + 2, 0, 1, seed)
        orders = []
        for epoch in range(2):
            for sampler in (*samplers, whole):
                sampler.set_epoch(epoch)
            flat = [index for batch in whole for index in batch]
            agree.equal(sorted(flat), list(range(23)))
            agree.equal(sorted(index for sampler in samplers for batch in sampler for index in batch), sorted(flat))
            agree.equal([len(sampler) for sampler in samplers], [len(list(sampler)) for sampler in samplers])
            firsts = [index for sampler in samplers for index in next(iter(sampler))]
            agree.equal(firsts, next(iter(whole)))
            orders.append(flat)
        agree.equal(orders[0] == orders[1], seed is None, "order of the epochs")


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def test_ambiguous_calls_are_refused(agree):
    x, y = tensors()
    refusals = [
        (dict(data=(x, y.float())), "needs criterion=.*torch.float32 of shape"),
        (dict(data=(x, x)), "needs criterion="),
        (dict(data=DataLoader(TensorDataset(x, y))), "DataLoader cannot be divided"),
        (dict(data=Stream()), "Stream cannot be divided"),
        (dict(data=(x[:0], y[:0])), "empty"),
        (dict(data=(x, y), batch_size=mpi.size() - 1), "use at least"),
        (dict(data=(x, y), lr=0.1, criterion=nn.CrossEntropyLoss(reduction="sum")), "reduction='mean'"),
    ]
    for arguments, message in refusals:
        with pytest.raises(ArgumentError, match=message):
            fit(network(), engine=AllReduceSGDEngine(progress=False), **arguments)


def test_default_optimizer(agree):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, target):
            return nn.functional.cross_entropy(output * self.scale, target)

    criterion = Scaled()
    result = fit(network(), tensors(), criterion=criterion, engine=AllReduceSGDEngine(progress=False))
    agree(isinstance(result.state.optimizer, torch.optim.Adam), "no Adam")
    agree(criterion.scale.item() != 1, "the criterion was not trained")


@pytest.mark.min_ranks(2)
def test_sync_batchnorm_needs_examples_on_all_ranks(agree):
    """The last batch has one example. Regression: as the second batch of an update it was a MismatchError."""
    net = nn.Sequential(nn.Linear(4, 8), mpinn.SyncBatchNorm(8), nn.Linear(8, 3))
    data = tensors(2 * mpi.size() + 1)
    for accumulate in (1, 2) if mpi.size() > 1 else ():
        engine = AllReduceSGDEngine(progress=False)
        with pytest.raises(ArgumentError, match=r"'1' is a SyncBatchNorm.*the last batch has at least"):
            fit(net, data, batch_size=2 * mpi.size(), engine=engine, accumulate=accumulate)
