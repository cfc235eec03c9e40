"""To a user of Horovod: torchmpi.horovod keeps the contract of its interface, for any number of ranks."""

from __future__ import annotations

import gc
import json
import time
import warnings
import weakref

import pytest
import torch
from helpers.small_nets import mlp
from torch import nn

import torchmpi as mpi
import torchmpi.horovod as hvd
from torchmpi.errors import ConfigError, DtypeError
from torchmpi.horovod import adasum, basics
from torchmpi.horovod.exceptions import EarlyGradientError, HostsUpdatedInterrupt
from torchmpi.session import runtime
from torchmpi.timeline import events as timeline_events
from torchmpi.timeline import observer

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("initialized")]


@pytest.fixture(scope="module")
def initialized(world):
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()
    assert mpi.is_started(), "torchmpi was started by others"


def test_ranks_and_capabilities(agree):
    agree.equal((hvd.rank(), hvd.size()), (mpi.rank(), mpi.size()))
    agree.equal((hvd.local_rank(), hvd.local_size()), (mpi.local_rank(), mpi.local_size()))
    agree(hvd.cross_rank() < hvd.cross_size() and hvd.is_homogeneous() and hvd.is_initialized())
    agree(hvd.mpi_built() and hvd.mpi_enabled() and not hvd.gloo_built() and not hvd.ccl_built())
    hvd.init()  # harmless
    agree.equal(hvd.global_process_set.ranks, list(range(hvd.size())))
    agree.equal((hvd.global_process_set.process_set_id, hvd.global_process_set.size()), (0, hvd.size()))


def test_a_setting_of_horovod_that_is_no_number(agree, monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "64MB")
    agree.raises(ConfigError, basics._start, "HOROVOD_FUSION_THRESHOLD='64MB'")


# --- reductions -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
def test_reductions(agree, dtype):
    n = hvd.size()
    inputs = [(torch.arange(-3, 4) * (rank + 1)).to(dtype) for rank in range(n)]
    mine, whole = inputs[hvd.rank()], torch.stack(inputs).double()
    expected = {
        hvd.Sum: whole.sum(0),
        hvd.Min: whole.amin(0),
        hvd.Max: whole.amax(0),
        hvd.Product: whole.prod(0),
        hvd.Average: whole.sum(0) / n if dtype.is_floating_point else torch.div(whole.sum(0), n, rounding_mode="trunc"),
    }
    for op, value in expected.items():
        agree.close(hvd.allreduce(mine, op=op), value.to(dtype), f"op={op}")
        agree.close(hvd.synchronize(hvd.allreduce_async(mine, op=op)), value.to(dtype), f"async op={op}")
    agree.equal(mine, inputs[hvd.rank()], "the input is unchanged")
    agree(hvd.allreduce_(mine, op=hvd.Sum) is mine)
    agree.close(mine, expected[hvd.Sum].to(dtype), "in place")


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("is_grouped", [True, False])
def test_functions_with_an_underscore_change_their_tensors(agree, is_grouped, waits):
    """And the others do not."""
    n, first = hvd.size(), float(hvd.rank())
    for is_in_place in (True, False):
        name = f"{'grouped_' * is_grouped}allreduce{'_async' * (not waits)}{'_' * is_in_place}"
        tensors = [torch.full((2,), first), torch.full((3,), first, dtype=torch.float64)][: 1 + is_grouped]
        result = getattr(hvd, name)(tensors if is_grouped else tensors[0], op=hvd.Sum)
        results = result if waits else hvd.synchronize(result)
        total = float(n * (n - 1) // 2)
        for tensor, each in zip(tensors, results if is_grouped else [results], strict=True):
            agree.equal(each, torch.full_like(tensor, total), name)
            agree.equal(tensor, torch.full_like(tensor, total if is_in_place else first), name)
            agree.equal(each is tensor, is_in_place, name)


def test_factors_truncate_integers_toward_zero(agree):
    n, values = hvd.size(), torch.tensor([-7, -1, 0, 1, 7])
    halves = torch.tensor([-3, 0, 0, 0, 3])
    agree.equal(hvd.allreduce(values, op=hvd.Sum, prescale_factor=0.5), halves * n)
    agree.equal(hvd.allreduce(values, op=hvd.Average, postscale_factor=0.5), halves)
    floats = torch.tensor([1.5, -2.0])
    result = hvd.allreduce(floats, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
    agree.equal(result, floats * n / 2)


def test_averages_that_torch_cannot_divide_are_refused_before_the_call(agree):
    agree.raises(DtypeError, lambda: hvd.allreduce(torch.ones(2, dtype=torch.uint16)), "divide")
    agree.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(hvd.size())), "the next call")


