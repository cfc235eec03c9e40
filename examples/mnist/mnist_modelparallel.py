"""Model-parallel training: the input features of the first layer are divided over the ranks.

Every rank processes every batch, but stores only its part of the large weight, as for a weight that does not fit on
one device. ``MPLinear`` adds the partial outputs. The small second layer is replicated; its input is equal on all
ranks, and therefore so are its gradients and parameters, without communication.

    mpirun -n 4 python examples/mnist/mnist_modelparallel.py
"""

from __future__ import annotations

import torch
from mnist_common import HIDDEN, Report, parse_options
from mnist_data import Batches, load
from torch import nn
from torch.nn.functional import cross_entropy

import torchmpi as mpi
import torchmpi.nn as mpinn


def main() -> None:
    options = parse_options(__doc__)
    mpi.start(with_cuda=options.gpu)
    torch.manual_seed(options.seed)  # the same on all ranks, for equal initial parameters
    data = load(options.data)
    report = Report(options, origin=data.origin, rank=mpi.rank())

    network = nn.Sequential(mpinn.MPLinear(data.num_inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    network.to(mpi.device())
    columns = mpi.allgather_object(network[0].weight.shape[1])
    report.print(f"columns of the {HIDDEN} x {data.num_inputs} weight on each rank: {columns}")
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9)
    batches = Batches(data.train, options.batch_size, seed=options.seed)  # every rank takes the complete batch

    for epoch in range(options.epochs):
        batches.set_epoch(epoch)
        totals = torch.zeros(2, dtype=torch.float64)
        for images, labels in batches:
            images, labels = images.to(mpi.device()), labels.to(mpi.device())
            optimizer.zero_grad()
            output = network(images)
            loss = cross_entropy(output, labels, reduction="sum")
            (loss / options.batch_size).backward()
            optimizer.step()
            totals += torch.tensor([loss.item(), (output.argmax(1) != labels).sum().item()])
        loss, error = (totals / len(data.train)).tolist()
        report.epoch(loss, error)

    mpinn.check_with_allreduce(network)  # replicated parameters are equal on all ranks
    with torch.no_grad():
        answers = network(data.test.input.to(mpi.device())).argmax(1).cpu()
    accuracy = (answers == data.test.target).double().mean().item()
    mpi.stop()
    report.finish(accuracy)


if __name__ == "__main__":
    main()
