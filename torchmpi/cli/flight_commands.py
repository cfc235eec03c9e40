"""The commands ``torchmpi dump`` and ``torchmpi analyze``: the last calls of the ranks of a job, running or dead."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from ..communicators.flight_record import FILE_NAME, SUFFIX, RankCalls, parse, read
from ..errors import TorchMPIError
from . import torch_traces
from .flight_analysis import as_json, report


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    folder: Path = options.folder or Path(f"torchmpi-dump-{options.process}")
    if options.command == "dump":
        num_ranks = dump(options.process, folder)
        print(f"The last calls of {num_ranks} rank{'s' if num_ranks > 1 else ''}: {folder}")
    records = read_folder(folder)
    if options.torch is not None:
        torch_traces.write(records, options.torch)
    print(json.dumps(as_json(records), indent=1) if options.json else report(records))
    return 0


def read_folder(folder: Path) -> list[RankCalls]:
    """Read the flight records in a folder, in the order of the ranks.

    Raises:
        TorchMPIError: There are none, or a file is no flight record.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise TorchMPIError(
            f"There is no file *{SUFFIX} in {folder}. Start the job with TORCHMPI_FLIGHT_RECORD={folder}, or call "
            "`torchmpi dump PROCESS` while it runs."
        )
    return sorted((read(path) for path in paths), key=lambda record: record.rank)


def dump(process: int, folder: Path) -> int:
    """Copy the flight records of a process and of all processes that it has started; return their number.

    Raises:
        TorchMPIError: The process does not exist, or none of them is a rank that this user may read.
    """
    try:
        root = psutil.Process(process)
        processes = [process, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        raise TorchMPIError(f"There is no process {process} on this host.") from None
    contents = {data for pid in processes for data in _records_of(pid)}
    if not contents:
        raise TorchMPIError(
            f"Neither process {process} nor a process that it has started is a rank between mpi.start() and mpi.stop() "
            "that this user may read. Name the process of a rank or of its launcher, as its user or as root."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for data in contents:
        rank = parse(data, "the record").rank
        (folder / f"rank{rank}{SUFFIX}").write_bytes(data)
    return len(contents)


def _records_of(process: int) -> Iterator[bytes]:
    """Read the flight record that a process has open, without its help: it may be stopped."""
    files = Path(f"/proc/{process}/fd")
    try:
        names = sorted(os.listdir(files), key=int)
    except OSError:  # the process of another user, or gone
        return
    for name in names:
        try:
            target = os.readlink(files / name)
            if target.startswith(f"/memfd:{FILE_NAME}") or target.endswith(SUFFIX):
                yield (files / name).read_bytes()
        except OSError:
            continue
