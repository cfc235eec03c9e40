"""Servers, and what may be done with them: make, send to, receive from, free."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..collectives.dispatch import is_simple
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.levels import Comm
from ..errors import ArgumentError, CommunicatorError, DtypeError
from ..session import runtime
from ..shared_memory.kernels.server_rules import state_dtype
from ..tensors import buffers, streams
from ..tensors import dtypes as dtype_table
from ..tensors.partition import even_partition
from .actor import Shards
from .rules import Prepared, Rule, prepare
from .service import Service, call_on_servers, require_threads, service_of

INLINE_BYTES = 256 << 10
"""Up to this size a call runs in the caller's thread, if all shards are within reach."""
_MOST_RULES = 64
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
)  # fmt: skip


class Server:
    """A tensor that is spread over the ranks of a communicator, as its clients see it. Made by `init`."""

    def __init__(self, service: Service, number: int, shape: torch.Size, *, shards: Shards, name: str) -> None:
        self.service, self.number, self.shape, self.shards, self.name = service, number, shape, shards, name
        self.dtype = shards.dtype
        self.numel = shape.numel()
        self.parts = even_partition(self.numel, service.group.size)
        """First element and number of elements of the shard of each rank."""
        self.is_local = not service.far_ranks
        self.is_open = self.is_saved = True
        """`is_saved`: part of what `save` writes and `load` reads, unless somebody has set it to False."""
        self.bytes_sent = self.bytes_received = self.num_sent = 0
        """What this client has sent and received, in all calls that have ended."""
        self.sent_version = self.received_version = 0.0
        """How many rules had been applied to its chunks, on average, when the last send of this client was, and the
        last receive."""
        self._rules: dict[Any, Prepared] = {}

    @property
    def group(self) -> Group:
        """Its ranks."""
        return self.service.group

    def __repr__(self) -> str:
        what = f"{list(self.shape)} {dtype_table.short_name(self.dtype)} on {self.group.size} ranks"
        return f"<Server {self.name!r}: {what}{'' if self.is_open else ', freed'}>"

    def prepared(self, rule: str | Rule) -> Prepared:
        """The rule for this dtype."""
        known = self._rules.get(rule)
        if known is None:
            known = prepare(rule, self.dtype)
            if known.function is None:  # others may be registered anew
                if len(self._rules) >= _MOST_RULES:  # a learning rate that changes makes a new one each step
                    self._rules.clear()
                self._rules[rule] = known
        return known

    def send(self, data: torch.Tensor, prepared: Prepared) -> None:
        """Apply a rule with plain memory of the host; in the lane's turn."""
        client, requests = self.service.client, self.service.requests
        client.apply(self.shards, data.data_ptr(), (0, self.numel), prepared)
        far = requests.send(self, data, prepared) if requests is not None else (0, 0)
        self.sent_version = (client.versions + far[0]) / max(client.num_chunks + far[1], 1)
        self.num_sent += 1
        self.bytes_sent += data.nbytes

    def receive(self, data: torch.Tensor) -> None:
        """Read everything into plain memory of the host; in the lane's turn."""
        client, requests = self.service.client, self.service.requests
        client.read(self.shards, data.data_ptr(), (0, self.numel))
        far = requests.receive(self, data) if requests is not None else (0, 0)
        self.received_version = (client.versions + far[0]) / max(client.num_chunks + far[1], 1)
        self.bytes_received += data.nbytes

    def close(self) -> None:
        """Nobody uses it any more: unmap."""
        self.is_open = False
        self.shards.close()


