"""To a user of Downpour, elastic averaging and the others: schedules, groups and clocks as in plain torch.

Where the order of calls determines the result, ranks take their steps in rank order, as the reference does.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from helpers import updates_rig
from helpers.outcomes import refusal
from helpers.updates_rig import LR, make_net, quadratic_step, set_gradients, step_in_turn
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps
from torchmpi.errors import StallError
from torchmpi.session import runtime
from torchmpi.timeline.events import SERVER_CALL
from torchmpi.timeline.trace_reader import read_folder

levels = updates_rig.levels
no_servers_left = updates_rig.no_servers_left
pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


# --- schedules


class Recorder(ps.Update):
    """Records its calls."""

    def __init__(self, network, **options):
        super().__init__(network, **options)
        self.calls = []

    def fetch(self):
        self.calls.append(("fetch", self.step))
        super().fetch()

    def integrate(self, center):
        self.calls.append(("integrate", self.step))

    def send(self, integrated):
        self.calls.append(("send", self.step, integrated))


@pytest.mark.parametrize("prefetch", [0, 1, 3, 4])
@pytest.mark.parametrize("init_delay", [0, 5])
def test_order_of_calls(agree, prefetch, init_delay):
    update = Recorder(make_net(), update_frequency=4, init_delay=init_delay, prefetch=prefetch)
    changed = [update.update() for _ in range(20)]
    integrations = [step for step in range(20) if step > init_delay and (step - init_delay) % 4 == 0]
    agree.equal([step for step, was in enumerate(changed) if was], integrations)
    expected = []
    for step in range(init_delay, 20):
        integrates = step in integrations
        if integrates:
            expected += [("fetch", step)] * (prefetch == 0) + [("integrate", step)]
        expected.append(("send", step, integrates))
        # Values for the next integration are requested after those for this one have been used.
        if prefetch and step + prefetch > init_delay and (step + prefetch - init_delay) % 4 == 0:
            expected.append(("fetch", step))
    agree.equal(update.calls, expected)
    agree.equal((update.step, update.num_integrations), (20, len(integrations)))


def test_steps_can_be_given(agree):
    update = Recorder(make_net(), update_frequency=10, init_delay=100)
    changed = [step for step in range(90, 131) if update.update(step)]
    agree.equal(changed, [110, 120, 130])
    agree.equal(update.step, 131)


def test_early_start(agree):
    update = Recorder(make_net(), init_delay=10)
    update.start()
    agree("has started already" in refusal(update.start))
    agree.equal([server.numel for server in update.servers.servers], [6 * 8 + 8 + 8 * 3 + 3])
    agree.equal(update.servers.servers[0].name, "parameters 0")


@pytest.mark.min_ranks(2)
def test_different_options_are_rejected_on_all_ranks(agree):
    update = ps.EASGDUpdate(make_net(), update_frequency=5 + (mpi.rank() == mpi.size() - 1), init_delay=0)
    found = refusal(update.update)
    agree("update_frequency is 5 on rank 0 and 6 on rank" in found, found)


def test_a_changed_network_is_rejected(agree):
    net = make_net()
    update = ps.EASGDUpdate(net, update_frequency=2, init_delay=0)
    update.update()
    net[0].bias.requires_grad_(False)
    update.update()
    found = refusal(update.update)
    agree("other trainable parameters than when this EASGDUpdate started" in found, found)


# --- Downpour


@pytest.mark.parametrize(
    "options",
    [{"lr": LR}, {"local_update": lambda gradient: gradient.mul_(-LR)}, {"rule": ps.sgd(LR)}],
    ids=["lr", "local_update", "rule"],
)
@pytest.mark.parametrize("frequency", [1, 3])
def test_downpour_of_one_rank_is_sgd_bit_for_bit(agree, levels, options, frequency):
    """On a level of groups of one rank, each with its own server."""
    net, twin = make_net(mpi.rank()), make_net(mpi.rank())
    optimizer, other = torch.optim.SGD(net.parameters(), lr=LR), torch.optim.SGD(twin.parameters(), lr=LR)
    update = ps.DownpourUpdate(
        net, sharding_communicator=levels["alone"], update_frequency=frequency, init_delay=2, **options
    )
    with update:
        for step in range(12):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            quadratic_step(net, inputs)
            update.update()
            optimizer.step()
            quadratic_step(twin, inputs)
            other.step()
    agree.equal((update.num_sends, update.num_clients), (10, 1))
    for when in ("as trained", "from the server"):
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            agree.equal(ours.detach(), theirs.detach(), when)
        update.pull()


@pytest.mark.parametrize("send_frequency", [1, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_downpour_loses_no_gradient(agree, send_frequency, prefetch):
    """Every gradient of every rank is applied once, also those accumulated at the end."""
    net = make_net()
    expected = [parameter.detach().clone() for parameter in net.parameters()]
    settings = {"update_frequency": 4, "init_delay": 1, "prefetch": prefetch, "send_frequency": send_frequency}
    with ps.DownpourUpdate(net, lr=LR, **settings) as update:
        for step in range(11):
            set_gradients(net, seed=100 * step + mpi.rank())
            update.update()
    for rank in range(mpi.size()):
        for step in range(1, 11):
            other = make_net()
            set_gradients(other, seed=100 * step + rank)
            for value, parameter in zip(expected, other.parameters(), strict=True):
                value -= LR * parameter.grad
    mpi.barrier()
    update.pull()
    for parameter, value in zip(net.parameters(), expected, strict=True):
        agree.close(parameter.detach(), value)
    agree.equal(update.num_sends, 10 if send_frequency == 1 else 4)
    own = update.servers.servers
    agree.equal(update.bytes_sent, sum(server.bytes_sent for server in own))
    agree(update.bytes_sent >= update.num_sends * sum(parameter.nbytes for parameter in net.parameters()))


def test_downpour_with_an_optimizer_on_the_server(agree, levels):
    net, twin = make_net(3), make_net(3)
    adam = torch.optim.Adam(twin.parameters(), lr=0.01)
    update = ps.DownpourUpdate(
        net, rule=ps.adam(0.01), sharding_communicator=levels["alone"], update_frequency=1, init_delay=0
    )
    for seed in range(6):
        set_gradients(net, seed)
        set_gradients(twin, seed)
        update.update()
        adam.step()
    update.finish()
    update.pull()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        agree.close(ours.detach(), theirs.detach())


def staleness_of_steps(net, update, num_steps):
    """Start the update, and return its staleness after each of some steps that the ranks make in turn."""
    update.start()
    seen = []
    for step in range(num_steps):
        set_gradients(net, step)
        step_in_turn(update)
        seen.append(update.staleness.last)
    return seen


def test_staleness_counts_sends_of_other_ranks(agree):
    net = make_net()
    update = ps.DownpourUpdate(net, lr=LR, update_frequency=2, init_delay=0)
    seen = staleness_of_steps(net, update, 9)
    # A step that integrates sends the gradient of the values before: every other rank has sent twice since their fetch.
    others = mpi.size() - 1.0
    agree(all(math.isnan(age) for age in seen[:3]), f"the first gradient of fetched values is that of step 3: {seen}")
    agree.equal(seen[3:], [others, 2 * others] * 3)
    agree.equal((update.staleness.count, update.staleness.max), (6, 2 * others))
    agree.equal(update.metrics()["staleness_mean"], 1.5 * others)


def test_staleness_of_accumulated_gradients(agree):
    """The mean over the gradients of a send, each counted from the fetch of its own weights."""
    net, others = make_net(), mpi.size() - 1.0
    update = ps.DownpourUpdate(net, lr=LR, update_frequency=1, send_frequency=2, init_delay=0)
    seen = staleness_of_steps(net, update, 8)
    # Odd steps send. Since the fetch two steps before, every other rank has sent; since the last, those before this.
    agree.equal(seen[3::2], [(others + mpi.rank()) / 2] * 3, str(seen))


def test_the_end_waits_for_the_last_send(agree):
    """Whose staleness is known then."""
    net = make_net()
    update = ps.DownpourUpdate(net, lr=LR, update_frequency=2, init_delay=0)
    staleness_of_steps(net, update, 9)
    set_gradients(net, 9)
    update.update()
    before = update.staleness.count
    update.finish()
    agree.equal(update.staleness.count, before + 1)


def test_bounded_staleness_counts_accumulated_gradients(agree):
    """Values fetched in a round contain all gradients of the finished rounds of all ranks."""
    point, missing = Point(), []
    update = ps.DownpourUpdate(point, lr=1.0, update_frequency=2, send_frequency=5, init_delay=0, max_staleness=0)
    with update:
        for _ in range(19):
            point.at.grad = torch.ones(7)
            if update.update():
                # 3 gradients of the first round, 2 of each later one; the current round has only begun.
                finished = 2 * update.clock.value - 1 if update.clock.value > 1 else 0
                applied = -point.at.detach()[0].item()
                missing.append(max(0.0, mpi.size() * finished - applied))
    agree.equal(missing, [0.0] * 9)


def test_options_changed_during_training_are_applied(agree):
    update = ps.EASGDUpdate(make_net(), update_frequency=2, init_delay=0, max_staleness=5)
    changed = [step for step in range(5) if update.update()]
    update.update_frequency = 5
    changed += [step for step in range(5, 16) if update.update()]
    agree.equal(changed, [2, 4, 5, 10, 15])
    update.max_staleness = 3
    agree.equal((update.max_staleness, update.clock.max_staleness), (3, 3))
    update.prefetch = 7
    agree("prefetch=7 is more than update_frequency=5" in refusal(update.update))
    update.prefetch, update.update_frequency = 0, 0
    agree("update_frequency=0: expected a whole number from 1" in refusal(update.update))
    unbounded = ps.EASGDUpdate(make_net(), init_delay=0)
    unbounded.start()
    agree("counts no rounds" in refusal(lambda: setattr(unbounded, "max_staleness", 2)))
    local = ps.DiLoCoUpdate(make_net(), update_frequency=4, overlap_steps=3)
    local.update_frequency = 2
    agree("overlap_steps=3 is more than update_frequency=2" in refusal(local.update))
    local.update_frequency = 0
    agree("update_frequency=0" in refusal(local.update))


# --- elastic averaging


def targets() -> list[torch.Tensor]:
    """The minimum of the loss of each rank, which is half the squared distance."""
    return [torch.full((7,), float(rank + 1)) for rank in range(mpi.size())]


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.arange(7.0))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_easgd_against_a_reference(agree, prefetch):
    size, lr, alpha = mpi.size(), 0.25, 0.9 / mpi.size()
    point = Point()
    update = ps.EASGDUpdate(point, beta=0.9, update_frequency=2, init_delay=0, prefetch=prefetch)
    update.start()
    optimizer = torch.optim.SGD(point.parameters(), lr=lr)
    center, xs = torch.arange(7.0), [torch.arange(7.0) for _ in range(size)]
    fetched: list[torch.Tensor] = [center.clone() for _ in range(size)]
    for step in range(9):
        point.at.grad = point.at.detach() - targets()[mpi.rank()]
        step_in_turn(update)
        optimizer.step()
        for rank in range(size):
            gradient = xs[rank] - targets()[rank]
            if step and step % 2 == 0:
                if prefetch == 0:
                    fetched[rank] = center.clone()
                difference = alpha * (xs[rank] - fetched[rank])
                xs[rank] = xs[rank] - difference
                center = center + difference
            if prefetch and (step + prefetch) % 2 == 0:
                fetched[rank] = center.clone()
            xs[rank] = xs[rank] - lr * gradient
        agree.close(point.at.detach(), xs[mpi.rank()], f"step {step}")
    update.finish()
    mpi.barrier()
    update.pull()
    agree.close(point.at.detach(), center, "the center")
    agree.equal((update.num_clients, update.alpha), (size, alpha))


def test_eamsgd_is_equation_5(agree):
    size, lr, delta, alpha = mpi.size(), 0.25, 0.5, 0.9 / mpi.size()
    point = Point()
    optimizer = torch.optim.SGD(point.parameters(), lr=lr, momentum=delta, nesterov=True)
    update = ps.EAMSGDUpdate(point, optimizer, update_frequency=2, init_delay=0)
    update.start()
    center, xs = torch.arange(7.0), [torch.arange(7.0) for _ in range(size)]
    vs = [torch.zeros(7) for _ in range(size)]
    for step in range(9):
        point.at.grad = point.at.detach() - targets()[mpi.rank()]
        step_in_turn(update)
        optimizer.step()
        for rank in range(size):
            gradient = xs[rank] + delta * vs[rank] - targets()[rank]
            difference = torch.zeros(7)
            if step and step % 2 == 0:
                difference = alpha * (xs[rank] - center)
                center = center + difference
            vs[rank] = delta * vs[rank] - lr * gradient
            xs[rank] = xs[rank] + vs[rank] - difference
        # The optimizer keeps the network ahead of the position.
        agree.close(point.at.detach(), xs[mpi.rank()] + delta * vs[mpi.rank()], f"step {step}")
    update.finish()
    mpi.barrier()
    update.pull()
    agree.close(point.at.detach(), center, "the center")


def test_eamsgd_needs_all_parameters_in_its_optimizer(agree):
    net = make_net()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9, nesterov=True)
    update = ps.EAMSGDUpdate(net, optimizer, update_frequency=1, init_delay=0)
    update.update()
    found = refusal(update.update)
    agree("does not train all parameters" in found, found)


def test_eamsgd_with_a_rate_of_zero(agree):
    """Some parameters have a momentum, others have never had a gradient."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    update = ps.EAMSGDUpdate(net, optimizer, update_frequency=1, init_delay=0)
    for _ in range(3):
        net[0].bias.grad = torch.ones(8)
        update.update()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.0
    agree.equal(update.num_integrations, 2)


