"""DeepSpeed: its own start of torch.distributed, and ZeRO stage 2. In float32: ZeRO has no float64.

Not run by the tests: DeepSpeed compiles an extension of its own at the first start.
"""

import deepspeed
import torch.distributed as dist
from task import BATCH, EPOCHS, Task, net, sgd
from torch import nn

deepspeed.init_distributed("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model, task = net().float(), Task()
config = {
    "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // size, "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
}  # fmt: skip
engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
for _ in range(EPOCHS):
    for x, y in task.loader():
        mine = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
        engine.backward(nn.functional.mse_loss(engine(x[mine].float()), y[mine].float()))
        engine.step()
task.compare(model.double(), tolerance=1e-4)
dist.destroy_process_group()
