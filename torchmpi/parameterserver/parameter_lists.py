"""Servers for lists of tensors: one server per dtype and device.

ResNet-50 has 161 parameters of one dtype. With one server for all of them, a step takes one request instead of 161.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..argument_types import checks_types
from ..communicators.handle import Handle
from ..communicators.levels import Comm
from ..errors import ArgumentError, kind_of, rank_prefix
from ..session import runtime
from ..tensors.flat_buffers import Allocate, FlatBuffers
from ..timeline import events
from .rules import Rule
from .runs import observed_run
from .servers import Server, free, prepared_for, receive, send
from .workers import RankWorkers, Workers

__all__ = ["free_tensors", "init_tensors", "integrate_tensors", "prefetch_tensors", "send_tensors", "sync_handles"]

T = TypeVar("T")
ServerInit = Callable[[Server, Tensor], object]
"""``server_init(server, values)`` sends the initial values of a server."""
LocalUpdate = Callable[[Tensor], Tensor]
Base = NDArray[np.float64] | None
"""Versions of the chunks of a server; None for those that were received last."""


class TensorServers:
    """The servers of a list of tensors, and the buffers of this rank to receive into and to send from.

    The constructor is collective. No reference to the tensors is kept.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        workers: Workers,
        *,
        name: str | None = None,
        prefetch_allocator: Allocate | None = None,
        server_init: ServerInit | None = None,
        sparse: Collection[int] = (),
        fetches_used_rows: bool = False,
    ) -> None:
        """Create the servers, or find those of this name that have lived on after a loss, without their initial values.

        Args:
            tensors: The tensors.
            workers: Who shares the servers.
            name: Name of the servers.
            prefetch_allocator: See :func:`init_tensors`.
            server_init: The same.
            sparse: Numbers of the tensors with sparse gradients. Each has a server of its own, with its rows.
            fetches_used_rows: Whether of these only the rows are fetched that have been sent since the last fetch.
        """
        lives_on = name is not None and workers.finds(f"{name} 0")
        if not lives_on:
            workers.check_tensors(tensors)
        allocate = prefetch_allocator and _checked_allocator(prefetch_allocator)
        self.incoming = FlatBuffers(tensors, allocate, apart=sparse)
        self._sparse, self._fetches_used_rows = sparse, fetches_used_rows
        self._rows: dict[int, Tensor | None] = {}
        """Of `outgoing`: for each tensor whose rows are not in its buffer, a sparse tensor with them."""
        self._used: dict[int, list[Tensor] | None] = {index: [] for index in sparse}
        """The numbers of the rows that have been sent since the last fetch; None for all."""
        self._arriving: list[tuple[Tensor, Tensor, Handle[Tensor]]] = []
        """Where rows that are being fetched go: values, numbers of the rows."""
        self.reached: list[Server] = []
        """Servers to which the last send has sent something."""
        self._like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self._devices = [tensor.device for tensor in tensors]
        self._outgoing: FlatBuffers | None = None
        self.has_fetched = False
        self.fetching: list[Handle[Tensor]] = []
        self.sending: list[Handle[None]] = []
        self.incoming.gather(tensors)
        self.servers = [
            workers.init(tensor, name and f"{name} {index}") for index, tensor in enumerate(self._shaped(self.incoming))
        ]
        if lives_on:
            return
        for server, buffer in zip(self.servers, self.incoming.buffers, strict=True):
            (server_init or _copy_from_rank_0)(server, buffer)
        workers.barrier()  # the initial values are complete

    @property
    def outgoing(self) -> FlatBuffers:
        """The buffers to send from, allocated on first use."""
        if self._outgoing is None:
            self._outgoing = FlatBuffers(self._like, devices=self._devices, apart=self._sparse)
        return self._outgoing

    def _shaped(self, flat: FlatBuffers) -> list[Tensor]:
        """Return the buffers, with their rows where rows can be sent."""
        shaped = list(flat.buffers)
        for index in self._sparse:
            shaped[flat.buffer_of[index]] = flat.views[index]
        return shaped

    def gather(self, tensors: Sequence[Tensor | None], *, add: bool = False) -> None:
        """Copy tensors to `outgoing`, or add them; of sparse tensors with a server of their own, the rows are kept."""
        rows: dict[int, Tensor | None] = {}
        for index in self._sparse:
            tensor, has_rows = tensors[index], not add or index in self._rows
            if has_rows and (tensor is None or tensor.is_sparse):
                old = self._rows.get(index) if add else None
                rows[index] = tensor if old is None else old if tensor is None else old + tensor
            elif add:
                self._make_dense([index])
        self.outgoing.gather(tensors, add=add, without=rows)
        self._rows = rows

    def make_dense(self) -> FlatBuffers:
        """Put kept rows into the buffers; return `outgoing`."""
        self._make_dense(list(self._rows))
        return self.outgoing

    def _make_dense(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index in self._rows:
                rows, view = self._rows.pop(index), self.outgoing.views[index].zero_()
                if rows is not None:
                    view.add_(rows)

    def fetch(self, label: str = "", *, whole: bool = False) -> list[Handle[Tensor]]:
        """Start to receive the values of the servers into `incoming`; `label` is shown in timelines.

        With `whole`, all rows are received in any case.
        """
        targets: dict[int, Tensor] = dict(enumerate(self.incoming.buffers))
        with nullcontext() if events.recorder is None else events.labelled(label):
            handles = []
            if self._fetches_used_rows and not whole and self.has_fetched:
                for index, used in self._used.items():
                    if used is None:
                        continue
                    del targets[self.incoming.buffer_of[index]]
                    rows = torch.cat(used).unique() if used else torch.empty(0, dtype=torch.int64)
                    handle = receive(self.servers[self.incoming.buffer_of[index]], rows=rows)
                    self._arriving.append((self.incoming.views[index], rows, handle))
                    handles.append(handle)
            handles += [receive(self.servers[number], buffer) for number, buffer in targets.items()]
        self._used = {index: [] for index in self._used}
        self.fetching, self.has_fetched = handles, True
        return self.fetching

    def end_fetch(self) -> FlatBuffers:
        """Wait for the values, and return `incoming`."""
        fetching, self.fetching, arriving, self._arriving = self.fetching, [], self._arriving, []
        sync_handles(fetching)
        for view, rows, handle in arriving:
            view.index_copy_(0, rows.to(view.device), handle.wait().to(view.device))
        return self.incoming

    def send(self, rule: str | Rule, flat: FlatBuffers, bases: Sequence[Base] = ()) -> list[Handle[None]]:
        """Start to send buffers, which must not be changed until the handles have been waited for.

        `bases` are, for each server, the versions of the values that were used; by default those received last.
        """
        for server in self.servers:  # raise before anything is sent
            prepared_for(server, rule, f"{server.group.where}: parameterserver.send")
        known = dict(enumerate(bases or [None] * len(self.servers)))
        self.sending, self.reached = [], []
        values: dict[int, tuple[Tensor, Tensor | None]] = {n: (buffer, None) for n, buffer in enumerate(flat.buffers)}
        for index in self._sparse:
            if flat is not self._outgoing or index not in self._rows:
                self._used[index] = None
                continue
            del values[flat.buffer_of[index]]
            kept, used = self._rows[index], self._used[index]
            if kept is not None and (rows := kept.coalesce())._nnz():
                numbers = rows.indices()[0]
                if used is not None:
                    used.append(numbers.cpu())
                values[flat.buffer_of[index]] = rows.values().to(flat.views[index].dtype), numbers
        for number, (tensor, selected) in values.items():
            self.reached.append(self.servers[number])
            self.sending.append(send(self.servers[number], tensor, rule, rows=selected, base=known[number]))
        return self.sending

    def free(self) -> None:
        """Free the servers after everything in progress has completed. Collective."""
        for server in self.servers:
            free(server)


def _checked_allocator(allocate: Allocate) -> Allocate:
    """Return `prefetch_allocator`, whose results are checked."""

    def checked(numel: int, dtype: torch.dtype) -> Tensor:
        buffer: object = allocate(numel, dtype)
        if isinstance(buffer, Tensor) and buffer.dtype is dtype and buffer.shape == (numel,) and buffer.is_contiguous():
            return buffer
        raise ArgumentError(
            f"prefetch_allocator({numel}, {dtype}) must return a contiguous flat tensor of that length and dtype."
        )

    return checked


def _copy_from_rank_0(server: Server, values: Tensor) -> None:
    if server.sender == 0:
        send(server, values, "copy").wait()


# ---- functions on lists of tensors, whose servers are found by the tensors

_registries: weakref.WeakKeyDictionary[runtime.Runtime, WeakTensorKeyDictionary] = weakref.WeakKeyDictionary()
"""For each runtime (until ``stop()``): the servers of each tensor, its index in its list, and the list's length."""


@checks_types
def init_tensors(
    tensors: Iterable[Tensor],
    comm: Comm = None,
    *,
    prefetch_allocator: Allocate | None = None,
    server_init: ServerInit | None = None,
) -> None:
    """Create servers for a list of tensors, such as the parameters of a network. Collective.

    There is one server per dtype and device. The servers start with the values of rank 0. Only weak references to the
    tensors are kept.

    Args:
        tensors: The tensors. The other functions on lists need the same tensors in the same order.
        comm: Communicator, or its level. Default: the current communicator.
        prefetch_allocator: ``prefetch_allocator(numel, dtype)`` returns the flat tensor for received values. Default:
            a tensor on the device of `tensors`.
        server_init: ``server_init(server, values)`` is called on all ranks with the flat values of the rank, to send
            the initial values and wait for them; a barrier follows. Default: rank 0 copies its values.

    Raises:
        ArgumentError: The list is empty, contains a tensor twice, or contains a tensor that has a server.
        ReplicaError: Shapes or dtypes differ between the ranks.

    Example:
        parameters = list(model.parameters())
        ps.init_tensors(parameters)
        handles = ps.prefetch_tensors(parameters)
        compute()
        ps.sync_handles(handles)
        ps.integrate_tensors(parameters, lambda fetched, parameter: parameter.copy_(fetched))
    """
    tensors, registry = _checked(tensors, "init_tensors"), _registry()
    if any(tensor in registry for tensor in tensors):
        raise ArgumentError(
            f"{rank_prefix()}init_tensors: {_first(tensor in registry for tensor in tensors)} has a server already. "
            "Call free_tensors() on its list first."
        )
    servers = TensorServers(tensors, RankWorkers(comm), prefetch_allocator=prefetch_allocator, server_init=server_init)
    for index, tensor in enumerate(tensors):
        registry[tensor] = (servers, index, len(tensors))


def prefetch_tensors(tensors: Iterable[Tensor]) -> list[Handle[Tensor]]:
    """Start to receive the values of the servers, for :func:`integrate_tensors`.

    Args:
        tensors: The list that was passed to :func:`init_tensors`.

    Returns:
        A handle per server.

    Raises:
        ArgumentError: The tensors have no servers.

    Example:
        handles = ps.prefetch_tensors(parameters)
    """
    servers, _ = _find(tensors, "prefetch_tensors")
    _wait_before_reuse(servers.fetching)
    return list(servers.fetch("prefetch"))


@torch.no_grad()
def integrate_tensors(tensors: Iterable[Tensor], function: Callable[[Tensor, Tensor], object]) -> None:
    """Wait for the prefetched values and call ``function(fetched, tensor)`` for each tensor, without autograd.

    Args:
        tensors: The list that was passed to :func:`init_tensors`.
        function: Changes `tensor` in place.

    Raises:
        ArgumentError: The tensors have no servers, or :func:`prefetch_tensors` has not been called.

    Example:
        ps.integrate_tensors(parameters, lambda fetched, parameter: parameter.lerp_(fetched, 0.5))
    """
    servers, listed = _find(tensors, "integrate_tensors")
    if not servers.has_fetched:
        raise ArgumentError(
            f"{rank_prefix()}integrate_tensors: no values have been fetched. Call prefetch_tensors() first."
        )
    servers.fetching = sync_handles(servers.fetching)
    for fetched, tensor in zip(servers.incoming.views, listed, strict=True):
        function(fetched, tensor)


@torch.no_grad()
def send_tensors(
    tensors: Iterable[Tensor],
    updates: Iterable[Tensor | None],
    rule: str | Rule = "add",
    local_update: LocalUpdate | None = None,
) -> list[Handle[None]]:
    """Start to send an update for each tensor.

    The updates are copied, and may be changed when the function returns.

    Args:
        tensors: The list that was passed to :func:`init_tensors`.
        updates: A tensor of the same shape for each tensor; None counts as zeros.
        rule: See :func:`send`.
        local_update: ``local_update(update)`` is called with each copy, which it may change in place, and returns the
            tensor to send.

    Returns:
        A handle per server.

    Raises:
        ArgumentError: The tensors have no servers, the shapes differ, or the rule is unknown.
        DtypeError: The rule is not defined for one of the dtypes; nothing is sent.

    Example:
        gradients = [parameter.grad for parameter in parameters]
        ps.sync_handles(ps.send_tensors(parameters, gradients, ps.scaled_add(-0.1)))
    """
    servers, listed = _find(tensors, "send_tensors")
    updates = list(updates)
    if len(updates) != len(listed) or any(
        update is not None and update.shape != tensor.shape for update, tensor in zip(updates, listed, strict=True)
    ):
        raise ArgumentError(
            f"{rank_prefix()}send_tensors: the updates need the shapes of the tensors, in the same order."
        )
    _wait_before_reuse(servers.sending)
    servers.outgoing.gather(updates)
    apply_local_update(local_update, servers.outgoing)
    return list(servers.send(rule, servers.outgoing))


def apply_local_update(local_update: LocalUpdate | None, flat: FlatBuffers) -> None:
    """Replace each view by the result of `local_update`."""
    if local_update is None:
        return
    for view in flat.views:
        result = local_update(view)
        if not isinstance(result, Tensor) or result.shape != view.shape:
            found = f"shape {list(result.shape)}" if isinstance(result, Tensor) else kind_of(result)
            raise ArgumentError(
                f"{rank_prefix()}local_update must return the tensor to send, of shape {list(view.shape)}, even if it "
                f"has changed its argument in place; it returned {found}."
            )
        if result is not view:
            view.copy_(result)


@checks_types
def sync_handles(handles: Iterable[Handle[T]]) -> list[Handle[T]]:
    """Wait for all handles.

    Args:
        handles: The handles.

    Returns:
        An empty list, to replace the list of handles.

    Raises:
        TorchMPIError: The error of the first call that has failed.

    Example:
        >>> sync_handles([Handle.completed(1), Handle.completed(2)])
        []
    """
    observer, listed = observed_run.active, list(handles)
    begin = 0 if observer is None or all(handle.has_ended for handle in listed) else observer.now()
    for handle in listed:
        handle.wait()
    if observer is not None and begin:
        observer.note_wait(runtime.current().world.rank, begin)
    return []


def _wait_before_reuse(handles: Iterable[Handle[object]]) -> None:
    """Wait for the handles of a buffer; an error that has been raised before is not raised again."""
    for handle in handles:
        if not handle.done() or handle.unseen_error is not None:
            handle.wait()


def free_tensors(tensors: Iterable[Tensor]) -> None:
    """Free the servers of a list of tensors. Collective.

    Args:
        tensors: The list that was passed to :func:`init_tensors`.

    Raises:
        ArgumentError: The tensors have no servers.

    Example:
        ps.free_tensors(parameters)
    """
    servers, listed = _find(tensors, "free_tensors")
    registry = _registry()
    for tensor in listed:
        del registry[tensor]
    servers.free()


def _registry() -> WeakTensorKeyDictionary:
    return _registries.setdefault(runtime.current(), WeakTensorKeyDictionary())


def _checked(tensors: Iterable[Tensor], call: str) -> list[Tensor]:
    if not isinstance(tensors, Iterable):
        found = f"{kind_of(tensors)}; pass list(network.parameters()) for a network"
        raise ArgumentError(f"{rank_prefix()}{call}: expected a list of tensors, found {found}.")
    listed = list(tensors)
    wrong = [type(tensor).__name__ for tensor in listed if not isinstance(tensor, Tensor)]
    if wrong or not listed:
        found = f"a {wrong[0]} in it" if wrong else "an empty one"
        raise ArgumentError(f"{rank_prefix()}{call}: expected a list of tensors, found {found}.")
    if len({id(tensor) for tensor in listed}) < len(listed):
        raise ArgumentError(f"{rank_prefix()}{call}: a tensor is in the list twice. Pass each tensor once.")
    return listed


def _find(tensors: Iterable[Tensor], call: str) -> tuple[TensorServers, list[Tensor]]:
    listed, registry = _checked(tensors, call), _registry()
    if not all(tensor in registry for tensor in listed):
        raise ArgumentError(
            f"{rank_prefix()}{call}: {_first(tensor not in registry for tensor in listed)} has no server. Call "
            "init_tensors() on the list first. (A network that was moved or loaded may have other tensors.)"
        )
    entries = [registry[tensor] for tensor in listed]
    servers, _, length = entries[0]
    if entries != [(servers, index, length) for index in range(length)]:
        raise ArgumentError(
            f"{rank_prefix()}{call}: these tensors were passed to init_tensors() in another list. Pass that list: the "
            "same tensors, in the same order."
        )
    return servers, listed


def _first(flags: Iterable[bool]) -> str:
    return f"tensor {list(flags).index(True)} of the list"
