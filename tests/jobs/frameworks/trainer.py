"""Transformers' Trainer: gradient accumulation, evaluation, checkpoints, a resumed run, bfloat16.

trainer.py [EPOCHS [gloo|none [compile]]]
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from task import BATCH, EPOCHS, Task, net, sgd
from torch import nn
from transformers import Trainer, TrainingArguments

STEPS = 2 * EPOCHS
BACKEND = None if "none" in sys.argv else "gloo"


class Model(nn.Module):
    """The net in the form that the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.net(x)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


def trainer_for(folder: str, **options: object) -> Trainer:
    arguments = TrainingArguments(
        folder, use_cpu=True, ddp_backend=BACKEND, report_to=[], disable_tqdm=True,
        train_sampling_strategy="sequential", per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
        gradient_accumulation_steps=2, lr_scheduler_type="constant", max_grad_norm=0, logging_steps=1,
        remove_unused_columns=False, torch_compile="compile" in sys.argv, **options,
    )  # fmt: skip
    model = Model()
    data = [{"x": x, "labels": y} for x, y in task.data]
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, optimizers=(sgd(model), None))


task = Task()
folder = tempfile.mkdtemp()
first = trainer_for(f"{folder}/bf16", max_steps=2, bf16=True, save_strategy="no")
before, _, after = first.evaluate()["eval_loss"], first.train(), first.evaluate()["eval_loss"]
assert after < before, (before, after)

shared = [folder]
dist.broadcast_object_list(shared)
trainer_for(shared[0], max_steps=STEPS // 2, save_steps=STEPS // 2).train()
task.begin = time.perf_counter()
resumed = trainer_for(shared[0], max_steps=STEPS, save_steps=STEPS // 2)
resumed.train(resume_from_checkpoint=True)
assert resumed.state.global_step == STEPS
task.compare(resumed.model.net, accumulate=2)
dist.barrier()
