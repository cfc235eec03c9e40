"""Gossip: no center; each worker exchanges values with a few neighbors, through a row of a server for each worker.

Assran et al., Stochastic Gradient Push for Distributed Deep Learning, 2019. Lian et al., Asynchronous Decentralized
Parallel Stochastic Gradient Descent, 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...argument_types import checks_types
from ...communicators.handle import Handle
from ...tensors.flat_buffers import FlatBuffers
from ..parameter_lists import Base
from ..rules import Rule
from ..servers import Server, free, receive, refuse_continuing, send
from ..workers import Workers
from .mixing import Mixing, checked_mixing, exponential_mixing, ring_mixing
from .update import Schedule, Update

__all__ = ["ADPSGDUpdate", "GossipUpdate", "SGPUpdate"]

_LEAST_WEIGHT = 0.5
"""Of a rank that gives shares: with less, numbers of a rank that is far ahead of others would vanish."""
Message = tuple[int, Sequence[Tensor]]
"""A worker, and what is added to its row on each server."""


class GossipServers:
    """A server per dtype and device with a row for each worker: its values, then its weight in push-sum.

    The row of worker i is on the shard of rank i.
    """

    def __init__(self, tensors: Sequence[Tensor], workers: Workers, *, name: str) -> None:
        refuse_continuing("gossip", "there is no gossip, as the shares of a lost rank would be lost with its row")
        workers.check_tensors(tensors)
        self._rank = workers.rank
        self.rows: list[list[Tensor]] = []
        """For each server the rows that were fetched last: that of this worker first."""
        self.flat = FlatBuffers(tensors)
        self.flat.gather(tensors)
        self.has_fetched = False
        self.fetching: list[Handle[Tensor]] = []
        self.sending: list[Handle[None]] = []
        self.servers: list[Server] = []
        self.reached = self.servers
        for index, buffer in enumerate(self.flat.buffers):
            row = torch.cat([buffer.cpu(), torch.ones(1, dtype=buffer.dtype)])
            zeros = torch.zeros(workers.size, len(row), dtype=row.dtype)
            self.servers.append(workers.init(zeros, f"{name} {index}"))
            send(self.servers[-1], row, "copy", rows=[workers.rank]).wait()
        workers.barrier()  # all rows are complete

    def fetch(self, label: str = "", rows: Sequence[int] = ()) -> list[Handle[Tensor]]:
        """Start to receive the row of this worker, and then `rows`."""
        self.fetching = [receive(server, rows=[self._rank, *rows]) for server in self.servers]
        self.has_fetched = True
        return self.fetching

    def end_fetch(self) -> FlatBuffers:
        """Wait for the rows, and return the values of this worker without its weight."""
        self.rows = [list(handle.wait()) for handle in self.fetching]
        self.fetching = []
        for buffer, rows in zip(self.flat.buffers, self.rows, strict=True):
            buffer.copy_(rows[0][:-1])
        return self.flat

    def send(self, rule: str | Rule, messages: Sequence[Message], bases: Sequence[Base] = ()) -> list[Handle[None]]:
        """Start to add messages to the rows of workers."""
        self.sending = [
            send(server, part, rule, rows=[worker], base=base)
            for worker, parts in messages
            for server, part, base in zip(self.servers, parts, bases or [None] * len(self.servers), strict=True)
        ]
        return self.sending

    def free(self) -> None:
        """Free the servers. Collective."""
        for server in self.servers:
            free(server)


class GossipUpdate(Update):
    """Base of gossip: the network of a rank changes by its optimizer, and every `update_frequency` steps by a message.

    A subclass implements :meth:`exchange`. :meth:`pull` gives the weighted average of all ranks.

    Args:
        network: The network, which an optimizer trains.
        mixing: A mixing matrix, or a function of the number of ranks that returns one.
        update_frequency: Steps between two exchanges.
        init_delay: Step at which gossip begins, with the networks of the ranks as they are.
        **options: The other options of :class:`Update`.

    Example:
        class Leader(ps.GossipUpdate):
            def exchange(self, rows, changes):
                return [rows[0] + change for rows, change in zip(rows, changes)], [(self.workers.rank, changes)]
    """

    is_symmetric = False
    """Whether the mixing matrix must be symmetric."""

    def __init__(
        self, network: nn.Module, *, mixing: Mixing, update_frequency: Schedule = 1, init_delay: int = 0, **options: Any
    ) -> None:
        super().__init__(network, update_frequency=update_frequency, init_delay=init_delay, **options)
        self.mixing = mixing
        self.matrix = torch.empty(0)
        self._values = self._before = FlatBuffers([])
        self._messages: list[Message] = []
        self._saved: list[Tensor] = []
        """The network at the last exchange of a loaded state, until there are servers."""

    def _make_servers(self) -> Any:
        what = f"{self.workers.where}: {type(self).__name__}"
        self.matrix = checked_mixing(self.mixing, self.workers.size, what, symmetric=self.is_symmetric)
        self._values, self._before = FlatBuffers(self.parameters), FlatBuffers(self.parameters)
        self._before.gather(self.parameters)
        if self._saved:
            self._before.restore(self._saved)
        return GossipServers(self.parameters, self.workers, name=self.name)

    @property
    def table(self) -> GossipServers:
        """The rows of the workers, on servers."""
        found: Any = self.servers
        return found  # type: ignore[no-any-return]

    def exchange(self, rows: list[list[Tensor]], changes: list[Tensor]) -> tuple[list[Tensor], list[Message]]:
        """Decide what this rank takes and sends.

        Args:
            rows: For each server: the row of this rank, then the others that :meth:`fetch` has asked for. The last
                element of a row is its weight.
            changes: For each server: how the optimizer has changed the network since the last exchange; the last
                element is 0.

        Returns:
            For each server the new row of this rank, of which the network gets the values divided by the weight; and
            the messages, each a worker and what is added to its row on each server.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement exchange().")

    def integrate(self, center: list[Tensor]) -> None:
        """Take the result of :meth:`exchange`."""
        self._values.gather(self.parameters)
        nothing = [buffer.new_zeros(1) for buffer in self._values.buffers]
        pairs = zip(self._values.buffers, self._before.buffers, nothing, strict=True)
        changes = [torch.cat([now - before, zero]).cpu() for now, before, zero in pairs]
        rows, self._messages = self.exchange(self.table.rows, changes)
        for buffer, row in zip(self._values.buffers, rows, strict=True):
            buffer.copy_(row[:-1] / row[-1])
        self._values.scatter(self.parameters)
        self._before.gather(self.parameters)

    def send(self, integrated: bool) -> None:
        """Send the messages of :meth:`exchange`."""
        if integrated:
            self.begin_send("add", self._messages)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, with its network at the last exchange, without the shards."""
        return {**super().state_dict(), "before": self._before.clones()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``; call it before ``start()`` and the first step."""
        super().load_state_dict(state)
        self._saved = state["before"]

    @torch.no_grad()
    def pull(self) -> None:
        """Copy the average of the ranks, weighted as in push-sum, into the network."""
        self.settle_send()
        for buffer, server in zip(self._values.buffers, self.servers.servers, strict=True):
            total = receive(server).wait().sum(0)
            buffer.copy_(total[:-1] / total[-1])
        self._values.scatter(self.parameters)
        self._before.gather(self.parameters)


