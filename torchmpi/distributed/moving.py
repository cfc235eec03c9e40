"""The calls of torch.distributed that move tensors.

What arrives here in lists of tensors travels as one row per rank where they are all as long: the length of a row is
part of what the ranks compare, so that lists which do not fit are noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ArgumentError
from ..tensors import buffers
from . import exchange, torch_names
from .base import BaseGroup, Tensors
from .rows import as_rows, deliver, deliver_each, one_of, result_rows, same_lengths, stacked


class Moving(BaseGroup):
    """Movements within a group."""

    def broadcast(self, tensors: Any, opts: Any = torch_names.BROADCAST) -> dist.Work:
        """Give everybody the root's tensor."""
        tensor, opts = one_of(tensors), torch_names.broadcast_options(opts)
        return self._run("broadcast", tensor, None, opts, outputs=[tensor], root=self._checked_root(opts, "broadcast"))

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = torch_names.ALLGATHER) -> dist.Work:
        """Everybody's tensor to everybody, into a list; they may differ in length."""
        parts, tensor = list(one_of(outputs)), one_of(inputs)
        exchange.check(self._group, [tensor] * self.size(), parts, "all_gather")
        if not same_lengths([*parts, tensor]):
            task = partial(exchange.exchange, self._group, [tensor] * self.size(), parts)
            return self._launch(task, parts, opts, "all_gather")
        target, plan = stacked(parts), self._plan_into("allgather", tensor, parts[0])

        def gather_rows() -> None:
            self._group.perform(plan, as_rows(tensor, 1), target, 0)
            deliver_each(target, parts)

        return self._launch(gather_rows, parts, opts, "all_gather")

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = torch_names.ALLGATHER
    ) -> dist.Work:
        """The same into one tensor."""
        self._check_sizes("all_gather_into_tensor", output, input)
        target, plan = result_rows(output, self.size()), self._plan_into("allgather", input, output)

        def task() -> None:
            self._group.perform(plan, as_rows(input, 1), target, 0)
            deliver(target, output)

        return self._launch(task, [output], opts, "all_gather_into_tensor")

    all_gather_single = _allgather_base

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = torch_names.ALLGATHER
    ) -> dist.Work:
        """Several lists: `outputs[rank][i]` is what that rank has as its input i."""
        arguments = [([[row[index] for row in outputs]], [tensor]) for index, tensor in enumerate(inputs)]
        return self._each(self.allgather, arguments, [part for row in outputs for part in row], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = torch_names.ALLGATHER
    ) -> dist.Work:
        """Several into one tensor each."""
        return self._each(self._allgather_base, list(zip(outputs, inputs, strict=True)), outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = torch_names.GATHER) -> dist.Work:
        """Everybody's tensor to the root, into a list."""
        tensor = one_of(inputs)
        parts = list(one_of(outputs)) if self.rank() == opts.rootRank else []
        if self.rank() == opts.rootRank and (len(parts) != self.size() or not same_lengths([*parts, tensor])):
            raise ArgumentError(
                f"{self._group.where}: gather: {len(parts)} output tensors of "
                f"{[part.numel() for part in parts]} elements; the input has {tensor.numel()}. "
                f"Pass one like the input for each of the {self.size()} ranks."
            )
        target = stacked(parts) if parts else None
        for part in parts:
            buffers.check(part, f"{self._group.where}: gather", written=True)
        plan, root = self._plan("gather", tensor), self._checked_root(opts, "gather")

        def task() -> None:
            self._group.perform(plan, as_rows(tensor, 1), target, root)
            if target is not None:
                deliver_each(target, parts)

        return self._launch(task, parts or [tensor], opts, "gather")

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = torch_names.SCATTER) -> dist.Work:
        """Each rank gets its entry of the root's list."""
        output, is_root = one_of(outputs), self.rank() == opts.rootRank
        parts = list(one_of(inputs)) if is_root else []
        if is_root and (len(parts) != self.size() or not same_lengths([*parts, output])):
            raise ArgumentError(
                f"{self._group.where}: scatter: {len(parts)} input tensors of "
                f"{[part.numel() for part in parts]} elements; the output has {output.numel()}. "
                f"Pass one like the output for each of the {self.size()} ranks."
            )
        root, target = self._checked_root(opts, "scatter"), result_rows(output, 1)
        for part in parts:
            buffers.check(part, f"{self._group.where}: scatter")
        plan = self._plan("scatter", parts[0] if is_root else None, output).announcing(output.dtype, *target.shape)

        def task() -> None:
            rows = torch.cat([part.detach().reshape(-1) for part in parts]) if is_root else None
            self._group.perform(plan, None if rows is None else as_rows(rows, self.size()), target, root)
            deliver(target, output)

        return self._launch(task, [output], opts, "scatter")

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = torch_names.ALLTOALL) -> dist.Work:
        """Entry j of everybody's list goes to rank j."""
        outputs, inputs = list(outputs), list(inputs)
        exchange.check(self._group, inputs, outputs, "all_to_all")
        return self._launch(partial(exchange.exchange, self._group, inputs, outputs), outputs, opts, "all_to_all")

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = torch_names.ALLTOALL,
    ) -> dist.Work:
        """The same from one tensor into one, cut along dim 0 evenly or as told."""
        sources = self._cut(input, input_split_sizes, "input")
        parts = self._cut(output, output_split_sizes, "output")
        exchange.check(self._group, sources, parts, "all_to_all_single")

        def task() -> None:
            exchange.exchange(self._group, sources, parts)
            buffers.touch(output)  # the parts are no views of it to autograd

        return self._launch(task, [output], opts, "all_to_all_single")

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def _cut(self, tensor: torch.Tensor, sizes: Sequence[int], kind: str) -> Tensors:
        num_rows = tensor.shape[0] if tensor.dim() else 0
        sizes = list(sizes) or [num_rows // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != num_rows or min(sizes) < 0:
            raise ArgumentError(
                f"{self._group.where}: all_to_all_single: the {kind} has {num_rows} rows, to be split as {sizes} over "
                f"{self.size()} ranks. Give one size for each rank, which add up to the rows, or none if they are even."
            )
        return list(tensor.detach().split(sizes))
