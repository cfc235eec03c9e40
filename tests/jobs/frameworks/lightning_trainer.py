"""Lightning's Trainer: validation, and logged values that are averaged over the ranks, integers among them."""

import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from task import BATCH, EPOCHS, Task, net, sgd
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


class Module(lightning.LightningModule):
    """The net, its loss and its metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        self.log("rank", torch.tensor(2 * self.global_rank), on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("error", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.net)


num_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = lightning.Trainer(
    accelerator="cpu", devices=num_ranks, strategy=DDPStrategy(process_group_backend=os.environ.get("BACKEND")),
    max_epochs=EPOCHS, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
task, module = Task(), Module()
# Lightning's own sampler shuffles.
sampler = DistributedSampler(task.data, num_ranks, int(os.environ["RANK"]), shuffle=False)
loader = DataLoader(task.data, batch_size=BATCH // num_ranks, sampler=sampler)
trainer.fit(module, loader, loader)
assert trainer.callback_metrics["rank_epoch"] == num_ranks - 1, trainer.callback_metrics
assert trainer.callback_metrics["error"] < trainer.callback_metrics["loss_epoch"], trainer.callback_metrics
task.compare(module.net)
trainer.strategy.barrier()