def init(tensor: torch.Tensor, comm: Comm = None, *, name: str | None = None) -> Server:
    """Spread a tensor over the ranks of a communicator: the shard of rank i starts with rank i's values. Collective.

    All ranks pass a tensor of the same shape and dtype; it is copied. To start with the same values everywhere,
    broadcast it before.

        server = ps.init(weights)
        ps.send(server, -0.1 * gradient, "add").wait()
        weights = ps.receive(server).wait()
    """
    group = runtime.communicator(comm).intra
    what = f"{group.where}: parameterserver.init"
    buffers.check(tensor, what)
    if tensor.dtype not in _DTYPES:
        names = ", ".join(dtype_table.short_name(dtype) for dtype in _DTYPES)
        raise DtypeError(f"{what}: there are no servers for {tensor.dtype}, only for {names}.")
    require_threads(group)
    plain = buffers.plain(tensor, to_host=True)
    subject = f"{dtype_table.short_name(tensor.dtype)} {list(tensor.shape)}{'' if name is None else f' named {name!r}'}"
    return call_on_servers(group, "server_init", subject, partial(_make, group, plain, name))


def _make(group: Group, tensor: torch.Tensor, name: str | None) -> Server:
    service = service_of(group) or Service(group)
    number = service.num_made
    parts = even_partition(tensor.numel(), group.size)
    shards = service.allocate(parts, (tensor.dtype, state_dtype(tensor.dtype)))
    server = Server(service, number, tensor.shape, shards=shards, name=name or f"server {number}")
    begin, numel = parts[group.rank]
    shards.array(service.near_ranks.index(group.rank)).copy_(tensor.view(-1)[begin : begin + numel])
    service.num_made += 1
    service.servers[number] = server
    service.comm.Barrier()  # from now on every rank may be asked
    return server


def send(server: Server, tensor: torch.Tensor | None, rule: str | Rule = "add") -> Handle:
    """Apply a rule to the server's values with those of `tensor`; do not change `tensor` before ``wait()``.

    Rules: ``"zero"`` (needs no tensor), ``"copy"``, ``"add"``, ``"max"``, ``"min"``, `scaled_add`, `axpby`, the
    optimizers `sgd`, `adagrad` and `adam`, and what `register_rule` added. Any shape of the right number of
    elements will do.

        handle = ps.send(server, gradient, ps.sgd(lr=0.1, momentum=0.9))
        compute()
        handle.wait()
    """
    what = _check_open(server, "send")
    prepared = prepared_for(server, rule, what)
    if tensor is None:
        if prepared.name != "zero":
            raise ArgumentError(f"{what}: rule {prepared.name!r} needs a tensor; only 'zero' does without.")
        tensor = torch.empty(server.shape, dtype=server.dtype, device="cpu")
    elif not is_simple(tensor):
        buffers.check(tensor, what)
    _check_fits(server, tensor, what)
    if tensor.is_cpu:
        task = partial(server.send, buffers.plain(tensor, to_host=True), prepared)
    else:
        mark, device = streams.fence(tensor), tensor.device
        task = partial(_send_staged, server, tensor, prepared, mark, device)
    return _run(server, task, what, tensor.nbytes if tensor.is_cpu else INLINE_BYTES + 1)


def prepared_for(server: Server, rule: str | Rule, what: str) -> Prepared:
    """The rule for this server, or an error that says `what` was about to be done."""
    try:
        return server.prepared(rule)
    except (ArgumentError, TypeError) as error:  # what cannot be hashed is no rule either
        kind = type(error) if isinstance(error, ArgumentError) else ArgumentError
        raise kind(f"{what}: {error}") from None


def _send_staged(server: Server, tensor: torch.Tensor, prepared: Prepared, mark: Any, device: torch.device) -> None:
    server.send(streams.run_after(mark, device, partial(buffers.plain, tensor, to_host=True)), prepared)


