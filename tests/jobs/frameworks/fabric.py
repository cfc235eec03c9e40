"""Lightning Fabric: a loop of one's own."""

import os

import torch
from lightning.fabric import Fabric
from task import EPOCHS, Task, net, sgd
from torch import nn

fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
fabric.launch()
task, model = Task(), net()
model, optimizer = fabric.setup(model, sgd(model))
loader = fabric.setup_dataloaders(task.loader(fabric.world_size))
for _ in range(EPOCHS):
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
ranks = fabric.all_reduce(torch.tensor([float(fabric.global_rank)]), reduce_op="sum")
assert ranks.item() == sum(range(fabric.world_size)), ranks
task.compare(model.module)
fabric.barrier()
