"""To who divides model and data: groups of ranks share a layer, and training is that of one process."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.engine import AllReduceSGDEngine
from torchmpi.errors import ArgumentError, GradientError, ReplicaError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 4), pytest.mark.usefixtures("world")]
TIGHT = {"rtol": 1e-9, "atol": 1e-11}
STEPS, BATCH = 20, 12


def divisors() -> list[int]:
    """The sizes of model-parallel groups of this job: 1 is data parallelism only, all ranks model parallelism only."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    return [width for width in range(1, size + 1) if size % width == 0]


@pytest.fixture(params=divisors(), ids=lambda width: f"groups of {width}")
def model_level(request, world):
    """The level of the model-parallel groups: neighbors."""
    level = mpi.push_communicator(f"model {mpi.rank() // request.param}")
    mpi.set_communicator(0)
    return level


def make_net(make_layer: Callable[..., nn.Module], **options: object) -> nn.Sequential:
    torch.manual_seed(3)
    middle = make_layer(7, 5, dtype=torch.float64, **options)
    return nn.Sequential(nn.Linear(4, 7).double(), nn.Tanh(), middle, nn.Tanh(), nn.Linear(5, 1).double())


def data(step: int, part: int = 0, num_parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, 4, dtype=torch.float64, generator=generator)
    return x[part::num_parts], x.sum(1, keepdim=True).sin()[part::num_parts]


def backward(net: nn.Module, step: int, *place: int) -> None:
    net.zero_grad()
    x, y = data(step, *place)
    nn.functional.mse_loss(net(x), y).backward()


def train_whole(epochs: int = 1) -> nn.Sequential:
    """One process on the complete batches."""
    net = make_net(nn.Linear)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in [*range(STEPS)] * epochs:
        backward(net, step)
        optimizer.step()
    return net


def train(net: nn.Module, how: str, *place: int) -> None:
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if how.startswith("optimizer"):
        optimizer = mpinn.DistributedOptimizer(optimizer, net, asynchronous=how == "optimizer, async")
    elif how == "async":
        mpinn.register_async_backward(net, bucket_bytes=100)
    for step in range(STEPS):
        backward(net, step, *place)
        if how == "sync":
            mpinn.synchronize_gradients(net)
        elif how == "async":
            mpinn.synchronize_gradients_async(net)
        optimizer.step()
    if "async" in how:
        mpinn.unregister_async_backward(net)


@pytest.mark.parametrize("how", ["sync", "async", "optimizer", "optimizer, async"])
def test_training_equals_one_process_on_the_complete_batch(agree, model_level, how):
    width = mpi.communicator(model_level).size
    net = make_net(mpinn.MPLinear, comm=model_level)
    mpinn.synchronize_parameters(net)
    train(net, how, mpi.rank() // width, mpi.size() // width)
    whole = train_whole()
    agree.close(net[2].full_weight(), whole[2].weight.detach(), "sharded weight", **TIGHT)
    for index in (0, 2, 4):
        agree.close(net[index].bias.detach(), whole[index].bias.detach(), f"bias {index}", **TIGHT)
    mpinn.check_with_allreduce(net)


@pytest.mark.min_ranks(2)
def test_different_inputs_of_ranks_that_share_a_layer_are_refused(agree, model_level):
    """Each rank has its own part of the data, as in data parallelism without shards."""
    if mpi.communicator(model_level).size == 1:
        pytest.skip("no ranks share a layer")
    net = make_net(mpinn.MPLinear, comm=model_level)
    agree.raises(ArgumentError, lambda: backward(net, 0, mpi.rank(), mpi.size()), "passed different inputs")


def test_sync_batchnorm_over_the_groups(agree, model_level):
    """The ranks of a group have the same batch, which must be counted once."""
    nets = []
    for layer, options in ((mpinn.MPLinear, {"comm": model_level}), (nn.Linear, {})):
        net = make_net(layer, **options)
        net.insert(1, nn.BatchNorm1d(7).double())
        nets.append(net)
    net, whole = nets
    layer_comm = mpi.communicator(model_level)
    data_comm = mpinn.sharding_of(net[3].weight).data_comm
    if data_comm is not None:
        mpinn.SyncBatchNorm.convert_sync_batchnorm(net, comm=data_comm)
    train(net, "sync", mpi.rank() // layer_comm.size, mpi.size() // layer_comm.size)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        backward(whole, step)
        optimizer.step()
    for actual, expected in zip(net[1].state_dict().values(), whole[1].state_dict().values(), strict=True):
        agree.close(actual, expected, **TIGHT)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_equals_one_process_on_the_complete_batch(agree, model_level, norm_type, asynchronous):
    width = mpi.communicator(model_level).size
    net, whole = make_net(mpinn.MPLinear, comm=model_level), make_net(nn.Linear)
    optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, asynchronous=asynchronous)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(3):
        backward(net, step, mpi.rank() // width, mpi.size() // width)
        backward(whole, step)
        if not asynchronous:
            optimizer.synchronize()
        norm = mpinn.clip_grad_norm_(net, 0.1, norm_type)
        agree.close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type), **TIGHT)
        optimizer.step()
        reference.step()
    agree.close(net[2].full_weight(), whole[2].weight.detach(), **TIGHT)
    agree.close(net[0].weight.detach(), whole[0].weight.detach(), **TIGHT)
    mpinn.check_with_allreduce(net)


