"""Training through servers: lists of tensors, schedules, Downpour, elastic averaging, local SGD, DiLoCo, clocks.

Where the order of calls decides the result, ranks take turns, so that a readable twin can foretell it.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps
from torchmpi import runtime
from torchmpi.errors import ArgumentError, ReplicaError, StallError
from torchmpi.parameterserver.tensors import _book

pytestmark = pytest.mark.usefixtures("world")
LR = 0.125  # products with it are exact, so that results can be compared bit for bit


@pytest.fixture(scope="module")
def levels(world) -> dict[str, int]:
    """Two more levels: every rank on its own, and ranks in pairs."""
    found = {}
    for name, key in (("alone", mpi.rank()), ("pairs", mpi.rank() // 2)):
        with mpi.use(0):
            found[name] = mpi.push_communicator(f"{name} {key}")
        mpi.set_communicator(0)
    return found


@pytest.fixture(autouse=True)
def no_servers_left() -> Iterator[None]:
    yield
    ps.free_all()


def step_in_turn(update: ps.Update) -> None:
    """Each rank takes its step, and what it sends and fetches arrives, while the others wait."""
    for turn in range(mpi.size()):
        if mpi.rank() == turn:
            update.update()
            update._settle_send()
            ps.sync_handles(update.servers.fetching)
        mpi.barrier()


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def set_gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randint(-8, 9, parameter.shape, generator=generator).float()


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# --- lists of tensors ------------------------------------------------------------------------------------


def test_lists_of_tensors(agree):
    rank, size = mpi.rank(), mpi.size()
    ones = torch.ones(4, dtype=torch.int64)
    tensors = [torch.full((3, 2), float(rank)), torch.full((5,), rank), torch.full((), 0.5), ones.clone()]
    before = [tensor.clone() for tensor in tensors]
    ps.init_tensors(tensors)
    handles = ps.prefetch_tensors(tensors)
    agree.equal(len(handles), 2, "one server per dtype")
    agree.equal(ps.sync_handles(handles), [], "nothing left to wait for")
    seen = []
    ps.integrate_tensors(tensors, lambda fetched, tensor: seen.append((fetched.clone(), tensor)))
    expected = [torch.zeros(3, 2), torch.zeros(5, dtype=torch.int64), torch.full((), 0.5), ones]
    for (fetched, tensor), value, own in zip(seen, expected, tensors, strict=True):
        agree.equal(fetched, value, "the values of rank 0")
        agree(tensor is own, "the tensors themselves are handed out")
    mpi.barrier()
    updates = [torch.ones_like(tensor) for tensor in tensors]
    handles = ps.send_tensors(tensors, updates, local_update=lambda update: update * 2)
    for update in updates:
        update.fill_(77)  # they were copied
    ps.sync_handles(handles)
    mpi.barrier()
    ps.prefetch_tensors(tensors)
    ps.integrate_tensors(tensors, lambda fetched, tensor: tensor.copy_(fetched))
    for tensor, value, old in zip(tensors, expected, before, strict=True):
        agree.equal(tensor, value + 2 * size, f"was {old}")
    ps.free_tensors(tensors)


def test_the_first_values_can_be_chosen(agree):
    """The original's psInitFun, which its own default shadowed."""
    tensors = [torch.full((6,), mpi.rank() + 1.0), torch.full((2,), mpi.rank() + 1.0)]
    ps.init_tensors(tensors, server_init=lambda server, values: ps.send(server, values, "max").wait())
    ps.prefetch_tensors(tensors)
    ps.integrate_tensors(tensors, lambda fetched, tensor: tensor.copy_(fetched))
    for tensor in tensors:
        agree.equal(tensor, torch.full_like(tensor, float(mpi.size())), "the largest of all ranks")


def test_the_place_of_fetched_values_can_be_chosen(agree):
    made = []

    def allocate(numel, dtype):
        made.append(torch.zeros(numel, dtype=dtype))
        return made[-1]

    tensors = [torch.ones(3), torch.ones(4)]
    ps.init_tensors(tensors, prefetch_allocator=allocate)
    ps.prefetch_tensors(tensors)
    addresses = []
    ps.integrate_tensors(tensors, lambda fetched, tensor: addresses.append(fetched.data_ptr()))
    agree.equal(addresses, [made[0].data_ptr(), made[0][3:].data_ptr()])


