"""To a user of asynchronous SGD: each algorithm equals its sequential twin in plain torch, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers.updates_rig import no_servers_left  # noqa: F401, used by all tests
from torch import nn

import torchmpi as mpi
import torchmpi.parameterserver as ps
from torchmpi import errors

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]

LR = 0.2
START = torch.tensor([[1.0, -2.0, 3.0]])


def network() -> nn.Linear:
    net = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(START)
    return net


def target(rank: int) -> torch.Tensor:
    return torch.tensor([[0.5, 0.25, -1.0]]) * (rank + 1)


def in_turn(update: ps.Update, steps: int, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    """Take steps on the loss |w - target|^2 / 2, one rank after the other; return the own weights."""
    weight = update.network.weight
    update.start()
    for _ in range(steps):
        for turn in range(mpi.size()):
            if mpi.rank() == turn:
                weight.grad = (weight - target(turn)).detach()
                update.update()
                update.settle_send()
                if optimizer is not None:
                    optimizer.step()
            mpi.barrier()
    return weight.detach().clone()


def center(update: ps.Update) -> torch.Tensor:
    return mpi.broadcast_object(update.servers.servers and ps.receive(update.servers.servers[0]).wait().view(1, -1))


class Turn:
    """The servers of a twin: their values, and the staleness of each rank."""

    def __init__(self) -> None:
        self.value, self.sends = START.clone(), 0
        self.known: dict[int, int] = {}
        """Sends when the values of a rank were fetched, and its own since."""

    def staleness(self, rank: int) -> int:
        return self.sends - self.known.get(rank, self.sends)

    def fetch(self, rank: int) -> torch.Tensor:
        self.known[rank] = self.sends
        return self.value.clone()

    def sent(self, rank: int) -> None:
        self.sends += 1
        if rank in self.known:
            self.known[rank] += 1


def twin(steps: int, step: Callable[[Turn, int, torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `step(servers, rank, weights of the rank)`, which returns new weights; return the servers' and the own."""
    turn, own = Turn(), [START.clone() for _ in range(mpi.size())]
    for _ in range(steps):
        for rank in range(mpi.size()):
            own[rank] = step(turn, rank, own[rank])
    return turn.value, own[mpi.rank()]


def plain(turn: Turn, rank: int, own: torch.Tensor, divide: Callable[[int], float] = lambda tau: 1.0) -> torch.Tensor:
    turn.value -= LR / divide(turn.staleness(rank)) * (own - target(rank))
    turn.sent(rank)
    return turn.fetch(rank)


def test_asgd(agree):
    update = ps.ASGDUpdate(network(), lr=LR)
    own = in_turn(update, 5)
    value, expected = twin(5, plain)
    agree.close(own, expected)
    agree.close(center(update), value)
    agree.equal(update.staleness.max, float(mpi.size() - 1))


def test_asgd_on_one_rank_is_sgd(agree):
    level = alone()
    update = ps.ASGDUpdate(network(), lr=LR, sharding_communicator=level)
    reference = network()
    optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
    for net in (update.network, reference):
        for step in range(4):
            net.weight.grad = torch.full_like(START, step - 1.5)
            update.update() if net is update.network else optimizer.step()
    agree.equal(update.network.weight, reference.weight)


def alone() -> int:
    with mpi.use(0):
        level = mpi.push_communicator(f"alone {mpi.rank()}")
    mpi.set_communicator(0)
    return level


def test_gradients_are_sent_at_steps_without_a_fetch(agree):
    update = ps.ASGDUpdate(network(), lr=LR, update_frequency=3)
    in_turn(update, 6)
    agree.equal((update.num_sends, update.num_integrations), (6, 2))

    def step(turn: Turn, rank: int, own: torch.Tensor) -> torch.Tensor:
        turn.value -= LR * (own - target(rank))
        step.count = getattr(step, "count", 0) + 1
        return turn.value.clone() if (step.count - 1) // mpi.size() % 3 == 2 else own

    agree.close(center(update), twin(6, step)[0])


@pytest.mark.parametrize(("power", "offset"), [(1.0, 0.0), (0.5, 1.0)])
def test_staleness_aware_rates(agree, power, offset):
    update = ps.StalenessAwareUpdate(network(), lr=LR, power=power, offset=offset)
    own = in_turn(update, 5)
    value, expected = twin(5, lambda *turn: plain(*turn, divide=lambda tau: max(1, tau + offset) ** power))
    agree.close(own, expected)
    agree.close(center(update), value)


