"""The stacks of all threads of a rank, on SIGUSR1.

The handler is one of C, from Python's module ``faulthandler``. ``signal.getsignal()`` does not show it: a program that
installs a handler only where there is none, as Lightning does for ``sbatch --signal=USR1``, installs it, and replaces
this one. The handler runs also while the main thread waits in MPI or in a kernel. It writes to a pipe, from which the
watchdog learns that stacks are wanted. Then it calls the handler of the MPI library, if that has one: MPICH counts
the signals by which its launcher announces lost ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from ..shared_memory.kernels import no_garbage_collection

_SIGNAL = signal.SIGUSR1
_MOST_BYTES = 1 << 16  # the capacity of a pipe


class StackRequests:
    """Notices SIGUSR1, unless the program or the launcher has a handler.

    >>> requests = StackRequests()
    >>> os.kill(os.getpid(), signal.SIGUSR1)
    >>> requests.take(), requests.take()
    (True, False)
    >>> requests.close()
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        if signal.getsignal(_SIGNAL) is not signal.SIG_DFL or (_is_caught() and not _is_caught_by_library):
            return
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        faulthandler.unregister(_SIGNAL)  # without effect, unless the program has replaced and removed this handler
        faulthandler.register(_SIGNAL, self._pipe[1], all_threads=False, chain=_is_caught())
        _active.add(self)

    def take(self) -> bool:
        """Return whether the signal has come since the last call."""
        with contextlib.suppress(BlockingIOError):
            return self._pipe is not None and bool(os.read(self._pipe[0], _MOST_BYTES))
        return False

    def close(self) -> None:
        """Remove the handler, unless the program has replaced it."""
        if self._pipe is not None:
            _active.discard(self)
            self.restore_default()
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    def restore_default(self) -> None:
        """Remove the handler, unless the program has replaced it."""
        if signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            faulthandler.unregister(_SIGNAL)


_active: set[StackRequests] = set()


def _in_forked_child() -> None:
    """Remove the handler in a forked worker, which is no rank: its signals would be taken for those of its rank."""
    for requests in list(_active):
        requests.restore_default()


os.register_at_fork(after_in_child=_in_forked_child)


_is_caught_by_library = False


@contextlib.contextmanager
def noting_handler_of_library() -> Iterator[None]:
    """Note whether the initialization of MPI, in a block, installs a handler of the signal."""
    global _is_caught_by_library
    before = _is_caught()
    yield
    _is_caught_by_library = not before and _is_caught()


def _is_caught() -> bool:
    """Return whether the signal has a handler; those of C are known to the system only."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return True
    return caught is None or bool(int(caught[1], 16) >> (_SIGNAL - 1) & 1)


def stacks() -> str:
    """Return the stacks of all threads of this process.

    >>> "MainThread:" in stacks()
    True
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with no_garbage_collection():  # as in program_lines.location()
        found = {ident: traceback.extract_stack(frame) for ident, frame in sys._current_frames().items()}
    own = threading.get_ident()
    lines = []
    for ident, stack in sorted(found.items(), key=lambda item: item[0] == own):
        lines.append(f"{names.get(ident, f'thread {ident}')}:")
        lines += [line.rstrip("\n") for line in traceback.format_list(stack)]
    return "\n".join(lines)
