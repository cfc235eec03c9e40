"""Predict the time of an allreduce of many ranks, by running the code of the backends on simulated ranks and links.

    python benchmarks/simulate.py --ranks 16,64,256 --hosts-of 8 --size 1M --rate 1Gbit --latency 50us
    python benchmarks/simulate.py --as-data --ranks 64,1024,10000 --size 1K,1M
    mpirun --hostfile hosts -n 4 python benchmarks/simulate.py --measure --size 1K,64K,1M --rate 1Gbit --latency 100us

The second form runs the plans of messages alone, as data. The last one measures the allreduces in a job, and prints the
measured and the predicted time and their ratio.
`ring`, `doubling` and `tree` are the messages of the algorithms of MPI libraries; the others are the backends.
Combining vectors takes no time in the model, and messages within a host are copies in its memory. In the first form,
long vectors of many ranks take minutes.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product

import torch
from simulator import planned
from simulator.messages import Comm, World
from simulator.network import Network
from simulator.plans import Ranks

from torchmpi.backends.p2p import P2PReduction
from torchmpi.config import BackendName
from torchmpi.tensors import schedule

Call = Callable[[torch.Tensor], object]
_TAG = 7
_UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS = {"Kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}


def quantity(text: str) -> float:
    """Return a number with a unit: bytes (64K), bytes per second (1Gbit) or seconds (50us).

    >>> quantity("64K"), quantity("1Gbit"), quantity("2ms")
    (65536.0, 125000000.0, 0.002)
    """
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", text)
    if found is None or found[2] not in _UNITS | _BITS:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number and one of {', '.join(filter(None, _UNITS | _BITS))}")
    return float(found[1]) * (_BITS[found[2]] / 8 if found[2] in _BITS else _UNITS[found[2]])


def ring(comm: Comm) -> Call:
    """Return the messages of a ring allreduce."""

    def call(tensor: torch.Tensor) -> None:
        parts = [(part.data_ptr(), part.nbytes) for part in tensor.tensor_split(comm.size)]
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        for k in range(2 * (comm.size - 1)):
            sent, received = parts[(comm.rank - k) % comm.size], parts[(comm.rank - k - 1) % comm.size]
            comm.Sendrecv(sent, right, _TAG, received, left, _TAG)

    return call


def doubling(comm: Comm) -> Call:
    """Return the messages of an allreduce that sends the whole vector in each of log2 rounds."""

    def call(tensor: torch.Tensor) -> None:
        memory = (tensor.data_ptr(), tensor.nbytes)
        for (sent,), (received,) in schedule.doubling(comm.rank, comm.size):
            comm.Sendrecv(memory, sent.peer, _TAG, memory, received.peer, _TAG)

    return call


def tree(comm: Comm) -> Call:
    """Return the messages of a reduce and a broadcast along a binomial tree."""

    def call(tensor: torch.Tensor) -> None:
        memory = (tensor.data_ptr(), tensor.nbytes)
        down = schedule.tree(comm.rank, comm.size, 0)
        up = [schedule.Round(sends=step.receives, receives=step.sends) for step in reversed(down)]
        for step in (*up, *down):
            requests = [comm.Irecv(memory, message.peer, _TAG) for message in step.receives]
            requests += [comm.Isend(memory, message.peer, _TAG) for message in step.sends]
            comm.world.wait_all(requests)

    return call


def direct(comm: Comm) -> Call:
    """Return the allreduce of `p2p` without relays."""
    ranks = Ranks(comm, compared=False)
    reduction = P2PReduction(ranks.group, torch.float32, "sum", ranks.config)
    reduction.relayed_bytes = 0
    return lambda tensor: reduction.allreduce(tensor, None, 0)


def relayed(comm: Comm) -> Call:
    """Return the relayed allreduce of `p2p`."""
    ranks = Ranks(comm, compared=False)
    return P2PReduction(ranks.group, torch.float32, "sum", ranks.config).relayed.run


def backend(name: str) -> Callable[[Comm], Call]:
    """Return the allreduce of a backend, with the comparison of calls."""
    return lambda comm: Ranks(comm).prepare("allreduce", name, torch.float32, "sum")


PLANS: dict[str, Callable[[Comm], Call]] = {
    "ring": ring, "doubling": doubling, "tree": tree, "direct": direct, "relayed": relayed,
    "p2p": backend("p2p"), "hierarchical": backend("hierarchical"),
}  # fmt: skip


def predict(
    plan: str, hosts: Sequence[int], num_bytes: int, network: Network, late: dict[int, float]
) -> tuple[float, int]:
    """Return the seconds of an allreduce until the last rank has ended, and the bytes of the busiest uplink.

    `late` are the ranks that call later, by seconds.
    """
    world = World(hosts, network=network)
    tensor = torch.zeros(max(1, num_bytes // 4))  # of all ranks: the values do not matter

    def work(comm: Comm) -> tuple[float, float]:
        call = PLANS[plan](comm)
        world.meet("all are ready", comm, None, len)
        begin = world.turns.clock
        assert world.links is not None
        world.links.carried.clear()
        world.turns.advance(late.get(comm.rank, 0.0))
        call(tensor)
        return begin, world.turns.clock

    times = world.run(work)
    assert world.links is not None
    uplinks = [count for (kind, _), count in world.links.carried.items() if kind == "out"]
    return max(end for _, end in times) - max(begin for begin, _ in times), max(uplinks, default=0)


def is_possible(plan: str, hosts: Sequence[int]) -> bool:
    """Return whether a plan applies: hierarchical needs several hosts of which one has several ranks."""
    return plan != "hierarchical" or 1 < len(set(hosts)) < len(hosts)


def measure(sizes: Sequence[int], network: Network, repeats: int) -> None:
    """Measure allreduces in a job, and print measured and predicted times."""
    import torchmpi as mpi

    measured: dict[tuple[int, BackendName], float] = {}
    with mpi.started():
        rank, names = mpi.rank(), mpi.allgather_object(mpi.host_name())
        hosts = [sorted(set(names)).index(name) for name in names]
        able: tuple[BackendName, ...] = ("p2p", "hierarchical")
        chosen = [name for name in able if is_possible(name, hosts)]
        for num_bytes, backend_name in product(sizes, chosen):
            tensor, seconds = torch.zeros(max(1, num_bytes // 4)), []
            for _ in range(repeats + 1):
                mpi.barrier()
                begin = time.perf_counter()
                mpi.allreduce(tensor, backend=backend_name)
                seconds.append(mpi.allreduce(time.perf_counter() - begin, op="max"))
            measured[num_bytes, backend_name] = statistics.median(seconds[1:])  # the first one opens the connections
    if rank == 0:
        for (num_bytes, name), median in measured.items():
            predicted, _ = predict(name, hosts, num_bytes, network, {})
            print(
                f"{num_bytes:>11} {name:>12} measured {median * 1e3:10.3f} ms, predicted {predicted * 1e3:10.3f} ms, "
                f"ratio {predicted / median:.2f}"
            )


def main() -> None:
    """Predict, or measure and predict, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="16,64", help="numbers of ranks, separated by commas")
    parser.add_argument("--hosts-of", type=int, default=8, help="ranks of a host, placed host by host (default 8)")
    parser.add_argument("--size", default="1M", help="bytes of the vector, several separated by commas")
    parser.add_argument("--rate", type=quantity, default=Network().rate, help="of the link of a host, as 1Gbit")
    parser.add_argument("--latency", type=quantity, default=Network().latency, help="one way, as 50us")
    parser.add_argument("--overhead", type=quantity, default=Network().overhead, help="of a rank for each message")
    parser.add_argument("--hosts-per-switch", type=int, default=0, help="hosts under one switch; 0: all")
    parser.add_argument("--oversubscription", type=float, default=1.0, help="rate of these hosts over its uplink")
    parser.add_argument("--late", action="append", default=[], help="RANK:TIME, a rank that calls later, as 3:2ms")
    parser.add_argument(
        "--slow", action="append", default=[], help="HOST:FRACTION, a host with a slower link, as 1:0.5"
    )
    parser.add_argument("--plans", default="", help="separated by commas; default: all")
    parser.add_argument("--as-data", action="store_true", help="run plans without code and vectors: thousands of ranks")
    parser.add_argument("--measure", action="store_true", help="measure in a job of mpirun, and compare")
    parser.add_argument("--repeats", type=int, default=20, help="measured calls (default 20)")
    options = parser.parse_args()
    network = Network(
        rate=options.rate, latency=options.latency, overhead=options.overhead,
        hosts_per_switch=options.hosts_per_switch, oversubscription=options.oversubscription,
        slow_hosts=tuple((int(host), float(part)) for host, part in (text.split(":") for text in options.slow)),
    )  # fmt: skip
    sizes = [int(quantity(text)) for text in options.size.split(",")]
    if options.measure:
        measure(sizes, network, options.repeats)
        return
    late = {int(rank): quantity(seconds) for rank, seconds in (text.split(":") for text in options.late)}
    plans = options.plans.split(",") if options.plans else list(planned.ALLREDUCES if options.as_data else PLANS)
    for num_bytes, size, name in product(sizes, map(int, options.ranks.split(",")), plans):
        hosts = [rank // options.hosts_of for rank in range(size)]
        if options.as_data:
            seconds, uplink = planned.predict(name, size, options.hosts_of, num_bytes, network, late)
        elif is_possible(name, hosts):
            seconds, uplink = predict(name, hosts, num_bytes, network, late)
        else:
            continue
        print(f"{num_bytes:>11} bytes, {size:>6} ranks {name:>12} {seconds * 1e3:12.3f} ms predicted, {uplink:>13,} "
              "bytes of the busiest uplink", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
