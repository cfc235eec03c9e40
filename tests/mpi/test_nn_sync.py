"""To a user of synchronize_parameters() and synchronize_gradients(): all ranks have the same copies, or averages."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from helpers.nn_nets import KINDS, gradients, loss, make, mine, whole_batch_gradients
from helpers.outcomes import error_of
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.collective_specs import CODES
from torchmpi.errors import ArgumentError, GradientError, ReplicaError
from torchmpi.session import runtime

pytestmark = [pytest.mark.quick, pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


def rank_net(seed: int = 0) -> nn.Sequential:
    """A net with batch norm that is different on each rank."""
    torch.manual_seed(seed + mpi.rank())
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    net(torch.randn(4 + mpi.rank(), 3))
    for _ in range(mpi.rank()):
        net(torch.randn(4, 3))
    return net


def everywhere(tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, stacked."""
    return mpi.allgather(tensor.detach().clone().unsqueeze(0))


# --- parameters ------------------------------------------------------------------------------------------


def test_broadcast_gives_all_ranks_the_state_of_rank_0(agree):
    net = rank_net()
    expected = {name: everywhere(tensor)[0] for name, tensor in net.state_dict().items()}
    mpinn.synchronize_parameters(net)
    for name, tensor in net.state_dict().items():
        agree.equal(tensor, expected[name].view(tensor.shape), name)


def test_allreduce_averages_floats_and_broadcasts_integers(agree):
    net = rank_net()
    before = {name: everywhere(tensor) for name, tensor in net.state_dict().items()}
    mpinn.synchronize_parameters(net, with_allreduce=True)
    for name, tensor in net.state_dict().items():
        floating = tensor.is_floating_point()
        expected = before[name].mean(0) if floating else before[name][0]
        agree.close(tensor, expected.view(tensor.shape), name)


def test_tensors_can_be_given_instead_of_a_module(agree):
    tensors = [torch.full((2,), float(mpi.rank() + 1)), torch.full((3, 1), mpi.rank() + 1)]
    mpinn.synchronize_parameters(tensors)
    agree.equal(tensors[0], torch.ones(2))
    agree.equal(tensors[1], torch.ones(3, 1, dtype=torch.int64))


def test_strided_parameters_are_broadcast(agree):
    net = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    nn.init.constant_(net.weight, mpi.rank() + 1.0)
    mpinn.synchronize_parameters(net)
    agree.equal(net.weight.detach(), torch.ones(4, 2, 3, 3).to(memory_format=torch.channels_last))


@pytest.mark.min_ranks(2)
def test_a_different_net_on_one_rank_is_an_error_on_all(agree):
    last = mpi.rank() == mpi.size() - 1
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5 if last else 2))
    before = net[0].weight.detach().clone()
    error = error_of(mpinn.synchronize_parameters, net)
    agree("'1.weight' float32 [2, 4]" in error and f"rank {mpi.size() - 1}" in error, error)
    agree.equal(net[0].weight.detach(), before, "nothing is sent")


@pytest.mark.min_ranks(2)
def test_nets_whose_tensors_differ_in_names_only_are_refused(agree):
    names = ("first", "last") if mpi.rank() else ("last", "first")
    net = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names))
    agree.raises(ReplicaError, lambda: mpinn.synchronize_parameters(net), "'last.weight'", "'first.weight'")
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    tied[2 if mpi.rank() else 1].weight = tied[0].weight
    agree.raises(ReplicaError, lambda: mpinn.synchronize_parameters(tied), "'1.bias'", "'1.weight'")


def test_modules_without_tensors_may_differ(agree):
    net = nn.Sequential(nn.Linear(2, 2))
    if mpi.rank() == 0:
        net.add_module("shown", nn.Dropout())
    expected = everywhere(net[0].weight)[0]
    mpinn.synchronize_parameters(net)
    agree.equal(net[0].weight.detach(), expected)


def test_lazy_parameters_are_refused(agree):
    with pytest.raises(ArgumentError, match="Run one batch"):
        mpinn.synchronize_parameters(nn.LazyLinear(3))


def test_a_module_in_an_iterable_is_refused(agree):
    with pytest.raises(ArgumentError, match="iterable of tensors"):
        mpinn.synchronize_parameters([nn.Linear(2, 2)])