def test_nothing_for_a_tensor_counts_as_zeros(agree):
    tensors = [torch.zeros(3), torch.zeros(2)]
    ps.init_tensors(tensors)
    ps.sync_handles(ps.send_tensors(tensors, [None, torch.ones(2)]))
    mpi.barrier()
    ps.prefetch_tensors(tensors)
    ps.integrate_tensors(tensors, lambda fetched, tensor: tensor.copy_(fetched))
    agree.equal(torch.cat(tensors), torch.tensor([0.0] * 3 + [float(mpi.size())] * 2))


def test_wrong_lists_are_refused(agree):
    tensors, others = [torch.zeros(3), torch.zeros(2)], [torch.zeros(1)]
    ps.init_tensors(tensors)
    ps.init_tensors(others)
    for action, message in (
        (lambda: ps.init_tensors([torch.zeros(1), tensors[0]]), "tensor 1 of the list has a server already"),
        (lambda: ps.prefetch_tensors([torch.zeros(1)]), "tensor 0 of the list has no server. Call init_tensors()"),
        (lambda: ps.prefetch_tensors(tensors[:1]), "in another list"),
        (lambda: ps.integrate_tensors(tensors[::-1], print), "in another list"),
        (lambda: ps.integrate_tensors(tensors, print), "nothing has been fetched. Call prefetch_tensors()"),
        (lambda: ps.prefetch_tensors(tensors + others), "in another list"),
        (lambda: ps.prefetch_tensors([]), "found an empty one"),
        (lambda: ps.prefetch_tensors([1.0]), "found a float in it"),
        (lambda: ps.init_tensors([others[0], others[0]]), "twice"),
        (lambda: ps.send_tensors(tensors, [torch.zeros(3)]), "the updates need the shapes"),
        (lambda: ps.send_tensors(tensors, [torch.zeros(2), torch.zeros(3)]), "the updates need the shapes"),
        (lambda: ps.send_tensors(tensors, tensors, "nonsense"), "unknown rule 'nonsense'"),
    ):
        found = refusal(action)
        agree("ArgumentError" in found and message in found, f"expected {message!r}: {found}")
    ps.free_tensors(tensors)
    agree("has no server" in refusal(lambda: ps.prefetch_tensors(tensors)), "after free_tensors")
    ps.init_tensors(tensors)  # may be done again


def refuse_nans(values, sent):
    if sent.isnan().any():
        raise ValueError("nans")
    values.add_(sent)


def test_a_failed_send_does_not_stand_in_the_way_of_the_next(agree):
    ps.register_rule("refuse_nans", refuse_nans)
    tensors = [torch.zeros(4)]
    ps.init_tensors(tensors)
    handles = ps.send_tensors(tensors, [torch.full((4,), math.nan)], "refuse_nans")
    seen = refusal(lambda: ps.sync_handles(handles))
    found = refusal(lambda: ps.sync_handles(ps.send_tensors(tensors, [torch.ones(4)])))
    ps.send_tensors(tensors, [torch.full((4,), math.nan)], "refuse_nans")  # nobody has waited for this one
    told = refusal(lambda: ps.send_tensors(tensors, [torch.ones(4)]))
    mpi.barrier()
    ps.prefetch_tensors(tensors)
    ps.integrate_tensors(tensors, lambda fetched, tensor: tensor.copy_(fetched))
    mpi.barrier()
    failing = ps.send_tensors(tensors, [torch.full((4,), math.nan)], "refuse_nans")
    freed = refusal(lambda: ps.free_tensors(tensors))
    last = refusal(lambda: ps.sync_handles(failing))
    agree.equal([seen, found, told, freed, last], [*["ValueError: nans", "nothing was raised"] * 2, "ValueError: nans"])
    agree.equal(tensors[0], torch.full((4,), float(mpi.size())))


