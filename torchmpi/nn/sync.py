"""Replicas made equal, and gradients combined, in one call each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .. import collectives
from ..collectives import fused
from ..communicators.communicator import Communicator
from ..errors import ArgumentError
from ..tensors import buffers, fusion
from .agreement import Presence, agree_on_gradients, check_same_layout
from .blocksequential import gradient_buckets_of, parameter_blocks_of
from .buckets import CopiedBucket, SeatedBucket
from .channel import default_bucket_bytes, resolve
from .join_state import DIRECT, JOIN_STATE, refuse_inside_join
from .reduction import Reduction
from .replica import Net, Replica, attached
from .sharing import shared_gradients
from .sparse import reduce_sparse

ASYNC_BACKWARD = "torchmpi_async_backward"
_IN_FLIGHT = 3  # buckets: one on the wire, one being filled, one behind it so that the wire never waits


@torch.no_grad()
def synchronize_parameters(net: Net, with_allreduce: bool = False, *, comm: int | Communicator | None = None) -> None:
    """Give all ranks the parameters and buffers of rank 0, or the average over the ranks.

    `net` is a module or an iterable of tensors. With `with_allreduce` floating tensors are averaged; integer
    ones (such as the batch counter of batch norm) still come from rank 0, since their average is no integer.
    Parameters that are sharded over the ranks stay as they are. Raises :class:`~torchmpi.errors.ReplicaError`
    on all ranks, before anything is sent, if the nets differ in names, shapes or dtypes.

        model = Net().to(mpi.device())
        mpinn.synchronize_parameters(model)
    """
    refuse_inside_join(net, "synchronize_parameters")
    communicator = resolve(comm)
    replica = Replica(net)
    check_same_layout(replica, replica.parameters + replica.buffers, communicator)
    if with_allreduce:
        _copy_or_average(replica, communicator)
    else:
        broadcast_replica(replica, 0, communicator)


def broadcast_replica(replica: Replica, root: int, comm: Communicator) -> None:
    """Give all ranks the tensors of `root`."""
    _finish([collectives.broadcast_async(tensor, root, comm=comm).wait for tensor in _fused(replica)])


def _copy_or_average(replica: Replica, comm: Communicator) -> None:
    def launch(tensor: Tensor) -> Callable[[], object]:
        if tensor.is_floating_point() or tensor.is_complex():
            return collectives.allreduce_async(tensor, op="avg", comm=comm).wait
        return collectives.broadcast_async(tensor, 0, comm=comm).wait

    _finish([launch(tensor) for tensor in _fused(replica)])


def _fused(replica: Replica) -> list[Tensor]:
    """The tensors to send: whole blocks where parameters lie in blocks, single tensors elsewhere."""
    blocks, in_blocks = parameter_blocks_of(replica.modules)
    rest = [parameter.detach() for parameter in replica.parameters if id(parameter) not in in_blocks]
    return blocks + rest + [buffer.detach() for buffer in replica.buffers]


def _finish(finishers: Iterable[Callable[[], object]]) -> None:
    for finish in finishers:
        finish()


@torch.no_grad()
def synchronize_gradients(
    net: Net, average: bool = True, *, bucket_bytes: int | None = None, comm: int | Communicator | None = None
) -> None:
    """Replace each ``.grad`` by its average over the ranks (``average=False``: the sum).

    Within a host they are combined where they lie. Between hosts they are fused into buckets of up to `bucket_bytes`
    (default: the ``bucket_bytes`` setting), and one bucket is filled while another is on the wire. The result has the
    same bits as a loop over ``mpi.allreduce(p.grad, op="avg")``. A gradient that is missing on some ranks counts as
    zero there; one that is missing on all stays ``None``. Frozen and sharded parameters are left alone. Sparse
    gradients stay sparse.

        loss.backward()
        mpinn.synchronize_gradients(model)
        optimizer.step()
    """
    if attached(net, ASYNC_BACKWARD) is not None:
        raise ArgumentError(
            "synchronize_gradients(): the net is registered for asynchronous backward, so its gradients are "
            "on their way. Call synchronize_gradients_async(net), or unregister_async_backward(net) first."
        )
    communicator = resolve(comm)
    bucket_bytes = default_bucket_bytes(bucket_bytes)
    reduction = Reduction(communicator.size if average else 1, communicator.size)
    join_state = attached(net, JOIN_STATE)
    if join_state is not None:
        if join_state.comm is not communicator:
            raise ArgumentError(
                f"synchronize_gradients(comm={communicator!r}): the net was joined on {join_state.comm!r}. "
                "Give join() and the calls inside it the same comm."
            )
        reduction = join_state.reduction(join_state.announce_active(DIRECT, average, bucket_bytes))
    reduce_gradients(Replica(net), reduction, bucket_bytes, communicator)


@torch.no_grad()
def reduce_gradients(replica: Replica, reduction: Reduction, bucket_bytes: int, comm: Communicator) -> None:
    """What `synchronize_gradients` does once it is clear how: agree, then bucket after bucket."""
    parameters = replica.trainable
    is_within_host = comm.intra.status_board is not None and all(parameter.is_cpu for parameter in parameters)
    shared = shared_gradients(replica.net) if is_within_host else None
    whole = shared.whole(parameters) if shared is not None else None
    presence = agree_on_gradients(replica, parameters, comm, scattered=whole is None)
    if whole is not None and not presence.is_scattered:
        for flat in whole.flats:
            reduction.run(flat, comm)
        buffers.touch_all(whole.gradients)
        return
    dense = [parameter for parameter, is_dense in zip(parameters, presence.is_dense, strict=True) if is_dense]
    for parameter in dense:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if shared is not None and len(dense) == len(parameters):
        shared.move(dense)
    blocks, rest = _blocks_and_rest(replica, dense)
    if is_within_host and fused.takes_as_they_lie(rest, comm):
        _reduce_within_host(blocks, rest, reduction, comm)
    else:
        _reduce_over_wire(_buckets(blocks, rest, bucket_bytes), reduction, comm)
    reduce_sparse_gradients(parameters, presence, reduction, comm)


Buckets = Iterator[SeatedBucket | CopiedBucket]


def _reduce_within_host(
    blocks: Sequence[SeatedBucket], rest: Sequence[Tensor], reduction: Reduction, comm: Communicator
) -> None:
    """One after the other: the ranks' own cores do the work, so there is nothing to overlap with."""
    for block in blocks:
        reduction.run(block.pack(), comm)
    reduction.run_many(rest, comm)


