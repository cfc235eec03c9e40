"""The logger ``torchmpi``: messages of the package on standard error.

The environment variable ``TORCHMPI_LOG`` sets the level (``debug``, ``info``, ``warning``, ``error``, ``critical``;
default ``info``). Records have the attribute ``rank``, None before ``start()``. Programs may add handlers to
``logging.getLogger("torchmpi")``, or remove the one of this module.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

VARIABLE = "TORCHMPI_LOG"
LEVELS = ("debug", "info", "warning", "error", "critical")
DEFAULT_LEVEL = "info"

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
            sys.stderr.write(_as_text(record.getMessage()))
            sys.stderr.flush()


def _as_text(message: str) -> str:
    r"""Format a line.

    >>> _as_text("rank 0 stops"), _as_text("torchmpi 1.0: 2 ranks")
    ('torchmpi: rank 0 stops\n', 'torchmpi 1.0: 2 ranks\n')
    """
    return f"{message}\n" if message.startswith(("torchmpi ", "torchmpi: ")) else f"torchmpi: {message}\n"


def set_rank(rank: int | None) -> None:
    """Set the rank in later records."""
    _rank_filter.rank = rank


class _RankFilter(logging.Filter):
    """Adds the rank of this process to each record."""

    rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True


_rank_filter = _RankFilter()
logger.addFilter(_rank_filter)
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
