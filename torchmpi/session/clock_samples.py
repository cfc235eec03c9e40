"""Measurements of the clock of each host against that of rank 0, by messages to and fro."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .. import timeline
from ..communicators.group import Group
from ..timeline import events
from ..timeline.clocks import ClockSample, sample

_ROUNDS = 32
_TAG = 3


def provide_timeline(world: Group, description: dict[str, Any]) -> None:
    """Let timelines be recorded by the ranks of the world."""
    measure_here = partial(measure, world)
    is_exact = len(set(world.context.hosts)) == 1  # no communication
    timeline.set_job(
        timeline.JobInfo(description, measure_here if is_exact else partial(world.call_action, "barrier", measure_here))
    )


def measure(world: Group) -> list[ClockSample]:
    """Return the sample of this host; the first rank of each host exchanges messages with rank 0.

    Collective if there are several hosts; the caller then runs this as a call of the world.
    """
    hosts = world.context.hosts
    if len(set(hosts)) == 1:
        return [ClockSample(events.now(), 0, 0)]
    leaders = [hosts.index(host) for host in sorted(set(hosts))]
    own: ClockSample | None = ClockSample(events.now(), 0, 0) if world.rank == 0 else None
    for leader in leaders:
        if leader != 0 and world.rank in (0, leader):
            own = _exchange(world, leader) or own
    samples: list[ClockSample | None] = world.comm.allgather(own)
    found = samples[hosts.index(hosts[world.rank])]
    assert found is not None
    return [ClockSample(*found)]


def _exchange(world: Group, leader: int) -> ClockSample | None:
    """Exchange messages between rank 0 and the first rank of another host, which returns the sample."""
    MPI, comm = world.context.MPI, world.comm
    buffer = np.zeros(1, np.int64)
    rounds = []
    for _ in range(_ROUNDS):
        if world.rank == leader:
            sent = events.now()
            comm.Send((buffer, MPI.INT64_T), 0, _TAG)
            comm.Recv((buffer, MPI.INT64_T), 0, _TAG)
            rounds.append((sent, int(buffer[0]), events.now()))
        else:
            comm.Recv((buffer, MPI.INT64_T), leader, _TAG)
            buffer[0] = events.now()
            comm.Send((buffer, MPI.INT64_T), leader, _TAG)
    return sample(rounds) if rounds else None
