"""Accelerate: prepared model, optimizer and data, gradient accumulation, gathering of metrics."""

from accelerate import Accelerator
from task import EPOCHS, Task, net, sgd
from torch import nn

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
task, model = Task(), net()
model, optimizer, loader = accelerator.prepare(model, sgd(model), task.loader(accelerator.num_processes))
for _ in range(EPOCHS):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
ranks = accelerator.gather_for_metrics(accelerator.reduce(y.sum(), "mean").reshape(1))
assert len(ranks) == accelerator.num_processes and (ranks == ranks[0]).all(), ranks
task.compare(accelerator.unwrap_model(model), accumulate=2)
accelerator.end_training()