def test_compression(agree):
    values = torch.full((3,), 0.1)
    result = hvd.allreduce(values, compression=hvd.Compression.fp16)
    agree.equal(result, values.half().float())


def test_groups_of_tensors(agree):
    n = hvd.size()
    tensors = [torch.ones(3), torch.tensor(2), torch.ones(2, 2, dtype=torch.float64), torch.zeros(0)]
    for result, tensor in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), tensors, strict=True):
        agree.equal(result, tensor * n)
    for result, tensor in zip(hvd.grouped_allreduce(tensors), tensors, strict=True):
        agree.equal(result, tensor, "average")
    changed = hvd.grouped_allreduce_([tensor.clone() for tensor in tensors[:2]], op=hvd.Sum)
    agree.equal(changed[0], torch.full((3,), float(n)))
    rows = hvd.grouped_allgather([torch.full((hvd.rank() + 1,), hvd.rank()), torch.ones(1, 2)])
    agree.equal(rows[0].tolist(), [rank for rank in range(n) for _ in range(rank + 1)])
    agree.equal(rows[1], torch.ones(n, 2))
    parts = hvd.grouped_reducescatter([torch.ones(n, 2), torch.ones(2 * n)], op=hvd.Sum)
    agree.equal(parts[0], torch.full((1, 2), float(n)))
    agree.equal(parts[1], torch.full((2,), float(n)))


def test_adasum(agree):
    n = hvd.size()
    if n & (n - 1):
        agree.raises(NotImplementedError, lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum), "power of two")
        return
    inputs = [torch.randn(5, generator=torch.Generator().manual_seed(rank)) for rank in range(n)]
    expected = [each.double() for each in inputs]
    while len(expected) > 1:
        expected = [adasum.combine(*expected[index : index + 2]) for index in range(0, len(expected), 2)]
    agree.equal(hvd.allreduce(inputs[hvd.rank()], op=hvd.Adasum), expected[0].float())
    agree.close(hvd.allreduce(torch.eye(n)[hvd.rank()], op=hvd.Adasum), torch.ones(n), "orthogonal: the sum")
    agree.close(hvd.allreduce(torch.ones(3), op=hvd.Adasum), torch.ones(3), "equal: the average")


def test_sparse_tensors(agree):
    dense = torch.zeros(6, 2)
    dense[hvd.rank() % 6], dense[5] = 1.0, 2.0
    everyone = torch.zeros(6, 2)
    for rank in range(hvd.size()):
        everyone[rank % 6] += 1.0 if rank % 6 != 5 else 0.0
        everyone[5] += 2.0
    total = hvd.sparse_allreduce_async(dense.to_sparse(1), "rows", hvd.Sum)()
    agree.equal(total.to_dense(), everyone)
    mean = hvd.sparse_allreduce_async(dense.to_sparse(1), "rows", hvd.Average)()
    agree.close(mean.to_dense(), everyone / hvd.size())
    agree.raises(ValueError, lambda: hvd.sparse_allreduce_async(dense.to_sparse(), "rows", hvd.Max), "added")
    if hvd.size() > 1:
        other = torch.zeros(6 + hvd.rank(), 2).to_sparse(1)
        agree.raises(hvd.HorovodInternalError, hvd.sparse_allreduce_async(other, "rows", hvd.Sum), "shapes")


# --- other collectives ------------------------------------------------------------


