"""Ignite: its distributed launcher, automatic DDP, a distributed metric."""

import ignite.distributed as idist
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import MeanSquaredError
from task import BATCH, EPOCHS, Task, net, sgd
from torch import nn


def training(local_rank: int) -> None:
    task, model = Task(), idist.auto_model(net())
    optimizer = idist.auto_optim(sgd(model))
    loader = idist.auto_dataloader(task.data, batch_size=BATCH, shuffle=False)
    trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss)
    evaluator = create_supervised_evaluator(model, {"error": MeanSquaredError()})
    errors = []

    @trainer.on(Events.STARTED | Events.COMPLETED)
    def evaluate() -> None:
        errors.append(evaluator.run(loader).metrics["error"])

    trainer.run(loader, max_epochs=EPOCHS)
    assert errors[1] < errors[0], errors
    assert idist.all_gather(errors[1]) == [errors[1]] * idist.get_world_size()
    task.compare(model.module)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training)
