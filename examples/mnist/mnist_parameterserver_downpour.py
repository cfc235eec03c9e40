"""Asynchronous SGD (Downpour): ranks send gradients and receive weights without waiting for other ranks.

Each rank takes steps of its own. Every few steps it sends the sum of its gradients, and every few steps it replaces its
weights by those of the server, which it has requested some steps before. The curve is that of rank 0 and differs a
little between runs; the accuracy is that of the server's weights.

    mpirun -n 4 python examples/mnist/mnist_parameterserver_downpour.py
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
    parser.add_argument("--tau", type=int, default=10, help="steps between integrations (default: %(default)s)")
    parser.add_argument("--prefetch", type=int, default=2, help="steps from fetch to use (default: %(default)s)")
    parser.add_argument("--send-frequency", type=int, default=2, help="steps between sends (default: %(default)s)")
    parser.add_argument("--init-delay", type=int, default=20, help="steps before sharing begins (default: %(default)s)")
    parser.add_argument("--momentum", type=float, default=0.0, help="of ranks and server (default: %(default)s)")
    parser.add_argument("--max-staleness", type=float, default=float("inf"), help="integrations a rank may be ahead")
    parser.set_defaults(batch_size=32)
    options = parser.parse_args()
    mpi.start(with_cuda=options.gpu)
    torch.manual_seed(options.seed)
    data = load(options.data)
    report = Report(options, origin=data.origin, rank=mpi.rank())

    network = make_network(data.num_inputs).to(mpi.device())
    mpinn.synchronize_parameters(network)
    optimizer = torch.optim.SGD(network.parameters(), options.lr, options.momentum)
    batches = Batches(data.train, options.batch_size, seed=options.seed, rank=mpi.rank(), size=mpi.size())
    update = ps.DownpourUpdate(
        network,
        # All ranks together move the weights as far as one rank alone.
        rule=ps.sgd(options.lr / mpi.size(), options.momentum),
        update_frequency=options.tau,
        prefetch=options.prefetch,
        send_frequency=options.send_frequency,
        init_delay=options.init_delay,
        max_staleness=options.max_staleness,
    )

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
                update.update()  # after backward, before the step
                optimizer.step()
                num_images += len(labels)
                totals += torch.tensor([loss.item() * len(labels), (output.argmax(1) != labels).sum().item()])
            report.epoch(*(totals / num_images).tolist())

    mpi.barrier()  # all gradients have been added
    update.pull()
    staleness = update.staleness
    report.print(f"staleness of rank 0's sends: {staleness.mean:.1f} on average, {staleness.max:.0f} at most")
    test = data.test.part(mpi.rank(), mpi.size())
    with torch.no_grad():
        answers = network(test.input.to(mpi.device())).argmax(1).cpu()
    num_right = mpi.allreduce(int((answers == test.target).sum()))
    mpi.stop()
    report.finish(num_right / len(data.test))


if __name__ == "__main__":
    main()
