"""The verbs: what users call. Check, select, run.

Every verb takes torch tensors of any shape, strides and dtype, or a Python number, and works in place unless ``out``
is given. ``comm`` is None (the current communicator), a level, or a Communicator; ``backend`` overrides the selector.
Every rank of the communicator makes the same call. ``NAME_async`` returns a :class:`~torchmpi.handle.Handle` at once;
calls on one communicator run in the order in which they were made, synchronous and asynchronous alike.
"""

from __future__ import annotations

import operator
import pickle
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from . import buffers, fusion, plans, runtime, streams
from .communicator import Comm, Communicator, Group
from .errors import ArgumentError, DeviceError, DtypeError
from .handle import Handle
from .scalars import as_tensor, is_number, restore

_Tensor = torch.Tensor
_increment_version = buffers.increment_version


def allreduce(
    tensor: Any, out: _Tensor | None = None, *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> Any:
    """Combine the tensors of all ranks; every rank gets the result, the same bits everywhere.

    `op` is sum, avg, prod, min, max, band, bor, bxor, land or lor. Sums are in rank order, 16-bit floats are summed in
    32 bits and rounded once.

        mpi.allreduce(torch.ones(3))        # tensor([n, n, n]) on n ranks
        mpi.allreduce(2.5, op="max")        # a number comes back as a number
    """
    # The path of every gradient, written out: contiguous memory of the host, in an idle lane, straight into the kernel.
    # Each frame, each look at the tensor and each attribute is a twentieth of what a short call takes.
    if out is None and type(tensor) is _Tensor:
        quick = runtime.communicator(comm).intra.plans.get((op, tensor.dtype, backend))
        if quick is not None and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
            lane, acquire, release, ledger, kernel, plan, code, native_code, settle = quick
            if lane.pending == 0 and acquire(False):
                try:
                    seq = ledger.seq = ledger.seq + 1
                    shape = tensor.shape
                    ledger.current = (seq, code, shape)
                    if status := kernel(plan, seq, native_code ^ hash(shape), tensor.data_ptr(), tensor.numel()):
                        settle(status, tensor)
                    ledger.current = None
                finally:
                    release()
                try:
                    _increment_version((tensor,))
                except RuntimeError:
                    buffers.touch(tensor)  # which knows about tensors without a version
                return tensor
    return _call("allreduce", tensor, out, op=op, comm=comm, backend=backend)


def allreduce_async(
    tensor: Any, out: _Tensor | None = None, *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`allreduce` in the background.

    handle = mpi.allreduce_async(gradient)
    ...                                 # compute; leave gradient alone
    handle.wait()
    """
    return _call("allreduce", tensor, out, op=op, comm=comm, backend=backend, asynchronous=True)


def reduce(
    tensor: Any,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    op: str = "sum",
    comm: Comm = None,
    backend: str | None = None,
) -> Any:
    """Combine the tensors of all ranks on the root; the others get their input back unchanged.

    total = mpi.reduce(torch.ones(3), root=0)
    """
    return _call("reduce", tensor, out, root=root, op=op, comm=comm, backend=backend)


def reduce_async(
    tensor: Any,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    op: str = "sum",
    comm: Comm = None,
    backend: str | None = None,
) -> Handle:
    """:func:`reduce` in the background."""
    return _call("reduce", tensor, out, root=root, op=op, comm=comm, backend=backend, asynchronous=True)


def broadcast(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Any:
    """Give every rank the root's values.

    mpi.broadcast(weights)              # everybody has rank 0's weights
    """
    return _call("broadcast", tensor, out, root=root, comm=comm, backend=backend)


def broadcast_async(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`broadcast` in the background."""
    return _call("broadcast", tensor, out, root=root, comm=comm, backend=backend, asynchronous=True)


def allgather(tensor: Any, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None) -> Any:
    """Concatenate the tensors of all ranks along dim 0, in rank order. Ranks may differ in length.

    A 0-dim tensor counts as one element; numbers come back as a list of numbers.

        mpi.allgather(torch.full((2,), mpi.rank()))     # tensor([0, 0, 1, 1, ...])
        mpi.allgather(mpi.rank())                       # [0, 1, ...]
    """
    return _call("allgather", tensor, out, comm=comm, backend=backend)


def allgather_async(
    tensor: Any, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`allgather` in the background."""
    return _call("allgather", tensor, out, comm=comm, backend=backend, asynchronous=True)


def gather(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Any:
    """Concatenate the tensors of all ranks along dim 0 on the root; the others get None.

    everything = mpi.gather(torch.full((2,), mpi.rank()), root=0)
    """
    return _call("gather", tensor, out, root=root, comm=comm, backend=backend)


def gather_async(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`gather` in the background."""
    return _call("gather", tensor, out, root=root, comm=comm, backend=backend, asynchronous=True)


def scatter(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Any:
    """Split the root's tensor along dim 0, evenly as far as it goes: each rank gets its rows, the first one row more.

    Ranks other than the root pass None.

        part = mpi.scatter(torch.arange(10) if mpi.rank() == 0 else None, root=0)
    """
    return _call("scatter", tensor, out, root=root, comm=comm, backend=backend)


def scatter_async(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`scatter` in the background."""
    return _call("scatter", tensor, out, root=root, comm=comm, backend=backend, asynchronous=True)


def reduce_scatter(
    tensor: _Tensor, out: _Tensor | None = None, *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> _Tensor:
    """Combine the tensors of all ranks, and give each rank its rows of the result.

    mine = mpi.reduce_scatter(torch.ones(mpi.size(), 3))    # one row of n's
    """
    result: _Tensor = _call("reduce_scatter", tensor, out, op=op, comm=comm, backend=backend)
    return result


def reduce_scatter_async(
    tensor: _Tensor, out: _Tensor | None = None, *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`reduce_scatter` in the background."""
    return _call("reduce_scatter", tensor, out, op=op, comm=comm, backend=backend, asynchronous=True)


def alltoall(tensor: _Tensor, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None) -> _Tensor:
    """Send part j of dim 0 to rank j, and concatenate what arrives in rank order.

    mpi.alltoall(torch.full((mpi.size(),), mpi.rank()))     # tensor([0, 1, ...]) everywhere
    """
    result: _Tensor = _call("alltoall", tensor, out, comm=comm, backend=backend)
    return result


def alltoall_async(
    tensor: _Tensor, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`alltoall` in the background."""
    return _call("alltoall", tensor, out, comm=comm, backend=backend, asynchronous=True)


def barrier(comm: Comm = None) -> None:
    """Return when every rank of the communicator has come here."""
    communicator = runtime.communicator(comm)
    plan = _plan(communicator, ("barrier", None, None, "cpu", True, None, False))
    communicator.intra.call(plan, None, None, 0)


# --- several at once, and objects ----------------------------------------------------------------------


def allreduce_many(
    tensors: Iterable[_Tensor], *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> list[_Tensor]:
    """:func:`allreduce` of many tensors, fused into few messages; in place, with the same bits as one by one.

    mpi.allreduce_many([p.grad for p in model.parameters()], op="avg")
    """
    return allreduce_many_async(tensors, op=op, comm=comm, backend=backend).wait()  # type: ignore[no-any-return]


def allreduce_many_async(
    tensors: Iterable[_Tensor], *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`allreduce_many` in the background; the messages are on their way while the next ones are packed."""
    running = runtime.current()
    where = f"{running.world.where}: allreduce_many"
    tensors = list(tensors)
    for tensor in tensors:
        buffers.check(tensor, where, written=True)
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ArgumentError(f"{where}: a tensor is in the list twice, and would be reduced once. Pass each one once.")
    packed: list[tuple[list[int], _Tensor | None, Handle]] = []
    for members in fusion.plan_buckets(tensors, running.config.bucket_bytes):
        if len(members) == 1:
            packed.append((members, None, allreduce_async(tensors[members[0]], op=op, comm=comm, backend=backend)))
            continue
        flat = torch.cat([tensors[index].detach().reshape(-1) for index in members])
        shapes = tuple(tensors[index].shape for index in members)
        packed.append((members, flat, _call("allreduce", flat, None, op=op, comm=comm, backend=backend, packed=shapes)))
    return _Unpacking(tensors, packed)


class _Unpacking(Handle):
    """Waits for all messages and puts the results back where they belong."""

    __slots__ = ("_packed", "_tensors", "_unpacking")

    def __init__(self, tensors: list[_Tensor], packed: list[tuple[list[int], _Tensor | None, Handle]]) -> None:
        super().__init__("allreduce_many")
        self._tensors, self._packed = tensors, packed
        self._unpacking = threading.Lock()

    def wait(self, timeout: float | None = None) -> Any:
        with self._unpacking:
            if not self._is_done:
                for members, flat, handle in self._packed:
                    handle.wait(timeout)
                    if flat is not None:
                        fusion.unpack(flat, [self._tensors[index] for index in members])
                self.set_result(self._tensors)
        return super().wait(timeout)

    def done(self) -> bool:
        return all(handle.done() for _, _, handle in self._packed)


def broadcast_object(value: Any, root: int = 0, *, comm: Comm = None) -> Any:
    """Give every rank the root's object, by pickle.

    settings = mpi.broadcast_object(parse_arguments() if mpi.rank() == 0 else None)
    """
    group = runtime.communicator(comm).intra
    root = _check_root(group, root, "broadcast_object")
    data = _pickled(value) if group.rank == root else None
    length = broadcast(0 if data is None else data.numel(), root, comm=comm)
    data = torch.empty(length, dtype=torch.uint8, device="cpu") if data is None else data
    return _unpickled(broadcast(data, root, comm=comm))


def allgather_object(value: Any, *, comm: Comm = None) -> list[Any]:
    """The objects of all ranks in rank order, by pickle.

    hosts = mpi.allgather_object(mpi.host_name())
    """
    data = _pickled(value)
    lengths = allgather(data.numel(), comm=comm)
    everything = allgather(data, comm=comm)
    return [_unpickled(part) for part in everything.split(lengths)]


def _pickled(value: Any) -> _Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _unpickled(data: _Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


# --- the way of a call -----------------------------------------------------------------------------------


def _is_simple(tensor: Any) -> bool:
    """Whether this is contiguous memory of the host and nothing else."""
    return (
        type(tensor) is _Tensor
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.requires_grad)
    )


def _simple(verb: str, tensor: Any, out: Any, root: Any, op: str | None, where: tuple[Comm, str | None]) -> Any:
    """A call like one before, on simple tensors: the short way past all checks. _OTHERWISE if it is not that."""
    if not _is_simple(tensor):
        return _OTHERWISE
    comm, backend = where
    group = runtime.communicator(comm).intra
    plan = group.plans.get((verb, op, tensor.dtype, backend))
    if plan is None or type(root) is not int or not 0 <= root < group.size:
        return _OTHERWISE
    if out is None:
        result = group.call(plan, tensor, None, root)
        if result is tensor:
            buffers.touch(tensor)
        return result
    if not _is_simple(out) or out.dtype is not tensor.dtype or verb in plans.IN_PLACE or buffers.overlap(out, tensor):
        return _OTHERWISE
    result = group.call(plan, tensor, out, root)
    if result is not out:
        plans.copy_result(result, out)
    buffers.touch(out)
    return out


_OTHERWISE = object()


def _call(
    verb: str,
    tensor: Any,
    out: _Tensor | None,
    *,
    root: int = 0,
    op: str | None = None,
    comm: Comm = None,
    backend: str | None = None,
    asynchronous: bool = False,
    packed: tuple[tuple[int, ...], ...] = (),
) -> Any:
    """`packed`: the shapes of what a flat tensor carries, always asynchronous."""
    if not (asynchronous or packed):
        result = _simple(verb, tensor, out, root, op, (comm, backend))
        if result is not _OTHERWISE:
            return result
    communicator = runtime.communicator(comm)
    group = communicator.intra
    what = f"{group.where}: {verb}"
    asynchronous = asynchronous or bool(packed)
    finish: Callable[[Any], Any] | None = None
    if is_number(tensor):
        _refuse_number(verb, out, what)
        tensor, finish = as_tensor(tensor, op), _number_result
    if verb in _ROOTED:
        root = _check_root(group, root, verb)
    if tensor is None and verb == "scatter" and group.rank != root:
        key = (verb, op, None, "cpu", False, backend, asynchronous)
    else:
        buffers.check(tensor, what, written=out is None and verb in plans.IN_PLACE)
        direct = out is None and buffers.is_direct(tensor) and tensor.is_cpu
        key = (verb, op, tensor.dtype, tensor.device.type, direct, backend, asynchronous)
    if out is not None:
        _check_out(verb, tensor, out, what)
    plan = _plan(communicator, key)
    if packed:
        return _submit(group, plan.for_many(packed), (tensor, out, root), None)
    if not asynchronous:
        result = group.call(plan, tensor, out, root)
        return result if finish is None else finish(result)
    return _submit(group, plan, (tensor, out, root), finish)


def _submit(
    group: Group, plan: plans.Plan, arguments: tuple[Any, Any, int], finish: Callable[[Any], Any] | None
) -> Handle:
    mark = streams.fence(arguments[0])
    if mark is None and finish is None:
        return group.submit(plan, *arguments)
    device = None if mark is None else arguments[0].device

    def task() -> Any:
        result = streams.run_after(mark, device, partial(group.perform, plan, *arguments))
        return result if finish is None else finish(result)

    return group.lane.submit(task, f"{group.where}: {plan.verb}")


def _plan(communicator: Communicator, key: tuple[Any, ...]) -> plans.Plan:
    known = communicator.intra.plans
    plan: plans.Plan | None = known.get(key)
    if plan is None:
        plan = known[key] = plans.prepare(runtime.current(), communicator, key)
        verb, op, dtype, _, _, backend, _ = key
        if plan.quick is not None:
            known[op, dtype, backend] = plan.quick
        elif plan.is_simple:
            known[verb, op, dtype, backend] = plan.bare
    return plan


_ROOTED = ("reduce", "broadcast", "gather", "scatter")


def _check_root(group: Group, root: Any, verb: str) -> int:
    try:
        number = -1 if isinstance(root, bool) else operator.index(root)  # numpy's integers too
    except TypeError:
        number = -1
    if not 0 <= number < group.size:
        raise ArgumentError(
            f"{group.where}: {verb}: root={root!r} is not a rank of communicator {group.name}. Use 0 to "
            f"{group.size - 1}."
        )
    return number


def _check_out(verb: str, tensor: Any, out: Any, what: str) -> None:
    buffers.check(out, f"{what}: out", written=True)
    if tensor is None:
        return
    if out.dtype is not tensor.dtype:
        raise DtypeError(f"{what}: out is {out.dtype}, the tensor {tensor.dtype}. Make out of the same dtype.")
    if out.device != tensor.device:
        raise DeviceError(f"{what}: out is on {out.device}, the tensor on {tensor.device}. Put both on one device.")
    if verb in plans.IN_PLACE and out.shape != tensor.shape:
        raise ArgumentError(
            f"{what}: out has shape {list(out.shape)}, the tensor {list(tensor.shape)}. They must be equal."
        )


def _refuse_number(verb: str, out: Any, what: str) -> None:
    if verb in ("scatter", "reduce_scatter", "alltoall"):
        raise DtypeError(f"{what}: a number cannot be split over ranks. Pass a tensor with one row per rank.")
    if out is not None:
        raise ArgumentError(f"{what}: a number has no out=. Use the returned value, or pass a tensor.")


def _number_result(result: Any) -> Any:
    return restore(result) if isinstance(result, torch.Tensor) else result
