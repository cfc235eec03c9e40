"""Parameter servers for lists of tensors: one server for all tensors of a dtype, not one for each.

A server for each of the 161 parameters of ResNet-50 would mean 161 requests. Fused, it is one, and what is fetched
arrives in one flat piece of memory of which each tensor has its view.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import collectives
from ..communicators.handle import Handle
from ..communicators.levels import Comm
from ..errors import ArgumentError
from ..nn.agreement import check_same_layout
from ..nn.replica import Replica
from ..session import runtime
from .servers import Server, free, init, prepared_for, receive, send

Allocate = Callable[[int, torch.dtype], Tensor]
"""``allocate(numel, dtype)`` gives a flat tensor."""
ServerInit = Callable[[Server, Tensor], object]
"""``server_init(server, values)`` gives a server its first values; it is called on all ranks."""

_PIECE_BYTES = 256 << 10  # two of them in the second-level cache


class FlatViews:
    """Flat memory for a list of tensors, one piece per dtype and device, and a view of it for each tensor.

    >>> flat = FlatViews([torch.ones(2, 2), torch.ones(1)])
    >>> flat.flats[0].shape, [view.shape for view in flat.views]
    (torch.Size([5]), [torch.Size([2, 2]), torch.Size([1])])
    """

    def __init__(self, tensors: Sequence[Tensor], allocate: Allocate | None = None) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            groups.setdefault((tensor.dtype, tensor.device), []).append(index)
        self.flats: list[Tensor] = []
        views: dict[int, Tensor] = {}
        for (dtype, device), members in groups.items():
            sizes = [tensors[index].numel() for index in members]
            numel = sum(sizes)
            flat = torch.empty(numel, dtype=dtype, device=device) if allocate is None else allocate(numel, dtype)
            _check_flat(flat, numel, dtype)
            self.flats.append(flat)
            for index, part in zip(members, flat.split(sizes), strict=True):
                views[index] = part.view(tensors[index].shape)
        self.views = [views[index] for index in range(len(tensors))]

    @torch.no_grad()
    def gather(self, tensors: Sequence[Tensor | None], *, add: bool = False) -> None:
        """Copy the tensors into the flat memory, or add them to it; None counts as zeros, sparse ones are welcome.

        >>> flat = FlatViews([torch.ones(2), torch.ones(1)])
        >>> flat.gather([torch.tensor([3.0, 4.0]), None]); flat.flats
        [tensor([3., 4., 0.])]
        """
        dense = [(view, tensor) for view, tensor in zip(self.views, tensors, strict=True) if _is_dense(tensor)]
        if dense:
            views, sources = zip(*dense, strict=True)
            (torch._foreach_add_ if add else torch._foreach_copy_)(list(views), [source.detach() for source in sources])
        for view, tensor in zip(self.views, tensors, strict=True):
            if not _is_dense(tensor):
                if not add:
                    view.zero_()
                if tensor is not None:
                    view.add_(tensor.detach())

    @torch.no_grad()
    def scatter(self, tensors: Sequence[Tensor]) -> None:
        """Copy the flat memory into the tensors.

        >>> tensors = [torch.zeros(2), torch.zeros(1)]
        >>> flat = FlatViews(tensors); flat.gather([torch.ones(2), torch.ones(1)]); flat.scatter(tensors); tensors
        [tensor([1., 1.]), tensor([1.])]
        """
        if self.views:
            torch._foreach_copy_([tensor.detach() for tensor in tensors], self.views)


def _is_dense(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.layout is torch.strided


def _check_flat(flat: object, numel: int, dtype: torch.dtype) -> None:
    if not isinstance(flat, Tensor) or flat.dtype is not dtype or flat.shape != (numel,) or not flat.is_contiguous():
        raise ArgumentError(
            f"prefetch_allocator({numel}, {dtype}) must give a contiguous flat tensor of that length and dtype."
        )


def pieces(*lists: Sequence[Tensor], piece_bytes: int = _PIECE_BYTES) -> Iterator[tuple[list[Tensor], ...]]:
    """Walk along several lists of tensors together, as much at a time as stays in the cache.

    So several operations in a row pass over memory once. The lists have the same shapes in the same order.

    >>> a, b = [torch.zeros(5), torch.zeros(1)], [torch.ones(5), torch.ones(1)]
    >>> [(len(first), len(second)) for first, second in pieces(a, b, piece_bytes=8)]
    [(1, 1), (1, 1), (2, 2)]
    """
    gathered: list[tuple[Tensor, ...]] = []
    filled = 0
    for row in zip(*lists, strict=True):
        for part in _split(row, piece_bytes):
            gathered.append(part)
            filled += part[0].nbytes
            if filled >= piece_bytes:
                yield tuple(map(list, zip(*gathered, strict=True)))
                gathered, filled = [], 0
    if gathered:
        yield tuple(map(list, zip(*gathered, strict=True)))


def _split(row: tuple[Tensor, ...], piece_bytes: int) -> Iterable[tuple[Tensor, ...]]:
    if row[0].nbytes <= piece_bytes or not all(tensor.is_contiguous() for tensor in row):
        return [row]
    numel = max(1, piece_bytes // row[0].element_size())
    return zip(*(tensor.view(-1).split(numel) for tensor in row), strict=True)


class TensorServers:
    """The servers of a list of tensors, and this rank's flat memory to fetch into and to send from.

    It keeps no reference to the tensors. Collective to make, as :func:`~torchmpi.parameterserver.init` is.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        comm: Comm = None,
        *,
        name: str | None = None,
        prefetch_allocator: Allocate | None = None,
        server_init: ServerInit | None = None,
    ) -> None:
        communicator = runtime.communicator(comm)
        check_same_layout(Replica(tensors), tensors, communicator)
        self.incoming = FlatViews(tensors, prefetch_allocator)
        self._like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self._devices = [tensor.device for tensor in tensors]
        self._outgoing: FlatViews | None = None
        self.has_fetched = False
        self.fetching: list[Handle] = []
        self.sending: list[Handle] = []
        self.incoming.gather(tensors)
        names = [name and f"{name} {index}" for index in range(len(self.incoming.flats))]
        pairs = zip(self.incoming.flats, names, strict=True)
        self.servers = [init(flat, communicator, name=own) for flat, own in pairs]
        for server, flat in zip(self.servers, self.incoming.flats, strict=True):
            (server_init or _copy_from_rank_0)(server, flat)
        collectives.barrier(communicator)  # the values are there before anybody asks for them

    @property
    def outgoing(self) -> FlatViews:
        """Memory to send from; made when first needed, since not everybody does."""
        if self._outgoing is None:
            places = zip(self._like, self._devices, strict=True)
            self._outgoing = FlatViews([torch.empty_like(like, device=device) for like, device in places])
        return self._outgoing

    def fetch(self) -> list[Handle]:
        """Begin to receive the servers' values into `incoming`."""
        pairs = zip(self.servers, self.incoming.flats, strict=True)
        self.fetching = [receive(server, flat) for server, flat in pairs]
        self.has_fetched = True
        return self.fetching

    def send(self, rule: Any, flat_views: FlatViews) -> list[Handle]:
        """Begin to send flat memory, which must stay as it is until the handles have been waited for."""
        for server in self.servers:  # to none of them what one of them refuses
            prepared_for(server, rule, f"{server.group.where}: parameterserver.send")
        pairs = zip(self.servers, flat_views.flats, strict=True)
        self.sending = [send(server, flat, rule) for server, flat in pairs]
        return self.sending

    def free(self) -> None:
        """Give the servers back, after everything that is under way."""
        for server in self.servers:
            free(server)


