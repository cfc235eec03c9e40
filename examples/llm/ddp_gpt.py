"""Train a small GPT with DistributedDataParallel, and torchmpi as the backend of torch.distributed.

The training of ``nn_gpt.py``. With ``--backend gloo`` torchmpi is not needed.

    mpirun -n 2 python examples/llm/ddp_gpt.py --checkpoint gpt.ckpt
    torchrun --nproc-per-node 2 examples/llm/ddp_gpt.py --checkpoint gpt.ckpt
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from gpt_common import Report, checkpoint_file, load, make_parser, save, uses_bf16
from gpt_data import make_loaders
from gpt_model import GPT, loss_of, make_optimizer, validation_loss
from torch.nn.parallel import DistributedDataParallel


def average(loss: torch.Tensor) -> float:
    """Return the average over the ranks."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backend", default="torchmpi", help="of torch.distributed (default: %(default)s)")
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    # torchmpi has selected the GPU of this rank.
    use_gpu = torch.cuda.is_available() and not options.cpu
    device = torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
    torch.manual_seed(options.seed)
    report = Report(options, rank)
    model = GPT(context=options.context).to(device)
    optimizer, scheduler = make_optimizer(model, lr=options.lr, steps=options.steps, warm_up=options.warm_up)
    path = checkpoint_file(options)
    step = load(path, model=model, optimizer=optimizer, scheduler=scheduler)
    train, validation = make_loaders(options, rank=rank, size=size, first_step=step)
    report.print(f"{size} ranks on {device.type}, {sum(p.numel() for p in model.parameters()):,} parameters")

    replica = DistributedDataParallel(model)
    total, bf16 = torch.zeros((), device=device), uses_bf16(options, device)
    for number, (inputs, targets) in enumerate(train, start=1):
        is_last = number % options.accumulate == 0
        # Gradients are sent during the last of the backward passes of an update.
        with nullcontext() if is_last else replica.no_sync():
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = loss_of(replica(inputs.to(device)), targets.to(device)) / options.accumulate
            loss.backward()
        total += loss.detach()
        if not is_last:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            report.step(step, average(total), scheduler.get_last_lr()[0])
        total.zero_()
        if path is not None and rank == 0 and (step % options.save_every == 0 or step == options.steps):
            save(path, step, model=model, optimizer=optimizer, scheduler=scheduler)

    loss = average(validation_loss(model, validation, device))
    dist.barrier()  # no rank may leave while others communicate
    dist.destroy_process_group()
    report.finish(loss)


if __name__ == "__main__":
    main()
