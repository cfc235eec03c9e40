"""To a user of AllReduceSGDEngine: it does what an explicit loop on all data in one process does."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.small_nets import make_batches, network
from torch import Tensor, nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.engine import AllReduceSGDEngine, SGDEngine, State
from torchmpi.engine.memory_copies import MemoryCopies
from torchmpi.errors import ArgumentError, DeviceError, GradientError, ReplicaError
from torchmpi.session import recovery, runtime

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]

Batch = tuple[Tensor, Tensor]


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)


def train(engine: AllReduceSGDEngine, net: nn.Module, batches: list[Batch], **options: object) -> State:
    options = {"optimizer": momentum(net), "max_epochs": 2, **options}
    return engine.train(network=net, criterion=nn.CrossEntropyLoss(), iterator=batches, **options)


def explicit_loop(
    batches_of_ranks: list[list[Batch]], max_epochs: int = 2, autocast: torch.dtype | None = None, scale: float = 1.0
) -> nn.Module:
    """At each step the average over the ranks that have a batch, of losses that are multiplied by `scale` meanwhile."""
    net = network()
    optimizer = momentum(net)
    for _ in range(max_epochs):
        for index in range(max(map(len, batches_of_ranks))):
            active = [batches[index] for batches in batches_of_ranks if index < len(batches)]
            optimizer.zero_grad()
            for x, y in active:
                with torch.autocast("cpu", autocast, enabled=autocast is not None):
                    loss = nn.functional.cross_entropy(net(x), y)
                (loss * scale).backward()
            for parameter in net.parameters():
                parameter.grad /= scale * len(active)
            optimizer.step()
    return net


def compare(agree, net: nn.Module, reference: nn.Module) -> None:
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        agree.close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    mpinn.check_with_allreduce(net)


@pytest.mark.parametrize(
    ("asynchronous", "dynamic_network", "debug"),
    [(False, True, False), (False, False, True), (True, False, False), (True, True, True)],  # all pairs
)
def test_averages_over_ranks(agree, asynchronous, dynamic_network, debug):
    data = [make_batches(3, seed=rank) for rank in range(mpi.size())]
    engine = AllReduceSGDEngine(asynchronous=asynchronous, dynamic_network=dynamic_network, debug=debug, progress=False)
    net = network()
    with torch.no_grad():  # only rank 0's weights count
        net[0].weight.add_(mpi.rank())
    state = train(engine, net, data[mpi.rank()])
    agree.equal((state.t, state.batch, state.epoch), (6, 3, 2))
    compare(agree, net, explicit_loop(data))
    train(engine, net, data[mpi.rank()])  # again with the same engine: no registration is left


def num_batches(rank: int) -> int:
    return (4, 0, 2, 5)[rank % 4]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_may_have_different_amounts_of_data(agree, asynchronous):
    data = [make_batches(num_batches(rank), seed=rank) for rank in range(mpi.size())]
    engine = AllReduceSGDEngine(asynchronous=asynchronous, debug=True, progress=False)
    fired: dict[str, list[bool]] = {"on_sample": [], "on_backward": [], "on_update": []}
    for name, calls in fired.items():
        engine.on(name)(lambda state, calls=calls: calls.append(state.sample is not None))
    net = network()
    state = train(engine, net, data[mpi.rank()])
    mine, most = num_batches(mpi.rank()), max(map(len, data))
    agree.equal((state.t, state.batch), (2 * most, mine))
    agree.equal(fired["on_sample"], [True] * mine * 2)
    agree.equal(fired["on_update"], ([True] * mine + [False] * (most - mine)) * 2)
    agree.equal(fired["on_backward"], fired["on_update"])
    compare(agree, net, explicit_loop(data))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_distributed_optimizer(agree, asynchronous):
    data = [make_batches(3, seed=rank) for rank in range(mpi.size())]
    net = network()
    mpinn.synchronize_parameters(net)
    optimizer = mpinn.DistributedOptimizer(momentum(net), net, asynchronous=asynchronous)
    engine = AllReduceSGDEngine(asynchronous=True, progress=False)
    train(engine, net, data[mpi.rank()], optimizer=optimizer)
    compare(agree, net, explicit_loop(data))


def uneven(num: int, num_rows: int, seed: int) -> list[Batch]:
    """Batches of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = [num_rows + (index + seed) % 3 for index in range(num)]
    return [(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in rows]


def concatenated(batches_of_ranks: list[list[Batch]], accumulate: int) -> list[Batch]:
    """The batches of each update of all ranks, as one batch."""
    updates = range(0, max(map(len, batches_of_ranks)), accumulate)
    groups = [[b for batches in batches_of_ranks for b in batches[i : i + accumulate]] for i in updates]
    return [(torch.cat([x for x, _ in group]), torch.cat([y for _, y in group])) for group in groups]


def test_the_scheduler_may_belong_to_the_optimizer_inside_a_distributed_optimizer(agree):
    net = network()
    inner = momentum(net)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = mpinn.DistributedOptimizer(inner, net)
    train(AllReduceSGDEngine(progress=False), net, make_batches(1, 0), optimizer=optimizer, scheduler=scheduler)
    agree.equal(inner.param_groups[0]["lr"], 0.05)


def test_backward_passes_per_step_of_the_optimizer_are_respected(agree):
    """8 batches made 8 steps."""
    net = network()
    optimizer = mpinn.DistributedOptimizer(momentum(net), net, backward_passes_per_step=4)
    data, engine = make_batches(8, seed=mpi.rank()), AllReduceSGDEngine(progress=False)
    state = train(engine, net, data, optimizer=optimizer, max_epochs=1)
    agree.equal((state.t, state.batch, state.accumulate), (2, 8, 4))
    with pytest.raises(ArgumentError, match=r"accumulate=2, but .*backward_passes_per_step=4"):
        train(engine, net, data, optimizer=optimizer, accumulate=2)


@pytest.mark.parametrize("kind", ["engine", "asynchronous engine", "optimizer", "asynchronous optimizer"])
@pytest.mark.parametrize(("accumulate", "weight"), [(1, "example"), (3, "example"), (8, "batch")])
def test_all_options_together_equal_one_process(agree, kind, accumulate, weight):
    """Accumulation, clipping, schedule, autocast and scaler; the reference is an engine on concatenated batches."""

    def options(net: nn.Module) -> dict[str, object]:
        return {
            "weight": weight,
            "clip_grad_norm": 0.2,
            "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
            "scheduler_step": "step",
            "scaler": torch.amp.GradScaler("cpu", growth_interval=2),
        }

    if weight == "batch":
        data = [make_batches(num_batches(rank) + 3, seed=rank) for rank in range(mpi.size())]
    else:
        data = [uneven(num_batches(rank) + 3, 4, seed=rank) for rank in range(mpi.size())]
    net, norms = network(), []
    optimizer: torch.optim.Optimizer = momentum(net)
    is_asynchronous, accumulation = kind.startswith("asynchronous"), {"accumulate": accumulate}
    if kind.endswith("optimizer"):
        optimizer = mpinn.DistributedOptimizer(
            optimizer, net, asynchronous=is_asynchronous, backward_passes_per_step=accumulate
        )
        accumulation = {}
    engine = AllReduceSGDEngine(asynchronous=is_asynchronous, progress=False)
    engine.on("on_update")(lambda state: norms.append(state.grad_norm.item()))
    state = train(engine, net, data[mpi.rank()], optimizer=optimizer, **accumulation, **options(net))
    reference, together = network(), concatenated(data, accumulate)
    SGDEngine(progress=False).train(
        network=reference,
        criterion=nn.CrossEntropyLoss(),
        iterator=together,
        optimizer=momentum(reference),
        max_epochs=2,
        **options(reference),
    )
    agree.equal(state.t, 2 * len(together))
    compare(agree, net, reference)
    agree(max(norms) > 0.2, "nothing was clipped")
    for theirs in mpi.allgather_object(norms):
        agree.equal(norms, theirs, "norms")


@pytest.mark.parametrize("kind", ["asynchronous engine", "optimizer"])
def test_an_infinite_gradient_on_one_rank_skips_the_update_of_all(agree, kind):
    """The last rank has one more batch than the others, and in it infinity."""
    last = mpi.size() - 1
    data = make_batches(3 + (mpi.rank() == last), seed=mpi.rank())
    if mpi.rank() == last:
        data[1][0][0, 0] = torch.inf
    net, scaler, seen = network(), torch.amp.GradScaler("cpu", init_scale=256.0), []
    optimizer = momentum(net)
    if kind == "optimizer":
        optimizer = mpinn.DistributedOptimizer(optimizer, net)
    engine = AllReduceSGDEngine(asynchronous=kind == "asynchronous engine", progress=False)

    @engine.on("on_update")
    def look(state):
        seen.append((scaler.get_scale(), state.network[0].weight.detach().clone()))

    state = train(engine, net, data, optimizer=optimizer, scaler=scaler, max_epochs=1)
    agree.equal(state.t, 4)
    agree.equal([scale for scale, _ in seen], [256.0, 128.0, 128.0, 128.0])
    agree.equal(seen[0][1], seen[1][1], "the skipped update")
    agree(not torch.equal(seen[1][1], seen[2][1]), "the update after it was skipped too")
    mpinn.check_with_allreduce(net)


def test_a_rank_without_any_batch_has_the_same_scale(agree):
    scaler, net = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1), network()
    data = make_batches(2, seed=0)
    mine = data if mpi.rank() == mpi.size() - 1 else []
    train(AllReduceSGDEngine(progress=False), net, mine, scaler=scaler, max_epochs=1)
    agree.equal(scaler.get_scale(), 1024.0)
    compare(agree, net, explicit_loop([data], max_epochs=1))