# --- gradients of whole nets -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_split_batch_gives_the_gradients_of_the_whole(agree, kind):
    net, x, y = make(kind)
    loss(net, mine(x), mine(y)).backward()
    mpinn.synchronize_gradients(net, bucket_bytes=2000)
    for index, (actual, expected) in enumerate(zip(gradients(net), whole_batch_gradients(kind), strict=True)):
        agree.close(actual, expected, f"parameter {index}", rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("average", [True, False])
def test_buckets_have_the_bits_of_the_naive_loop(agree, bucket_bytes, average):
    net, x, y = make("transformer")
    net.float()
    loss(net, mine(x).float(), mine(y)).backward()
    naive = gradients(net)
    for gradient in naive:
        mpi.allreduce(gradient, op="avg" if average else "sum")
    mpinn.synchronize_gradients(net, average, bucket_bytes=bucket_bytes)
    for index, (actual, expected) in enumerate(zip(gradients(net), naive, strict=True)):
        agree.equal(actual, expected, f"parameter {index}")


def test_gradients_stay_where_they_are(agree):
    net, x, y = make("mlp")
    loss(net, mine(x), mine(y)).backward()
    before = [p.grad for p in net.parameters()]
    mpinn.synchronize_gradients(net)
    agree(all(p.grad is gradient for p, gradient in zip(net.parameters(), before, strict=True)))


# --- gradients of unusual parameters ---------------------------------------------------------------------


def parameters_with(*gradients_: torch.Tensor | None) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients_:
        like = torch.zeros(2, 3) if gradient is None else gradient
        parameters.append(nn.Parameter(torch.zeros_like(like)))
        parameters[-1].grad = gradient
    return parameters


@pytest.mark.parametrize("average", [True, False])
def test_missing_on_some_ranks_counts_as_zero_and_missing_everywhere_stays_none(agree, average):
    """The set of gradients changes from step to step."""
    p, q = parameters_with(None, None)
    divisor = mpi.size() if average else 1
    for step in range(4):
        p.grad = torch.ones(2, 3) if step % mpi.size() == mpi.rank() else None
        q.grad = None if step % 2 else torch.ones(2, 3)
        mpinn.synchronize_gradients([p, q], average)
        agree.close(p.grad, torch.full((2, 3), 1 / divisor), f"step {step}")
        agree(q.grad is None if step % 2 else torch.equal(q.grad, torch.full((2, 3), mpi.size() / divisor)))


def test_frozen_parameters_are_left_alone(agree):
    p, q = parameters_with(torch.full((2,), float(mpi.rank())), torch.full((2,), float(mpi.rank())))
    p.requires_grad_(False)
    mpinn.synchronize_gradients([p, q], average=False)
    agree.equal(p.grad, torch.full((2,), float(mpi.rank())))
    agree.equal(q.grad, torch.full((2,), float(sum(range(mpi.size())))))


def test_shared_parameters_count_once(agree):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net[0].weight.grad = torch.ones(3, 3)
    mpinn.synchronize_gradients(net, average=False)
    agree.equal(net[0].weight.grad, torch.full((3, 3), float(mpi.size())))


def test_sharded_parameters_are_left_alone(agree):
    (p,) = parameters_with(torch.full((2,), float(mpi.rank())))
    p.torchmpi_sharded = True
    nn.init.constant_(p, mpi.rank())
    mpinn.synchronize_gradients([p])
    mpinn.synchronize_parameters([p])
    mpinn.check_with_allreduce([p])
    agree.equal(p.grad, torch.full((2,), float(mpi.rank())))
    agree.equal(p.detach(), torch.full((2,), float(mpi.rank())))


def test_noncontiguous_and_channels_last_gradients(agree):
    values = torch.arange(24.0)
    strided = (values.view(2, 3, 4) * (mpi.rank() + 1)).transpose(0, 2)
    channels_last = (values.view(1, 2, 3, 4) * (mpi.rank() + 1)).to(memory_format=torch.channels_last)
    p, q = parameters_with(strided, channels_last)
    mpinn.synchronize_gradients([p, q], average=False)
    total = sum(range(1, mpi.size() + 1))
    agree.equal(p.grad, values.view(2, 3, 4).transpose(0, 2) * total)
    agree.equal(q.grad, values.view(1, 2, 3, 4) * total)


def test_layouts_may_differ_between_ranks(agree):
    values = torch.arange(24.0).view(1, 2, 3, 4)
    (p,) = parameters_with(values.to(memory_format=torch.channels_last) if mpi.rank() % 2 else values.clone())
    mpinn.synchronize_gradients([p])
    agree.equal(p.grad, values)


def test_mixed_dtypes(agree):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float16, torch.complex64]
    parameters = parameters_with(*[torch.full((3,), mpi.rank() + 1.0, dtype=dtype) for dtype in dtypes])
    mpinn.synchronize_gradients(parameters)
    mean = (mpi.size() + 1) / 2
    for p, dtype in zip(parameters, dtypes, strict=True):
        agree.equal(p.grad, torch.full((3,), mean, dtype=dtype), str(dtype))


