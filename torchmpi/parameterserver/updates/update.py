"""Training through servers: what is common to all ways of doing it, and when it happens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ... import collectives
from ...communicators.communicator import Communicator
from ...communicators.levels import Comm
from ...errors import ArgumentError
from ...session import runtime
from ..rules import Rule
from ..servers import free
from ..staleness import Clock, check_max_staleness
from ..tensors import FlatViews, TensorServers, sync_handles
from .periodic import PeriodicUpdate, Schedule, broadcast_many, check_whole, where


class Update(PeriodicUpdate):
    """Training through a parameter server: base class of Downpour and EASGD, and of your own.

    `update()` is called once per step, after backward and before the optimizer's step. At step `init_delay` the
    parameters are spread over the ranks of `sharding_communicator`, with the values of rank 0. Every
    `update_frequency` steps after it, their values are integrated into the network; they are asked for `prefetch`
    steps earlier. With a `dataparallel_communicator` other than that, only its rank 0 talks to the servers, and
    broadcasts what has come of it. With ``max_staleness=s`` a rank that is more than s integrations ahead of the
    slowest waits before it fetches.

    A class of your own says what an integration is (``_integrate``) and what is sent (``_send``).
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        sharding_communicator: Comm = 0,
        dataparallel_communicator: Comm = None,
        update_frequency: int = 10,
        init_delay: int = 100,
        prefetch: int = 0,
        max_staleness: float = math.inf,
        name: str = "parameters",
    ) -> None:
        super().__init__(network, update_frequency=update_frequency, init_delay=init_delay)
        check_whole("prefetch", prefetch, 0)
        if prefetch > update_frequency:
            raise ArgumentError(
                f"prefetch={prefetch} is more than update_frequency={update_frequency}: values cannot be asked for "
                "before the integration that precedes theirs."
            )
        check_max_staleness(max_staleness)
        self.schedule = Schedule(update_frequency, init_delay, prefetch)
        self.sharding_communicator, self.dataparallel_communicator = sharding_communicator, dataparallel_communicator
        self.max_staleness, self.name = max_staleness, name
        self.num_clients = 0
        """Ranks of this server that talk to it; known once it has started."""
        self.clock: Clock | None = None
        self._servers: TensorServers | None = None
        self._is_client = True
        self._data_parallel: Communicator | None = None
        self._is_fetching = False
        self._num_sends_at_fetch = 0
        self._base: list[float] | None = None
        """What has been integrated last: how many rules had been applied, those of this rank left out."""
        self._expected: list[float] | None = None
        """What the send that is under way finds on each server if nobody else has sent anything."""
        self._is_sending = False
        self._rounds = 0

    def start(self) -> None:
        """Make the servers now, and not at step `init_delay`. Collective over the sharding communicator.

        For those who want to load saved shards before the first step.
        """
        if self._servers is not None:
            raise ArgumentError(f"{where()}: this {type(self).__name__} has started already.")
        sharding = runtime.communicator(self.sharding_communicator)
        if self.dataparallel_communicator is not None:
            data_parallel = runtime.communicator(self.dataparallel_communicator)
            self._data_parallel = None if data_parallel is sharding else data_parallel
        self._is_client = self._data_parallel is None or self._data_parallel.rank == 0
        self.num_clients = self._agree(sharding)
        self._servers = TensorServers(self._adopt_parameters(), sharding, name=self.name)
        if not math.isinf(self.max_staleness):
            self.clock = Clock(self.max_staleness, sharding, participates=self._is_client, initial=self._rounds)

    def _agree(self, sharding: Communicator) -> int:
        """Refuse options that differ between ranks, and count the clients."""
        everybody = collectives.allgather_object((self._options(), self._is_client), comm=sharding)
        options = everybody[0][0]
        for rank, (theirs, _) in enumerate(everybody):
            for option, value in options.items():
                if theirs.get(option) != value:
                    ranks = sharding.intra.world_ranks
                    raise ArgumentError(
                        f"{where()}: the ranks have different options: {option} is {value!r} on rank {ranks[0]} and "
                        f"{theirs.get(option)!r} on rank {ranks[rank]}. Pass the same everywhere."
                    )
        return sum(is_client for _, is_client in everybody)

    def _options(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        return {
            "class": type(self).__name__,
            **self.schedule._asdict(),
            "max_staleness": self.max_staleness,
            "data-parallel groups": self._data_parallel is not None,
        }

    @property
    def servers(self) -> TensorServers:
        """The servers of the parameters; they are there from step `init_delay` on."""
        if self._servers is None:
            raise ArgumentError(
                f"{where()}: there is no server before step {self.init_delay}. Call start() to have one now."
            )
        return self._servers

    def _take_step(self) -> bool:
        if self._servers is None:
            if self.step < self.init_delay:
                return False
            self.start()
        integrates = self.schedule.integrates(self.step)
        if integrates:
            self._check_parameters()
        if self._is_client:
            if integrates:
                if not self._is_fetching:  # without prefetch, or in the first round of a resumed run
                    self._begin_fetch()
                self._integrate()
            self._send(integrates)
            if integrates and self.clock is not None:
                self._settle_send()  # before others are told that this round has ended
                self.clock.advance()
            if self.schedule.prefetch and self.schedule.fetches(self.step):
                self._begin_fetch()
        self.num_integrations += integrates
        if integrates and self._data_parallel is not None:
            broadcast_many(self._parameters, self._data_parallel)
        return integrates

    def _begin_fetch(self) -> None:
        if self.clock is not None:
            self.clock.wait()
        self._num_sends_at_fetch = self.num_sends
        self._is_fetching = True
        self._fetch()

    # --- what a class of your own may replace ------------------------------------------------------------------

    def _fetch(self) -> None:
        """Begin to receive the servers' values."""
        self.servers.fetch()

    def _integrate(self) -> None:
        """Do with the network what the fetched values (:meth:`_fetched`) ask for."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to integrate.")

    def _send(self, integrated: bool) -> None:
        """Send what is to be sent at this step; called at each one, after a possible integration."""
        raise NotImplementedError(f"{type(self).__name__} does not say what to send.")

    # --- what it may use for that ------------------------------------------------------------------------------

    def _fetched(self) -> FlatViews:
        """The values that were asked for, once they are there."""
        servers = self.servers
        servers.fetching = sync_handles(servers.fetching)
        self._is_fetching = False
        own = self._num_sends_at_fetch
        self._base = [server.received_version - own for server in servers.servers]
        return servers.incoming

    def _begin_send(self, rule: str | Rule, flat: FlatViews) -> None:
        """Send flat memory, which must be left alone until :meth:`_settle_send`."""
        self._settle_send()
        self._expected = None if self._base is None else [version + self.num_sends for version in self._base]
        self._is_sending = True
        self.servers.send(rule, flat)
        self.num_sends += 1

    def _settle_send(self) -> None:
        """Wait for the send that is under way, if there is one, and note how stale it was."""
        servers = self._servers
        if servers is None or not self._is_sending:
            return
        self._is_sending = False
        servers.sending = sync_handles(servers.sending)
        if self._expected is not None:
            found = [server.sent_version for server in servers.servers]
            ages = [version - expected for version, expected in zip(found, self._expected, strict=True)]
            self.staleness.add(sum(ages) / len(ages))

    # --- the end, figures, checkpoints -------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for what this rank has sent, and let no other rank wait for this one.

        The rank goes on serving until ``stop()``.
        """
        if not self.is_finished:
            super().finish()
            try:
                self._settle_send()
            finally:
                if self.clock is not None:
                    self.clock.finish()

    def free(self) -> None:
        """Give the servers back, which otherwise live until ``stop()``. Collective; no update follows."""
        self.finish()
        if self._servers is not None:
            self._bytes_sent, self._bytes_received = self.bytes_sent, self.bytes_received
            self._servers.free()
            if self.clock is not None:
                free(self.clock.server)
            self._servers = self.clock = None

    def _give_up(self) -> None:
        super()._give_up()
        if self.clock is not None:
            self.clock.finish()

    @torch.no_grad()
    def pull(self) -> None:
        """Give the network the servers' values as they are now, on any rank and at any time.

        For an evaluation, say. After ``finish()`` on all ranks and a barrier, all ranks get the same.
        """
        servers = self.servers
        self._settle_send()
        servers.fetching = sync_handles(servers.fetching)
        self._is_fetching = False  # what had been asked for is overwritten
        sync_handles(servers.fetch())
        servers.incoming.scatter(self._parameters)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to servers, those in its own memory included."""
        return self._bytes_sent + sum(server.bytes_sent for server in self._everything())

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank has received from servers, those in its own memory included."""
        return self._bytes_received + sum(server.bytes_received for server in self._everything())

    def _everything(self) -> Iterator[Any]:
        if self._servers is not None:
            yield from self._servers.servers
        if self.clock is not None:
            yield self.clock.server

    def metrics(self) -> dict[str, float]:
        """All figures of this rank, for a log."""
        clock = self.clock
        return {
            **super().metrics(),
            "num_waits": clock.num_waits if clock is not None else 0,
            "waited_seconds": clock.waited_seconds if clock is not None else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later, apart from the servers' shards and the network. Waits for sends.

        To resume: make the same update, ``load_state_dict(state)``, ``start()``, and load the shards.
        """
        self._settle_send()
        return {**super().state_dict(), "rounds": self._rounds if self.clock is None else self.clock.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` gave; before ``start()`` or the first step."""
        if self._servers is not None:
            raise ArgumentError(f"{where()}: load_state_dict() after the start. Call it before start() and update().")
        super().load_state_dict(state)
        self._rounds = state["rounds"]
