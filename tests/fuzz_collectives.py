"""Differential fuzzing of the collectives: random calls, interleaved and on several communicators, against references.

    mpirun -n 3 python tests/fuzz_collectives.py --cases 100000 --seed 1

Every rank draws the same cases from the seed: collective, backend, dtype, operation, shape, layout of the input and of
`out`, synchronous or asynchronous, and communicator (the world, levels, their inner and outer groups, `mpi.group`). A
round submits some calls, waits for the asynchronous ones in another order, and then compares every result, bit by bit,
with the reference of contract.py. In every third round several threads of each rank make the calls, each those of some
of the communicators. A failure prints the seed and the number of its round; ``--seed S --first ROUND --rounds 1``
repeats it.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from helpers import contract

import torchmpi as mpi
from torchmpi import errors
from torchmpi.session import runtime

REDUCING = ("allreduce", "reduce", "reduce_scatter", "allreduce_many")
COLLECTIVES = (*REDUCING, "broadcast", "allgather", "gather", "scatter", "alltoall", "sendreceive")
BACKENDS = (None, None, None, "shm", "mpi", "p2p", "gloo")
LAYOUTS = ("plain", "plain", "strided", "offset", "lazy", "shared")
_SIZES = (0, 1, 2, 3, 7, 8, 31, 64, 255, 1000, 1025, 4096, 20_000, 70_001)
_CALLS_PER_ROUND = 8
_THREADED_EVERY = 3  # rounds
_NUM_THREADS = 3
_SHARED_BYTES = 1 << 20
_DELAY_PROBABILITY = 0.02
_LONGEST_DELAY_SECONDS = 0.003


@dataclass
class Case:
    """One call, the same on all ranks but for the values."""

    number: int
    collective: str
    dtype: torch.dtype
    op: str
    shape: tuple[int, ...]
    layout: str
    out: str | None
    """Layout of the output; None for a call in place, or with a new result."""
    backend: str | None
    is_async: bool
    root_draw: int
    comm: int
    """Index of the communicator."""
    extra_rows: int
    """Rows that rank r of the group has more than rank r - 1, where lengths may differ."""


@dataclass
class Comm:
    """A communicator of the test, and the world ranks of this rank's group in order; none if it is not in the group."""

    comm: Any
    ranks: tuple[int, ...]

    @cached_property
    def hosts(self) -> list[list[int]]:
        """The positions in the group of the ranks of each host."""
        hosts: dict[int, list[int]] = {}
        for index, rank in enumerate(self.ranks):
            hosts.setdefault(runtime.current().context.hosts[rank], []).append(index)
        return list(hosts.values())


@dataclass
class Call:
    """A submitted call, with what its result must be."""

    case: Case
    handle: Any
    result: Any
    tensor: Any
    out: torch.Tensor | None
    expected: Any
    """None if this rank gets no result."""
    expected_input: Any
    """What the input must contain afterwards; None if the call may overwrite it."""


