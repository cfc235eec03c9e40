"""SIGTERM and SIGINT while the main thread is not in Python, where it runs no signal handlers.

Python's C handler of every signal writes its number to a socket, the wake-up descriptor. A thread reads from it, and
acts if the main thread does not: because it waits in MPI or in shared memory, or computes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from .program_lines import PACKAGE

_HANDLER_GRACE_SECONDS = 1.0
_SIGTERM_GRACE_SECONDS = 0.1  # Open MPI's mpirun kills the ranks a quarter of a second after SIGTERM
OnSignal = Callable[[FrameType | None], None]
_left: list[SignalWatch] = []
"""Watches that were stopped in another thread than the main one."""


class SignalWatch:
    """The handler of SIGTERM, and the thread that reads the wake-up descriptor.

    Args:
        terminate: Called for SIGTERM with the frame of the main thread; does not return. Only if the program has not
            installed a handler, before or later.
        end_waits: Called if the main thread is in a call that does not end after SIGINT: ends the calls that can end
            with an error, after which Python raises KeyboardInterrupt.
        interrupt: Called if the call has not ended then; does not return.
    """

    def __init__(self, *, terminate: OnSignal, end_waits: Callable[[], None], interrupt: OnSignal) -> None:
        self._terminate, self._end_waits, self._interrupt = terminate, end_waits, interrupt
        self._pid = os.getpid()
        self._handled = threading.Event()
        self._previous_handler: Any = None
        self._wakeup: tuple[socket.socket, threading.Thread] | None = None

    def start(self) -> None:
        """Install the handler and start the thread, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        while _left:
            _left.pop().stop()
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
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

    def stop(self) -> None:
        """Restore the previous handler, unless the program has replaced it meanwhile, and end the thread.

        Only the main thread can do so. In another one everything stays, without effect: signals would write to the next
        file that gets the number of the descriptor.
        """
        if threading.current_thread() is not threading.main_thread():
            self._pid = -1
            _left.append(self)
            return
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._previous_handler)
        if self._wakeup is not None:
            writer, listener = self._wakeup
            if (registered := signal.set_wakeup_fd(-1)) != writer.fileno():
                signal.set_wakeup_fd(registered)  # of an event loop that has started meanwhile; or -1
            writer.shutdown(socket.SHUT_WR)  # ends the listener, even if a forked worker has the socket open
            writer.close()
            listener.join()
            self._wakeup = None

    def in_forked_child(self) -> None:
        """Forget the parent's socket, and restore the default of SIGTERM."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._handled.set()
        if os.getpid() != self._pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._terminate(frame)

    def _listen(self, reader: socket.socket) -> None:
        while data := reader.recv(64):
            if self._pid != os.getpid():
                continue
            # A handler that the program has installed decides itself what the signal does.
            if signal.SIGTERM in data and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                if not self._handled.wait(_SIGTERM_GRACE_SECONDS):
                    self._terminate(_main_frame())
            elif signal.SIGINT in data and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._end_call_of_main_thread()
        reader.close()

    def _end_call_of_main_thread(self) -> None:
        """End a call in which the main thread waits, so that Python can raise KeyboardInterrupt; or else the job."""
        frame = _main_frame()
        if frame is None or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        position = frame.f_lasti
        for act in (self._end_waits, lambda: self._interrupt(frame)):
            time.sleep(_HANDLER_GRACE_SECONDS)
            if _main_frame() is not frame or frame.f_lasti != position:
                return
            act()


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)
