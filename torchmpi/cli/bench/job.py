"""The part of ``torchmpi bench`` that runs inside a job: torchmpi, a communicator for timing, progress, the result."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
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
from ..facts import versions
from ..formatting import core_list, counted

_QUIET = f"{PREFIX}VERBOSE"
Show = Callable[[str], None]


class BenchJob:
    """The ranks of a job that run measurements."""

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
        """Show progress, on rank 0 only."""
        if self.rank == 0:
            self._show(f"{text}, {counted(self.size, 'rank')}, {time.monotonic() - self.begin:.0f} s")

    def agreed(self, reason: str | None) -> str | None:
        """Return the first reason of any rank, on all ranks. Collective."""
        reasons = self.comm.allgather(reason)
        return next((text for text in reasons if text is not None), None)


def job_facts(comm: Any) -> dict[str, Any]:
    """Return the conditions of a measurement: ranks, cores, software, settings. Collective."""
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
def started_job(show: Show, device_type: str = "cpu") -> Iterator[BenchJob]:
    """Start torchmpi, and stop it after the block. An error in the block skips ``stop()``, which is collective."""
    resources = ExitStack()
    yield BenchJob(resources, show, device_type)
    resources.close()


def processor() -> str:
    """Return the processor name and the number of CPUs of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{found or platform.machine()}, {os.cpu_count()} CPUs"


def split_seconds(seconds: float, weights: Sequence[float], index: int) -> float:
    """Return the share of part `index` of the time left for it and all later parts.

    >>> split_seconds(10.0, [1, 1, 3], 1)
    2.5
    """
    return seconds * weights[index] / sum(weights[index:])


class StatusLine:
    """Progress on standard error: one line that is overwritten on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line, or add one."""
        sys.stderr.write(f"\r\x1b[K{text}" if self._is_terminal else f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Erase the line."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def run_task(task: str) -> None:
    """Run the measurement described by a file; rank 0 writes the result beside it."""
    path = Path(task)
    options = argparse.Namespace(**json.loads(path.read_text()))
    # MPI is initialised here to find rank 0; start() uses the same MPI.
    MPI, _ = mpi_library.initialise()
    is_first = MPI.COMM_WORLD.rank == 0
    result = measure_job(options, progress_writer(path.parent) if is_first else lambda text: None)
    if is_first:
        path.with_name("result.json").write_text(json.dumps(result))


def measure_job(options: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Run a measurement in this job. Collective; all ranks get all rows."""
    os.environ.update(getattr(options, "settings", {}))
    module = _measurement(options)
    with started_job(show, getattr(options, "device", "cpu")) as job:
        result: dict[str, Any] = module.measure(job, options)
    return result


def _measurement(options: argparse.Namespace) -> Any:
    """Import the module with the function ``measure(job, options)``: one of this package, or a script."""
    script = getattr(options, "script", "")
    if not script:
        return importlib.import_module(
            {"collectives": ".collective_bench", "train": ".training"}[options.kind], __package__
        )
    if (folder := str(Path(script).parent)) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(Path(script).stem)


def progress_writer(folder: Path) -> Callable[[str], None]:
    """Return a function for rank 0 that shows a line in the process that started the job."""
    writer = os.open(folder / "progress", os.O_WRONLY | os.O_NONBLOCK)

    def show(text: str) -> None:
        with suppress(OSError):  # the reader has ended
            os.write(writer, f"{text}\n".encode())

    return show
