"""Ranks that are forks of a process which has imported torch and torchmpi (``tests/jobs/warm``).

    python tests/helpers/warm.py MODULE... -- COMMAND...

runs a command, in which the word ``python`` starts such ranks, which have also imported the modules.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "jobs" / "warm"
_START_SECONDS = 300.0
IS_OFF = "TORCHMPI_TEST_COLD" in os.environ


def command(address: str) -> list[str]:
    """Return the command in place of Python for ranks of the server at this address.

    It becomes Python itself if variables that are read at import differ from those of the server.
    """
    return [sys.executable, "-I", "-S", str(FOLDER / "rank.py"), address]


def executable(command: Sequence[str]) -> str:
    """Return the file that does the same as such a command, or as ``[sys.executable]``."""
    return command[0] if len(command) == 1 else f"{command[-1]}.python"


class Server:
    """The process that is forked, started by `launcher` (a command, or nothing).

    Besides torch and torchmpi it imports `modules`, where they are installed.
    """

    def __init__(
        self, address: str, env: Mapping[str, str], launcher: Sequence[str] = (), modules: Sequence[str] = ()
    ) -> None:
        self._addresses = address, f"{address}.torch"
        for name in (*self._addresses, *(f"{each}.new" for each in self._addresses)):
            Path(name).unlink(missing_ok=True)  # of a server that was killed
        self._limit = time.monotonic() + _START_SECONDS
        self._process = subprocess.Popen(
            [*launcher, sys.executable, str(FOLDER / "server.py"), address, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=dict(env),
            start_new_session=True,
        )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_for_start(self) -> None:
        while not all(map(os.path.exists, self._addresses)):
            is_starting = self.is_running() and time.monotonic() < self._limit
            assert is_starting, "the server of warm ranks did not start: see its error above"
            time.sleep(0.05)

    def close(self) -> None:
        """End it, and its ranks."""
        self._process.communicate(timeout=30)


def main() -> int:
    """Run a command with a server of its own, and return its status."""
    end = sys.argv.index("--")
    if IS_OFF:
        os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])
    with tempfile.TemporaryDirectory(prefix="torchmpi-warm-") as folder:
        server = Server(f"{folder}/socket", os.environ, modules=sys.argv[1:end])
        server.wait_for_start()
        python = executable(command(f"{folder}/socket"))
        process = subprocess.Popen([python if word == "python" else word for word in sys.argv[end + 1 :]])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: process.send_signal(number))
        status = process.wait()
        server.close()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
