"""What every measurement inside a job shares: torchmpi started quietly, a communicator for the clock, progress."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ...config import PREFIX
from ...session import affinity, mpi_library, runtime
from ..gathering import versions
from ..layout import core_list, counted

_QUIET = f"{PREFIX}VERBOSE"
Show = Callable[[str], None]


class Job:
    """One job of ranks that measure."""

    def __init__(self, resources: ExitStack, show: Show, device_type: str = "cpu") -> None:
        self.resources, self._show = resources, show
        os.environ[_QUIET] = "0"  # start() compares settings between ranks, and refuses on all of them
        runtime.start(with_cuda=device_type == "cuda")
        self.device = runtime.current().device
        resources.callback(runtime.stop)
        self.comm = mpi_library.load().COMM_WORLD.Dup()
        resources.callback(self.comm.Free)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.one_clock = runtime.current().num_hosts == 1
        self.begin = time.monotonic()

    def show(self, text: str) -> None:
        """Say what comes next. Rank 0 speaks."""
        if self.rank == 0:
            self._show(f"{text}, {counted(self.size, 'rank')}, {time.monotonic() - self.begin:.0f} s")

    def agreed(self, reason: str | None) -> str | None:
        """The first reason any rank has against something; the same on all ranks."""
        reasons = self.comm.allgather(reason)
        return next((text for text in reasons if text is not None), None)


def job_facts(comm: Any) -> dict[str, Any]:
    """The conditions of a measurement: the job that runs, and its software. Collective over the world."""
    here = runtime.current()
    cores = comm.allgather(sorted(affinity.current()))
    hosts = comm.allgather(here.host_name)
    bindings = comm.allgather(here.binding)
    num_cores = len({(host, core) for host, mask in zip(hosts, cores, strict=True) for core in mask})
    return {
        "ranks": comm.size,
        "hosts": here.num_hosts,
        "mpi": mpi_library.short_version(here.MPI),
        "cores": [core_list(mask) for mask in cores],
        "ranks_per_core": round(comm.size / num_cores, 2),
        "threads_per_rank": torch.get_num_threads(),
        "binding": "; ".join(dict.fromkeys(bindings)),
        "processor": processor(),
        "device": str(here.device) if here.device.type == "cpu" else torch.cuda.get_device_name(here.device),
        "versions": _software(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if _is_setting(name)},
    }


def _is_setting(name: str) -> bool:
    return name.startswith(PREFIX) and name != _QUIET


def _software() -> dict[str, str]:
    found = {name: version for name, version in versions().items() if version is not None}
    with suppress(importlib.metadata.PackageNotFoundError):
        found["horovod"] = importlib.metadata.version("horovod")
    return found


@contextmanager
def started_job(show: Show, device_type: str = "cpu") -> Iterator[Job]:
    """A job in which torchmpi runs, and is stopped afterwards. After an error it is not: that is collective."""
    resources = ExitStack()
    yield Job(resources, show, device_type)
    resources.close()


def processor() -> str:
    """Name and number of CPUs of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{found or platform.machine()}, {os.cpu_count()} CPUs"


def split_seconds(seconds: float, weights: Sequence[float], index: int) -> float:
    """The share of part `index` in the time that is left for it and all later parts.

    >>> split_seconds(10.0, [1, 1, 3], 1)
    2.5
    """
    return seconds * weights[index] / sum(weights[index:])


class StatusLine:
    """Progress on standard error: one line that changes on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._changes = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line, or add one."""
        sys.stderr.write(f"\r\x1b[K{text}" if self._changes else f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Leave an empty line behind."""
        if self._changes:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
