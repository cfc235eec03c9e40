"""Job termination: when one rank fails, all ranks end within seconds, with one traceback and a non-zero exit status.

Otherwise the other ranks would wait forever. Causes are, among others, an uncaught exception, Ctrl-C, SIGTERM (also
while the main thread is inside MPI, where Python runs no signal handlers), the exit of the interpreter without
``stop()`` while other ranks communicate, and stalls found by the watchdog. Each part of a report is one ``write()``, so
that the parts of several ranks do not mix.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import io
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn

from .. import other_names
from ..communicators.call_log import how_it_left
from ..communicators.rank_status import RankStatus
from ..communicators.status_board import StatusBoard
from ..config import Config
from ..errors import MismatchError, StallError, TorchMPIError
from ..launch import launcher, mpi_library
from ..log import log_fatal, write_directly
from ..shared_memory.memory_layout import EXIT_STATUS, Block
from ..shared_memory.process_vm import has_ended
from ..timeline import observer
from . import children, report
from .program_lines import line_of_program
from .signals import SignalWatch
from .status_exchange import StatusExchange

_OUTPUT_SECONDS = 1.0
_ANSWER_SECONDS, _MOST_PATIENCE_SECONDS = 0.7, 1.2  # more than 0.3: on busy cores, threads start that late
_MOST_CHARACTERS = 200
# The first host reports an error that all hosts have; the others do so only if that has not ended the job.
_FIRST_HOST_SECONDS = 3.0
_POLL_SECONDS = 0.01
_TERMINATED, _INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT
_MainThread = type(threading.main_thread())
_PR_SET_PDEATHSIG = 1  # of prctl(2)
# Values of `Block.dying` of a failed rank: the rank that reports is not determined yet; this rank reports; it has
# shown an exception with which it calls stop(), which may be no failure.
_FAILING, _REPORTING, _ANNOUNCED = 1, 2, 3


def _has_got(own: socket.socket, name: str) -> bool:
    """Bind a socket to a name; return whether no other socket has it."""
    try:
        own.bind(name)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True


class _LeavingRank(NamedTuple):
    """A rank at the end of its program, and the field `exited` of its status block."""

    rank: int
    field: int

    def __str__(self) -> str:
        return f"rank {self.rank} {how_it_left(self.field)}"

    @property
    def status(self) -> int:
        """The status passed to ``sys.exit()``, or 0."""
        return max(self.field - EXIT_STATUS, 0)


class FailureHandling:
    """Hooks for exceptions, signals and exit, installed while the runtime runs."""

    def __init__(self, exchange: StatusExchange, stop: Callable[[], None], host_name: str, config: Config) -> None:
        self._exchange, self._stop, self._host_name, self._config = exchange, stop, host_name, config
        self.world = exchange.world
        self.board_group = exchange.host
        """The ranks that share a status board with this one: the first of them to fail reports. None when freed."""
        self._report_path = os.path.abspath(config.report) if config.report else ""  # the program may change the folder
        self._pid = os.getpid()
        self._installed = False
        self._previous_hook = sys.excepthook
        self._previous_thread_hook = threading.excepthook
        self._previous_exit = sys.exit
        self._left = EXIT_STATUS - 1
        self._previous_exit_at_once = os._exit
        self._finalizer: multiprocessing.util.Finalize | None = None
        self._signals = SignalWatch(terminate=self._terminate, end_waits=self._end_waits, interrupt=self._interrupt)
        self._is_failing = False
        self._announced: BaseException | None = None
        self._neighbors: dict[int, int] = {}
        """The processes of the other ranks of this host."""
        self.before_abort: Callable[[int], None] = lambda status: None
        """Called with the status when this rank ends the job."""

    def install(self) -> None:
        self._installed = True
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        sys.exit = self._exit
        os._exit = self._exit_at_once
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:
            self._finalizer = multiprocessing.util.Finalize(None, self._at_end_of_child, exitpriority=0)
        _active.add(self)
        self._signals.start()

    def watch(self, processes: Mapping[int, int]) -> None:
        """Take the processes of ranks of this host, unless their numbers differ here, as those of other containers."""
        others = {rank: process for rank, process in processes.items() if process != self._pid}
        if not any(map(has_ended, others.values())):
            self._neighbors = others

    def uninstall(self) -> None:
        """Restore the previous hooks, unless the program has replaced them meanwhile."""
        self._installed = False
        self.board_group = None
        _active.discard(self)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._previous_thread_hook
        if sys.exit == self._exit:
            sys.exit = self._previous_exit
        if os._exit == self._exit_at_once:
            os._exit = self._previous_exit_at_once
        atexit.unregister(self._at_exit)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._signals.stop()

    def end_job(self, message: str, status: int) -> None:
        """Log a message ('' if another rank reports the reason) and end all ranks. Does not return."""
        self._claim_report()
        if message:
            self._report(message, status)
        self._abort(status)

    def announce(self, error: BaseException) -> None:
        """Show an exception that propagates while ``stop()`` is called, as in ``try: ... finally: mpi.stop()``.

        Otherwise other ranks, which report errors about ``stop()``, may end the job before the exception is printed.
        The program may have caught the exception, so errors of other ranks that do not follow from it are reported too.
        """
        if self._claim_report(_ANNOUNCED):
            self._announced = error
            shown = self._printed_by_previous_hook(type(error), error, error.__traceback__)
            log_fatal(f"rank {self.world.rank} calls stop() because of an exception:\n{shown}".rstrip())

    # --- hooks

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank, size = self.world.rank, self.world.size
        # With one rank no other waits: Python ends, or in an interactive session continues, as usual.
        if os.getpid() != self._pid or not self._installed or size == 1:
            self._previous_hook(kind, error, trace)
            if hint := other_names.hint_after(error):
                log_fatal(hint)
            return
        if self._announced is not None and self._announced in (error, error.__context__):
            self._abort(1)
        if mpi_library.abilities(self.world.context.MPI).is_ending:
            time.sleep(_OUTPUT_SECONDS)  # the process ends meanwhile
        is_elsewhere = _reason_is_elsewhere(error)
        is_consequence = is_elsewhere or isinstance(error, MismatchError | StallError | KeyboardInterrupt)
        if is_elsewhere:
            self._wait_for_report()
        line = line_of_program(traceback.extract_tb(trace))
        if isinstance(error, MismatchError | KeyboardInterrupt):
            self._let_first_host_report(f"{kind.__name__}, {line}")
        left = self._find_leaving_rank(error) if isinstance(error, MismatchError | StallError) else None
        status = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        if left is not None:
            status = left.status or 1
        if not self._claim_report(is_cause=not is_consequence):
            same = isinstance(error, MismatchError)  # the report has this text
            self._let_other_rank_end(f"failed too, {line}: {kind.__name__}" + ("" if same else f": {error}"))
        elif isinstance(error, KeyboardInterrupt):
            self._report_alone(self._about_interrupt(line), status)
        elif left is not None:
            self._report(f"{left} without mpi.stop(), while rank {rank} was {line}\n{error}", status)
        else:
            shown = self._printed_by_previous_hook(kind, error, trace)
            text = f"rank {rank} of {size} failed, which ends the job:\n{shown}{other_names.hint_after(error)}"
            self._report(text.rstrip(), status)
        self._abort(status)

    def _printed_by_previous_hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> str:
        """Return the output of the previous exception hook, which would otherwise make many calls of write()."""
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            self._previous_hook(kind, error, trace)
        return printed.getvalue()

    def _on_thread_exception(self, failure: threading.ExceptHookArgs) -> None:
        """End the job if a thread of torchmpi fails: the calls queued for this thread would never end."""
        name = "" if failure.thread is None else failure.thread.name
        if self.world.context.loss and name.startswith("torchmpi"):
            return  # its calls have failed with those of the main thread, which may go on without the lost rank
        if os.getpid() != self._pid or not self._installed or not name.startswith("torchmpi"):
            self._previous_thread_hook(failure)
            return
        if self._claim_report(is_cause=True):
            trace = "".join(traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback))
            text = f"rank {self.world.rank}: the thread {name!r} failed, which ends the job:\n{trace}".rstrip()
            self._report(text, 1)
        self._abort(1)

    def _exit(self, status: Any = None, /) -> NoReturn:
        """Record the status for the report, and exit. Python passes neither status nor exception to exit handlers."""
        if threading.current_thread() is threading.main_thread():
            number = status if isinstance(status, int) else int(status is not None)
            self._left = EXIT_STATUS + (number & 0xFF)
        self._previous_exit(status)

    def _exit_at_once(self, status: int) -> NoReturn:
        """End the job, since MPICH's launcher would kill the other ranks and return the status of this one, even 0."""
        if os.getpid() == self._pid:
            if self._installed and self.world.size > 1:
                if self._claim_report(is_cause=True):
                    line = line_of_program(traceback.extract_stack())
                    text = f"rank {self.world.rank} called os._exit({status}) without mpi.stop(), which ends the job."
                    self._report(f"{text} It was {line}", status or 1)
                self._abort(status or 1)
            mpi_library.remove_own_segments()
        self._previous_exit_at_once(status)

    def _at_end_of_child(self) -> None:
        """Run the exit handler: a forked child of multiprocessing ends by os._exit(), which skips exit handlers."""
        if sys.exc_info()[0] in (None, SystemExit):
            self._at_exit()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or not self._installed:
            return
        rank = self.world.rank
        self.world.context.exit_field = self._left
        if self._board is not None:
            self._board.set(self._board_rank, Block.exited, self._left)
        try:
            self._stop()
        except BaseException as error:
            left = _LeavingRank(rank, self._left)
            if not isinstance(error, MismatchError):
                self.end_job(f"{left}, and stop() failed: {type(error).__name__}: {error}", left.status or 1)
            self._wait_for_report()  # of a rank that was in a call: it has the line of the program
            if self._claim_report():
                text = f"{left} without mpi.stop(), while other ranks were in a call.\n{error}"
                self._report(text, left.status or 1)
            else:
                self._let_other_rank_end(how_it_left(self._left))
            self._abort(left.status or 1)

    def _find_leaving_rank(self, error: MismatchError | StallError) -> _LeavingRank | None:
        """Return a rank at the end of its program, found in `error` or on the status board; None if there is none."""
        group, board = self.board_group, self._board
        fields = list(error.exited.items()) if isinstance(error, MismatchError) else []
        if group is not None and board is not None:
            fields += [(rank, board.get(index, Block.exited)) for index, rank in enumerate(group.world_ranks)]
        return next((_LeavingRank(rank, field) for rank, field in fields if field), None)

    def _terminate(self, frame: FrameType | None) -> None:
        # The launcher sends SIGTERM to the ranks that are left after one has failed: report only the first SIGTERM.
        if not self._is_failing and self._claim_report():
            line = f" It was {line_of_program(traceback.extract_stack(frame))}" if frame is not None else ""
            message = f"rank {self.world.rank} received SIGTERM, which ends the job.{line}{self._about_killed_ranks()}"
            # Not through the logger: this may be a signal handler that interrupted the logger or a write to stderr.
            self._report_alone(message, _TERMINATED, partial(write_directly, file=launcher.stderr_of_mpirun()))
        self._abort(_TERMINATED)

    def _about_killed_ranks(self) -> str:
        """Return the reason for which a launcher sends SIGTERM; '' if there is none on this host, nor on others.

        Open MPI's launcher sends it to the other ranks when one has ended, some milliseconds after that.
        """
        ended = [rank for rank, process in self._neighbors.items() if has_ended(process) and not self._has_left(rank)]
        if ended:
            names = " and ".join(f"rank {rank} (process {self._neighbors[rank]})" for rank in sorted(ended))
            have = "has" if len(ended) == 1 else "have"
            return (
                f"\n{names} {have} ended without a message before, probably killed (SIGKILL, out of memory) or by a "
                "crash: the launcher then ends the other ranks, and its own message has the signal."
            )
        if self.world.size == len(self._neighbors) + 1:
            return ""
        return (
            "\nBatch systems send it at the time limit, and launchers when a rank has ended: if one was killed on "
            "another host, the message of the launcher names it."
        )

    def _has_left(self, rank: int) -> bool:
        """Whether a rank of this host has reported its end, or called ``stop()``."""
        group, board = self.board_group, self._board
        if group is None or board is None:
            return False
        index = group.world_ranks.index(rank)
        return any(board.get(index, field) for field in (Block.dying, Block.closed, Block.exited))

    def _end_waits(self) -> None:
        """End the calls in shared memory with an error."""
        for group in list(self.world.context.groups):
            group.end_call()

    def _interrupt(self, frame: FrameType | None) -> None:
        if self._claim_report():
            line = line_of_program(traceback.extract_stack(frame))
            self._report_alone(self._about_interrupt(line), _INTERRUPTED)
        self._abort(_INTERRUPTED)

    def _about_interrupt(self, line: str) -> str:
        return f"rank {self.world.rank} was interrupted (KeyboardInterrupt), which ends the job. It was {line}"

    def in_forked_child(self) -> None:
        """Disable the hooks in a forked worker, which is not a rank and must not use the parent's wake-up socket."""
        if self._installed:
            self._signals.in_forked_child()
            _end_with_parent(self._pid)
        self._installed = False

    # --- termination

    @property
    def _board(self) -> StatusBoard | None:
        return None if self.board_group is None else self.board_group.log_board

    @property
    def _board_rank(self) -> int:
        return 0 if self.board_group is None else self.board_group.rank

    def _claim_report(self, mark: int = _REPORTING, *, is_cause: bool = False) -> bool:
        """Mark this rank as failing; return whether it is the first on this host, which reports the failure.

        With `is_cause`, the failure does not follow from an exception that another rank has announced.
        """
        self._is_failing = True
        board, rank = self._board, self._board_rank
        if board is None or board.get(rank, Block.dying):
            return True
        board.set(rank, Block.dying, _FAILING)
        with self._apart_from_other_ranks():
            states = {board.get(index, Block.dying) for index in range(board.num_blocks) if index != rank}
            is_first = _REPORTING not in states and (is_cause or _ANNOUNCED not in states)
            if is_first or mark == _ANNOUNCED:
                board.set(rank, Block.dying, mark)
        return is_first

    @contextlib.contextmanager
    def _apart_from_other_ranks(self) -> Iterator[None]:
        """Let one rank of this host at a time run a block: the one whose socket has a name that others cannot have."""
        name, limit = f"\0torchmpi-report-{self.world.context.job:x}", time.monotonic() + _OUTPUT_SECONDS
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # no descriptor is left, for example
                own = stack.enter_context(socket.socket(socket.AF_UNIX))
                while not _has_got(own, name) and time.monotonic() < limit:  # a rank may have been stopped in the block
                    time.sleep(0.001)
            yield

    def _wait_for_report(self) -> None:
        """Wait until a rank that knows the reason reports it, for a limited time."""
        self._is_failing = True
        seconds = _OUTPUT_SECONDS if len(set(self.world.context.hosts)) == 1 else _FIRST_HOST_SECONDS
        board, limit = self._board, time.monotonic() + seconds
        while time.monotonic() < limit and not (
            board is not None and any(board.get(index, Block.dying) > _FAILING for index in range(board.num_blocks))
        ):
            time.sleep(_POLL_SECONDS)

    def _let_first_host_report(self, failure: str) -> None:
        """Wait, except on the first host, whose ranks report the same error and end the job."""
        hosts = self.world.context.hosts
        if hosts[self.world.rank] != hosts[0]:
            self._is_failing, self.world.context.failure = True, failure
            time.sleep(_FIRST_HOST_SECONDS)

    def _let_other_rank_end(self, failure: str) -> None:
        """Wait while the reporting rank prints its report, with this failure in it, and ends all ranks."""
        self.world.context.failure = failure[:_MOST_CHARACTERS]
        _flush()
        time.sleep(_OUTPUT_SECONDS + self._patience_seconds)

    def _report_alone(self, reason: str, status: int, show: Callable[[str], None] = log_fatal) -> None:
        show(f"{reason}\n{launcher.announcement()}".rstrip())
        self._write_report(reason, status, {})

    def _report(self, reason: str, status: int) -> None:
        """Print the reason at once, then the activity of the other ranks."""
        log_fatal(report.shortened(reason))
        launcher.write_error_file(reason)
        others: dict[int, RankStatus] = {}
        with contextlib.suppress(ValueError):  # the status board has been unmapped
            others = self._exchange.ask_everyone(self._patience_seconds)
        lines = report.about_others(others)
        if lines:
            own = f"torchmpi: rank {self.world.rank} is process {os.getpid()} on {self._host_name}. The others:"
            lines.insert(0, own)
        if text := "\n".join([*lines, launcher.announcement()]).rstrip():
            log_fatal(text)
        self._write_report(reason, status, others)

    def _write_report(self, reason: str, status: int, others: Mapping[int, RankStatus]) -> None:
        """Write the report as JSON, if that is requested."""
        if self._report_path:
            first = {"rank": self.world.rank, "host": self._host_name, "process": os.getpid(), "size": self.world.size}
            try:
                report.write(self._report_path, {**first, "status": status, "reason": reason}, others)
            except OSError as error:
                write_directly(f"the report cannot be written: {error}")

    @property
    def _patience_seconds(self) -> float:
        """How long to wait for the watchdogs of other ranks."""
        return min(self._config.watchdog_period_seconds + _ANSWER_SECONDS, _MOST_PATIENCE_SECONDS)

    def _abort(self, status: int) -> NoReturn:
        _flush()
        mpi_library.end_process_later()
        if self.world.size > 1:
            launcher.wait_until_output_is_read()
            self.before_abort(status)
            time.sleep(mpi_library.FORWARDING_SECONDS)
        mpi_library.remove_own_segments()
        children.remove_semaphores()
        if self.world.size > 1:
            self.world.context.MPI.COMM_WORLD.Abort(status)
        mpi_library.exit_process(status)


