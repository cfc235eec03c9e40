"""To who trains: every interface trains each recipe as one process on the whole batch, or refuses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from helpers.recipe_rig import (
    INTERFACES,
    Branches,
    Checkpointed,
    Local,
    Normalized,
    Parallel,
    Recipe,
    Sparse,
    Tied,
    freeze,
    frozen,
    grow,
    lazy,
    thaw,
    train,
    train_adversaries,
    train_with_closure,
    train_with_engine,
)
from mpi4py import MPI
from torch import Tensor, nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.engine import AllReduceSGDEngine
from torchmpi.errors import ArgumentError, GradientError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(2), pytest.mark.usefixtures("world", "default_group")]

RECIPES = {
    "SGD": Recipe(),
    "AdamW": Recipe(optimizer=torch.optim.AdamW),
    "gradients are zeroed": Recipe(set_to_none=False),
    "accumulate": Recipe(passes=3),
    "clip": Recipe(clip="torch"),
    "clip by mpinn": Recipe(clip="mpinn"),
    "autocast": Recipe(autocast=True),
    "scaler": Recipe(scaler=True),
    "scaler, accumulate, clip": Recipe(scaler=True, passes=2, clip="mpinn"),
    "scheduler": Recipe(scheduler=True),
    "accumulate, clip, scheduler, AdamW": Recipe(passes=2, clip="torch", scheduler=True, optimizer=torch.optim.AdamW),
    "tied": Recipe(Tied),
    "frozen": Recipe(frozen),
    "branches": Recipe(Branches),
    "branches, accumulate, clip": Recipe(Branches, passes=2, clip="mpinn"),
    "sparse": Recipe(Sparse),
    "lazy": Recipe(lazy),
    "thawed": Recipe(frozen, late=thaw),
    "frozen later": Recipe(late=freeze),
    "grown": Recipe(late=grow),
    "grown, accumulate, clip": Recipe(late=grow, passes=2, clip="torch"),
    "checkpointed": Recipe(Checkpointed),
    "checkpointed, accumulate, clip, autocast": Recipe(Checkpointed, passes=2, clip="torch", autocast=True),
    "penalty": Recipe(penalty=True),
    "penalty, accumulate, clip": Recipe(penalty=True, passes=2, clip="torch"),
    "compiled": Recipe(compiled=True),
    "compiled, accumulate, clip": Recipe(compiled=True, passes=2, clip="torch"),
    "checkpointed, reentrant": Recipe(partial(Checkpointed, True)),
    "checkpointed, scaler, AdamW": Recipe(Checkpointed, scaler=True, optimizer=torch.optim.AdamW),
    "tied, autocast, accumulate": Recipe(Tied, autocast=True, passes=2),
    "tied, scaler, clip by mpinn": Recipe(Tied, scaler=True, clip="mpinn"),
    "frozen, scaler, accumulate": Recipe(frozen, scaler=True, passes=2),
    "branches, scaler, accumulate": Recipe(Branches, scaler=True, passes=2),
    "branches, autocast": Recipe(Branches, autocast=True),
    "sparse, accumulate, scheduler": Recipe(Sparse, passes=3, scheduler=True),
    "lazy, accumulate, clip, AdamW": Recipe(lazy, passes=2, clip="torch", optimizer=torch.optim.AdamW),
    "thawed, accumulate, clip, AdamW": Recipe(frozen, late=thaw, passes=2, clip="mpinn", optimizer=torch.optim.AdamW),
    "frozen later, accumulate, zeroed": Recipe(late=freeze, passes=2, set_to_none=False),
    "fused AdamW": Recipe(optimizer=partial(torch.optim.AdamW, fused=True)),
    "fused AdamW, scaler, accumulate": Recipe(optimizer=partial(torch.optim.AdamW, fused=True), scaler=True, passes=2),
    "Adam one by one, clip": Recipe(optimizer=partial(torch.optim.Adam, foreach=False), clip="torch"),
}


def cases(names: Sequence[str], ways: Sequence[object]) -> list[tuple[str, object]]:
    """Each property of a recipe with each way to train; recipes with several properties with every third way."""
    chosen = []
    for number, name in enumerate(names):
        chosen += [(name, way) for place, way in enumerate(ways) if "," not in name or (place + number) % 3 == 0]
    return chosen


OF_ENGINE = [name for name, recipe in RECIPES.items() if recipe.set_to_none and not recipe.penalty]


@pytest.fixture(autouse=True, scope="module")
def forgetting() -> Iterator[None]:
    """Compiled graphs are not left for other files."""
    yield
    torch._dynamo.reset()


@cache
def whole(recipe: Recipe) -> nn.Module:
    """The net that one process trains on the whole batches."""
    return train(replace(recipe, compiled=False), Local)


def state(net: nn.Module) -> dict[str, Tensor]:
    """Parameters by name; those of sharded layers are complete. Collective."""
    values = dict(net.state_dict())
    for name, module in net.named_modules():
        if isinstance(module, mpinn.MPLinear):
            values[f"{name}.weight"] = module.full_weight()
    return values


def check_equal(agree, net: nn.Module, expected: nn.Module, initial: nn.Module, tolerance: float) -> None:
    """Every parameter has changed as in `expected`, and has the same bits on all ranks."""
    actual, before, after = state(net), state(initial), state(expected)
    agree.equal(list(actual), list(after))
    for name, value in after.items():
        change = (value - before[name] if name in before else value).double()  # counters of batch norm are integers
        error = (actual[name] - value).double().norm()
        agree(error <= tolerance * change.norm(), f"{name}: error {error:.3g} of a change of {change.norm():.3g}")
    mpinn.check_with_allreduce(net)


@pytest.mark.parametrize(("name", "interface"), cases([*RECIPES], [*INTERFACES]))
def test_recipe(agree, name, interface):
    recipe = RECIPES[name]
    net = train(recipe, INTERFACES[interface])
    check_equal(agree, net, whole(recipe), recipe.make()[0], recipe.tolerance)


@pytest.mark.parametrize(("name", "asynchronous"), cases(OF_ENGINE, [False, True]))
def test_recipe_of_the_engine(agree, name, asynchronous):
    recipe = RECIPES[name]
    net = train_with_engine(recipe, asynchronous=asynchronous)
    check_equal(agree, net, whole(recipe), recipe.make()[0], recipe.tolerance)


def test_recipes_train_each_parameter(agree):
    """A parameter that does not change could not show an error."""
    for name, recipe in RECIPES.items():
        before = state(recipe.make()[0])
        constant = {
            key for key, value in state(whole(recipe)).items() if torch.equal(value, before.get(key, value + 1))
        }
        expected = {Branches: {"unused.weight", "unused.bias"}, frozen: {"0.weight", "0.bias"}}.get(recipe.net, set())
        agree.equal(constant, set() if recipe.late else expected, name)


NORMALIZED = {
    "SGD": Recipe(),
    "accumulate, clip": Recipe(passes=2, clip="mpinn"),
    "AdamW, scheduler": Recipe(optimizer=torch.optim.AdamW, scheduler=True),
    "frozen": Recipe(late=lambda net, optimizer: net.norm.requires_grad_(False)),
}


@pytest.mark.parametrize(("name", "interface"), cases([*NORMALIZED], [*INTERFACES, "engine"]))
def test_recipe_with_sync_batchnorm(agree, name, interface):
    """Batches of the ranks are normalized together; the running statistics are compared too."""
    whole_recipe, recipe = (
        replace(NORMALIZED[name], net=partial(Normalized, layer)) for layer in (nn.BatchNorm1d, mpinn.SyncBatchNorm)
    )
    net = train_with_engine(recipe) if interface == "engine" else train(recipe, INTERFACES[interface])
    check_equal(agree, net, train(whole_recipe, Local), recipe.make()[0], recipe.tolerance)


# --- late parameters without a new registration ----------------------------------------------------------


@pytest.mark.parametrize("interface", ["sync", "optimizer"])
@pytest.mark.parametrize("name", ["thawed", "frozen later", "grown"])
def test_late_parameters_need_no_registration(agree, name, interface):
    recipe = RECIPES[name]
    net = train(recipe, INTERFACES[interface], renew=False)
    check_equal(agree, net, whole(recipe), recipe.make()[0], recipe.tolerance)


@pytest.mark.parametrize("interface", ["hooks", "optimizer hooks"])
@pytest.mark.parametrize("name", ["thawed", "grown"])
def test_late_parameters_without_a_hook_are_refused(agree, name, interface):
    refused = partial(train, RECIPES[name], INTERFACES[interface], renew=False)
    agree.raises(GradientError, refused, "became trainable, or part of the net, after register_async_backward(net)")


# --- refused by the engine -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda net: torch.optim.LBFGS(net.parameters()), "LBFGS"),
        (lambda net: [torch.optim.SGD(net.parameters(), lr=0.1)], "list"),
    ],
    ids=["closure", "two optimizers"],
)
def test_optimizers_that_the_engine_cannot_step_are_refused(agree, make, words):
    net, _ = Recipe().make()
    engine = AllReduceSGDEngine(use_gpu=False, progress=False)
    refused = partial(engine.train, network=net, criterion=nn.CrossEntropyLoss(), iterator=[], optimizer=make(net))
    agree.raises(ArgumentError, refused, words)


# --- model parallelism -----------------------------------------------------------------------------------


SIZE = MPI.COMM_WORLD.size


@pytest.fixture(params=[2, SIZE] if SIZE == 4 else [SIZE])
def shards(request, world) -> Iterator[tuple[int, int]]:
    """The number of ranks that share a layer, and the level of their communicator."""
    width = request.param
    level = mpi.push_communicator(f"shards {mpi.rank() // width}")
    mpi.set_communicator(0)
    yield width, level


PARALLEL_RECIPES = {
    "SGD": Recipe(partial(Parallel, nn.Linear)),
    "AdamW, scheduler": Recipe(partial(Parallel, nn.Linear), optimizer=torch.optim.AdamW, scheduler=True),
    "accumulate": Recipe(partial(Parallel, nn.Linear), passes=2),
    "accumulate, clip": Recipe(partial(Parallel, nn.Linear), passes=2, clip="mpinn"),
    "autocast": Recipe(partial(Parallel, nn.Linear), autocast=True),
}


@pytest.mark.parametrize(
    ("name", "interface"), cases([*PARALLEL_RECIPES], ["sync", "hooks", "optimizer", "optimizer hooks", "engine"])
)
def test_model_parallel_recipe(agree, shards, name, interface):
    recipe = PARALLEL_RECIPES[name]
    width, level = shards
    sharded = replace(recipe, net=partial(Parallel, partial(mpinn.MPLinear, comm=level)), width=width)
    net = train_with_engine(sharded) if interface == "engine" else train(sharded, INTERFACES[interface])
    check_equal(agree, net, whole(recipe), recipe.make()[0], recipe.tolerance)


# --- two nets, and closures ------------------------------------------------------------------------------


@pytest.mark.parametrize("interface", INTERFACES)
def test_adversaries(agree, interface):
    nets, expected = train_adversaries(INTERFACES[interface]), train_adversaries(Local)
    check_equal(agree, nets, expected, nn.Module(), 1e-9)


@pytest.mark.parametrize("interface", INTERFACES)
def test_closure(agree, interface):
    net, expected = train_with_closure(INTERFACES[interface]), train_with_closure(Local)
    check_equal(agree, net, expected, Recipe().make()[0], 1e-6)
