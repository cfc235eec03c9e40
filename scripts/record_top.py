#!/usr/bin/env python3
"""Record `torchmpi top` in a terminal, as an asciicast (version 2), which `asciinema play FILE` shows.

    scripts/record_top.py docs/images/top.cast                        # four ranks, of which one loads its data slowly
    scripts/record_top.py top64.cast --ranks 64 --hosts 2 --columns 100 --lines 40

A job of real ranks runs meanwhile, the ranks divided among host names of this machine. `--report FILE.html` also keeps
the page of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAM = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
import torchmpi as mpi
from torchmpi.launch import launcher

class Images(Dataset):
    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        time.sleep(1.2 * step_seconds * (mpi.rank() == mpi.size() - 1))
        return torch.ones(64)

num_hosts, step_seconds, ready = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
found = launcher.detect()
os.environ["TORCHMPI_HOST_NAME"] = f"node{(found.rank or 0) * num_hosts // found.num_ranks}"
mpi.start()
net = torch.nn.Linear(64, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step, batch in enumerate(DataLoader(Images(), batch_size=1)):
    time.sleep(step_seconds)
    optimizer.zero_grad()
    loss = net(batch).square().mean()
    loss.backward()
    mpi.nn.synchronize_gradients(net)
    optimizer.step()
    mpi.report_progress(samples=32, loss=loss.item())
    if step == 20 and mpi.rank() == 0:
        open(ready, "w").close()
"""
KEYS = ((9.0, "w"), (14.0, "r"), (18.0, "q"))
"""What is typed, and after how many seconds: sort by waiting, by rank, end."""


def record(command: Sequence[str], columns: int, lines: int) -> list[tuple[float, str]]:
    """Run a command in a terminal of its own, type the keys, and return what it has written, with times."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES=str(lines))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    begin, keys, written = time.monotonic(), list(KEYS), list[tuple[float, str]]()
    with contextlib.suppress(OSError):  # the end of the command
        while True:
            if select.select([terminal], [], [], 0.1)[0]:
                written.append((time.monotonic() - begin, os.read(terminal, 1 << 16).decode(errors="replace")))
            if keys and time.monotonic() - begin >= keys[0][0]:
                os.write(terminal, keys.pop(0)[1].encode())
    os.close(terminal)
    os.waitpid(process, 0)
    return written


def main() -> int:
    """Run the job, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.05, help="the time that a rank sleeps in a step")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--lines", type=int, default=12)
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    torchmpi = [sys.executable, "-m", "torchmpi"]
    with tempfile.TemporaryDirectory() as folder:
        program, ready = Path(folder) / "train.py", Path(folder) / "ready"
        program.write_text(PROGRAM)
        command = [*torchmpi, "run", "-n", str(given.ranks), *(["--report", str(given.report)] if given.report else [])]
        job = subprocess.Popen([*command, str(program), str(given.hosts), str(given.step_seconds), str(ready)])
        try:
            while not ready.exists():
                if job.poll() is not None:
                    return job.returncode
                time.sleep(0.1)
            written = record([*torchmpi, "top", str(job.pid)], given.columns, given.lines)
        finally:
            job.terminate()
            job.wait()
    head = {"version": 2, "width": given.columns, "height": given.lines, "title": f"torchmpi top, {given.ranks} ranks"}
    events = [[round(at, 3), "o", text] for at, text in written]
    given.file.write_text("".join(json.dumps(each) + "\n" for each in [head, *events]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