def test_empty_and_scalar_parameters(agree):
    p, q = parameters_with(torch.empty(0, 3), torch.tensor(mpi.rank() + 1.0))
    mpinn.synchronize_gradients([p, q], average=False)
    agree.equal(p.grad, torch.empty(0, 3))
    agree.equal(q.grad, torch.tensor(float(sum(range(mpi.size() + 1)))))


def test_nothing_to_synchronize(agree):
    for synchronize in (mpinn.synchronize_gradients, mpinn.synchronize_parameters):
        agree.equal(synchronize(nn.ReLU()), None)
    agree.equal(mpinn.synchronize_gradients([]), None)


def test_gradients_with_a_graph(agree):
    p = nn.Parameter(torch.full((2,), mpi.rank() + 1.0))
    (p.grad,) = torch.autograd.grad((p**2).sum(), p, create_graph=True)
    mpinn.synchronize_gradients([p], average=False)
    agree.equal(p.grad.detach(), torch.full((2,), float(mpi.size() * (mpi.size() + 1))))
    p.grad = None  # parameter and gradient refer to each other


# --- sparse ----------------------------------------------------------------------------------------------


def embedding_gradient(rows: list[int]) -> nn.Embedding:
    torch.manual_seed(3)
    table = nn.Embedding(7, 2, sparse=True)
    if rows:
        (table(torch.tensor(rows)) * (mpi.rank() + 1)).sum().backward()
    return table


def test_sparse_gradients_are_added_and_stay_sparse(agree):
    table = embedding_gradient([mpi.rank(), 5, 5])
    mpinn.synchronize_gradients(table, average=False)
    expected = torch.zeros(7, 2)
    for rank in range(mpi.size()):
        expected[rank] += rank + 1
        expected[5] += 2 * (rank + 1)
    agree(table.weight.grad.is_sparse and table.weight.grad.is_coalesced())
    agree.equal(table.weight.grad.to_dense(), expected)


def test_sparse_gradient_on_one_rank_only(agree):
    table = embedding_gradient([2] if mpi.rank() == 0 else [])
    mpinn.synchronize_gradients(table)
    expected = torch.zeros(7, 2)
    expected[2] = 1 / mpi.size()
    agree.close(table.weight.grad.to_dense(), expected)


def test_sparse_in_half_precision_is_rounded_once(agree):
    # Adding up in bfloat16, or rounding the sum before it is divided, gives other results for 3 and 4 ranks.
    values = [1.0, 1.0, 1.0 + 5 / 128, 1.0 + 1 / 128][: mpi.size()]
    (p,) = parameters_with(torch.zeros(4, 1, dtype=torch.bfloat16))
    p.grad[1] = values[mpi.rank()]
    p.grad = p.grad.to_sparse(1)
    mpinn.synchronize_gradients([p])
    expected = torch.tensor(sum(values) / len(values), dtype=torch.bfloat16)
    agree.equal(p.grad.to_dense()[1, 0], expected)


@pytest.mark.min_ranks(2)
def test_sparse_here_and_dense_there_is_an_error_on_all_ranks(agree):
    (p,) = parameters_with(torch.ones(4, 1))
    if mpi.rank() == 0:
        p.grad = p.grad.to_sparse(1)
    with pytest.raises(GradientError, match="sparse on one rank and dense on another"):
        mpinn.synchronize_gradients([p])


