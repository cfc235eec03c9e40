"""Data-parallel training with an engine, which runs the loop and calls hooks.

Shows hooks, meters with totals over ranks, a learning-rate scheduler, and checkpoints: the job can be stopped at any
time and continued with ``--resume``.

    mpirun -n 4 python examples/mnist/mnist_engine.py --checkpoint mnist.ckpt
    mpirun -n 4 python examples/mnist/mnist_engine.py --checkpoint mnist.ckpt --resume
"""

from __future__ import annotations

import copy

import torch
from mnist_common import Report, make_network, make_parser
from mnist_data import Batches, load
from torch import nn

import torchmpi as mpi
from torchmpi.engine import AllReduceSGDEngine, AverageValueMeter, ClassErrorMeter


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--checkpoint", metavar="DIR", help="save a checkpoint every 25 updates")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--asynchronous", action="store_true", help="send gradients during the backward pass")
    options = parser.parse_args()
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint DIR")

    mpi.start(with_cuda=options.gpu)
    torch.manual_seed(options.seed)
    data = load(options.data)
    report = Report(options, origin=data.origin, rank=mpi.rank())
    network = make_network(data.num_inputs)
    optimizer = torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9)
    loss, error = AverageValueMeter(), ClassErrorMeter(topk=(1,))

    engine = AllReduceSGDEngine(use_gpu=options.gpu, asynchronous=options.asynchronous)
    engine.step_scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs))
    engine.keep(loss=loss, error=error, report=report)  # saved in checkpoints too
    if options.checkpoint:
        engine.checkpoint(options.checkpoint, every=25)

    @engine.on("on_start_epoch")
    def reset(state):
        loss.reset()
        error.reset()

    @engine.on("on_forward_criterion")
    def count(state):
        if state.training:
            loss.add(state.loss, num=state.sample.num_rows)
            error.add(state.output.cpu(), state.sample.target.cpu())

    @engine.on("on_end_epoch")
    def print_totals(state):
        # synchronize() adds the sums of all ranks; on copies, since the meters count for this rank only.
        total_loss, total_error = copy.deepcopy(loss).synchronize(), copy.deepcopy(error).synchronize()
        report.epoch(total_loss.value(), total_error.value() / 100)

    engine.train(
        network=network,
        criterion=nn.CrossEntropyLoss(),
        iterator=Batches(data.train, options.batch_size, seed=options.seed, rank=mpi.rank(), size=mpi.size()),
        optimizer=optimizer,
        max_epochs=options.epochs,
        resume=options.checkpoint if options.resume else None,
    )
    test = data.test.part(mpi.rank(), mpi.size())
    result = engine.test(network=network, criterion=nn.CrossEntropyLoss(), iterator=Batches(test, options.batch_size))
    report.print(f"test loss {result.loss.value():.6f}")
    mpi.stop()
    report.finish(1 - result.error.value() / 100)


if __name__ == "__main__":
    main()
