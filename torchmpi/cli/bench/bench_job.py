"""The part of ``torchmpi bench`` that runs inside a job: torchmpi, a communicator for timing, progress, the result."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ... import files
from ...config import PREFIX
from ...launch import affinity, mpi_library
from ...session import runtime
from ..facts import version_of, versions
from ..formatting import core_list, counted

RESULT_SO_FAR = "result_so_far.json"
_MODULES = {
    "collectives": ".collective_bench", "calls": ".call_bench", "train": ".training", "parallel": ".parallel",
}  # fmt: skip
_QUIET = f"{PREFIX}VERBOSE"
Show = Callable[[str], None]


class BenchJob:
    """The ranks of a job that run measurements."""

    def __init__(self, resources: ExitStack, show: Show, device_type: str = "cpu", folder: Path | None = None) -> None:
        """Start torchmpi; results so far are written to `folder`, for a command whose time limit ends the job."""
        self.resources, self._show, self._folder = resources, show, folder
        os.environ[_QUIET] = "0"  # start() compares settings between ranks, and raises on all ranks
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

    def run_in_turn(
        self, tasks: Sequence[tuple[str, float, Callable[[float], list[dict[str, Any]]]]], seconds: float
    ) -> list[dict[str, Any]]:
        """Run tasks (title, weight, function of the seconds it may take), and return the rows of all. Collective."""
        rows: list[dict[str, Any]] = []
        end = time.monotonic() + seconds
        for index, (title, weight, task) in enumerate(tasks):
            self.show(f"{index + 1}/{len(tasks)} {title}")
            left = self.comm.bcast(max(0.0, end - time.monotonic()))
            rows += task(left * weight / sum(weight for _, weight, _ in tasks[index:]))
            self.keep(rows, unfinished=[other for other, _, _ in tasks[index + 1 :]])
        return rows

    def keep(self, rows: list[dict[str, Any]], *, unfinished: Sequence[str]) -> None:
        """Write the rows so far, on rank 0 of a job that a command has started. Collective."""
        facts = job_facts(self.comm)
        if self.rank == 0 and self._folder is not None:
            part = self._folder / "part.json"
            part.write_text(json.dumps({"facts": facts, "rows": rows, "unfinished": list(unfinished)}))
            part.replace(self._folder / RESULT_SO_FAR)


def job_facts(comm: Any) -> dict[str, Any]:
    """Return the conditions of a measurement: ranks, cores, software, settings. Collective."""
    here = runtime.current()
    ranks = comm.allgather((sorted(affinity.current()), here.host_name, here.binding))
    num_cores = len({(host, core) for cores, host, _ in ranks for core in cores})
    model = re.search(r"^model name\s*: *(.*)", files.text_of("/proc/cpuinfo"), re.MULTILINE)
    software = versions() | {"horovod": version_of("horovod")}
    return {
        "ranks": comm.size,
        "hosts": here.num_hosts,
        "mpi": mpi_library.short_version(here.MPI),
        "cores": [core_list(cores) for cores, _, _ in ranks],
        "ranks_per_core": round(comm.size / num_cores, 2),
        "threads_per_rank": torch.get_num_threads(),
        "binding": "; ".join(dict.fromkeys(binding for _, _, binding in ranks)),
        "processor": f"{model[1] if model else platform.machine()}, {os.cpu_count()} CPUs",
        "device": str(here.device) if here.device.type == "cpu" else torch.cuda.get_device_name(here.device),
        "versions": {name: version for name, version in software.items() if version is not None},
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIX) and k != _QUIET},
    }


def run_task(task: str) -> None:
    """Run the measurement described by a file; rank 0 writes progress and the result beside it."""
    path = Path(task)
    options = argparse.Namespace(**json.loads(path.read_text()))
    # MPI is initialized here to find rank 0; start() uses the same MPI.
    is_first = mpi_library.initialize().COMM_WORLD.rank == 0
    with path.with_name("progress").open("a") as progress:
        result = measure_job(options, lambda text: print(text, file=progress, flush=True))
    if is_first:
        path.with_name("result.json").write_text(json.dumps(result))


def measure_job(options: argparse.Namespace, show: Show) -> dict[str, Any]:
    """Run a measurement in this job. Collective; all ranks get all rows.

    An error skips ``stop()``, which is collective.
    """
    os.environ.update(getattr(options, "settings", {}))
    module = _measurement(options)
    resources = ExitStack()
    folder = Path(options.folder) if getattr(options, "folder", None) else None
    job = BenchJob(resources, show, getattr(options, "device", "cpu"), folder)
    result: dict[str, Any] = module.measure(job, options)
    resources.close()
    return result


def _measurement(options: argparse.Namespace) -> Any:
    """Import the module with the function ``measure(job, options)``: one of this package, or a script."""
    script = getattr(options, "script", "")
    if not script:
        return importlib.import_module(_MODULES[options.kind], __package__)
    if (folder := str(Path(script).parent)) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(Path(script).stem)