def test_a_norm_that_is_not_finite_raises_on_all_ranks(agree):
    data = make_batches(1, seed=mpi.rank())
    if mpi.rank() == mpi.size() - 1:
        data[0][0][0, 0] = torch.nan
    with pytest.raises(GradientError, match="norm of the averaged gradient is nan"):
        train(AllReduceSGDEngine(progress=False), network(), data, clip_grad_norm=1.0)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("name", ["accumulate", "lr", "scaler"])
def test_options_that_differ_between_ranks_are_refused(agree, name):
    number = 2 - (mpi.rank() == 1)
    value = torch.amp.GradScaler("cpu", init_scale=float(number)) if name == "scaler" else number
    options = {name: value, "optimizer": None} if name == "lr" else {name: value}
    with pytest.raises(ArgumentError, match=rf"{name} is .*2.* on rank 0, but .*1.* on rank 1"):
        train(AllReduceSGDEngine(progress=False), network(), [], **options)


def test_parameters_that_nobody_synchronizes_are_refused(agree):
    net, forgotten = network(), nn.Linear(2, 5)
    optimizer = torch.optim.SGD([*net.parameters(), *forgotten.parameters()], lr=0.1)
    with pytest.raises(ArgumentError, match=r"parameter 4 of the optimizer's group 0, of shape \[5, 2\]"):
        train(AllReduceSGDEngine(progress=False), net, make_batches(1, seed=0), optimizer=optimizer)


