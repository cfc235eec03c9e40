"""Processes of another user, in which the tests of this folder attack."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

STRANGER = 54321
"""The number of a user that has no files and no processes."""


def become_stranger() -> None:
    """Give this process to the other user.

    Raises:
        OSError: This process may not, although it may be root in a container.
    """
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)


def _can_be_others() -> bool:
    if os.geteuid() != 0:
        return False
    if (pid := os.fork()) == 0:
        try:
            become_stranger()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


needs_root = pytest.mark.skipif(not _can_be_others(), reason="needs root, which may act as another user")


class Stranger:
    """A process of another user that runs a function; it is forked, and so needs no access to the files of this one."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        result: Any = None
        try:
            become_stranger()
            signal.alarm(120)  # if the test is killed
            result = function(*arguments)
        except BaseException:
            result = RuntimeError(traceback.format_exc())
        finally:
            try:
                with os.fdopen(writer, "wb") as pipe:
                    pickle.dump(result, pipe)
            finally:
                os._exit(0)

    def result(self) -> Any:
        """Wait for the end of the function, and return its result or raise its error."""
        with os.fdopen(self._reader, "rb") as pipe:
            data = pipe.read()
        os.waitpid(self.pid, 0)
        result = pickle.loads(data)
        if isinstance(result, Exception):
            raise result
        return result
