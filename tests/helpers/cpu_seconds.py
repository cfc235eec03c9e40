"""The CPU seconds of each test, with all processes that it starts; by hand, as times on busy cores say little.

    PYTHONPATH=tests PYTEST_PLUGINS=helpers.cpu_seconds TORCHMPI_TEST_CPU=FOLDER python -m pytest FILES
    python tests/helpers/cpu_seconds.py FOLDER

Under mpirun every rank writes a file of its own, and the second command adds them.
"""

from __future__ import annotations

import collections
import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import pytest


class Seconds(NamedTuple):
    """User and system time."""

    user: float
    system: float


def seconds_so_far() -> Seconds:
    """Return those of this process, of its children that were waited for, and of those that are running."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    user, system = own.ru_utime + ended.ru_utime, own.ru_stime + ended.ru_stime
    running = _children(os.getpid())
    while running:
        process = running.pop()
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            running += _children(process)
        except OSError:  # it has ended
            continue
        ticks = os.sysconf("SC_CLK_TCK")
        user += (int(fields[11]) + int(fields[13])) / ticks
        system += (int(fields[12]) + int(fields[14])) / ticks
    return Seconds(user, system)


def _children(process: int) -> list[int]:
    return [
        int(child)
        for thread in os.listdir(f"/proc/{process}/task")
        for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split()
    ]


class Recorder:
    """Writes a line for each phase of a test: user and system seconds, phase, name."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)
        self.before = Seconds(0, 0)

    def note(self, what: str) -> None:
        now = seconds_so_far()
        self.file.write(f"{now.user - self.before.user:.3f} {now.system - self.before.system:.3f} {what}\n")
        self.before = now

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self.note("imports collection::")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        self.note(f"{call.when} {item.nodeid}")

    def pytest_unconfigure(self) -> None:
        self.note("end collection::")
        self.file.close()


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get("TORCHMPI_TEST_CPU"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Recorder(Path(folder, str(os.getpid()))))


def main(folder: str, most: int = 40) -> None:
    """Print files, functions and cases by their seconds."""
    tables: list[collections.Counter[str]] = [collections.Counter() for _ in range(5)]
    users, systems, whole, phases, cases = tables
    functions: collections.Counter[str] = collections.Counter()
    for path in Path(folder).iterdir():
        for line in path.read_text().splitlines():
            user, system, phase, name = line.split(" ", 3)
            file = name.partition("::")[0]
            users[file] += float(user)
            systems[file] += float(system)
            for table, key in ((whole, file), (phases, phase), (cases, name), (functions, name.partition("[")[0])):
                table[key] += float(user) + float(system)
    print(f"{sum(users.values()):.1f} s user, {sum(systems.values()):.1f} s system", dict(phases))
    for file, seconds in whole.most_common(most):
        print(f"{seconds:8.1f} {users[file]:8.1f} {systems[file]:8.1f}  {file}")
    for table in (functions, cases):
        print()
        for name, seconds in table.most_common(most):
            print(f"{seconds:8.1f}  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