# --- on other communicators ------------------------------------------------------------------------------


def test_only_the_ranks_of_the_communicator_take_part(agree):
    level = mpi.push_communicator(f"parity {mpi.rank() % 2}")
    mpi.set_communicator(0)
    (p,) = parameters_with(torch.tensor([float(mpi.rank())]))
    mpinn.synchronize_gradients([p], average=False, comm=level)
    agree.equal(p.grad, torch.tensor([float(sum(range(mpi.rank() % 2, mpi.size(), 2)))]))


def test_kept_gradients_move_into_shared_memory_and_stay_the_same_objects(agree):
    """From the second call on gradients are reduced in place, missing and new ones as before, with equal bits."""
    net = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 50))
    mpinn.synchronize_parameters(net)
    heap, is_shared = runtime.current().heap, mpi.communicator().intra.status_board is not None
    objects, bits = [], []
    for step in range(4):
        with_gradients(net, 0)
        mpinn.synchronize_gradients(net)
        weights = [net[0].weight.grad, net[1].weight.grad]
        objects.append([id(gradient) for gradient in weights])
        bits.append([gradient.clone() for gradient in weights])
        if step == 2:
            agree.equal([heap.holds(gradient.data_ptr()) for gradient in weights], [is_shared, is_shared])
            net.zero_grad()
    agree.equal(objects[0], objects[1])
    agree.equal(objects[1], objects[2])
    for later in bits[1:]:
        for first, other in zip(bits[0], later, strict=True):
            agree.equal(other, first)
    agree(heap.holds(net[0].weight.grad.data_ptr()) is False, "new gradients are private at first")


def with_gradients(net: nn.Module, seed: int) -> None:
    """Write new values into the gradients, and create the missing ones."""
    for index, parameter in enumerate(net.parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + 10 * index + mpi.rank())
        values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(values)


def averages(net: nn.Module, seed: int) -> list[torch.Tensor]:
    """The expected gradients, by one call for each."""
    with_gradients(net, seed)
    return [mpi.allreduce(parameter.grad.clone(), op="avg") for parameter in net.parameters()]


def kept_net(convolution_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    """With gradients of more than 32 KB and less, and lengths that leave gaps between cache lines."""
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Linear(101, 203), nn.Linear(203, 7))
    return net.to(memory_format=convolution_format)


def synchronized_as(net: nn.Module) -> list[bool]:
    """Synchronize the gradients; for each call that this took, whether it was given a list of tensors."""
    log = mpi.communicator().intra.call_log
    before = log.seq
    mpinn.synchronize_gradients(net)
    entered = {call.seq: CODES[call.code & 0xFF] for call in log.ring.calls()}
    return [entered.get(seq) == "allreduce_many" for seq in range(before + 1, log.seq + 1)]


