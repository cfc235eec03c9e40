"""The two programs of :mod:`test_strangers`: ``ranks FOLDER`` of a job, and ``strangers FOLDER`` on another host."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[2])
NUM_SILENT = 300


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.02)


def write(name: str, text: str) -> None:
    (FOLDER / f"{name}.part").write_text(text)
    (FOLDER / f"{name}.part").rename(FOLDER / name)


def run_ranks() -> None:
    """Start, but let the strangers connect first to each socket that listens on the network."""
    from torchmpi.launch import network

    listen = network.listen

    def listen_for_strangers(address: str, backlog: int) -> socket.socket:
        listener = listen(address, backlog)
        name = f"listening.{os.getpid()}.{time.monotonic_ns()}"
        write(name, " ".join(map(str, listener.getsockname()[:2])))
        wait_for(f"{name}.visited")
        return listener

    network.listen = listen_for_strangers
    import torch

    import torchmpi as mpi

    mpi.start()
    total = mpi.allreduce(torch.ones(3)).tolist()
    if mpi.rank() == 0:
        write("total", str(total))
    mpi.stop()


def run_strangers() -> None:
    """Open many connections to each listener, and write down what it says to them, until the job has ended."""
    visited: list[str] = []
    hello = b"torchmpi" + struct.pack("<II16s", 1, 0, bytes(16))
    with contextlib.ExitStack() as opened:
        socks: list[socket.socket] = []
        while not (FOLDER / "over").exists():
            for path in FOLDER.glob("listening.*"):
                if path.suffix in (".part", ".visited") or path.name in visited:
                    continue
                visited.append(path.name)
                host, port = path.read_text().split()
                for said in [hello, hello + bytes(32), b"GET / HTTP/1.1\r\n\r\n", b"x", *[b""] * NUM_SILENT]:
                    sock = opened.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
                    sock.settimeout(5 if said else 0)
                    with contextlib.suppress(OSError):
                        sock.connect((host, int(port)))
                        sock.sendall(said)
                    sock.setblocking(False)
                    socks.append(sock)
                write(f"{path.name}.visited", "")
            time.sleep(0.02)
        said = [0]
        for sock in socks:
            with contextlib.suppress(OSError):
                said.append(len(sock.recv(1000)))
        write("strangers", f"{len(visited)} {max(said)}")


{"ranks": run_ranks, "strangers": run_strangers}[sys.argv[1]]()
