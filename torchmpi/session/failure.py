"""Job termination: when one rank fails, all ranks end within seconds, with one traceback and a non-zero exit status.

Otherwise the other ranks would wait forever. The causes are an uncaught exception, SIGTERM (also while the main thread
is inside MPI, where Python runs no signal handlers), the exit of the interpreter without ``stop()`` while other ranks
communicate, and stalls found by the watchdog.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ..communicators.group import Group
from ..log import log_fatal, write_directly
from ..shared_memory.memory_layout import DYING
from . import mpi_library

_HANDLER_GRACE_SECONDS = 1.0
_ABORT_GRACE_SECONDS = 5.0
_OUTPUT_SECONDS = 1.0
_TERMINATED = 128 + signal.SIGTERM
# Values of the field DYING of a rank that has failed: before it is determined which rank reports; the rank reports.
_FAILING, _REPORTING = 1, 2


class FailureHandling:
    """Hooks for exceptions, signals and exit, installed while the runtime runs."""

    def __init__(self, world: Group, stop: Callable[[], None]) -> None:
        self.world, self._stop = world, stop
        self.board_group = world
        """The ranks that share a status board with this one: the first of them to fail reports."""
        self._pid = os.getpid()
        self._installed = False
        self._previous_hook = sys.excepthook
        self._previous_thread_hook = threading.excepthook
        self._previous_handler: Any = None
        self._wakeup: tuple[socket.socket, threading.Thread] | None = None
        self._handled = threading.Event()
        self._announced: BaseException | None = None

    def install(self) -> None:
        """Install the hooks."""
        self._installed = True
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        atexit.register(self._at_exit)
        _active.add(self)
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._watch_sigterm()

    def uninstall(self) -> None:
        """Restore the previous hooks, unless the program has replaced them meanwhile."""
        self._installed = False
        _active.discard(self)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._previous_thread_hook
        atexit.unregister(self._at_exit)
        if self._wakeup is not None:
            self._unwatch_sigterm()

    def end_job(self, message: str, status: int) -> None:
        """Log a message and end all ranks. Does not return."""
        self._claim_report()
        log_fatal(message)
        self._abort(status)

    def announce(self, error: BaseException) -> None:
        """Show an exception that propagates while ``stop()`` is called, as in ``try: ... finally: mpi.stop()``.

        Otherwise other ranks, which report errors about ``stop()``, may end the job before the exception is printed.
        """
        if self._claim_report():
            self._announced = error
            log_fatal(f"rank {self.world.rank} calls stop() because of an exception:")
            self._previous_hook(type(error), error, error.__traceback__)
            sys.stderr.flush()

    # --- hooks

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank, size = self.world.rank, self.world.size
        # With one rank no other waits: Python ends, or in an interactive session continues, as usual.
        if os.getpid() != self._pid or not self._installed or size == 1:
            self._previous_hook(kind, error, trace)
            return
        if self._announced is not None and self._announced in (error, error.__context__):
            self._abort(1)
        if self._claim_report():
            log_fatal(f"rank {rank} of {size} failed, which ends the job:")
            self._previous_hook(kind, error, trace)
            if _reason_is_elsewhere(error):
                _flush()
                time.sleep(_OUTPUT_SECONDS)  # the rank that has the reason prints it first
        else:
            # The whole message: the first rank to fail may only report that this rank aborted a call.
            log_fatal(f"rank {rank} failed too: {kind.__name__}: {error}")
            _flush()
            time.sleep(_OUTPUT_SECONDS)  # the first rank to fail is still printing, and then ends all ranks
        self._abort(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)

    def _on_thread_exception(self, failure: threading.ExceptHookArgs) -> None:
        """End the job if a thread of torchmpi fails: the calls queued for this thread would never end."""
        name = "" if failure.thread is None else failure.thread.name
        if os.getpid() != self._pid or not self._installed or not name.startswith("torchmpi"):
            self._previous_thread_hook(failure)
            return
        if self._claim_report():
            trace = "".join(traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback))
            log_fatal(f"rank {self.world.rank}: the thread {name!r} failed, which ends the job:\n{trace}")
        self._abort(1)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or not self._installed:
            return
        try:
            self._stop()
        except BaseException as error:
            self.end_job(
                f"rank {self.world.rank} reached the end of its program without mpi.stop(), while other ranks were in "
                f"a call: {error}",
                1,
            )

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._handled.set()
        if os.getpid() != self._pid or not self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._terminate(frame)

    def _terminate(self, frame: FrameType | None) -> None:
        board, rank = self.board_group.log_board, self.board_group.rank
        is_failing = board is not None and board.get(rank, DYING)
        # The launcher sends SIGTERM to the ranks that are left after one has failed: report only the first SIGTERM.
        if not is_failing and self._claim_report():
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            # Not through the logger: this may be a signal handler that interrupted the logger or a write to stderr.
            write_directly(f"rank {self.world.rank} received SIGTERM, which ends the job. Its stack:\n{stack}")
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
            if signal.SIGTERM in data and not self._handled.wait(_HANDLER_GRACE_SECONDS):
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

    def _claim_report(self) -> bool:
        """Mark this rank as failing; return whether it is the first on this host, which reports the failure."""
        board, rank = self.board_group.log_board, self.board_group.rank
        if board is None or board.get(rank, DYING):
            return True
        board.set(rank, DYING, _FAILING)
        others = {index: board.get(index, DYING) for index in range(board.num_blocks) if index != rank}
        # If several ranks are failing at the same time, the lowest one reports.
        if any(state == _REPORTING or (state and index < rank) for index, state in others.items()):
            return False
        board.set(rank, DYING, _REPORTING)
        return True

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
