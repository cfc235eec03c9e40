"""Print what a rank does in the plans of messages between hosts, for 2 to 10,000 ranks, as counted in the plans.

    python benchmarks/plan_costs.py [--write docs/design/hierarchy.md]

Times are those of a model, for the network that the choice between the plans assumes. The last table is counted in
simulated runs of the code of the backends.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from simulator.messages import Comm, World
from simulator.plans import Ranks
from simulator.servers import request_cost
from simulator.start import LibraryCall, kept_bytes, started

from torchmpi.backends.hierarchical.hierarchical_backend import HierarchicalBackend
from torchmpi.backends.p2p import SHORT_BYTES, chunk_bytes
from torchmpi.backends.plan_cost import (
    HEADER_BYTES,
    Network,
    PlanCost,
    allreduce_plans,
    cost_of,
    most_relayed_bytes,
)
from torchmpi.config import Config
from torchmpi.tensors import schedule

SIZES = (2, 8, 64, 1024, 10_000)
PAYLOADS = {"1 KB": 1 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "64 MB": 64 << 20}
PLACEMENTS = {"4 x 2": "aabbccdd", "4, 2, 1, 1": "aaaabbcd", "4 x 4": "aaaabbbbccccdddd", "8 x 2": "aabbccddeeffgghh"}
PLACED_NUMEL = 1 << 16
RANKS_OF_HOST = 8
SERVICE_SIZES = (16, 64, 1024, 10_000)
SERVER_BYTES = 64 << 20
BEGIN, END = "<!-- costs: written by benchmarks/plan_costs.py -->", "<!-- end of costs -->"


def plans(size: int, num_bytes: float) -> dict[str, PlanCost]:
    """Return the cost of all plans."""
    allreduces = allreduce_plans(size, num_bytes)
    return {f"allreduce, {name}": cost for name, cost in allreduces.items()} | other_plans(size, num_bytes)


def other_plans(size: int, num_bytes: float) -> dict[str, PlanCost]:
    """Return the cost of the other collectives of `p2p`, and of the comparison of a call.

    The payload of an allgather is what one rank contributes. The bytes of a comparison do not depend on the payload.
    """
    comparison = cost_of(schedule.doubling(0, size), 0)
    return {
        "comparison": comparison._replace(num_bytes=HEADER_BYTES * comparison.rounds),
        "reduce_scatter": cost_of([schedule.exchange(0, size)], num_bytes / size, num_bytes * (size - 1) / size),
        "broadcast by a tree": cost_of(schedule.tree(0, size, 0), num_bytes),
        "allgather, short": cost_of(schedule.doubling(0, size), num_bytes, size * num_bytes),
        "allgather, long": cost_of([schedule.spread(0, size)], num_bytes),
    }


def chosen(size: int, num_bytes: int) -> tuple[str, PlanCost]:
    """Return the plan that `p2p` chooses for an allreduce."""
    if num_bytes * size <= SHORT_BYTES:
        name = "gather"
    else:
        name = "relayed" if num_bytes <= most_relayed_bytes(size, 1 << 20) else "direct"
    return name, allreduce_plans(size, num_bytes, chunk_bytes(size, Config().pipeline_bytes))[name]


def describe(cost: PlanCost) -> str:
    """Format the cost for a payload of 1."""
    return f"{cost.rounds}, {cost.messages}, {cost.num_bytes:.5g}, {cost.memory:.5g}"


def counted(collective: str, hosts: list[int]) -> tuple[int, int]:
    """Return the messages of the busiest rank and the bytes of the busiest host of a call, to other hosts."""
    world = World(hosts)
    op = "sum" if "reduce" in collective else None

    def work(comm: Comm) -> None:
        tensor = None if collective == "barrier" else torch.ones(PLACED_NUMEL)
        dtype = None if tensor is None else tensor.dtype
        Ranks(comm).prepare(collective, "hierarchical", dtype, op)(tensor)

    world.run(work)
    by_host: dict[int, int] = {}
    for (origin, target), num_bytes in world.sent_bytes.items():
        if origin != target:
            by_host[origin] = by_host.get(origin, 0) + num_bytes
    return max(world.num_sent.values()), max(by_host.values())


def placed_table() -> list[str]:
    """Return the table of the collectives in steps over hosts."""
    num_bytes = 4 * PLACED_NUMEL
    title = "messages of a rank, bytes of a host, sent to other hosts; hosts x ranks:"
    lines = [f"| {title} | {' | '.join(PLACEMENTS)} |", "|---" * (len(PLACEMENTS) + 1) + "|"]
    for collective in HierarchicalBackend.collectives:
        cells = []
        for placement in PLACEMENTS.values():
            num_messages, sent = counted(collective, [ord(host) for host in placement])
            amount = f"{sent:,} B" if collective == "barrier" else f"{sent / num_bytes:.5g} S"
            cells.append(f"{num_messages}, {amount}")
        lines.append(f"| {collective} | {' | '.join(cells)} |")
    return lines


def services(size: int, calls_of_start: list[LibraryCall]) -> dict[str, PlanCost]:
    """Return what the first rank does in calls other than those on tensors, with several ranks on a host."""
    num_hosts = size // RANKS_OF_HOST
    barrier, across = (cost_of(schedule.doubling(0, ranks), 0) for ranks in (size, num_hosts))
    request = request_cost(size, size - RANKS_OF_HOST, SERVER_BYTES)
    return {
        "`start()`": total([call.cost(size, RANKS_OF_HOST) for call in calls_of_start]),
        "barrier of the MPI library": barrier,
        "barrier in steps": total([across._replace(num_bytes=across.rounds * HEADER_BYTES), across]),
        f"server: send or receive, {SERVER_BYTES >> 20} MB": request,
    }


def total(costs: list[PlanCost]) -> PlanCost:
    """Return the cost of plans that run one after the other."""
    rounds, messages, num_bytes, memory = (sum(values) for values in zip(*costs, strict=True))
    return PlanCost(int(rounds), int(messages), num_bytes, memory)


def services_table() -> list[str]:
    """Return the table of start, barriers and servers."""
    title = f"rounds, messages, bytes sent, of the first rank, and time of the model; ranks, {RANKS_OF_HOST} on a host:"
    lines = [f"| {title} | " + " | ".join(f"{size:,}" for size in SERVICE_SIZES) + " |"]
    lines.append("|---" * (len(SERVICE_SIZES) + 1) + "|")
    with started([rank // RANKS_OF_HOST for rank in range(2 * RANKS_OF_HOST)]) as start:
        calls = [call for call in start.world.library_calls if call.ranks != "host"]
    by_size = [services(size, calls) for size in SERVICE_SIZES]
    for name in by_size[0]:
        costs = [of_size[name] for of_size in by_size]
        cells = [
            f"{cost.rounds:,}, {cost.messages:,}, {cost.num_bytes:,.0f}, {cost.seconds() * 1e3:.3g} ms"
            for cost in costs
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def tables() -> str:
    """Return all tables."""
    ranks = " | ".join(f"{size:,}" for size in SIZES)
    title = "rounds, messages, payloads sent, payloads of memory, of a rank; ranks:"
    lines = [f"| {title} | {ranks} |", "|---" * (len(SIZES) + 1) + "|"]
    by_size = [plans(size, 1.0) for size in SIZES]
    for name in by_size[0]:
        lines.append(f"| {name} | " + " | ".join(describe(costs[name]) for costs in by_size) + " |")
    network = Network()
    lines += [
        "",
        f"Model of an allreduce by `p2p`: latency {network.latency * 1e6:g} us, {network.message * 1e6:g} us for each "
        f"message, {8e-9 / network.byte:g} Gbit/s.",
        "",
        f"| payload; ranks: | {ranks} |",
        "|---" * (len(SIZES) + 1) + "|",
    ]
    for title, num_bytes in PAYLOADS.items():
        cells = [(name, cost.seconds() * 1e3) for name, cost in (chosen(size, num_bytes) for size in SIZES)]
        times = [f"{name}, {time:.{0 if time >= 100 else 1}f} ms" for name, time in cells]
        lines.append(f"| {title} | " + " | ".join(times) + " |")
    lines += [
        "",
        "Collectives in steps over hosts, counted in simulated runs with the comparison of the call: the most of any",
        f"rank and host, payload S of {PLACED_NUMEL >> 8} KiB (of an allgather: what one rank contributes). The",
        "simulated MPI library broadcasts along a binomial tree and gathers long rows along a ring.",
        "",
        *placed_table(),
        "",
        "Start, barriers and servers: the calls of MPI that `start()` makes are those of a simulated start, without",
        "those among the ranks of a host, and with the algorithms of the simulated library.",
        "",
        *services_table(),
        "",
        f"After a simulated `start()` a rank keeps about {kept_bytes() / 1024:.0f} KB for each rank of the job.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or write them to a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, help="replace the tables of this page")
    page: Path | None = parser.parse_args().write
    if page is None:
        print(tables())
        return
    pattern = re.compile(f"{BEGIN}\n.*{END}\n", re.DOTALL)
    page.write_text(pattern.sub(f"{BEGIN}\n{tables()}\n{END}\n", page.read_text()))


if __name__ == "__main__":
    main()
