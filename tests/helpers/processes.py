"""Processes that are forked from that of the tests: torch and torchmpi, which take seconds, are there already."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """The number of a process that has done the work and waits until the end of the block, with no files of others.

    >>> with child(lambda: None) as process:
    ...     os.kill(process, 0)
    """
    (done, has_done), (release, keep) = os.pipe(), os.pipe()
    process = os.fork()
    if process == 0:
        _run(lambda: (work(), os.write(has_done, b"."), os.read(release, 1)), {has_done, release})
    os.close(has_done)
    os.close(release)
    try:
        assert os.read(done, 1) == b".", "the process has failed; it has printed why"
        yield process
    finally:
        os.close(keep)
        os.close(done)
        os.waitpid(process, 0)


def output_of(work: Callable[[], object]) -> tuple[int, str]:
    """Return the status and the output of a process that does the work; both streams are one pipe.

    >>> output_of(lambda: print("hello"))
    (0, 'hello\\n')
    """
    output, target = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)  # pytest has replaced them
        _run(work, set())
    os.close(target)
    with open(output, errors="replace") as file:
        text = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), text


def _run(work: Callable[[], object], keep: set[int]) -> None:
    """Do the work in a forked process and end it, without what the finalizers of its parent would do."""
    status = 1
    try:
        gc.disable()  # an object of the parent would close a descriptor that another file has by then
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2} - keep:
            with suppress(OSError):  # that of the listing
                os.close(number)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