@pytest.mark.min_ranks(2)
def test_a_changed_gradient_of_a_shard_is_refused_on_all_ranks(agree, model_level):
    width = mpi.communicator(model_level).size
    if width == mpi.size():
        pytest.skip("each rank has a shard of its own, which is not synchronized")
    net = make_net(mpinn.MPLinear, comm=model_level)
    mpinn.register_async_backward(net, bucket_bytes=100)
    backward(net, 0, mpi.rank() // width, mpi.size() // width)
    if mpi.rank() == 0:
        net[2].weight.grad.mul_(2)
    is_holder = mpi.rank() % width == 0
    with pytest.raises(
        GradientError, match="gradient of '2.weight' before" if is_holder else "gradient of a shard before"
    ):
        mpinn.synchronize_gradients_async(net)
    mpinn.unregister_async_backward(net)


@pytest.mark.parametrize("with_allreduce", [False, True])
def test_parameters_of_shards_are_copied_or_averaged_over_their_holders(agree, model_level, with_allreduce):
    width = mpi.communicator(model_level).size
    layer = mpinn.MPLinear(7, 5, comm=model_level)
    nn.init.constant_(layer.weight, mpi.rank())
    mpinn.synchronize_parameters(layer, with_allreduce)
    holders = range(mpi.rank() % width, mpi.size(), width)
    expected = sum(holders) / len(holders) if with_allreduce else holders[0]
    agree.equal(layer.weight.detach(), torch.full_like(layer.weight, expected))
    mpinn.check_with_allreduce(layer)


@pytest.mark.min_ranks(2)
def test_drift_of_a_shard_is_found_on_all_ranks(agree, model_level):
    net = make_net(mpinn.MPLinear, comm=model_level)
    width = mpi.communicator(model_level).size
    mpinn.check_with_allreduce(net)
    if mpi.rank() == mpi.size() - 1:
        with torch.no_grad():
            net[2].weight[0, 0] += 1
    if width == mpi.size():
        mpinn.check_with_allreduce(net)  # no other rank holds the shard
    else:
        agree.raises(ReplicaError, lambda: mpinn.check_with_allreduce(net), "1 of 6 tensors", "'2.weight'")


@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_skip_a_step_if_a_shard_of_one_is_not_finite(agree, model_level, fused):
    width = mpi.communicator(model_level).size
    net = make_net(mpinn.MPLinear, comm=model_level)
    before = net[4].weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (math.inf, 1.0):
        scaler.scale(torch.ones(1))
        backward(net, 0, mpi.rank() // width, mpi.size() // width)
        if mpi.rank() == 0:
            net[2].weight.grad[0, 0] = bad
        mpinn.synchronize_gradients(net)
        scaler.step(optimizer)
        scaler.update()
        agree.equal((torch.equal(net[4].weight, before), scaler.get_scale()), (bad == math.inf, 2.0))
    mpinn.check_with_allreduce(net)


def test_parameters_of_own_layers_and_an_explicit_data_comm(agree):
    """Rank r holds shard r % 2 of the pairs (2k, 2k + 1); a last odd rank would have no partner."""
    if mpi.size() % 2:
        pytest.skip("needs an even number of ranks")
    model_level = mpi.push_communicator(f"pair {mpi.rank() // 2}")
    mpi.set_communicator(0)
    data_level = mpi.push_communicator(f"parity {mpi.rank() % 2}")
    mpi.set_communicator(0)
    layer = nn.Linear(3, 2)
    mpinn.set_sharded(layer.weight, comm=model_level, data_comm=data_level)
    sharding = mpinn.sharding_of(layer.weight)
    agree.equal((sharding.comm.size, mpinn.sharding_of(layer.bias)), (2, None))
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, mpi.rank())
    mpinn.synchronize_gradients(layer)
    holders = range(mpi.rank() % 2, mpi.size(), 2)
    agree.equal(layer.weight.grad, torch.full((2, 3), sum(holders) / len(holders)))
    agree.equal(layer.bias.grad, torch.full((2,), (mpi.size() - 1) / 2))
    agree.raises(
        ArgumentError,
        lambda: mpinn.set_sharded(layer.weight, comm=0, data_comm=0),
        *(["has more than one of them"] if mpi.size() > 1 else []),
    )


def test_a_sharded_embedding_with_sparse_gradients(agree, model_level):
    width = mpi.communicator(model_level).size
    for how in ("sync", "async"):
        table = nn.Embedding(4, 2, sparse=True)
        mpinn.set_sharded(table.weight, comm=model_level)
        if how == "async":
            mpinn.register_async_backward(table)
        table(torch.tensor([mpi.rank() % 4])).sum().backward()
        if how == "async":
            mpinn.synchronize_gradients_async(table)
            mpinn.unregister_async_backward(table)
        else:
            mpinn.synchronize_gradients(table)
        expected = torch.zeros(4, 2)
        holders = range(mpi.rank() % width, mpi.size(), width)
        for rank in holders:
            expected[rank % 4] += 1 / len(holders)
        agree.close(table.weight.grad.to_dense(), expected, how)


def test_distributed_data_parallel_with_shards_left_to_synchronize_gradients(agree, model_level):
    width = mpi.communicator(model_level).size
    net = make_net(mpinn.MPLinear, comm=model_level)
    shards = {name: parameter for name, parameter in net.named_parameters() if mpinn.sharding_of(parameter)}
    agree.equal(list(shards), ["2.weight"])
    torch.distributed.init_process_group("torchmpi")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, list(shards))
    model = DistributedDataParallel(net)
    mpinn.synchronize_parameters(shards.values())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        backward(model, step, mpi.rank() // width, mpi.size() // width)
        mpinn.synchronize_gradients(shards.values())
        optimizer.step()
    torch.distributed.destroy_process_group()
    whole = train_whole()
    agree.close(net[2].full_weight(), whole[2].weight.detach(), "sharded weight", **TIGHT)
    agree.close(net[4].weight.detach(), whole[4].weight.detach(), "replicated weight", **TIGHT)


def test_layers_of_a_group_that_trains_alone(agree, model_level):
    """No other group holds the shards: calls on the group are right, calls on all ranks are refused."""
    with mpi.use(model_level) as group:
        net = make_net(mpinn.MPLinear)
        backward(net, 0)
        gradient = net[2].weight.grad.clone()
        mpinn.synchronize_gradients(net)
        agree.equal(net[2].weight.grad, gradient)
        mpinn.check_with_allreduce(net)
    if group.size < mpi.size():
        for call in (mpinn.synchronize_parameters, mpinn.synchronize_gradients, mpinn.check_with_allreduce):
            agree.raises(ArgumentError, lambda call=call: call(net), "Pass data_comm=")
        agree.raises(ArgumentError, lambda: mpinn.register_async_backward(net), "Pass data_comm=")


def test_calls_on_the_group_leave_shards_of_other_groups_alone(agree, model_level):
    net = make_net(mpinn.MPLinear, comm=model_level)
    backward(net, mpi.rank() // mpi.communicator(model_level).size)
    gradient = net[2].weight.grad.clone()
    mpinn.synchronize_gradients(net, comm=model_level)
    agree.equal(net[2].weight.grad, gradient)


@pytest.mark.min_ranks(2)
def test_sums_are_refused(agree, model_level):
    net = make_net(mpinn.MPLinear, comm=model_level)
    backward(net, 0)
    agree.raises(ArgumentError, lambda: mpinn.synchronize_gradients(net, average=False), "Use average=True")
    agree.raises(ArgumentError, lambda: mpinn.register_async_backward(net, average=False), "Use average=True")


@pytest.mark.min_ranks(3)
def test_groups_of_different_sizes_are_refused(agree):
    level = mpi.push_communicator("first" if mpi.rank() == 0 else "others")
    mpi.set_communicator(0)
    agree.raises(ArgumentError, lambda: mpinn.MPLinear(7, 5, comm=level), "groups of equal size", "data_comm=")


def test_copies_know_their_ranks_and_pickles_must_be_told(agree, model_level):
    layer = nn.Linear(3, 2)
    mpinn.set_sharded(layer.weight, comm=model_level)
    copied = copy.deepcopy(copy.deepcopy(layer))
    agree(mpinn.sharding_of(copied.weight) is mpinn.sharding_of(layer.weight), "copies share the ranks")
    restored = pickle.loads(pickle.dumps(layer))
    if mpi.size() > 1:
        agree.raises(ArgumentError, lambda: mpinn.synchronize_parameters(restored), "from a pickle")
    mpinn.set_sharded(restored.weight, comm=model_level)
    mpinn.synchronize_parameters(copy.deepcopy(restored))


def test_the_engine_trains_and_resumes(agree, model_level, tmp_path):
    """One epoch, a checkpoint, and a second epoch by a new engine."""
    width = mpi.communicator(model_level).size
    place = mpi.rank() // width, mpi.size() // width
    path = mpi.broadcast_object(tmp_path / "checkpoint")
    for epochs in (1, 2):
        net = make_net(mpinn.MPLinear, comm=model_level)
        engine = AllReduceSGDEngine(progress=False, debug=True)
        engine.hooks.on_end.append(lambda state, engine=engine: engine.save_checkpoint(path))
        engine.train(
            network=net,
            criterion=nn.MSELoss(),
            iterator=[data(step, *place) for step in range(STEPS)],
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
            max_epochs=epochs,
            resume=path if epochs == 2 else None,
        )
    whole = train_whole(epochs=2)
    agree.close(net[2].full_weight(), whole[2].weight.detach(), "sharded weight", **TIGHT)
    agree.close(net[4].weight.detach(), whole[4].weight.detach(), "replicated weight", **TIGHT)


def divided_layer(device: str) -> nn.Module:
    plan = {"0": mpinn.TensorSplit("columns"), "1": mpinn.TensorSplit("rows")}
    return mpinn.tensor_parallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).to(device), plan)


