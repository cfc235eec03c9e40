"""Handwritten digits with a loop of your own: the gradients are averaged by torchmpi.nn while backward runs.

torchmpi run -n 2 examples/single_file/nn_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch.nn import CrossEntropyLoss, Linear, ReLU, Sequential
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

import torchmpi as mpi
import torchmpi.nn as mpinn

EPOCHS, BATCH_SIZE = 8, 64  # of all ranks together


def main() -> None:
    mpi.start()
    rank, size = mpi.rank(), mpi.size()

    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(train, num_replicas=size, rank=rank)
    loader = DataLoader(train, batch_size=BATCH_SIZE // size, sampler=sampler)

    torch.manual_seed(0)
    model = Sequential(Linear(64, 64), ReLU(), Linear(64, 10))
    mpinn.synchronize_parameters(model)  # all ranks start with those of rank 0
    mpinn.register_async_backward(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_of = CrossEntropyLoss()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()  # each bucket is sent when it is full
            mpinn.synchronize_gradients_async(model)  # waits for the rest
            optimizer.step()
    mpinn.check_with_allreduce(model)  # the ranks have the same parameters, bit for bit

    own = range(rank, len(test), size)
    with torch.no_grad():
        inputs, targets = (torch.stack(each) for each in zip(*(test[i] for i in own), strict=True))
        right = (model(inputs).argmax(1) == targets).sum()
    accuracy = mpi.allreduce(right).item() / len(test)
    if rank == 0:
        print(f"nn_loop: {size} ranks, test accuracy {accuracy:.3f}")
    assert accuracy > 0.93
    mpi.stop()


if __name__ == "__main__":
    main()
