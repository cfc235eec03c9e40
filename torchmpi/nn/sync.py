"""Synchronization of parameters and gradients in one call each."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .. import collectives
from ..argument_types import checks_types
from ..collectives.tensor_lists import enqueues, reduce_fast, reduce_unpacked, tensor_lists
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..communicators.progress import BY_GRADIENTS, progress
from ..errors import ArgumentError, GradientError, rank_prefix
from ..session import runtime
from ..tensors import bucket_plan, buffers
from .agreement import check_same_layout
from .blocksequential import BlockSequential, gradient_buckets_of, parameter_blocks_of
from .buckets import CopiedBucket, ViewBucket
from .channel import default_bucket_bytes
from .closures import synchronizations
from .gradient_guard import BY_OPTIMIZER, IN_ONE_CALL, GradientGuard, early_use, early_uses, refuse_shared
from .gradient_reduction import Compression, GradientReduction, transport
from .gradients import GradientList, gradient_or_zeros, shared_gradients
from .join_state import DIRECT, JOIN_STATE, refuse_inside_join
from .replica import Attachment, Net, Replica, attach, attached

ASYNC_BACKWARD = "torchmpi_async_backward"
DEFERRED_BACKWARD = "torchmpi_deferred_backward"
_IN_FLIGHT = 3  # buckets: one is sent, one is filled, and one is queued so that the network is never idle


@checks_types
@torch.no_grad()
def synchronize_parameters(net: Net, with_allreduce: bool = False, *, comm: Comm = None) -> None:
    """Copy the parameters and buffers of rank 0 to all ranks, or average them over the ranks.

    A shard is copied or averaged over the ranks that hold the same one (:func:`set_sharded`).

    Args:
        net: A module or an iterable of tensors.
        with_allreduce: Average floating-point tensors. Integer tensors (such as the batch counter of batch norm) are
            still copied from rank 0, since their average is not an integer.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Raises:
        ReplicaError: The nets differ in names, shapes or dtypes; raised on all ranks before anything is sent.
        ArgumentError: The net is inside :func:`~torchmpi.nn.join`, or has sparse or expanded tensors.

    Example:
        model = Net().to(mpi.device())
        mpinn.synchronize_parameters(model)
    """
    refuse_inside_join(net, "synchronize_parameters")
    communicator = runtime.communicator(comm)
    replica = Replica(net)
    parts = [(replica, communicator), *replica.shard_parts(communicator)]
    for part, holders in parts:
        # A block is sent as it is in memory.
        strides = any(isinstance(module, BlockSequential) for module in part.modules)
        check_same_layout(part, part.parameters + part.buffers, holders, strides=strides, written=True)
    for part, holders in parts:
        if with_allreduce:
            _copy_or_average(part, holders)
        else:
            broadcast_replica(part, 0, holders)


def broadcast_replica(replica: Replica, root: int, comm: Communicator) -> None:
    """Copy the tensors of `root` to all ranks."""
    tensors = _fused(replica)
    if are_on_host(tensors):
        for tensor in tensors:
            collectives.broadcast(tensor, root, comm=comm)
        return
    _finish([collectives.broadcast_async(tensor, root, comm=comm).wait for tensor in tensors])


def _copy_or_average(replica: Replica, comm: Communicator) -> None:
    tensors = _fused(replica)
    if are_on_host(tensors):
        for tensor in tensors:
            if _has_average(tensor):
                collectives.allreduce(tensor, op="avg", comm=comm)
            else:
                collectives.broadcast(tensor, comm=comm)
        return

    def launch(tensor: Tensor) -> Callable[[], object]:
        if _has_average(tensor):
            return collectives.allreduce_async(tensor, op="avg", comm=comm).wait
        return collectives.broadcast_async(tensor, 0, comm=comm).wait

    _finish([launch(tensor) for tensor in tensors])


def _has_average(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def are_on_host(tensors: Sequence[Tensor]) -> bool:
    """Return whether calls with these tensors run one after the other, so that to begin them at once gains nothing."""
    return all(tensor.is_cpu for tensor in tensors)


def _fused(replica: Replica) -> list[Tensor]:
    """Return the tensors to send: blocks that hold several parameters, and single tensors."""
    blocks, in_blocks = parameter_blocks_of(replica.modules)
    rest = [parameter.detach() for parameter in replica.parameters if id(parameter) not in in_blocks]
    return blocks + rest + [buffer.detach() for buffer in replica.buffers]


def _finish(finishers: Iterable[Callable[[], object]]) -> None:
    for finish in finishers:
        finish()


@checks_types
@torch.no_grad()
def synchronize_gradients(
    net: Net,
    average: bool = True,
    *,
    bucket_bytes: int | None = None,
    compression: Compression | None = None,
    comm: Comm = None,
) -> None:
    """Replace each ``.grad`` by its average over the ranks.

    Within a host, gradients are reduced in place. Between hosts they are packed into buckets, and one bucket is
    filled while another one is sent. The result has the same bits as a loop over ``mpi.allreduce(p.grad, op="avg")``.

    A gradient that is missing on some ranks counts as zero there; one that is missing on all ranks stays ``None``.
    Frozen parameters stay unchanged. Sparse gradients stay sparse. The gradient of a shard is averaged over the ranks
    that hold the same one (:func:`set_sharded`). Clip the gradients after this call: what is averaged are the gradients
    that it finds, and the average of clipped gradients is not the clipped average.

    Args:
        net: A module or an iterable of parameters.
        average: Divide the sum by the number of ranks; False keeps the sum.
        bucket_bytes: The largest size of a bucket; None for the setting ``bucket_bytes``,
            or ``gpu_bucket_bytes``.
        compression: Send wider values as ``"fp16"`` or ``"bf16"``, which are added in float32; or an :class:`EightBit`,
            :class:`TopK` or :class:`PowerSGD`, for what is sent between hosts. The same on all ranks.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Raises:
        GradientError: A gradient is sparse on one rank and dense on another, or ``step()`` or a GradScaler has used the
            gradients before this call; raised on all ranks.
        ArgumentError: The net is registered for asynchronous backward, is inside ``join`` on another communicator, or
            has shards that do not fit to the communicator or to ``average=False``; or `bucket_bytes` is less than 1.

    Example:
        loss.backward()
        mpinn.synchronize_gradients(model)
        optimizer.step()
    """
    if attached(net, ASYNC_BACKWARD) is not None:
        raise ArgumentError(
            f"{rank_prefix()}synchronize_gradients(): the net is registered for asynchronous backward, so its "
            "gradients are "
            "being reduced. Call synchronize_gradients_async(net), or unregister_async_backward(net) first."
        )
    if bucket_bytes is not None:
        default_bucket_bytes(bucket_bytes, ())  # also where no bucket is used
    communicator = runtime.communicator(comm)
    size = communicator.intra.size
    reduction = GradientReduction(size if average else 1, size, *transport(compression))
    join_state = attached(net, JOIN_STATE)
    if join_state is not None:
        if join_state.comm is not communicator:
            raise ArgumentError(
                f"{rank_prefix()}synchronize_gradients(comm={communicator!r}): the net was joined on "
                f"{join_state.comm!r}. Give join() and the calls inside it the same comm."
            )
        reduction = join_state.reduction(
            join_state.announce_active(
                DIRECT, average, default_bucket_bytes(bucket_bytes, Replica(net).trainable), compression
            )
        )
    deferred: DeferredBackward | None = attached(net, DEFERRED_BACKWARD)
    if deferred is not None and not average and join_state is None and deferred.is_summed_already(communicator):
        return
    replica = Replica(net)
    parts = replica.shard_parts(communicator, average=average) if replica.shards else []
    early = early_uses(replica.trainable) if deferred is None else deferred.take_changes()
    with replica.labelled("gradients", replica.trainable):
        call = IN_ONE_CALL if deferred is None else deferred.guard.call
        reduce_gradients(replica, reduction, bucket_bytes, communicator, early, call)
    for part, holders in parts:
        reduce_gradients(part, reduction.average_over(holders.size), bucket_bytes, holders)
    if deferred is not None:
        deferred.is_synchronized = True
        deferred.note_sums(is_sum=not average)
    if join_state is None:
        synchronizations.comm = communicator
        synchronizations.count += 1
        progress.note(BY_GRADIENTS)


def reduce_gradients(
    replica: Replica,
    reduction: GradientReduction,
    bucket_bytes: int | None,
    comm: Communicator,
    early: Collection[int] = (),
    call: str = IN_ONE_CALL,
) -> None:
    """Reduce the gradients of a net over the ranks; raise if some rank has changed or used the `early` ones, by id.

    The caller records no gradients (``torch.no_grad``). `call` is the remedy in that message.
    """
    # 1. List the gradients of this rank.
    gradients = GradientList(replica.trainable)
    is_within_host = comm.intra.status_board is not None and gradients.is_on_host
    is_compressed = reduction.is_compressed(comm)
    shared = shared_gradients(replica.net) if is_within_host and not is_compressed else None
    flats = shared.flats(gradients.tensors) if shared is not None and shared.blocks else None

    # 2. Agree: which gradients exist on any rank, and are they in shared blocks on all ranks?
    presence = gradients.agree(replica, comm, scattered=flats is None, changed=early)
    if presence.has_changed:
        names = replica.names(presence.changed)
        raise GradientError(rank_prefix() + early_use("some rank has changed or used", names, call))
    if flats is not None and not presence.is_scattered:
        for flat in flats:
            reduction.run(flat, comm)
        buffers.touch_all([gradient for gradient in gradients.tensors if gradient is not None])
        return
    dense = [gradient_or_zeros(parameter) for parameter in presence.dense]
    if shared is not None and len(dense) == len(gradients.parameters):
        shared.move(dense)

    # 3. Reduce and write back: within a host in place, otherwise in buckets.
    blocks: list[ViewBucket] = []
    rest = presence.dense
    for module in replica.modules:
        if isinstance(module, BlockSequential):
            blocks, rest = _blocks_and_rest(replica, presence.dense)
            dense = [parameter.grad for parameter in rest if parameter.grad is not None]
            break
    in_place = is_within_host and reduction.wire is None and not is_compressed
    if not in_place or not _reduce_within_host(blocks, dense, reduction, comm):
        _reduce_in_buckets(replica, blocks, rest, dense, reduction, default_bucket_bytes(bucket_bytes, rest), comm)
    for parameter in presence.sparse:
        reduction.run_sparse(parameter, comm)


def _reduce_within_host(
    blocks: Sequence[ViewBucket], rest: Sequence[Tensor], reduction: GradientReduction, comm: Communicator
) -> bool:
    """Reduce in place, one after the other, since the cores of the ranks do the work; False if tensors need packing."""
    op = "avg" if reduction.divisor == reduction.size else "sum"
    is_complete = reduction.divisor in (reduction.size, 1)
    if is_complete and not blocks and reduce_fast(rest, comm, op):
        return True
    lists = tensor_lists(rest, comm, op)
    for members in lists:
        if members.plan.many is None:
            return False
    for block in blocks:
        reduction.run(block.pack(), comm)
    if is_complete:
        reduce_unpacked(lists, comm, op)
    else:
        reduction.run_many([tensor for members in lists for tensor in members.tensors], comm)
    return True


def _reduce_in_buckets(
    replica: Replica,
    blocks: Sequence[ViewBucket],
    rest: Sequence[Tensor],
    gradients: Sequence[Tensor],
    reduction: GradientReduction,
    bucket_bytes: int,
    comm: Communicator,
) -> None:
    """Reduce buckets; `gradients` are those of the parameters `rest`.

    Some buckets are packed and others unpacked while some are sent, unless a device does all that in order.
    """
    packed = [[rest[index] for index in indices] for indices in bucket_plan.plan_buckets(gradients, bucket_bytes)]
    in_flight: deque[tuple[Callable[[], object], Callable[[], object]]] = deque()
    buckets: Iterable[ViewBucket | CopiedBucket] = chain(blocks, map(CopiedBucket, packed))
    is_plain = reduction.wire is None and not reduction.is_compressed(comm)
    for index, bucket in enumerate(buckets):  # a bucket is freed as soon as it is unpacked
        flat = bucket.pack()
        with replica.labelled(f"bucket {index}", bucket.parameters):
            if is_plain and flat.device.type != "cpu" and enqueues(flat, comm):
                reduction.run(flat, comm)
                bucket.unpack()
                continue
            in_flight.append((reduction.start(flat, bucket, comm), bucket.unpack))
        if len(in_flight) == _IN_FLIGHT:
            _finish(in_flight.popleft())
    for steps in in_flight:
        _finish(steps)


def _blocks_and_rest(replica: Replica, parameters: Sequence[Tensor]) -> tuple[list[ViewBucket], list[Tensor]]:
    """Return the blocks of BlockSequential modules that hold some of the gradients, and the other parameters."""
    wanted, blocks = {id(parameter) for parameter in parameters}, []
    for block in gradient_buckets_of(replica.modules):
        members = {id(parameter) for parameter in block.parameters}
        if members & wanted:
            wanted -= members
            blocks.append(block)
    return blocks, [parameter for parameter in parameters if id(parameter) in wanted and parameter.grad is not None]


class DeferredBackward(Attachment):
    """The gradients of a net that a ``DistributedOptimizer`` synchronizes after backward, in one call.

    Hooks note the gradients that autograd writes, so that changes and uses before the synchronization are refused.
    """

    def __init__(self, net: nn.Module, *, average: bool, compression: Compression | None, comm: Communicator) -> None:
        self._net, self._average, self._compression = net, average, compression
        self.guard = GradientGuard(net, comm, self._synchronize, BY_OPTIMIZER)
        self._own: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._hooks: list[Any] = []
        self._sums: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.is_synchronized = False
        """Whether no backward pass, step or ``zero_grad`` has followed the last synchronization."""
        earlier: DeferredBackward | None = attached(net, DEFERRED_BACKWARD)
        refuse_shared(net, None if earlier is None else earlier.guard)
        if earlier is not None:
            earlier.close()
        self._watch_parameters()
        self.guard.open()
        attach(net, DEFERRED_BACKWARD, self)

    def _synchronize(self) -> None:
        synchronize_gradients(self._net, self._average, compression=self._compression, comm=self.guard.comm)

    def is_summed_already(self, comm: Communicator) -> bool:
        """Return whether no rank has new gradients: a second sum would count the others again, unlike an average."""
        gradients = [(id(each), each.grad) for each in self._net.parameters()]
        has_new = self.guard.is_pending or any(
            g is not None and self._sums.get(number) is not g for number, g in gradients
        )
        return not collectives.allreduce(torch.tensor([int(has_new)]), op="max", comm=comm).item()

    def note_sums(self, *, is_sum: bool) -> None:
        """Note the present gradients if they are sums over the ranks, until others replace them."""
        for parameter in self._net.parameters() if is_sum else ():
            if parameter.grad is not None:
                self._sums[id(parameter)] = parameter.grad

    def take_changes(self) -> set[int]:
        """Return the ids of the parameters whose gradients were changed since backward, and forget these gradients."""
        changed = self.guard.changed(may_be_cleared=True)  # as on a rank without a gradient
        self.forget()
        return changed

    def forget(self) -> None:
        """Accept the present gradients, and the present parameters of the net."""
        self.guard.clear()
        self._sums.clear()
        self._watch_parameters()

    def close(self) -> None:
        """Remove the hooks."""
        self.guard.close()
        for hook in self._hooks:
            hook.remove()
        if attached(self._net, DEFERRED_BACKWARD) is self:
            attach(self._net, DEFERRED_BACKWARD, None)

    def _watch_parameters(self) -> None:
        """Add hooks to parameters that have become trainable."""
        for parameter in self._net.parameters():
            if parameter.requires_grad and id(parameter) not in self.guard.known:
                self.guard.known.add(id(parameter))
                hook = parameter.register_post_accumulate_grad_hook(self._note)
                self._hooks.append(hook)

    def _note(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None  # autograd has just added to it
        number = id(parameter)
        if self._own.get(number) is not gradient and gradient.layout is torch.strided and not gradient.requires_grad:
            # Gradients of several parameters may be views of one tensor, which has one version counter.
            parameter.grad = self._own[number] = gradient = gradient.data
        self.guard.note(parameter, gradient)
        self.is_synchronized = False
