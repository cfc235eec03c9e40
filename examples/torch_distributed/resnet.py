"""Train a ResNet with DistributedDataParallel, and measure step time, images per second and scaling efficiency.

Plain ``torch.distributed``. Between blocks of steps rank 0 takes steps alone, with the same number of images and
threads, while the other ranks sleep; the efficiency is relative to these. With --json, runs on different numbers of
ranks are shown in one chart.

    mpirun -n 1 python examples/torch_distributed/resnet.py --json resnet.json
    mpirun -n 2 python examples/torch_distributed/resnet.py --json resnet.json --plot resnet.png
    torchrun --nproc-per-node 2 examples/torch_distributed/resnet.py --model tiny --image-size 32 --backend gloo
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from resnet_data import SyntheticImages, batches, read_cifar10
from resnet_model import make_model
from resnet_options import parse_options
from resnet_report import Report
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

STEPS_PER_BLOCK = 5
WARM_UP_STEPS = 3


class Trainer:
    """Takes steps, and records duration and loss of each."""

    def __init__(self, model: nn.Module, source: Iterator[tuple[Tensor, Tensor]], options: argparse.Namespace) -> None:
        self.model, self.source, self.bf16 = model, source, options.bf16
        self.optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
        self.device = next(model.parameters()).device
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def steps(self, number: int) -> None:
        for _ in range(number):
            begin = time.perf_counter()
            images, labels = (tensor.to(self.device) for tensor in next(self.source))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                loss = cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())  # waits for the GPU
            self.seconds.append(time.perf_counter() - begin)


def choose_device(options: argparse.Namespace) -> torch.device:
    if options.cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = dist.get_node_local_rank(fallback_rank=dist.get_rank())
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def measure(together: Trainer, alone: Trainer, num_steps: int) -> None:
    """Alternate blocks of steps by all ranks and by rank 0, as the speed of a machine may change during the run."""
    # Ranks that wait for a message may keep a core busy, which rank 0 could use. In a barrier of gloo they sleep.
    sleepers = dist.new_group(backend="gloo")
    blocks = [min(STEPS_PER_BLOCK, num_steps - first) for first in range(0, num_steps, STEPS_PER_BLOCK)]
    for number in (WARM_UP_STEPS, *blocks):
        together.steps(number)
        dist.barrier(sleepers)
        if dist.get_rank() == 0:
            alone.steps(number)
        dist.barrier(sleepers)


def check_same_everywhere(model: nn.Module) -> None:
    """Check that all ranks have the same parameters, bit for bit, as they have taken the same steps."""
    own = parameters_to_vector(model.parameters()).detach()
    of_rank_0 = own.clone()
    dist.broadcast(of_rank_0, src=0)
    assert torch.equal(own, of_rank_0), f"the parameters of rank {dist.get_rank()} differ from rank 0"


def main() -> None:
    options = parse_options(__doc__)
    report = Report(options)
    dist.init_process_group(options.backend)
    rank, size, device = dist.get_rank(), dist.get_world_size(), choose_device(options)
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    synthetic = SyntheticImages(10_000, options.image_size, options.classes)
    images = read_cifar10(options.data) if options.data else synthetic
    own_model = make_model(options.model, options.classes).to(device)
    model = DistributedDataParallel(copy.deepcopy(own_model), gradient_as_bucket_view=True)
    together = Trainer(model, batches(images, options.batch_size), options)
    alone = Trainer(own_model, batches(images, options.batch_size, num_replicas=1, rank=0), options)

    measure(together, alone, options.steps)
    slowest = torch.tensor(together.seconds, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # the duration of a step is that on the slowest rank
    check_same_everywhere(model)
    assert all(map(math.isfinite, together.losses)), f"the loss became {together.losses[-1]}: try a smaller --lr"
    if rank == 0:
        numel = sum(parameter.numel() for parameter in model.parameters())
        print(f"{options.model}, {numel:,} parameters, loss {together.losses[0]:.4f} to {together.losses[-1]:.4f}")
        report.add(size, slowest.tolist()[WARM_UP_STEPS:], alone.seconds[WARM_UP_STEPS:])
    dist.barrier()  # no rank may leave while others communicate, or while a thread of gloo holds the last tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