def _copy_from_rank_0(server: Server, values: Tensor) -> None:
    if server.group.rank == 0:
        send(server, values, "copy").wait()


# ---- the same for lists of tensors as they are, with the servers kept in a book --------------------------------

_books: weakref.WeakKeyDictionary[Any, WeakTensorKeyDictionary] = weakref.WeakKeyDictionary()
"""By runtime, so that stop() ends it: which servers a tensor has, and its place in the list."""


def init_tensors(
    tensors: Iterable[Tensor],
    comm: Comm = None,
    *,
    prefetch_allocator: Allocate | None = None,
    server_init: ServerInit | None = None,
) -> None:
    """Make servers for a list of tensors, such as the parameters of a net. Collective.

    Tensors of one dtype share a server. The servers start with the values of rank 0, or with what
    ``server_init(server, values)`` sends them, which is called on all ranks with the flat values of this one; a
    barrier follows. ``prefetch_allocator(numel, dtype)`` says where fetched values are put: by default on the device
    of the tensors. The tensors are remembered by weak references; give the servers back with
    :func:`free_tensors`, or leave that to ``stop()``.

        parameters = list(model.parameters())
        ps.init_tensors(parameters)
        handles = ps.prefetch_tensors(parameters)
        ...                                                         # compute
        ps.sync_handles(handles)
        ps.integrate_tensors(parameters, lambda fetched, parameter: parameter.copy_(fetched))
    """
    tensors, book = _listed(tensors, "init_tensors"), _book()
    if any(tensor in book for tensor in tensors):
        raise ArgumentError(
            f"{_where()}: init_tensors: {_which(tensor in book for tensor in tensors)} has a server already. Call "
            "free_tensors() on its list first."
        )
    servers = TensorServers(tensors, comm, prefetch_allocator=prefetch_allocator, server_init=server_init)
    for index, tensor in enumerate(tensors):
        book[tensor] = (servers, index, len(tensors))


def prefetch_tensors(tensors: Iterable[Tensor]) -> list[Handle]:
    """Begin to receive the servers' values; :func:`integrate_tensors` then hands them out.

    handles = ps.prefetch_tensors(parameters)
    """
    servers, _ = _find(tensors, "prefetch_tensors")
    _use_again(servers.fetching)
    return list(servers.fetch())


