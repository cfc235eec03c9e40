"""The path of a synchronous call that the fast path does not run."""

from __future__ import annotations

from typing import Any

import torch

from ..collective_specs import IN_PLACE, SPECS
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.levels import Comm, used
from ..other_names import operation
from ..session import runtime
from ..shared_memory import fast_path
from ..tensors import buffers, writable
from .dispatch import cache_call, check_call, is_simple, plan_for, refuse_read_only

_Tensor = torch.Tensor
_get_tracing_state = torch._C._get_tracing_state  # bound once: every call that the fast path does not run uses it
_INTO = tuple(name.removesuffix("_into") for name in fast_path.INTO)
LASTING = (Communicator, Group)
"""Types of ``comm=`` whose objects the fast path may remember; equal numbers may be different objects."""


def call(
    collective: str, tensor: Any, out: _Tensor | None, root: Any, op: str | None, comm: Comm, backend: str | None
) -> Any:
    """Run a collective that the caller waits for, and return its result."""
    if not (op is None or type(op) is str):  # an operation of torch.distributed or mpi4py
        op = operation(op)
    # 1. A repeated call on contiguous host tensors: its plan exists and needs no further checks.
    # is_simple(tensor) inlined, on the path of every call that the fast path does not run.
    try:
        is_tensor = (
            type(tensor) is _Tensor
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.is_contiguous()
            and not (tensor.is_neg() or tensor.requires_grad)
            and (tensor.data_ptr() != 0 or tensor.numel() == 0)
            and _get_tracing_state() is None
        )
    except RuntimeError:  # of data_ptr(), for the tensors of torch.func
        is_tensor = False
    if is_tensor or (
        tensor is None
        and SPECS[collective].only_root_passes
        and (out is None or (is_simple(out) and not out.dtype.is_complex))
    ):
        running = runtime.running
        if comm is None and running is not None and used.get() is None:  # the most frequent case, without a call
            group = running.communicators.default.intra
        else:
            group = runtime.communicator(comm).intra
        plan = group.plans.get((collective, op, tensor.dtype if is_tensor else None, backend))
        has_root = type(root) is int and 0 <= root < group.size
        if out is not None and collective in IN_PLACE:
            if is_tensor and has_root and _is_separate(tensor, out) and out.shape == tensor.shape:
                if plan is None:
                    plan_for(runtime.communicator(comm), (collective, op, tensor.dtype, "cpu", True, backend, False))
                    plan = group.plans.get((collective, op, tensor.dtype, backend))
                if plan is not None:
                    writable.refuse_read_only(out, group.where, f"{collective}: out")
                    if collective in _INTO and backend is None and (comm is None or type(comm) in LASTING):
                        cache_call(group, collective, (tensor, out, root), op, comm)
                    return group.call_queue.run(group.perform_into, plan, tensor, out, root)
            plan = None
        if plan is not None and has_root and (is_tensor or root != group.rank):
            if out is None:
                refuse_read_only(group, collective, tensor, root)
            if collective in fast_path.COLLECTIVES and backend is None and (comm is None or type(comm) in LASTING):
                cache_call(group, collective, (tensor, out, root), op, comm)
            if out is None:
                result = group.call_queue.run(group.perform, plan, tensor, None, root, 4)  # depth: run, _call, caller
                if result is tensor:
                    try:  # buffers.touch without a call
                        buffers.increment_version((tensor,))
                    except RuntimeError:
                        buffers.touch(tensor)
                return result
            if tensor is None or _is_separate(tensor, out):
                writable.refuse_read_only(out, group.where, f"{collective}: out")
                result = group.call_queue.run(group.perform, plan, tensor, out, root, 4)
                if result is None:  # gathered by another rank
                    return None
                if result is not out:
                    buffers.copy_result(result, out)
                buffers.touch(out)
                return out
    # 2. A repeated call on a direct CUDA tensor.
    if out is None and buffers.is_simple_on_gpu(tensor):
        running = runtime.running
        if comm is None and running is not None and used.get() is None:  # the most frequent case, without a call
            group = running.communicators.default.intra
        else:
            group = runtime.communicator(comm).intra
        plan = group.plans.get((collective, op, tensor.dtype, "cuda", True, backend, False))
        if plan is not None and type(root) is int and 0 <= root < group.size:
            return group.call_queue.run(group.perform, plan, tensor, None, root, 4, subject=tensor)
    # 3. Any other call.
    call = check_call(collective, tensor, out, root, op, comm, backend, asynchronous=False)
    arguments = call.plan, call.tensor, out, call.root, 4
    result = call.group.call_queue.run(call.group.perform, *arguments, subject=call.subject(out))
    return result if call.finish is None else call.finish(result)


def _is_separate(tensor: _Tensor, out: Any) -> bool:
    """Return whether `out` is simple too, of the same dtype, and shares no memory with the tensor."""
    return is_simple(out) and out.dtype is tensor.dtype and not buffers.overlap(out, tensor)
