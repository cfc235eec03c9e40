"""The calls of torch.distributed that combine tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import collectives
from ..errors import ArgumentError
from ..session import runtime
from ..tensors import buffers, dtypes, fusion, sparse
from . import bucket_memory, reductions, torch_names
from .base import BaseGroup, Tensors
from .rows import as_rows, deliver, one_of, result_rows, same_lengths
from .work import ENDED


class Reducing(BaseGroup):
    """Reductions of a group."""

    def allreduce(self, tensors: Any, opts: Any = torch_names.ALLREDUCE) -> dist.Work:
        """Combine everybody's tensor, in place."""
        if type(tensors) is list and type(opts) is torch_names.AllreduceOptions and len(tensors) == 1:
            # Like a call before: a third of the time of a short call would go into the questions below. The number of
            # an operation, as torch's objects for it take a microsecond to find in a dictionary.
            tensor = tensors[0]
            known = self._known.get((opts.reduceOp.op.value, tensor.dtype))
            if known is not None and not (opts.asyncOp or tensor.is_sparse):
                collectives.allreduce(tensor, op=known, comm=self._communicator)
                return ENDED
        tensor, opts = one_of(tensors), torch_names.reduce_options(opts)
        reduction = opts.reduceOp
        op = reductions.name_of(reduction, tensor.dtype)
        if tensor.is_sparse:
            return self._allreduce_sparse(tensor, op, opts)
        if not (self._by_messages or reductions.is_scaled(reduction)):
            self._known[reduction.op.value, tensor.dtype] = op
            if not torch_names.is_asynchronous(opts):
                collectives.allreduce(tensor, op=op, comm=self._communicator)
                return ENDED
        plan = self._plan("allreduce", tensor, None, op)
        is_long = tensor.is_cpu and tensor.nbytes >= bucket_memory.LEAST_BYTES
        if self._may_share and is_long and torch_names.is_bucket_of_ddp(tensor):
            self._may_share = bucket_memory.share(tensor)

        def task() -> None:
            self._scale([tensor], reduction)
            self._group.perform(plan, tensor, None, 0)

        return self._launch(task, [tensor], opts, "all_reduce")

    def _scale(self, tensors: Tensors, reduction: Any) -> None:
        """With the factor of PREMUL_SUM; in the call's turn, since earlier ones may still be at work on the tensors."""
        if reductions.is_scaled(reduction):
            for tensor in tensors:
                buffers.overwrite(tensor, reductions.scaled(tensor, reduction))

    def _allreduce_sparse(self, tensor: torch.Tensor, op: str, opts: Any) -> dist.Work:
        """Gradients of embeddings, for example."""
        if op not in ("sum", "avg") or reductions.is_scaled(opts.reduceOp):
            raise ArgumentError(f"{self._group.where}: all_reduce: sparse tensors can be summed or averaged, no more.")
        dtypes.check_reduction(tensor.dtype, op)
        divisor = self.size() if op == "avg" else 1

        def gather(rows: torch.Tensor) -> torch.Tensor:
            # The shape of the whole is compared: an entry of another rank must have a place here.
            plan = self._plan("allgather", rows).announcing(tensor.dtype, *tensor.shape, *rows.shape[1:])
            gathered: torch.Tensor = self._group.perform(plan, rows, None, 0)
            return gathered

        def task() -> None:
            total = sparse.total(*sparse.entries(tensor), tensor.shape, gather, divisor=divisor)
            with torch.no_grad():
                tensor.copy_(total)

        return self._launch(task, [tensor], opts, "all_reduce")

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = torch_names.ALLREDUCE_COALESCED) -> dist.Work:
        """Several tensors, fused."""
        tensors = list(tensors)
        if not tensors:
            return ENDED
        op = reductions.name_of(opts.reduceOp, tensors[0].dtype)
        task = partial(self._reduce_fused, tensors, opts.reduceOp, op)
        for tensor in tensors:  # refused here, if at all
            self._plan("allreduce", tensor, None, op)
        return self._launch(task, tensors, opts, "allreduce_coalesced")

    def _reduce_fused(self, tensors: Tensors, reduction: Any, op: str) -> None:
        self._scale(tensors, reduction)
        for members in fusion.plan_buckets(tensors, runtime.current().config.bucket_bytes):
            parts = [tensors[index] for index in members]
            if len(parts) == 1:
                self._group.perform(self._plan("allreduce", parts[0], None, op), parts[0], None, 0)
                continue
            flat = torch.cat([part.detach().reshape(-1) for part in parts])
            plan = self._plan("allreduce", flat, None, op).for_many(tuple(tuple(part.shape) for part in parts))
            self._group.perform(plan, flat, None, 0)
            fusion.unpack(flat, parts)

    def reduce(self, tensors: Any, opts: Any = torch_names.REDUCE) -> dist.Work:
        """Combine everybody's tensor on the root."""
        tensor = one_of(tensors)
        op = reductions.name_of(opts.reduceOp, tensor.dtype)
        root, plan = self._checked_root(opts, "reduce"), self._plan("reduce", tensor, None, op)

        def task() -> None:
            if self.rank() == root:
                self._scale([tensor], opts.reduceOp)
                self._group.perform(plan, tensor, None, root)
            else:  # keeps what it has
                self._group.perform(plan, reductions.scaled(tensor, opts.reduceOp), None, root)

        return self._launch(task, [tensor], opts, "reduce")

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = torch_names.REDUCE_SCATTER
    ) -> dist.Work:
        """Combine everybody's list, and give each rank its entry."""
        output, parts = one_of(outputs), one_of(inputs)
        op = reductions.name_of(opts.reduceOp, output.dtype)
        if len(parts) != self.size() or parts[self.rank()].numel() != output.numel():
            raise ArgumentError(
                f"{self._group.where}: reduce_scatter: {len(parts)} input tensors, of which this rank's has "
                f"{parts[self.rank()].numel() if len(parts) > self.rank() else 0} elements and the output "
                f"{output.numel()}. Pass one for each of the {self.size()} ranks, and an output like this rank's."
            )
        for part in parts:
            buffers.check(part, f"{self._group.where}: reduce_scatter")

        def flat() -> torch.Tensor:
            return reductions.scaled(torch.cat([part.detach().reshape(-1) for part in parts]), opts.reduceOp)

        if same_lengths(parts):
            return self._reduce_scatter_rows(output, parts[0], flat, op, opts)
        buffers.check(output, f"{self._group.where}: reduce_scatter", written=True)
        lengths = [part.numel() for part in parts]
        begin = sum(lengths[: self.rank()])

        def task() -> None:
            work = flat()
            plan = self._plan("allreduce", work, None, op).for_many(tuple((numel,) for numel in lengths))
            self._group.perform(plan, work, None, 0)
            buffers.overwrite(output, work[begin : begin + output.numel()].view(output.shape))

        return self._launch(task, [output], opts, "reduce_scatter")

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = torch_names.REDUCE_SCATTER
    ) -> dist.Work:
        """The same from one tensor with everybody's part in it."""
        op = reductions.name_of(opts.reduceOp, output.dtype)
        self._check_sizes("reduce_scatter_tensor", input, output)

        def flat() -> torch.Tensor:
            return reductions.scaled(input.detach().reshape(-1), opts.reduceOp)

        return self._reduce_scatter_rows(output, input, flat, op, opts)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def _reduce_scatter_rows(
        self, output: torch.Tensor, source: torch.Tensor, flat: Callable[[], torch.Tensor], op: str, opts: Any
    ) -> dist.Work:
        target, plan = result_rows(output, 1), self._plan_into("reduce_scatter", source, output, op)

        def task() -> None:
            self._group.perform(plan, as_rows(flat(), self.size()), target, 0)
            deliver(target, output)

        return self._launch(task, [output], opts, "reduce_scatter")

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = torch_names.REDUCE_SCATTER
    ) -> dist.Work:
        """Several of them."""
        return self._each(self._reduce_scatter_base, list(zip(outputs, inputs, strict=True)), outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
