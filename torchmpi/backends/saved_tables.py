"""The file of measured selection tables: JSON, with one entry per shape of a job.

An entry is valid for the shape on which it was measured (hosts, ranks, cores, processor) and for the same versions of
the software. A file that cannot be used is not an error: the run uses the default table and prints the reason.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import files
from .._version import __version__
from ..config import cache_folder
from .selection_table import Key, Table, checked, keys

_FORMAT = 1
NO_FILE = "there is no such file"
NO_ENTRY = "it has no table for a job of this shape"


class JobDescription(NamedTuple):
    """The shape of a job and the versions of its software, for which a measured table is valid."""

    shape: dict[str, Any]
    versions: dict[str, str]


def describe_job(hosts: Sequence[int], num_cores: int, num_local_ranks: int, mpi: str) -> JobDescription:
    """Describe a job by the host of each rank, and the cores and ranks of this host.

    >>> describe_job([0, 0, 1, 1], 8, 2, "Open MPI 5.0.11").shape["ranks_per_host"]
    [2, 2]
    """
    ranks = Counter(hosts)
    shape = {
        "ranks_per_host": [ranks[host] for host in sorted(ranks)],
        "cores_per_rank": round(num_cores / num_local_ranks, 3),
        "cpu": cpu_model(),
    }
    return JobDescription(shape, {"mpi": mpi, "torch": torch.__version__, "torchmpi": __version__})


def cpu_model() -> str:
    """Return the model name of the processor, or the architecture if Linux reports no name.

    >>> cpu_model() != ""
    True
    """
    lines = files.text_of("/proc/cpuinfo").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def path_for(setting: str) -> Path | None:
    """Return the path for the setting ``tuning_file``; None for ``none``, and for a user without a home.

    >>> path_for("/etc/tuning.json"), path_for("none")
    (PosixPath('/etc/tuning.json'), None)
    """
    if setting == "none":
        return None
    folder = cache_folder()
    return Path(setting).expanduser() if setting else folder and folder / "tuning.json"


def load(path: Path, job: JobDescription) -> tuple[Table | None, str]:
    """Return the table for a job and an empty string, or None and the reason why there is no such table."""
    try:
        entries = _entries(path)
    except FileNotFoundError:
        return None, NO_FILE
    except (OSError, ValueError) as error:
        return None, f"it cannot be read ({_first_line(error)})"
    alike = [entry for entry in entries if entry.get("shape") == job.shape]
    if not alike:
        return None, NO_ENTRY
    found = alike[-1]
    if found.get("versions") != job.versions:
        return None, f"it was measured with {_difference(found.get('versions'), job.versions)}"
    try:
        return _table_from(found["table"]), ""
    except (KeyError, TypeError, ValueError) as error:
        return None, f"its entry for this job is damaged ({_first_line(error)})"


def save(path: Path, job: JobDescription, table: Table) -> None:
    """Replace the table for this shape of a job. The file is replaced atomically."""
    try:
        entries = [entry for entry in _entries(path) if entry.get("shape") != job.shape]
    except (OSError, ValueError):
        entries = []  # a damaged file is overwritten
    rows = [{**key._asdict(), "rule": rule} for key, rule in table.items()]
    saved = time.strftime("%Y-%m-%d %H:%M:%S")
    entries.append({"shape": job.shape, "versions": job.versions, "saved": saved, "table": rows})
    text = json.dumps({"format": _FORMAT, "entries": entries}, indent=1)
    files.write(path, text, mode=0o600, make_folder=True)


def _entries(path: Path) -> list[dict[str, Any]]:
    content = files.parse_json(files.read(path, files.MOST_JSON_BYTES))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError("not a file of this version")
    entries = content.get("entries")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("no list of entries")
    return entries


def _table_from(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for row in rows:
        (key,) = keys(*(str(row[part]) for part in Key._fields))
        table[key] = checked(key, [(limit, str(transport)) for limit, transport in row["rule"]])
    return table


def _difference(theirs: Any, ours: dict[str, str]) -> str:
    """List the versions that differ.

    >>> _difference({"mpi": "MPICH 5.0.2", "torch": "2.13"}, {"mpi": "Open MPI 5.0.11", "torch": "2.13"})
    'mpi MPICH 5.0.2, not Open MPI 5.0.11'
    """
    theirs = theirs if isinstance(theirs, dict) else {}
    differences = [f"{name} {theirs.get(name)}, not {ours[name]}" for name in ours if theirs.get(name) != ours[name]]
    return "; ".join(differences)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
