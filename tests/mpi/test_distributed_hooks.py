"""DistributedDataParallel's communication hooks over torchmpi: PyTorch's own, in Python and in C++, and a user's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed_rig import (
    SMALL_BUCKETS,
    TIGHT,
    adam,
    gradients,
    loss_of,
    net,
    same_everywhere,
    sgd,
    share,
    train,
    trained_alone,
    values,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.usefixtures("default_group")


def parallel() -> DDP:
    return DDP(net(), **SMALL_BUCKETS)


@pytest.mark.parametrize("is_builtin", (False, True), ids=("in Python", "in C++"))
def test_allreduce_hook(agree, is_builtin):
    model = parallel()
    if is_builtin:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model, sgd(model.parameters()), share())
    agree.close(values(model), values(trained_alone()), **TIGHT)


def check_rounded(agree, model: DDP, dtype: torch.dtype) -> None:
    """Each rank's gradients are rounded and divided by the number of ranks; the sum of those is rounded once."""
    size = dist.get_world_size()
    loss_of(model, 0, share()).backward()
    parts = []
    for rank in range(size):
        single = net()
        loss_of(single, 0, slice(rank, None, size)).backward()
        parts.append(gradients(single).to(dtype).div_(size).float())
    agree.equal(gradients(model), sum(parts).to(dtype).double())
    agree(same_everywhere(gradients(model)), "ranks differ")


def bf16_hook(state, bucket):
    """PyTorch's hook under another name: DDP refuses the original name without NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


@pytest.mark.parametrize(
    ("hook", "dtype"),
    [
        (default_hooks.fp16_compress_hook, torch.float16),
        (bf16_hook, torch.bfloat16),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), torch.float16),
    ],
    ids=["fp16", "bf16", "fp16 wrapper"],
)
def test_compressing_hooks(agree, hook, dtype):
    model = parallel()
    model.register_comm_hook(None, hook)
    check_rounded(agree, model, dtype)


def test_builtin_fp16_hook(agree):
    model = parallel()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    check_rounded(agree, model, torch.float16)


class Within(torch.autograd.Function):
    """Calls a function in its backward pass."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.call()
        return gradient, None


def test_builtin_fp16_hook_in_a_thread_of_autograd(agree):
    """Regression: there, and so with a GPU, the hook in C++ did not get a future of C++ tensors, and asserted that.

    Of backward passes inside each other, the 62nd runs in such a thread on a CPU too.
    """
    model = parallel()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    def call(depth: int = 61) -> None:
        if depth:
            Within.apply(torch.ones((), requires_grad=True), lambda: call(depth - 1)).backward()
        else:
            loss_of(model, 0, share()).backward()

    call()
    through_threads = gradients(model)
    model.zero_grad()
    check_rounded(agree, model, torch.float16)
    agree.equal(through_threads, gradients(model))


def powersgd_state(rank: int) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=2,
        min_compression_rate=1e-9,  # compress all tensors, even if the result is longer
    )


def test_powersgd_of_full_rank_is_exact(agree):
    """The hook makes a blocking all_reduce in the callback of another."""
    model = parallel()
    model.register_comm_hook(powersgd_state(16), powerSGD_hook.powerSGD_hook)
    train(model, sgd(model.parameters()), share(), steps=6)
    agree.close(values(model), values(trained_alone(steps=6)), rtol=1e-6, atol=1e-8)


def test_powersgd_of_rank_1_learns_the_same_everywhere(agree):
    model = parallel()
    model.register_comm_hook(powersgd_state(1), powerSGD_hook.powerSGD_hook)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(8):
        losses.append(loss_of(model.module, 0).item())
        train(model, optimizer, share(), steps=1)
    agree(same_everywhere(values(model)), "ranks differ")
    agree(losses[-1] < 0.97 * losses[0], f"losses {losses}")


def test_hook_of_a_user_raises_where_it_is_called(agree):
    def hook(state, bucket):  # DDP reads annotations, which must not be strings
        work = dist.all_reduce(bucket.buffer(), async_op=True)

        def fail(future: torch.futures.Future) -> torch.Tensor:
            raise ZeroDivisionError("in the hook")

        return work.get_future().then(fail)

    model, message = parallel(), ""
    model.register_comm_hook(None, hook)
    try:
        loss_of(model, 0, share()).backward()
    except Exception as error:
        message = repr(error)
    agree("in the hook" in message, message or "nothing was raised")


def test_post_local_sgd_and_its_averager(agree):
    """Gradients stay local from the second step on; every other step the models are averaged."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own_group, groups = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, own_group, start_localSGD_iter=1)
    model = parallel()
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager, optimizer = PeriodicModelAverager(period=2, warmup_steps=0), sgd(model.parameters())
    singles = [net() for _ in range(size)]
    others = [sgd(single.parameters()) for single in singles]
    differed = []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, step, share()).backward()
        optimizer.step()
        differed.append(not same_everywhere(values(model)))
        averager.average_parameters(model.parameters())
        local_sgd_step(singles, others, step, is_local=step > 0)
        if step % 2 == 0:
            average(singles)
    dist.destroy_process_group(groups[rank])
    agree.close(values(model), values(singles[rank]), **TIGHT)
    agree.equal(differed[0], False)
    agree.equal(differed[1:4], [size > 1] * 3)


def local_sgd_step(
    models: list[nn.Module], optimizers: list[torch.optim.Optimizer], step: int, *, is_local: bool
) -> None:
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        optimizer.zero_grad()
        loss_of(model, step, slice(rank, None, len(models)) if is_local else slice(None)).backward()
        optimizer.step()


def average(models: list[nn.Module]) -> None:
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack(list(parameters)).mean(0)
            for parameter in parameters:
                parameter.copy_(mean)


def test_zero_in_a_hook(agree):
    """Each rank updates its part of the parameters as soon as a bucket has been reduced, and broadcasts it."""
    model = parallel()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01, eps=1e-3)
    model.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer))
    # The first two steps only determine the order of the gradients, without an update.
    for step in (0, 0, *range(4)):
        loss_of(model, step, share()).backward()
        optimizer.step()
        model.zero_grad()
    agree.close(values(model), values(trained_alone(adam)), rtol=1e-6, atol=1e-8)
    agree(same_everywhere(values(model)), "ranks differ")
