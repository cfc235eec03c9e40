"""Enable tests of PyTorch's suite that are skipped by the name of the backend.

Many tests of ``distributed_test`` are skipped with a reason such as "only MPI supports all_to_all". Those with the
reasons below are enabled. Tests that require GPUs run on CPU tensors (cpu_tensors.py), unless they test GPUs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cpu_tensors
from torch.testing._internal import common_distributed, common_utils

Test = Callable[..., Any]

# Reasons that name other backends for something that torchmpi can do, or should.
OPENED_REASONS = (
    "Coalescing manager currently tests with NCCL only; internal test flaky",
    "GLOO Batch Send Recv CPU",
    "NCCL Batch Send Recv Only",
    "NCCL Send Recv Only",
    "Only Gloo backend supports sparse all reduce",
    "Only MPI supports CPU all_to_all_single",
    "Only MPI supports all_to_all",
    "Only Nccl & Gloo backend support DistributedDataParallel",
    "Only Nccl supports CUDA all_gather_into_tensor",
    "Only Nccl supports CUDA reduce_scatter_tensor",
    "Only Nccl supports all_gather_v",
    "Only Nccl supports reduce_scatter_v",
    "Only gloo backend supports timeouts",
    "Test requires backend {backend} to be one of {{'gloo'}}",
    "Test requires backend {backend} to be one of {{'nccl'}}",
    "get_future is only supported on mpi, nccl and gloo",
)


def load(backend: str) -> ModuleType:
    """Import ``distributed_test`` for this backend; its environment variables must be set already."""
    opened = {reason.format(backend=backend) for reason in OPENED_REASONS}
    skip, skip_if = common_utils.skip_but_pass_in_sandcastle, common_utils.skip_but_pass_in_sandcastle_if
    common_utils.skip_but_pass_in_sandcastle = _unless_opened(skip, opened)
    common_utils.skip_but_pass_in_sandcastle_if = lambda condition, reason: (
        _unless_opened(skip, opened)(reason) if condition else skip_if(condition, reason)
    )
    common_distributed.skip_if_small_worldsize = _skip_below_three_ranks
    common_distributed.skip_if_no_gpu = cpu_tensors.replaced(common_distributed.skip_if_no_gpu)
    skip_below = common_distributed.skip_if_lt_x_gpu
    common_distributed.skip_if_lt_x_gpu = lambda number: cpu_tensors.replaced(skip_below(number))
    common_distributed.init_multigpu_helper = lambda size, backend: {rank: [rank] for rank in range(size)}
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add(backend)

    # The first test would import the former, which takes seconds.
    from torch.testing._internal import common_device_type  # noqa: F401
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def _unless_opened(skip: Callable[[str], Callable[[Test], Test]], opened: set[str]) -> Callable[[str], Any]:
    """``skip(reason)(test)``, except for tests that can run in spite of the reason."""

    def with_reason(reason: str) -> Callable[[Test], Test]:
        return lambda test: test if reason in opened and cpu_tensors.can_run(test.__name__) else skip(reason)(test)

    return with_reason


def _skip_below_three_ranks(test: Test) -> Test:
    """Skip tests of ranks 1 and 2 as a group below 3 ranks, as PyTorch does for "mpi"; for others it requires 8."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        if int(os.environ["WORLD_SIZE"]) < 3:
            sys.exit(common_distributed.TEST_SKIPS["small_worldsize"].exit_code)
        return test(*args, **kwargs)

    return run