def _reduce_over_wire(buckets: Buckets, reduction: Reduction, comm: Communicator) -> None:
    """Some packed or unpacked while others travel."""
    in_flight: deque[tuple[Callable[[], object], Callable[[], object]]] = deque()
    for bucket in buckets:
        in_flight.append((reduction.start(bucket.pack(), comm), bucket.unpack))
        if len(in_flight) == _IN_FLIGHT:
            _finish(in_flight.popleft())
    for steps in in_flight:
        _finish(steps)


def reduce_sparse_gradients(
    parameters: Sequence[Tensor], presence: Presence, reduction: Reduction, comm: Communicator
) -> None:
    """The gradients that do not fit into buckets, one after the other."""
    for parameter, is_sparse in zip(parameters, presence.is_sparse, strict=True):
        if is_sparse:
            reduce_sparse(parameter, reduction, comm)


def _blocks_and_rest(replica: Replica, parameters: Sequence[Tensor]) -> tuple[list[SeatedBucket], list[Tensor]]:
    """Blocks of a BlockSequential that hold some of the gradients, and the other gradients."""
    wanted, blocks = {id(parameter) for parameter in parameters}, []
    for block in gradient_buckets_of(replica.modules):
        members = {id(parameter) for parameter in block.parameters}
        if members & wanted:
            wanted -= members
            blocks.append(block)
    rest = [parameter.grad for parameter in parameters if id(parameter) in wanted and parameter.grad is not None]
    # Detached: parameters may have one gradient in common, but each counts.
    return blocks, [gradient.detach() for gradient in rest]


def _buckets(blocks: Sequence[SeatedBucket], rest: Sequence[Tensor], bucket_bytes: int) -> Buckets:
    """Blocks as they are, everything else fused."""
    yield from blocks
    for indices in fusion.plan_buckets(rest, bucket_bytes):
        yield CopiedBucket([rest[index] for index in indices])
