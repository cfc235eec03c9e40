"""When one rank fails, the job ends: in seconds, with one traceback, and a status that says so.

Without this, the other ranks would wait for the failed one for ever. Four ways of failing are covered: an uncaught
exception, SIGTERM (also while the main thread is inside MPI, where Python runs no signal handler), the interpreter's
exit without ``stop()`` while others communicate, and a message from the watchdog.
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
from typing import Any

from ..communicators.group import Group
from ..shared_memory.memory_layout import DYING
from . import mpi_library

_HANDLER_GRACE_SECONDS = 1.0
_ABORT_GRACE_SECONDS = 5.0
# How far a rank is that fails.
_WOULD_EXPLAIN, _EXPLAINS = 1, 2
_SPEECH_SECONDS = 1.0
_TERMINATED = 128 + signal.SIGTERM


class FailureHandling:
    """Hooks of this process, in place while the runtime runs."""

    def __init__(self, world: Group, stop: Callable[[], None]) -> None:
        self.world, self._stop = world, stop
        self.neighbours = world
        """Ranks that share a page with this one, so that only the first of them to fail explains itself."""
        self._pid = os.getpid()
        self._installed = False
        self._previous_hook = sys.excepthook
        self._previous_handler: Any = None
        self._wakeup: tuple[socket.socket, threading.Thread] | None = None
        self._handled = threading.Event()
        self._announced: BaseException | None = None

    def install(self) -> None:
        """Put the hooks in place."""
        self._installed = True
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)
        _active.add(self)
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._watch_sigterm()

    def uninstall(self) -> None:
        """Give the hooks back, unless somebody has replaced ours."""
        self._installed = False
        _active.discard(self)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        atexit.unregister(self._at_exit)
        if self._wakeup is not None:
            self._unwatch_sigterm()

    def end_job(self, message: str, status: int) -> None:
        """Say why, and end all ranks. Does not return."""
        self._claim()
        print(message, file=sys.stderr, flush=True)
        self._abort(status)

    def announce(self, error: BaseException) -> None:
        """Show an exception that is on its way up while ``stop()`` is called, as in ``try: ... finally: mpi.stop()``.

        The others may end the job before it arrives, and the cause be lost behind their complaint about ``stop()``.
        """
        if self._claim():
            self._announced = error
            print(f"torchmpi: rank {self.world.rank} calls stop() because of an exception:", file=sys.stderr)
            self._previous_hook(type(error), error, error.__traceback__)
            sys.stderr.flush()

    # --- the ways of failing

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid or not self._installed:
            self._previous_hook(kind, error, trace)
            return
        rank, size = self.world.rank, self.world.size
        if size == 1:  # nobody waits: Python ends, or in an interactive session goes on, as it always does
            self._previous_hook(kind, error, trace)
            return
        if self._announced is not None and self._announced in (error, error.__context__):
            self._abort(1)
        if self._claim():
            print(f"torchmpi: rank {rank} of {size} failed, which ends the job:", file=sys.stderr)
            self._previous_hook(kind, error, trace)
            if _reason_is_elsewhere(error):
                _show()
                time.sleep(_SPEECH_SECONDS)  # the one that has it is on its way here, and must be heard as well
        else:
            # Whole: who failed first may only know that this rank gave up, and this rank why.
            print(f"torchmpi: rank {rank} failed too: {kind.__name__}: {error}", file=sys.stderr)
            _show()
            time.sleep(_SPEECH_SECONDS)  # the first to fail is still printing, and then ends us all
        self._abort(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or not self._installed:
            return
        try:
            self._stop()
        except BaseException as error:
            self.end_job(
                f"torchmpi: rank {self.world.rank} has come to the end of its program without mpi.stop(), while "
                "others are in "
                f"the middle of a call: {error}",
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
        log_board, rank = self.neighbours.log_board, self.neighbours.rank
        if (log_board is not None and log_board.get(rank, DYING)) or not self._claim():
            # The launcher clears up after a rank that failed and has said why: no need for more noise.
            self._abort(_TERMINATED)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        print(
            f"torchmpi: rank {self.world.rank} got SIGTERM, which ends the job. It was here:\n{stack}", file=sys.stderr
        )
        self._abort(_TERMINATED)

    # --- how they are noticed

    def _watch_sigterm(self) -> None:
        self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:  # an event loop listens there: leave it alone, the plain handler has to do
            signal.set_wakeup_fd(previous)
            reader.close()
            writer.close()
            return
        listener = threading.Thread(target=self._listen, args=(reader,), name="torchmpi signals", daemon=True)
        listener.start()
        self._wakeup = writer, listener

    def _listen(self, reader: socket.socket) -> None:
        """Python's handler runs only when the main thread is back in Python; this one hears of the signal at once."""
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
        writer.shutdown(socket.SHUT_WR)  # ends the listener, also where a forked worker has the socket open too
        writer.close()
        listener.join()
        self._wakeup = None

    def in_forked_child(self) -> None:
        """A forked worker is no rank: it must not speak for one, nor write into the parent's wake-up socket."""
        if self._installed and self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    # --- the end

    def _claim(self) -> bool:
        """Mark this rank as failing; whether no other on this host has before, so that it is ours to explain."""
        log_board, rank = self.neighbours.log_board, self.neighbours.rank
        if log_board is None or log_board.get(rank, DYING):
            return True
        log_board.set(rank, DYING, _WOULD_EXPLAIN)
        others = {row: log_board.get(row, DYING) for row in range(log_board.num_blocks) if row != rank}
        # Ranks that fail within the same microseconds see each other: then it is up to the lowest.
        if any(state == _EXPLAINS or (state and row < rank) for row, state in others.items()):
            return False
        log_board.set(rank, DYING, _EXPLAINS)
        return True

    def _abort(self, status: int) -> None:
        _show()
        # MPI_Abort may return or hang when the network is gone: then at least this process ends.
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


os.register_at_fork(after_in_child=_in_forked_child)  # cannot be undone, so once for all


def _show() -> None:
    """Let out what has been printed: after this, others may end this process at any moment."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or nobody reads it any more
            stream.flush()
    kept = getattr(sys.stderr, "getvalue", None)
    if kept is not None and sys.__stderr__ is not None:
        # Somebody keeps what is written, to show it later: torch.distributed's exception hook, which calls ours, or
        # pytest with --capture=sys. There will be no later.
        with contextlib.suppress(Exception):
            sys.__stderr__.write(kept())
            sys.__stderr__.flush()
            sys.stderr.truncate(sys.stderr.seek(0))


def _reason_is_elsewhere(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, only says that another rank has given up."""
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
