"""``torchmpi bench calls``: messages, calls in flight, lists, objects, numbers, groups, gradients, strided tensors.

A row of :data:`CALLS` makes the contestants of one way to call on the buffers of one size. The collectives on single
tensors are in :mod:`.collective_bench`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import torchmpi
import torchmpi.horovod as hvd
import torchmpi.nn as mpinn

from ...collective_specs import SPECS
from ...launch import mpi_library
from ..formatting import counted, table
from .bench_job import BenchJob, job_facts
from .bench_report import Row, grouped, has_figure, page, time_and_spread, titled
from .contestants import COPY, open_group, why_absent
from .options import AUTO, DIST, HVD, NN, short_size
from .timing import BATCH_SECONDS, MIN_BATCHES, TimedCall, timed_rows

Call = Callable[[], Any]
Contestants = Mapping[str, Call]
AUTO_ASYNC, DIST_ASYNC, DIST_COALESCED, FILL = "auto async", "dist async", "dist coalesced", "fill"
_IN_FLIGHT = 8
_MANY, _MANY_NUMEL = 50, 64
_AVERAGED_NUMEL = 256
_OBJECT = {"step": 7, "loss": 0.25, "name": "conv1"}


class Buffers:
    """The tensors of the calls of one size on a rank, and what carries them."""

    def __init__(self, job: BenchJob, groups: Mapping[str, Any], num_bytes: int) -> None:
        self.rank, self.size, self.comm, self.groups = job.rank, job.size, job.comm, groups
        self.partner = job.rank ^ 1
        self.has_partner = self.partner < job.size
        numel = max(1, num_bytes // 4)
        part = max(1, numel // job.size)
        self.sent, self.received = torch.empty(numel), torch.empty(numel)
        self.part, self.rows = torch.empty(part), torch.empty(part * job.size)
        self.other_rows = torch.empty(part * job.size)
        self.in_flight = [torch.empty(numel) for _ in range(_IN_FLIGHT)]
        self.strided = torch.empty(numel, 2)[:, 0]
        self.average = torch.empty(_AVERAGED_NUMEL)
        self.many = [torch.empty(_MANY_NUMEL) for _ in range(_MANY)]
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 10))
        for parameter in self.net.parameters():
            parameter.grad = torch.empty_like(parameter)
        self.gradients = [parameter.grad for parameter in self.net.parameters() if parameter.grad is not None]
        self.parameters = [parameter.detach() for parameter in self.net.parameters()]
        self._all = (self.sent, self.received, self.average, self.part, self.rows, self.other_rows, self.strided,
                     *self.in_flight, *self.many, *self.gradients, *self.parameters)  # fmt: skip

    def touch(self) -> None:
        """Write zeros: repeated sums of other values would overflow."""
        for tensor in self._all:
            tensor.zero_()

    def fill(self) -> None:
        """Write the number of the rank, plus 1, to what is sent, and zeros to what is only received."""
        for tensor in self._all:
            tensor.fill_(0 if tensor is self.received or tensor is self.other_rows else self.rank + 1)

    @property
    def total(self) -> float:
        """The sum over the ranks of what :meth:`fill` writes."""
        return float(sum(range(1, self.size + 1)))

    def through_torch(self, make: Callable[[Any], Call]) -> dict[str, Call]:
        """Return one contestant for each process group of torch.distributed."""
        return {name: make(group) for name, group in self.groups.items()}

    def by_collective(self, function: Callable[..., Any]) -> dict[str, Call]:
        """Return those of a function of torch.distributed, and of its form with ``async_op=True``."""
        begin = partial(function, group=self.groups[DIST], async_op=True)
        return {
            **self.through_torch(lambda group: partial(function, group=group)),
            DIST_ASYNC: lambda: _wait(begin()),
        }

    def gathered_in_flight(self) -> list[torch.Tensor]:
        """Return the parts of the tensors in flight that hold rows of all ranks."""
        return [tensor[: self.rows.numel()] for tensor in self.in_flight]


class CallRow(NamedTuple):
    """A way to call."""

    make: Callable[[Buffers], Contestants]
    is_right: Callable[[Buffers, Any], bool]
    """Given what a contestant returned after :meth:`Buffers.fill`."""
    is_sized: bool = True


def _all_equal(tensors: Sequence[torch.Tensor], value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in tensors)


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # of a rank of the group
    work.wait()


def _round_trip(at: Buffers, before: Call = lambda: None) -> Contestants:
    """A message to the other rank of a pair and one back; `before` runs before each message is sent."""
    sent, received, other, group = at.sent, at.received, at.partner, at.groups[DIST]
    given, taken = sent.numpy(), received.numpy()

    def pair(send: Call, receive: Call) -> Call:
        if not at.has_partner:
            return lambda: None

        def answer() -> None:
            receive()
            before()
            send()

        def ask() -> None:
            before()
            send()
            receive()

        return ask if at.rank < other else answer

    return {
        AUTO: pair(partial(torchmpi.send, sent, other), partial(torchmpi.recv, received, other)),
        AUTO_ASYNC: pair(
            lambda: torchmpi.send_async(sent, other).wait(), lambda: torchmpi.recv_async(received, other).wait()
        ),
        **at.through_torch(
            lambda group: pair(
                partial(dist.send, sent, other, group=group), partial(dist.recv, received, other, group=group)
            )
        ),
        DIST_ASYNC: pair(
            lambda: _wait(dist.isend(sent, other, group)), lambda: _wait(dist.irecv(received, other, group))
        ),
        "mpi4py": pair(partial(at.comm.Send, given, other), partial(at.comm.Recv, taken, other)),
    }


def _fresh_round_trip(at: Buffers) -> Contestants:
    """The same for values that the sender has just written, as programs send them; and the two writes alone."""
    write = partial(at.sent.fill_, at.rank + 1)

    def fill() -> None:
        write()
        write()

    return {**_round_trip(at, before=write), FILL: fill}


def _exchange(at: Buffers) -> Contestants:
    """A message to the next rank and one from the rank before it, at the same time."""
    sent, received = at.sent, at.received
    left, right = (at.rank - 1) % at.size, (at.rank + 1) % at.size
    given, taken = sent.numpy(), received.numpy()

    def of_torch(group: Any) -> Call:
        operations = [dist.P2POp(dist.isend, sent, right, group), dist.P2POp(dist.irecv, received, left, group)]

        def run() -> None:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return run

    return {
        AUTO: partial(torchmpi.sendreceive, sent, left, right),
        AUTO_ASYNC: lambda: torchmpi.sendreceive_async(sent, left, right).wait(),
        **at.through_torch(of_torch),
        "mpi4py": partial(at.comm.Sendrecv, given, right, 0, taken, left, 0),
        "mpi4py in place": partial(at.comm.Sendrecv_replace, given, right, 0, left, 0),
    }


def _in_flight(at: Buffers) -> Contestants:
    """Several allreduces that begin before the first is awaited; without async, one after the other."""
    tensors, add = at.in_flight, mpi_library.load().SUM
    arrays, in_place = [tensor.numpy() for tensor in tensors], mpi_library.load().IN_PLACE
    wait_all = mpi_library.load().Request.Waitall

    def blocking() -> None:
        for tensor in tensors:
            torchmpi.allreduce(tensor)

    def asynchronous() -> None:
        for handle in [torchmpi.allreduce_async(tensor) for tensor in tensors]:
            handle.wait()

    def of_torch(group: Any) -> Call:
        def run() -> None:
            for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
                work.wait()

        return run

    return {
        AUTO: blocking,
        AUTO_ASYNC: asynchronous,
        **at.through_torch(of_torch),
        "mpi4py": lambda: wait_all([at.comm.Iallreduce(in_place, array, add) for array in arrays]),
    }


def _gathers_in_flight(at: Buffers) -> Contestants:
    """Several allgathers, which torch.distributed joins to one call of the backend, as FSDP does."""
    outputs = at.gathered_in_flight()
    arrays, wait_all = [output.numpy() for output in outputs], mpi_library.load().Request.Waitall

    def blocking() -> None:
        for output in outputs:
            torchmpi.allgather(at.part, output)

    def asynchronous() -> None:
        for handle in [torchmpi.allgather_async(at.part, output) for output in outputs]:
            handle.wait()

    def of_torch(group: Any) -> Call:
        def run() -> None:
            with _coalescing_manager(group):
                for output in outputs:
                    dist.all_gather_into_tensor(output, at.part, group=group)

        return run

    return {
        AUTO: blocking,
        AUTO_ASYNC: asynchronous,
        **at.through_torch(of_torch),
        "mpi4py": lambda: wait_all([at.comm.Iallgather(at.part.numpy(), array) for array in arrays]),
    }


def _all_gather_list(at: Buffers) -> Contestants:
    outputs = list(at.rows.chunk(at.size))
    return {
        AUTO: partial(torchmpi.allgather, at.part, at.rows),
        **at.by_collective(partial(dist.all_gather, outputs, at.part)),
        "mpi4py": partial(at.comm.Allgather, at.part.numpy(), at.rows.numpy()),
    }


def _reduce_scatter_list(at: Buffers) -> Contestants:
    inputs, add = list(at.rows.chunk(at.size)), mpi_library.load().SUM
    return {
        AUTO: partial(torchmpi.reduce_scatter, at.rows, at.part),
        **at.by_collective(partial(dist.reduce_scatter, at.part, inputs)),
        "mpi4py": partial(at.comm.Reduce_scatter_block, at.rows.numpy(), at.part.numpy(), add),
    }


def _all_to_all_list(at: Buffers) -> Contestants:
    inputs, outputs = list(at.rows.chunk(at.size)), list(at.other_rows.chunk(at.size))
    return {
        AUTO: partial(torchmpi.alltoall, at.rows, at.other_rows),
        **at.by_collective(partial(dist.all_to_all, outputs, inputs)),
        "mpi4py": partial(at.comm.Alltoall, at.rows.numpy(), at.other_rows.numpy()),
    }


def _all_to_all_unequal(at: Buffers) -> Contestants:
    """Rank r sends r + 1 parts of its rows to rank 0, ..., as unequal as the tokens of a mixture of experts."""
    weights = [[(sender + receiver) % at.size + 1 for receiver in range(at.size)] for sender in range(at.size)]
    unit = max(1, at.rows.numel() // sum(range(1, at.size + 1)))
    sizes = [weight * unit for weight in weights[at.rank]]  # symmetric: what is sent is what is received
    given, taken = at.rows.resize_(sum(sizes)), at.other_rows.resize_(sum(sizes))
    of_mpi = [given.numpy(), sizes], [taken.numpy(), sizes]
    return {
        AUTO: partial(torchmpi.alltoall, given, taken, splits=sizes),
        AUTO_ASYNC: lambda: torchmpi.alltoall_async(given, taken, splits=sizes).wait(),
        **at.by_collective(partial(dist.all_to_all_single, taken, given, sizes, sizes)),
        "mpi4py": partial(at.comm.Alltoallv, *of_mpi),
    }


def _has_rows_of_all(at: Buffers, tensor: torch.Tensor) -> bool:
    parts = tensor.chunk(at.size)
    return all(_all_equal([part], rank + 1) for rank, part in enumerate(parts))


def _unequal_is_right(at: Buffers, _: Any) -> bool:
    found, counts = torch.unique(at.other_rows, return_counts=True)
    unit = at.other_rows.numel() // sum(range(1, at.size + 1))
    wanted = [((at.rank + sender) % at.size + 1) * unit for sender in range(at.size)]
    return [found.tolist(), counts.tolist()] == [[*range(1, at.size + 1)], wanted]


def _exchange_is_right(at: Buffers, _: Any) -> bool:
    """Some exchange in place."""
    wanted = (at.rank - 1) % at.size + 1
    return _all_equal([at.received], wanted) or _all_equal([at.sent], wanted)


def _broadcast_object(at: Buffers) -> Contestants:
    mine = _OBJECT if at.rank == 0 else None

    def of_torch(group: Any) -> Call:
        def run() -> Any:
            values = [mine]
            dist.broadcast_object_list(values, src=0, group=group)
            return values[0]

        return run

    return {
        AUTO: partial(torchmpi.broadcast_object, mine),
        **at.through_torch(of_torch),
        "mpi4py": partial(at.comm.bcast, mine),
    }


def _allgather_object(at: Buffers) -> Contestants:
    def of_torch(group: Any) -> Call:
        def run() -> Any:
            values: list[Any] = [None] * at.size
            dist.all_gather_object(values, _OBJECT, group=group)
            return values

        return run

    return {
        AUTO: partial(torchmpi.allgather_object, _OBJECT),
        **at.through_torch(of_torch),
        "mpi4py": partial(at.comm.allgather, _OBJECT),
    }


def _number(collective: str, at: Buffers) -> Contestants:
    """A number of each rank; rank 0 is the root."""
    of_mpi = getattr(at.comm, SPECS[collective].name_in_mpi.lower())
    return {AUTO: partial(getattr(torchmpi, collective), at.rank + 1.0), "mpi4py": partial(of_mpi, at.rank + 1.0)}


def _number_is_right(collective: str, at: Buffers, result: Any) -> bool:
    spec, mine = SPECS[collective], list(range(1, at.size + 1))
    if not spec.receives(at.rank == 0):
        return True
    return bool(result == (at.total if spec.reduces else mine if spec.gathers else 1))


def _strided(at: Buffers) -> Contestants:
    """Every second element of a tensor; the others take a contiguous copy, which they copy back."""
    add, in_place = mpi_library.load().SUM, mpi_library.load().IN_PLACE
    array = at.strided.numpy()

    def of_mpi4py() -> None:
        packed = array.copy()
        at.comm.Allreduce(in_place, packed, add)
        array[:] = packed

    def of_torch(group: Any) -> Call:
        def run() -> None:
            packed = at.strided.contiguous()
            dist.all_reduce(packed, group=group)
            at.strided.copy_(packed)

        return run

    return {AUTO: partial(torchmpi.allreduce, at.strided), **at.through_torch(of_torch), "mpi4py": of_mpi4py}


def _many(at: Buffers) -> Contestants:
    """Many small tensors in one call; MPI and functions without a list reduce them one by one."""
    add, in_place = mpi_library.load().SUM, mpi_library.load().IN_PLACE
    arrays = [tensor.numpy() for tensor in at.many]

    def of_mpi4py() -> None:
        for array in arrays:
            at.comm.Allreduce(in_place, array, add)

    def of_torch(group: Any) -> Call:
        def run() -> None:
            for tensor in at.many:
                dist.all_reduce(tensor, group=group)

        return run

    def coalesced() -> None:
        with _coalescing_manager(at.groups[DIST]):
            for tensor in at.many:
                dist.all_reduce(tensor, group=at.groups[DIST])

    return {
        AUTO: partial(torchmpi.allreduce_many, at.many),
        AUTO_ASYNC: lambda: torchmpi.allreduce_many_async(at.many).wait(),
        **at.through_torch(of_torch),
        DIST_COALESCED: coalesced,
        HVD: partial(hvd.grouped_allreduce_, at.many, op=hvd.Sum),
        "mpi4py": of_mpi4py,
    }


def _average(at: Buffers) -> Contestants:
    """The average of 1 KB in new memory, through the interfaces that return such."""
    tensor = at.average
    return {
        AUTO: lambda: torchmpi.allreduce(tensor.clone(), op="avg"),
        HVD: partial(hvd.allreduce, tensor),
        NN: partial(mpinn.functional.allreduce, tensor, op="avg"),
    }


def _gradients(at: Buffers) -> Contestants:
    """The average of the gradients of a small network, against the call that makes it."""
    return {
        AUTO: partial(torchmpi.allreduce_many, at.gradients, op="avg"),
        HVD: partial(hvd.grouped_allreduce_, at.gradients),
        NN: partial(mpinn.synchronize_gradients, at.net),
    }


def _parameters(at: Buffers) -> Contestants:
    """The parameters of rank 0 for all, against a broadcast of each."""

    def native() -> None:
        for parameter in at.parameters:
            torchmpi.broadcast(parameter)

    return {
        AUTO: native,
        HVD: lambda: hvd.broadcast_parameters(at.net.state_dict(), 0),
        NN: partial(mpinn.synchronize_parameters, at.net),
    }


def _group(at: Buffers) -> Contestants:
    """A communicator of all ranks, made and freed."""
    return {
        AUTO: lambda: torchmpi.group(range(at.size)).free(),
        "mpi4py": lambda: at.comm.Split(0, at.rank).Free(),
    }


def _group_and_call(at: Buffers) -> Contestants:
    """The same with an allreduce of 1 KB between, the first one of the group, for which it gets its memory."""
    tensor, add, in_place = at.average, mpi_library.load().SUM, mpi_library.load().IN_PLACE

    def native() -> None:
        group = torchmpi.group(range(at.size))
        torchmpi.allreduce(tensor, comm=group)
        group.free()

    def of_mpi4py() -> None:
        comm = at.comm.Split(0, at.rank)
        comm.Allreduce(in_place, tensor.numpy(), add)
        comm.Free()

    return {AUTO: native, "mpi4py": of_mpi4py}


CALLS: dict[str, CallRow] = {
    "round trip": CallRow(_round_trip, lambda at, _: not at.has_partner or _all_equal([at.received], at.partner + 1)),
    "round trip, fresh": CallRow(
        _fresh_round_trip, lambda at, _: not at.has_partner or _all_equal([at.received], at.partner + 1)
    ),
    "exchange": CallRow(_exchange, _exchange_is_right),
    f"{_IN_FLIGHT} allreduces": CallRow(_in_flight, lambda at, _: _all_equal(at.in_flight, at.total)),
    f"{_IN_FLIGHT} all_gathers, coalesced": CallRow(
        _gathers_in_flight, lambda at, _: all(_has_rows_of_all(at, each) for each in at.gathered_in_flight())
    ),
    "all_gather, list": CallRow(_all_gather_list, lambda at, _: _has_rows_of_all(at, at.rows)),
    "reduce_scatter, list": CallRow(_reduce_scatter_list, lambda at, _: _all_equal([at.part], at.total)),
    "all_to_all, list": CallRow(_all_to_all_list, lambda at, _: _has_rows_of_all(at, at.other_rows)),
    "all_to_all, unequal": CallRow(_all_to_all_unequal, _unequal_is_right),
    "allreduce, strided": CallRow(_strided, lambda at, _: _all_equal([at.strided], at.total)),
    f"allreduce of {_MANY} x {_MANY_NUMEL}": CallRow(_many, lambda at, _: _all_equal(at.many, at.total), False),
    **{
        f"{name} of a number": CallRow(partial(_number, name), partial(_number_is_right, name), False)
        for name in ("allreduce", "reduce", "broadcast", "allgather", "gather")
    },
    "broadcast of an object": CallRow(_broadcast_object, lambda _, result: result == _OBJECT, False),
    "allgather of an object": CallRow(_allgather_object, lambda at, result: result == [_OBJECT] * at.size, False),
    "average of 1K": CallRow(_average, lambda at, mean: _all_equal([mean], at.total / at.size), False),
    "gradients of 4": CallRow(_gradients, lambda at, _: _all_equal(at.gradients, at.total / at.size), False),
    "parameters of 4": CallRow(_parameters, lambda at, _: _all_equal(at.parameters, 1), False),
    "group, free": CallRow(_group, lambda _, __: True, False),
    "group, allreduce, free": CallRow(_group_and_call, lambda at, _: _all_equal([at.average], at.total), False),
}
"""All rows by title."""


def measure(job: BenchJob, options: argparse.Namespace) -> dict[str, Any]:
    """Return rows of times, or of reasons why there are none. Collective."""
    hvd.init()
    groups = {DIST: open_group("torchmpi", job.resources)}
    why_no_gloo = job.agreed(why_absent("gloo")) if "gloo" in options.peers else ""
    if why_no_gloo is None:
        groups["gloo"] = open_group("gloo", job.resources)
    tasks = []
    for title, row in CALLS.items():
        for num_bytes in options.sizes if row.is_sized else (0,):
            weight = MIN_BATCHES * max(BATCH_SECONDS, job.size * num_bytes / 1e9)
            text = f"{title} {short_size(num_bytes)}" if row.is_sized else title
            tasks.append((text, weight, partial(_rows, job, options.peers, groups, title, num_bytes)))
    return {"facts": job_facts(job.comm), "rows": job.run_in_turn(tasks, options.seconds)}


def _rows(
    job: BenchJob, peers: Sequence[str], groups: Mapping[str, Any], title: str, num_bytes: int, seconds: float
) -> list[dict[str, Any]]:
    row, at = CALLS[title], Buffers(job, groups, num_bytes)
    calls = {name: call for name, call in row.make(at).items() if not name.startswith("mpi4py") or "mpi4py" in peers}
    checked = [name for name in calls if name != FILL]
    if row.is_sized:
        calls[COPY] = partial(torch.empty_like(at.sent).copy_, at.sent)
    why_not = {name: job.agreed(_problem(row, at, calls[name])) for name in checked}
    timed = [TimedCall(name, (call,), at.touch) for name, call in calls.items() if why_not.get(name) is None]
    head = {"ranks": job.size, "verb": title, "dtype": "float32", "mode": "sync", "bytes": num_bytes}
    return timed_rows(job, timed, why_not, seconds, head)


def _problem(row: CallRow, at: Buffers, call: Call) -> str | None:
    """Make the call, and return what is wrong with it, or None."""
    at.fill()
    try:
        return None if row.is_right(at, call()) else f"wrong result on rank {at.rank}"
    except Exception as error:  # other libraries may raise any exception
        return f"{type(error).__name__}: {error}".partition("\n")[0]


_LEGEND = (
    "us: median over batches, spread: half the distance of the quartiles. auto: torchmpi, dist: torch.distributed with",
    "the backend torchmpi (coalesced: in a block that joins calls), hvd: torchmpi.horovod, nn: torchmpi.nn. copy: a",
    "plain copy of such a tensor by all ranks concurrently, fill: the two writes of the fresh round trip. bytes: of a",
    "message or a tensor, or of the tensors of all ranks in a list.",
)


def as_text(report: Mapping[str, Any]) -> str:
    """Format the header, a table for each number of ranks, and missing results."""
    lines: list[str] = []
    for (ranks,), rows in grouped(report["rows"], ("ranks",)):
        names = list(dict.fromkeys(row["contestant"] for row in rows if has_figure(row)))
        cells = [["call", "bytes", *names]]
        for (title, num_bytes), cell in grouped(rows, ("verb", "bytes")):
            by_name: dict[str, Row] = {row["contestant"]: row for row in cell}
            times = [time_and_spread(by_name[name]) if name in by_name else "-" for name in names]
            cells.append([title, short_size(num_bytes) if num_bytes else "-", *times])
        lines += titled(f"{counted(ranks, 'rank')}: us (spread)", table(cells))
    return page(report, lines, _LEGEND, "verb")
