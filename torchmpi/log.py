"""The logger ``torchmpi``: messages of the package on standard error.

The environment variable ``TORCHMPI_LOG`` sets the level (``debug``, ``info``, ``warning``, ``error``, ``critical``;
default ``info``). Records have the attributes ``rank``, None before ``start()``, and ``host``. At the level ``debug``
each line begins with level, rank and host. Programs may add handlers to ``logging.getLogger("torchmpi")``, or remove
the one of this module.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys

VARIABLE = "TORCHMPI_LOG"
LEVELS = ("debug", "info", "warning", "error", "critical")
DEFAULT_LEVEL = "info"
HOST = socket.gethostname()
_WITH_PROGRAM = ("torchmpi ", "torchmpi: ", "python -m torchmpi ")
"""Beginnings of messages that name the program already."""

logger = logging.getLogger("torchmpi")


class _StandardErrorHandler(logging.Handler):
    """Writes ``torchmpi: message`` to the current ``sys.stderr``, and flushes it.

    The handler takes no lock, so that a thread which ends the job cannot wait for another thread, or for a lock that
    was held when this process was forked. A record is one call of ``write()``, so lines of several threads do not mix.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        """Write the record without acquiring the lock of the handler."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; errors of the stream (closed, None, full) are ignored."""
        with contextlib.suppress(Exception):
            place = _place_of(record) if logger.isEnabledFor(logging.DEBUG) else ""
            sys.stderr.write(_as_text(record.getMessage(), place))
            sys.stderr.flush()


def _as_text(message: str, place: str = "") -> str:
    r"""Format a line; `place` comes first if it is not empty.

    >>> _as_text("rank 0 stops"), _as_text("torchmpi 1.0: 2 ranks")
    ('torchmpi: rank 0 stops\n', 'torchmpi 1.0: 2 ranks\n')
    >>> _as_text("torchmpi: rank 0 stops", "info, rank 0 on node1")
    'torchmpi: info, rank 0 on node1: rank 0 stops\n'
    """
    if place:
        return f"torchmpi: {place}: {message.removeprefix('torchmpi: ')}\n"
    return f"{message}\n" if message.startswith(_WITH_PROGRAM) else f"torchmpi: {message}\n"


def _place_of(record: logging.LogRecord) -> str:
    rank = "" if _place.rank is None else f"rank {_place.rank} "
    return f"{record.levelname.lower()}, {rank}on {_place.host}"


def set_place(rank: int | None, host: str) -> None:
    """Set rank and host in later records."""
    _place.rank, _place.host = rank, host


class _Place(logging.Filter):
    """Adds rank and host of this process to each record."""

    rank: int | None = None
    host = HOST

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank, record.host = self.rank, self.host
        return True


_place = _Place()
logger.addFilter(_place)
logger.addHandler(_StandardErrorHandler())
logger.propagate = False  # otherwise a program that configures the root logger would see each message twice
level = os.environ.get(VARIABLE, DEFAULT_LEVEL).lower()
logger.setLevel((level if level in LEVELS else DEFAULT_LEVEL).upper())  # Config.from_environment() rejects others


def log_fatal(message: str) -> None:
    """Log the reason for the end of the job, also if the program has disabled the logger."""
    if logger.isEnabledFor(logging.CRITICAL):
        logger.critical(message)
    else:
        write_directly(message)


def write_directly(message: str, file: int | None = None) -> None:
    """Write a message to a file descriptor, or to that of standard error.

    For signal handlers: the interrupted code may be writing to ``sys.stderr``, which then raises a ``RuntimeError``, or
    may hold a lock of the module ``logging``.
    """
    with contextlib.suppress(OSError):
        os.write(2 if file is None else file, _as_text(message).encode(errors="replace"))
