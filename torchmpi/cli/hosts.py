"""The hosts of a job: lists and files that name them, and the number of ranks on each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import ArgumentError

# ssh and the launchers would take a name that begins with a hyphen for an option.
_NAME = r"(?P<name>[A-Za-z0-9._][A-Za-z0-9._-]*)"
_HOST = re.compile(_NAME + r"(?::(?P<number>\d+))?")
_LINE = re.compile(_NAME + r"(?:\s*:\s*(?P<colon>\d+)|\s+slots\s*=\s*(?P<slots>\d+))?")


class Host(NamedTuple):
    """A host, and the largest number of ranks on it; None: it takes a share of the ranks of the job."""

    name: str
    slots: int | None


def parse_list(text: str) -> list[Host]:
    """Parse the value of ``--hosts``.

    >>> parse_list("node1:2,node2")
    [Host(name='node1', slots=2), Host(name='node2', slots=None)]
    """
    hosts = []
    for word in text.split(","):
        found = _HOST.fullmatch(word.strip())
        if found is None:
            raise ArgumentError(
                f"--hosts: {word!r} is not a host. Write node1,node2, or node1:2,node2:2 for 2 ranks on each. "
                "A name has letters, digits, '.', '_' and '-', and must not begin with '-'."
            )
        hosts.append(_host(found["name"], found["number"]))
    return _merged(hosts)


def read_file(path: Path) -> list[Host]:
    """Read a file with a host in each line: ``node1``, ``node1 slots=2`` (Open MPI) or ``node1:2`` (MPICH).

    A host in several lines has room for a rank in each, as in the files of batch systems.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ArgumentError(f"--hostfile {path}: {reason}.") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            raise ArgumentError(
                f"--hostfile {path}, line {number}: {text!r} is not understood. Write one host per line: node1, "
                "node1 slots=2, or node1:2. A name has letters, digits, '.', '_' and '-', and must not begin with '-'. "
                "For other formats, start mpirun itself."
            )
        hosts.append(_host(found["name"], found["colon"] or found["slots"]))
    if not hosts:
        raise ArgumentError(f"--hostfile {path}: the file names no host.")
    return _merged(hosts)


def _host(name: str, number: str | None) -> Host:
    if number is not None and int(number) < 1:
        raise ArgumentError(f"the host {name} has no room for a rank: its number of ranks must be at least 1.")
    return Host(name, None if number is None else int(number))


def _merged(hosts: Iterable[Host]) -> list[Host]:
    """Return each host once: MPICH would take a host that is named twice for two hosts.

    Batch systems name a host once for each of its ranks.
    """
    numbers: dict[str, list[int | None]] = {}
    for name, number in hosts:
        numbers.setdefault(name, []).append(number)
    for name, found in numbers.items():
        if None in found and any(found):
            raise ArgumentError(f"the host {name} is named twice: name it once, with its number of ranks.")
    return [
        Host(name, found[0] if len(found) == 1 else sum(number or 1 for number in found))
        for name, found in numbers.items()
    ]


def place(hosts: Sequence[Host], num_ranks: int | None) -> list[tuple[str, int]]:
    """Return how many ranks each host gets, in the order of the hosts; None as `num_ranks` fills them.

    Hosts without a number share the ranks that the others leave. Hosts without a rank are left out.

    >>> place([Host("a", 2), Host("b", 2)], 3), place([Host("a", None), Host("b", None)], 5)
    ([('a', 2), ('b', 1)], [('a', 3), ('b', 2)])
    """
    fixed = sum(host.slots or 0 for host in hosts)
    sharing = sum(host.slots is None for host in hosts)
    if num_ranks is None:
        num_ranks = fixed + sharing
    if not sharing and num_ranks > fixed:
        names = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ArgumentError(f"{num_ranks} ranks do not fit on {names}, with room for {fixed}. Enlarge the numbers.")
    left, rest = num_ranks, max(0, num_ranks - fixed)
    placed = []
    for host in hosts:
        if host.slots is None:
            share = -(-rest // sharing)
            rest, sharing = rest - share, sharing - 1
        else:
            share = min(host.slots, left)
        left -= share
        if share:
            placed.append((host.name, share))
    return placed