_active: set[FailureHandling] = set()


def _in_forked_child() -> None:
    for handling in list(_active):
        handling.in_forked_child()


def _end_with_parent(parent: int) -> None:
    """Let the system kill a child of multiprocessing with its rank; otherwise the launcher waits for the child.

    A rank that ends normally first waits for such children. Linux sends the signal when the forking thread ends, so
    only children of the main thread are covered.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "multiprocessing.popen_fork":
        frame = frame.f_back
    if frame is not None and type(threading.current_thread()) is _MainThread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call
            mpi_library.exit_process(1)


os.register_at_fork(after_in_child=_in_forked_child)  # cannot be unregistered, so registered once


def _flush() -> None:
    """Flush what observers know, standard output and error: then other ranks may end this process at any moment."""
    observer.flush_all()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, None, or its reader has ended
            stream.flush()
    kept = getattr(sys.stderr, "getvalue", None)
    if kept is not None and sys.__stderr__ is not None:
        # sys.stderr is a buffer that would be printed later: by torch.distributed's exception hook, which calls that
        # of this module, or by pytest with --capture=sys. The process ends before that.
        with contextlib.suppress(Exception):
            sys.__stderr__.write(kept())
            sys.__stderr__.flush()
            sys.stderr.truncate(sys.stderr.seek(0))


def _reason_is_elsewhere(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # an error may be its own cause
        if isinstance(error, TorchMPIError) and error.reason_is_elsewhere:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
