"""``torchmpi run --report``: the page of ``torchmpi top --web`` of a whole run, as one file."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from typing_extensions import Self

from ... import files
from ...errors import ArgumentError, TorchMPIError
from ...log import logger
from . import top_server
from .job_view import page_of
from .watched_job import LookClock, WatchedJob, find_jobs

_SEARCH_SECONDS = 0.3
_MOST_PARTS = 480


class RunReport:
    """Watches the jobs that this process starts, and writes the page at the end: a context manager.

    Args:
        path: The file.

    Raises:
        ArgumentError: It could not be written at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        if not self._path.parent.is_dir():
            raise ArgumentError(f"--report {path}: the folder does not exist. Create it, or name another file.")
        self._stopped = threading.Event()
        self._jobs: dict[tuple[tuple[str, str], int], WatchedJob] = {}
        self._pages: dict[tuple[tuple[str, str], int], dict[str, Any]] = {}
        self._problem = ""
        self._thread = threading.Thread(target=self._watch, name="torchmpi report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for key, job in list(self._jobs.items()):
            job.read()
            self._finish(key)
        if not self._pages:
            why = self._problem or "no rank on this host was seen between mpi.start() and mpi.stop()"
            logger.warning(f"torchmpi run: {self._path} is not written: {why}.")
            return
        try:
            files.write(self._path, top_server.page(list(self._pages.values())))
        except OSError as error:
            logger.error(f"torchmpi run: {self._path} cannot be written: {error.strerror}.")

    def _watch(self) -> None:
        try:
            clock = LookClock()
            while not self._stopped.wait(clock.pause() if self._jobs else _SEARCH_SECONDS):
                self._look()
        except Exception as error:  # whatever a report meets, the job goes on
            self._problem = f"{type(error).__name__}: {error}"
            logger.warning(f"torchmpi run: the report ends here: {self._problem}")

    def _look(self) -> None:
        for name, ranks in ({} if self._jobs else find_jobs(os.getpid())).items():
            try:
                found = WatchedJob(name, ranks, keeps_ended=True, most_parts=_MOST_PARTS, merges=True)
            except TorchMPIError:  # it has ended meanwhile
                continue
            if len(ranks) == found.size or found.elsewhere:  # not while ranks are still starting
                self._jobs[name, ranks[0].process] = found
            else:
                found.close()
        for key, job in list(self._jobs.items()):
            if not job.read():
                self._finish(key)

    def _finish(self, key: tuple[tuple[str, str], int]) -> None:
        job = self._jobs.pop(key)
        self._pages[key] = page_of(job, seconds=None)
        job.close()
