"""DiLoCo over slow links: ranks train alone for 20 steps, then exchange in the background, in 16 bits.

    torchmpi run -n 2 examples/single_file/diloco.py

An exchange at each step would send 40 times as many bytes: 20 times as often, 32 bits in place of 16.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

import torchmpi as mpi
import torchmpi.nn as mpinn

EPOCHS, BATCH_SIZE, PERIOD = 10, 16, 20  # the batch of each rank


def main() -> None:
    mpi.start()
    rank, size = mpi.rank(), mpi.size()
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(train, num_replicas=size, rank=rank)
    loader = DataLoader(train, batch_size=BATCH_SIZE, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    mpinn.synchronize_parameters(model)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # The exchange may take as long as ten steps before a rank waits for it.
    with mpinn.DiLoCoUpdate(model, update_frequency=PERIOD, overlap_steps=10, compression="bf16") as update:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                inner.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                inner.step()
                update.update()  # after each step; the end of the block exchanges a last time
    sent, steps = update.metrics()["bytes_sent"], EPOCHS * len(loader)
    each_step = steps * sum(4 * parameter.numel() for parameter in model.parameters())
    mpinn.check_with_allreduce(model)

    inputs, targets = next(iter(DataLoader(test, len(test))))
    with torch.no_grad():
        accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
    if rank == 0:
        part = "" if size == 1 else f", {each_step / sent:.0f} times fewer bytes than the gradients of each step"
        print(f"diloco: {size} ranks, {steps} steps, test accuracy {accuracy:.3f}{part}")
    assert accuracy > 0.9
    mpi.stop()


if __name__ == "__main__":
    main()
