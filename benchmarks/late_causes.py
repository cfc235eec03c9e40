"""Plant reasons for a late rank in a training loop, one after the other, and see what the search for late ranks says.

    torchmpi run -n 4 benchmarks/late_causes.py                 # a table: planted, named, after how many seconds
    torchmpi run -n 4 benchmarks/late_causes.py --even 20       # runs without a late rank: no alarm

Each row is a `start()`, a loop until a rank is named, and a `stop()`. The last rank is the late one; all ranks compute
a little, and wait for a pretended device. `limit` needs control groups of the first version and root, and `network`
three hosts, root and `tc`: the last rank limits its own interface. Both run only if named.
"""

from __future__ import annotations

import argparse
import gc
import logging
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ReplicaError
from torchmpi.log import logger

STEP_SECONDS = 0.05
"""Of the pretended device, in each step of each rank."""
LATE_SECONDS = 0.03
_PAGE = mmap.PAGESIZE
Extra = Callable[[str], None]
"""What a late rank does in a part of a step: load, forward, step."""


class Data(Dataset[torch.Tensor]):
    """Batches that are ready, but for what is planted."""

    def __init__(self, extra: Extra) -> None:
        self._extra = extra

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        self._extra("load")
        return torch.ones(64)


class Net(nn.Module):
    """A model that computes for some milliseconds, and waits for its device."""

    def __init__(self, extra: Extra, num_products: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self._extra, self._matrix, self._num_products = extra, torch.rand(300, 300), num_products

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute, and wait."""
        for _ in range(self._num_products):
            self._matrix = (self._matrix @ self._matrix).clamp_(0, 1)
        time.sleep(STEP_SECONDS)
        self._extra("forward")
        result: torch.Tensor = self.layer(batch)
        return result


# --- what is planted: functions that are called in each step of the late rank, and what is around the loop ------------


def in_part(wanted: str, work: Callable[[], object]) -> Extra:
    """Return what does the work in one part of a step."""
    return lambda part: None if part != wanted else (work(), None)[1]


def collecting() -> Extra:
    """Return what makes many objects that refer to each other, beside many that are kept, as large programs do."""
    kept = [[index] for index in range(200_000)]

    def work() -> None:
        cycle: list[object] = [kept]
        cycle.append(cycle)
        gc.collect()

    return in_part("step", work)


def faulting() -> Extra:
    """Return what takes memory, and gives it back."""

    def work() -> None:
        with mmap.mmap(-1, 48 << 20) as memory:
            for start in range(0, len(memory), _PAGE):
                memory[start] = 1

    return in_part("step", work)


def reading(folder: Path) -> Extra:
    """Return what reads pages of a mapped file that the kernel has dropped, as a machine that swaps does."""
    path = folder / "pages"
    path.write_bytes(os.urandom(64 << 20))
    os.sync()

    def work() -> None:
        end = time.monotonic() + LATE_SECONDS
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
                memory.madvise(mmap.MADV_RANDOM)
                while time.monotonic() < end:
                    memory[random.randrange(len(memory))]

    return in_part("step", work)


@contextmanager
def spinning(number: int, cores: set[int] | None = None) -> Iterator[None]:
    """Context manager with busy processes, on these cores."""
    code = f"import os; {f'os.sched_setaffinity(0, {cores})' if cores else ''}\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextmanager
def sharing(is_late: bool) -> Iterator[None]:
    """Context manager in which other processes are busy on the core of the late rank, where no other rank is."""
    before = os.sched_getaffinity(0)
    own = {max(before)} if is_late else before - {max(before)}
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    for thread in threads:
        os.sched_setaffinity(thread, own)
    try:
        with spinning(6, own) if is_late else nullcontext():
            yield
    finally:
        for thread in threads:
            os.sched_setaffinity(thread, before)


@contextmanager
def limiting(is_late: bool) -> Iterator[None]:
    """Context manager in which the late rank may use a sixth of a core."""
    if not is_late:
        yield
        return
    groups = Path("/sys/fs/cgroup/cpu")
    before = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":cpu" in line).split(":")[2]
    group = groups / before.strip("/") / f"late-causes-{os.getpid()}"
    group.mkdir()
    (group / "cpu.cfs_quota_us").write_text("15000")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (groups / before.strip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@contextmanager
def slow_network(is_late: bool) -> Iterator[None]:
    """Context manager in which the interface of the last rank sends slowly."""
    device = ["dev", "eth0", "root"]
    if is_late:
        limit = ["tbf", "rate", "20mbit", "burst", "128kb", "limit", "16mb"]
        subprocess.run(["tc", "qdisc", "add", *device, *limit], check=True)
    try:
        yield
    finally:
        if is_late:
            subprocess.run(["tc", "qdisc", "del", *device], check=True)


class Cause(NamedTuple):
    """A reason, and the beginning of the text that names it."""

    text: str
    named: str
    extra: Callable[[Path], Extra] | None = None
    around: Callable[[bool], AbstractContextManager[None]] | None = None
    """What is around the loop on all ranks, given whether this is the late one,"""
    with_start: bool = False
    """or also around `start()`, which looks for the control group."""
    num_products: int = 2
    """How much all ranks compute."""


def _sleep() -> None:
    time.sleep(LATE_SECONDS)


CAUSES = {
    "data": Cause("data loading", "data loading", lambda _: in_part("load", _sleep)),
    "forward": Cause("a longer forward pass", "the forward pass", lambda _: in_part("forward", _sleep)),
    "garbage": Cause("garbage collection", "garbage collection", lambda _: collecting()),
    "cores": Cause("busy processes on its core", "other processes run on its cores", around=sharing, num_products=12),
    "faults": Cause("page faults", "page faults, ", lambda _: faulting()),
    "disk": Cause("page faults that read a disk", "page faults that read from a disk", reading),
    "limit": Cause("a CPU limit", "the CPU limit", around=limiting, with_start=True, num_products=12),
    "network": Cause("a slow network", "its network", around=slow_network),
}


# --- the run ----------------------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Keeps the lines about late ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        if "Likely cause" in (text := record.getMessage()):
            self.found.append(text)


def run(cause: Cause, is_late: bool, seconds: float, folder: Path) -> tuple[list[str], float, int]:
    """Train until a rank is named, at most for some seconds; return the lines, the seconds, and the steps."""
    lines = Lines()
    logger.addHandler(lines)
    extra = cause.extra(folder) if is_late and cause.extra is not None else in_part("none", lambda: None)
    around = nullcontext() if cause.around is None else cause.around(is_late)
    with around if cause.with_start else nullcontext():
        mpi.start()
        net = Net(extra, cause.num_products)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        sent = torch.zeros(100_000)  # so that the network matters
        batches = iter(DataLoader(Data(extra), batch_size=1))
        ends, steps = torch.zeros(1), 0
        mpi.barrier()
        begin = time.monotonic()
        with nullcontext() if cause.with_start else around:
            while not ends.item():
                optimizer.zero_grad()
                net(next(batches)).square().mean().backward()
                mpinn.synchronize_gradients(net)
                mpi.allreduce(sent)
                optimizer.step()
                extra("step")
                steps += 1
                ends[0] = bool(lines.found) or time.monotonic() - begin > seconds
                mpi.broadcast(ends)
        took = time.monotonic() - begin
        mpi.stop()
    logger.removeHandler(lines)
    return lines.found, took, steps


def flipped_bit() -> str:
    """Flip one bit of a parameter of the last rank; return what the comparison of replicas says."""
    mpi.start()
    torch.manual_seed(0)
    last = nn.Linear(64, 64)
    net = nn.Sequential(nn.Linear(64, 64), last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    watch = mpinn.watch_replicas(net, optimizer, every=10)
    found = "nothing"
    try:
        for step in range(100):
            optimizer.zero_grad()
            net(torch.ones(64)).square().mean().backward()
            mpinn.synchronize_gradients(net)
            optimizer.step()
            if step == 42 and mpi.rank() == mpi.size() - 1:
                last.bias.detach().view(torch.int32)[17] ^= 1
    except ReplicaError as error:
        found = str(error).replace("\n ", "")
    watch.remove()
    mpi.stop()
    return found


def main() -> None:
    """Print a table, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in CAUSES if name not in ("limit", "network")]
    parser.add_argument("--causes", nargs="+", choices=[*CAUSES, "bit"], default=[*usual, "bit"])
    parser.add_argument("--even", type=int, default=0, metavar="RUNS", help="runs without a late rank, instead")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a run at most (default: %(default)g)")
    parser.add_argument("--loaded", type=int, default=0, metavar="N", help="busy processes beside all runs")
    given = parser.parse_args()
    mpi.start()
    rank, size = mpi.rank(), mpi.size()
    mpi.stop()
    missed = 0
    with spinning(given.loaded if rank == 0 else 0), tempfile.TemporaryDirectory() as folder:
        if given.even:
            runs = [run(Cause("", ""), False, given.seconds, Path(folder)) for _ in range(given.even)]
            missed = sum(len(lines) for lines, *_ in runs)
            text = f"{given.even} runs of {size} even ranks, each {median([took for _, took, _ in runs]):.0f} s"
            rows = [f"{text}, {sum(steps for *_, steps in runs)} steps: {missed} alarms"]
            rows += [line for lines, *_ in runs for line in lines]
        else:
            rows = ["| planted | named rightly | after | said |", "|---|---|---|---|"]
            for name in given.causes:
                if name == "bit":
                    found = flipped_bit()
                    is_named, after = "'1.bias': " in found and f"; rank {size - 1} differs" in found, "step 50"
                    rows.append(f"| a flipped bit in step 43 | {'yes' if is_named else '**no**'} | {after} | {found} |")
                else:
                    cause = CAUSES[name]
                    lines, took, _ = run(cause, rank == size - 1, given.seconds, Path(folder))
                    who = f"(rank {size - 1})" if name == "network" else f"rank {size - 1} on host"
                    is_named = bool(lines) and who in lines[0] and f"Likely cause: {cause.named}" in lines[0]
                    said = lines[0] if lines else "no line"
                    rows.append(f"| {cause.text} | {'yes' if is_named else '**no**'} | {took:.0f} s | {said} |")
                missed += not is_named
    if rank == 0:
        print("\n".join(rows).replace(f"{Path(__file__).parent}/", ""), flush=True)
        sys.exit(missed > 0)


if __name__ == "__main__":
    main()
