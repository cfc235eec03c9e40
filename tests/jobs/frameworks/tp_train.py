"""Tensor parallelism by DTensor: the matrices are divided over the ranks, which all see the whole batch."""

import torch.distributed as dist
from task import EPOCHS, Task, net, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model, task = net(), Task()
plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": RowwiseParallel(input_layouts=Replicate())}
parallelize_module(model, mesh, plan)
optimizer = sgd(model)
for _ in range(EPOCHS):
    for x, y in task.loader():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

whole = net()
whole.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
task.compare(whole)
dist.destroy_process_group()
