#!/usr/bin/env python3
"""Run a command while threads and processes below it pause at random: tests that need a friendly order of threads fail.

    scripts/perturb.py mpirun -n 3 python -m pytest --with-mpi tests/mpi/test_groups.py

About every 40 ms it stops one thread, or all threads of a process, for up to half a second; half of the processes that
are started stop for up to three seconds before they import anything. Python switches between threads up to fifty times
as often. The first line of the output has the seed, which repeats the choices, but not the moments of the program that
they meet. The exit status is that of the command. Linux only; as the same user, or as root.

A thread is stopped by ptrace: no signal is sent, the processes above it do not notice, and the priorities of groups and
sessions have no influence. SIGSTOP would stop all threads at once, and launchers pass it on.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

_DETACH, _SEIZE, _INTERRUPT = 17, 0x4206, 0x4207
_ALL_THREADS = 0x40000000  # __WALL
_TICK_SECONDS = 0.04
_PAUSES, _START_PAUSE_SECONDS, _MOST_PAUSED = (0.002, 0.5), 3.0, 4
_SWITCH = "import sys; sys.setswitchinterval(1e-4)\n"

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def threads_of(process: int) -> list[int]:
    """The threads of a process, none if it has ended."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{process}/task")]
    return []


class Perturbation:
    """The processes below a command, and which of their threads are stopped."""

    def __init__(self, command: int, choose: random.Random) -> None:
        self.known, self.choose, self.num_pauses = {command}, choose, 0
        self._ends: dict[int, float] = {}  # when a thread is to go on
        self._signals: dict[int, int] = {}  # of the threads that have stopped, the signal that they are to get then

    def look(self) -> list[int]:
        """Return the new processes. Those that lose their parent stay known."""
        new: list[int] = []
        for process in list(self.known):
            threads = threads_of(process)
            if not threads:
                self.known.discard(process)
            for thread in threads:
                with contextlib.suppress(OSError):
                    children = map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())
                    new += set(children) - self.known
        self.known.update(new)
        return new

    def pause(self, threads: list[int], seconds: float) -> None:
        """Stop these threads, unless they have ended or another program traces them."""
        for thread in set(threads) - set(self._ends):
            if libc.ptrace(_SEIZE, thread, None, None) == 0:
                libc.ptrace(_INTERRUPT, thread, None, None)
                self._ends[thread] = time.monotonic() + seconds
                self.num_pauses += 1

    def collect(self, command: int) -> int | None:
        """Note which threads have stopped, let those go on whose time has come; return the status of the ended command.

        It is None while the command runs.
        """
        while True:
            try:
                thread, status = os.waitpid(-1, os.WNOHANG | _ALL_THREADS)
            except ChildProcessError:
                thread = 0
            if thread == 0:
                break
            if os.WIFSTOPPED(status):
                is_own = status >> 16 != 0 or thread not in self._ends
                self._signals[thread] = 0 if is_own else os.WSTOPSIG(status)
                continue
            self._ends.pop(thread, None)
            self._signals.pop(thread, None)
            if thread == command:
                return os.waitstatus_to_exitcode(status)
        for thread in [thread for thread, end in self._ends.items() if end <= time.monotonic()]:
            # A thread that waits for its vfork() stops later.
            if thread in self._signals:
                libc.ptrace(_DETACH, thread, None, self._signals.pop(thread))
                del self._ends[thread]
            elif not os.path.exists(f"/proc/{thread}"):
                del self._ends[thread]
        return None

    def choose_one(self) -> None:
        """Pause a thread, or all of a process."""
        if len(self._ends) >= _MOST_PAUSED or not self.known:
            return
        threads = threads_of(self.choose.choice(sorted(self.known)))
        seconds = math.exp(self.choose.uniform(*map(math.log, _PAUSES)))
        if threads:
            self.pause(threads if self.choose.random() < 0.3 else [self.choose.choice(threads)], seconds)

    def run(self, command: int) -> int:
        """Perturb until the command has ended, and return its status."""
        while (status := self.collect(command)) is None:
            for process in self.look():
                if self.choose.random() < 0.5:
                    self.pause(threads_of(process), self.choose.uniform(0, _START_PAUSE_SECONDS))
            self.choose_one()
            time.sleep(self.choose.expovariate(1 / _TICK_SECONDS))
        return status


def main() -> int:
    """Run the command of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("a command is missing, e.g. scripts/perturb.py python -m pytest tests/unit/test_core.py")
    print(f"perturb: seed {options.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="perturb-") as folder:
        Path(folder, "sitecustomize.py").write_text(_SWITCH)
        paths = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        command = os.posix_spawnp(options.command[0], options.command, os.environ | {"PYTHONPATH": paths})
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: os.kill(command, number))
        perturbation = Perturbation(command, random.Random(options.seed))
        status = perturbation.run(command)
    print(f"perturb: seed {options.seed}, {perturbation.num_pauses} pauses", file=sys.stderr)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
