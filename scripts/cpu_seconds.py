#!/usr/bin/env python3
"""Count CPU seconds: of a command, and of each test. They say more than times where others use the cores.

    scripts/cpu_seconds.py FILE COMMAND...       run a command; the file gets the seconds of all its processes

    CPU_SECONDS=FOLDER PYTHONPATH=scripts PYTEST_PLUGINS=cpu_seconds python -m pytest ...
    scripts/cpu_seconds.py FOLDER                files, functions and tests by their seconds, of all ranks

The seconds of a test are those of its process and of all that it has started, running ones too: ranks that are forked
from a server are its processes. Collection is a line of its own.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_MOST = 40


def run(path: Path, command: list[str]) -> int:
    """Run a command, and return its status."""
    process = subprocess.Popen(command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: process.send_signal(number))
    status = process.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    path.write_text(f"{used.ru_utime + used.ru_stime:.0f} ({used.ru_stime:.0f} of the system)\n")
    return status if status >= 0 else 128 - status


def seconds_so_far() -> tuple[float, float]:
    """Return user and system time of this process, of those that it has waited for, and of those that are running."""
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
        user += (int(fields[11]) + int(fields[13])) / _TICKS
        system += (int(fields[12]) + int(fields[14])) / _TICKS
    return user, system


def _children(process: int) -> list[int]:
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


class Recorder:
    """A plugin of pytest that writes user and system seconds, phase and name for each phase of a test."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)
        self.before = (0.0, 0.0)

    def note(self, what: str) -> None:
        now = seconds_so_far()
        self.file.write(f"{now[0] - self.before[0]:.3f} {now[1] - self.before[1]:.3f} {what}\n")
        self.before = now

    def pytest_collection_finish(self) -> None:
        self.note("imports collection")

    def pytest_runtest_makereport(self, item: object, call: object) -> None:
        self.note(f"{call.when} {item.nodeid}")  # type: ignore[attr-defined]

    def pytest_unconfigure(self) -> None:
        self.note("end collection")
        self.file.close()


def pytest_configure(config: object) -> None:
    folder = Path(os.environ["CPU_SECONDS"])
    folder.mkdir(parents=True, exist_ok=True)
    config.pluginmanager.register(Recorder(folder / str(os.getpid())))  # type: ignore[attr-defined]


def show(folder: Path) -> None:
    """Print the seconds of files, with those of the system, of functions and of tests."""
    systems: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    files: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            user, system, phase, name = line.split(" ", 3)
            systems[file := name.partition("::")[0]] += float(system)
            function = name.partition("[")[0]
            for table, key in ((phases, phase), (files, file), (functions, function), (tests, name)):
                table[key] += float(user) + float(system)
    print(f"{files.total():.1f} s, {systems.total():.1f} of the system;", *(f"{k} {v:.1f}" for k, v in phases.items()))
    for table in (files, functions, tests):
        print()
        for name, seconds in table.most_common(_MOST):
            print(f"{seconds:8.1f} {f'{systems[name]:8.1f}' if table is files else ''}  {name}")


def main() -> int:
    target, *command = sys.argv[1:]
    if command:
        return run(Path(target), command)
    show(Path(target))
    return 0


if __name__ == "__main__":
    sys.exit(main())
