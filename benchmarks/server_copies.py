"""Measure what `Config(server_copies=True)` costs: the CPU time of a send to a server without and with copies.

    torchmpi run -n 2 --without-mpi benchmarks/server_copies.py

Rank 0 sends, and rank 1 waits. Each round starts torchmpi without and with copies; reported are medians of rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import torchmpi as mpi
import torchmpi.parameterserver as ps

CASES: dict[str, tuple[int, str | ps.Rule]] = {
    "4 KB add": (1 << 10, "add"),
    "64 KB add": (1 << 14, "add"),
    "1 MB add": (1 << 18, "add"),
    "64 KB adam": (1 << 14, ps.adam(0.1)),
    "1 MB adam": (1 << 18, ps.adam(0.1)),
}
SECONDS, WARM_UPS = 0.2, 20


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    times: dict[tuple[str, bool], list[float]] = {(case, copies): [] for case in CASES for copies in (False, True)}
    for _ in range(options.rounds):
        for copies in (False, True):
            mpi.start(config=mpi.Config(on_lost_rank="raise", server_copies=copies, verbose=False))
            for case, (numel, rule) in CASES.items():
                times[case, copies].append(cpu_microseconds(numel, rule))
            rank = mpi.rank()
            mpi.stop()
    if rank == 0:
        print("| CPU time of a send, us | without copies | with copies |\n|---|---|---|")
        for case in CASES:
            figures = [f"{statistics.median(times[case, copies]):.1f}" for copies in (False, True)]
            print(f"| {case} |", " | ".join(figures), "|")


def cpu_microseconds(numel: int, rule: str | ps.Rule) -> float:
    """Return the CPU time of a send of rank 0. Collective."""
    server, values = ps.init(torch.zeros(numel)), torch.full((numel,), 1e-6)
    number, begin = 0, 0.0
    mpi.barrier()
    if mpi.rank() == 0:
        for _ in range(WARM_UPS):
            ps.send(server, values, rule).wait()
        begin, end = time.process_time(), time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            for _ in range(WARM_UPS):
                ps.send(server, values, rule).wait()
            number += WARM_UPS
        begin = time.process_time() - begin
    mpi.barrier()
    ps.free(server)
    return 1e6 * begin / max(1, number)


if __name__ == "__main__":
    main()
