"""To whoever makes different calls on several hosts: they are errors on all ranks, and the next calls are right."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from helpers.functions_entered import python_calls
from mpi4py import MPI

import torchmpi as mpi
from torchmpi.backends import number_exchange
from torchmpi.backends.call_comparison import CallComparison
from torchmpi.backends.number_exchange import NumberExchange, most_carried
from torchmpi.backends.rank_order import PartialResults
from torchmpi.config import BackendName, Config, Operation
from torchmpi.errors import MismatchError
from torchmpi.session import runtime
from torchmpi.shared_memory import fast_path
from torchmpi.timeline.trace_reader import read_folder

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(2, 4), pytest.mark.skipif(SIZE == 1, reason="needs another rank")]

# The host of each rank.
PLACEMENTS = {"each": "abcd", "block": "aabb", "three": "abca"}
PLACEMENTS = {hosts[:SIZE]: name for name, hosts in PLACEMENTS.items() if len(set(hosts[:SIZE])) > 1}  # each once
PLACEMENTS = {name: hosts for hosts, name in PLACEMENTS.items()}
# With these limits, vectors that are gathered by default are relayed in blocks.
RELAYED = {"_MOST_BYTES_OF_TWO": 16, "_MOST_BYTES": 64}
CASES = [(name, relayed) for name in PLACEMENTS for relayed in (False, True)]
SHORT, OTHER, LONG = 5, 6, 300_000


def name_of(case: tuple[str, bool]) -> str:
    return case[0] + " relayed" * case[1]


@pytest.fixture(params=CASES, ids=name_of, scope="module")
def placement(request) -> Iterator[str]:
    """torchmpi, started on these hosts."""
    was_running = runtime.is_running()
    mpi.stop()
    name, is_relayed = request.param
    hosts = PLACEMENTS[name][:SIZE]
    with pytest.MonkeyPatch.context() as patch:
        for limit, value in RELAYED.items() if is_relayed else ():
            patch.setattr(number_exchange, limit, value)
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


# All kinds on one placement; the first two of them, which send vectors, on the others.
KINDS = [(case, kind) for case in CASES for number, kind in enumerate(DIFFERENT) if case == CASES[0] or number < 2]


@pytest.mark.parametrize(
    ("placement", "kind"), KINDS, ids=lambda value: value if isinstance(value, str) else name_of(value),
    indirect=["placement"], scope="module",
)  # fmt: skip
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
    num_hosts = len(set(placement))
    most = most_carried(num_hosts, in_steps=num_hosts < SIZE)
    backend = "hierarchical" if num_hosts < SIZE else "p2p"
    for dtype, op in ((torch.float32, "avg"), (torch.bfloat16, "sum"), (torch.complex64, "prod")):
        values = torch.randn(150_000, generator=torch.Generator().manual_seed(RANK)).to(dtype)
        whole = mpi.allreduce(values.clone(), op=op, backend=backend)
        parts = values.split([1, 100, 4000, 145_899])
        agree(4000 * torch.float32.itemsize <= most < 145_899 * torch.bfloat16.itemsize)
        agree.bits(torch.cat([mpi.allreduce(part.clone(), op=op) for part in parts]), whole, f"{dtype} {op}")


def test_hosts_are_compared_by_their_first_ranks(agree, placement):
    made = runtime.current().world.comparison
    is_first = placement.index(placement[RANK]) == RANK
    has_steps = len(set(placement)) < SIZE
    agree(isinstance(made, CallComparison) and made.in_steps == has_steps)
    agree(isinstance(made, CallComparison) and (made.exchange is not None) == (is_first or not has_steps))


def test_a_number_that_one_rank_lacks_or_changes(agree):
    comm = MPI.COMM_WORLD.Dup()
    exchange = NumberExchange(MPI, comm)
    equal = [exchange.agree(number) for number in (0, -1, (1 << 63) - 1, -1 << 63)]
    other = [exchange.agree(None if rank == RANK else 7) for rank in range(SIZE)]
    other += [exchange.agree(7 + (rank == RANK)) for rank in range(SIZE)]
    lengths = [exchange.gather(7 + (rank == RANK), torch.ones(3 + (rank == RANK))) for rank in range(SIZE)]
    nothing = [exchange.gather(8, ones(3)) if rank == RANK else exchange.agree(7) or None for rank in range(SIZE)]
    gathered = [vector.clone() for vector in exchange.gather(7, ones(3)) or ()]
    comm.Free()
    agree.equal(equal, [True] * 4)
    agree.equal(other, [False] * 2 * SIZE)
    agree.equal(lengths, [None] * SIZE)
    agree.equal(nothing, [None] * SIZE)
    agree.equal(torch.stack(gathered), torch.arange(1.0, SIZE + 1)[:, None].expand(SIZE, 3))


# --- the fast path ------------------------------------------------------------------


OPERATIONS: dict[torch.dtype, tuple[Operation, ...]] = {
    torch.float32: ("sum", "avg", "prod"),
    torch.float64: ("sum", "max"),
    torch.bfloat16: ("sum", "avg", "max"),
    torch.complex64: ("sum",),
    torch.int32: ("sum", "bor"),
    torch.uint8: ("sum", "max"),
    torch.bool: ("lor",),
}


def automatic(placement: str) -> BackendName:
    return "hierarchical" if len(set(placement)) < SIZE else "p2p"


def fast(tensor: torch.Tensor, op: str = "sum") -> bool:
    """Reduce by the fast path; return whether it made the call."""
    return fast_path.allreduce(tensor, None, op, None, None) is tensor


@pytest.fixture
def cached(placement) -> None:
    """Short sums of float32 are cached."""
    for _ in range(2):  # the second one is cached
        mpi.allreduce(ones(SHORT))
    if fast_path.allreduce is fast_path._not_built or runtime.current().context.sleeps_before_mpi:
        pytest.skip("no fast path here")
    local = runtime.current().world.intra_host
    if mpi.allreduce(local is not None and local.status_board is None, op="max"):
        pytest.skip("ranks of one simulated host share no memory")


def test_the_fast_path_has_the_bits_of_the_path_through_python(agree, placement, cached):
    num_hosts, numbers = len(set(placement)), random.Random(7)
    has_steps = num_hosts < SIZE
    is_first = placement == next(iter(PLACEMENTS.values()))[:SIZE]
    for dtype, operations in OPERATIONS.items():
        for op in operations if is_first else operations[:1]:  # what the placement decides is the same for all
            values = torch.randn(263_000, generator=torch.Generator().manual_seed(RANK)).mul(9).to(dtype)
            for _ in range(2):
                mpi.allreduce(values[:3].clone(), op=op)
            # Partial results of several ranks are sent wider.
            sent = PartialResults(dtype, op, SIZE).accumulator if has_steps else dtype
            most = most_carried(num_hosts, in_steps=has_steps) // sent.itemsize
            for numel in (0, 1, numbers.randrange(2, 99), numbers.randrange(99, most), most, most + 1):
                begin = numbers.randrange(100)  # of no alignment
                quick, plain = (values[begin : begin + numel].clone() for _ in range(2))
                went = fast(quick, op)
                agree.equal(went, not dtype.is_complex and 0 < numel <= most, f"{dtype} {op} [{numel}]")
                mpi.allreduce(plain, op=op, backend=automatic(placement))
                if went:
                    agree.bits(quick, plain, f"{dtype} {op} [{numel}]")


def test_steps_are_recorded_in_a_timeline(agree, placement, cached, tmp_path):
    folder = tmp_path / str(RANK)  # hosts may have no common folder
    has_steps = runtime.current().world.intra_host is not None  # of this rank
    with mpi.timeline.start(folder):
        for _ in range(4):
            mpi.allreduce(ones(SHORT))
    mpi.allreduce(ones(SHORT))
    agree(fast(ones(SHORT)), "the fast path is still off")
    (own,) = read_folder(folder)
    names = [each.details["communicator"] for each in own.calls]
    agree.equal(names.count("world"), 4)
    agree.equal(names.count("world on one host"), 8 if has_steps else 0)
    algorithms = {each.details["algorithm"] for each in own.calls if each.details["communicator"] == "world"}
    agree.equal(algorithms, {"messages of the comparison"})


def test_asynchronous_calls_are_those_of_the_fast_path(agree, placement, cached):
    """The thread that waits runs them without Python code, with several under way too."""
    for number in (1, 1, 1, 1, 4):  # the helper is not needed any more in the last turns
        tensors = [ones(SHORT) for _ in range(number)]
        handles = [mpi.allreduce_async(tensor) for tensor in tensors]
        functions = [code.co_name for handle in handles for code in python_calls(handle.wait)[0]]
        for tensor in tensors:
            agree.bits(tensor, torch.full((SHORT,), SIZE * (SIZE + 1) / 2), f"{number} under way")
    agree("perform" not in functions, str(functions))


def test_shared_tensors_by_the_fast_path(agree, placement, cached):
    num_hosts = len(set(placement))
    for numel in (SHORT, 6000, 4000):  # in the entry of the call, in several ways through shared memory
        tensor = mpi.empty_shared((numel,)).fill_(RANK + 1)  # in memory that the other ranks have not mapped yet
        if 4 * numel <= most_carried(num_hosts, in_steps=num_hosts < SIZE):
            agree(fast(tensor), "not by the fast path")
            agree.bits(tensor, torch.full((numel,), SIZE * (SIZE + 1) / 2), f"[{numel}]")
