"""The process group: calls of torch.distributed carried out by torchmpi's collectives.

A synchronous call runs in the calling thread if the group's call queue is empty, and otherwise in the queue. torch
allows the ranks to differ in this, so both use the same plan: that of the synchronous call.

Tensor lists of equal lengths are sent as one row per rank. The length of a row is part of the signature that the ranks
compare, so lists that do not match raise an error on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import dispatch, exchange
from ..communicators.group import end_calls
from ..communicators.plan import Plan, PlanKey
from ..errors import ArgumentError
from ..session import runtime
from ..tensors import bucket_plan, buffers, dtypes, sparse
from ..tensors.modes import get_tracing_state
from ..tensors.operation_specs import OPERATIONS
from ..timeline import events
from . import bucket_memory, monitored, torch_names, transfers
from .arguments import (
    alike,
    apart_from_modes,
    divide,
    is_composed,
    op_name,
    run_on_all,
    scale,
    scaled,
    single,
)
from .call_hooks import HookedGroup
from .execution import Tensors
from .repeated_calls import repeated
from .rows import are_even, check_sizes, deliver, have_equal_lengths, packed, split
from .torch_names import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BackendOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    is_asynchronous,
)
from .work import COMPLETED, PendingWork


class ProcessGroup(HookedGroup):
    """Ranks that torch.distributed communicates among.

    torch overloads its methods. C++ and :mod:`torch.distributed` call the overload with lists and options, which is
    implemented here; `repeated` adds the other one (hence ``type: ignore[override]``).
    """

    def __init__(self, options: BackendOptions, backend_name: str) -> None:
        super().__init__(options, backend_name)
        self.set_timeout(options.timeout)
        self.for_checkpoints: Any = None
        """The group on which torch saves checkpoints in the background, if this is the default group."""
        self._num_monitored = 0
        self._buckets: list[int] = []
        """The addresses of the buckets of DDP that this backward pass has reduced, while calls are recorded."""

    # --- Reductions -------------------------------------------------------------------------------------------------

    @repeated("all_reduce", AllreduceOptions, "op", "timeout", are_listed=True)
    def allreduce(  # type: ignore[override]
        self, tensors: Tensors, opts: AllreduceOptions
    ) -> dist.Work:
        """Reduce one tensor or several of all ranks, in place."""
        (tensor, *others), reduction = alike(tensors), opts.reduceOp
        if is_asynchronous(opts) or others:
            is_private, is_seen = self.may_be_moved(tensor), events.recorder is not None
            if (is_private or (is_seen and tensor.layout is torch.strided)) and torch_names.is_bucket_of_ddp(tensor):
                if is_private:
                    self._may_share = bucket_memory.share(tensor)
                    self._shared.add(tensor.data_ptr())
                if is_seen:
                    with self._labelled_bucket(tensor):
                        return self.allreduce(tensors, opts)  # where it is no bucket, because of the caller
        if not (others or tensor.is_sparse):
            work = self._on_plain("all_reduce", (tensor,), (), opts, reduction)
            if work is not None:
                return work
        op, tensors = op_name(reduction, tensor.dtype), [tensor, *others]
        if tensor.is_sparse:
            return self._allreduce_sparse([torch_names.complex_original(tensor), *others], op, opts)
        plan = dispatch.plan_of(self._communicator, "allreduce", tensor, op=op)
        task: Callable[[], object] = partial(self._group.perform, plan, tensor, None, 0)
        if others:
            self._check("allreduce", [], others)
            task = partial(run_on_all, task, tensors, op)
        if is_composed(reduction, tensor.dtype):
            task = partial(self._run_composed, task, tensors, reduction)
        return self._launch(task, tensors, tensors, opts, "all_reduce", op)

    def _labelled_bucket(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """Label a call in timelines with the number of the bucket in this backward pass."""
        address = tensor.data_ptr()
        if address in self._buckets:  # another pass has begun
            self._buckets.clear()
        self._buckets.append(address)
        return events.labelled(f"bucket {len(self._buckets) - 1} {events.OF_DDP}")

    def _run_composed(self, task: Callable[[], object], tensors: Tensors, reduction: Any) -> None:
        """Scale the tensors, run `task`, and divide. Runs in the queue: earlier calls may use the tensors before."""
        scale(tensors, reduction)
        task()
        divide(tensors, reduction, self.size())

    def _allreduce_sparse(self, tensors: Tensors, op: str, opts: AllreduceOptions) -> dist.Work:
        tensor = tensors[0]
        if OPERATIONS[op].combine != "sum" or is_composed(opts.reduceOp, tensor.dtype):
            raise ArgumentError(
                f"{self._where}: all_reduce: sparse tensors can only be summed, or averaged if they have a floating "
                "dtype: sum integers and divide."
            )
        dtypes.check_reduction(tensor.dtype, op)
        divisor = self.size() if OPERATIONS[op].finish else 1

        def gather(rows: torch.Tensor) -> torch.Tensor:
            # The whole shape is compared among the ranks: each entry of another rank must have a place here.
            plan = dispatch.plan_of(self._communicator, "allgather", rows)
            plan = plan.announcing(tensor.dtype, *tensor.shape, *rows.shape[1:])
            gathered: torch.Tensor = self._group.perform(plan, rows, None, 0)
            return gathered

        def task() -> tuple[torch.Tensor, torch.Tensor]:
            indices, values = map(torch.cat, zip(*map(sparse.entries, tensors), strict=True))
            total = sparse.total(indices, values, tensor.shape, gather, divisor=divisor)
            with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
                for each in tensors:
                    each.copy_(total)
            return tensor._indices(), tensor._values()  # new memory, of which wait() tells the allocator

        return self._launch(task, tensors, tensors, opts, "all_reduce", op)

    @apart_from_modes
    def allreduce_coalesced(
        self, tensors: Tensors, opts: AllreduceCoalescedOptions = torch_names.ALLREDUCE_COALESCED
    ) -> dist.Work:
        """Reduce several tensors in place, packed into buckets."""
        tensors = list(tensors)
        if not tensors:
            return COMPLETED
        for tensor in tensors:  # raise here rather than in the queue
            self._allreduce_plan(tensor, opts.reduceOp)
        task = partial(self._reduce_packed, tensors, opts.reduceOp)
        op = op_name(opts.reduceOp, tensors[0].dtype)
        return self._launch(task, tensors, tensors, opts, "allreduce_coalesced", op)

    def _allreduce_plan(self, tensor: torch.Tensor, reduction: Any) -> Plan:
        op = op_name(reduction, tensor.dtype)
        return dispatch.plan_of(self._communicator, "allreduce", tensor, op=op)

    def _reduce_packed(self, tensors: Tensors, reduction: Any) -> None:
        scale(tensors, reduction)
        bucket_bytes = runtime.current().config.bucket_bytes_on(tensors[0].device.type)
        for members in bucket_plan.plan_buckets(tensors, bucket_bytes):
            parts = [tensors[index] for index in members]
            flat = parts[0] if len(parts) == 1 else bucket_plan.pack(parts)
            plan = self._allreduce_plan(flat, reduction)
            if len(parts) == 1:
                self._group.perform(plan, flat, None, 0)
                continue
            self._group.perform(plan.for_many(tuple(tuple(part.shape) for part in parts)), flat, None, 0)
            bucket_plan.unpack(flat, parts)
        divide(tensors, reduction, self.size())

    @repeated("reduce", ReduceOptions, "root", "op", "timeout", are_listed=True)
    def reduce(  # type: ignore[override]
        self, tensors: Tensors | torch.Tensor, opts: ReduceOptions
    ) -> dist.Work:
        """Reduce one tensor of all ranks into that of the root; the other tensors keep their values."""
        tensor, reduction = single(tensors), opts.reduceOp
        work = self._on_plain("reduce", (tensor,), (), opts, reduction, opts.rootRank)
        if work is not None:
            return work
        op = op_name(reduction, tensor.dtype)
        root = dispatch.check_root(self._group, opts.rootRank, "reduce")
        plan = dispatch.plan_of(self._communicator, "reduce", tensor, op=op)

        def task() -> None:
            source = tensor
            if self.rank() == root:
                scale([tensor], reduction)
            else:
                source = scaled(tensor, reduction)
            self._group.perform(plan, source, None, root)
            if self.rank() == root:
                divide([tensor], reduction, self.size())

        return self._launch(task, [tensor], [tensor], opts, "reduce", op, root)

    @repeated("reduce_scatter", ReduceScatterOptions, "op", "timeout", are_listed=True)
    def reduce_scatter(  # type: ignore[override]
        self, outputs: Tensors, inputs: list[Tensors], opts: ReduceScatterOptions
    ) -> dist.Work:
        """Reduce one tensor list of all ranks; each rank receives the entry of its number."""
        output, parts, own = single(outputs), list(single(inputs)), self._group.rank
        if len(parts) != self._size or parts[own].numel() != output.numel():
            raise ArgumentError(
                f"{self._where}: reduce_scatter: {len(parts)} input tensors, of which this rank's has "
                f"{parts[own].numel() if len(parts) > own else 0} elements and the output {output.numel()}. Pass one "
                f"for each of the {self._size} ranks; the output needs the same length."
            )
        if have_equal_lengths(parts):
            return self._on_rows("reduce_scatter", parts, [output], opts, reduction=opts.reduceOp)
        self._check("reduce_scatter", parts, [output])
        op, lengths = op_name(opts.reduceOp, output.dtype), [part.numel() for part in parts]
        begin = sum(lengths[:own])

        def task() -> None:
            work = scaled(torch.cat([part.detach().reshape(-1) for part in parts]), opts.reduceOp)
            plan = dispatch.plan_of(self._communicator, "allreduce", work, op=op)
            self._group.perform(plan.for_many(tuple((numel,) for numel in lengths)), work, None, 0)
            buffers.overwrite(output, work[begin : begin + output.numel()].view(output.shape))
            divide([output], opts.reduceOp, self.size())

        return self._launch(task, parts, [output], opts, "reduce_scatter", op)

    @repeated("reduce_scatter", ReduceScatterOptions)
    def _reduce_scatter_base(  # type: ignore[override]
        self, output: torch.Tensor, input: torch.Tensor, opts: ReduceScatterOptions = torch_names.REDUCE_SCATTER
    ) -> dist.Work:
        """Reduce one tensor that holds the parts of all ranks; each rank receives its part."""
        check_sizes(input, output, self._size, self._where, "reduce_scatter_tensor")
        return self._on_rows("reduce_scatter", [input], [output], opts, reduction=opts.reduceOp)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    @apart_from_modes
    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, opts: ReduceScatterOptions = torch_names.REDUCE_SCATTER
    ) -> dist.Work:
        """Run several reduce-scatters of single tensors as one."""
        return self._coalesced(self._reduce_scatter_base, zip(outputs, inputs, strict=True), outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # --- Data movement ----------------------------------------------------------------------------------------------

    @repeated("broadcast", BroadcastOptions, "root", "timeout", are_listed=True)
    def broadcast(  # type: ignore[override]
        self, tensors: Tensors | torch.Tensor, opts: BroadcastOptions
    ) -> dist.Work:
        """Copy the root's tensor, of several the one with the number of the options, to all tensors of all ranks."""
        tensors = alike(tensors)
        if not 0 <= opts.rootTensor < len(tensors):
            raise ArgumentError(f"{self._where}: broadcast: tensor {opts.rootTensor} of {len(tensors)} does not exist.")
        tensor = tensors.pop(opts.rootTensor)
        if not tensors:
            work = self._on_plain("broadcast", (tensor,), (), opts, root=opts.rootRank)
            if work is not None:
                return work
        root = dispatch.check_root(self._group, opts.rootRank, "broadcast")
        plan = dispatch.plan_of(self._communicator, "broadcast", tensor)
        task: Callable[[], object] = partial(self._group.perform, plan, tensor, None, root)
        if tensors:
            self._check("broadcast", [], tensors)
            task = partial(run_on_all, task, [tensor, *tensors])
        return self._launch(task, [tensor, *tensors], [tensor, *tensors], opts, "broadcast", root=root)

    @repeated("all_gather", AllgatherOptions, "timeout", are_listed=True)
    def allgather(  # type: ignore[override]
        self, outputs: list[Tensors], inputs: Tensors, opts: AllgatherOptions
    ) -> dist.Work:
        """Gather one tensor of each rank into a list on all ranks; the tensors may differ in length."""
        tensor, *others = alike(inputs)
        if others:
            return self._allgather_lists(outputs, [tensor, *others], opts)
        parts = list(single(outputs))
        if len(parts) == self._size and have_equal_lengths([*parts, tensor]):
            return self._on_rows("all_gather", [tensor], parts, opts)
        sources = [tensor] * self._size
        exchange.check(self._group, sources, parts, "all_gather")
        return self._launch(
            partial(exchange.exchange, self._group, sources, parts), [tensor], parts, opts, "all_gather"
        )

    def _allgather_lists(self, outputs: list[Tensors], inputs: Tensors, opts: AllgatherOptions) -> dist.Work:
        """Gather several tensors of each rank: as many lists receive all of them."""
        num_parts, parts = len(inputs) * self.size(), [part for listed in outputs for part in listed]
        if [len(listed) for listed in outputs] != [num_parts] * len(inputs):
            raise ArgumentError(
                f"{self._where}: all_gather: {len(inputs)} input tensors, and output lists of "
                f"{[len(listed) for listed in outputs]}. Pass {len(inputs)} output lists of {num_parts} tensors."
            )
        alike([*inputs, *parts])
        self._check("allgather", inputs, parts)
        key = PlanKey("allgather", None, inputs[0].dtype, inputs[0].device.type)
        plan = dispatch.plan_for(self._communicator, key)

        def task() -> None:
            source = packed(inputs, 1)
            target = source.new_empty((self.size(), source.numel()))
            self._group.perform(plan, source, target, 0)
            for listed in outputs:
                deliver(target, listed)

        work = self._launch(task, inputs, parts, opts, "all_gather")
        if isinstance(work, PendingWork):
            work.value = outputs
        return work

    @repeated("all_gather", AllgatherOptions)
    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions = torch_names.ALLGATHER
    ) -> dist.Work:
        """Gather one tensor of each rank into one tensor on all ranks."""
        check_sizes(output, input, self._size, self._where, "all_gather_into_tensor")
        return self._on_rows("all_gather", [input], [output], opts)

    all_gather_single = _allgather_base

    @apart_from_modes
    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: AllgatherOptions = torch_names.ALLGATHER
    ) -> dist.Work:
        """Run several allgathers as one: `outputs[rank][i]` receives the input i of that rank."""
        arguments = (([[row[index] for row in outputs]], [tensor]) for index, tensor in enumerate(inputs))
        return self._coalesced(self.allgather, arguments, [part for row in outputs for part in row], opts)

    @apart_from_modes
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions = torch_names.ALLGATHER
    ) -> dist.Work:
        """Run several allgathers into one tensor each as one."""
        return self._coalesced(self._allgather_base, zip(outputs, inputs, strict=True), outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    @repeated("gather", GatherOptions, "root", "timeout", are_listed=True)
    def gather(  # type: ignore[override]
        self, outputs: list[Tensors], inputs: Tensors, opts: GatherOptions
    ) -> dist.Work:
        """Gather one tensor of each rank into a list on the root."""
        tensor, is_root = single(inputs), self.rank() == opts.rootRank
        parts = list(single(outputs)) if is_root else []
        if is_root:
            self._check_parts("gather", "output", parts, "input", tensor)
        return self._on_rows("gather", [tensor], parts, opts, root=opts.rootRank)

    @repeated("gather", GatherOptions)
    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: GatherOptions = torch_names.GATHER
    ) -> dist.Work:
        """Gather one tensor of each rank into one tensor on the root; the other ranks pass anything (torch 2.14)."""
        outputs = [output] if self.rank() == opts.rootRank else []
        for whole in outputs:
            check_sizes(whole, input, self._size, self._where, "gather_single")
        return self._on_rows("gather", [input], outputs, opts, root=opts.rootRank)

    @repeated("scatter", ScatterOptions, "root", "timeout", are_listed=True)
    def scatter(  # type: ignore[override]
        self, outputs: Tensors, inputs: list[Tensors], opts: ScatterOptions
    ) -> dist.Work:
        """Send entry j of the root's list to rank j."""
        output, is_root = single(outputs), self._group.rank == opts.rootRank
        parts = list(single(inputs)) if is_root else []
        if is_root:
            self._check_parts("scatter", "input", parts, "output", output)
        return self._on_rows("scatter", parts, [output], opts, root=opts.rootRank)

    def _check_parts(self, name: str, kind: str, parts: Tensors, other: str, tensor: torch.Tensor) -> None:
        self._refuse_tracing(name)  # in which the lengths are no numbers
        if len(parts) != self._size or not have_equal_lengths([*parts, tensor]):
            raise ArgumentError(
                f"{self._where}: {name}: {len(parts)} {kind} tensors of {[part.numel() for part in parts]} elements; "
                f"the {other} has {tensor.numel()}. Pass one like the {other} for each of the {self._size} ranks."
            )

    @repeated("all_to_all_single", AllToAllOptions, "timeout")
    def alltoall(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, opts: AllToAllOptions
    ) -> dist.Work:
        """Send entry j of every rank's list to rank j."""
        outputs, inputs = list(outputs), list(inputs)
        if len(inputs) == len(outputs) == self._size:
            if have_equal_lengths([*inputs, *outputs]):
                work = self._on_plain("all_to_all_single", inputs, outputs, opts)
                if work is not None:
                    return work
            elif (work := self._exchanged(inputs, outputs, outputs, opts)) is not None:
                return work
        exchange.check(self._group, inputs, outputs, "all_to_all")
        call = exchange.PartsExchange.of(self._group, outputs[0].dtype)
        return self._launch(partial(call.run_queued, inputs, outputs), inputs, outputs, opts, "all_to_all")

    @repeated("all_to_all_single", AllToAllOptions)
    def alltoall_base(  # type: ignore[override]
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: AllToAllOptions = torch_names.ALLTOALL,
    ) -> dist.Work:
        """Send part j of every rank's input to rank j; input and output are single tensors, split along dim 0."""
        if get_tracing_state() is not None:
            self._refuse_tracing("all_to_all_single")
        if are_even(output, input, self._size, output_split_sizes, input_split_sizes):
            is_new = bool(output_split_sizes or input_split_sizes)
            work = self._on_plain("all_to_all_single", [input], [output], opts, is_new=is_new)
            if work is not None:
                return work
        what, own = f"{self._where}: all_to_all_single", self._group.rank
        sources = split(input, input_split_sizes, self._size, f"{what}: the input")
        parts = split(output, output_split_sizes, self._size, f"{what}: the output")
        is_whole = input.dtype is output.dtype and sources[own].numel() == parts[own].numel()
        if is_whole and (work := self._exchanged(sources, parts, [output], opts)) is not None:
            return work  # machine code has looked whether the parts are plain
        if not (is_whole and exchange.are_plain(input, output)):
            exchange.check(self._group, sources, parts, "all_to_all_single")
        call = exchange.PartsExchange.of(self._group, output.dtype)

        def task() -> None:
            call.run_queued(sources, parts)
            buffers.touch(output)  # for autograd, the detached parts are not views of `output`

        return self._launch(task, [input], [output], opts, "all_to_all_single")

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    # --- Point-to-point ---------------------------------------------------------------------------------------------

    @apart_from_modes
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        """Send one tensor to one rank."""
        return transfers.send(self._communicator, self._works, single(tensors), dst, tag)

    @apart_from_modes
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        """Receive one tensor from one rank."""
        return transfers.receive(self._communicator, self._works, single(tensors), src, tag)

    @apart_from_modes
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive one tensor from any rank."""
        return transfers.receive(self._communicator, self._works, single(tensors), None, tag)

    # --- Barriers ---------------------------------------------------------------------------------------------------

    @repeated("barrier", BarrierOptions, "timeout")
    def barrier(self, opts: BarrierOptions) -> dist.Work:  # type: ignore[override]
        """Wait until all ranks have called."""
        work = self._on_plain("barrier", (), (), opts)
        if work is not None:
            return work
        plan = dispatch.plan_for(self._communicator, dispatch.BARRIER)
        return self._launch(partial(self._group.perform, plan, None, None, 0), [], [], opts, "barrier")

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Run a barrier that names missing ranks; see :func:`torchmpi.distributed.monitored_barrier`."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        seconds = self._group.timeout_seconds if seconds is None else seconds
        self._num_monitored += 1
        run = partial(monitored.barrier, self._group, seconds, self._num_monitored, wait_all_ranks=wait_all_ranks)
        self._group.shown(run, self._group.described, ("monitored_barrier", "", "", -1))()

    # --- Lifetime and timeouts --------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time after which a call raises, unless its options have a timeout."""
        self._group.timeout_seconds = timeout.total_seconds()
        self._works.limit_seconds = self._limit_of(self._group.timeout_seconds)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Finish queued calls and free the group; called by ``destroy_process_group``."""
        self._membership.close(self._communicator)

    def abort(self) -> None:
        """Free the group; calls that wait for other ranks of the host end with an error, one after the other.

        Kernels of NCCL that wait for other ranks end too. Abort hooks run before.
        """
        self.run_abort_hooks()
        group, call_queue = self._group, self._group.call_queue

        def is_over() -> bool:
            is_calling = call_queue.pending or call_queue.run_lock.locked()
            return not is_calling or call_queue.closed or group.status_board is None

        end_calls([group], is_over)
        group.abort_device_work()
        self.shutdown()

    # --- State that torch reads -------------------------------------------------------------------------------------

    @property
    def num_hosts(self) -> int:
        """The number of hosts of the ranks."""
        return len(self._group.hosts)

    def _get_sequence_number_for_group(self) -> int:
        return self._group.call_log.seq

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are always counted."""