def test_moving_collectives(agree):
    n, rank = hvd.size(), hvd.rank()
    agree.equal(hvd.broadcast(torch.full((2,), rank), root_rank=n - 1), torch.full((2,), n - 1))
    tensor = torch.full((2,), float(rank))
    agree(hvd.broadcast_(tensor, root_rank=0) is tensor and not tensor.any())
    agree.equal(hvd.allgather(torch.full((rank, 2), rank)).shape[0], n * (n - 1) // 2)
    agree.equal(hvd.alltoall(torch.arange(n)), torch.full((n,), rank))
    rows, splits = hvd.alltoall(torch.full((n * n,), rank), splits=[rank] * n)  # the rows after them are not sent
    agree.equal(rows.tolist(), [sender for sender in range(n) for _ in range(sender)])
    agree.equal(splits, torch.arange(n, dtype=torch.int32))
    part = hvd.reducescatter(torch.ones(2 * n + 1, 2), op=hvd.Sum)
    agree.equal(part, torch.full((3 if rank == 0 else 2, 2), float(n)))
    agree.equal(hvd.broadcast_object({"rank": rank}, root_rank=n - 1), {"rank": n - 1})
    agree.equal(hvd.allgather_object(rank), list(range(n)))
    hvd.barrier()
    agree(0 <= hvd.join() < n)


def test_an_alltoall_of_even_parts(agree):
    """It is one call; ranks may pass different numbers of rows, and names change nothing."""
    n, rank = hvd.size(), hvd.rank()
    rows = torch.full((n * (rank + 1), 2), rank)
    expected = torch.tensor([[sender] * 2 for sender in range(n) for _ in range(sender + 1)])
    last_call = mpi.communicator(0).intra.call_log
    before = last_call.seq
    agree.equal(hvd.alltoall(rows), expected)
    agree.equal(last_call.seq - before, 1, "calls")
    agree.equal(hvd.alltoall(rows, name="parts"), expected, "with a name")
    agree.equal(hvd.alltoall(rows.t().contiguous().t()), expected, "not contiguous")
    agree.equal(hvd.alltoall(rows.double().requires_grad_()).detach(), expected.double(), "recorded")
    agree.equal(hvd.synchronize(hvd.alltoall_async(rows))[1].tolist(), list(range(1, n + 1)), "numbers of rows")
    if n > 1:
        agree.raises(ValueError, lambda: hvd.alltoall(torch.ones(n + 1)), "evenly")
        one_passes_splits = (
            (lambda: hvd.alltoall(torch.ones(n), [1] * n)) if rank else lambda: hvd.alltoall(torch.ones(n))
        )
        agree.raises(hvd.HorovodInternalError, one_passes_splits, "alltoall_splits(")
        agree.equal(hvd.alltoall(torch.full((n,), rank)), torch.arange(n), "the ranks go on")


def test_scattered_averages_of_integers_are_truncated(agree):
    n = hvd.size()
    values = torch.full((n,), -3) if hvd.rank() == 0 else torch.zeros(n, dtype=torch.int64)
    expected = torch.div(torch.tensor([-3]), n, rounding_mode="trunc")
    agree.equal(hvd.reducescatter(values), expected)
    agree.equal(hvd.reducescatter(values, name="integers"), expected)
    agree.equal(hvd.reducescatter(values, op=hvd.Sum), torch.tensor([-3]))


def test_gradients_are_those_of_horovod(agree):
    n, rank = hvd.size(), hvd.rank()

    def gradient(function):
        x = torch.full((2 * n, 2), 2.0, requires_grad=True)
        function(x).sum().backward()
        return x.grad

    ones = torch.ones(2 * n, 2)
    agree.equal(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)), ones * n)
    agree.equal(gradient(lambda x: hvd.allreduce(x, prescale_factor=3.0)), ones * 3)
    agree.equal(gradient(lambda x: hvd.grouped_allreduce([x])[0]), ones)
    agree.close(gradient(hvd.allgather), ones)  # the average
    agree.close(gradient(lambda x: hvd.broadcast(x, 0)), ones if rank == 0 else ones * 0)
    agree.equal(gradient(hvd.alltoall), ones)
    agree.equal(gradient(lambda x: hvd.alltoall(x, [1] * n)[0])[:n], ones[:n])
    agree.close(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum)), ones * n)
    agree.close(gradient(hvd.reducescatter), ones)


def test_handles_and_names(agree):
    world, handles = mpi.communicator(0).intra, []
    if hvd.rank() > 0:
        world.side_comm.Barrier()  # until then the operations of rank 0 are in flight
    handles = [hvd.allreduce_async(torch.ones(2), name=name) for name in ("first", "second")]
    if hvd.rank() == 0:
        if hvd.size() > 1:
            with pytest.raises(ValueError, match="in flight"):
                hvd.allreduce_async(torch.ones(2), name="second")
        world.side_comm.Barrier()
    agree.equal(hvd.synchronize(handles[1]), torch.ones(2))
    agree.equal(hvd.synchronize(handles[0]), torch.ones(2))
    agree(hvd.synchronize(handles[0]) is None)
    agree.raises(ValueError, lambda: hvd.poll(handles[0]))
    agree.equal(hvd.allreduce(torch.ones(2), name="second"), torch.ones(2), "the name is free again")


