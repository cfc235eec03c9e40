"""The file in which rank 0 of a step of Slurm tells the other ranks the port of its store and the key of the job.

It is in the home folder, which on a cluster is usually the same on all hosts. Only its user may read it.
"""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ... import files
from ...errors import LaunchError
from .. import launcher

_FOLDER = ".torchmpi"
_POLL_SECONDS = 0.1
_LIMIT_SECONDS = 120.0  # NFS may answer from its cache for 60 s
_MOST_BYTES = 4096
_REMEDY = (
    f"If the hosts share no home folder, give all ranks a key: export {launcher.JOB_KEY_VARIABLE}=$(openssl rand -hex "
    "32) before srun. Or start with srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)."
)


class MeetingPoint(NamedTuple):
    """Where and how the ranks of a step meet."""

    port: int
    key: str


class StepFile:
    """The file of a step.

    >>> StepFile("77.0.0").path.name
    'step-77.0.0.json'
    """

    def __init__(self, step: str) -> None:
        self.path = Path.home() / _FOLDER / f"step-{step}.json"

    def write(self, meeting: MeetingPoint) -> None:
        """Write the file; one that is there is replaced, as only this user can have written it.

        Raises:
            LaunchError: The file cannot be written, or others may write to the folder.
        """
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            _check(os.stat(self.path.parent))
            files.write(self.path, json.dumps(meeting), mode=0o600)
        except OSError as error:
            raise LaunchError(f"rank 0 cannot write the key of the job to {self.path}: {error}. {_REMEDY}") from error

    def read(self, rank: int, *, limit_seconds: float = _LIMIT_SECONDS) -> MeetingPoint:
        """Wait for the file, and return what it says.

        Raises:
            LaunchError: The file has not come in time, belongs to somebody else, or says something else.
        """
        limit = time.monotonic() + limit_seconds
        while True:
            try:
                with suppress(FileNotFoundError):
                    os.listdir(self.path.parent)  # NFS then asks for files that it has not found before
                    with files.open_input(self.path, _MOST_BYTES) as file:
                        _check(os.fstat(file.fileno()))
                        port, key = files.parse_json(file.read())
                        return MeetingPoint(int(port), str(key))
            except (OSError, ValueError, TypeError, OverflowError) as error:
                raise LaunchError(f"rank {rank} cannot read the key of the job from {self.path}: {error}.") from error
            if time.monotonic() >= limit:
                raise LaunchError(
                    f"rank {rank}: rank 0 has not written the key of the job to {self.path} within "
                    f"{limit_seconds:g} s. {_REMEDY}"
                )
            time.sleep(_POLL_SECONDS)

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()


def _check(status: os.stat_result) -> None:
    """Refuse what others own or may write, and a file that they may read."""
    forbidden = 0o077 if stat.S_ISREG(status.st_mode) else 0o022
    if status.st_uid != os.geteuid() or status.st_mode & forbidden:
        raise PermissionError(
            f"it belongs to the user with the number {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}; it "
            "must belong to this user only"
        )
