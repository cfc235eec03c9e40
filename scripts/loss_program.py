"""Loses ranks and continues, started by losses.py: ``loss_program.py MOMENT FAULT VICTIMS FOLDER [SIZE]``.

VICTIMS are first ranks: ``1,2`` one after the other, ``1+2`` at the same time. Every result is compared; a wrong one
is printed as WRONG. A remaining rank prints at its end the losses, and the seconds from the last fault to the first
right result after it.
"""

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps
from torchmpi.session import recovery

CALLS, FIRST_CALL, NEXT_CALL = 30, 10, 20
moment, fault, folder = sys.argv[1], sys.argv[2], Path(sys.argv[4])
is_new, grows = "TORCHMPI_NEWCOMER" in os.environ, "TORCHMPI_RESPAWNS" in os.environ
own = -1 if is_new else int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])  # under mpirun itself
if "+" in sys.argv[3]:
    victims = [{int(text) for text in sys.argv[3].split("+")}]
else:
    victims = [{int(text)} for text in sys.argv[3].split(",")]
short, long, empty = torch.arange(16.0), torch.arange(float(1 << 20)), torch.empty(16)


def fail():
    (folder / "fault").write_text(repr(time.monotonic()))
    if fault == "raise":
        raise MemoryError("no memory for the batch")
    if fault == "exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, fault))


def fail_soon(least=0.0, most=0.03):
    """Fail in the middle of what follows; only signals can do that."""
    if fault in ("raise", "exit"):
        fail()
    threading.Timer(random.uniform(least, most), fail).start()


def reduced(tensor, call, **options):
    """Allreduce known values, and compare the result."""
    result = mpi.allreduce(tensor + call + mpi.rank(), **options)
    expected = mpi.size() * (tensor + call) + sum(range(mpi.size()))
    if not torch.equal(result, expected):
        print(f"WRONG first rank {own}, call {call}: {result} instead of {expected}", flush=True)


def exchange(call):
    if mpi.size() == 1:  # Open MPI has crashed in others
        return
    last, following = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
    sending = mpi.send_async(short + mpi.rank() + call, following)
    received = mpi.recv(empty.clone(), last)
    sending.wait()
    if not torch.equal(received, short + last + call):
        print(f"WRONG first rank {own}, call {call}: received {received}", flush=True)


def in_group(call):
    with mpi.group(range(mpi.size())) as everyone:
        reduced(short, call, comm=everyone)


def in_other_collectives(call, form=""):
    """Each of the other collectives, with the root in turn; all of them at once in the form `_async`."""
    rank, size, root = mpi.rank(), mpi.size(), call % mpi.size()
    rows, is_root = torch.arange(4.0 * size).reshape(size, 4), rank == root
    summed = size * rows + sum(range(size))
    calls = {
        "broadcast": ((short + rank + call, root), short + root + call),
        "reduce": ((rows + rank, root), summed if is_root else rows + rank),
        "allgather": ((rows[rank] + call,), rows + call),
        "gather": ((rows[rank] + call, root), rows + call if is_root else None),
        "scatter": ((rows + call if is_root else None, root), rows[rank] + call),
        "alltoall": ((rows + 100 * rank,), rows[rank] + 100 * torch.arange(float(size))[:, None]),
        "reduce_scatter": ((rows + rank,), summed[rank]),
    }
    results = {name: getattr(mpi, name + form)(*arguments) for name, (arguments, _) in calls.items()}
    results = {name: found.wait() if form else found for name, found in results.items()}
    results["objects"] = torch.tensor(mpi.allgather_object(rank + call))
    for name, (_, expected) in (calls | {"objects": ((), torch.arange(size) + call)}).items():
        found = results[name]
        if found is not expected and not torch.equal(found.view(-1), expected.reshape(-1)):
            print(f"WRONG first rank {own}, call {call}: {name} {found} instead of {expected}", flush=True)


class Account:
    """A server to which ranks add 1, and how many of their sends have begun and ended, by first rank, in a file."""

    def __init__(self):
        with (folder / "account").open("ab") as file:
            file.truncate(8 * 2 * 8)
        self.counts, self.ones = np.memmap(folder / "account", np.int64, "r+", shape=(8, 2)), torch.ones(100_000)
        self.make()

    def make(self):
        """Make the server, or get the one that lives on; begin to count anew if no send has reached it."""
        self.server = ps.init(torch.zeros(100_000), name="account")
        ps.receive(self.server).wait()
        mpi.barrier()
        if self.server.received_version == 0:
            self.counts[:] = 0
        mpi.barrier()

    def send(self, call):
        for _ in range(20):
            self.counts[own, 0] += 1
            try:
                ps.send(self.server, self.ones).wait()
            except mpi.RankLostError:
                self.counts[own, 0] -= self.server.is_local  # then nothing has been applied
                raise
            self.counts[own, 1] += 1
        reduced(short, call)  # notices a rank that has stopped

    def check(self):
        """Compare the values with the sends; that of a killed rank may be in some chunks. No rank sends meanwhile."""
        if not self.server.is_open:  # the last rank of a host has been lost
            self.make()
        values, (begun, ended) = ps.receive(self.server).wait(), self.counts.sum(axis=0).tolist()
        chunks = [
            chunk for part in values.split([numel for _, numel in self.server.parts]) for chunk in part.split(16384)
        ]
        if any((chunk != chunk[0]).any() or not ended <= chunk[0] <= begun for chunk in chunks):
            print(f"WRONG first rank {own}: {values} after {ended} of {begun} sends", flush=True)


