#!/usr/bin/env python3
"""Record `torchmpi top` in a terminal, as an asciicast (version 2), which `asciinema play FILE` shows.

    scripts/record_top.py docs/images/top.cast                    # four ranks, of which one loads its data slowly
    scripts/record_top.py docs/images/top64.cast --ranks 64 --hosts 2 --step-seconds 2 --lines 24 --pages build/top64

A job of real ranks runs meanwhile. Several hosts are namespaces that scripts/hosts.sh makes (as root); the command then
runs on the first one. `--pages` also keeps pictures of `--web` (light, dark, and on a phone) and of `--report`, which
Chromium draws.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOSTS = str(ROOT / "scripts" / "hosts.sh")
STATE = Path("/run/torchmpi-record")
NETWORK = "10.87.26"
PROGRAM = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset
import torchmpi as mpi

class Images(Dataset):
    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        time.sleep(0.6 * step_seconds * (mpi.rank() == mpi.size() - 1))
        return torch.ones(64)

step_seconds, ready = float(sys.argv[1]), sys.argv[2]
mpi.start()
net = torch.nn.Linear(64, 8)
mpi.nn.synchronize_parameters(net)
for step, batch in enumerate(DataLoader(Images(), batch_size=1)):
    time.sleep(step_seconds)
    net.zero_grad()
    loss = net(batch).square().mean()
    loss.backward()
    mpi.nn.synchronize_gradients(net)
    with torch.no_grad():  # not an optimizer of torch, whose import takes 100 MB of each rank
        for parameter in net.parameters():
            parameter -= 0.01 * parameter.grad
    mpi.report_progress(samples=32, loss=loss.item())
    if step == 5 and mpi.rank() == 0:
        open(ready, "w").close()
"""
KEYS = ((7.0, "w"), (11.0, "\x1b[6~"), (14.0, "r"), (18.0, "q"))
"""What is typed, and after how many seconds: sort by waiting, a page further, sort by rank, end."""
PICTURES = {
    "web": ("--window-size=1100,2600",),
    "dark": ("--window-size=1100,2600", "--blink-settings=preferredColorScheme=0"),
    "phone": ("--window-size=500,3400",),
}


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


def draw(address: str, picture: Path, options: Sequence[str], on_host: Sequence[str]) -> None:
    """Save a picture of a page, as a browser without any network but that of its host shows it."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("record_top.py: --pages: there is no Chromium. apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        command = [*on_host, browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--hide-scrollbars", f"--user-data-dir={profile}", "--virtual-time-budget=6000", *options]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--screenshot={picture}", address]
        subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def hosts(number: int) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Context manager with hosts: a folder that they share, options of a job, and the way to the first one."""
    if number == 1:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder), [], []
        return
    os.environ.update(HOSTS_STATE=str(STATE), HOSTS_PREFIX="trec", HOSTS_NETWORK=NETWORK)
    subprocess.run([HOSTS, "up", str(number)], check=True)
    try:
        options = ["--rsh", str(STATE / "agent"), "--interface", f"{NETWORK}.0/24", "--option", "--bind-to none"]
        yield STATE, options, [HOSTS, "run", "h0"]
    finally:
        subprocess.run([HOSTS, "down"], check=False)


def main() -> int:
    """Run the job, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.05, help="the time that a rank sleeps in a step")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--lines", type=int, default=12)
    parser.add_argument("--pages", type=Path, help="a folder for pictures")
    given = parser.parse_args()
    torchmpi = [sys.executable, "-m", "torchmpi"]
    with hosts(given.hosts) as (folder, options, on_host):
        program, ready, report = (folder / name for name in ("train.py", "ready", "report.html"))
        program.write_text(PROGRAM)
        names = ",".join(f"h{number}:{given.ranks // given.hosts}" for number in range(given.hosts))
        where = ["--hosts", names, *options] if given.hosts > 1 else ["-n", str(given.ranks)]
        command = [*torchmpi, "run", *where, *(["--report", str(report)] if given.pages else [])]
        job = subprocess.Popen([*command, str(program), str(given.step_seconds), str(ready)])
        try:
            while not ready.exists():
                if job.poll() is not None:
                    return job.returncode
                time.sleep(0.1)
            top = [*on_host, *torchmpi, "top", *([] if on_host else [str(job.pid)])]
            written = record(top, given.columns, given.lines)
            if given.pages:
                given.pages.mkdir(parents=True, exist_ok=True)
                with subprocess.Popen([*top, "--web"], stdout=subprocess.PIPE, text=True) as server:
                    assert server.stdout is not None
                    address = server.stdout.readline().strip()
                    time.sleep(20)  # a history
                    for name, picture_options in PICTURES.items():
                        draw(address, given.pages.absolute() / f"{name}.png", picture_options, on_host)
                    server.terminate()
        finally:
            job.terminate()
            job.wait()
        if given.pages:
            draw(f"file://{report}", given.pages.absolute() / "report.png", PICTURES["web"], [])
    head = {"version": 2, "width": given.columns, "height": given.lines, "title": f"torchmpi top, {given.ranks} ranks"}
    events = [[round(at, 3), "o", text] for at, text in written]
    given.file.write_text("".join(json.dumps(each) + "\n" for each in [head, *events]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