def test_a_rule_that_one_dtype_refuses_is_sent_to_none(agree):
    tensors = [torch.zeros(3), torch.zeros(2, dtype=torch.int64)]
    ps.init_tensors(tensors)
    found = refusal(lambda: ps.send_tensors(tensors, [torch.ones(3), None], ps.scaled_add(1.0)))
    mpi.barrier()
    ps.prefetch_tensors(tensors)
    ps.integrate_tensors(tensors, lambda fetched, tensor: tensor.copy_(fetched))
    agree(f"rank {mpi.rank()}: parameterserver.send: rule='scaled_add' is not defined for int64" in found, found)
    agree.equal(tensors[0], torch.zeros(3), "nothing was sent")


def test_lists_that_differ_between_ranks_are_refused(agree):
    tensors = [torch.zeros(3 + (mpi.rank() == 1))]
    found = refusal(lambda: ps.init_tensors(tensors))
    agree(found.startswith(ReplicaError.__name__) if mpi.size() > 1 else "nothing" in found, found)


def test_the_book_keeps_no_tensor_alive(agree):
    gc.collect()
    before = len(_book())
    tensors = [torch.zeros(3), nn.Parameter(torch.zeros(2))]
    ps.init_tensors(tensors)
    ps.sync_handles(ps.prefetch_tensors(tensors) + ps.send_tensors(tensors, tensors))
    ps.integrate_tensors(tensors, lambda fetched, tensor: None)
    agree.equal(len(_book()), before + 2)
    del tensors
    gc.collect()
    agree.equal(len(_book()), before, "entries of tensors that are no more")


# --- schedules -------------------------------------------------------------------------------------------


class Recorder(ps.Update):
    """Writes down what is called when."""

    def __init__(self, network, **options):
        super().__init__(network, **options)
        self.calls = []

    def _fetch(self):
        self.calls.append(("fetch", self.step))
        super()._fetch()

    def _integrate(self):
        self.calls.append(("integrate", self.step))
        self._fetched()

    def _send(self, integrated):
        self.calls.append(("send", self.step, integrated))


@pytest.mark.parametrize("prefetch", [0, 1, 3, 4])
@pytest.mark.parametrize("init_delay", [0, 5])
def test_what_is_called_when(agree, prefetch, init_delay):
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
        # Values for the next integration are asked for after those for this one have been used.
        if prefetch and step + prefetch > init_delay and (step + prefetch - init_delay) % 4 == 0:
            expected.append(("fetch", step))
    agree.equal(update.calls, expected)
    agree.equal((update.step, update.num_integrations), (20, len(integrations)))


def test_steps_can_be_given(agree):
    update = Recorder(make_net(), update_frequency=10, init_delay=100)
    changed = [step for step in range(90, 131) if update.update(step)]
    agree.equal(changed, [110, 120, 130])
    agree.equal(update.step, 131)


def test_start_before_its_time(agree):
    update = Recorder(make_net(), init_delay=10)
    update.start()
    agree("has started already" in refusal(update.start))
    agree.equal([server.numel for server in update.servers.servers], [6 * 8 + 8 + 8 * 3 + 3])
    agree.equal(update.servers.servers[0].name, "parameters 0")


def test_different_options_are_refused_everywhere(agree):
    update = ps.EASGDUpdate(make_net(), update_frequency=5 + (mpi.rank() == mpi.size() - 1), init_delay=0)
    found = refusal(update.update)
    if mpi.size() > 1:
        agree("update_frequency is 5 on rank 0 and 6 on rank" in found, found)


def test_a_changed_network_is_refused(agree):
    net = make_net()
    update = ps.EASGDUpdate(net, update_frequency=2, init_delay=0)
    update.update()
    net[0].bias.requires_grad_(False)
    update.update()
    found = refusal(update.update)
    agree("other trainable parameters than when this EASGDUpdate started" in found, found)


# --- Downpour --------------------------------------------------------------------------------------------


def quadratic_step(net: nn.Module, inputs: torch.Tensor) -> None:
    net.zero_grad()
    net(inputs).square().sum().mul(0.01).backward()