REPEATED = {
    "parameter server": lambda call: account.send(call),
    "other collectives": in_other_collectives,
    "asynchronous calls": lambda call: in_other_collectives(call, "_async"),
    "short allreduce": lambda call: reduced(short, call),
    "long allreduce": lambda call: reduced(long, call),
    "barrier": lambda call: mpi.barrier(),
    "send and receive": exchange,
    "new groups": in_group,
    "copies": lambda call: recovery.confirm(),
}


def lose(is_victim, call):
    """Lose ranks; does not return."""
    if moment in REPEATED:
        if is_victim:
            fail_soon()
        while True:
            REPEATED[moment](call)
    if is_victim:
        time.sleep(0.1)  # the others wait, or compute
        fail()
    begin = time.monotonic()
    while moment == "computing" and time.monotonic() < begin + 0.3:
        torch.rand(100, 100) @ torch.rand(100, 100)
    while True:
        reduced(short, call)


class Training:
    """A loop of ``mpi.elastic()``. Its numbers are exact, so that the result does not depend on the number of ranks."""

    def __init__(self):
        self.data = torch.randint(-4, 5, (CALLS, 12, 4), generator=torch.Generator().manual_seed(1)).double()
        self.network = nn.Linear(4, 1, bias=False).double()
        nn.init.zeros_(self.network.weight)
        # With momentum the numbers are exact for a few steps only.
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=2.0**-10, momentum=0.0 if grows else 0.5)
        self.num_attempts, self.seconds = 0, 0.0

    def step(self, rows, network, scale=1):
        self.optimizer.zero_grad()
        (scale * network(rows).sum()).backward()

    def train(self, job):
        self.num_attempts += 1
        if moment == "elastic DDP":
            dist.init_process_group("torchmpi")
        network = nn.parallel.DistributedDataParallel(self.network) if dist.is_initialized() else self.network
        account = Account() if moment == "elastic server" else None
        if account is not None:
            account.check()
            mpi.barrier()
        while job.step < CALLS or (grows and mpi.size() < full_size):
            for begin, ranks in zip((FIRST_CALL, NEXT_CALL), victims, strict=False):
                if own in ranks and job.step == begin:
                    fail_soon()
                if own in ranks and job.step == CALLS - 1:
                    time.sleep(60)  # until the fault
            time.sleep(0.002)
            self.step(self.data[job.step % CALLS, mpi.rank() :: mpi.size()], network, mpi.size())
            if network is self.network:
                mpinn.synchronize_gradients(network)
            self.optimizer.step()
            job.step += 1
            if not self.seconds and (folder / "fault").exists() and self.num_attempts > 1:
                self.seconds = time.monotonic() - float((folder / "fault").read_text())
            if moment == "checkpoint":
                self.save(job)
            if account is not None:
                account.send(job.step)
            if job.step % 4 == 0:
                job.commit()
        if account is not None:
            mpi.barrier()
            account.check()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.num_steps = job.step

    def save(self, job):
        """Write a checkpoint as programs do, of which another rank waits for the end."""
        if mpi.rank() == 0:
            torch.save({"step": job.step, "weight": self.network.weight}, folder / f"new.{own}")
            (folder / f"new.{own}").replace(folder / "checkpoint")
        mpi.barrier()
        saved = torch.load(folder / "checkpoint")
        if saved["step"] != job.step or not torch.equal(saved["weight"], self.network.weight):
            print(f"WRONG first rank {own}: a checkpoint of step {saved['step']} in step {job.step}", flush=True)
        mpi.barrier()

    def run(self):
        mpi.elastic(network=self.network, optimizer=self.optimizer, step=0)(self.train)()
        result, alone = self.network.weight.clone(), Training()
        for step in range(self.num_steps):
            alone.step(alone.data[step % CALLS], alone.network)
            alone.optimizer.step()
        if not torch.equal(result, alone.network.weight):
            print(f"WRONG first rank {own}: {result} instead of {alone.network.weight}", flush=True)


faulthandler.dump_traceback_later(45)  # losses.py ends it after a minute: says where it hangs
if moment == "start" and own in victims[0]:
    fail()
if moment == "new rank" and is_new and not (folder / "lost").exists():
    (folder / "lost").touch()
    fail_soon(most=2.0)
full_size = int(sys.argv[5]) if grows else 0
# Of a stopped rank: as long as a call may take that is only late.
limits = {"stall_warning_seconds": 5.0, "stall_abort_seconds": 10.0} if fault == "SIGSTOP" else {}
mpi.start(config=mpi.Config(on_lost_rank="raise", server_copies=True, verbose=False, **limits))
account = Account() if moment == "parameter server" else None
if moment in ("start", "elastic loop", "elastic DDP", "elastic server", "checkpoint", "new rank"):
    training = Training()
    training.run()
    num_losses = training.num_attempts - 1
    print(f"continued: first rank {own} of now {mpi.size()}, {num_losses} losses, {training.seconds:.3f} s", flush=True)
    mpi.stop()
    sys.exit(0)
call, num_losses, seconds, is_agreed = 0, 0, 0.0, True
while call < CALLS:
    try:
        if not is_agreed:
            call = int(mpi.allreduce(call, op="max"))
            is_agreed, seconds = True, time.monotonic() - float((folder / "fault").read_text())
            if account is not None:
                account.check()
                mpi.barrier()
        if num_losses == 0 and call == FIRST_CALL:
            lose(own in victims[0], call)
        if num_losses == 1 and call == NEXT_CALL and len(victims) > 1 and moment != "recovery":
            lose(own in victims[1], call)
        reduced(short, call)
        reduced(long, call)
        exchange(call)
        call += 1
    except mpi.RankLostError:
        if moment == "recovery" and own in victims[1]:
            fail_soon(most=0.04)
        mpi.recover()
        num_losses, is_agreed = num_losses + 1, False
print(f"continued: first rank {own} of now {mpi.size()}, {num_losses} losses, {seconds:.3f} s", flush=True)
mpi.stop()