def test_ssp_keeps_its_bound(agree):
    """Ranks of different speed: none is more than the bound ahead when it fetches."""
    update = ps.SSPUpdate(network(), staleness=2, lr=0.01)
    ahead, fetch = [], update.fetch

    def observed() -> None:
        rounds = [value for value in update.clock.read() if value is not None]
        ahead.append(update.clock.value - min(rounds, default=update.clock.value))
        fetch()

    update.fetch = observed
    with update:
        for step in range(40):
            if mpi.rank() == 0:
                torch.randn(20_000 * (step % 3)).sum()
            update.network.weight.grad = (update.network.weight - target(mpi.rank())).detach()
            update.update()
    agree(len(ahead) == 40 and max(ahead) <= 2, str(ahead))


@pytest.mark.parametrize("mean_square", [None, 0.9])
def test_delay_compensation(agree, mean_square):
    update = ps.DCASGDUpdate(network(), lr=LR, variance_control=0.05, mean_square=mean_square)
    own = in_turn(update, 5)
    means: dict[int, torch.Tensor] = {}

    def step(turn: Turn, rank: int, weights: torch.Tensor) -> torch.Tensor:
        g, now = weights - target(rank), turn.value.clone()
        factor = torch.tensor(0.05)
        if mean_square is not None:
            means[rank] = mean_square * means.get(rank, torch.zeros_like(g)) + (1 - mean_square) * g * g
            factor = 0.05 / (means[rank] + 1e-7).sqrt()
        g = g + factor * g * g * (now - weights)
        turn.value -= LR * g
        return now - LR * g

    value, expected = twin(5, step)
    agree.close(own, expected)
    agree.close(center(update), value)


def test_gap_aware(agree):
    update = ps.GapAwareUpdate(network(), lr=LR)
    own = in_turn(update, 5)
    norms: dict[int, list[float]] = {}

    def step(turn: Turn, rank: int, weights: torch.Tensor) -> torch.Tensor:
        g, now = weights - target(rank), turn.value.clone()
        norms.setdefault(rank, []).append(float(g.norm()))
        usual = LR * sum(norms[rank]) / len(norms[rank])
        g = g / (1 + float((now - weights).norm()) / usual)
        turn.value -= LR * g
        return now - LR * g

    value, expected = twin(5, step)
    agree.close(own, expected)
    agree.close(center(update), value)


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_asynchronous_diloco(agree, power):
    """An outer step of SGD with Nesterov's momentum for each change of a rank, in the order of arrival."""
    update = ps.AsyncDiLoCoUpdate(network(), update_frequency=3, outer_lr=0.5, outer_momentum=0.5, power=power)
    inner = torch.optim.SGD(update.network.parameters(), lr=LR)
    own = in_turn(update, 8, inner)
    momentum = torch.zeros_like(START)
    anchors = [START.clone() for _ in range(mpi.size())]
    counts = [0] * mpi.size()

    def step(turn: Turn, rank: int, weights: torch.Tensor) -> torch.Tensor:
        g = weights - target(rank)
        if counts[rank] and counts[rank] % 3 == 0:
            change = anchors[rank] - weights
            momentum.mul_(0.5).add_(change)
            turn.value -= 0.5 / max(1, turn.staleness(rank)) ** power * (change + 0.5 * momentum)
            turn.sent(rank)
            weights = anchors[rank] = turn.fetch(rank)
        counts[rank] += 1
        return weights - LR * g

    value, expected = twin(8, step)
    agree.close(own, expected)
    agree.close(center(update), value)


def test_fedbuff(agree):
    update = ps.FedBuffUpdate(network(), size=2, update_frequency=2, outer_lr=0.75)
    own = in_turn(update, 9, torch.optim.SGD(update.network.parameters(), lr=LR))
    anchors, counts, buffer = [START.clone() for _ in range(mpi.size())], [0] * mpi.size(), []

    def step(turn: Turn, rank: int, weights: torch.Tensor) -> torch.Tensor:
        g = weights - target(rank)
        if counts[rank] and counts[rank] % 2 == 0:
            buffer.append((anchors[rank] - weights) / math.sqrt(1 + turn.staleness(rank)))
            if len(buffer) == 2:
                turn.value -= 0.75 * sum(buffer) / 2
                buffer.clear()
            turn.sent(rank)
            weights = anchors[rank] = turn.fetch(rank)
        counts[rank] += 1
        return weights - LR * g

    value, expected = twin(9, step)
    agree.close(own, expected)
    agree.close(center(update), value)


# --- gossip