LAYERS: dict[str, Callable[[str], nn.Module]] = {
    "linear": lambda device: mpinn.MPLinear(4, 3, device=device),
    "experts": lambda device: mpinn.MixtureOfExperts(4, mpi.size(), lambda: nn.Linear(4, 4), top_k=1).to(device),
    "divided": divided_layer,
}


@pytest.mark.parametrize("name", LAYERS)
def test_tensors_that_replace_shards_are_the_same_shards(agree, world, name):
    """Regression: after load_state_dict(assign=True) or to_empty() different shards were averaged or overwritten."""
    torch.manual_seed(3)
    layer, empty = LAYERS[name]("cpu"), LAYERS[name]("meta")
    state = {each: value.clone() for each, value in layer.state_dict().items()}
    marked = {each: mpinn.sharding_of(parameter) for each, parameter in empty.named_parameters()}
    agree.equal(
        [mpinn.sharding_of(each) is not None for each in layer.parameters()], [bool(e) for e in marked.values()]
    )
    agree(any(marked.values()))
    nn.Sequential(empty).to_empty(device="cpu")
    agree({each: mpinn.sharding_of(p) for each, p in empty.named_parameters()} == marked, "after to_empty()")
    nn.ModuleDict({"in": empty}).load_state_dict({f"in.{each}": v for each, v in state.items()}, assign=True)
    for other in (empty, copy.deepcopy(empty)):
        agree({each: mpinn.sharding_of(p) for each, p in other.named_parameters()} == marked, "after load_state_dict()")
        mpinn.synchronize_parameters(other)
        mpinn.check_with_allreduce(other)
        agree(all(torch.equal(state[each], value) for each, value in other.state_dict().items()), "unchanged")


@pytest.mark.parametrize("name", ["linear", "experts"])
def test_a_complete_state_without_the_parts_of_other_ranks_is_refused(agree, world, name):
    layer = LAYERS[name]("cpu")
    if mpi.size() == 1:
        agree.equal(list(mpinn.full_state_dict(layer)), list(layer.state_dict()))
        return
    words = "weight' is a shard", "full_weight()", "joining the state_dict() of all ranks"
    agree.raises(ArgumentError, lambda: mpinn.full_state_dict(layer), *words)
    agree.raises(ArgumentError, lambda: mpinn.load_full_state_dict(layer, layer.state_dict()), *words)
