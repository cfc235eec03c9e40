"""The commands ``torchmpi dump`` and ``torchmpi analyze``: the last calls of the ranks of a job, running or dead."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..communicators.flight_record import (
    SUFFIX,
    RankCalls,
    ask_for_records,
    from_ranges,
    parse,
    read,
    write_copy,
)
from ..errors import TorchMPIError
from ..supervision.report import named
from . import torch_traces
from .flight_analysis import as_json, report
from .open_records import opened, records_of

_GATHER_SECONDS = 30.0  # for as long NFS may say that a file does not exist
_POLL_SECONDS = 0.05


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    folder: Path = options.folder or Path(f"torchmpi-dump-{options.process}")
    if options.command == "dump":
        own = dump(options.process, folder)
        print(f"The last calls of {len(own)} rank{'s' if len(own) > 1 else ''} of this host: {folder}", flush=True)
        print(gather_other_hosts(options.process, folder, own[0].about), end="")
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


def dump(process: int, folder: Path) -> list[RankCalls]:
    """Copy the flight records of a process and of all processes that it has started, unless they are in the folder.

    Raises:
        TorchMPIError: The process does not exist, none of them is a rank that this user may read, or they are ranks of
            several jobs.
    """
    paths = list(records_of(process))
    records = {}
    processes: dict[str, set[str]] = {}
    for path in paths:  # one per rank: its children may have inherited the file, and those of earlier starts
        with contextlib.suppress(OSError, TorchMPIError), opened(path) as file:
            record = parse(file, "the record")
            if not record.has_ended:
                records[record.rank] = record, path
                processes.setdefault(str(record.about.get("job")), set()).add(str(record.about.get("process", 0)))
    if len(processes) > 1:
        jobs = "; ".join(", ".join(sorted(each)) for each in processes.values())
        raise TorchMPIError(
            f"Process {process} has started {len(processes)} jobs, whose ranks are the processes {jobs}. Name one of "
            "them, or the launcher of one job."
        )
    if not records:
        raise TorchMPIError(
            f"Neither process {process} nor a process that it has started is a rank between mpi.start() and mpi.stop() "
            "that this user may read. Name the process of a rank or of its launcher, as its user or as root."
        )
    if not _are_in(folder, paths):
        for rank, (_, path) in records.items():
            with opened(path) as file:
                write_copy(folder / f"rank{rank}{SUFFIX}", file)
    return [record for record, _ in records.values()]


def gather_other_hosts(process: int, folder: Path, about: dict[str, Any]) -> str:
    """Ask the ranks of other hosts for their flight records, through a rank of this host; return what is missing."""
    paths = list(records_of(process))
    elsewhere = set(range(about["size"])) - set(from_ranges(str(about.get("on_host", ""))))
    if not elsewhere or _are_in(folder, paths):
        return ""
    before = {rank: _file_number(folder, rank) for rank in elsewhere}
    request = time.time_ns()
    for path in paths:
        with contextlib.suppress(OSError), opened(path, is_changed=True) as file:
            ask_for_records(file, folder.resolve(), request)
    limit = time.monotonic() + _GATHER_SECONDS
    while elsewhere and time.monotonic() < limit:
        time.sleep(_POLL_SECONDS)
        elsewhere = {rank for rank in elsewhere if _file_number(folder, rank) == before[rank]}
    if not elsewhere:
        return f"The ranks of other hosts have written theirs: {named(sorted(before))}\n"
    return (
        f"No record has come from {named(sorted(elsewhere))} on other hosts in {_GATHER_SECONDS:g} s: they are stopped "
        "or busy, or all ranks of this host are; they have ended; the hosts are not connected, as with "
        'heartbeat_seconds=0 or on_lost_rank="raise"; or they do not share this folder, and have written to '
        f"{folder.resolve()} there. `torchmpi dump PROCESS --out {folder}` on their hosts reads the records of all "
        "ranks that have not ended. Copy the files here, and call `torchmpi analyze`.\n"
    )


def _are_in(folder: Path, records: Iterable[Path]) -> bool:
    """Return whether a folder is that of TORCHMPI_FLIGHT_RECORD: its files are the records, and not to be replaced."""
    for record in records:
        with contextlib.suppress(OSError):
            if record.samefile(folder / Path(os.readlink(record)).name):
                return True
    return False


def _file_number(folder: Path, rank: int) -> int:
    """Return the number of the file of a rank, which changes when the rank writes it again; 0 without one."""
    try:
        return (folder / f"rank{rank}{SUFFIX}").stat().st_ino
    except OSError:
        return 0
