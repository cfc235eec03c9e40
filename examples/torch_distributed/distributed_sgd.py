"""Synchronous SGD: every rank has a part of the images, and gradients are averaged by ``dist.all_reduce``.

Plain ``torch.distributed``, after the third part of PyTorch's tutorial "Writing Distributed Applications", with the
digits of scikit-learn or MNIST files. DistributedDataParallel, as in ``resnet.py``, does the same faster.

    mpirun -n 4 python examples/torch_distributed/distributed_sgd.py
    torchrun --nproc-per-node 4 examples/torch_distributed/distributed_sgd.py --backend gloo
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from digits import load_images, part_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def make_network(side: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (side // 4) ** 2, 10),
    )


def average_gradients(network: nn.Module) -> None:
    """Replace each gradient by its average over the ranks. Only this makes the training distributed."""
    for parameter in network.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def accuracy(network: nn.Module, images: TensorDataset, device: torch.device) -> float:
    """Return the fraction of right answers; each rank tests every size-th image."""
    inputs, labels = (part.to(device) for part in images[dist.get_rank() :: dist.get_world_size()])
    with torch.no_grad():
        num_right = (network(inputs).argmax(1) == labels).sum()
    dist.all_reduce(num_right)
    return num_right.item() / len(images)


def check_same_everywhere(network: nn.Module) -> None:
    """Check that all ranks have the same parameters, bit for bit, as they have taken the same steps."""
    for name, parameter in network.named_parameters():
        of_rank_0 = parameter.detach().clone()
        dist.broadcast(of_rank_0, src=0)
        assert torch.equal(parameter, of_rank_0), f"{name} on rank {dist.get_rank()} differs from rank 0"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torchmpi", help="of torch.distributed (default: %(default)s)")
    parser.add_argument("--gpu", action="store_true", help="train on the GPU that is current (default: the CPU)")
    parser.add_argument("--data", metavar="DIR", help="directory of MNIST IDX files (default: scikit-learn's digits)")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the images (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, of all ranks (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="of weights and shuffling (default: %(default)s)")
    parser.add_argument(
        "--assert-accuracy", type=float, default=0.95, metavar="A", help="fail below (default: %(default)s)"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    # torchmpi has selected the GPU of this rank.
    device = torch.device("cuda", torch.cuda.current_device()) if options.gpu else torch.device("cpu")
    torch.manual_seed(options.seed)  # the same initial weights on all ranks
    train, test, origin = load_images(options.data)
    network = make_network(train.tensors[0].shape[-1]).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9)
    part = part_of(train, rank, size, seed=options.seed)
    # The batch of a rank is smaller with more ranks, so that the number of images per step is constant.
    batches = DataLoader(part, batch_size=max(1, options.batch_size // size), shuffle=True)
    if rank == 0:
        print(f"data: {origin}; {len(part)} for each of {size} ranks, {dist.get_backend()}", flush=True)

    for epoch in range(options.epochs):
        total = torch.zeros(1, device=device)
        for images, labels in ([part.to(device) for part in batch] for batch in batches):
            optimizer.zero_grad()
            loss = cross_entropy(network(images), labels)
            loss.backward()
            average_gradients(network)
            optimizer.step()
            total += loss.detach() / len(batches)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1:2d}/{options.epochs}  loss {total.item() / size:.6f}", flush=True)

    check_same_everywhere(network)
    result = accuracy(network, test, device)
    if rank == 0:
        print(f"test accuracy {result:.4f}", flush=True)
    dist.barrier()  # no rank may leave while others communicate, or while a thread of gloo holds the last tensor
    dist.destroy_process_group()
    assert result >= options.assert_accuracy, f"expected a test accuracy of at least {options.assert_accuracy}"


if __name__ == "__main__":
    main()
