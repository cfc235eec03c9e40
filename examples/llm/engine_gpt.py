"""Train a small GPT with an engine, which runs the loop of ``nn_gpt.py``.

Accumulation, autocast, clipping and the schedule are options of ``train()``. A checkpoint is a folder in the format of
``torch.distributed.checkpoint``.

    mpirun -n 2 python examples/llm/engine_gpt.py --checkpoint gpt.ckpt
"""

from __future__ import annotations

import os

import torch
from gpt_common import Report, make_parser, uses_bf16
from gpt_data import make_loaders
from gpt_model import GPT, loss_of, make_optimizer, validation_loss

import torchmpi as mpi
from torchmpi.engine import AllReduceSGDEngine


def main() -> None:
    options = make_parser(__doc__).parse_args()
    mpi.start(with_cuda=False if options.cpu else None)
    torch.manual_seed(options.seed)
    report = Report(options, mpi.rank())
    model = GPT(context=options.context)
    optimizer, scheduler = make_optimizer(model, lr=options.lr, steps=options.steps, warm_up=options.warm_up)
    train, validation = make_loaders(options, rank=mpi.rank(), size=mpi.size())
    num_parameters = sum(p.numel() for p in model.parameters())
    report.print(f"{mpi.size()} ranks on {mpi.device().type}, {num_parameters:,} parameters")

    engine = AllReduceSGDEngine(asynchronous=True, progress=False)
    if options.checkpoint:
        engine.checkpoint(options.checkpoint, every=options.save_every)
        engine.hooks.on_end.append(lambda state: engine.save_checkpoint(options.checkpoint))
    losses = []  # of the batches of an update

    @engine.on("on_forward_criterion")
    def add_loss(state):
        losses.append(state.loss.detach())

    @engine.on("on_update")
    def print_loss(state):
        if state.t % 10 == 0:
            report.step(state.t, mpi.allreduce(torch.stack(losses).mean(), op="avg").item(), state.lr)
        losses.clear()

    engine.train(
        network=model,
        criterion=loss_of,
        iterator=train,  # one epoch of all batches; a continued run skips those that are done
        optimizer=optimizer,
        accumulate=options.accumulate,
        autocast=torch.bfloat16 if uses_bf16(options, mpi.device()) else None,
        clip_grad_norm=options.clip,
        scheduler=scheduler,
        scheduler_step="step",
        resume=options.checkpoint if options.checkpoint and os.path.exists(options.checkpoint) else None,
    )
    loss = mpi.allreduce(validation_loss(model, validation, mpi.device()), op="avg").item()
    mpi.stop()
    report.finish(loss)


if __name__ == "__main__":
    main()
