"""A loop with FSDP2, as in torchtitan: sharded parameters, checkpointed activations, clipping, a saved checkpoint."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import EPOCHS, Task, net, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
model, task = net(), Task()
for layer in (model[0], model[2], model[4]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = sgd(model)
for _ in range(EPOCHS):
    for x, y in task.loader():
        mine = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
        found = checkpoint(model, x[mine], use_reentrant=False)
        nn.functional.mse_loss(found, y[mine]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()

folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
dcp.save(model.state_dict(), checkpoint_id=folder[0])
whole = {name: torch.zeros(value.shape).double() for name, value in model.state_dict().items()}
dcp.load(whole, checkpoint_id=folder[0])
loaded = net()
loaded.load_state_dict(whole)
task.compare(loaded)
dist.destroy_process_group()
