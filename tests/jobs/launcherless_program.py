"""A program for :mod:`test_launcherless`: most features of torchmpi, with the results checked and hashed.

Started by mpirun it runs on MPI. Started by torchrun, or with STORE, RANK and WORLD_SIZE in the environment, it runs on
gloo and messages, without mpi4py.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import torchmpi as mpi
import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps
from torchmpi.launch import launcherless, mpi_library

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers import contract

DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
SHAPES = ((), (7,), (50_001,))


class Results:
    """Compare results with expected ones, and hash all bits."""

    def __init__(self) -> None:
        self.hash, self.wrong, self.num_compared = hashlib.sha256(), [], 0

    def compare(self, what: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        self.num_compared += 1
        self.hash.update(contract._bytes(result.detach()).numpy().tobytes())
        if not contract.same_bits(result.detach(), expected):
            self.wrong.append(f"{what}: {result} instead of {expected}")


def reductions(results: Results, backend: str) -> None:
    rank, size = mpi.rank(), mpi.size()
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        inputs = [contract.values(shape, dtype, other) for other in range(size)]
        for op in contract.OPS_OF[dtype]:
            what, expected = f"{backend} {dtype} {op} {shape}", contract.reduced(inputs, op)
            tensor = inputs[rank].clone()
            results.compare(f"allreduce {what}", mpi.allreduce(tensor, op=op, backend=backend), expected)
            pending = mpi.allreduce_async(inputs[rank].clone(), op=op, backend=backend)
            reduced = mpi.reduce(inputs[rank].clone(), size - 1, op=op, backend=backend)
            results.compare(f"allreduce_async {what}", pending.wait(), expected)
            results.compare(f"reduce {what}", reduced, expected if rank == size - 1 else inputs[rank])
            part = mpi.reduce_scatter(inputs[rank].clone(), op=op, backend=backend)
            results.compare(f"reduce_scatter {what}", part, contract.rows(expected, rank, size))


def movements(results: Results, backend: str) -> None:
    rank, size = mpi.rank(), mpi.size()
    for dtype, shape in itertools.product((*DTYPES, torch.float8_e4m3fn), SHAPES[1:]):
        what, inputs = f"{backend} {dtype} {shape}", [contract.values(shape, dtype, other) for other in range(size)]
        rows = [tensor[: max(1, shape[0] - other)] for other, tensor in enumerate(inputs)]  # as many as the rank likes
        together = torch.cat([tensor.view(torch.uint8) for tensor in rows]).view(dtype)
        root = size - 1
        results.compare(f"broadcast {what}", mpi.broadcast(inputs[rank].clone(), root, backend=backend), inputs[root])
        results.compare(f"allgather {what}", mpi.allgather(rows[rank], backend=backend), together)
        if backend == "p2p":
            continue  # the others it does not have
        gathered = mpi.gather(rows[rank], root, backend=backend)
        if rank == root:
            results.compare(f"gather {what}", gathered, together)
        part = mpi.scatter(inputs[root] if rank == root else None, root, backend=backend)
        results.compare(f"scatter {what}", part, contract.rows(inputs[root], rank, size))
        parts = [contract.rows(tensor, rank, size).view(torch.uint8) for tensor in inputs]
        exchanged = mpi.alltoall(inputs[rank], backend=backend)
        results.compare(f"alltoall {what}", exchanged, torch.cat(parts).view(dtype))


def messages(results: Results) -> None:
    rank, size = mpi.rank(), mpi.size()
    left, right = (rank - 1) % size, (rank + 1) % size
    for numel in (1, 1000, 2_000_000):
        tensors = [torch.full((numel,), float(other)) for other in range(size)]
        shifted = mpi.sendreceive(tensors[rank].clone(), src=left, dst=right)
        results.compare(f"sendreceive {numel}", shifted, tensors[left])
        sending = mpi.send_async(tensors[rank], right)
        results.compare(f"recv {numel}", mpi.recv_async(torch.empty(numel), left).wait(), tensors[left])
        sending.wait()
    assert mpi.allgather_object({"rank": rank}) == [{"rank": other} for other in range(size)]
    assert mpi.broadcast_object(("root", rank), root=size - 1) == ("root", size - 1)


def training(results: Results) -> None:
    """Compare three training steps with those of one process on all the data."""
    rank, size = mpi.rank(), mpi.size()
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)).double()
    mpinn.synchronize_parameters(net)
    mpinn.register_async_backward(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.randn(4 * size, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for _ in range(3):
        optimizer.zero_grad()
        net(data[rank::size]).square().mean().backward()
        mpinn.synchronize_gradients_async(net)
        optimizer.step()
    mpinn.unregister_async_backward(net)
    mpinn.check_with_allreduce(net)
    optimizer.zero_grad()
    net(data[rank::size]).square().mean().backward()
    mpinn.synchronize_gradients(net)
    together = [parameter.grad.clone() for parameter in net.parameters()]
    optimizer.zero_grad()
    net(data).square().mean().backward()
    for mine, parameter in zip(together, net.parameters(), strict=True):
        close = torch.allclose(mine, parameter.grad)
        results.compare("gradients of all data", torch.tensor(close), torch.tensor(True))
        results.hash.update(mine.numpy().tobytes())


def servers(results: Results) -> None:
    rank, size = mpi.rank(), mpi.size()
    start = torch.arange(1000.0)
    server = ps.init(start)
    ps.send(server, torch.full((1000,), rank + 1.0), rule="add").wait()
    mpi.barrier()
    found = torch.empty(1000)
    ps.receive(server, found).wait()
    results.compare("parameter server", found, start + size * (size + 1) / 2)
    mpi.barrier()
    ps.free(server)


def run(*, briefly: bool) -> None:
    results = Results()
    mpi.start()
    if not briefly:
        # One rank, or ranks without shared memory, have fewer backends.
        others = [] if mpi.size() == 1 else ["p2p", "shm"] if mpi.communicator().num_nodes == 1 else ["p2p"]
        for backend in ("mpi" if "mpi4py" in sys.modules else "gloo", *others):
            reductions(results, backend)
            movements(results, backend)
        messages(results)
        training(results)
    servers(results)
    for key in ("all the same", mpi.rank() % 2):
        mpi.push_communicator(key)
        results.compare("on a level", mpi.allreduce(torch.ones(3)), torch.full((3,), float(mpi.communicator().size)))
    mpi.set_communicator(0)
    digests, wrong = mpi.allgather_object(results.hash.hexdigest()), mpi.allgather_object(results.wrong)
    hosts, rank = mpi.communicator().num_nodes, mpi.rank()
    mpi.stop()
    if rank == 0:
        total = hashlib.sha256("".join(digests).encode()).hexdigest()
        everything = [each for part in wrong for each in part]
        print(f"compared {results.num_compared}, wrong {everything}, hosts {hosts}, digest {total}", flush=True)


def without_launcher() -> None:
    """Connect twice through the same store, first with two starts; afterwards the store is unchanged."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE"], size)
    for starts in (("at length", "briefly"), ("briefly",)):
        MPI = launcherless.connect(store, rank, size, timeout_seconds=60)
        mpi_library.adopt(MPI)
        for how in starts:
            run(briefly=how == "briefly")
        mpi_library.adopt(None)
        MPI.close()
        left = [thread.name for thread in threading.enumerate() if "torchmpi" in thread.name]
        names = [os.readlink(entry) for entry in _descriptors() if os.path.lexists(entry)]
        left += [name for name in names if name.startswith(("socket:", "anon_inode:[event"))]
        print(f"rank {rank} left: {left}, mpi4py: {'mpi4py' in sys.modules}", flush=True)


def _descriptors() -> list[str]:
    return [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]


if __name__ == "__main__":
    if "STORE" in os.environ:
        without_launcher()
    else:
        run(briefly=False)
