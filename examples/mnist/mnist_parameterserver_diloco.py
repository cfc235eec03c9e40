"""DiLoCo: every rank takes many steps of its own; then all take one outer step along their average change.

No server is needed, as all ranks synchronize in the outer steps. The program prints the number of bytes sent, and the
number for data-parallel training (``mnist_allreduce.py``).

    mpirun -n 4 python examples/mnist/mnist_parameterserver_diloco.py
"""

from __future__ import annotations

import torch
from mnist_common import Report, make_network, make_parser
from mnist_data import Batches, load
from torch.nn.functional import cross_entropy

import torchmpi as mpi
import torchmpi.nn as mpinn


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--inner-steps", type=int, default=20, help="steps between outer steps (default: %(default)s)")
    parser.add_argument("--momentum", type=float, default=0.9, help="beta1 of the inner steps (default: %(default)s)")
    parser.add_argument("--outer-lr", type=float, default=0.7, help="outer learning rate (default: %(default)s)")
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="of the outer steps (default: %(default)s)")
    parser.set_defaults(batch_size=32, lr=0.001)
    options = parser.parse_args()
    mpi.start(with_cuda=options.gpu)
    torch.manual_seed(options.seed)
    data = load(options.data)
    report = Report(options, origin=data.origin, rank=mpi.rank())

    network = make_network(data.num_inputs).to(mpi.device())
    mpinn.synchronize_parameters(network)
    inner = torch.optim.AdamW(network.parameters(), lr=options.lr, betas=(options.momentum, 0.999))
    batches = Batches(data.train, options.batch_size, seed=options.seed, rank=mpi.rank(), size=mpi.size())
    update = mpinn.DiLoCoUpdate(
        network,
        update_frequency=options.inner_steps,
        outer_lr=options.outer_lr,
        outer_momentum=options.outer_momentum,
    )

    with update:
        for epoch in range(options.epochs):
            batches.set_epoch(epoch)
            totals = torch.zeros(2, dtype=torch.float64)
            for images, labels in batches:
                images, labels = images.to(mpi.device()), labels.to(mpi.device())
                inner.zero_grad()
                output = network(images)
                loss = cross_entropy(output, labels, reduction="sum")
                (loss * mpi.size() / options.batch_size).backward()
                inner.step()
                update.update()  # after the step
                totals += torch.tensor([loss.item(), (output.argmax(1) != labels).sum().item()])
            loss, error = (mpi.allreduce(totals) / len(data.train)).tolist()
            report.epoch(loss, error)

    mpinn.check_with_allreduce(network)  # all ranks are equal after the last outer step
    num_bytes = sum(parameter.nbytes for parameter in network.parameters()) * update.step
    report.print(f"{update.bytes_sent / 1e6:.1f} MB sent by each rank, data-parallel: {num_bytes / 1e6:.1f} MB")
    test = data.test.part(mpi.rank(), mpi.size())
    with torch.no_grad():
        answers = network(test.input.to(mpi.device())).argmax(1).cpu()
    num_right = mpi.allreduce(int((answers == test.target).sum()))
    mpi.stop()
    report.finish(num_right / len(data.test))


if __name__ == "__main__":
    main()
