"""Train a small GPT with the functions of torchmpi.nn: every line of the loop is in this file.

AdamW with a learning-rate schedule, bfloat16 autocast, gradients of 4 batches per update, clipping, and a process that
loads data. The job can be killed at any time; the same command continues it from the last checkpoint, and ends with
the same bits.

    mpirun -n 2 python examples/llm/nn_gpt.py --checkpoint gpt.ckpt
"""

from __future__ import annotations

import torch
from gpt_common import Report, checkpoint_file, load, make_parser, save, uses_bf16
from gpt_data import make_loaders
from gpt_model import GPT, loss_of, make_optimizer, validation_loss

import torchmpi as mpi
import torchmpi.nn as mpinn


def main() -> None:
    options = make_parser(__doc__).parse_args()
    mpi.start(with_cuda=False if options.cpu else None)
    device = mpi.device()
    torch.manual_seed(options.seed)
    report = Report(options, mpi.rank())
    model = GPT(context=options.context).to(device)
    optimizer, scheduler = make_optimizer(model, lr=options.lr, steps=options.steps, warm_up=options.warm_up)
    path = checkpoint_file(options)
    step = load(path, model=model, optimizer=optimizer, scheduler=scheduler)
    train, validation = make_loaders(options, rank=mpi.rank(), size=mpi.size(), first_step=step)
    report.print(f"{mpi.size()} ranks on {device.type}, {sum(p.numel() for p in model.parameters()):,} parameters")

    mpinn.synchronize_parameters(model)
    # Gradients are sent during the last of the backward passes of an update.
    mpinn.register_async_backward(model, sync_gradient_frequency=options.accumulate)
    total, bf16 = torch.zeros((), device=device), uses_bf16(options, device)
    for inputs, targets in train:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = loss_of(model(inputs.to(device)), targets.to(device)) / options.accumulate
        loss.backward()
        total += loss.detach()
        if not mpinn.synchronize_gradients_async(model):
            continue  # gradients of further batches will be added
        mpinn.clip_grad_norm_(model, options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            report.step(step, mpi.allreduce(total, op="avg").item(), scheduler.get_last_lr()[0])
        total.zero_()
        if path is not None and mpi.rank() == 0 and (step % options.save_every == 0 or step == options.steps):
            save(path, step, model=model, optimizer=optimizer, scheduler=scheduler)

    mpinn.unregister_async_backward(model)
    mpinn.check_with_allreduce(model)
    loss = mpi.allreduce(validation_loss(model, validation, device), op="avg").item()
    mpi.stop()
    report.finish(loss)


if __name__ == "__main__":
    main()
