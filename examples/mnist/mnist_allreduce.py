"""Data-parallel training: every rank takes its slice of each batch, and gradients are averaged.

The four lines marked with an arrow are the additions to ``mnist_sequential.py``. The global batches, and therefore the
curve, are the same for any number of ranks.

    mpirun -n 4 python examples/mnist/mnist_allreduce.py --plot curves.png
"""

from __future__ import annotations

import torch
from mnist_common import Report, make_network, parse_options
from mnist_data import Batches, load
from torch.nn.functional import cross_entropy

import torchmpi as mpi
import torchmpi.nn as mpinn


def main() -> None:
    options = parse_options(__doc__)
    mpi.start(with_cuda=options.gpu)  # <--
    torch.manual_seed(options.seed)
    data = load(options.data)
    report = Report(options, origin=data.origin, rank=mpi.rank())

    network = make_network(data.num_inputs).to(mpi.device())
    mpinn.synchronize_parameters(network)  # <--
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9)
    batches = Batches(  # <--
        data.train, options.batch_size, seed=options.seed, rank=mpi.rank(), size=mpi.size()
    )

    for epoch in range(options.epochs):
        batches.set_epoch(epoch)
        totals = torch.zeros(2, dtype=torch.float64)
        for images, labels in batches:
            images, labels = images.to(mpi.device()), labels.to(mpi.device())
            optimizer.zero_grad()
            output = network(images)
            loss = cross_entropy(output, labels, reduction="sum")
            # Slices differ in length if the batch size is no multiple of the number of ranks. The average of this
            # loss over the ranks is the sum over the global batch divided by its size: images have equal weights.
            (loss * mpi.size() / options.batch_size).backward()
            mpinn.synchronize_gradients(network)  # <--
            optimizer.step()
            totals += torch.tensor([loss.item(), (output.argmax(1) != labels).sum().item()])
        loss, error = (mpi.allreduce(totals) / len(data.train)).tolist()
        report.epoch(loss, error)

    mpinn.check_with_allreduce(network)  # all ranks have the same parameters, bit for bit
    test = data.test.part(mpi.rank(), mpi.size())
    with torch.no_grad():
        answers = network(test.input.to(mpi.device())).argmax(1).cpu()
    num_right = mpi.allreduce(int((answers == test.target).sum()))
    mpi.stop()
    report.finish(num_right / len(data.test))


if __name__ == "__main__":
    main()
