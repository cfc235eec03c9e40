"""DeepSpeed: its own start of torch.distributed, and ZeRO. In float32: ZeRO has no float64.

    deepspeed_zero.py [EPOCHS [STAGE]]

Not run by the tests: DeepSpeed compiles an extension of its own at the first start.
"""

import sys

import deepspeed
import torch.distributed as dist
from task import BATCH, EPOCHS, Task, net, sgd
from torch import nn

deepspeed.init_distributed("gloo")
stage = int(sys.argv[2]) if len(sys.argv) > 2 else 2
rank, size = dist.get_rank(), dist.get_world_size()
model, task = net().float(), Task()
config = {
    "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // size, "gradient_clipping": 0.0,
    "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
}  # fmt: skip
engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
for _ in range(EPOCHS):
    for x, y in task.loader():
        mine = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
        engine.backward(nn.functional.mse_loss(engine(x[mine].float()), y[mine].float()))
        engine.step()
trained = net()
with deepspeed.zero.GatheredParameters(list(model.parameters())):  # of stage 3, which divides them
    trained.load_state_dict(model.state_dict())
task.compare(trained, tolerance=1e-6)
dist.destroy_process_group()
