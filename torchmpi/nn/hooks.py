"""Gradients that leave while backward still runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import ArgumentError, GradientError
from ..tensors import fusion, streams
from .agreement import Presence, agree_on_gradients, check_same_layout
from .autograd_run import AutogradRun
from .blocksequential import gradient_buckets_of
from .buckets import SeatedBucket
from .channel import close_private, default_bucket_bytes, open_private, resolve
from .join_state import HOOKS, JOIN_STATE, JoinRound, JoinState, refuse_inside_join
from .reduction import Reduction
from .replica import Attachment, Replica, attach, attached, sparse_by_declaration
from .sync import ASYNC_BACKWARD, reduce_sparse_gradients


def register_async_backward(
    net: nn.Module,
    sync_gradient_frequency: int = 1,
    bucket_bytes: int | None = None,
    *,
    average: bool = True,
    comm: int | Communicator | None = None,
) -> None:
    """Let every backward of `net` send gradients as soon as they are there. Collective.

    Gradients live in buckets of up to `bucket_bytes` (default: the ``bucket_bytes`` setting); a bucket is
    sent when it and all before it are complete. ``synchronize_gradients_async(net)`` waits for them. With
    ``sync_gradient_frequency=k`` gradients are accumulated over k backward passes and the k-th sends the sum.

        mpinn.register_async_backward(model)
        for x, y in data:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            mpinn.synchronize_gradients_async(model)
            optimizer.step()
    """
    if not isinstance(net, nn.Module):
        raise ArgumentError(f"register_async_backward() needs a module, not a {type(net).__name__}.")
    if sync_gradient_frequency < 1:
        raise ArgumentError(f"sync_gradient_frequency={sync_gradient_frequency} must be at least 1.")
    if attached(net, ASYNC_BACKWARD) is not None:
        raise ArgumentError("The net is registered already. Call unregister_async_backward(net) first.")
    refuse_inside_join(net, "register_async_backward")
    bucket_bytes = default_bucket_bytes(bucket_bytes)
    backward = AsyncBackward(net, sync_gradient_frequency, bucket_bytes, average=average, comm=resolve(comm))
    attach(net, ASYNC_BACKWARD, backward)


def unregister_async_backward(net: nn.Module) -> None:
    """Remove the hooks; what is under way is finished first. Collective.

    mpinn.unregister_async_backward(model)
    """
    refuse_inside_join(net, "unregister_async_backward")
    _registered(net, "unregister_async_backward").close()
    attach(net, ASYNC_BACKWARD, None)


def synchronize_gradients_async(net: nn.Module, *, flush: bool = False) -> bool:
    """Wait until the gradients of the last backward are those of all ranks.

    Buckets that are not complete, because some parameter got no gradient, are sent now, with zeros. Returns
    whether the gradients are synchronised: with ``sync_gradient_frequency=k`` the calls between the k-th
    backward passes return False and communicate nothing, unless `flush` asks for it.

        if mpinn.synchronize_gradients_async(model):
            optimizer.step()
            optimizer.zero_grad()
    """
    return _registered(net, "synchronize_gradients_async").finish(flush=flush)


def _registered(net: nn.Module, call: str) -> AsyncBackward:
    backward: AsyncBackward | None = attached(net, ASYNC_BACKWARD)
    if backward is None:
        raise ArgumentError(f"{call}(net): the net is not registered. Call register_async_backward(net) first.")
    return backward


class AsyncBackward(Attachment):
    """The hooks of one net, its buckets, and what of them is under way."""

    def __init__(self, net: nn.Module, frequency: int, bucket_bytes: int, *, average: bool, comm: Communicator) -> None:
        replica = Replica(net)
        check_same_layout(replica, replica.trainable, comm, strides=True)
        self.net = net
        self.frequency, self.bucket_bytes, self.average = frequency, bucket_bytes, average
        self.parameters = replica.trainable
        self.comm = open_private(comm, f"{comm.name} async backward")
        self.buckets = _make_buckets(replica, bucket_bytes)
        self._places = {
            id(parameter): (index, position)
            for index, bucket in enumerate(self.buckets)
            for position, parameter in enumerate(bucket.parameters)
        }
        self._lock = threading.Lock()  # hooks run on the threads of autograd
        self._reset()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, slot))
            for slot, parameter in enumerate(self.parameters)
        ]

    @property
    def is_under_way(self) -> bool:
        """Whether this round has begun on this rank, so that others may be waiting for its end."""
        return self._reduction is not None

    def finish(self, *, flush: bool = False, shadowed: JoinRound | None = None) -> bool:
        """Send what is left, wait for everything, and give the parameters their gradients."""
        is_due = self.frequency == 1 or max(self._counts, default=0) >= self.frequency
        if not (is_due or flush or self._failed()):
            return False
        replica = Replica(self.net)
        self._check_parameters(replica)
        failure = self._finish_round(replica, shadowed)
        if failure:
            raise GradientError(
                f"rank {self.comm.rank}: the gradients are incomplete: {failure}. All ranks have finished "
                "the round; call zero_grad() before the next backward."
            )
        return True

    def close(self) -> None:
        """Finish what is under way and take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        if self.comm.intra.call_queue.closed:
            return  # stop() came first
        # Who has sent nothing must still take part in what others have sent. Asked on the other communicator:
        # on the private one the buckets are next.
        waiting = torch.tensor([int(self.is_under_way)])
        if collectives.allreduce(waiting, op="max", comm=self.comm.parent).item():
            self._finish_round(Replica(self.net), None)
        close_private(self.comm)

    def _reset(self) -> None:
        self._counts = [0] * len(self.parameters)
        self._orders = [streams.Order() for _ in self.buckets]
        """Of the streams on which autograd has filled each bucket: it takes those of the forward pass."""
        self._num_missing = [len(bucket.parameters) for bucket in self.buckets]
        self._finishers: list[Callable[[], object]] = []
        self._reduction: Reduction | None = None
        self._runs: dict[int, AutogradRun] = {}
        self._failure = ""

    # --- during backward -------------------------------------------------------------------------

    def _on_gradient(self, slot: int, parameter: Tensor) -> None:
        """Autograd has added a gradient to `parameter`."""
        with self._lock:
            self._watch_run()
            self._counts[slot] += 1
            if self._counts[slot] > self.frequency:
                self._fail(
                    f"parameter {Replica(self.net).name(parameter)!r} received gradient number "
                    f"{self._counts[slot]} since the last synchronisation, more than the frequency of "
                    f"{self.frequency} it was registered with. Call synchronize_gradients_async(net) after "
                    "each backward, or register with a higher sync_gradient_frequency"
                )
            place = self._places.get(id(parameter))
            if place is None:
                return  # sparse: it is gathered at the end
            index, position = place
            self._orders[index].enter(parameter)
            self.buckets[index].seat(position)
            if self._counts[slot] == self.frequency:
                self._num_missing[index] -= 1
                self._launch_complete()

    def _watch_run(self) -> None:
        """Notice a new run of the autograd engine, and that an earlier one broke off."""
        number = AutogradRun.current()
        if number in self._runs:
            return
        if self._failed():
            if self.is_under_way:
                self._fail(
                    "the backward before this one failed when part of its gradients had been sent. Call "
                    "synchronize_gradients_async(net), which raises on all ranks, and zero_grad() first"
                )
            self._reset()
        self._runs[number] = AutogradRun()

    def _failed(self) -> bool:
        return bool(self._failure) or any(run.has_failed for run in self._runs.values())

    def _fail(self, message: str) -> None:
        self._failure = self._failure or message
        raise GradientError(f"rank {self.comm.rank}: {message}.")

    def _launch_complete(self) -> None:
        """Launch buckets in the order of their index, as far as they are complete."""
        while len(self._finishers) < len(self.buckets) and self._num_missing[len(self._finishers)] == 0:
            if self._reduction is None:
                self._reduction = self._begin(None)
            self._launch(self._reduction)

    def _begin(self, shadowed: JoinRound | None) -> Reduction:
        """Find out how this round is reduced; inside join that takes all ranks."""
        size = self.comm.size
        join_state: JoinState | None = attached(self.net, JOIN_STATE)
        if join_state is None:
            return Reduction(size if self.average else 1, size)
        call = shadowed or join_state.announce_active(HOOKS, self.average, self.bucket_bytes)
        return join_state.reduction(call)

    def _launch(self, reduction: Reduction) -> None:
        index = len(self._finishers)
        bucket = self.buckets[index]
        self._orders[index].enter(bucket.flat)
        with torch.no_grad():
            self._finishers.append(reduction.start(bucket.pack(), self.comm))

    # --- after backward --------------------------------------------------------------------------

    def _finish_round(self, replica: Replica, shadowed: JoinRound | None) -> str:
        """Take part in what is left of this round; says what went wrong with the backward, if it did."""
        has_failed = self._failed()
        failure = self._failure or f"backward failed on {'this' if has_failed else 'another'} rank"
        try:
            with torch.no_grad(), self._lock:
                if self._reduction is None:
                    self._reduction = self._begin(shadowed)
                while len(self._finishers) < len(self.buckets):
                    self._launch(self._reduction)
                presence = agree_on_gradients(replica, self.parameters, self.comm, failed=has_failed)
                self._distribute(presence, self._reduction)
        finally:
            self._reset()
        return failure if presence.is_failed else ""

    def _distribute(self, presence: Presence, reduction: Reduction) -> None:
        present = {id(p) for p, is_dense in zip(self.parameters, presence.is_dense, strict=True) if is_dense}
        for bucket, finish in zip(self.buckets, self._finishers, strict=True):
            finish()
            bucket.give(present)
        reduce_sparse_gradients(self.parameters, presence, reduction, self.comm)

    def _check_parameters(self, replica: Replica) -> None:
        """Refuse parameters that appeared after the hooks were set: nobody would synchronise them."""
        known = {id(parameter) for parameter in self.parameters}
        new = [parameter for parameter in replica.trainable if id(parameter) not in known]
        if new:
            raise GradientError(
                f"rank {self.comm.rank}: {', '.join(map(repr, replica.names(new)))} became trainable, or "
                "part of the net, after register_async_backward(net). Unregister the net and register again."
            )


def _make_buckets(replica: Replica, bucket_bytes: int) -> list[SeatedBucket]:
    """Blocks as they are, the rest in reverse order; sorted by which can be complete first."""
    blocks = gradient_buckets_of(replica.modules)
    excluded = sparse_by_declaration(replica.modules)
    excluded.update(id(parameter) for block in blocks for parameter in block.parameters)
    rest = [parameter for parameter in reversed(replica.trainable) if id(parameter) not in excluded]
    fused = fusion.plan_buckets(rest, bucket_bytes)
    buckets = blocks + [SeatedBucket([rest[index] for index in indices]) for indices in fused]
    order = {id(parameter): index for index, parameter in enumerate(replica.parameters)}
    return sorted(buckets, key=lambda bucket: min(order[id(p)] for p in bucket.parameters), reverse=True)
