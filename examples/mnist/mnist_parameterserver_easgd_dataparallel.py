"""Elastic averaging between groups of ranks, with data-parallel training within each group.

The ranks of a group average their gradients at every step, as in ``mnist_allreduce.py``, and remain equal. The groups
use elastic averaging with a center on the parameter server, as in ``mnist_parameterserver_easgd.py``: the first rank of
each group communicates with the server and broadcasts the result. Groups may differ in size, and do not wait for each
other.

    mpirun -n 4 python examples/mnist/mnist_parameterserver_easgd_dataparallel.py
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
    parser.add_argument("--group-size", type=int, default=2, help="ranks per group (default: %(default)s)")
    parser.add_argument("--tau", type=int, default=10, help="steps between integrations (default: %(default)s)")
    parser.add_argument("--prefetch", type=int, default=2, help="steps from fetch to use (default: %(default)s)")
    parser.add_argument("--beta", type=float, default=0.9, help="elasticity (default: %(default)s)")
    parser.add_argument("--momentum", type=float, default=0.9, help="Nesterov's, 0 for none (default: %(default)s)")
    parser.add_argument("--init-delay", type=int, default=20, help="steps before sharing begins (default: %(default)s)")
    parser.set_defaults(batch_size=32, lr=0.05)
    options = parser.parse_args()
    mpi.start(
        with_cuda=options.gpu,
        # Level 1: ranks with the same key form a group. start() adds its levels after this one.
        custom_communicator_init=lambda: mpi.push_communicator(str(mpi.rank() // options.group_size)),
    )
    torch.manual_seed(options.seed)
    data = load(options.data)
    report = Report(options, origin=data.origin, rank=mpi.rank())

    network = make_network(data.num_inputs).to(mpi.device())
    mpinn.synchronize_parameters(network)
    batches = Batches(data.train, options.batch_size, seed=options.seed, rank=mpi.rank(), size=mpi.size())
    settings = {
        "dataparallel_communicator": 1,
        "beta": options.beta,
        "update_frequency": options.tau,
        "prefetch": options.prefetch,
        "init_delay": options.init_delay,
    }
    if options.momentum:
        optimizer = torch.optim.SGD(network.parameters(), options.lr, options.momentum, nesterov=True)
        update = ps.EAMSGDUpdate(network, optimizer, **settings)
    else:
        optimizer = torch.optim.SGD(network.parameters(), options.lr)
        update = ps.EASGDUpdate(network, **settings)

    with update:
        for epoch in range(options.epochs):
            batches.set_epoch(epoch)
            num_images, totals = 0, torch.zeros(2, dtype=torch.float64)
            for images, labels in batches:
                images, labels = images.to(mpi.device()), labels.to(mpi.device())
                optimizer.zero_grad()
                output = network(images)
                loss = cross_entropy(output, labels)
                loss.backward()
                mpinn.synchronize_gradients(network, comm=1)  # within the group
                update.update()  # after backward, before the step
                optimizer.step()
                num_images += len(labels)
                totals += torch.tensor([loss.item() * len(labels), (output.argmax(1) != labels).sum().item()])
            report.epoch(*(totals / num_images).tolist())

    mpi.barrier()  # all groups have finished their last integration
    update.pull()  # the center
    test = data.test.part(mpi.rank(), mpi.size())
    with torch.no_grad():
        answers = network(test.input.to(mpi.device())).argmax(1).cpu()
    num_right = mpi.allreduce(int((answers == test.target).sum()))
    mpi.stop()
    report.finish(num_right / len(data.test))


if __name__ == "__main__":
    main()