def receive(server: Server, tensor: torch.Tensor | None = None) -> Handle:
    """Fetch the server's values into `tensor`, or into a new one; ``wait()`` returns it.

    weights = ps.receive(server).wait()
    """
    what = _check_open(server, "receive")
    if tensor is None:
        tensor = torch.empty(server.shape, dtype=server.dtype, device="cpu")
    elif not is_simple(tensor):
        buffers.check(tensor, what, written=True)
    _check_fits(server, tensor, what)
    if tensor.is_cpu and buffers.is_direct(tensor):
        return _run(server, partial(_receive_directly, server, tensor), what, tensor.nbytes)
    mark = streams.fence(tensor)
    device = None if mark is None else tensor.device
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=not tensor.is_cpu)
    task = partial(_receive_staged, server, tensor, host, mark, device)
    return _run(server, task, what, tensor.nbytes if tensor.is_cpu else INLINE_BYTES + 1)


def _receive_directly(server: Server, tensor: torch.Tensor) -> torch.Tensor:
    server.receive(tensor)
    buffers.touch(tensor)
    return tensor


def _receive_staged(
    server: Server, tensor: torch.Tensor, host: torch.Tensor, mark: Any, device: torch.device | None
) -> torch.Tensor:
    server.receive(host)
    streams.run_after(mark, device, partial(buffers.overwrite, tensor, host))
    return tensor


def _check_open(server: Any, collective: str) -> str:
    if not isinstance(server, Server):
        raise ArgumentError(
            f"parameterserver.{collective}: a {type(server).__name__} is no server. "
            "Pass what parameterserver.init returned."
        )
    what = f"{server.group.where}: parameterserver.{collective}"
    if not server.is_open:
        raise _freed(server, what)
    runtime.current()  # refuses in a forked child, which would be taken for its parent
    return what


def _freed(server: Server, what: str) -> CommunicatorError:
    return CommunicatorError(f"{what}: {server.name} has been freed. Make a new one with parameterserver.init.")


def _check_fits(server: Server, tensor: torch.Tensor, what: str) -> None:
    if tensor.numel() != server.numel:
        raise ArgumentError(
            f"{what}: the tensor has {tensor.numel()} elements {list(tensor.shape)}, {server.name} has {server.numel} "
            f"{list(server.shape)}. The shape may differ, the number of elements may not."
        )
    if tensor.dtype is not server.dtype:
        raise DtypeError(
            f"{what}: the tensor is {tensor.dtype}, {server.name} is {server.dtype}. Convert it: "
            f"tensor.to({server.dtype})."
        )


def _run(server: Server, task: Any, description: str, num_bytes: int) -> Handle:
    """Now, if it is small and nothing is queued before it; otherwise in the lane's turn."""
    call_queue = server.service.call_queue
    if not (
        server.is_local and num_bytes <= INLINE_BYTES and call_queue.pending == 0 and call_queue.run_lock.acquire(False)
    ):
        return call_queue.submit(partial(_in_turn, server, task, description), description)
    handle = Handle(description)
    try:
        handle.set_result(_in_turn(server, task, description))
    except Exception as error:  # which belongs to the one who waits, as in the lane
        call_queue.failed = [*(other for other in call_queue.failed if other.unseen_error is not None), handle]
        handle.set_error(error)
    finally:
        call_queue.run_lock.release()
    return handle


def _in_turn(server: Server, task: Any, description: str) -> Any:
    try:
        if not server.is_open:  # another thread has freed it since it was looked at
            raise _freed(server, description)
        return task()
    finally:
        server.service.call_queue.doing = None


def free(server: Server) -> None:
    """Give a server back, after everything that was sent to it by anybody. Collective.

    ps.free(server)
    """
    _check_open(server, "free")
    group = server.group
    call_on_servers(group, "server_free", f"server {server.number}", partial(_free, server))


def _free(server: Server) -> None:
    service = server.service
    service.call_queue.drain()
    service.refuse_calls(server)
    service.comm.Barrier()
    del service.servers[server.number]
    server.close()


def free_all() -> None:
    """Free the servers of all communicators, the last one first. Collective.

    ps.free_all()
    """
    for group in reversed(list(runtime.current().context.groups)):
        service = service_of(group)
        for number in sorted(service.servers, reverse=True) if service is not None else ():
            assert service is not None
            free(service.servers[number])
