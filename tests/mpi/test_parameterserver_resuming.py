"""To a user of servers: updates continue from a saved state, and servers end when they are freed."""

from __future__ import annotations

import pytest
from helpers import updates_rig
from helpers.outcomes import refusal
from helpers.updates_rig import LR, make_net, set_gradients
from torch import nn

import torchmpi as mpi
import torchmpi.parameterserver as ps

levels = updates_rig.levels
no_servers_left = updates_rig.no_servers_left
pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


@pytest.mark.parametrize("stop_at", [5, 8])
def test_resumed_with_servers(agree, levels, stop_at):
    """During an accumulation, and during a fetch; each rank has its own server, so that runs are reproducible."""

    def make(net: nn.Module) -> ps.DownpourUpdate:
        return ps.DownpourUpdate(
            net, lr=LR, send_frequency=3, sharding_communicator=levels["alone"], update_frequency=4, init_delay=1,
            max_staleness=1,
        )  # fmt: skip

    def go(net: nn.Module, update: ps.DownpourUpdate, steps: range) -> None:
        for step in steps:
            set_gradients(net, 10 * step + mpi.rank())
            update.update()

    whole, first, second = make_net(), make_net(), make_net(seed=5)
    update, before, after = make(whole), make(first), make(second)
    go(whole, update, range(14))
    go(first, before, range(stop_at))
    state = before.state_dict()
    second.load_state_dict(first.state_dict())
    shards = [ps.receive(server).wait() for server in before.servers.servers]
    after.load_state_dict(state)
    after.start()
    for server, values in zip(after.servers.servers, shards, strict=True):
        ps.send(server, values, "copy").wait()
    agree("after the start" in refusal(lambda: after.load_state_dict(state)))
    go(second, after, range(stop_at, 14))
    for one in (update, after):
        one.finish()
        one.pull()
    for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        agree.equal(ours.detach(), theirs.detach())
    agree.equal((after.step, after.num_sends, after.num_integrations), (14, update.num_sends, 3))
    agree.equal(after.clock.value, update.clock.value)


@pytest.mark.parametrize("finished", [False, True])
def test_resumed_with_saved_shards(agree, levels, tmp_path, finished):
    """The state of the optimizer on the servers is restored."""

    def make(net: nn.Module) -> ps.DownpourUpdate:
        return ps.DownpourUpdate(
            net, rule=ps.adam(0.01), sharding_communicator=levels["alone"], update_frequency=3, init_delay=0
        )

    def go(net: nn.Module, update: ps.DownpourUpdate, steps: range) -> None:
        for step in steps:
            set_gradients(net, 10 * step + mpi.rank())
            update.update()

    whole, first, second = make_net(), make_net(), make_net(seed=5)
    update = make(whole)
    go(whole, update, range(11))
    update.pull()
    ps.free_all()
    before = make(first)
    go(first, before, range(5))
    if finished:
        before.finish()
    state, folder = before.state_dict(), tmp_path / str(mpi.rank())
    ps.save(folder, comm=levels["alone"])
    ps.free_all()
    second.load_state_dict(first.state_dict())
    after = make(second)
    after.load_state_dict(state)
    agree.equal(after.state_dict()["step"], 5, "the state before start()")
    after.start()
    ps.load(folder, comm=levels["alone"])
    go(second, after, range(5, 11))
    after.pull()
    for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        agree.equal(ours.detach(), theirs.detach())


def test_free(agree):
    """The server of its clock too, or they would accumulate over trainings."""
    net = make_net()
    update = ps.DownpourUpdate(net, lr=0.5, init_delay=0, update_frequency=1, max_staleness=1)
    set_gradients(net, 1)
    update.update()
    num_before = update.bytes_sent
    servers = [*update.servers.servers, update.clock.server]
    update.free()
    agree([server.is_open for server in servers] == [False] * len(servers), str(servers))
    agree(update.bytes_sent >= num_before > 0, str(update.bytes_sent))
    update.free()
