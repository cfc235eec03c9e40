"""Handwritten digits with DistributedDataParallel, on torchmpi as the backend of torch.distributed.

    torchmpi run -n 2 examples/single_file/ddp.py

Only the name of the backend belongs to torchmpi. With "gloo" the program runs under torchrun without it.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH_SIZE = 8, 64  # of all ranks together


def main() -> None:
    dist.init_process_group("torchmpi")
    rank, size = dist.get_rank(), dist.get_world_size()

    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(train)  # each rank has other images
    loader = DataLoader(train, batch_size=BATCH_SIZE // size, sampler=sampler)

    torch.manual_seed(0)  # DDP starts with the parameters of rank 0; this makes runs equal
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_of = nn.CrossEntropyLoss()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # another order in each epoch
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()  # averages the gradients of all ranks
            optimizer.step()

    # Each rank counts on its own part of the test images; the counts are added.
    model.eval()
    own = range(rank, len(test), size)
    with torch.no_grad():
        inputs, targets = (torch.stack(each) for each in zip(*(test[i] for i in own), strict=True))
        right = (model(inputs).argmax(1) == targets).sum()
    dist.all_reduce(right)
    accuracy = right.item() / len(test)
    if rank == 0:
        print(f"ddp: {size} ranks, test accuracy {accuracy:.3f}")
    assert accuracy > 0.93
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
