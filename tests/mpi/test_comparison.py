"""Comparison of calls by messages, on hosts that are simulated by their names: differences are errors on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from mpi4py import MPI

import torchmpi as mpi
from torchmpi.backends.comparison import NumberExchange, can_carry
from torchmpi.backends.hierarchical.host_comparison import HostComparison
from torchmpi.config import Config
from torchmpi.errors import MismatchError
from torchmpi.session import runtime

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.skipif(SIZE == 1, reason="needs another rank")

# The host of each rank.
PLACEMENTS = {"each": "abcd", "block": "aabb", "cyclic": "abab", "uneven": "aaab", "three": "abca"}
PLACEMENTS = {name: hosts for name, hosts in PLACEMENTS.items() if len(set(hosts[:SIZE])) > 1}
SHORT, OTHER, LONG = 5, 6, 300_000


@pytest.fixture(params=PLACEMENTS, scope="module")
def placement(request) -> Iterator[str]:
    """torchmpi, started on these hosts."""
    was_running = runtime.is_running()
    mpi.stop()
    hosts = PLACEMENTS[request.param][:SIZE]
    mpi.start(config=dataclasses.replace(Config.from_environment(), host_name=hosts[RANK]))
    yield hosts
    mpi.stop()
    if was_running:
        mpi.start()


def ones(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((numel,), RANK + 1, dtype=dtype)


Call = Callable[[torch.Tensor], object]
# What one rank calls, and what the others call: the text of each in the message, the tensor, the call.
DIFFERENT: dict[str, tuple[tuple[str, torch.Tensor, Call], tuple[str, torch.Tensor, Call]]] = {
    "size": (
        ("allreduce(float32 [5], sum)", ones(SHORT), mpi.allreduce),
        ("allreduce(float32 [6], sum)", ones(OTHER), mpi.allreduce),
    ),
    "short and long": (
        ("allreduce(float32 [5], sum)", ones(SHORT), mpi.allreduce),
        ("allreduce(float32 [300000], sum)", ones(LONG), mpi.allreduce),
    ),
    "two long ones": (
        ("allreduce(float32 [300000], sum)", ones(LONG), mpi.allreduce),
        ("allreduce(float32 [300005], sum)", ones(LONG + 5), mpi.allreduce),
    ),
    "operation": (
        ("allreduce(float32 [5], sum)", ones(SHORT), mpi.allreduce),
        ("allreduce(float32 [5], max)", ones(SHORT), partial(mpi.allreduce, op="max")),
    ),
    "dtype": (
        ("allreduce(float64 [5], sum)", ones(SHORT, torch.float64), mpi.allreduce),
        ("allreduce(bfloat16 [5], sum)", ones(SHORT, torch.bfloat16), mpi.allreduce),
    ),
    "barrier": (
        ("barrier()", ones(SHORT), lambda _: mpi.barrier()),
        ("allreduce(float32 [5], sum)", ones(SHORT), mpi.allreduce),
    ),
    "root": (
        ("broadcast(float32 [5], root=0)", ones(SHORT), mpi.broadcast),
        ("broadcast(float32 [5], root=1)", ones(SHORT), partial(mpi.broadcast, root=1)),
    ),
    "collective": (
        ("allgather(float32 [])", ones(SHORT), mpi.allgather),
        ("allreduce(float32 [300000], sum)", ones(LONG), mpi.allreduce),
    ),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_calls_are_named_on_all_ranks(agree, placement, kind):
    expected = torch.full((SHORT,), SIZE * (SIZE + 1) / 2)
    for odd in range(SIZE):
        text, tensor, call = DIFFERENT[kind][odd == RANK]
        agree.raises(MismatchError, lambda: call(tensor), f"called {text}", *(each[0] for each in DIFFERENT[kind]))  # noqa: B023
        agree(bool((tensor == RANK + 1).all()), f"the tensor was changed: {tensor}")
        agree.bits(mpi.allreduce(ones(SHORT)), expected, "the next call")


def test_different_backends_are_an_error_on_all_ranks(agree, placement):
    automatic = "hierarchical" if len(set(placement)) < SIZE else "p2p"
    for odd in range(SIZE):
        backend = "mpi" if odd == RANK else automatic
        agree.raises(MismatchError, partial(mpi.allreduce, ones(SHORT), backend=backend), "different transports")  # type: ignore[arg-type]
        agree.equal(mpi.allreduce(1), SIZE, "the next call")


def test_short_vectors_have_the_bits_of_long_ones(agree, placement):
    """They are sent with the comparison, and longer ones after it."""
    is_carried = lambda numel, dtype: can_carry(numel * dtype.itemsize, len(set(placement)))  # noqa: E731
    backend = "hierarchical" if len(set(placement)) < SIZE else "p2p"
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        for op in ("sum", "avg", "prod"):
            values = torch.randn(50_000, generator=torch.Generator().manual_seed(RANK)).to(dtype)
            whole = mpi.allreduce(values.clone(), op=op, backend=backend)
            parts = values.split([1, 100, 4000, 45_899])
            agree(is_carried(4000, torch.float32) and not is_carried(45_899, torch.float32))
            agree.bits(torch.cat([mpi.allreduce(part.clone(), op=op) for part in parts]), whole, f"{dtype} {op}")


def test_hosts_are_compared_by_their_first_ranks(agree, placement):
    comparison = runtime.current().world.comparison
    is_first = placement.index(placement[RANK]) == RANK
    if len(set(placement)) < SIZE:
        agree(isinstance(comparison, HostComparison))
        agree.equal(comparison.exchange is not None, is_first)


def test_a_number_that_one_rank_lacks_or_changes(agree):
    comm = MPI.COMM_WORLD.Dup()
    exchange = NumberExchange(MPI, comm)
    equal = [exchange.agree(number) for number in (0, -1, (1 << 63) - 1, -1 << 63)]
    other = [exchange.agree(None if rank == RANK else 7) for rank in range(SIZE)]
    other += [exchange.agree(7 + (rank == RANK)) for rank in range(SIZE)]
    lengths = [exchange.gather(7, torch.ones(3 + (rank == RANK))) for rank in range(SIZE)]
    nothing = [exchange.gather(7, ones(3)) if rank == RANK else exchange.agree(7) or None for rank in range(SIZE)]
    gathered = [vector.clone() for vector in exchange.gather(7, ones(3)) or ()]
    comm.Free()
    agree.equal(equal, [True] * 4)
    agree.equal(other, [False] * 2 * SIZE)
    agree.equal(lengths, [None] * SIZE)
    agree.equal(nothing, [None] * SIZE)
    agree.equal(torch.stack(gathered), torch.arange(1.0, SIZE + 1)[:, None].expand(SIZE, 3))
