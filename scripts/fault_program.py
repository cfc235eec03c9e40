"""The program of faults.py: a loop of one kind of call on all ranks, in which rank 1 fails in one way.

    mpirun -n 3 python scripts/fault_program.py FAULT MOMENT

FAULTS_BACKEND=torchmpi or gloo makes a process group of that backend; gloo also takes the calls of torch.distributed.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

FAULT, MOMENT = sys.argv[1:3]
BACKEND = os.environ.get("FAULTS_BACKEND")
if BACKEND != "gloo":
    import torchmpi as mpi
    import torchmpi.nn as mpinn
    import torchmpi.parameterserver as ps
FAILING_RANK = 1
NUM_CALLS = 5
TIMEOUT_SECONDS = 10
ARRIVAL_SECONDS = 3  # until the others have imported torch and are in start()
FOREVER_SECONDS = 3600


def rank_of_launcher() -> int:
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
    return int(next(os.environ[name] for name in names if name in os.environ))


def overflow(*_: object) -> None:
    raise MemoryError("no memory for the batch")


def fail(program: Program | None) -> None:
    """Do what FAULT says; faults.py reads the time of the fault from a file."""
    print("failing now", flush=True)
    time.sleep(0.3)  # launchers drop what they have not read when a rank dies
    Path(os.environ["FAULTS_MARK"]).write_text(str(time.time()))
    faults = {
        "raise": overflow,
        "sys.exit(3)": lambda: sys.exit(3),
        "os._exit(0)": lambda: os._exit(0),
        "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "SIGSEGV": lambda: ctypes.string_at(8),
        "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "SIGINT": lambda: signal.raise_signal(signal.SIGINT),
        "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "sleep": lambda: time.sleep(FOREVER_SECONDS),
        "raise in a callback": lambda: mpi.allreduce_async(program.ones).when_done(overflow),
        "other collective": lambda: program.other_collective(),
        "other shape": lambda: program.other_shape(),
        "end of the program": sys.exit,
    }
    faults[FAULT]()


class Program:
    """A loop with a call of torchmpi; the name of a method is a moment."""

    def __init__(self) -> None:
        self.ones = torch.ones(1000)
        self.net = torch.nn.Linear(100, 100)

    def call(self) -> None:
        """Other ranks wait in a collective."""
        mpi.allreduce(self.ones)

    def async_call(self) -> None:
        mpi.allreduce_async(self.ones).wait()

    def mpi_call(self) -> None:
        """In the MPI library, where no Python runs."""
        mpi.allreduce(self.ones, backend="mpi")

    def message(self) -> None:
        mpi.recv(self.ones, src=FAILING_RANK) if mpi.rank() != FAILING_RANK else self.send_to_all()

    def send_to_all(self) -> None:
        for rank in set(range(mpi.size())) - {FAILING_RANK}:
            mpi.send(self.ones, dst=rank)

    def server(self) -> None:
        ps.send(self.shards, self.ones, rule="add").wait()
        ps.receive(self.shards, self.ones).wait()
        mpi.barrier()

    def backward(self) -> None:
        self.net(torch.ones(8, 100)).sum().backward()
        mpinn.synchronize_gradients_async(self.net)
        self.net.zero_grad()

    def run(self) -> None:
        if MOMENT == "server":
            self.shards = ps.init(self.ones)
        if MOMENT == "backward":
            mpinn.register_async_backward(self.net)
        for _ in range(NUM_CALLS):
            getattr(self, MOMENT)()

    def other_collective(self) -> None:
        mpi.broadcast(self.ones)

    def other_shape(self) -> None:
        mpi.allreduce(torch.ones(7))


class GlooProgram(Program):
    """The same with DistributedDataParallel and torch.distributed on gloo."""

    def call(self) -> None:
        dist.all_reduce(self.ones)

    def message(self) -> None:
        if dist.get_rank() == FAILING_RANK:
            for rank in set(range(dist.get_world_size())) - {FAILING_RANK}:
                dist.send(self.ones, rank)
        else:
            dist.recv(self.ones, FAILING_RANK)

    def backward(self) -> None:
        self.net(torch.ones(8, 100)).sum().backward()

    def run(self) -> None:
        if MOMENT == "backward":
            self.net = torch.nn.parallel.DistributedDataParallel(self.net)
        for _ in range(NUM_CALLS):
            getattr(self, MOMENT)()

    def other_collective(self) -> None:
        dist.broadcast(self.ones, 0)

    def other_shape(self) -> None:
        dist.all_reduce(torch.ones(7))


def main() -> None:
    is_failing = rank_of_launcher() == FAILING_RANK
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    if MOMENT == "start" and is_failing:
        time.sleep(ARRIVAL_SECONDS)
        fail(None)
    if BACKEND is None:
        mpi.start()
    else:
        dist.init_process_group(BACKEND, timeout=timeout)
    program = GlooProgram() if BACKEND == "gloo" else Program()
    is_called = MOMENT not in ("start", "stop")
    if is_called:
        program.run()
    if is_failing:
        fail(program)
    if is_called:
        getattr(program, MOMENT)()
        getattr(program, MOMENT)()
    if BACKEND is None:
        mpi.stop()
    else:
        dist.destroy_process_group()


main()
