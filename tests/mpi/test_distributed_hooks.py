"""To a user of DDP's communication hooks: PyTorch's own, in Python and in C++, and a user's work over torchmpi."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.distributed_rig import (
    SMALL_BUCKETS,
    gradients,
    loss_of,
    net,
    same_everywhere,
    share,
)
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("default_group")]


def parallel() -> DDP:
    return DDP(net(), **SMALL_BUCKETS)


def check_rounded(agree, model: DDP) -> None:
    """Each rank's gradients are rounded and divided by the number of ranks; the sum of those is rounded once."""
    size = dist.get_world_size()
    loss_of(model, 0, share()).backward()
    parts = []
    for rank in range(size):
        single = net()
        loss_of(single, 0, slice(rank, None, size)).backward()
        parts.append(gradients(single).half().div_(size).float())
    agree.equal(gradients(model), sum(parts).half().double())
    agree(same_everywhere(gradients(model)), "ranks differ")


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
    check_rounded(agree, model)
    agree.equal(through_threads, gradients(model))


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
