"""Job termination: when one rank fails, all ranks end within seconds, with one traceback and a non-zero exit status.

Otherwise the other ranks would wait forever. The causes are an uncaught exception, Ctrl-C, SIGTERM (also while the main
thread is inside MPI, where Python runs no signal handlers), the exit of the interpreter without ``stop()`` while other
ranks communicate, and stalls found by the watchdog. A report is one call of ``write()``, so that reports of several
ranks do not mix.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn

from ..communicators.call_log import how_it_left
from ..communicators.group import Group
from ..communicators.status_board import StatusBoard
from ..errors import MismatchError
from ..log import log_fatal, write_directly
from ..shared_memory.memory_layout import DYING, EXIT_STATUS, EXITED
from . import launcher, mpi_library
from .watchdog import line_of_program

_HANDLER_GRACE_SECONDS = 1.0
_ABORT_GRACE_SECONDS = 5.0
_OUTPUT_SECONDS = 1.0
_POLL_SECONDS = 0.01
_TERMINATED = 128 + signal.SIGTERM
# Values of the field DYING of a rank that has failed: before it is determined which rank reports; the rank reports.
_FAILING, _REPORTING = 1, 2


class _LeavingRank(NamedTuple):
    """A rank at the end of its program, and the field EXITED of its status block."""

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

    def __init__(self, world: Group, stop: Callable[[], None]) -> None:
        self.world, self._stop = world, stop
        self.board_group: Group | None = world
        """The ranks that share a status board with this one: the first of them to fail reports. None when freed."""
        self._pid = os.getpid()
        self._installed = False
        self._previous_hook = sys.excepthook
        self._previous_thread_hook = threading.excepthook
        self._previous_exit = sys.exit
        self._left = EXIT_STATUS - 1
        self._previous_handler: Any = None
        self._wakeup: tuple[socket.socket, threading.Thread] | None = None
        self._handled = threading.Event()
        self._announced: BaseException | None = None

    def install(self) -> None:
        """Install the hooks."""
        self._installed = True
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        sys.exit = self._exit
        atexit.register(self._at_exit)
        _active.add(self)
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._watch_sigterm()

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
        atexit.unregister(self._at_exit)
        if self._wakeup is not None:
            self._unwatch_sigterm()

    def end_job(self, message: str, status: int) -> None:
        """Log a message and end all ranks. Does not return."""
        self._claim_report()
        log_fatal(launcher.announced(message))
        self._abort(status)

    def announce(self, error: BaseException) -> None:
        """Show an exception that propagates while ``stop()`` is called, as in ``try: ... finally: mpi.stop()``.

        Otherwise other ranks, which report errors about ``stop()``, may end the job before the exception is printed.
        """
        if self._claim_report():
            self._announced = error
            shown = self._printed_by_previous_hook(type(error), error, error.__traceback__)
            log_fatal(f"rank {self.world.rank} calls stop() because of an exception:\n{shown}".rstrip())

    # --- hooks

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank, size = self.world.rank, self.world.size
        # With one rank no other waits: Python ends, or in an interactive session continues, as usual.
        if os.getpid() != self._pid or not self._installed or size == 1:
            self._previous_hook(kind, error, trace)
            return
        if self._announced is not None and self._announced in (error, error.__context__):
            self._abort(1)
        if _reason_is_elsewhere(error):
            self._wait_for_report()
        left = self._find_leaving_rank() if isinstance(error, MismatchError) else None
        if self._claim_report():
            line = line_of_program(traceback.extract_tb(trace))
            if isinstance(error, KeyboardInterrupt):
                report = f"rank {rank} was interrupted (KeyboardInterrupt), which ends the job. It was {line}"
            elif left is not None:
                report = f"{left} without mpi.stop(), while rank {rank} was {line}\n{error}"
            else:
                shown = self._printed_by_previous_hook(kind, error, trace)
                report = f"rank {rank} of {size} failed, which ends the job:\n{shown}".rstrip()
            log_fatal(launcher.announced(report))
        else:
            # A mismatch or an interrupt is the same on all ranks; the first rank to fail has reported the error.
            if not isinstance(error, MismatchError | KeyboardInterrupt):
                log_fatal(f"rank {rank} failed too: {kind.__name__}: {error}")
            self._let_other_rank_end()
        if left is not None:
            self._abort(left.status or 1)
        self._abort(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)

    def _printed_by_previous_hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> str:
        """Return what the exception hook of Python or of the program prints, which would be many calls of write()."""
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            self._previous_hook(kind, error, trace)
        return printed.getvalue()

    def _on_thread_exception(self, failure: threading.ExceptHookArgs) -> None:
        """End the job if a thread of torchmpi fails: the calls queued for this thread would never end."""
        name = "" if failure.thread is None else failure.thread.name
        if os.getpid() != self._pid or not self._installed or not name.startswith("torchmpi"):
            self._previous_thread_hook(failure)
            return
        if self._claim_report():
            trace = "".join(traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback))
            report = f"rank {self.world.rank}: the thread {name!r} failed, which ends the job:\n{trace}".rstrip()
            log_fatal(launcher.announced(report))
        self._abort(1)

    def _exit(self, status: Any = None, /) -> NoReturn:
        """Record the status for the report, and exit. Python passes neither status nor exception to exit handlers."""
        if threading.current_thread() is threading.main_thread():
            number = status if isinstance(status, int) else int(status is not None)
            self._left = EXIT_STATUS + (number & 0xFF)
        self._previous_exit(status)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or not self._installed:
            return
        rank = self.world.rank
        if self._board is not None:
            self._board.set(self._board_rank, EXITED, self._left)
        try:
            self._stop()
        except BaseException as error:
            left = _LeavingRank(rank, self._left)
            if not isinstance(error, MismatchError):
                self.end_job(f"{left}, and stop() failed: {type(error).__name__}: {error}", left.status or 1)
            self._wait_for_report()  # of a rank that was in a call, which knows the line of the program
            if self._claim_report():
                log_fatal(launcher.announced(f"{left} without mpi.stop(), while other ranks were in a call.\n{error}"))
            else:
                self._let_other_rank_end()
            self._abort(left.status or 1)

    def _find_leaving_rank(self) -> _LeavingRank | None:
        """Return a rank of this host that is at the end of its program, if there is one."""
        group, board = self.board_group, self._board
        if group is None or board is None:
            return None
        fields = [(rank, board.get(index, EXITED)) for index, rank in enumerate(group.world_ranks)]
        return next((_LeavingRank(rank, field) for rank, field in fields if field), None)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._handled.set()
        if os.getpid() != self._pid or not self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._terminate(frame)

    def _terminate(self, frame: FrameType | None) -> None:
        board, rank = self._board, self._board_rank
        is_failing = board is not None and board.get(rank, DYING)
        # The launcher sends SIGTERM to the ranks that are left after one has failed: report only the first SIGTERM.
        if not is_failing and self._claim_report():
            line = f" It was {line_of_program(traceback.extract_stack(frame))}" if frame is not None else ""
            # Not through the logger: this may be a signal handler that interrupted the logger or a write to stderr.
            write_directly(launcher.announced(f"rank {self.world.rank} received SIGTERM, which ends the job.{line}"))
        self._abort(_TERMINATED)

    # --- SIGTERM

    def _watch_sigterm(self) -> None:
        self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:  # an event loop uses it: restore it, and rely on the handler alone
            signal.set_wakeup_fd(previous)
            reader.close()
            writer.close()
            return
        listener = threading.Thread(target=self._listen, args=(reader,), name="torchmpi signals", daemon=True)
        listener.start()
        self._wakeup = writer, listener

    def _listen(self, reader: socket.socket) -> None:
        """Terminate if SIGTERM arrives and the handler does not run, because the main thread is not in Python."""
        while data := reader.recv(64):
            # A handler that the program has installed meanwhile decides itself what SIGTERM does.
            is_ours = signal.SIGTERM in data and signal.getsignal(signal.SIGTERM) == self._on_sigterm
            if is_ours and not self._handled.wait(_HANDLER_GRACE_SECONDS):
                self._terminate(sys._current_frames().get(threading.main_thread().ident or 0))
        reader.close()

    def _unwatch_sigterm(self) -> None:
        assert self._wakeup is not None
        writer, listener = self._wakeup
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.signal(signal.SIGTERM, self._previous_handler)
        writer.shutdown(socket.SHUT_WR)  # ends the listener, even if a forked worker has the socket open
        writer.close()
        listener.join()
        self._wakeup = None

    def in_forked_child(self) -> None:
        """Disable the hooks in a forked worker, which is not a rank and must not use the parent's wake-up socket."""
        if self._installed and self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    # --- termination

    @property
    def _board(self) -> StatusBoard | None:
        return None if self.board_group is None else self.board_group.log_board

    @property
    def _board_rank(self) -> int:
        return 0 if self.board_group is None else self.board_group.rank

    def _claim_report(self) -> bool:
        """Mark this rank as failing; return whether it is the first on this host, which reports the failure."""
        board, rank = self._board, self._board_rank
        if board is None or board.get(rank, DYING):
            return True
        board.set(rank, DYING, _FAILING)
        others = {index: board.get(index, DYING) for index in range(board.num_blocks) if index != rank}
        # If several ranks are failing at the same time, the lowest one reports.
        if any(state == _REPORTING or (state and index < rank) for index, state in others.items()):
            return False
        board.set(rank, DYING, _REPORTING)
        return True

    def _wait_for_report(self) -> None:
        """Give the rank that has the reason of the failure time to report it."""
        board, limit = self._board, time.monotonic() + _OUTPUT_SECONDS
        while time.monotonic() < limit and not (
            board is not None and any(board.get(index, DYING) == _REPORTING for index in range(board.num_blocks))
        ):
            time.sleep(_POLL_SECONDS)

    def _let_other_rank_end(self) -> None:
        """Wait while the rank that reports the failure prints its report; it then ends all ranks."""
        _flush()
        time.sleep(_OUTPUT_SECONDS)

    def _abort(self, status: int) -> NoReturn:
        _flush()
        # MPI_Abort may return, or hang when the network is down: end this process in any case.
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread while it shuts down
            threading.Thread(target=_exit_later, args=(status,), daemon=True).start()
        if self.world.size > 1:
            time.sleep(mpi_library.FORWARDING_SECONDS)
            mpi_library.remove_own_segments()
            self.world.context.MPI.COMM_WORLD.Abort(status)
        os._exit(status)


_active: set[FailureHandling] = set()


def _in_forked_child() -> None:
    for handling in list(_active):
        handling.in_forked_child()


os.register_at_fork(after_in_child=_in_forked_child)  # cannot be unregistered, so registered once


def _flush() -> None:
    """Flush standard output and error: after this, other ranks may end this process at any moment."""
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
        if getattr(error, "reason_is_elsewhere", False):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _exit_later(status: int) -> None:
    time.sleep(_ABORT_GRACE_SECONDS)
    os._exit(status)
