"""Asynchronous backward: gradients are reduced while backward still runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import collectives
from ..argument_types import checks_types
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..communicators.progress import BY_GRADIENTS, progress
from ..errors import ArgumentError, GradientError, kind_of, rank_prefix
from ..session import runtime
from ..tensors import bucket_plan, streams
from ..timeline import events
from .agreement import check_same_layout
from .autograd_run import AutogradRun
from .blocksequential import gradient_buckets_of
from .buckets import ViewBucket
from .channel import close_private, default_bucket_bytes, open_private
from .closures import synchronizations
from .gradient_guard import ASYNCHRONOUS, GradientGuard, refuse_shared
from .gradient_reduction import Compression, GradientReduction, transport
from .gradients import GradientList, Presence, gradient_or_zeros
from .join_state import HOOKS, JOIN_STATE, JoinRound, JoinState, refuse_inside_join
from .replica import Attachment, Replica, attach, attached, sparse_by_declaration
from .sync import ASYNC_BACKWARD, DEFERRED_BACKWARD, DeferredBackward


@checks_types
def register_async_backward(
    net: nn.Module,
    sync_gradient_frequency: int = 1,
    bucket_bytes: int | None = None,
    *,
    average: bool = True,
    compression: Compression | None = None,
    comm: Comm = None,
) -> None:
    """Reduce the gradients of `net` during every backward, as soon as they are computed. Collective.

    Gradients become views of buckets; a bucket is reduced when it and all buckets before it are complete.
    :func:`synchronize_gradients_async` waits for the buckets. Shards (:func:`set_sharded`) have buckets of their own,
    which are averaged over the ranks that hold the same ones. The buckets are sent on a communicator of their own,
    which only :func:`unregister_async_backward` frees before ``stop()``.

    Args:
        net: The module.
        sync_gradient_frequency: Number of backward passes over which gradients are accumulated; the last of them
            launches the reduction of the sum.
        bucket_bytes: The largest size of a bucket; None for the setting ``bucket_bytes``,
            or ``gpu_bucket_bytes``.
        average: Divide the sum by the number of ranks; False keeps the sum.
        compression: Send wider values as ``"fp16"`` or ``"bf16"``, which are added in float32; or an :class:`EightBit`,
            :class:`TopK` or :class:`PowerSGD`, for what is sent between hosts. The same on all ranks.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Raises:
        ArgumentError: `net` is not a module, is registered already, is inside :func:`~torchmpi.nn.join`, or has shards
            that do not fit to the communicator or to ``average=False``.
        ReplicaError: The nets differ; raised on all ranks.

    Example:
        mpinn.register_async_backward(model)
        for x, y in data:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            mpinn.synchronize_gradients_async(model)
            optimizer.step()
    """
    if not isinstance(net, nn.Module):
        raise ArgumentError(f"{rank_prefix()}register_async_backward() needs a module, not {kind_of(net)}.")
    if not isinstance(sync_gradient_frequency, Integral) or sync_gradient_frequency < 1:
        raise ArgumentError(
            f"{rank_prefix()}sync_gradient_frequency={sync_gradient_frequency!r} must be an integer, at least 1."
        )
    earlier: AsyncBackward | None = attached(net, ASYNC_BACKWARD)
    if earlier is not None:
        if not earlier.is_closed:
            raise ArgumentError(
                f"{rank_prefix()}The net is registered already. Call unregister_async_backward(net) first."
            )
        earlier.abandon()
    refuse_inside_join(net, "register_async_backward")
    deferred: DeferredBackward | None = attached(net, DEFERRED_BACKWARD)
    refuse_shared(net, None if deferred is None else deferred.guard)
    bucket_bytes = default_bucket_bytes(bucket_bytes, list(net.parameters()))
    backward = AsyncBackward(
        net,
        sync_gradient_frequency,
        bucket_bytes,
        average=average,
        compression=compression,
        comm=runtime.communicator(comm),
    )
    if deferred is not None:
        deferred.close()
    attach(net, ASYNC_BACKWARD, backward)


def unregister_async_backward(net: nn.Module) -> None:
    """Remove the hooks, after the reductions in flight have ended. Collective.

    Args:
        net: A module registered with :func:`register_async_backward`.

    Raises:
        ArgumentError: The net is not registered, or is inside :func:`~torchmpi.nn.join`.

    Example:
        mpinn.unregister_async_backward(model)
    """
    refuse_inside_join(net, "unregister_async_backward")
    _registered(net, "unregister_async_backward").close()


def synchronize_gradients_async(net: nn.Module, *, flush: bool = False) -> bool:
    """Wait until the gradients of the last backward are reduced over all ranks.

    Buckets that are not complete, because some parameter has no gradient, are reduced now, with zeros.

    Args:
        net: A module registered with :func:`register_async_backward`.
        flush: Reduce the gradients now, even if fewer backward passes than ``sync_gradient_frequency`` have run.

    Returns:
        Whether the gradients are reduced. With ``sync_gradient_frequency=k`` the first k-1 calls after a reduction
        return False and do not communicate, unless k backward passes have run or `flush` is set. Call it after each
        pass, also on a rank that leaves one out.

    Raises:
        ArgumentError: The net is not registered.
        GradientError: Backward failed on some rank, a gradient was changed since backward, the net was moved to another
            dtype or device, or parameters have been added; raised on all ranks that call.

    Example:
        if mpinn.synchronize_gradients_async(model):
            optimizer.step()
            optimizer.zero_grad()
    """
    return _registered(net, "synchronize_gradients_async").finish(flush=flush)


@contextmanager
def no_sync(net: nn.Module) -> Iterator[None]:
    """Context manager in which backward passes accumulate gradients without synchronizing them.

    The first backward pass after the block reduces the sum over all passes, as with ``no_sync`` of
    ``DistributedDataParallel``. ``synchronize_gradients_async`` returns False inside the block.

    Args:
        net: A module registered with :func:`register_async_backward`, or that of a ``DistributedOptimizer``. For other
            nets the block has no effect, since their backward passes do not communicate.

    Returns:
        The context manager.

    Raises:
        ArgumentError: A ``DistributedOptimizer`` with ``asynchronous=True`` steps, or gradients of a registered net are
            clipped or flushed, inside the block.

    Example:
        with mpinn.no_sync(model):
            for x, y in micro_batches[:-1]:
                criterion(model(x), y).backward()
        x, y = micro_batches[-1]
        criterion(model(x), y).backward()
        mpinn.synchronize_gradients_async(model)
    """
    backward: AsyncBackward | None = attached(net, ASYNC_BACKWARD)
    if backward is None:
        yield
        return
    was_paused, backward.is_paused = backward.is_paused, True
    try:
        yield
    finally:
        backward.is_paused = was_paused


def _registered(net: nn.Module, call: str) -> AsyncBackward:
    backward: AsyncBackward | None = attached(net, ASYNC_BACKWARD)
    if backward is None:
        raise ArgumentError(
            f"{rank_prefix()}{call}(net): the net is not registered. Call register_async_backward(net) first."
        )
    return backward


class _Part(NamedTuple):
    """The parameters that are reduced over one communicator: the replicated ones, or shards."""

    parameters: list[Tensor]
    comm: Communicator
    """Private."""


class AsyncBackward(Attachment):
    """The hooks and buckets of one net, and the reductions in flight."""

    def __init__(
        self,
        net: nn.Module,
        frequency: int,
        bucket_bytes: int,
        *,
        average: bool,
        compression: Compression | None,
        comm: Communicator,
    ) -> None:
        self._compression, self._transport = compression, transport(compression)
        replica = Replica(net)
        parts = [(replica, comm), *replica.shard_parts(comm, average=average)]
        for part, holders in parts:
            check_same_layout(part, part.trainable, holders, strides=True)
        self.net = net
        self.frequency, self.bucket_bytes, self.average = frequency, bucket_bytes, average
        self.parameters = [parameter for part, _ in parts for parameter in part.trainable]
        self.guard = GradientGuard(net, comm, partial(self.finish, flush=True), ASYNCHRONOUS)
        self.guard.known.update(map(id, self.parameters))
        self._parts = [
            _Part(part.trainable, open_private(holders, f"{holders.name} async backward")) for part, holders in parts
        ]
        self.comm = self._parts[0].comm
        if self._transport.compressor is not None:
            for private in self._parts:
                self._transport.compressor.prepare(private.comm)
        self.buckets, self._bucket_parts = _make_buckets(net, self._parts, bucket_bytes)
        self._positions = {
            id(parameter): (index, position)
            for index, bucket in enumerate(self.buckets)
            for position, parameter in enumerate(bucket.parameters)
        }
        self.is_paused = False
        """Whether backward passes only accumulate."""
        self.is_synchronized = False
        """Whether a round has ended since the last step of a DistributedOptimizer, which sets this to False."""
        self._num_calls = 0
        """Calls of ``finish()`` since the last round."""
        self._results: list[weakref.ref[Tensor]] = []
        """The gradients outside of the buckets that the last round has reduced."""
        self._lock = threading.Lock()  # hooks run on the threads of autograd
        self._reset()
        self.guard.open()
        # The garbage collector does not see the references of such hooks: strong ones would keep the net for ever.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_on_gradient, weakref.ref(self), slot))
            for slot, parameter in enumerate(self.parameters)
        ]

    @property
    def is_running(self) -> bool:
        """Whether this round has begun on this rank, so that other ranks may wait for its end."""
        return self._reduction is not None

    @property
    def is_closed(self) -> bool:
        """Whether ``stop()`` or the loss of a rank has closed the communicator."""
        return self.comm.intra.call_queue.closed

    def finish(self, *, flush: bool = False, shadowed: JoinRound | None = None) -> bool:
        """Reduce the remaining buckets, wait for all, and set the gradients of the parameters."""
        if self.is_paused and shadowed is None:
            if flush:
                raise ArgumentError(
                    f"rank {self.comm.rank}: gradients are not synchronized inside no_sync(net). Call step(), "
                    "synchronize(), clip_grad_norm_() or synchronize_gradients_async(net, flush=True) after the block."
                )
            return False
        self._num_calls += 1  # the same on a rank that has left out a backward pass
        is_due = self._num_calls >= self.frequency or max(self._counts, default=0) >= self.frequency
        if not (is_due or flush or self._failed()):
            return False
        self._num_calls = 0
        replica = Replica(self.net)
        self._check_parameters(replica)
        if self._is_summed_already():
            return True
        failure = self._finish_round(replica, shadowed)
        if failure:
            after = " All ranks have finished the round; call zero_grad() before the next backward."
            raise GradientError(rank_prefix() + failure + after)
        self.is_synchronized = True
        if not self.guard.is_inside_join:
            synchronizations.comm = self.comm
            synchronizations.count += 1
            progress.note(BY_GRADIENTS)
        return True

    def _is_summed_already(self) -> bool:
        """Return whether no rank has new gradients: a second sum would count the others again, unlike an average."""
        if self.average or self.guard.is_inside_join:
            return False
        results = {id(view) for bucket in self.buckets for view in bucket.views}
        results.update(id(result) for reference in self._results if (result := reference()) is not None)
        gradients = [parameter.grad for parameter in self.parameters]
        has_new = self.guard.is_pending or any(each is not None and id(each) not in results for each in gradients)
        flag = torch.tensor([int(has_new)])
        return not collectives.allreduce(flag, op="max", comm=self.guard.comm).item()

    def abandon(self) -> None:
        """End the registration without communication. The private communicator remains until ``stop()``."""
        for hook in self._hooks:
            hook.remove()
        self.guard.close()
        attach(self.net, ASYNC_BACKWARD, None)

    def close(self) -> None:
        """Finish the running round and end the registration."""
        self.abandon()
        if self.is_closed:
            return
        # A rank that has launched no reduction must take part in those of the other ranks. The ranks agree on the
        # parent communicator, since the next calls on the private one are reductions of buckets.
        waiting = torch.tensor([int(self.is_running)])
        if collectives.allreduce(waiting, op="max", comm=self.guard.comm).item():
            self._finish_round(Replica(self.net), None)
        for part in self._parts:
            if self._transport.compressor is not None:
                self._transport.compressor.release(part.comm)
            close_private(part.comm)

    def _reset(self) -> None:
        self._counts = [0] * len(self.parameters)
        self.guard.clear()
        self._orders = [None if bucket.flat.is_cpu else streams.Order() for bucket in self.buckets]
        """Order of the streams on which autograd fills each bucket on a device, which are those of the forward pass."""
        self._num_missing = [len(bucket.parameters) for bucket in self.buckets]
        self._finishers: list[Callable[[], object]] = []
        self._reduction: GradientReduction | None = None
        self._runs: dict[int, AutogradRun] = {}
        self._failure = ""

    # --- during backward -------------------------------------------------------------------------

    def on_gradient(self, slot: int, parameter: Tensor) -> None:
        """Handle a gradient that autograd has added to `parameter`."""
        with self._lock:
            if AutogradRun.current() not in self._runs:
                self._begin_run()
            number = self._counts[slot] + 1
            if number > self.frequency:
                message = self.guard.message(f"backward number {number} adds to", [parameter])
                self._fail(
                    f"{message} To add the gradients of several passes, register the net with a higher "
                    "sync_gradient_frequency (backward_passes_per_step of a DistributedOptimizer)."
                )
            if not self.is_paused:
                self._counts[slot] = number
            position_of = self._positions.get(id(parameter))
            if position_of is None:  # sparse: gathered at the end
                gradient = parameter.grad
                assert gradient is not None  # autograd has just added to it
                self.guard.note(parameter, gradient)
                return
            index, position = position_of
            order = self._orders[index]
            if order is not None:
                order.enter(parameter)
            gradient = self.buckets[index].move_in(position)
            self.guard.note(parameter, gradient)
            if self._counts[slot] == self.frequency and not self.is_paused:
                self._num_missing[index] -= 1
                if self._num_missing[index] == 0:
                    self._launch_complete()

    def _begin_run(self) -> None:
        """Register a new run of the autograd engine; an earlier one may have failed."""
        if self._failed():
            if self.is_running:
                self._fail(
                    "the backward before this one failed when part of its gradients had been sent. Call "
                    "synchronize_gradients_async(net), which raises on all ranks, and zero_grad() first."
                )
            self._reset()
        self._runs[AutogradRun.current()] = AutogradRun()
        self.guard.is_pending = True  # also if the first gradient is refused

    def _failed(self) -> bool:
        return bool(self._failure) or any([run.has_failed for run in self._runs.values()])

    def _fail(self, message: str) -> None:
        self._failure = self._failure or message
        raise GradientError(rank_prefix() + message)

    def _launch_complete(self) -> None:
        while len(self._finishers) < len(self.buckets) and self._num_missing[len(self._finishers)] == 0:
            if self._reduction is None:
                self._reduction = self._begin(None)
            self._launch(self._reduction)

    def _begin(self, shadowed: JoinRound | None) -> GradientReduction:
        """Return the reduction of this round; inside join the ranks agree on it."""
        size = self.comm.size
        join_state: JoinState | None = attached(self.net, JOIN_STATE)
        if join_state is None:
            return GradientReduction(size if self.average else 1, size, *self._transport)
        call = shadowed or join_state.announce_active(HOOKS, self.average, self.bucket_bytes, self._compression)
        return join_state.reduction(call)

    def _launch(self, reduction: GradientReduction) -> None:
        index = len(self._finishers)
        bucket = self.buckets[index]
        order = self._orders[index]
        if order is not None:
            order.enter(bucket.flat)
        with torch.no_grad():
            with self._reporting_later():
                bucket.pack()
            part = self._bucket_parts[index]
            is_recorded = events.recorder is not None
            with Replica(self.net).labelled(f"bucket {index}", bucket.parameters) if is_recorded else nullcontext():
                self._finishers.append(self._of_part(part, reduction).start(bucket.flat, bucket, part.comm))

    def _of_part(self, part: _Part, reduction: GradientReduction) -> GradientReduction:
        """Return the reduction of a part, where `reduction` is that of the replicated parameters."""
        return reduction if part.comm is self.comm else reduction.average_over(part.comm.size)

    @contextmanager
    def _reporting_later(self) -> Iterator[None]:
        """Keep the error of a gradient for the end of the round, in which the other ranks need this one."""
        try:
            yield
        except GradientError as error:
            self._failure = self._failure or str(error)

    # --- after backward --------------------------------------------------------------------------

    def _finish_round(self, replica: Replica, shadowed: JoinRound | None) -> str:
        """Finish this round, and return the message of the error if the gradients of some rank are not valid."""
        try:
            with torch.no_grad(), self._lock:
                lists = [GradientList(part.parameters) for part in self._parts]
                changed = self.guard.changed()  # before the launches, which write to gradients
                for bucket in self.buckets:
                    with self._reporting_later():
                        bucket.check_place()
                if self._reduction is None:
                    self._reduction = self._begin(shadowed)
                while len(self._finishers) < len(self.buckets):
                    self._launch(self._reduction)
                has_failed = self._failed()
                failure = self._failure or f"backward failed on {'this' if has_failed else 'another'} rank."
                presences = [
                    gradients.agree(replica, part.comm, failed=has_failed, changed=changed)
                    for gradients, part in zip(lists, self._parts, strict=True)
                ]
                self._distribute(presences, self._reduction)
        finally:
            self._reset()
        if presences[0].is_failed:  # only the replicated part has all ranks
            return f"the gradients are incomplete: {failure}"
        if presences[0].has_changed:
            changes = [each for presence in presences for each in presence.changed]
            return self.guard.message("some rank has changed or used", changes)
        return ""

    def _distribute(self, presences: Sequence[Presence], reduction: GradientReduction) -> None:
        present = {id(parameter) for presence in presences for parameter in presence.dense}
        for finish in self._finishers:
            finish()
        if presences[0].is_failed:
            return  # the parameters may have another dtype than the buckets
        for bucket in self.buckets:
            bucket.give(present)
        for part, presence in zip(self._parts, presences, strict=True):
            own = self._of_part(part, reduction)
            for parameter in presence.sparse:
                own.run_sparse(parameter, part.comm)
            # An embedding with sparse=True has a dense gradient if its weight is also used otherwise.
            for parameter in presence.dense:
                if id(parameter) not in self._positions:
                    own.run(gradient_or_zeros(parameter), part.comm)
        self._results = [
            weakref.ref(each.grad)
            for each in self.parameters
            if each.grad is not None and id(each) not in self._positions
        ]

    def _check_parameters(self, replica: Replica) -> None:
        """Raise if there are parameters without a hook: their gradients would not be reduced."""
        parts = [replica, *(part for part, _ in replica.shard_parts(self.comm))]
        new = [each for part in parts for each in part.trainable if id(each) not in self.guard.known]
        if new:
            raise GradientError(
                f"rank {self.comm.rank}: {', '.join(map(repr, replica.names(new)))} became trainable, or "
                "part of the net, after register_async_backward(net). Unregister the net and register again."
            )


def _on_gradient(reference: weakref.ref[AsyncBackward], slot: int, parameter: Tensor) -> None:
    backward = reference()
    if backward is not None:
        backward.on_gradient(slot, parameter)


def _make_buckets(net: nn.Module, parts: Sequence[_Part], bucket_bytes: int) -> tuple[list[ViewBucket], list[_Part]]:
    """Make buckets in the order in which backward is expected to complete them, and return the part of each.

    Blocks of BlockSequential modules are buckets; the other parameters are packed in reverse order.
    """
    buckets = [(block, parts[0]) for block in gradient_buckets_of(net.modules())]
    excluded = sparse_by_declaration(net.modules())
    excluded.update(id(parameter) for block, _ in buckets for parameter in block.parameters)
    for part in parts:
        rest = [parameter for parameter in reversed(part.parameters) if id(parameter) not in excluded]
        fused = bucket_plan.plan_buckets(rest, bucket_bytes)
        buckets += [(ViewBucket([rest[index] for index in indices]), part) for indices in fused]
    order = {id(parameter): index for index, parameter in enumerate(net.parameters())}
    buckets.sort(key=lambda pair: min(order[id(p)] for p in pair[0].parameters), reverse=True)
    return [bucket for bucket, _ in buckets], [part for _, part in buckets]
