"""Lets tests that ask for one GPU per rank run on CPU tensors: most of what PyTorch tests of DDP is among them.

What they say of devices is taken to mean the CPU: ``model.cuda(rank)``, ``torch.ones(2, device=rank)``,
``DistributedDataParallel(model, device_ids=[rank])``. Everything else in them is as PyTorch wrote it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

Test = Callable[..., Any]

# These test GPUs, or parts of PyTorch that refuse CPU tensors whatever the backend. They are left to PyTorch, which
# skips them here. A name with * stands for all that begin so.
ABOUT_GPUS = {
    "test_DistributedDataParallel_SyncBatchNorm*": "DDP takes SyncBatchNorm on GPUs only",
    "test_average_parameters": "makes a group of NCCL's",
    "test_batch_isend_irecv_mixed_backend_err": "makes a group of NCCL's",
    "test_batch_isend_irecv_op_err": "looks for a GPU to synchronize with",
    "test_ddp_apply_optim_in_backward*": "looks for a GPU's streams",
    "test_ddp_device": "compares numbers of devices",
    "test_ddp_inference": "DDP takes SyncBatchNorm on GPUs only",
    "test_ddp_logging_data_gpu": "compares numbers of devices",
    "test_ddp_native_mixed_precision_grad*": "DDP's mixed precision wants events, which CPUs do not have",
    "test_ddp_native_mixed_precision_no_grad*": "DDP's mixed precision wants events, which CPUs do not have",
    "test_ddp_uneven_inputs": "a CPU takes a minute for one step of its model",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": "DDP takes SyncBatchNorm on GPUs only",
    "test_monitored_barrier_allreduce_hang*": "makes a group of NCCL's",
    "test_sync_bn_logged": "DDP takes SyncBatchNorm on GPUs only",
}
# Tests "..._cuda" of what has a test of the same kind for CPU tensors are not run a second time. These have none.
ONLY_FOR_CUDA = (
    "test_all_gather_into_cat_tensor_cuda",
    "test_all_gather_into_stack_tensor_cuda",
    "test_all_gather_v_cuda",
    "test_reduce_scatter_tensor_cuda",
    "test_reduce_scatter_v_cuda",
)


def replaced(skip: Callable[[Test], Test]) -> Callable[[Test], Test]:
    """In the place of a decorator that skips a test where there are no GPUs."""

    def decorate(test: Test) -> Test:
        if not can_run(test.__name__):
            return skip(test)

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> Any:
            with instead_of_gpus():
                return test(*args, **kwargs)

        return run

    return decorate


def can_run(name: str) -> bool:
    """Whether the test of this name is about more than GPUs."""
    if name.endswith("_cuda"):
        return name in ONLY_FOR_CUDA
    return not any(name == entry or (entry.endswith("*") and name.startswith(entry[:-1])) for entry in ABOUT_GPUS)


@contextlib.contextmanager
def instead_of_gpus() -> Iterator[None]:
    """Within it, every device is the CPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_OnCpu())
        for name in ("set_device", "synchronize", "manual_seed"):
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, **__: None))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: 0))
        stack.enter_context(mock.patch.object(torch.nn.Module, "cuda", lambda module, device=None: module))
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", _module_to(torch.nn.Module.to)))
        original = DistributedDataParallel.__init__
        stack.enter_context(mock.patch.object(DistributedDataParallel, "__init__", _without_devices(original)))
        yield


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _is_gpu(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    # A bool is not the number of a GPU.
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


def _module_to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args and _is_gpu(args[0]):
            args = ("cpu", *args[1:])
        return original(module, *args, **kwargs)

    return to


def _without_devices(original: Callable[..., None]) -> Callable[..., None]:
    def init(*args: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        # For mixed precision it makes a stream, which is one of a GPU where PyTorch has been built with CUDA.
        with mock.patch.object(torch, "Stream", functools.partial(torch.Stream, device="cpu")):
            original(*args, **kwargs)

    return init
