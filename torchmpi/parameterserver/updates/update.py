"""Base class of the updates with servers: when to communicate, staleness, metrics and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...argument_types import checks_types
from ...communicators.communicator import Communicator
from ...communicators.levels import Comm
from ...errors import ArgumentError, rank_prefix
from ...nn.periodic_update import PeriodicUpdate, check_whole
from ...nn.replica import Replica
from ...nn.sync import broadcast_replica
from ...session import runtime
from ...tensors.flat_buffers import FlatBuffers
from ..parameter_lists import Base, TensorServers, sync_handles
from ..rules import Rule
from ..runs import observed_run
from ..servers import Server, free, refuse_continuing
from ..staleness import Clock, StalenessMeter, check_max_staleness
from ..workers import RankWorkers, Workers, workers_of

__all__ = ["Update"]


Schedule = float | Callable[[int], float]
"""A number, or a function of the step that returns one."""


class FetchSchedule(NamedTuple):
    """The numbers of the steps that fetch and of those that integrate.

    The period may be a function of the step at which it begins; `since` is a step at which one began.

    >>> schedule = FetchSchedule(update_frequency=10, init_delay=100, prefetch=3)
    >>> [step for step in range(125) if schedule.integrates(step)]
    [110, 120]
    >>> [step for step in range(125) if schedule.fetches(step)]
    [107, 117]
    """

    update_frequency: Schedule
    init_delay: int
    prefetch: int = 0
    since: int = -1

    def integrates(self, step: int) -> bool:
        """Return whether this step integrates fetched values."""
        if callable(self.update_frequency):
            begin = max(self.since, self.init_delay)
            while begin < step:
                begin += checked_period(self.update_frequency(max(begin, 0)), begin)
            return begin == step > self.init_delay
        return step > self.init_delay and (step - self.init_delay) % self.update_frequency == 0

    def fetches(self, step: int) -> bool:
        """Return whether this step fetches the values for the next integration."""
        return self.integrates(step + self.prefetch)


def checked_period(period: float, step: int) -> int:
    """Return the result of a schedule of periods, or raise an ArgumentError.

    >>> checked_period(0.5, 7)
    Traceback (most recent call last):
    torchmpi.errors.ArgumentError: update_frequency(7) returned 0.5: expected a whole number from 1.
    """
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise ArgumentError(
            f"{rank_prefix()}update_frequency({step}) returned {period!r}: expected a whole number from 1."
        )
    return period


def shown(value: object) -> object:
    """Return an option as it is compared between ranks: a function by its name.

    >>> shown(0.1), shown(len)
    (0.1, 'len()')
    """
    return f"{getattr(value, '__name__', type(value).__name__)}()" if callable(value) else value


@checks_types
class Update(PeriodicUpdate):
    """Base class of training through a parameter server.

    Call :meth:`update` once per step, between ``backward()`` and ``optimizer.step()``. A subclass implements
    :meth:`integrate` and :meth:`send`.

    Args:
        network: The network. Its trainable parameters must not change after the first step.
        sharding_communicator: Communicator, or its level, whose ranks hold the shards. Each of its groups has its own
            servers.
        dataparallel_communicator: Communicator, or its level, within which ranks train with the same gradients. Only
            its rank 0 communicates with the servers, and broadcasts the parameters after an integration.
        update_frequency: Steps between two integrations of the values of the servers: a number, or a function that is
            called with the step at which a period begins and returns its length.
        init_delay: Step at which the servers are created, with the values of rank 0.
        prefetch: How many steps before the integration the values are fetched; at most `update_frequency`.
        max_staleness: How many integrations a rank may be ahead of the slowest one without waiting.
        fetch_rows: Which rows of an ``nn.Embedding(sparse=True)`` are fetched: ``"all"``, or ``"used"``: those that
            this rank has sent since its last fetch. A row that only other ranks have sent then keeps old values, until
            this rank sends it or calls :meth:`pull`. Sparse gradients are sent as rows in both cases.
        name: Name of the servers, and of the update in :func:`torchmpi.metrics`, with a number if it is taken.

    Attributes:
        step: Number of the next step.
        update_frequency, init_delay, prefetch, max_staleness: The options, which may be changed during training, by the
            ranks of a data-parallel group at the same step. A limit cannot be added after the start.
        workers: The workers that train together; known once the servers have been created.
        num_clients: Number of ranks that communicate with the servers; known once they have been created, and that of
            the remaining ranks after a loss.
        num_integrations: Number of integrations of this rank.
        num_sends: Number of sends of this rank.
        staleness: A :class:`StalenessMeter` of the sends of this rank.
        clock: The :class:`Clock`, if `max_staleness` is finite and the servers have been created.

    Raises:
        ArgumentError: An option is invalid, or differs between the ranks.

    Example:
        class LargestWins(ps.Update):
            def integrate(self, center):
                for parameter, value in zip(self.parameters, center):
                    parameter.copy_(value)

            def send(self, integrated):
                self.push(self.parameters, "max")
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        sharding_communicator: Comm = 0,
        dataparallel_communicator: Comm = None,
        update_frequency: Schedule = 10,
        init_delay: int = 100,
        prefetch: int = 0,
        max_staleness: float = math.inf,
        name: str = "parameters",
        fetch_rows: Literal["all", "used"] = "all",
    ) -> None:
        if fetch_rows not in ("all", "used"):
            raise ArgumentError(f"fetch_rows={fetch_rows!r}: expected 'all' or 'used'.")
        self.prefetch, self.fetch_rows = prefetch, fetch_rows
        super().__init__(network, update_frequency=update_frequency, init_delay=init_delay)
        check_max_staleness(max_staleness)
        self.staleness = StalenessMeter()
        """For each send: the number of rules of other ranks applied since the fetch of the values used."""
        self.sharding_communicator, self.dataparallel_communicator = sharding_communicator, dataparallel_communicator
        self._max_staleness, self.name = max_staleness, name
        self.workers: Workers
        self.generator = torch.Generator()
        """For random choices of the algorithm; seeded by the number of the worker at the start."""
        self._num_clients = 0
        self.clock: Clock | None = None
        self._servers: TensorServers | None = None
        self._is_client = True
        self._data_parallel: Communicator | None = None
        self._is_fetching = False
        self.base: list[Base] | None = None
        """For each server: version of the values that were integrated last; None before the first integration."""
        self.gradient_base: list[Base] | None = None
        """The same of the values with which the current gradient was computed, before an integration in this step."""
        self._has_base = False
        """Whether the staleness of the current send is known."""
        self._is_sending = False
        self._rounds = 0
        self._since = -1
        """A step at which a period began, if their lengths vary."""

    def _check_options(self) -> None:
        super()._check_options()
        check_whole("prefetch", self.prefetch, 0)
        if not callable(self.update_frequency) and self.prefetch > self.update_frequency:
            raise ArgumentError(
                f"prefetch={self.prefetch} is more than update_frequency={self.update_frequency}: values cannot be "
                "fetched before the previous integration."
            )

    @property
    def schedule(self) -> FetchSchedule:
        """The steps that fetch and integrate, by the current values of the options."""
        return FetchSchedule(self.update_frequency, self.init_delay, self.prefetch, self._since)

    @property
    def max_staleness(self) -> float:
        """How many integrations a rank may be ahead of the slowest one without waiting."""
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, value: float) -> None:
        check_max_staleness(value)
        if self.clock is not None:
            self.clock.max_staleness = value
        elif self._servers is not None and not math.isinf(value):
            raise ArgumentError(
                f"{rank_prefix()}max_staleness={value!r}: this {type(self).__name__} has started without a limit, and "
                "counts no rounds. Pass max_staleness= to its constructor."
            )
        self._max_staleness = value

    def update(self, step: int | None = None) -> bool:
        """Communicate if this step requires it: see :meth:`PeriodicUpdate.update`."""
        observer = observed_run.active
        if observer is None:
            return super().update(step)
        rank = runtime.current().world.rank
        begin = observer.begin_step(self, rank)
        try:
            return super().update(step)
        finally:
            observer.end_step(rank, self.step - 1, begin)

    def start(self) -> None:
        """Create the servers now instead of at step `init_delay`. Collective over the sharding communicator.

        Needed to load saved shards before the first step.
        """
        if self._servers is not None:
            raise ArgumentError(f"{rank_prefix()}this {type(self).__name__} has started already.")
        self.workers = workers = workers_of.get()(self.sharding_communicator)
        self.generator.manual_seed(workers.rank)
        if self.dataparallel_communicator is not None:
            data_parallel = runtime.communicator(self.dataparallel_communicator)
            sharding = workers.communicator if isinstance(workers, RankWorkers) else None
            self._data_parallel = None if data_parallel is sharding else data_parallel
        self._is_client = self._data_parallel is None or self._data_parallel.rank == 0
        if self._data_parallel is not None:
            refuse_continuing(f"{type(self).__name__}", "there are no data-parallel groups, which end with a loss")
        self._num_clients = workers.size if workers.finds(f"{self.name} 0") else self._count_clients()
        self._adopt_parameters()
        self._servers = self._make_servers()
        for server in self._servers.servers:
            server.num_clients = self._num_clients
        workers.announce(self)
        if not math.isinf(self.max_staleness):
            self.clock = Clock(self.max_staleness, participates=self._is_client, initial=self._rounds, workers=workers)
        if (observer := observed_run.active) is not None:
            observer.begin_training(self, runtime.current().world.rank)

    @property
    def num_clients(self) -> int:
        """See the class; fewer after a loss."""
        return self._num_clients if self._servers is None else self._servers.servers[0].num_clients

    def _make_servers(self) -> TensorServers:
        """Create the servers. Collective."""
        tables = (module for module in self.network.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
        weights = {id(table.weight) for table in tables if table.sparse}
        sparse = [index for index, parameter in enumerate(self._parameters) if id(parameter) in weights]
        used = self.fetch_rows == "used"
        return TensorServers(self._parameters, self.workers, name=self.name, sparse=sparse, fetches_used_rows=used)

    def _count_clients(self) -> int:
        """Exchange the options, raise if they differ between ranks, and count the clients."""
        names, exchanged = self.workers.names, self.workers.allgather((self._options(), self._is_client))
        first, _ = exchanged[0]
        for rank, (options, _) in zip(names, exchanged, strict=True):
            if options == first:  # a comparison per option would take seconds with a thousand workers
                continue
            for option, value in first.items():
                if options.get(option) != value:
                    raise ArgumentError(
                        f"{rank_prefix()}the ranks have different options: {option} is {value!r} on rank "
                        f"{names[0]} and {options.get(option)!r} on rank {rank}. Pass the same "
                        "on all ranks."
                    )
        return sum(is_client for _, is_client in exchanged)

    def _options(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks."""
        return {
            "class": type(self).__name__,
            "update_frequency": shown(self.update_frequency),
            "init_delay": self.init_delay,
            "prefetch": self.prefetch,
            "max_staleness": self.max_staleness,
            "data-parallel groups": self._data_parallel is not None,
        }

    @property
    def servers(self) -> TensorServers:
        """The servers of the parameters, from step `init_delay` on."""
        if self._servers is None and self.is_finished:
            raise ArgumentError(
                f"{rank_prefix()}this {type(self).__name__} has finished, and its servers have been freed."
            )
        if self._servers is None:
            raise ArgumentError(
                f"{rank_prefix()}there is no server before step {self.init_delay}. Call start() to create one now."
            )
        return self._servers

    def _take_step(self) -> bool:
        if self._servers is None:
            if self.step < self.init_delay:
                return False
            self.start()
        schedule = self.schedule
        integrates = schedule.integrates(self.step)
        self.gradient_base = self.base
        if integrates:
            self._check_parameters()
        if self._is_client:
            if integrates:
                if not self._is_fetching:  # without prefetch, or in the first round of a resumed run
                    self._begin_fetch()
                self.integrate(self.fetched().views)
            self.send(integrates)
            if integrates and self.clock is not None:
                self.settle_send()  # before other ranks see the end of this round
                self.clock.advance()
            if schedule.prefetch and schedule.fetches(self.step):
                self._begin_fetch()
        if integrates:
            self._since = self.step
        self.num_integrations += integrates
        if integrates and self._data_parallel is not None:
            broadcast_replica(Replica(self._parameters), 0, self._data_parallel)
        return integrates

    def _begin_fetch(self) -> None:
        if self.clock is not None:
            self.clock.wait()
        self._is_fetching = True
        self.fetch()

    # --- methods for subclasses to override

    def fetch(self) -> None:
        """Start to receive the values of the servers."""
        self.servers.fetch("prefetch" if self.prefetch else "")

    def integrate(self, center: list[Tensor]) -> None:
        """Combine the network with the fetched values.

        Args:
            center: The fetched values of each parameter, which may be changed.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement integrate().")

    def send(self, integrated: bool) -> None:
        """Send if this step requires it; called at each step.

        Args:
            integrated: Whether this step has integrated fetched values.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement send().")

    # --- members for subclasses to use

    @property
    def parameters(self) -> list[Tensor]:
        """The trainable parameters of the network, once the servers have been created."""
        return self._parameters

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the parameters; None for a parameter without one."""
        return [parameter.grad for parameter in self._parameters]

    def at(self, value: Schedule) -> float:
        """Return the value of a schedule at this step."""
        number = value(self.step) if callable(value) else value
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ArgumentError(
                f"{rank_prefix()}{type(self).__name__}: a schedule returned {number!r} at step {self.step}: expected a "
                "number."
            )
        return number

    def _fixed_period(self) -> object:
        return 1 if callable(self.update_frequency) else self.update_frequency

    def fetched(self) -> FlatBuffers:
        """Wait for the fetched values and return them."""
        servers = self.servers
        self._is_fetching = False  # after an error too: what was fetched before the loss of a rank will not come
        values = servers.end_fetch()
        self.base = [server.base for server in servers.servers]
        return values

    def push(self, tensors: Sequence[Tensor | None], rule: str | Rule, *, base: Sequence[Base] | None = ()) -> None:
        """Start to send a tensor for each parameter, which is copied; None counts as zeros.

        Of an ``nn.Embedding(sparse=True)``, a sparse tensor is sent as rows, and None not at all. Waits for the
        previous send. `base` is as for :meth:`begin_send`.
        """
        self.settle_send()
        self.servers.gather(tensors)
        self.begin_send(rule, self.servers.outgoing, base=base)

    def begin_send(self, rule: str | Rule, flat: Any, *, base: Sequence[Base] | None = ()) -> None:
        """Start to send buffers, which must not be changed before :meth:`settle_send`.

        Args:
            rule: The rule that the servers apply.
            flat: The buffers, such as ``servers.outgoing``.
            base: For each server, `Server.base` after the fetch of the values from which the buffers were computed,
                such as :attr:`gradient_base`; None if unknown. Default: of the values that were integrated last.
        """
        self.settle_send()
        base = self.base if base == () else base
        self._has_base = base is not None
        unknown = [np.full_like(server.versions.base, math.nan) for server in self.servers.servers]
        self.servers.send(rule, flat, unknown if base is None else base)
        self._is_sending = True
        self.num_sends += 1

    def settle_send(self) -> None:
        """Wait for the current send, if there is one, and record its staleness."""
        servers = self._servers
        if servers is None or not self._is_sending:
            return
        self._is_sending = False
        sending, servers.sending = servers.sending, []
        sync_handles(sending)
        if self._has_base:
            ages = [server.sent_staleness for server in servers.reached]
            if ages:
                self.staleness.add(sum(ages) / len(ages))

    # --- end, metrics, checkpoints

    def finish(self) -> None:
        """Wait for the sends of this rank, and leave the clock. The rank serves its shards until ``stop()``."""
        if not self.is_finished:
            super().finish()
            try:
                self.settle_send()
            finally:
                if self.clock is not None:
                    self.clock.finish()

    def free(self) -> None:
        """Call :meth:`finish` and free the servers, which otherwise live until ``stop()``. Collective."""
        self.finish()
        if self._servers is not None:
            self._bytes_sent, self._bytes_received = self.bytes_sent, self.bytes_received
            self._servers.free()
            if self.clock is not None:
                free(self.clock.server)
            self._servers = self.clock = None

    def _abort(self) -> None:
        super()._abort()
        if self.clock is not None:
            self.clock.finish()

    @torch.no_grad()
    def pull(self) -> None:
        """Copy the current values of the servers into the network.

        Any rank may call this method at any time, for example before an evaluation. After ``finish()`` on all ranks and
        a barrier, all ranks get the same values.
        """
        servers = self.servers
        self.settle_send()
        servers.end_fetch()  # prefetched values are overwritten
        servers.fetch(whole=True)
        self.fetched().scatter(self._parameters)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to servers, including shards in its own memory."""
        return self._bytes_sent + sum(server.bytes_sent for server in self._all_servers())

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank has received from servers, including shards in its own memory."""
        return self._bytes_received + sum(server.bytes_received for server in self._all_servers())

    def _all_servers(self) -> Iterator[Server]:
        if self._servers is not None:
            yield from self._servers.servers
        if self.clock is not None:
            yield self.clock.server

    def metrics(self) -> dict[str, float]:
        """Return all metrics of this rank, for a log."""
        clock = self.clock
        return {
            **super().metrics(),
            "staleness_last": self.staleness.last,
            "staleness_mean": self.staleness.mean,
            "staleness_max": self.staleness.max,
            "num_waits": clock.num_waits if clock is not None else 0,
            "waited_seconds": clock.waited_seconds if clock is not None else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """Wait for the current send and return the state of this rank, without the network and the shards.

        To resume, make the same update, and call ``load_state_dict(state)``, ``start()`` and ``ps.load(folder)``.
        """
        self.settle_send()
        return {
            **super().state_dict(),
            "staleness": self.staleness.state_dict(),
            "rounds": self._rounds if self.clock is None else self.clock.value,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``; call it before ``start()`` and the first step."""
        if self._servers is not None:
            raise ArgumentError(
                f"{rank_prefix()}load_state_dict() after the start. Call it before start() and update()."
            )
        super().load_state_dict(state)
        self.staleness.load_state_dict(state["staleness"])
        self._rounds = state["rounds"]