def test_stochastic_gradient_push(agree):
    size = mpi.size()
    update = ps.SGPUpdate(network(), mixing=ps.exponential_mixing)
    own = in_turn(update, 6, torch.optim.SGD(update.network.parameters(), lr=LR))
    shares = ps.exponential_mixing(size).float()
    x, w = [START.clone() for _ in range(size)], [1.0] * size
    z = [START.clone() for _ in range(size)]
    before = [START.clone() for _ in range(size)]
    for step in range(6):
        for rank in range(size):
            g = z[rank] - target(rank)
            if step:
                x[rank] = x[rank] + w[rank] * (z[rank] - before[rank])
                z[rank] = before[rank] = x[rank] / w[rank]
                given, weight = x[rank].clone(), w[rank]
                for other in range(size):
                    share = float(shares[other, rank])
                    if other != rank:
                        x[other], w[other] = x[other] + share * given, w[other] + share * weight
                        x[rank], w[rank] = x[rank] - share * given, w[rank] - share * weight
            z[rank] = z[rank] - LR * g
    agree.close(own, z[mpi.rank()])
    table = ps.receive(update.servers.servers[0]).wait()
    mpi.barrier()
    agree.close(table, torch.cat([torch.cat([x[i], torch.tensor([[w[i]]])], dim=1) for i in range(size)]))
    agree.close(table[:, -1].sum(), torch.tensor(float(size)), "weights")
    update.pull()
    agree.close(update.network.weight.detach(), sum(x) / size)


def test_asynchronous_decentralized_sgd(agree):
    size = mpi.size()
    update = ps.ADPSGDUpdate(network(), mixing=ps.ring_mixing)
    own = in_turn(update, 6, torch.optim.SGD(update.network.parameters(), lr=LR))
    choices = [torch.Generator().manual_seed(rank) for rank in range(size)]
    x = [START.clone() for _ in range(size)]
    z, before = [START.clone() for _ in range(size)], [START.clone() for _ in range(size)]
    for step in range(6):
        for rank in range(size):
            g = z[rank] - target(rank)
            if step:
                other = int(torch.multinomial(ps.ring_mixing(size)[rank], 1, generator=choices[rank]))
                x[rank] = x[rank] + z[rank] - before[rank]
                if other != rank:
                    x[rank] = x[other] = (x[rank] + x[other]) / 2
                z[rank] = before[rank] = x[rank].clone()
            z[rank] = z[rank] - LR * g
    agree.close(own, z[mpi.rank()])
    update.pull()
    agree.close(update.network.weight.detach(), sum(x) / size)


def test_gossip_without_gradients_reaches_the_average(agree):
    """All ranks at once: sums stay, whatever arrives when."""
    for kind, mixing in ((ps.SGPUpdate, ps.exponential_mixing), (ps.ADPSGDUpdate, ps.ring_mixing)):
        net = nn.Linear(4, 1).double()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(float(mpi.rank()))
        with kind(net, mixing=mixing) as update:
            for _ in range(60):
                update.update()
        mpi.barrier()
        mean = (mpi.size() - 1) / 2
        agree.close(
            net.weight.detach(), torch.full((1, 4), mean, dtype=torch.float64), kind.__name__, atol=0.3, rtol=0.0
        )
        update.pull()
        mpi.barrier()
        agree.close(net.weight.detach(), torch.full((1, 4), mean, dtype=torch.float64), atol=1e-9, rtol=0.0)


WRONG_MIXING = {
    "size": (ps.SGPUpdate, lambda size: torch.eye(size + 1), "there are"),
    "columns": (ps.SGPUpdate, lambda size: torch.full((size, size), 2.0), "must add up to 1"),
    "no matrix": (ps.SGPUpdate, lambda size: [[1.0]], "a list"),
    "alone": (ps.SGPUpdate, torch.eye, "never reach a consensus"),
    "asymmetric": (ps.ADPSGDUpdate, ps.exponential_mixing, "must be symmetric"),
}


@pytest.mark.parametrize("case", WRONG_MIXING)
def test_wrong_mixing_matrices_are_refused(agree, case):
    kind, mixing, problem = WRONG_MIXING[case]
    is_fine = mpi.size() == 1 and case in ("alone", "asymmetric")
    try:
        kind(network(), mixing=mixing).start()
    except errors.ArgumentError as error:
        agree(f"rank {mpi.rank()}" in str(error) and problem in str(error), str(error))
    else:
        agree(is_fine or (mpi.size() == 3 and case == "asymmetric"), case)


# --- sparse gradients


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(5000, 8, sparse=sparse), nn.Linear(8, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words)).square().mean()


SPARSE_UPDATES = {
    "asgd": lambda net, **options: ps.ASGDUpdate(net, lr=0.5, **options),
    "adagrad": lambda net, **options: ps.ASGDUpdate(net, rule=ps.adagrad(0.01), **options),
    "downpour": lambda net, **options: ps.DownpourUpdate(
        net, lr=0.5, update_frequency=2, init_delay=0, send_frequency=2, **options
    ),
}