def test_errors(agree):
    n = hvd.size()
    agree.raises(ValueError, lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "not both")
    agree.raises(ValueError, lambda: hvd.broadcast(torch.ones(1), root_rank=n), f"root_rank={n}")
    agree.raises(ValueError, lambda: hvd.allgather(torch.tensor(1.0)), "0-dim")
    agree.raises(ValueError, lambda: hvd.alltoall(torch.ones(n), [1] * (n + 1)))
    agree.raises(ValueError, lambda: hvd.alltoall(torch.ones(n), torch.ones(n)), "int32")
    agree.raises(hvd.HorovodInternalError, lambda: hvd.reducescatter(torch.ones(n), op=hvd.Max), "Average")
    with pytest.warns(DeprecationWarning, match="average"):
        hvd.allreduce(torch.ones(1), average=True)
    if n > 1:
        tensor = torch.ones(2 if hvd.rank() else 3)
        agree.raises(hvd.HorovodInternalError, lambda: hvd.allreduce(tensor), "allreduce")
        agree.raises(hvd.HorovodInternalError, (lambda: hvd.allreduce(tensor)) if hvd.rank() else hvd.join)
        agree.equal(hvd.allreduce(torch.ones(1)), torch.ones(1), "the ranks go on")


# --- process sets -----------------------------------------------------------------


def test_process_sets(agree):
    n, rank = hvd.size(), hvd.rank()
    if n == 1:
        agree.raises(ValueError, lambda: hvd.add_process_set([0]), "exists")
        return
    last = hvd.add_process_set([n - 1])
    agree.equal((last.process_set_id, last.size(), last.included()), (1, 1, rank == n - 1))
    agree.raises(ValueError, lambda: hvd.add_process_set(hvd.ProcessSet([n - 1])), "exists")
    if last.included():
        agree.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=last), torch.ones(2))
        agree.equal(hvd.broadcast(torch.ones(2), root_rank=n - 1, process_set=last), torch.ones(2))
        agree.equal(last.rank(), 0)
        hvd.barrier(last)
    else:
        agree.raises(ValueError, lambda: hvd.allreduce(torch.ones(2), process_set=last), "not in")
        agree.raises(ValueError, last.rank)
    agree(hvd.remove_process_set(last) and not hvd.remove_process_set(last))
    agree(last.process_set_id is None and not hvd.remove_process_set(hvd.global_process_set))
    agree.raises(ValueError, lambda: hvd.allreduce(torch.ones(2), process_set=last), "not registered")
    agree.raises(ValueError, lambda: hvd.ProcessSet(3))


# --- the optimizer ----------------------------------------------------------------


def net() -> nn.Module:
    return mlp(4, 3, 2, seed=1).double()