# --- data-parallel groups


@pytest.mark.parametrize("kind", ["downpour", "easgd"])
def test_only_rank_0_of_a_group_is_a_client(agree, levels, kind):
    rank, size = mpi.rank(), mpi.size()
    net = make_net()
    settings = {"dataparallel_communicator": levels["pairs"], "update_frequency": 2, "init_delay": 1, "prefetch": 1}
    update = (
        ps.DownpourUpdate(net, lr=LR, **settings) if kind == "downpour" else ps.EASGDUpdate(net, beta=0.5, **settings)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    equal = []
    with update:
        for step in range(10):
            set_gradients(net, seed=10 * step + rank)
            mpinn.synchronize_gradients(net, comm=levels["pairs"])
            if update.update():
                equal.append(refusal(lambda: mpinn.check_with_allreduce(net, comm=levels["pairs"])))
            optimizer.step()
    agree.equal(equal, ["nothing was raised"] * 4, "the ranks of a group stay equal")
    num_groups = (size + 1) // 2
    agree.equal((update.num_clients, update.num_integrations), (num_groups, 4))
    if kind == "easgd":
        agree.equal(update.alpha, 0.5 / num_groups)
    if rank % 2:
        agree.equal((update.num_sends, update.bytes_sent, update.bytes_received), (0, 0, 0), "not a client")
    else:
        agree(update.num_sends > 0 and update.bytes_received > 0, "a client")
    mpi.barrier()
    update.pull()
    mpinn.check_with_allreduce(net)  # any rank may fetch


def test_the_sharding_group_as_data_parallel_group_changes_nothing(agree):
    update = ps.EASGDUpdate(make_net(), dataparallel_communicator=0, update_frequency=1, init_delay=0)
    update.update()
    update.update()
    update.finish()
    agree.equal((update.num_clients, update.num_sends), (mpi.size(), 1))


def test_sends_in_the_timeline_have_the_staleness_of_the_update(agree, tmp_path):
    """Also with prefetch, where a gradient belongs to the values of an earlier receive than the last one."""
    folder = mpi.broadcast_object(str(tmp_path))
    net = make_net()
    update = ps.DownpourUpdate(net, lr=LR, update_frequency=2, init_delay=0, prefetch=1)
    update.start()
    ages = []
    with mpi.timeline.start(folder):
        for step in range(7):
            set_gradients(net, step)
            step_in_turn(update)
            ages.append(update.staleness.last)
    mpi.barrier()
    own = read_folder(Path(folder))[mpi.rank()]
    calls = [each for each in own.events if each.get("cat") == SERVER_CALL]
    sent = [each["args"].get("staleness") for each in calls if each["name"] == "send"]
    agree.equal(sent[3:], ages[3:], f"{sent}, {ages}")
    agree(max(sent[3:]) > 0 or mpi.size() == 1, str(sent))
    agree({each["args"].get("label") for each in calls if each["name"] == "receive"} == {"prefetch"}, str(calls))


# --- bounded staleness


@pytest.mark.parametrize("bound", [0, 2])
def test_ranks_stay_within_the_bound(agree, bound):
    rank, leads = mpi.rank(), []
    with ps.Clock(bound) as clock:
        for _ in range(12):
            clock.wait()
            rounds = [value for value in clock.read() if value is not None]
            leads.append(clock.value - min(rounds, default=clock.value))
            if rank == 0:
                torch.randn(150, 150) @ torch.randn(150, 150)  # the slow one
            clock.advance()
    agree(max(leads) <= bound, f"leads {leads}")
    mpi.barrier()
    agree.equal(clock.read(), [None] * mpi.size(), "all have finished")


def test_no_rank_waits_for_a_finished_one(agree):
    rank = mpi.rank()
    clock = ps.Clock(1, participates=rank != mpi.size() - 1 or mpi.size() == 1)
    if rank == 0:
        clock.finish()
        clock.finish()
    else:
        for _ in range(10):
            clock.wait()
            if not clock.is_finished:
                clock.advance()
        clock.finish()
    mpi.barrier()
    agree.equal(clock.read(), [None] * mpi.size())
    agree("advance() on a clock that this rank has finished" in refusal(clock.advance))


def test_no_rank_waits_for_one_whose_last_send_fails(agree):
    net = make_net()
    set_gradients(net, 0)
    options = {"send_frequency": 2, "update_frequency": 1, "init_delay": 0, "max_staleness": 0}
    update = ps.DownpourUpdate(net, local_update=lambda gradient: 1 / 0, **options)
    update.update()
    found = refusal(update.finish)
    mpi.barrier()
    agree(found.startswith("ZeroDivisionError"), found)
    agree.equal(update.clock.read(), [None] * mpi.size())


def test_an_unknown_rule_is_refused_at_the_start(agree):
    update = ps.DownpourUpdate(make_net(), rule="nonsense")
    found = refusal(update.start)
    update.free()
    agree("DownpourUpdate: unknown rule 'nonsense'" in found, found)


def test_a_send_that_is_refused_has_no_staleness(agree):
    class Wrong(Recorder):
        def send(self, integrated):
            self.begin_send("nonsense", self.servers.outgoing)

    update = Wrong(make_net(), update_frequency=1, init_delay=0)
    found = refusal(lambda: update.update(1))
    update.free()
    agree("unknown rule 'nonsense'" in found, found)
    agree.equal(update.staleness.count, 0)
    agree("its servers have been freed" in refusal(update.pull), "pull() after free()")


def test_a_clock_finishes_after_an_exception(agree):
    clock = ps.Clock(0)
    with pytest.raises(KeyError), clock:
        raise KeyError
    mpi.barrier()
    agree.equal(clock.read(), [None] * mpi.size())


@pytest.mark.min_ranks(2)
def test_a_stalled_wait_names_the_slowest_rank(agree, monkeypatch, capfd):
    running = runtime.current()
    config = dataclasses.replace(running.config, stall_warning_seconds=0.05, stall_abort_seconds=0.3)
    monkeypatch.setattr(running, "config", config)
    clock = ps.Clock(1)
    found = ""
    if mpi.rank() != 0:
        for _ in range(3):
            clock.advance()
        found = refusal(clock.wait)
    mpi.barrier()
    if mpi.rank() != 0:
        agree(found.startswith(StallError.__name__), found)
        agree("has completed 3 rounds and waited" in found and "for rank 0 at round 0" in found, found)
        agree("for rank 0" in capfd.readouterr().err, "a warning before")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_update_with_bounded_staleness(agree, prefetch):
    """Ranks take different numbers of steps; no rank waits for one that has finished."""
    net = make_net()
    leads = []
    update = ps.EASGDUpdate(net, update_frequency=2, init_delay=0, prefetch=prefetch, max_staleness=1)
    with update:
        for step in range(10 + 4 * mpi.rank()):
            set_gradients(net, step)
            if update.update():
                values = [value for value in update.clock.read() if value is not None]
                leads.append(update.clock.value - min(values))
    agree(max(leads) <= 2, f"one round more than at the time of the fetch: {leads}")
    agree.equal(update.clock.value, update.num_integrations)
    agree({"num_waits", "waited_seconds"} <= set(update.metrics()))
