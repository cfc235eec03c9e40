"""``shared_dataset()``: data that one rank of each host makes, and all ranks of the host read in one memory."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch

from .. import collectives, files
from ..argument_types import checks_types
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..errors import ArgumentError, DatasetError, MismatchError
from ..session import runtime
from ..shared_memory.read_only import ReadOnlyMemory, anonymous_file
from ..shared_memory.segments import Ticket
from ..status_line import StatusLine
from ..supervision.program_lines import line_of_program, location
from . import data_format

__all__ = ["shared_dataset"]

_T = TypeVar("_T")
_ROUND_SECONDS = 10.0
_ROUNDS_PER_STALL = 3
"""At least so many rounds are made before a wait of one round would be reported, or end the job."""
_PIECE_BYTES = 64 << 20


@checks_types
def shared_dataset(
    make: Callable[[], _T],
    *,
    cache: str | os.PathLike[str] | None = None,
    source: Literal["host", "rank 0"] = "host",
    comm: Comm = None,
) -> _T:
    """Make data once on each host, in memory that all its ranks read. Collective.

    `make` runs on the first rank of each host, while the others wait. Its result, of tensors, NumPy arrays, numbers and
    texts in lists, tuples, named tuples and dictionaries, is copied to shared memory; what `make` returns is freed
    meanwhile, one tensor after the other. Each rank gets the same value, of which tensors and arrays are views of the
    one memory; numbers and texts are its own. ``DataLoader`` workers get views too, with every start method.

    The memory cannot be written. An array raises a ``ValueError``; torch does not know read-only memory, so that a
    write to a tensor ends the process by SIGSEGV, with its stack: use ``tensor.clone()``. Calls of torchmpi refuse such
    tensors.

    The memory is freed when no process has a view of it, at the latest when the processes end, however that is. After
    ``stop()`` the views remain valid, but new processes get copies.

    Args:
        make: A function without arguments. It must not call collectives, since it does not run on all ranks.
        cache: A file, from which all ranks of the host read if it exists; `make` is not called then. Otherwise it is
            written. Remove the file when `make` changes. None: the data are kept in memory only.
        source: ``host``: each host makes the data. ``rank 0``: rank 0 makes them and sends them to the other hosts.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        The value of `make`, with views in place of tensors and arrays.

    Raises:
        ArgumentError: The ranks have passed different arguments.
        DatasetError: On all ranks: `make` has raised an error on one, has returned what cannot be shared, or the file
            or the memory cannot be used.
        MismatchError: The ranks made different calls; raised on all ranks.
        NotStartedError: torchmpi is not started.

    Example:
        ::

            def load():
                images, labels = torch.load("train.pt")
                return {"images": images, "labels": labels}

            data = mpi.shared_dataset(load)
            dataset = TensorDataset(data["images"], data["labels"])
            loader = DataLoader(dataset, batch_size=32, sampler=mpinn.DistributedSampler(dataset), num_workers=2)
    """
    building = _Building(runtime.communicator(comm), make, None if cache is None else Path(cache), source)
    building.compare_arguments()
    memory = building.memory()
    value: list[_T] = []
    building.attempt(lambda: value.append(data_format.read(memory)), "the data cannot be read here")
    return value[0]


class _State(NamedTuple):
    """What a rank that makes the data tells the others."""

    has_ended: bool = False
    problem: str = ""
    doing: str = ""


class _Building:
    """One call of shared_dataset().

    The ranks exchange states in rounds until all that make data have ended. On those a thread does so while the main
    thread works, so that the others wait in short calls, which the watchdog observes, and rank 0 shows the progress.
    """

    def __init__(self, comm: Communicator, make: Callable[[], object], cache: Path | None, source: str) -> None:
        self.comm, self._make, self._cache, self._source = comm, make, cache, source
        group, running = comm.intra, runtime.current()
        self._where, self._host, self._has_threads = group.where, running.host_name, running.threads_allowed
        self._tells = comm.rank == 0 and running.config.verbose
        limits = running.config.stall_warning_seconds, running.config.stall_abort_seconds
        self.round_seconds = min([_ROUND_SECONDS, *(limit / _ROUNDS_PER_STALL for limit in limits if limit)])
        hosts = [group.context.hosts[rank] for rank in group.world_ranks]
        self._leader_of = [hosts.index(host) for host in hosts]
        """The first rank of the host of each rank."""
        self._leaders = sorted(set(self._leader_of))
        self._is_leader = comm.rank in self._leaders
        self._own: ReadOnlyMemory | None = None
        self._total_bytes = self._written_bytes = 0
        self._is_out_of_step = False
        """Whether make() has made a call that the others did not make: they have an error, and wait no more."""

    def compare_arguments(self) -> None:
        """Raise on all ranks if their arguments differ. The file may have another name on another host."""
        if self._source not in ("host", "rank 0"):
            raise ArgumentError(f"{self._where}: shared_dataset(source={self._source!r}). Pass 'host' or 'rank 0'.")
        passed = f"source={self._source!r}", f"cache={str(self._cache)!r}" if self._cache else "cache=None"
        everywhere = collectives.allgather_object(passed, comm=self.comm)
        for rank, arguments in enumerate(everywhere):
            for own, first in ((arguments[0], everywhere[0][0]), (arguments[1], everywhere[self._leader_of[rank]][1])):
                if own != first:
                    raise ArgumentError(
                        f"{self._where}: shared_dataset: rank {self._world_rank(rank)} passes {own}, and another rank "
                        f"{first}. Pass the same source on all ranks, and the same cache on all ranks of a host."
                    )

    def memory(self) -> ReadOnlyMemory:
        """Make the data, or let another rank make them, and return them. Collective."""
        goes_first = self._source == "rank 0" or self._cache is not None
        self._together([0] if goes_first else self._leaders, self._find_or_make)
        if goes_first and (others := self._leaders[1:]):
            # On a file system that the hosts share, the file is there now.
            self._together(others, self._find_or_make if self._source == "host" else self._find)
            if self._source == "rank 0":
                self._distribute()
        own = None if self._own is None else self._own.ticket
        ticket = collectives.allgather_object(own, comm=self.comm)[self._leader_of[self.comm.rank]]
        self.attempt(
            lambda: self._open(ticket),
            "cannot open what the first rank of the host has made",
            "The ranks of a host must run as one user, and see each other's processes in /proc",
        )
        assert self._own is not None
        return self._own

    def attempt(self, act: Callable[[], object], what: str, remedy: str = "") -> None:
        """Do something on this rank; raise on all ranks if it fails on one. Collective."""
        failure: DatasetError | None = None
        try:
            act()
        except (OSError, ValueError) as error:
            failure = DatasetError(f"{what}: {error}. {remedy or self._remedy()}.")
            failure.__cause__ = error
        everywhere = collectives.allgather_object(self._described(failure), comm=self.comm)
        self._raise_first(everywhere, failure)

    # --- what the first rank of a host does

    def _open(self, ticket: Ticket | None) -> None:
        if self._own is None:
            assert ticket is not None  # that rank has raised otherwise
            self._own = ReadOnlyMemory.open(ticket, to_share=True)

    def _find(self) -> None:
        if self._cache is None:
            return
        try:
            if not self._cache.exists():
                return
            self._own = data_format.open_file(self._cache)
            data_format.read(self._own)
        except (OSError, ValueError) as error:
            raise DatasetError(f"cache={str(self._cache)!r} cannot be used: {error}. {self._remedy()}.") from error

    def _find_or_make(self) -> None:
        self._find()
        if self._own is not None:
            return
        try:
            value = self._make()
        except Exception as error:
            line = line_of_program(traceback.extract_tb(error.__traceback__))
            raise DatasetError(
                f"make() has raised {type(error).__name__}: {error} ({line}). It runs on one rank of each host, "
                "without the others: its files must be there, and it must not call collectives."
            ) from error
        try:
            description = data_format.describe(value)
        except TypeError as error:
            raise DatasetError(f"make() has returned what cannot be shared: {error}.") from None
        del value  # the description drops one leaf after the other
        self._total_bytes = description.num_bytes
        try:
            with self._new_file() as file:
                data_format.write(file, description, self._note_written)
        except OSError as error:
            size = _size(self._total_bytes)
            raise DatasetError(f"{size} of data cannot be written: {error}. {self._remedy()}.") from error

    def _note_written(self, num_bytes: int) -> None:
        self._written_bytes = num_bytes

    @contextmanager
    def _new_file(self) -> Iterator[int]:
        """Context manager with a descriptor to write to; at the end, what was written is mapped."""
        if self._cache is None:
            file = anonymous_file("dataset")
            try:
                yield file
            except BaseException:
                os.close(file)
                raise
            self._own = ReadOnlyMemory.sealed(file)
        else:
            with suppress(OSError):
                files.remove_unfinished(self._cache.parent, self._cache.name)
            with files.replacing(self._cache, mode=0o600, make_folder=True, is_durable=True) as written:
                yield written.fileno()
            self._own = data_format.open_file(self._cache)

    # --- rounds

    def _together(self, builders: list[int], build: Callable[[], None]) -> None:
        """Run `build` on some ranks while the others wait; raise on all ranks if it fails on one. Collective."""
        failure: BaseException | None = None
        if self.comm.rank not in builders:
            states = self._rounds(builders, None, _State)
        else:
            states, failure = self._build(builders, build)
        if failure is not None and not isinstance(failure, DatasetError):
            raise failure  # of an interrupt, or of the exchange
        problems = [state.problem for state in states] or [self._described(failure)] * self.comm.size
        self._raise_first(problems, failure)

    def _build(self, builders: list[int], build: Callable[[], None]) -> tuple[list[_State], BaseException | None]:
        """Return the states of all ranks at the end, and the error of this one."""
        ended, ending = threading.Event(), _State()
        states: list[_State] = []
        failures: list[BaseException] = []

        def exchange() -> None:
            try:
                states.extend(self._rounds(builders, ended, lambda: ending if ended.is_set() else self._doing()))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=exchange, name="torchmpi shared_dataset", daemon=True)
        if self._has_threads:
            thread.start()
        try:
            build()
            ending = _State(has_ended=True)
        except BaseException as error:
            failures.append(error)
            ending = _State(True, self._described(error))
            self._is_out_of_step = isinstance(error.__cause__, MismatchError)
        ended.set()
        if self._has_threads:
            thread.join()
        else:
            exchange()
        return states, failures[0] if failures else None

    def _rounds(self, builders: list[int], ended: threading.Event | None, state: Callable[[], _State]) -> list[_State]:
        """Exchange states until all builders have ended; `ended` is that of this rank, if it is one."""
        status = StatusLine(quiet_seconds=_ROUND_SECONDS)
        while True:
            if ended is not None:
                ended.wait(self.round_seconds)
                if self._is_out_of_step:
                    return []
            states = collectives.allgather_object(state(), comm=self.comm)
            busy = [rank for rank in builders if not states[rank].has_ended]
            if self._tells and busy:
                others = f" ({len(busy)} of {len(builders)} hosts are not ready)" if len(builders) > 1 else ""
                status.show(f"torchmpi: shared_dataset: {states[busy[0]].doing}{others}, for {status.seconds:.0f} s")
            if not busy:
                status.clear()
                return states

    def _doing(self) -> _State:
        what = f"has written {self._written_bytes / 1e6:.0f}/{self._total_bytes / 1e6:.0f} MB"
        doing = what if self._total_bytes else f"is in make(), {location()}"
        return _State(doing=f"{self._where} on {self._host} {doing}")

    # --- from rank 0 to the other hosts

    def _distribute(self) -> None:
        """Send the data of rank 0 to the other hosts, except to those that have found their file. Collective."""
        lacks = self._is_leader and self._own is None
        first = self._own if self.comm.rank == 0 else None
        sizes = collectives.allgather_object((lacks, first.num_bytes if first else 0), comm=self.comm)
        self._total_bytes = sizes[0][1]
        if any(lacking for lacking, _ in sizes):
            self.attempt(partial(self._take, first, lacks), f"{_size(self._total_bytes)} of data cannot be written")

    def _take(self, first: ReadOnlyMemory | None, lacks: bool) -> None:
        """Make all calls of the transfer, also if this rank cannot write what it gets; raise then at the end."""
        piece = torch.empty(min(_PIECE_BYTES, self._total_bytes), dtype=torch.uint8, device="cpu")
        failure: OSError | None = None
        with ExitStack() as stack:
            try:
                file = stack.enter_context(self._new_file()) if lacks else None
            except OSError as error:
                file, failure = None, error
            for offset in range(0, self._total_bytes, _PIECE_BYTES):
                part = piece[: self._total_bytes - offset]
                if first is not None:
                    part.numpy().data[:] = first.bytes(offset, len(part))
                collectives.broadcast(part, 0, comm=self.comm)
                try:
                    if file is not None and failure is None:
                        data_format.write_bytes(file, part.numpy().data, offset, self._note_written)
                except OSError as error:
                    failure = error
            if failure is not None:
                raise failure

    # --- errors

    def _world_rank(self, rank: int) -> int:
        return self.comm.intra.world_ranks[rank]

    def _described(self, error: BaseException | None) -> str:
        """Return what other ranks are told of an error, '' if there is none."""
        if error is None:
            return ""
        what = str(error) if isinstance(error, DatasetError) else f"{type(error).__name__}: {error}"
        return f"{self._where} on {self._host}: shared_dataset: {what}"

    def _remedy(self) -> str:
        if self._cache is None:
            return "Pass cache=, a file on a disk of the host, to use no memory"
        return "Remove the file, so that it is made again, or name another one"

    def _raise_first(self, problems: list[str], own: BaseException | None) -> None:
        """Raise the error of this rank, or that of the first rank that has one, given the problems of all."""
        failed = [rank for rank, problem in enumerate(problems) if problem]
        if failed:
            rank = self.comm.rank if self.comm.rank in failed else failed[0]
            error = DatasetError(problems[rank] if own is not None else f"{self._where}: {problems[rank]}")
            error.reason_is_elsewhere = own is None
            raise error from (own.__cause__ if own is not None else None)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