def test_hooks_see_the_averaged_gradient(agree):
    engine = AllReduceSGDEngine(progress=False)
    gradients: list[Tensor] = []
    engine.hooks.on_backward.append(lambda state: gradients.append(state.network[0].weight.grad.clone()))
    train(engine, network(), make_batches(2, seed=mpi.rank()))
    of_all_ranks = mpi.allgather_object(gradients)
    agree.equal(len(gradients), 4)
    for theirs in of_all_ranks:
        agree(all(torch.equal(a, b) for a, b in zip(gradients, theirs, strict=True)), "gradients differ")


def test_criterion_with_parameters_is_trained_too(agree):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0 + mpi.rank()))

        def forward(self, output, target):
            return nn.functional.cross_entropy(output * self.scale, target)

    for asynchronous in (False, True):
        criterion, net = Scaled(), network()
        criterion.shared = net[0].bias
        engine = AllReduceSGDEngine(asynchronous=asynchronous, progress=False)
        batches = make_batches(2, seed=mpi.rank())
        engine.train(network=net, criterion=criterion, iterator=batches, lr=0.1, max_epochs=2)
        agree(criterion.scale.item() not in (1.0, 1.0 + mpi.rank()), "the criterion was not trained")
        mpinn.check_with_allreduce(criterion)


