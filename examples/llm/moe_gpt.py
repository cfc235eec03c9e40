"""Train a small GPT whose feed-forward networks are mixtures of experts, which are divided over the ranks.

Each rank has its own texts, all weights but those of the experts, and an equal part of the experts. The losses are
those of one process with all experts:

    mpirun -n 4 python examples/llm/moe_gpt.py
    python examples/llm/moe_gpt.py
"""

from __future__ import annotations

import torch
from gpt_common import Report, make_parser
from gpt_data import make_loaders
from gpt_model import GPT, loss_of, make_optimizer, validation_loss
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn


def with_experts(model: GPT, *, num_experts: int, capacity_factor: float) -> list[mpinn.MixtureOfExperts]:
    """Replace the feed-forward network of each block by a mixture of networks of a quarter of its size."""
    layers = []
    for block in model.blocks:
        width = block.norm_2.normalized_shape[0]

        def make_expert(width: int = width) -> nn.Module:
            return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

        block.feed_forward = mpinn.MixtureOfExperts(width, num_experts, make_expert, capacity_factor=capacity_factor)
        layers.append(block.feed_forward)
    return layers


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--experts", type=int, default=8, help="a multiple of the ranks (default: %(default)s)")
    parser.add_argument("--capacity", type=float, default=1.25, help="of an expert (default: %(default)s)")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the loss (default: %(default)s)")
    options = parser.parse_args()
    mpi.start(with_cuda=False if options.cpu else None)
    device = mpi.device()
    torch.manual_seed(options.seed)
    report = Report(options, mpi.rank())
    model = GPT(context=options.context)
    layers = with_experts(model, num_experts=options.experts, capacity_factor=options.capacity)
    model.to(device)
    optimizer, scheduler = make_optimizer(model, lr=options.lr, steps=options.steps, warm_up=options.warm_up)
    train, validation = make_loaders(options, rank=mpi.rank(), size=mpi.size(), first_step=0)
    report.print(f"{mpi.size()} ranks on {device.type}, {options.experts // mpi.size()} experts on each")

    mpinn.synchronize_parameters(model)
    total, step = torch.zeros((), device=device), 0
    for number, (inputs, targets) in enumerate(train, start=1):
        loss = loss_of(model(inputs.to(device)), targets.to(device))
        balance = sum(layer.balance_loss for layer in layers) / len(layers)
        ((loss + options.balance * balance) / options.accumulate).backward()
        total += loss.detach() / options.accumulate
        if number % options.accumulate:
            continue
        mpinn.synchronize_gradients(model)  # not those of experts, which have the gradients of all ranks
        mpinn.clip_grad_norm_(model, options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            report.step(step, mpi.allreduce(total, op="avg").item(), scheduler.get_last_lr()[0])
            dropped = mpi.allreduce(sum(layer.num_dropped for layer in layers))
            report.print(
                f"  balance {mpi.allreduce(float(balance.detach()), op='avg'):.4f}, {dropped} choices without a place"
            )
        total.zero_()

    loss = mpi.allreduce(validation_loss(model, validation, device), op="avg").item()
    mpi.stop()
    report.finish(loss)


if __name__ == "__main__":
    main()
