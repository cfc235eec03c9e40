"""Train a small model of the shape of Llama with a choice of parallelism, and generate text from it.

``--parallel ddp``: each rank has the model, and gradients are averaged. ``fsdp``: each rank has a part of the model.
``tp``: groups of ``--tp`` ranks divide the matrices, and FSDP2 divides the rest of the work over the groups. All three
train with the same batches, so that the losses differ by roundings only.

    mpirun -n 2 python examples/llm/parallel_gpt.py --parallel fsdp
    mpirun -n 4 python examples/llm/parallel_gpt.py --parallel tp
    torchrun --nproc-per-node 2 examples/llm/parallel_gpt.py --backend gloo
"""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.distributed as dist
from gpt_common import Report
from gpt_data import make_loaders
from gpt_model import loss_of
from llama_model import HEAD, Llama, generate
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tp_dtensor import divide


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=("ddp", "fsdp", "tp"), default="ddp", help="default: %(default)s")
    parser.add_argument("--tp", type=int, default=2, help="ranks that divide a model (default: %(default)s)")
    parser.add_argument("--backend", default="torchmpi", help="of torch.distributed (default: %(default)s)")
    parser.add_argument("--data", metavar="FILE", help="text to train on (default: Python's reference manual)")
    parser.add_argument("--width", type=int, default=256, help="number of features (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=2, help="number of blocks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="updates of the weights (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=24, help="windows, over all ranks (default: %(default)s)")
    parser.add_argument("--context", type=int, default=32, help="bytes per window (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--prompt", default="The following ", help="begin of the text (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=40, help="bytes to generate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1111, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--assert-loss", type=float, default=3.0, help="fail above (default: %(default)s)")
    parser.set_defaults(accumulate=1, workers=0)
    return parser.parse_args()


def make_mesh(options: argparse.Namespace) -> DeviceMesh:
    """Return the ranks as groups with different data, each of which has one model."""
    size, ranks_per_model = dist.get_world_size(), options.tp if options.parallel == "tp" else 1
    num_key_heads = options.width // HEAD // 2
    if size % ranks_per_model or num_key_heads % ranks_per_model:
        raise SystemExit(f"--tp {ranks_per_model} does not divide {size} ranks and {num_key_heads} heads evenly")
    return init_device_mesh("cpu", (size // ranks_per_model, ranks_per_model), mesh_dim_names=("data", "model"))


def make_parallel(model: Llama, mesh: DeviceMesh, parallel: str) -> torch.nn.Module:
    if parallel == "ddp":
        return DistributedDataParallel(model)
    if parallel == "tp":
        divide(model, mesh["model"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def logits_of(model: torch.nn.Module, tokens: Tensor, depth: int) -> Tensor:
    return model(tokens, [[] for _ in range(depth)])


def average(loss: Tensor) -> float:
    """Return the average over the ranks; those of one model have the same loss."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    options = parse()
    dist.init_process_group(options.backend)
    report, mesh = Report(options, dist.get_rank()), make_mesh(options)
    torch.manual_seed(options.seed)
    model = Llama(options.width, options.depth)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # the logits are only read
    trained = make_parallel(model, mesh, options.parallel)
    # Matrices and norms are on different meshes, which one operation on all of them (foreach) does not accept.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, foreach=False)
    data = mesh["data"]
    train, validation = make_loaders(options, rank=data.get_local_rank(), size=data.size())
    for step, (inputs, targets) in enumerate(train, start=1):
        loss = loss_of(logits_of(trained, inputs, options.depth), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            report.step(step, average(loss), options.lr)

    with torch.no_grad():
        [(inputs, targets)] = validation
        loss = average(loss_of(logits_of(trained, inputs, options.depth), targets))
    prompt = torch.tensor([list(options.prompt.encode())])
    tokens, _ = generate(model, prompt, options.tokens)
    report.print(f"text: {bytes(token % 256 for token in tokens[0].tolist())!r}")
    dist.barrier()  # no rank may leave while others communicate
    dist.destroy_process_group()
    report.finish(loss)


if __name__ == "__main__":
    main()