@pytest.mark.parametrize(
    "options",
    [{"lr": LR}, {"local_update": lambda gradient: gradient.mul_(-LR)}, {"rule": ps.sgd(LR)}],
    ids=["lr", "local_update", "rule"],
)
@pytest.mark.parametrize("frequency", [1, 3])
def test_downpour_of_one_rank_is_sgd_bit_for_bit(agree, levels, options, frequency):
    """On a level where every rank is alone, so that there is a server in each of several groups."""
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
    """Whatever the order, every gradient of every rank arrives once; those that are left over at the end too."""
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


def test_staleness_is_what_others_did_meanwhile(agree):
    net = make_net()
    update = ps.DownpourUpdate(net, lr=LR, update_frequency=2, init_delay=0)
    update.start()
    seen = []
    for step in range(9):
        set_gradients(net, step)
        step_in_turn(update)
        seen.append(update.staleness.last)
    # At even steps a rank has just fetched; at odd ones every other rank has sent once since.
    agree(all(math.isnan(age) for age in seen[:2]), f"nothing was integrated before step 2: {seen}")
    agree.equal(seen[2:], [0.0, mpi.size() - 1.0] * 3 + [0.0])
    agree.equal((update.staleness.count, update.staleness.max), (7, mpi.size() - 1.0))
    agree.equal(update.metrics()["staleness_mean"], 3 * (mpi.size() - 1) / 7)


# --- elastic averaging -----------------------------------------------------------------------------------


def targets() -> list[torch.Tensor]:
    """Where each rank is drawn to: its loss is half the squared distance."""
    return [torch.full((7,), float(rank + 1)) for rank in range(mpi.size())]


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.arange(7.0))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_easgd_against_a_readable_twin(agree, prefetch):
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
        # The optimizer keeps the network at the point ahead.
        agree.close(point.at.detach(), xs[mpi.rank()] + delta * vs[mpi.rank()], f"step {step}")
    update.finish()
    mpi.barrier()
    update.pull()
    agree.close(point.at.detach(), center, "the center")


def test_eamsgd_wants_all_parameters_in_its_optimizer(agree):
    net = make_net()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9, nesterov=True)
    update = ps.EAMSGDUpdate(net, optimizer, update_frequency=1, init_delay=0)
    update.update()
    found = refusal(update.update)
    agree("does not train all parameters" in found, found)