def batches() -> torch.Tensor:
    return torch.randn(hvd.size(), 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def sequential_gradients(passes: int = 1) -> list[torch.Tensor]:
    """The gradients of the mean of the losses of all ranks, in one process."""
    model = net()
    for batch in batches():
        (passes * model(batch).square().mean() / hvd.size()).backward()
    return [parameter.grad for parameter in model.parameters()]


OPTIONS = {
    "default": {},
    "names": {"named": True},
    "groups": {"groups": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "passes": {"backward_passes_per_step": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_optimizer_averages_gradients(agree, name):
    options = dict(OPTIONS[name])
    model = net()
    if options.pop("named", False):
        options["named_parameters"] = model.named_parameters()
    passes = options.get("backward_passes_per_step", 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)
    agree(isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD")
    expected = net()
    reference = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for _ in range(passes):
            model(batches()[hvd.rank()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(passes):
            for batch in batches():
                (expected(batch).square().mean() / hvd.size()).backward()
        reference.step()
        reference.zero_grad()
    for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        agree.close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_missing_gradients_are_zeros(agree):
    """Each rank uses another branch; weight decay applies to the parameters of the other ones too."""
    model = nn.ModuleList([nn.Linear(1, 1) for _ in range(2)])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    model[hvd.rank() % 2](torch.ones(1, 1)).sum().backward()
    optimizer.synchronize()
    users = [len(range(branch, hvd.size(), 2)) for branch in range(2)]
    for branch, layer in enumerate(model):
        if hvd.size() > 1:
            agree.close(layer.bias.grad, torch.full((1,), users[branch] / hvd.size()))
    with optimizer.skip_synchronize():
        optimizer.step()
    agree.equal(len({str(each) for each in hvd.allgather_object(model[0].bias.item())}), 1)


def test_other_calls_between_backward_and_step(agree):
    """Regression: on a rank that uses no parameter, the reductions came after the other call."""
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    if hvd.rank() == 0:
        model(batches()[0]).square().mean().backward()
    total = hvd.allreduce(torch.ones(3), op=hvd.Sum)
    optimizer.step()
    agree.equal(total, torch.full((3,), float(hvd.size())))
    agree.equal(len({str(each) for each in hvd.allgather_object(model[0].bias.tolist())}), 1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_gradients_of_a_closure_are_synchronized(agree, kind):
    def train(model, losses, wrap):
        optimizer = wrap(kind(model.parameters(), lr=0.1))

        def closure():
            optimizer.zero_grad()
            loss = sum(model(batch).square().mean() for batch in losses) / len(losses)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return list(model.parameters())

    found = train(net(), [batches()[hvd.rank()]], hvd.DistributedOptimizer)
    for actual, wanted in zip(found, train(net(), list(batches()), lambda optimizer: optimizer), strict=True):
        agree.close(actual, wanted)


def test_a_model_is_freed_with_its_optimizer(agree):
    gc.collect()  # optimizers of other tests
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model(batches()[hvd.rank()]).square().mean().backward()
    optimizer.step()
    parameter, num_groups = weakref.ref(model[0].weight), len(runtime.current().context.groups)
    del model, optimizer
    gc.collect()
    agree(parameter() is None, "the model is still alive")
    model = net()
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    agree.equal(len(runtime.current().context.groups), num_groups, "groups: the next one takes the place")


def test_clipping_between_synchronize_and_step(agree):
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    model(batches()[hvd.rank()]).square().mean().backward()
    if hvd.size() > 1:
        agree.raises(EarlyGradientError, optimizer.zero_grad, "step()")
    optimizer.synchronize()
    for parameter, wanted in zip(model.parameters(), sequential_gradients(), strict=True):
        agree.close(parameter.grad, wanted)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with optimizer.skip_synchronize():
        optimizer.step()
    change = torch.cat([(a - b).flatten() for a, b in zip(before, model.parameters(), strict=True)]).norm()
    norm = torch.cat([wanted.flatten() for wanted in sequential_gradients()]).norm()
    agree.close(change, 1e-3 * norm / (norm + 1e-6))  # the factor of torch
    optimizer.zero_grad(set_to_none=False)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    agree.equal(["skip_synchronize" in str(each.message) for each in caught], [True])


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(agree, as_dense):
    torch.manual_seed(0)
    embedding = nn.Embedding(6, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(embedding.parameters(), lr=1.0), op=hvd.Sum, sparse_as_dense=as_dense
    )
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([hvd.rank() % 5, 5])).sum().backward()
    optimizer.step()
    expected = torch.zeros(6, 2)
    for rank in range(hvd.size()):
        expected[rank % 5] += 1
        expected[5] += 1
    agree.close(before - embedding.weight.detach(), expected)


def test_adasum_reduces_the_changes(agree):
    n = hvd.size()
    if n & (n - 1):
        pytest.skip("Adasum needs a power of two of ranks")
    parameter = nn.Parameter(torch.zeros(n))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), op=hvd.Adasum)
    parameter[hvd.rank()].backward()
    optimizer.step()
    agree.close(parameter.detach(), torch.full((n,), -0.5), "orthogonal changes are added")
    optimizer.set_backward_passes_per_step(2)
    agree.equal(optimizer.backward_passes_per_step, 2)
    if n > 1:
        agree.raises(AssertionError, lambda: optimizer.skip_synchronize().__enter__())


def test_refused_arguments_of_the_optimizer(agree):
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = model[0].weight
    for options in (
        {"named_parameters": list(model.named_parameters())[:1]},
        {"named_parameters": [*model.named_parameters(), ("0.bias", weight)]},
        {"named_parameters": [weight]},
        {"backward_passes_per_step": 0},
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        {"groups": "two"},
        {"groups": [[weight, weight]]},
    ):
        agree.raises(ValueError, lambda options=options: hvd.DistributedOptimizer(sgd, **options))


@pytest.mark.min_ranks(2)
def test_too_many_backward_passes_are_refused(agree):
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    loss = model(batches()[0]).square().mean()
    loss.backward(retain_graph=True)
    agree(issubclass(EarlyGradientError, AssertionError), "as in Horovod")
    if hvd.size() > 1:
        agree.raises(EarlyGradientError, loss.backward, "backward_passes_per_step=1")
    optimizer.step()


def test_a_scheduler_made_before_still_synchronizes(agree):
    """Regression by construction: the scheduler puts its own `step` into the given optimizer."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    before = model[0].bias.detach().clone()
    model(batches()[hvd.rank()]).square().mean().backward()
    optimizer.step()
    agree.close(before - model[0].bias.detach(), sequential_gradients()[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: that step() was not seen by the scheduler
        scheduler.step()
    agree.equal(optimizer.param_groups[0]["lr"], 0.5)


# --- state ------------------------------------------------------------------------


def test_the_state_of_an_optimizer_is_that_of_the_root(agree):
    model, rank = net(), hvd.rank()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), betas=(0.5 + 0.1 * rank, 0.9))
    if rank == 0:
        model(batches()[0]).sum().backward()
        optimizer.step()
    groups = optimizer.param_groups[0]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    agree(optimizer.param_groups[0] is groups)
    agree.equal((groups["lr"], groups["betas"]), (0.1, (0.5, 0.9)))
    states = hvd.allgather_object(optimizer.state_dict()["state"])
    for state in states:
        for index, entries in states[0].items():
            for name, value in entries.items():
                agree.equal(state[index][name], value, name)
    agree.raises(ValueError, lambda: hvd.broadcast_parameters(model.named_parameters(), 0), "a dict or a list")
    agree.raises(ValueError, lambda: hvd.broadcast_parameters({"bias": 3}, 0), "'bias'", "broadcast_object")
    agree.raises(ValueError, lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0))


def test_elastic_programs_run_once_if_no_rank_is_lost(agree, capsys):
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, hvd.rank() + 1.0)
    sampler = hvd.elastic.ElasticSampler(torch.arange(4 * hvd.size()), shuffle=True, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5 + hvd.rank())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, scheduler=scheduler, epoch=hvd.rank())

    @hvd.elastic.run
    def train(state, result):
        state.sampler.record_batch(0, 2)
        state.commit()
        nn.init.zeros_(model.weight)
        state.epoch = 7
        state.restore()
        return result, model.weight.item(), state.epoch, len(sampler), sampler.processed_num

    agree.equal(train(state, "ended"), ("ended", 1.0, 0, 2, 2 * hvd.size()))
    num_warnings = capsys.readouterr().err.count("hvd.elastic.run does not continue after the loss of a rank: ")
    agree.equal(num_warnings, int(hvd.rank() == 0 and hvd.size() > 1))
    parts = hvd.allgather_object(list(sampler))
    agree.equal(sorted(index for part in parts for index in part), sorted(sampler.remaining_indices))
    state.sync()
    agree.equal(sampler.processed_num, 2 * hvd.size(), "a sampler counts the samples of all ranks")
    agree(state.scheduler is scheduler and scheduler.optimizer is optimizer, "the scheduler was replaced")
    agree.equal(scheduler.step_size, 5, "the scheduler of rank 0")

    @hvd.elastic.run
    def interrupted(state):
        raise HostsUpdatedInterrupt()

    agree.raises(hvd.HorovodInternalError, lambda: interrupted(state), "hosts are not added")


def test_timeline(agree, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    monkeypatch.setattr(observer, "PERIOD_SECONDS", 3600)  # that of other timelines
    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="traced")
    parts = hvd.alltoall(torch.full((hvd.size(),), hvd.rank()))
    agree.equal(parts, torch.arange(hvd.size()), "the call of rank 0, which is recorded, is that of the other ranks")
    hvd.barrier()
    if hvd.rank() == 0:
        end = time.monotonic() + 60
        while "allreduce.traced" not in path.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        agree("allreduce.traced" in path.read_text(), "Horovod's timelines can be read while they are written")
    hvd.stop_timeline()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        events = json.loads(path.read_text())
        names = [event.get("name") for event in events]
        agree("start_time_since_epoch_in_micros" in events[0]["args"])
        agree("allreduce" in [event["name"] for event in events if event.get("cat") == "collective"], "the recorder's")
        agree({"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "ALLTOALL", "CYCLE_START"} <= set(names), str(names))
        agree("allreduce.traced" in [event["args"].get("name") for event in events if event.get("args")])
        (done,) = [event for event in events if event["name"] == "ALLREDUCE"]
        agree.equal((done["args"]["dtype"], done["args"]["shape"]), ("torch.float32", "[3]"))
        agree(timeline_events.recorder is None, "stop_timeline() ends the recording")
    else:
        agree(not path.exists() or hvd.size() > 1)
