"""Train a small network on handwritten digits in one process, without torchmpi.

``mnist_allreduce.py`` is the same program for many ranks.

    python examples/mnist/mnist_sequential.py --plot curves.png
"""

from __future__ import annotations

import torch
from mnist_common import Report, make_network, parse_options
from mnist_data import Batches, load
from torch.nn.functional import cross_entropy


def main() -> None:
    options = parse_options(__doc__)
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if options.gpu or (options.gpu is None and torch.cuda.is_available()) else "cpu")
    data = load(options.data)
    report = Report(options, origin=data.origin)

    network = make_network(data.num_inputs).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9)
    batches = Batches(data.train, options.batch_size, seed=options.seed)

    for epoch in range(options.epochs):
        batches.set_epoch(epoch)
        totals = torch.zeros(2, dtype=torch.float64)
        for images, labels in batches:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            output = network(images)
            loss = cross_entropy(output, labels, reduction="sum")
            # Images have equal weights, also in the shorter last batch.
            (loss / options.batch_size).backward()
            optimizer.step()
            totals += torch.tensor([loss.item(), (output.argmax(1) != labels).sum().item()])
        loss, error = (totals / len(data.train)).tolist()
        report.epoch(loss, error)

    with torch.no_grad():
        answers = network(data.test.input.to(device)).argmax(1).cpu()
    report.finish((answers == data.test.target).double().mean().item())


if __name__ == "__main__":
    main()
