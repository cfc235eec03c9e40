"""Handwritten digits as a program for Horovod: only the import differs.

    torchmpi run -n 2 examples/single_file/hvd.py

With ``torchmpi run -n 2 -m torchmpi.horovod FILE``, ``import horovod.torch as hvd`` remains as it is.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

import torchmpi.horovod as hvd

EPOCHS, BATCH_SIZE = 8, 64  # of all ranks together


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(train, num_replicas=size, rank=rank)
    loader = DataLoader(train, batch_size=BATCH_SIZE // size, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    loss_of = nn.CrossEntropyLoss()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()  # waits for the averages

    own = range(rank, len(test), size)
    with torch.no_grad():
        inputs, targets = (torch.stack(each) for each in zip(*(test[i] for i in own), strict=True))
        right = (model(inputs).argmax(1) == targets).sum()
    accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(test)
    if rank == 0:
        print(f"hvd: {size} ranks, test accuracy {accuracy:.3f}")
    assert accuracy > 0.93
    hvd.shutdown()


if __name__ == "__main__":
    main()
