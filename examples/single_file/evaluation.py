"""Evaluate a model on all ranks: each image once, also if their number is not divisible, and one table at the end.

    torchmpi run -n 2 examples/single_file/evaluation.py

DistributedSampler repeats images so that all ranks have equally many, which changes an accuracy. Here no image is
repeated: each rank loads its own part, and the rows of all ranks are gathered, whatever their numbers.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import torchmpi as mpi
import torchmpi.nn as mpinn


def main() -> None:
    mpi.start()
    rank, size = mpi.rank(), mpi.size()
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    test = Subset(digits, range(1436, len(digits)))  # 361 images

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if rank == 0:  # yours is loaded from a checkpoint, by rank 0 alone
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        inputs, targets = digits[:1436]
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    mpinn.synchronize_parameters(model)

    own = Subset(test, range(rank, len(test), size))  # the parts differ by one image
    rows = []
    with torch.no_grad():
        for inputs, targets in DataLoader(own, batch_size=50):
            rows.append(torch.stack([targets, model(inputs).argmax(1)], 1))
    everything = mpi.allgather(torch.cat(rows))  # parts of different lengths, on all ranks
    assert len(everything) == len(test)

    confusion = torch.zeros(10, 10, dtype=torch.int64)
    confusion.index_put_((everything[:, 0], everything[:, 1]), torch.tensor(1), accumulate=True)
    accuracy = confusion.trace().item() / len(test)
    if rank == 0:
        worst = (confusion.diag() / confusion.sum(1)).argmin().item()
        print(f"evaluation: {size} ranks, {len(everything)} images, accuracy {accuracy:.3f}, worst digit {worst}")
    assert accuracy > 0.88
    mpi.stop()


if __name__ == "__main__":
    main()