def draw(source: random.Random, number: int, num_comms: int) -> Case:
    """Draw a case; the same source gives the same case on every rank."""
    collective = source.choice(COLLECTIVES)
    dtype = source.choice(tuple(contract.OPS_OF) if collective in REDUCING else contract.MOVABLE)
    numel = source.choice(_SIZES)
    dims = source.choice((0, 1, 1, 1, 2, 3)) if collective != "scatter" else source.choice((1, 1, 2))
    shape: tuple[int, ...] = ()
    if dims:
        inner = tuple(source.choice((1, 2, 3, 5)) for _ in range(dims - 1))
        shape = (numel // math.prod(inner), *inner)
    return Case(
        number=number,
        collective=collective,
        dtype=dtype,
        op=source.choice(contract.OPS_OF.get(dtype, ("sum",))),
        shape=shape,
        layout=source.choice(LAYOUTS),
        out=source.choice((None, None, "plain", "strided", "shared")),
        backend=source.choice(BACKENDS),
        is_async=source.random() < 0.5,
        root_draw=source.randrange(1 << 16),
        comm=source.randrange(num_comms),
        extra_rows=source.choice((0, 0, 0, 1, 3)),
    )


class Fuzzer:
    """Runs rounds of cases on the communicators that it makes."""

    def __init__(self) -> None:
        rank, size = mpi.rank(), mpi.size()
        self.comms = [Comm(0, tuple(range(size)))]
        before = mpi.communicator().level
        for keys in ([r % 2 for r in range(size)], [r // 2 for r in range(size)]):
            mpi.set_communicator(0)
            level = mpi.push_communicator(keys[rank])
            with mpi.use(level) as communicator:
                inner, outer = communicator.intra, communicator.inter
            # A level and its inner group are the same group: calls on both must not come from two threads.
            self.comms += [Comm(inner if keys[0] == keys[-1] else level, inner.ranks)]
            self.comms += [Comm(outer, outer.ranks if outer else ())]
        mpi.set_communicator(before)
        for ranks in (tuple(range(size))[::-1], (size - 1, 0) if size > 1 else (0,)):
            comm = mpi.group(ranks, comm=0)
            self.comms.append(Comm(comm, ranks if comm else ()))
        self.num_refused = 0
        self._free: list[torch.Tensor] = []
        self._in_use: list[torch.Tensor] = []
        self._lock = threading.Lock()

    # --- inputs

    def _shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A part of one of a few shared tensors, which later rounds use again."""
        numel = math.prod(shape)
        if numel * dtype.itemsize > _SHARED_BYTES:
            return torch.zeros(shape, dtype=dtype)
        with self._lock:
            memory = self._free.pop() if self._free else mpi.empty_shared(_SHARED_BYTES, dtype=torch.uint8)
            self._in_use.append(memory)
        return memory[: numel * dtype.itemsize].view(dtype).view(shape) if numel else torch.zeros(shape, dtype=dtype)

    def _placed(self, values: torch.Tensor, layout: str) -> torch.Tensor:
        """The same values in memory of the given layout."""
        if layout == "strided":
            return contract.strided(values)
        if layout == "offset":
            memory = torch.zeros(values.numel() + 3, dtype=values.dtype)
            return memory[3:].view(values.shape).copy_(values)
        if layout == "lazy" and values.is_complex():  # torch sets a bit instead of conjugating
            return values.conj().resolve_conj().conj()
        if layout == "lazy" and values.dtype in (torch.float32, torch.float64):  # and another one for negative numbers
            return torch.complex(torch.zeros_like(values), -values).conj().imag
        if layout == "shared":
            return self._shared(tuple(values.shape), values.dtype).copy_(values)
        return values.clone()

    def _inputs(self, case: Case, ranks: tuple[int, ...]) -> list[torch.Tensor]:
        grows = case.collective in ("allgather", "gather", "alltoall") and len(case.shape) > 0
        shapes = [
            (case.shape[0] + case.extra_rows * index, *case.shape[1:]) if grows else case.shape
            for index in range(len(ranks))
        ]
        return [
            contract.values(shape, case.dtype, rank, case.number) for shape, rank in zip(shapes, ranks, strict=True)
        ]

    # --- one call

    def submit(self, case: Case) -> Call | None:
        """Make a call; None if this rank takes no part, or if it is refused, which all ranks must do alike."""
        ranks, size = self.comms[case.comm].ranks, len(self.comms[case.comm].ranks)
        if mpi.rank() not in ranks:
            return None
        place, root = ranks.index(mpi.rank()), case.root_draw % size
        inputs = self._inputs(case, ranks)
        own, many = inputs[place], case.collective == "allreduce_many"
        expected = self._expected(case, inputs, place, root)
        tensor: Any = self._placed(own, case.layout)
        if many:
            tensor = [tensor, *(self._placed(own[: own.shape[0] // k] if own.dim() else own, "plain") for k in (2, 3))]
            expected = [expected, *(expected[: expected.shape[0] // k] if own.dim() else expected for k in (2, 3))]
        if case.collective == "scatter" and place != root:
            tensor = None
        takes_out = case.out is not None and not many and case.collective != "sendreceive" and expected is not None
        takes_out &= case.collective not in ("scatter", "gather") or own.dim() > 0
        out = self._placed(torch.zeros_like(expected), str(case.out)) if takes_out else None
        options: dict[str, Any] = {"comm": self.comms[case.comm].comm}
        if case.collective in REDUCING:
            options["op"] = case.op
        if not many and case.collective != "sendreceive":
            options["out"] = out
        if case.collective in ("reduce", "broadcast", "gather", "scatter"):
            options["root"] = root
        if case.collective != "sendreceive":
            options["backend"] = case.backend
        else:
            shift = case.root_draw % size
            options |= {"dst": (place + shift) % size, "src": (place - shift) % size}
        in_place = ("allreduce", "reduce", "broadcast", "sendreceive", "allreduce_many")
        kept = out is not None or case.collective not in in_place or (case.collective == "reduce" and place != root)
        function = getattr(mpi, case.collective + "_async" if case.is_async else case.collective)
        try:
            given = function(tensor, **options)
        except (errors.BackendUnavailableError, errors.DtypeError):
            with self._lock:
                self.num_refused += 1
            return None
        handle, result = (given, None) if case.is_async else (None, given)
        if case.collective == "reduce" and place != root:
            out = None  # the result is the input
        return Call(case, handle, result, tensor, out, expected, own if kept and tensor is not None else None)

    def _expected(self, case: Case, inputs: list[torch.Tensor], place: int, root: int) -> Any:
        size = len(inputs)
        if case.collective in REDUCING:
            hosts = self.comms[case.comm].hosts
            if case.backend is None and 1 < len(hosts) < len(inputs):
                total = contract.reduced_by_host(inputs, case.op, hosts)
            else:
                total = contract.reduced(inputs, case.op)
            if case.collective == "reduce_scatter":
                return contract.rows(total, place, size)
            return inputs[place] if case.collective == "reduce" and place != root else total
        if case.collective == "broadcast":
            return inputs[root]
        if case.collective == "scatter":
            return contract.rows(inputs[root], place, size)
        if case.collective == "alltoall":
            return torch.cat([contract.rows(theirs, place, size) for theirs in inputs])
        if case.collective == "sendreceive":
            return inputs[(place - case.root_draw % size) % size]
        if case.collective == "gather" and place != root:
            return None
        return torch.cat([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in inputs])

    @staticmethod
    def problem(call: Call) -> str | None:
        """Return what is wrong with the result of a call."""
        if call.expected is None:
            return None if call.result is None else "a rank that is not the root got a result"
        results = call.result if isinstance(call.expected, list) else [call.result]
        expected = call.expected if isinstance(call.expected, list) else [call.expected]
        if call.out is not None and call.result is not call.out:
            return "the result is not `out`"
        for index, (actual, wanted) in enumerate(zip(results, expected, strict=True)):
            if not contract.same_bits(actual, wanted):
                return f"wrong result {index}: {tuple(actual.shape)} {actual.dtype}, wanted {tuple(wanted.shape)}"
        if call.expected_input is not None and not contract.same_bits(call.tensor, call.expected_input):
            return "the input was changed"
        return None

    # --- rounds

    def round(self, seed: int, number: int) -> list[str]:
        """Run one round; return what is wrong on this rank."""
        source = random.Random(f"{seed} {number}")
        first = number * _CALLS_PER_ROUND
        cases = [draw(source, first + index, len(self.comms)) for index in range(_CALLS_PER_ROUND)]
        threads_of_comms = [source.randrange(_NUM_THREADS) for _ in self.comms]
        jitter, order = random.Random(f"{seed} {number} {mpi.rank()}"), source.random()
        if number % _THREADED_EVERY:
            problems = self._call(cases, jitter, random.Random(order))
        else:
            problems = []

            def work(thread: int, jitter: random.Random) -> None:
                try:
                    own = [case for case in cases if threads_of_comms[case.comm] == thread]
                    problems.extend(self._call(own, jitter, random.Random(order)))
                except BaseException as error:
                    traceback.print_exc()
                    problems.append(f"thread {thread}: {error!r}")

            arguments = [(thread, random.Random(jitter.random())) for thread in range(_NUM_THREADS)]
            threads = [threading.Thread(target=work, args=each) for each in arguments]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        mpi.barrier(comm=0)  # a shared tensor of this round may be read by another rank until here
        self._free += self._in_use
        self._in_use = []
        return problems

    def _call(self, cases: list[Case], jitter: random.Random, order: random.Random) -> list[str]:
        calls = []
        for case in cases:
            if jitter.random() < _DELAY_PROBABILITY:  # another order of arrivals
                time.sleep(jitter.random() * _LONGEST_DELAY_SECONDS)
            if (call := self.submit(case)) is not None:
                calls.append(call)
        waiting = [call for call in calls if call.handle is not None]
        order.shuffle(waiting)
        for call in waiting:
            call.result = call.handle.wait()
        return [f"{reason}: {call.case}" for call in calls if (reason := self.problem(call)) is not None]

    def run(self, seed: int, first: int, num_rounds: int) -> list[str]:
        """Run rounds until one fails on any rank; return the problems of all ranks."""
        for number in range(first, first + num_rounds):
            found = mpi.allgather_object(self.round(seed, number), comm=0)
            if any(found):
                lines = [f"rank {rank}: {line}" for rank, theirs in enumerate(found) for line in theirs]
                return [f"seed {seed}, round {number}", *lines]
        return []


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Fuzz the collectives against references, under mpirun.")
    parser.add_argument("--cases", type=int, default=10_000, help="calls to make (default: 10000)")
    parser.add_argument("--rounds", type=int, help=f"rounds of {_CALLS_PER_ROUND} calls, instead of --cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first round (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default: 0)")
    options = parser.parse_args()
    begin = time.monotonic()
    rounds = options.rounds or -(-options.cases // _CALLS_PER_ROUND)
    mpi.start()
    fuzzer = Fuzzer()
    problems = fuzzer.run(options.seed, options.first, rounds)
    if mpi.rank() == 0:
        print("\n".join(problems) or f"{rounds * _CALLS_PER_ROUND} calls on {mpi.size()} ranks, no difference")
        print(f"{fuzzer.num_refused} refused, {time.monotonic() - begin:.0f} s", flush=True)
    mpi.stop()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    os.environ.setdefault("TORCHMPI_STALL_ABORT_SECONDS", "120")
    main()