def test_after_an_error_the_network_is_not_registered(agree):
    net, engine = network(), AllReduceSGDEngine(asynchronous=True, progress=False)
    fail = engine.on("on_backward")(lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(engine, net, make_batches(2, seed=mpi.rank()))
    agree(all(not each._post_accumulate_grad_hooks for each in net.parameters()), "hooks are left")
    engine.hooks.on_backward.remove(fail)
    train(engine, net, make_batches(2, seed=mpi.rank()))
    mpinn.check_with_allreduce(net)


@pytest.mark.parametrize(("hook", "t", "epoch"), [("on_update", 3, 0), ("on_end_epoch", 9, 1), ("on_start", 0, 0)])
def test_stop_on_one_rank_stops_all(agree, hook, t, epoch):
    engine = AllReduceSGDEngine(progress=False)

    @engine.on(hook)
    def stop(state):
        if mpi.rank() == mpi.size() - 1 and state.t == t:
            state.stop = True

    state = train(engine, network(), make_batches(9, seed=mpi.rank()))
    agree.equal((state.t, state.epoch, state.stop), (t, epoch, True))


@pytest.mark.min_ranks(2)
def test_debug_detects_replicas_that_differ(agree):
    engine = AllReduceSGDEngine(debug=True, progress=False)

    @engine.on("on_update")
    def change(state):
        with torch.no_grad():
            state.network[2].bias.add_(mpi.rank() * (state.t == 2))

    batches = make_batches(4, seed=mpi.rank())
    with pytest.raises(ReplicaError, match=r"2\.bias"):
        train(engine, network(), batches)


def test_device(agree):
    net = network()
    train(AllReduceSGDEngine(use_gpu=False, progress=False), net, make_batches(1, seed=0))
    agree.equal(next(net.parameters()).device.type, "cpu")
    if mpi.device().type != "cuda":
        with pytest.raises(DeviceError, match="use_gpu=True"):
            train(AllReduceSGDEngine(use_gpu=True), net, make_batches(1, seed=0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_on_gpus(agree, asynchronous):
    data = [make_batches(3, seed=rank) for rank in range(mpi.size())]
    net = network()
    train(AllReduceSGDEngine(use_gpu=True, asynchronous=asynchronous, progress=False), net, data[mpi.rank()])
    agree.equal(next(net.parameters()).device, mpi.device())
    compare(agree, copy.deepcopy(net).cpu(), explicit_loop(data))


def test_bar_on_rank_0_only(agree, capsys):
    train(AllReduceSGDEngine(), network(), make_batches(2, seed=0))
    agree.equal("epoch 2/2" in capsys.readouterr().err, mpi.rank() == 0)


def rows_of(rank: int) -> int:
    return (7, 0, 3, 12)[rank % 4]


def test_measures_the_data_of_all_ranks(agree):
    generator = torch.Generator().manual_seed(1)
    parts = [
        (
            torch.randn(rows_of(r), 4, generator=generator),
            torch.randint(3, (rows_of(r),), generator=generator),
        )
        for r in range(mpi.size())
    ]
    net = network()
    x, y = parts[mpi.rank()]
    mine = list(zip(x.split(2), y.split(2), strict=True)) if len(y) else []
    result = AllReduceSGDEngine(progress=False).test(
        network=net, criterion=nn.CrossEntropyLoss(), iterator=mine, topk=(1, 2)
    )
    x, y = (torch.cat(part) for part in zip(*parts, strict=True))
    output = net(x)
    agree.equal(result.loss.num_samples, len(y))
    agree.close(
        torch.tensor(result.loss.value()),
        nn.functional.cross_entropy(output, y).detach(),
        rtol=1e-5,
        atol=1e-6,
    )
    agree(
        abs(result.error.value(1) - 100 * (output.argmax(1) != y).double().mean().item()) < 1e-9,
        "class error",
    )


def test_no_state_is_copied_after_the_loss_of_a_rank(monkeypatch):
    """Regression: work on a device is aborted then, so that the last update may have used undefined gradients."""
    context, engine = runtime.current().context, AllReduceSGDEngine(progress=False)
    monkeypatch.setattr(context, "raises_lost_ranks", True)
    monkeypatch.setattr(context, "loss", "")
    copied = []
    monkeypatch.setattr(MemoryCopies, "take", lambda self, run, num_ranks: copied.append(run.state.t))
    monkeypatch.setattr(recovery, "recover", lambda timeout: 1 / 0)
    engine.recover(every=1)

    @engine.on("on_update")
    def lose(state):
        if state.t == 2:
            context.loss = "rank 7 has ended"

    with pytest.raises(ZeroDivisionError):
        train(engine, network(), lambda: make_batches(3, seed=1))
    assert copied == [0, 1]
