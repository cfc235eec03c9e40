#!/usr/bin/env python3
"""Run a command while threads and processes below it pause at random: tests that need a friendly order of threads fail.

    scripts/perturb.py mpirun -n 3 python -m pytest --with-mpi tests/mpi/test_groups.py

About every 100 ms it stops one thread of each process, or all of them, for up to half a second; half of the processes
that are started stop for up to three seconds before they import anything. Python switches between threads up to fifty
times as often. The first line of the output has the seed, which repeats the choices, but not the moments of the program
that they meet. The exit status is that of the command. Linux only; as the same user, or as root.

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

_DETACH, _GETSIGINFO, _SEIZE, _INTERRUPT, _EVENT_STOP = 17, 0x4202, 0x4206, 0x4207, 128
_ALL_THREADS = 0x40000000  # __WALL
_POLL_SECONDS, _LOOK_SECONDS, _BETWEEN_SECONDS = 0.003, 0.02, 0.05
_PAUSES, _START_PAUSE_SECONDS = (0.002, 0.5), 3.0
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
        """Let the threads go on whose time has come, and forget the ended ones; return the status of the ended command.

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
                self._ends.setdefault(thread, 0.0)  # by exec(), a thread gets the number of its process
                continue
            self._ends.pop(thread, None)
            if thread == command:
                return os.waitstatus_to_exitcode(status)
        info = (ctypes.c_int * 32)()  # siginfo_t: the signal, an error, a code
        for thread in [thread for thread, end in self._ends.items() if end <= time.monotonic()]:
            # One that waits for its vfork() stops later. One that a signal has stopped gets it now.
            if libc.ptrace(_GETSIGINFO, thread, None, info) == 0:
                libc.ptrace(_DETACH, thread, None, 0 if info[2] >> 8 == _EVENT_STOP else info[0])
                del self._ends[thread]
            elif not os.path.exists(f"/proc/{thread}"):
                del self._ends[thread]
        return None

    def pause_one(self) -> None:
        """Pause a thread of a process, or all of them, if none of them is paused."""
        threads = threads_of(self.choose.choice(sorted(self.known)))
        seconds = math.exp(self.choose.uniform(*map(math.log, _PAUSES)))
        if threads and not self._ends.keys() & set(threads):
            self.pause(threads if self.choose.random() < 0.3 else [self.choose.choice(threads)], seconds)

    def run(self, command: int) -> int:
        """Perturb until the command has ended, and return its status."""
        next_look = next_pause = time.monotonic()
        while (status := self.collect(command)) is None:
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _LOOK_SECONDS
                for process in self.look():
                    if self.choose.random() < 0.5:
                        self.pause(threads_of(process), self.choose.uniform(0, _START_PAUSE_SECONDS))
            if now >= next_pause and self.known:
                next_pause = now + self.choose.expovariate(len(self.known) / _BETWEEN_SECONDS)
                self.pause_one()
            time.sleep(_POLL_SECONDS)
        return status


def main() -> int:
    """Run the command of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("a command is missing, e.g. scripts/perturb.py python -m pytest tests/unit/test_config.py")
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