@checks_types
class SGPUpdate(GossipUpdate):
    """Stochastic gradient push: a rank gives shares of its values and of its weight to its neighbors, without waiting.

    ``x_i = sum_j P_ij (x_j + w_j change_j)``, ``w_i = sum_j P_ij w_j``, and the network is ``z_i = x_i / w_i``; the
    columns of P add up to 1, so that sums of x and w over the ranks stay, whatever arrives when. In the paper ranks
    exchange at the same time, and w is about 1. Here a rank that exchanges more often than others loses weight: its
    changes are scaled by w, so that the network moves by the steps of its optimizer, and while w is below a half the
    rank gives nothing.

    Args:
        network: The network, which an optimizer trains.
        mixing: The matrix P, or a function of the number of ranks.
        **options: The options of :class:`GossipUpdate`.

    Raises:
        ArgumentError: The matrix is no mixing matrix of this number of ranks, or an option is invalid.

    Example:
        update = ps.SGPUpdate(model, mixing=ps.exponential_mixing)
    """

    def __init__(self, network: nn.Module, *, mixing: Mixing = exponential_mixing, **options: Any) -> None:
        super().__init__(network, mixing=mixing, **options)

    def exchange(self, rows: list[list[Tensor]], changes: list[Tensor]) -> tuple[list[Tensor], list[Message]]:
        """Give a share to each neighbor."""
        rank, shares = self.workers.rank, self.matrix[:, self.workers.rank].tolist()
        kept = [row[0][-1] * change for row, change in zip(rows, changes, strict=True)]
        new = [row[0] + change for row, change in zip(rows, kept, strict=True)]
        if min(float(row[-1]) for row in new) < _LEAST_WEIGHT:
            return new, [(rank, kept)]
        messages: list[Message] = [
            (worker, [share * row for row in new])
            for worker, share in enumerate(shares)
            if share > 0 and worker != rank
        ]
        for _, parts in messages:
            torch._foreach_sub_(kept, list(parts))
        return new, [*messages, (rank, kept)]


@checks_types
class ADPSGDUpdate(GossipUpdate):
    """AD-PSGD: a rank averages with a neighbor that it chooses at random, without waiting for it.

    ``x_i, x_j = (x_i + x_j) / 2`` with the gradient step of the rank applied to x_i; neighbor j is chosen with
    probability ``W_ij``. Both rows change by the same amount in opposite directions, so that their sum stays.

    Args:
        network: The network, which an optimizer trains.
        mixing: The symmetric matrix W, or a function of the number of ranks.
        **options: The options of :class:`GossipUpdate`.

    Raises:
        ArgumentError: The matrix is no symmetric mixing matrix of this number of ranks, or an option is invalid.

    Example:
        update = ps.ADPSGDUpdate(model, mixing=ps.ring_mixing)
    """

    is_symmetric = True

    def __init__(self, network: nn.Module, *, mixing: Mixing = ring_mixing, **options: Any) -> None:
        super().__init__(network, mixing=mixing, **options)
        self.partner = 0

    def fetch(self) -> None:
        """Choose a neighbor, and fetch its row too."""
        probabilities = self.matrix[self.workers.rank]
        self.partner = int(torch.multinomial(probabilities, 1, generator=self.generator))
        self.table.fetch(rows=[self.partner])

    def exchange(self, rows: list[list[Tensor]], changes: list[Tensor]) -> tuple[list[Tensor], list[Message]]:
        """Average with the neighbor."""
        own = [row[0] + change for row, change in zip(rows, changes, strict=True)]
        if self.partner == self.workers.rank:
            return own, [(self.workers.rank, changes)]
        halves = [(row[1] - mine) / 2 for row, mine in zip(rows, own, strict=True)]
        new = [mine + half for mine, half in zip(own, halves, strict=True)]
        to_own = [change + half for change, half in zip(changes, halves, strict=True)]
        return new, [(self.partner, [-half for half in halves]), (self.workers.rank, to_own)]
