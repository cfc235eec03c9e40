"""To a user of clipping, schedulers, mixed precision, compiled networks: the engine does what an explicit loop does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchmpi.engine import EarlyStop, SGDEngine
from torchmpi.engine.scheduling import Schedule
from torchmpi.engine.updates import GradientUpdate, UpdateOptions
from torchmpi.errors import ArgumentError, CheckpointError, GradientError


def batches(num: int = 4, rows: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)) for _ in range(num)
    ]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))


def quiet() -> SGDEngine:
    return SGDEngine(progress=False)


def train(net, engine=None, data=None, **options):
    torch.manual_seed(1)
    if "optimizer" not in options:
        options["lr"] = 0.5
    data = batches() if data is None else data
    return (engine or quiet()).train(network=net, criterion=nn.CrossEntropyLoss(), iterator=data, **options)


def explicit_loop(
    net: nn.Module, change, *, max_epochs: int = 1, autocast: bool = False, schedule=None, when="step"
) -> nn.Module:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scheduler = schedule(optimizer) if schedule else None
    for _ in range(max_epochs):
        for x, y in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            change(net.parameters())
            optimizer.step()
            if scheduler and when == "step":
                scheduler.step()
        if scheduler and when == "epoch":
            scheduler.step()
    return net


def same(mine: nn.Module, theirs: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


# --- clipping -----------------------------------------------------------------------------------------


def test_clipping_of_the_norm():
    mine, engine, norms, expected = network(), quiet(), [], []
    engine.on("on_update")(lambda state: norms.append(state.grad_norm))
    train(mine, engine, clip_grad_norm=0.1)
    theirs = explicit_loop(network(), lambda p: expected.append(nn.utils.clip_grad_norm_(p, 0.1)))
    assert same(mine, theirs)
    assert norms == expected and max(norms) > 0.1


def test_clipping_of_values():
    mine = network()
    state = train(mine, clip_grad_value=0.02)
    assert same(mine, explicit_loop(network(), lambda p: nn.utils.clip_grad_value_(p, 0.02)))
    assert not same(mine, explicit_loop(network(), lambda p: None))
    assert state.grad_norm is None


def test_clipping_of_sparse_values():
    weights = []
    for sparse in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 3))
        train(net, data=[(torch.tensor([0, 2, 2]), torch.tensor([0, 1, 2]))], clip_grad_value=0.02)
        weights.append(net[0].weight)
    assert torch.equal(*weights)


def test_hooks_see_gradients_before_clipping():
    engine, seen = quiet(), []
    engine.on("on_backward")(lambda state: seen.append(nn.utils.get_total_norm([state.network[0].weight.grad])))
    train(network(), engine, clip_grad_norm=1e-9)
    assert min(seen) > 1e-6


def test_a_norm_that_is_not_finite_is_an_error():
    data = batches()
    data[2][0][0, 0] = torch.inf
    net, before = network(), []
    engine = quiet()
    engine.on("on_update")(lambda state: before.append(copy.deepcopy(net)))
    with pytest.raises(GradientError, match="norm of the averaged gradient is nan"):
        train(net, engine, data, clip_grad_norm=1.0)
    assert len(before) == 2 and same(net, before[1])


# --- schedulers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["step", "epoch"])
@pytest.mark.parametrize("is_made", [False, True])
def test_schedulers(when, is_made):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    mine = network()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
    scheduler = schedule if is_made else schedule(optimizer)
    train(mine, optimizer=optimizer, scheduler=scheduler, scheduler_step=when, max_epochs=2)
    theirs = explicit_loop(network(), lambda p: None, max_epochs=2, schedule=schedule, when=when)
    assert same(mine, theirs)


@pytest.mark.parametrize("every", [None, 3])
def test_resuming_with_scheduler_and_scaler(tmp_path, every):
    def run(max_epochs, **options):
        net, engine = network(), quiet()
        engine.checkpoint(tmp_path / "a", every=every)
        train(
            net,
            engine,
            max_epochs=max_epochs,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
            scheduler_step="epoch" if every is None else "step",
            scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2),
            **options,
        )
        return net

    whole = run(3)
    run(2)
    assert same(run(3, resume=tmp_path / "a"), whole)
    with pytest.raises(CheckpointError, match=r"scaler=.*give train\(\)"):
        train(network(), resume=tmp_path / "a", max_epochs=3)
    if every is not None:
        with pytest.raises(CheckpointError, match="within epoch 3, but max_epochs=1"):
            run(1, resume=tmp_path / "a")


# --- mixed precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [True, torch.bfloat16])
def test_autocast(autocast):
    engine, dtypes = quiet(), []
    engine.on("on_forward")(lambda state: dtypes.append((state.output.dtype, torch.is_autocast_enabled("cpu"))))
    mine = network()
    train(mine, engine, autocast=autocast)
    engine.test(network=mine, criterion=nn.CrossEntropyLoss(), iterator=batches(1), autocast=autocast)
    assert dtypes == [(torch.bfloat16, False)] * 5
    assert same(mine, explicit_loop(network(), lambda p: None, autocast=True))


def test_autocast_of_the_caller_remains():
    engine, dtypes = quiet(), []
    engine.on("on_forward")(lambda state: dtypes.append(state.output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        train(network(), engine)
    assert dtypes == [torch.bfloat16] * 4


def test_a_scaler_changes_nothing_but_skips_infinite_gradients():
    data = batches()
    data.insert(1, (data[0][0] * torch.inf, data[0][1]))
    mine, engine, scales, lrs = network(), quiet(), [], []
    mine[2].p = 0.0
    theirs = copy.deepcopy(mine)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    engine.on("on_update")(lambda state: (scales.append(scaler.get_scale()), lrs.append(state.lr)))
    scheduler = {
        "scheduler": lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5),
        "scheduler_step": "step",
    }
    state = train(mine, engine, data, scaler=scaler, clip_grad_norm=0.1, **scheduler)
    assert state.t == 5
    assert scales == [1024.0] + [512.0] * 4
    assert lrs == [0.25, 0.25, 0.125, 0.0625, 0.03125]  # the skipped update does not count
    train(theirs, clip_grad_norm=0.1, **scheduler)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_float16_with_a_scaler():
    data = batches()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    mine, theirs = network(), network()
    state = train(mine, data=data, autocast=torch.float16, scaler=scaler, max_epochs=2, accumulate=2)
    assert state.output.dtype is torch.float16 and scaler.get_scale() == 64.0
    torch.manual_seed(1)
    optimizer, scaler = torch.optim.SGD(theirs.parameters(), lr=0.5), torch.amp.GradScaler("cpu", init_scale=64.0)
    for pair in (data[:2], data[2:]) * 2:
        optimizer.zero_grad()
        for x, y in pair:
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(theirs(x), y)
            scaler.scale(loss * 0.5).backward()
        scaler.step(optimizer)
        scaler.update()
    assert same(mine, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, "only one"),
        ({"clip_grad_norm": 0.0}, "above 0"),
        ({"clip_grad_value": float("nan")}, "above 0"),
        ({"autocast": torch.float16}, "float16 without scaler"),
        ({"autocast": torch.float64}, "autocast=torch.float64"),
        ({"autocast": "bf16"}, "autocast='bf16'"),
        ({"scheduler_step": "batch"}, "scheduler_step='batch'"),
        ({"scheduler": lambda _: None}, "has returned None"),
        (
            {"scheduler": lambda _: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(network().parameters(), 1.0), 1)},
            "StepLR of another optimizer",
        ),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        train(network(), **options)


# --- compiled networks --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("part", ["whole", "layer"])
def test_checkpoints_of_compiled_networks_fit_plain_ones(tmp_path, part):
    def compiled(net):
        if part == "whole":
            return torch.compile(net, backend="eager")
        net[0] = torch.compile(net[0], backend="eager")
        return net

    def run(net, path, max_epochs=2, **options):
        engine = quiet()
        engine.checkpoint(path, every=3)
        optimizer = torch.optim.Adam(net.parameters())
        train(net, engine, optimizer=optimizer, max_epochs=max_epochs, **options)
        return net

    whole = run(network(), tmp_path / "plain")
    assert same(run(compiled(network()), tmp_path / "compiled"), whole)
    assert same(run(compiled(network()), tmp_path / "unused", resume=tmp_path / "plain"), whole)
    assert same(run(network(), tmp_path / "unused", resume=tmp_path / "compiled"), whole)
    # The first epoch is the best.
    options = {"validate": batches(), "stop_early": EarlyStop(mode="max", keep_best=True)}
    best = run(network(), tmp_path / "plain", **options)
    assert same(run(compiled(network()), tmp_path / "compiled", **options), best) and not same(best, whole)
    assert same(run(network(), tmp_path / "unused", resume=tmp_path / "compiled", **options), best)


def test_no_rank_has_an_example():
    """The average over none is zero, whatever the gradients are; a weight below the number of batches is possible."""
    for total, factor in ((0, 2.0), (1, 2.0), (4, 0.5)):
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.full((2,), 3.0)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        GradientUpdate(UpdateOptions(weight="example"), optimizer, None).complete(total, 2)
        assert parameter.grad.tolist() == [3.0 * factor] * 2


def test_an_update_without_examples_on_any_rank_leaves_the_gradients():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    GradientUpdate(UpdateOptions(), torch.optim.SGD([parameter], lr=0.1), None).complete(0, 3)
    assert parameter.grad.tolist() == [0.0, 0.0]


def test_a_scheduler_of_another_optimizer_would_change_nothing():
    optimizer, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert Schedule(scheduler, "epoch", optimizer, is_validated=False).scheduler is scheduler
    with pytest.raises(ArgumentError, match="StepLR of another optimizer"):
        Schedule(scheduler, "epoch", other, is_validated=False)
