"""Typical mistakes, one on each marked line. A type checker finds most of them. This file is not executed."""

# ruff: noqa: B018

from __future__ import annotations

import torch

import torchmpi as mpi
import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps
from torchmpi.engine import AllReduceSGDEngine, ClassErrorMeter, Hooks, SGDEngine, State

tensor = torch.ones(3)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
server = ps.init(tensor)
engine = AllReduceSGDEngine()


def on_update(state: State) -> None: ...


# Operations and backends
mpi.allreduce(tensor, op="mean")  # mistake
mpi.allreduce(tensor, op="SUM")  # mistake
mpi.allreduce_async(tensor, op="average")  # mistake
mpi.reduce(tensor, op="product")  # mistake
mpi.reduce_scatter(tensor, op="add")  # mistake
mpi.allreduce_many([tensor], op="mean")  # mistake
mpi.allreduce(2.5, op="mean")  # mistake
mpi.allreduce(tensor, backend="NCCL")  # mistake
mpi.broadcast(tensor, backend="shmem")  # mistake
mpi.allgather_async(tensor, backend="tcp")  # mistake
mpi.collective_selector.set("all_reduce", "mpi")  # mistake
mpi.collective_selector.set("allreduce", "mpi", mode="asynchronous")  # mistake
mpi.collective_selector.set("allreduce", "mpi", device="gpu")  # mistake
mpi.collective_selector_to_string("allreduce", "gpu")  # mistake
mpi.autotune("all_reduce")  # mistake
mpi.Config(bind="tight")  # mistake
mpi.Config(check="on")  # mistake
mpi.Config(backend="openmpi")  # mistake
mpi.Config(bucket_size=1 << 20)  # mistake

# Names and keywords of other libraries
mpi.all_reduce(tensor)  # mistake
mpi.init()  # mistake
mpi.get_rank()  # mistake
mpi.allreduce(tensor, average=True)  # mistake
mpi.allreduce(tensor, async_op=True)  # mistake
mpi.allreduce(tensor, group=1)  # mistake
mpi.broadcast(tensor, src=0)  # mistake
mpi.send(tensor, dest=1)  # mistake
mpi.allreduce(tensor, "avg")  # mistake
mpi.allreduce(tensor, tensor, "avg")  # mistake

# Results
mpi.allreduce_async(tensor).sum()  # mistake
mpi.allreduce_async(tensor) + 1  # mistake
mpi.allreduce_async(tensor).result()  # mistake
mpi.allreduce_async(tensor).wait().wait()  # mistake
mpi.allreduce(2.5).item()  # mistake
mpi.allreduce(tensor).wait()  # mistake
mpi.allgather(tensor).append(tensor)  # mistake
mpi.allgather(mpi.rank()).sum()  # mistake
mpi.gather(tensor).sum()  # mistake
mpi.allreduce_many([tensor]).sum()  # mistake
mpi.allreduce_many_async([tensor]).wait().sum()  # mistake
mpi.broadcast_object("name").decode()  # mistake
mpi.allgather_object(mpi.host_name()).lower()  # mistake
mpi.barrier().wait()  # mistake
ps.receive(server).sum()  # mistake
mpi.rank + 1  # mistake
mpi.device().name  # mistake
numbers: list[int] = mpi.allgather(2.5)  # mistake

# Arguments
mpi.allreduce([1.0, 2.0])  # mistake
mpi.allreduce(tensor, comm="world")  # mistake
mpi.allreduce_many(tensor=tensor)  # mistake
mpi.broadcast(tensor, root="0")  # mistake
mpi.send(tensor)  # mistake
mpi.recv(torch.float32, 0)  # mistake
mpi.sendreceive(tensor, 1)  # mistake
mpi.empty_shared(3, dtype="float32")  # mistake
mpi.push_communicator(1.5)  # mistake
mpi.set_communicator("host")  # mistake
mpi.start(with_cuda="yes")  # mistake
mpi.start(cuda=True)  # mistake
mpi.allreduce_async(tensor).wait(timeout="5")  # mistake

# Values, which have no types
mpi.allreduce(torch.ones(3, dtype=torch.int32), op="avg")  # mistake
mpi.broadcast(tensor, root=-1)  # mistake
mpi.broadcast(tensor.to_sparse())  # mistake
mpi.send(tensor, mpi.rank())  # mistake
mpi.allreduce_async(tensor)  # mistake

# Training
mpinn.synchronize_gradients(optimizer)  # mistake
mpinn.synchronize_gradients(model, op="avg")  # mistake
mpinn.synchronize_parameters(optimizer)  # mistake
mpinn.DistributedOptimizer(model, optimizer)  # mistake
mpinn.broadcast_parameters(model)  # mistake
mpinn.join(model, divide_by="all")  # mistake
mpinn.clip_grad_norm_(model, max_norm="1")  # mistake
mpinn.DistributedSampler(model)  # mistake
mpinn.register_async_backward(model, bucket_bytes="4M")  # mistake
SGDEngine().train(model)  # mistake
AllReduceSGDEngine(async_=True)  # mistake
engine.hooks.on_updated.append(on_update)  # mistake
engine.hooks.on_update.append("print")  # mistake
engine.hooks.on_update = on_update  # mistake
engine.hooks.on_updates = []  # mistake
engine.hooks.at("update")  # mistake
Hooks().on_epoch.append(on_update)  # mistake
ClassErrorMeter().value().item()  # mistake
ps.send(server, tensor, lr=0.1)  # mistake
ps.send(tensor, server)  # mistake