@pytest.mark.parametrize("fetch_rows", ["all", "used"])
@pytest.mark.parametrize("kind", SPARSE_UPDATES)
def test_sparse_gradients_are_sent_as_rows(agree, kind, fetch_rows):
    """With the result of dense gradients; each rank uses words of its own, so that used rows are all that it needs."""
    choose, results = torch.Generator().manual_seed(1), []
    batches = [torch.randint(0, 1500, (6,), generator=choose) + 1600 * mpi.rank() for _ in range(6)]
    for sparse in (True, False):
        net = Words(sparse)
        update = SPARSE_UPDATES[kind](net, fetch_rows=fetch_rows)
        update.start()
        for words in batches:
            for turn in range(mpi.size()):
                if mpi.rank() == turn:
                    net.zero_grad()
                    net(words).backward()
                    update.update()
                    update.settle_send()
                mpi.barrier()
        update.finish()
        mpi.barrier()
        agree.equal(update.servers.servers[-1].numel, 9 if sparse else net.table.weight.numel() + 9)
        sent, received = update.bytes_sent, update.bytes_received
        update.pull()
        results.append(net.table.weight.detach().clone())
        if sparse:
            agree(
                sent < 6 * (6 * 8 + 9) * 4 + 5000 * 8 * 4 + 100, f"{sent} bytes sent, of rank 0 the initial values too"
            )
        if sparse and fetch_rows == "used":
            agree(received < 2 * 5000 * 8 * 4, f"{received} bytes received: one whole fetch, then rows")
        update.free()
    agree.close(results[0], results[1])


def test_dense_tensors_for_a_sparse_table(agree):
    """An update may push other tensors than sparse gradients, and the next fetch has all rows."""
    net = Words(sparse=True)
    with ps.AsyncDiLoCoUpdate(net, update_frequency=1, outer_lr=1.0, outer_momentum=0.0, fetch_rows="used") as update:
        update.update()
        if mpi.rank() == 0:
            with torch.no_grad():
                net.table.weight[7] += 1.0
        for _ in range(2):
            mpi.barrier()
            update.update()
        mpi.barrier()
        agree.close(net.table.weight[7].detach(), Words(sparse=True).table.weight[7].detach() + 1.0)


# --- schedules


def test_schedules_of_rate_period_and_elasticity(agree):
    periods, rates = [], []
    update = ps.ASGDUpdate(
        network(),
        lr=lambda step: rates.append(step) or LR / (1 + step),
        update_frequency=lambda step: periods.append(step) or 1 + step // 3,
    )
    integrated = []
    update.start()
    for step in range(12):
        update.network.weight.grad = torch.ones(1, 3) * (mpi.rank() == 0)
        if update.update():
            integrated.append(step)
    update.settle_send()
    mpi.barrier()
    agree.equal(integrated, [0, 1, 2, 3, 5, 7, 10])
    agree.equal(sorted(set(rates)), list(range(12)))
    agree.close(center(update), START - LR * sum(1 / (1 + step) for step in range(12)))
    elastic = ps.EASGDUpdate(network(), beta=lambda step: 0.5 if step < 2 else 0.25, update_frequency=1, init_delay=0)
    elastic.step = 1
    agree.equal(elastic.alpha, 0.5)
    elastic.step = 2
    agree.equal(elastic.alpha, 0.25)
    downpour = ps.DownpourUpdate(network(), lr=lambda step: math.nan, init_delay=0)
    downpour.start()
    downpour.network.weight.grad = torch.ones(1, 3)
    agree.raises(errors.ArgumentError, downpour.update, "a schedule returned nan at step 0")


# --- stability of EAMSGD


@pytest.mark.parametrize(("lr", "warns"), [(0.05, False), (2.0, True)])
def test_eamsgd_warns_of_rates_that_diverge(agree, logged, lr, warns):
    """The loss has curvature 1: with momentum 0.9 rates of more than 1.36 diverge."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, nesterov=True)
    update = ps.EAMSGDUpdate(net, optimizer, update_frequency=4, init_delay=0)
    in_turn(update, 40, optimizer)
    told = [message for message in logged if "EAMSGDUpdate probably diverges" in message]
    agree.equal(len(told), int(warns), str(told))
    if warns:
        agree("curvature 1," in told[0] and "Lower lr to less than 1." in told[0], told[0])
    agree.equal(bool(net.weight.isfinite().all() and net.weight.norm() < 100), not warns, "the reason for the warning")


def test_an_own_algorithm_needs_no_private_member(agree):
    class SignASGD(ps.Update):
        """Sends the sign of the gradient, with a rate by the number of clients."""

        def integrate(self, center):
            for parameter, value in zip(self.parameters, center, strict=True):
                parameter.copy_(value)

        def send(self, integrated):
            signs = [None if gradient is None else gradient.sign() for gradient in self.gradients()]
            self.push(signs, ps.scaled_add(-0.5 / self.num_clients), base=self.gradient_base)

    update = SignASGD(network(), update_frequency=1, init_delay=0)
    in_turn(update, 3)
    agree(update.num_sends == 3 and torch.isfinite(center(update)).all(), str(center(update)))
