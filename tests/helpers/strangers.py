"""Processes of other users, in which the tests of this folder attack."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

STRANGER = 54321
"""The number of a user that has no files and no processes."""
_MOST_SECONDS = 500  # of a process whose test has been killed: longer than all waits of a test


def _fork(user: int, body: Callable[[int], object]) -> tuple[int, int]:
    """Run a function in a process of a user; return the process, and the end of a pipe whose other end it gets.

    The process is forked, and so needs no access to the files of this one.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        try:
            signal.alarm(_MOST_SECONDS)
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            body(writer)
        finally:
            os._exit(0)
    os.close(writer)
    return pid, reader


def _read_to_end(pid: int, reader: int) -> bytes:
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def _can_be_others() -> bool:
    """Whether this process may act as another user: root without the rights of root in a container may not."""
    return os.geteuid() == 0 and _read_to_end(*_fork(STRANGER, lambda pipe: os.write(pipe, b"yes"))) == b"yes"


needs_root = pytest.mark.skipif(not _can_be_others(), reason="needs root, which may act as another user")


class Stranger:
    """A process of another user that runs a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        def body(pipe: int) -> None:
            try:
                result = function(*arguments)
            except BaseException:
                result = RuntimeError(traceback.format_exc())
            with os.fdopen(pipe, "wb") as file:
                pickle.dump(result, file)

        self._process = _fork(STRANGER, body)

    def result(self) -> Any:
        """Wait for the end of the function, and return its result or raise its error."""
        said = _read_to_end(*self._process)
        assert said, f"the stranger was killed, by its limit of {_MOST_SECONDS} s or by the system"
        result = pickle.loads(said)
        if isinstance(result, Exception):
            raise result
        return result


def error_of(user: int, action: Callable[[], Any]) -> str:
    """Run an action as a user in another process; return its error, '' if there is none."""

    def body(pipe: int) -> None:
        try:
            action()
        except BaseException as error:
            os.write(pipe, str(error).encode()[:4000] or b"?")

    return _read_to_end(*_fork(user, body)).decode()


@contextlib.contextmanager
def running(user: int, action: Callable[[], Any]) -> Iterator[int]:
    """Context manager with a process of a user, which runs an action, says that it has, and waits to be ended."""

    def body(pipe: int) -> None:
        action()
        os.write(pipe, b"done")
        time.sleep(_MOST_SECONDS)

    pid, reader = _fork(user, body)
    try:
        assert os.read(reader, 4) == b"done"
        yield pid
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