@torch.no_grad()
def integrate_tensors(tensors: Iterable[Tensor], function: Callable[[Tensor, Tensor], object]) -> None:
    """Call ``function(fetched, tensor)`` for each tensor, without autograd; waits for the prefetch if need be.

    ps.integrate_tensors(parameters, lambda fetched, parameter: parameter.lerp_(fetched, 0.5))
    """
    servers, listed = _find(tensors, "integrate_tensors")
    if not servers.has_fetched:
        raise ArgumentError(f"{_where()}: integrate_tensors: nothing has been fetched. Call prefetch_tensors() before.")
    servers.fetching = sync_handles(servers.fetching)
    for fetched, tensor in zip(servers.incoming.views, listed, strict=True):
        function(fetched, tensor)


@torch.no_grad()
def send_tensors(
    tensors: Iterable[Tensor],
    updates: Iterable[Tensor | None],
    rule: Any = "add",
    local_update: Callable[[Tensor], Tensor] | None = None,
) -> list[Handle]:
    """Begin to send an update for each tensor, under one rule; None counts as zeros.

    The updates are copied first, in one pass, and may be changed at once. ``local_update(update)`` is called for each
    of the copies, which it may change in place, and gives what is sent instead.

        gradients = [parameter.grad for parameter in parameters]
        ps.sync_handles(ps.send_tensors(parameters, gradients, ps.scaled_add(-0.1)))
    """
    servers, listed = _find(tensors, "send_tensors")
    updates = list(updates)
    if [None if update is None else update.shape for update in updates] != [
        None if update is None else tensor.shape for update, tensor in zip(updates, listed, strict=False)
    ] or len(updates) != len(listed):
        raise ArgumentError(f"{_where()}: send_tensors: the updates need the shapes of the tensors, in the same order.")
    _use_again(servers.sending)
    servers.outgoing.gather(updates)
    apply_to_each(local_update, servers.outgoing)
    return list(servers.send(rule, servers.outgoing))


def apply_to_each(local_update: Callable[[Tensor], Tensor] | None, flat: FlatViews) -> None:
    """Replace each view by what `local_update` makes of it."""
    if local_update is None:
        return
    for view in flat.views:
        result = local_update(view)
        if not isinstance(result, Tensor) or result.shape != view.shape:
            raise ArgumentError(
                f"{_where()}: local_update must return what is to be sent, a tensor of shape {list(view.shape)}, even "
                f"if it has changed its argument in place; it returned {_what(result)}."
            )
        if result is not view:
            view.copy_(result)


def _what(result: object) -> str:
    return f"one of shape {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"


def sync_handles(handles: Iterable[Handle]) -> list[Handle]:
    """Wait for all handles, and give an empty list to replace them.

    >>> sync_handles([Handle.completed(1), Handle.completed(2)])
    []
    """
    for handle in handles:
        handle.wait()
    return []


def _use_again(handles: Iterable[Handle]) -> None:
    """Wait for those whose memory is used again; an error that somebody has seen is not raised a second time."""
    for handle in handles:
        if not handle.done() or handle.unseen_error is not None:
            handle.wait()


def free_tensors(tensors: Iterable[Tensor]) -> None:
    """Give the servers of a list back; on all ranks, as :func:`~torchmpi.parameterserver.free`.

    ps.free_tensors(parameters)
    """
    servers, listed = _find(tensors, "free_tensors")
    book = _book()
    for tensor in listed:
        del book[tensor]
    servers.free()


def _book() -> WeakTensorKeyDictionary:
    running = runtime.current()
    if running not in _books:
        _books[running] = WeakTensorKeyDictionary()
    return _books[running]


def _listed(tensors: Iterable[Tensor], call: str) -> list[Tensor]:
    listed = list(tensors)
    wrong = [type(tensor).__name__ for tensor in listed if not isinstance(tensor, Tensor)]
    if wrong or not listed:
        found = f"a {wrong[0]} in it" if wrong else "an empty one"
        raise ArgumentError(f"{_where()}: {call}: expected a list of tensors, found {found}.")
    if len({id(tensor) for tensor in listed}) < len(listed):
        raise ArgumentError(f"{_where()}: {call}: a tensor is in the list twice. Pass each one once.")
    return listed


def _find(tensors: Iterable[Tensor], call: str) -> tuple[TensorServers, list[Tensor]]:
    listed, book = _listed(tensors, call), _book()
    entries = [book.get(tensor) for tensor in listed]
    if None in entries:
        raise ArgumentError(
            f"{_where()}: {call}: {_which(entry is None for entry in entries)} has no server. Call init_tensors() on "
            "the list first (a net that was moved or loaded anew may have other tensors)."
        )
    servers, _, length = entries[0]
    if entries != [(servers, index, length) for index in range(length)]:
        raise ArgumentError(
            f"{_where()}: {call}: these tensors were given to init_tensors() in another list. Pass that one: the same "
            "tensors, in the same order."
        )
    return servers, listed


def _which(flags: Iterable[bool]) -> str:
    return f"tensor {list(flags).index(True)} of the list"


def _where() -> str:
    return runtime.current().world.where
