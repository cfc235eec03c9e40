"""To a user of simulated workers: results, orders and times follow from the arguments, failures included."""

from __future__ import annotations

import doctest
import heapq
import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import torchmpi as mpi
import torchmpi.parameterserver as ps
from torchmpi.errors import AlreadyStartedError, ArgumentError, BackendUnavailableError, NotStartedError, TorchMPIError
from torchmpi.parameterserver.runs.observed_run import SEND, STEP
from torchmpi.parameterserver.simulation import simulated_network
from torchmpi.session import runtime

FAST = ps.SimulatedNetwork(latency=1e-9, bandwidth=1e15)


def test_docstring_examples():
    assert doctest.testmod(simulated_network).failed == 0


def training(update_class=ps.DownpourUpdate, steps: int = 12, **options):
    """A function that trains a line on its own data, and returns the weights of the servers."""

    def train() -> list[float]:
        torch.manual_seed(100 + mpi.rank())
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        update = update_class(net, init_delay=0, **{"update_frequency": 1, **options})
        inputs = torch.randn(16, 3)
        update.start()
        for _ in range(steps):
            optimizer.zero_grad()
            (net(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            update.update()
            optimizer.step()
        update.finish()
        mpi.barrier()
        update.pull()
        return torch.cat([each.detach().flatten() for each in net.parameters()]).tolist()

    return train


def test_one_worker_takes_the_steps_of_sgd():
    (weights,) = ps.simulate(training(lr=0.05), 1).results
    torch.manual_seed(100)
    net = nn.Linear(3, 1)
    inputs = torch.randn(16, 3)
    for _ in range(12):
        gradients = torch.autograd.grad(
            (net(inputs) - inputs.sum(1, keepdim=True)).square().mean(), list(net.parameters())
        )
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.sub_(0.05 * gradient)
    assert weights == pytest.approx(
        torch.cat([each.detach().flatten() for each in net.parameters()]).tolist(), abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update_class", "options"),
    [
        (ps.DownpourUpdate, {"lr": 0.01}),
        (ps.EASGDUpdate, {"prefetch": 1}),
        (ps.DownpourUpdate, {"rule": ps.adam(0.01)}),
    ],
)
def test_equal_arguments_give_equal_bits(update_class, options):
    train = training(update_class, **options)

    def run(seed: int) -> ps.SimulatedRun:
        return ps.simulate(train, 5, compute=lambda worker, step, random: random.lognormal(), seed=seed)

    first, second, other = run(1), run(1), run(2)
    assert first.results == second.results
    assert first.results != other.results
    for name, column in first.record.columns.items():
        np.testing.assert_array_equal(column, second.record.columns[name])
    assert all(result == first.results[0] for result in first.results), "all have the values of the servers"


ALGORITHMS = {
    ps.SSPUpdate: {"lr": 0.01, "staleness": 1},
    ps.DCASGDUpdate: {"lr": 0.01},
    ps.FedBuffUpdate: {"size": 2},
    ps.SGPUpdate: {},
    ps.ADPSGDUpdate: {},
}


@pytest.mark.slow
@pytest.mark.parametrize("update_class", ALGORITHMS)
def test_algorithms_run_unchanged(update_class):
    results = ps.simulate(
        training(update_class, steps=30, **ALGORITHMS[update_class]),
        4,
        compute=lambda worker, step, random: random.random(),
    ).results
    assert all(result == results[0] for result in results)
    assert max(abs(weight - 1) for weight in results[0][:3]) < 0.9, "it has learned something of the sum"


@pytest.mark.slow
def test_push_sum_of_a_worker_that_is_far_ahead():
    """Regression: it gave away all of its weight, and its steps were divided by that."""
    train = training(ps.SGPUpdate, steps=80)
    results = ps.simulate(train, 4, compute=lambda worker, step, random: 0.1 if worker else 0.03).results
    assert max(abs(weight - 1) for weight in results[0][:3]) < 0.3, results[0]


def staleness_by_listing(num_workers: int, steps: int) -> dict[int, list[int]]:
    """Staleness of the sends of workers whose steps take 1, 1.5, 2, ... seconds, from a list of all updates."""
    log: list[int] = []
    fetched: dict[int, int | None] = dict.fromkeys(range(num_workers))
    found: dict[int, list[int]] = {worker: [] for worker in range(num_workers)}
    events = [(1 + worker / 2 + worker / 1000, worker, 0) for worker in range(num_workers)]
    while events:
        time, worker, step = heapq.heappop(events)
        before = fetched[worker]  # of the values of the gradient, which the step replaces
        if step > 0:
            fetched[worker] = len(log)
        if before is not None:
            found[worker].append(sum(sender != worker for sender in log[before:]))
        log.append(worker)
        if step + 1 < steps:
            heapq.heappush(events, (time + 1 + worker / 2 + worker / 1000, worker, step + 1))
    return found


def test_staleness_follows_from_the_times():
    record = ps.simulate(
        training(lr=0.01, steps=9), 4, compute=lambda worker, step, _: 1 + worker / 2 + worker / 1000, network=FAST
    ).record
    for worker, ages in staleness_by_listing(4, 9).items():
        assert record.updates["staleness"][record.updates["rank"] == worker].tolist() == ages
    steps = record.rows(STEP, 2)
    assert steps["begin"].tolist() == pytest.approx([2.002 * (step + 1) for step in range(9)], abs=1e-5)


@pytest.mark.slow
def test_a_recorded_run_gives_the_times():
    first = ps.simulate(training(lr=0.01), 3, compute=lambda worker, step, random: random.lognormal(), network=FAST)
    second = ps.simulate(training(lr=0.01), 3, compute=first.record, network=FAST)
    for rank in range(3):
        own = [run.record.compute_times(rank) for run in (first, second)]
        np.testing.assert_allclose(own[0][1:], own[1][1:], atol=1e-6)
    more = ps.simulate(training(lr=0.01, steps=30), 7, compute=first.record)
    assert len(more.record.compute_times(6)) == 29
    fitted = ps.SimulatedNetwork.of(
        ps.simulate(training(lr=0.01), 2, network=ps.SimulatedNetwork(latency=0.25, bandwidth=100.0)).record
    )
    assert fitted.latency == pytest.approx(0.25 + 16 / 100 / 2), "all calls have 16 bytes"


def test_a_slow_worker_holds_up_others_by_the_limit_of_staleness():
    def run(limit: float) -> ps.SimulatedRun:
        slow = lambda worker, step, _: 1.0 + 4.0 * (worker == 0)  # noqa: E731
        return ps.simulate(training(lr=0.01, steps=10, max_staleness=limit), 3, compute=slow)

    free, held = run(math.inf), run(2)
    waits = [each.record.times(rank).waiting for each in (free, held) for rank in (0, 1)]
    assert max(waits[:3]) < 0.01 and waits[3] > 20
    begins = [[each.rows(STEP, rank)["end"] for rank in range(3)] for each in (free.record, held.record)]
    ahead = [max(np.searchsorted(of_one, of_slow[step]) - step for step in range(10)) for of_slow, of_one, _ in begins]
    assert ahead[0] > 4 and ahead[1] <= 4, "rounds ahead of the slow worker"


def test_failed_workers_are_not_waited_for():
    run = ps.simulate(training(lr=0.01, max_staleness=1, steps=6), 1, failures={0: 3.5}, compute=1.0)
    assert (run.results, run.failed) == ([None], (0,))

    def train() -> float:
        update = ps.DownpourUpdate(net := nn.Linear(2, 1), lr=0.01, update_frequency=1, init_delay=0, max_staleness=1)
        for _ in range(6):
            net(torch.ones(1, 2)).sum().backward()
            update.update()
        update.finish()
        return update.clock.waited_seconds

    run = ps.simulate(train, 3, compute=1.0, failures={1: 3.5})
    assert (run.results[1], run.failed) == (None, (1,)) and run.results[0] is not None
    assert run.seconds == pytest.approx(6.0, abs=0.01)
    assert run.record.rows(STEP, 1)["begin"].tolist() == pytest.approx([1, 2, 3], abs=0.01)


def test_a_collective_after_a_failure_names_the_failed_workers():
    def train() -> None:
        training(lr=0.01, steps=6)()
        mpi.barrier()

    with pytest.raises(TorchMPIError, match=r"wait for each other: 2 for barrier .* make no call: 1\. With failures="):
        ps.simulate(train, 3, compute=1.0, failures={1: 3.5})


def test_workers_that_join_begin_with_the_values_of_that_time():
    def train() -> tuple[float, float]:
        net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(net.weight)
        update = ps.DownpourUpdate(net, rule="add", local_update=torch.ones_like, update_frequency=1, init_delay=0)
        update.start()
        first = net.weight.item()
        for _ in range(4):
            net.weight.grad = torch.zeros_like(net.weight)
            update.update()
        update.finish()
        return first, net.weight.item()

    run = ps.simulate(train, 3, compute=1.0, joins={2: 2.5}, network=FAST)
    assert [first for first, _ in run.results] == [0, 0, 4], "two workers have taken two steps"
    assert run.record.rows(STEP, 2)["begin"].tolist() == pytest.approx([3.5, 4.5, 5.5, 6.5], abs=0.01)


def test_collectives_and_servers():
    def work() -> tuple:
        rank, size = mpi.rank(), mpi.size()
        server = ps.init(torch.zeros(5, dtype=torch.float64))
        handles = [ps.send(server, torch.full((5,), rank + 1.0, dtype=torch.float64)) for _ in range(2)]
        asked = 0
        while not all(handle.done() for handle in handles):
            asked += 1
        for handle in handles:
            handle.wait()
        mpi.barrier()
        values = ps.receive(server).wait().tolist()
        ps.free(server)
        gathered = mpi.allgather_object({"rank": rank})
        gathered[0]["rank"] = "own"
        parts = mpi.allgather(torch.tensor([rank]))
        parts += 1
        root = mpi.gather(torch.tensor([rank]), 1)
        return values, mpi.allreduce(rank), parts.tolist(), root is None, asked > 0, gathered[1], size

    results = ps.simulate(work, 3).results
    assert results == [([12.0] * 5, 3, [1, 2, 3], rank != 1, True, {"rank": 1}, 3) for rank in range(3)]


def test_workers_have_generators_of_their_own():
    def draw() -> list[float]:
        drawn = []
        for _ in range(3):
            drawn += [torch.rand(1).item(), random.random(), np.random.rand()]
            mpi.barrier()
        return drawn

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    few, many = ps.simulate(draw, 2, seed=3).results, ps.simulate(draw, 4, seed=3).results
    assert few == many[:2] and few[0][1] != few[1][1]
    assert few[0][0] == few[1][0], "that of torch has one seed in all processes"
    assert torch.equal(before[0], torch.get_rng_state()) and before[1:] == (random.getstate(), np.random.get_state()[2])


def test_errors():
    def forgets_a_barrier() -> None:
        if mpi.rank():
            mpi.barrier()

    def fails() -> None:
        mpi.barrier()
        if mpi.rank() == 1:
            raise ZeroDivisionError("in worker 1")
        mpi.barrier()

    with pytest.raises(TorchMPIError, match="2 functions wait for each other: 2 for barrier of communicator world"):
        ps.simulate(forgets_a_barrier, 3)
    with pytest.raises(ZeroDivisionError, match="in worker 1"):
        ps.simulate(fails, 3)
    with pytest.raises(AlreadyStartedError, match=r"mpi\.stop\(\)"):
        ps.simulate(lambda: ps.simulate(mpi.barrier, 2), 1)
    with pytest.raises(BackendUnavailableError, match="no alltoall"):
        ps.simulate(lambda: mpi.alltoall(torch.zeros(2)), 2)
    wrong = [{"num_workers": 0}, {"failures": {4: 1.0}}, {"joins": {0: -1.0}}, {"compute": math.nan}]
    for arguments in wrong:
        with pytest.raises(ArgumentError, match="simulate: "):
            ps.simulate(training(lr=0.1), **{"num_workers": 2, **arguments})
    with pytest.raises(ArgumentError, match="joins later, but with a finite max_staleness"):
        ps.simulate(training(lr=0.1, max_staleness=1), 2, joins={1: 3.0})
    with pytest.raises(ArgumentError, match="less than two steps"):
        ps.simulate(mpi.barrier, 2, compute=ps.simulate(mpi.barrier, 2).record)
    with pytest.raises(ArgumentError, match="latency"):
        ps.SimulatedNetwork(latency=-1.0)
    assert runtime.running is None
    with pytest.raises(NotStartedError):
        mpi.rank()


def test_record_of_a_simulation(tmp_path):
    run = ps.simulate(training(lr=0.01), 4, record=tmp_path / "run.npz", norms=True)
    record = ps.read_run(tmp_path / "run.npz")
    assert (record.about["simulated"], record.num_ranks, len(record)) == (True, 4, len(run.record))
    sends = record.rows(SEND)
    assert sends["version"].tolist() == list(range(1 + 4 * 12)), "each rule once, in order"
    assert sorted(sends["rank"].tolist()) == sorted([0, *itertools.chain(*[range(4)] * 12)])
    assert not np.isnan(sends["norm"]).any()
    assert "4 simulated workers" in record.text()


def test_a_recorded_order_is_repeated_whatever_the_times(tmp_path):
    path = tmp_path / "run.npz"

    def times(worker, step, random):
        return random.lognormal()

    def run(train=None, **options) -> ps.SimulatedRun:
        train = train or training(lr=0.05, max_staleness=2, prefetch=1)
        return ps.simulate(train, 3, compute=times, **options)

    first = run(record=path, ordered=True)
    other = run(seed=1)
    again = run(seed=1, replay=path, network=ps.SimulatedNetwork(latency=0.3))
    assert again.results == first.results != other.results
    calls = [each.record.columns["position"] >= 0 for each in (first, again)]
    orders = [each.record.columns["position"][chosen] for each, chosen in zip((first, again), calls, strict=True)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(len(orders[0])))
    refused = {
        "row [0-9]+, column 'checksum': .* Nothing of this send has been applied": training(lr=0.06, max_staleness=2),
        "row [0-9]+, column 'rule': 'scaled_add' was recorded, and the program has 'adam'": training(
            rule=ps.adam(0.1), max_staleness=2, prefetch=1
        ),
        "the program has not made the call of row [0-9]+, a (send|receive) of rank": training(
            lr=0.05, max_staleness=2, prefetch=1, steps=11
        ),
        "no further call of this rank to server|has not made the call of": training(
            lr=0.05, max_staleness=2, prefetch=1, steps=13
        ),
        "row [0-9]+ and [0-9]+ others of rank 0 have not been repeated|has not made the call": mpi.barrier,
    }
    for problem, train in refused.items():
        with pytest.raises(ArgumentError, match=problem) as error:
            run(train, replay=path)
        assert "Repeat the run with the same program" in str(error.value)
    with pytest.raises(ArgumentError, match="field 'ranks' is 3, and there are 2 now"):
        ps.simulate(training(lr=0.05), 2, replay=path)
    run(record=path)
    with pytest.raises(ArgumentError, match="column 'position' has no order of calls"):
        run(replay=path)
