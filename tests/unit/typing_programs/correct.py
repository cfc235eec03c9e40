"""Correct programs, in which a type checker finds no mistake. This file is not executed."""

from __future__ import annotations

import numpy as np
import torch

import torchmpi as mpi
import torchmpi.engine
import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps
from torchmpi.config import BackendName, Operation
from torchmpi.engine import AllReduceSGDEngine, State


def collectives(tensor: torch.Tensor, op: Operation, backend: BackendName | None) -> None:
    total: torch.Tensor = mpi.allreduce(tensor)
    total = mpi.allreduce(tensor, torch.empty_like(tensor), op=op, comm=mpi.communicator(0), backend=backend)
    total = mpi.reduce(tensor, 0, total, op="max")
    total = mpi.broadcast(torch.nn.Parameter(tensor), root=1, out=total)
    total = mpi.allgather(tensor, total) + mpi.reduce_scatter(tensor) + mpi.alltoall(tensor)
    total = mpi.scatter(tensor if mpi.rank() == 0 else None, root=0)
    gathered = mpi.gather(tensor)
    if gathered is not None:
        gathered.sum()
    tensors: list[torch.Tensor] = mpi.allreduce_many([tensor, total], op="avg")
    for each in mpi.allreduce_many_async(iter(tensors)).wait():
        each.sum()
    mpi.barrier()
    mpi.barrier(0)


def communicators(tensor: torch.Tensor) -> None:
    level: int = mpi.push_communicator(mpi.rank() % 2)
    mpi.allreduce(tensor, comm=level)
    mpi.allreduce(tensor, comm=mpi.communicator(level).intra)
    with mpi.group([0, 1]) as pair:
        if pair:
            mpi.broadcast_async(tensor, comm=pair).wait()


def numbers(loss: float, count: int, found: bool, scalar: np.float32) -> None:
    mean: float = mpi.allreduce(loss, op="avg") + mpi.reduce(loss, op="max")
    total: int = mpi.allreduce(count) + mpi.allreduce(found)
    mean = mpi.allreduce(count, op="avg")
    counts: list[int] = mpi.allgather(total)
    losses: list[float] = mpi.allgather(mean)
    enough: bool = mpi.broadcast(found)
    print(mpi.allreduce(scalar, op="avg"), mpi.broadcast(scalar), mpi.allreduce(1j), counts, losses, enough)
    total = mpi.allreduce_async(count).wait() + mpi.broadcast_async(count).wait()


def objects(settings: dict[str, float]) -> None:
    received: dict[str, float] = mpi.broadcast_object(settings if mpi.rank() == 0 else None)
    names: list[str] = mpi.allgather_object(mpi.host_name())
    print(received, names)


def messages(tensor: torch.Tensor) -> None:
    left, right = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
    mpi.send(tensor, dst=right)
    tensor = mpi.recv(tensor, src=left)
    number: int = mpi.sendreceive(mpi.rank(), left, right)
    handles = [mpi.send_async(tensor, right), mpi.recv_async(tensor, left)]
    received: torch.Tensor = handles[1].wait(timeout=5)
    print(received, number)


def handles(tensor: torch.Tensor) -> mpi.Handle[torch.Tensor]:
    several: list[mpi.Handle[object]] = [mpi.allreduce_async(tensor), mpi.allreduce_async(1), mpi.send_async(tensor, 1)]
    for handle in several:
        handle.when_done(lambda: print("done"))
        handle.wait()
    return mpi.allreduce_async(tensor, op="avg")


def selection() -> None:
    mpi.collective_selector.set("allreduce", "mpi", device="cpu", span="host", mode="sync", up_to_bytes=4096)
    mpi.collective_selector["reduce", "cpu", "host", "async"] = [(65536, "shm"), (None, "mpi")]
    print(mpi.collective_selector["reduce", "cpu", "host", "async"], mpi.collective_selector_to_string(mode="sync"))
    print(mpi.collective_availability()["shm", "allreduce", "cpu", "sync"])
    mpi.autotune(["allreduce", "broadcast"], sizes=[4096], seconds=2, save=False)


def training(model: torch.nn.Module, data: torch.utils.data.DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> None:
    mpi.start(config=mpi.Config(check="strict", backend="shm", hierarchical="off"))
    mpinn.synchronize_parameters(model)
    optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for x, y in data:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    mpinn.synchronize_gradients(model)
    mpi.stop()


def engines(model: torch.nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    def on_update(state: State) -> None:
        print(state.t)

    engine = AllReduceSGDEngine()
    engine.hooks.on_update.append(on_update)
    engine.train(network=model, criterion=torch.nn.CrossEntropyLoss(), iterator=batches, lr=0.1, max_epochs=2)
    print(torchmpi.engine.HOOK_NAMES, mpi.nn.join)


def servers(weights: torch.Tensor) -> None:
    server = ps.init(weights)
    ps.send(server, weights, "add").wait()
    ps.send(server, weights, ps.sgd(lr=0.1)).wait()
    received: torch.Tensor = ps.receive(server).wait()
    print(received)
    with mpi.started(), mpi.use(1) as communicator:
        print(communicator.size)