def test_eamsgd_with_a_rate_of_zero(agree):
    """Where some parameters have a momentum and others have never had a gradient."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    update = ps.EAMSGDUpdate(net, optimizer, update_frequency=1, init_delay=0)
    for _ in range(3):
        net[0].bias.grad = torch.ones(8)
        update.update()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.0
    agree.equal(update.num_integrations, 2)


# --- data-parallel groups --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["downpour", "easgd"])
def test_only_the_first_of_a_group_talks_to_the_server(agree, levels, kind):
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
        agree.equal((update.num_sends, update.bytes_sent, update.bytes_received), (0, 0, 0), "this rank is no client")
    else:
        agree(update.num_sends > 0 and update.bytes_received > 0, "this rank is a client")
    mpi.barrier()
    update.pull()
    mpinn.check_with_allreduce(net)  # everybody may fetch


def test_the_sharding_group_as_data_parallel_group_changes_nothing(agree):
    update = ps.EASGDUpdate(make_net(), dataparallel_communicator=0, update_frequency=1, init_delay=0)
    update.update()
    update.update()
    update.finish()
    agree.equal((update.num_clients, update.num_sends), (mpi.size(), 1))


# --- bounded staleness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 2])
def test_nobody_runs_further_ahead_than_allowed(agree, bound):
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


def test_a_finished_rank_holds_nobody_back(agree):
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


def test_a_rank_that_cannot_send_its_last_gradients_holds_nobody_back(agree):
    net = make_net()
    set_gradients(net, 0)
    options = {"send_frequency": 2, "update_frequency": 1, "init_delay": 0, "max_staleness": 0}
    update = ps.DownpourUpdate(net, local_update=lambda gradient: 1 / 0, **options)
    update.update()
    found = refusal(update.finish)
    mpi.barrier()
    agree(found.startswith("ZeroDivisionError"), found)
    agree.equal(update.clock.read(), [None] * mpi.size())


def test_a_clock_ends_with_an_exception_too(agree):
    clock = ps.Clock(0)
    with pytest.raises(KeyError), clock:
        raise KeyError
    mpi.barrier()
    agree.equal(clock.read(), [None] * mpi.size())


def test_waiting_in_vain_names_the_slowest(agree, monkeypatch, capfd):
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
        agree("has ended 3 rounds and waited" in found and "for rank 0, which has ended 0" in found, found)
        agree("for rank 0" in capfd.readouterr().err, "a warning before")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_update_with_bounded_staleness(agree, prefetch):
    """Ranks take different numbers of steps; whoever has finished holds nobody back."""
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


# --- local SGD and DiLoCo --------------------------------------------------------------------------------


def train(net: nn.Module, update, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + mpi.rank())
        quadratic_step(net, torch.randn(4, 6, generator=generator))
        optimizer.step()
        update.update()


def test_local_sgd_averages_at_its_steps(agree):
    net = make_net()
    update = ps.LocalSGDUpdate(net, update_frequency=3, init_delay=1)
    changed = []
    for step in range(9):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(float(10 * step + mpi.rank()))
        changed.append(update.update())
        value = 10 * step + ((mpi.size() - 1) / 2 if changed[-1] else mpi.rank())
        for parameter in net.parameters():
            agree.equal(parameter.detach(), torch.full_like(parameter, value), f"step {step}")
    agree.equal([step for step, was in enumerate(changed) if was], [3, 6])
    with torch.no_grad():
        net[0].bias.fill_(float(mpi.rank()))
    update.finish()  # two steps are left over
    agree.equal(net[0].bias.detach(), torch.full((8,), (mpi.size() - 1) / 2), "averaged a last time")
    num_bytes = 3 * sum(parameter.nbytes for parameter in net.parameters())
    agree.equal((update.num_integrations, update.bytes_sent, update.bytes_received), (3, num_bytes, num_bytes))


def test_local_sgd_every_step_is_data_parallel_training(agree):
    net, twin = make_net(), make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    train(net, ps.LocalSGDUpdate(net, update_frequency=1), optimizer, range(5))
    other = torch.optim.SGD(twin.parameters(), lr=LR)
    for step in range(5):
        generator = torch.Generator().manual_seed(1000 * step + mpi.rank())
        quadratic_step(twin, torch.randn(4, 6, generator=generator))
        mpinn.synchronize_gradients(twin)
        other.step()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        agree.close(ours.detach(), theirs.detach())
    mpinn.check_with_allreduce(net)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_diloco_is_torchs_sgd_on_the_average_way(agree, nesterov, momentum):
    net, twin = make_net(), make_net()
    update = ps.DiLoCoUpdate(net, update_frequency=3, outer_momentum=momentum, nesterov=nesterov)
    inner, other = torch.optim.SGD(net.parameters(), lr=LR), torch.optim.SGD(twin.parameters(), lr=LR)
    anchor = copy.deepcopy(twin)
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=momentum, nesterov=nesterov and momentum > 0)
    for step in range(9):
        train(net, update, inner, range(step, step + 1))
        generator = torch.Generator().manual_seed(1000 * step + mpi.rank())
        quadratic_step(twin, torch.randn(4, 6, generator=generator))
        other.step()
        if (step + 1) % 3 == 0:
            for held, own in zip(anchor.parameters(), twin.parameters(), strict=True):
                held.grad = mpi.allreduce((held - own).detach(), op="avg")
            outer.step()
            twin.load_state_dict(anchor.state_dict())
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            agree.close(ours.detach(), theirs.detach(), f"step {step}")
    mpinn.check_with_allreduce(net)


def test_diloco_without_outer_optimizer_is_local_sgd(agree):
    net, twin = make_net(), make_net()
    with ps.DiLoCoUpdate(net, update_frequency=4, outer_lr=1.0, outer_momentum=0.0) as update:
        train(net, update, torch.optim.SGD(net.parameters(), lr=LR), range(10))
    with ps.LocalSGDUpdate(twin, update_frequency=4) as other:
        train(twin, other, torch.optim.SGD(twin.parameters(), lr=LR), range(10))
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        agree.close(ours.detach(), theirs.detach())
    agree.equal((update.num_sends, update.bytes_sent), (other.num_sends, other.bytes_sent))


def test_diloco_begins_where_rank_0_is_after_the_delay(agree):
    net = make_net(seed=mpi.rank())
    update = ps.DiLoCoUpdate(net, update_frequency=2, init_delay=3, outer_lr=0.5, outer_momentum=0.0)
    values = [8.0 + mpi.rank() + step for step in range(5)]
    for value in values:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(value)
        update.update()
    anchor, mean = 8.0 + 2, 8.0 + (mpi.size() - 1) / 2 + 4
    for parameter in net.parameters():
        agree.close(parameter.detach(), torch.full_like(parameter, (anchor + mean) / 2))


def test_diloco_has_an_anchor_whatever_steps_it_is_given(agree):
    net = make_net()
    update = ps.DiLoCoUpdate(net, update_frequency=2, init_delay=2, outer_lr=0.5, outer_momentum=0.0)
    changed = []
    for step in range(3, 7):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(float(step))
        changed.append(update.update(step))
        if step == 5:
            agree.equal(net[0].bias.detach(), torch.full((8,), 4.0), "half the way from 3 to 5")
    agree.equal(changed, [False, False, True, False])


@pytest.mark.parametrize("make", [ps.LocalSGDUpdate, ps.DiLoCoUpdate])
def test_the_same_bits_in_every_run(agree, make):
    results = []
    for _ in range(2):
        net = make_net()
        with make(net, update_frequency=3) as update:
            train(net, update, torch.optim.SGD(net.parameters(), lr=LR), range(8))
        results.append([parameter.detach().clone() for parameter in net.parameters()])
    for first, second in zip(*results, strict=True):
        agree.equal(first, second)


def test_wrong_outer_options_are_refused(agree):
    for options in ({"outer_lr": 0.0}, {"outer_momentum": 1.0}):
        agree(ArgumentError.__name__ in refusal(lambda options=options: ps.DiLoCoUpdate(make_net(), **options)))
    agree("nothing to train" in refusal(lambda: ps.LocalSGDUpdate(nn.Tanh())))


# --- resuming --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ps.LocalSGDUpdate, ps.DiLoCoUpdate])
@pytest.mark.parametrize("init_delay", [0, 2])
def test_resumed_without_servers(agree, make, init_delay):
    settings = {"update_frequency": 4, "init_delay": init_delay}
    whole, first = make_net(), make_net()
    update = make(whole, **settings)
    train(whole, update, torch.optim.SGD(whole.parameters(), lr=LR), range(13))
    before = make(first, **settings)
    train(first, before, torch.optim.SGD(first.parameters(), lr=LR), range(7))
    state, second = before.state_dict(), make_net(seed=5)
    second.load_state_dict(first.state_dict())
    after = make(second, **settings)
    after.load_state_dict(state)
    train(second, after, torch.optim.SGD(second.parameters(), lr=LR), range(7, 13))
    for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        agree.equal(ours.detach(), theirs.detach())
    agree.equal(after.metrics(), pytest.approx(update.metrics(), nan_ok=True))


@pytest.mark.parametrize("stop_at", [5, 8])
def test_resumed_with_servers(agree, levels, stop_at):
    """In the middle of an accumulation, and of a fetch; each rank with a server of its own, so that nothing varies."""

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
    """The optimizer's state is on the server, and comes back with it."""

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
    agree.equal(after.state_dict()["step"], 5, "the state of what has only been loaded")
    after.start()
    ps.load(folder, comm=levels["alone"])
    go(second, after, range(5, 11))
    after.pull()
    for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        agree.equal(ours.detach(), theirs.detach())


def test_an_update_can_be_given_back(agree):
    """Its clock's server too; trainings in a loop would pile them up."""
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
