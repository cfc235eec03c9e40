"""Synchronous SGD through a parameter server: every rank adds its step to weights that are divided over the ranks.

Two barriers make the training synchronous: one after sending, so that all steps have been added, and one after
receiving, so that no rank sends its next step before all ranks have the weights of this step. An allreduce
(``mnist_allreduce.py``) is faster; this program shows sending and receiving, and has the same curve.

    mpirun -n 4 python examples/mnist/mnist_parameterserver_dsgd.py
"""

from __future__ import annotations

import torch
from mnist_common import Report, make_network, make_parser
from mnist_data import Batches, load
from torch.nn.functional import cross_entropy

import torchmpi as mpi
import torchmpi.nn as mpinn
import torchmpi.parameterserver as ps


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--momentum", type=float, default=0.0, help="of the steps (default: %(default)s)")
    parser.set_defaults(batch_size=32)  # more and smaller steps, as there is no momentum by default
    options = parser.parse_args()
    mpi.start(with_cuda=options.gpu)
    torch.manual_seed(options.seed)
    data = load(options.data)
    report = Report(options, origin=data.origin, rank=mpi.rank())

    network = make_network(data.num_inputs).to(mpi.device())
    parameters = list(network.parameters())
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    ps.init_tensors(parameters)  # the weights of rank 0, divided over the ranks
    batches = Batches(data.train, options.batch_size, seed=options.seed, rank=mpi.rank(), size=mpi.size())

    for epoch in range(options.epochs):
        batches.set_epoch(epoch)
        totals = torch.zeros(2, dtype=torch.float64)
        for images, labels in batches:
            images, labels = images.to(mpi.device()), labels.to(mpi.device())
            network.zero_grad()
            output = network(images)
            loss = cross_entropy(output, labels, reduction="sum")
            (loss / options.batch_size).backward()

            # weights -= lr * velocity for the velocity of each rank, on the ranks that store the weights. The sum of
            # the velocities of all ranks is the velocity of their summed gradients.
            for velocity, parameter in zip(velocities, parameters, strict=True):
                velocity.mul_(options.momentum).add_(parameter.grad)
            ps.sync_handles(ps.send_tensors(parameters, velocities, ps.scaled_add(-options.lr)))
            mpi.barrier()
            ps.sync_handles(ps.prefetch_tensors(parameters))
            mpi.barrier()
            ps.integrate_tensors(parameters, lambda fetched, parameter: parameter.copy_(fetched))

            totals += torch.tensor([loss.item(), (output.argmax(1) != labels).sum().item()])
        loss, error = (mpi.allreduce(totals) / len(data.train)).tolist()
        report.epoch(loss, error)

    mpinn.check_with_allreduce(network)  # all ranks have received the same weights
    test = data.test.part(mpi.rank(), mpi.size())
    with torch.no_grad():
        answers = network(test.input.to(mpi.device())).argmax(1).cpu()
    num_right = mpi.allreduce(int((answers == test.target).sum()))
    mpi.stop()
    report.finish(num_right / len(data.test))


if __name__ == "__main__":
    main()
