"""The flight records that running processes have open, for the commands that read them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import psutil

from .. import files
from ..communicators.flight_record import FILE_NAME, MOST_BYTES, SUFFIX
from ..errors import TorchMPIError


def records_of(process: int | None = None) -> Iterator[Path]:
    """Return the flight records that a process and its children have open, without their help: they may be stopped.

    Without a process, those of all processes of this host.

    Raises:
        TorchMPIError: The process does not exist.
    """
    try:
        root = None if process is None else psutil.Process(process)
        children = [] if root is None else [root.pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        raise TorchMPIError(f"There is no process {process} on this host.") from None
    for folder in (Path(f"/proc/{pid}/fd") for pid in (psutil.pids() if process is None else children)):
        try:
            names = sorted(os.listdir(folder), key=int)
        except OSError:  # the process of another user, or gone
            continue
        for name in names:
            with contextlib.suppress(OSError):
                target = os.readlink(folder / name)
                if target.startswith(f"/memfd:{FILE_NAME}") or target.endswith(SUFFIX):
                    yield folder / name


def opened(path: Path, *, is_changed: bool = False) -> BinaryIO:
    """Open a file that a process has open; raise OSError if the process could lead this one to a file of others.

    Its user may be another one who wants to stop this command, or to have it read or write what he may not.
    """
    file = files.open_input(path, MOST_BYTES, is_changed=is_changed)
    try:
        users = psutil.Process(int(path.parts[2])).uids()
    except psutil.Error:
        users = ()
    if not {os.fstat(file.fileno()).st_uid, os.geteuid()} & set(users):
        file.close()
        raise PermissionError(errno.EPERM, "not a file of the user of the process", str(path))
    return file