REASONS_FOR_A_LIST = {
    "another order of dimensions": lambda net: None,
    "a rank has dropped one": lambda net: mpi.rank() or setattr(net[1].weight, "grad", None),
    "a rank has another one": lambda net: mpi.rank() or setattr(net[1].weight, "grad", net[1].weight.grad.clone()),
    "one is frozen": lambda net: net[2].weight.requires_grad_(False),
    "a rank has moved one": lambda net: mpi.rank() or setattr(net[0].bias.grad, "data", net[0].bias.grad.clone()),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_persistent_gradients_are_reduced_in_one_call_per_dtype(agree, dtype):
    """After the call that finds the present gradients: at first of a list, later of the block in shared memory."""
    net, calls = kept_net(), []
    net[1].to(dtype)
    for step in range(4):
        expected = averages(net, step)
        calls.append(synchronized_as(net))
        for parameter, average in zip(net.parameters(), expected, strict=True):
            agree.bits(parameter.grad, average, f"step {step}")
    if mpi.communicator().intra.status_board is not None:
        agree.equal(calls[2:], [[False] * (2 if dtype is torch.float32 else 3)] * 2, "calls")
        agree(dtype is torch.bfloat16 or calls[:2] == [[False, True]] * 2, f"calls: {calls}")
    versions = [parameter.grad._version for parameter in net.parameters()]
    mpinn.synchronize_gradients(net)
    agree(all(p.grad._version > before for p, before in zip(net.parameters(), versions, strict=True)), "versions")


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("happens", REASONS_FOR_A_LIST.items(), ids=REASONS_FOR_A_LIST)
def test_gradients_scattered_on_some_rank_are_reduced_as_a_list(agree, happens):
    reason, change = happens
    is_reordered = reason == "another order of dimensions"
    net = kept_net(torch.channels_last if is_reordered and mpi.rank() == 0 else torch.contiguous_format)
    for step in range(3):
        with_gradients(net, step)
        mpinn.synchronize_gradients(net)
    with_gradients(net, 3)
    change(net)
    expected = [
        mpi.allreduce(torch.zeros_like(p).contiguous() if p.grad is None else p.grad.clone().contiguous(), op="avg")
        for p in net.parameters()
    ]
    frozen = [parameter.grad.clone() for parameter in net.parameters() if not parameter.requires_grad]
    shares_memory = mpi.communicator().intra.status_board is not None
    agree.equal(synchronized_as(net), [False, shares_memory], "in one block")
    for parameter, average in zip(net.parameters(), expected, strict=True):
        agree.equal(parameter.grad, average if parameter.requires_grad else frozen[0], reason)


def test_parameters_with_one_gradient_in_common(agree):
    """Regression: a list with a tensor in it twice was refused, but only within a host."""
    net = nn.Sequential(nn.Linear(50, 40, bias=False), nn.Linear(50, 40, bias=False))
    net[0].weight.grad = net[1].weight.grad = torch.full((40, 50), float(mpi.rank()))
    mpinn.synchronize_gradients(net)
    agree.equal(net[0].weight.grad, torch.full((40, 50), (mpi.size() - 1) / 2))
    agree(net[0].weight.grad is net[1].weight.grad)


def test_buckets_have_the_requested_size_without_shared_memory(agree):
    net = kept_net()
    mpi.collective_selector.set("allreduce", "mpi")
    try:
        for bucket_bytes, num_calls in ((None, 2), (1, 1 + len(list(net.parameters())))):
            net.zero_grad()
            expected = averages(net, 0)
            before = mpi.communicator().intra.call_log.seq
            mpinn.synchronize_gradients(net, bucket_bytes=bucket_bytes)
            agree.equal(mpi.communicator().intra.call_log.seq - before, num_calls, f"calls with {bucket_bytes}")
            for parameter, average in zip(net.parameters(), expected, strict=True):
                agree.bits(parameter.grad, average, f"{bucket_bytes}")
    finally:
        mpi.collective_selector.reset()


def test_other_tensors_in_the_memory_of_the_gradients_remain(agree):
    """Regression: gradients that are views of a flat tensor of the program were moved, and no longer cleared by it."""
    net = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 1, bias=False))
    mpinn.synchronize_parameters(net)
    flat, begin = torch.zeros(10_100), 0
    for parameter in net.parameters():
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    for _ in range(4):
        flat.zero_()
        net(torch.full((1, 100), mpi.rank() + 1.0)).backward()
        mpinn.synchronize_gradients(net)
        agree.equal(torch.cat([each.view(-1) for each in gradients(net)]), flat)
        agree.close(net[1].weight.grad.sum(), net[0].weight.sum() * (mpi.size() + 1) / 2)


@pytest.mark.min_ranks(2)
def test_ranks_that_have_frozen_other_parameters_are_refused(agree):
    """Regression: the gradients of different layers of the same shape were averaged."""
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    net[0].requires_grad_(False)
    net[1 if mpi.rank() == 0 else 2].requires_grad_(False)
    net(torch.ones(1, 2)).sum().backward()
    if mpi.size() == 1:
        mpinn.synchronize_gradients(net)
    else:
        agree.raises(ReplicaError, lambda: mpinn.synchronize_gradients(net), "have frozen different parameters")


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.10")
def test_a_missing_gradient_has_the_dtype_of_the_others(agree):
    """Regression: that of the parameter, so that the ranks made different calls."""
    net = nn.Linear(2, 2, dtype=torch.bfloat16)
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    net(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum().backward()
    if mpi.rank():
        net.bias.grad = None
    mpinn.synchronize_gradients(net)
    agree.equal(net.bias.grad, torch.full((2,), 1 / mpi.size()))
