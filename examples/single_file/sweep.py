"""A hyperparameter sweep: groups of ranks train with different learning rates at the same time.

    torchmpi run -n 4 examples/single_file/sweep.py      # two groups of two ranks
    torchmpi run -n 2 examples/single_file/sweep.py      # two groups of one rank

Each group is a communicator. It takes every second learning rate, and averages gradients among its own ranks.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

import torchmpi as mpi
import torchmpi.nn as mpinn

RATES, EPOCHS, BATCH_SIZE, NUM_GROUPS = (0.003, 0.03, 0.3, 3.0), 3, 64, 2


def accuracy_with(lr: float, train: torch.utils.data.Dataset, test: torch.utils.data.Dataset) -> float:
    """Train on the ranks of the current communicator, and return the accuracy on the test images."""
    sampler = DistributedSampler(train, num_replicas=mpi.size(), rank=mpi.rank())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    mpinn.synchronize_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(train, BATCH_SIZE // mpi.size(), sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            mpinn.synchronize_gradients(model)
            optimizer.step()
    inputs, targets = next(iter(DataLoader(test, len(test))))
    with torch.no_grad():
        return (model(inputs).argmax(1) == targets).float().mean().item()


def main() -> None:
    mpi.start()
    rank, size = mpi.rank(), mpi.size()
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))

    # Every rank makes the calls for all groups, also for those that it is not in.
    groups = [mpi.group(range(number, size, NUM_GROUPS)) for number in range(NUM_GROUPS)]
    number = rank % NUM_GROUPS
    results = {}
    with mpi.use(groups[number]):  # the default of all calls in the block
        for lr in RATES[number::NUM_GROUPS]:
            results[lr] = accuracy_with(lr, train, test)

    found = {}
    for each in mpi.allgather_object(results):
        found.update(each)
    best = max(found, key=lambda lr: found[lr])
    if rank == 0:
        table = ", ".join(f"{lr}: {found[lr]:.3f}" for lr in RATES)
        print(f"sweep: {NUM_GROUPS} groups on {size} ranks, {table}; best rate {best}")
    assert sorted(found) == sorted(RATES) and found[best] > 0.93
    for group in groups:
        group.free()
    mpi.stop()


if __name__ == "__main__":
    main()
