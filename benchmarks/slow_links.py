"""Time to an accuracy over a slow link: gradients at every step, fewer bytes per step, or an exchange now and then.

A small convolutional network learns the handwritten digits of scikit-learn. Each method begins with the same weights
and batches. It is tested once per period, on parameters that all ranks have in common, and stops when the accuracy on
the test images reaches the target.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from link_bytes import sent_bytes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi import plots
from torchmpi.cli.bench.contestants import open_group
from torchmpi.cli.formatting import counted, table
from torchmpi.session import runtime

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "async_sgd"))
from task import Dataset, batches, load  # type: ignore[import-not-found]  # another folder

_MOMENTUM = 0.9
# Chosen among 0.02, 0.05 and 0.1 by the number of steps, without a slow link.
_RATE, _DILOCO_RATE = 0.05, 0.02


class Method:
    """Data-parallel SGD with momentum: `prepare` returns what is to be called between ``backward()`` and ``step()``."""

    def __init__(self, prepare: Callable[[nn.Module], Callable[[], object]]) -> None:
        self.prepare = prepare

    def begin(self, net: nn.Module, lr: float) -> None:
        """Begin to train a network. Collective."""
        self.net, self.parameters = net, list(net.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr, _MOMENTUM)
        self.synchronize = self.prepare(net)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Run one step."""
        self.optimizer.zero_grad()
        cross_entropy(self.net(images), labels).backward()
        self.synchronize()
        self.optimizer.step()

    def common(self) -> Sequence[Tensor] | None:
        """Return parameters that are the same on all ranks; None if there are none after this step."""
        return self.parameters

    def end(self) -> None:
        """Complete what is in progress. Collective."""


class Periodic(Method):
    """Local steps, and an update of torchmpi after them."""

    def __init__(self, prepare: Callable[[nn.Module], mpinn.LocalSGDUpdate]) -> None:
        super().__init__(lambda net: lambda: None)
        self.make_update = prepare

    def begin(self, net: nn.Module, lr: float) -> None:
        """Begin to train a network. Collective."""
        super().begin(net, lr)
        self.update = self.make_update(net)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Run one step."""
        super().step(images, labels)
        self.has_changed = self.update.update()

    def common(self) -> Sequence[Tensor] | None:
        """Return the average, or the anchor."""
        if not self.has_changed:
            return None
        return self.update.anchor if isinstance(self.update, mpinn.DiLoCoUpdate) else self.parameters

    def end(self) -> None:
        """Complete the exchange in progress. Collective."""
        self.update.finish()


def make_methods(group: Any, period: int, overlap_steps: int, within_hosts: bool) -> dict[str, Method]:
    """Return the methods by name; `group` is a process group of gloo."""

    def synchronized(compression: Callable[[], Any]) -> Method:
        def prepare(net: nn.Module) -> Callable[[], None]:
            made = compression()
            return lambda: mpinn.synchronize_gradients(net, compression=made)

        return Method(prepare)

    def hooks(net: nn.Module) -> Callable[[], object]:
        mpinn.register_async_backward(net)
        return lambda: mpinn.synchronize_gradients_async(net)

    def diloco(overlap_steps: int, compression: Callable[[], Any]) -> Method:
        return Periodic(
            lambda net: mpinn.DiLoCoUpdate(
                net, update_frequency=period, overlap_steps=overlap_steps, compression=compression()
            )
        )

    def eight_bit() -> mpinn.EightBit:
        return mpinn.EightBit(within_hosts=within_hosts)

    return {
        "DDP on gloo": DistributedDataParallel(group),
        "synchronize_gradients": synchronized(lambda: None),
        "register_async_backward": Method(hooks),
        "gradients in bf16": synchronized(lambda: "bf16"),
        "gradients in 8 bits": synchronized(eight_bit),
        "1 % of the gradients": synchronized(lambda: mpinn.TopK(0.01, within_hosts=within_hosts)),
        "PowerSGD, rank 2": synchronized(lambda: mpinn.PowerSGD(2, within_hosts=within_hosts)),
        "LocalSGD": Periodic(lambda net: mpinn.LocalSGDUpdate(net, update_frequency=period)),
        "DiLoCo": diloco(0, lambda: None),
        "DiLoCo, overlapped": diloco(overlap_steps, lambda: None),
        "DiLoCo, overlapped, bf16": diloco(overlap_steps, lambda: "bf16"),
        "DiLoCo, overlapped, 8 bits": diloco(overlap_steps, eight_bit),
    }


class DistributedDataParallel(Method):
    """DistributedDataParallel of torch, on gloo."""

    def __init__(self, group: Any) -> None:
        super().__init__(lambda net: lambda: None)
        self.group = group

    def begin(self, net: nn.Module, lr: float) -> None:
        """Begin to train a network. Collective."""
        super().begin(net, lr)
        self.net = nn.parallel.DistributedDataParallel(net, process_group=self.group, gradient_as_bucket_view=True)


class Run(NamedTuple):
    """A run of a method: its curve has points of seconds, accuracy and megabytes sent by the host of rank 0."""

    method: str
    seed: int
    num_steps: int
    curve: list[tuple[float, float, float]]

    def reaches(self, target: float) -> bool:
        """Return whether the accuracy reached the target."""
        return self.curve[-1][1] >= target


def make_network(seed: int) -> nn.Sequential:
    """Return a network with 72,000 parameters for images of 8 x 8 pixels."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def train(name: str, method: Method, data: Dataset, seed: int, given: argparse.Namespace) -> Run:
    """Run a method until the target or the last step. Collective."""
    net, tested = make_network(seed), make_network(seed)
    source = batches(data.train.part(mpi.rank(), mpi.size()), seed=1000 * seed + mpi.rank())
    method.begin(net, given.lr or (_DILOCO_RATE if name.startswith("DiLoCo") else _RATE))
    curve: list[tuple[float, float, float]] = []
    num_steps = 0
    mpi.barrier()
    start, num_bytes = time.perf_counter(), sent_bytes(given.interface)
    while num_steps < given.steps:
        method.step(*next(source))
        common = method.common()
        num_steps += 1
        is_due = num_steps % given.period == 0 or isinstance(method, Periodic)
        if common is None or not is_due:
            continue
        # The parameters have the same bits on all ranks, so all ranks stop at the same step.
        value = accuracy(tested, common, data)
        curve.append((time.perf_counter() - start, value, (sent_bytes(given.interface) - num_bytes) / 1e6))
        if value >= given.target:
            break
    method.end()
    mpi.barrier()
    return Run(name, seed, num_steps, curve)


@torch.no_grad()
def accuracy(net: nn.Module, parameters: Sequence[Tensor], data: Dataset) -> float:
    """Return the share of test images that a network with these parameters recognizes."""
    for own, new in zip(net.parameters(), parameters, strict=True):
        own.copy_(new)
    return float((net(data.test.input).argmax(1) == data.test.target).double().mean())


def as_text(runs: Sequence[Run], target: float) -> str:
    """Return the table: medians over the seeds.

    >>> slow, fast = Run("allreduce", 1, 2, [(1, 0.9, 3), (2, 0.96, 6)]), Run("DiLoCo", 1, 9, [(1.5, 0.9, 0.4)])
    >>> print(as_text([slow, fast], 0.95))
               reached  seconds  steps  ms per step  MB per host  accuracy, %
    allreduce   1 of 1      2.0      2         1000         6.00         96.0
    DiLoCo      0 of 1        -      9          167         0.40         90.0
    """
    lines = [["", "reached", "seconds", "steps", "ms per step", "MB per host", "accuracy, %"]]
    for name in dict.fromkeys(run.method for run in runs):
        own = [run for run in runs if run.method == name]
        reached = [run for run in own if run.reaches(target)]
        seconds = f"{median(run.curve[-1][0] for run in reached):.1f}" if len(reached) == len(own) else "-"
        per_step = median(1e3 * run.curve[-1][0] / run.num_steps for run in own)
        megabytes, best = (median(run.curve[-1][column] for run in own) for column in (2, 1))
        line = [name, f"{len(reached)} of {len(own)}", seconds, f"{median(run.num_steps for run in own):g}"]
        lines.append([*line, f"{per_step:.0f}", f"{megabytes:.2f}", f"{100 * best:.1f}"])
    return "\n".join(table(lines))


_COLORS = {
    "DDP on gloo": plots.COLORS["gloo"],
    "synchronize_gradients": plots.COLORS["torchmpi"],
    "register_async_backward": "#7db3ea",
    "gradients in bf16": "#14919b",
    "gradients in 8 bits": "#7650b0",
    "1 % of the gradients": "#b0306a",
    "PowerSGD, rank 2": "#e08ab0",
    "LocalSGD": "#2b8551",
    "DiLoCo": "#8c564b",
    "DiLoCo, overlapped": "#d62728",
    "DiLoCo, overlapped, bf16": "#b8970f",
    "DiLoCo, overlapped, 8 bits": "#3b3b98",
}
"""Colors of the methods, whichever of them a run has."""


def draw(runs: Sequence[Run], path: str) -> None:
    """Plot the error over time, of the first seed."""
    figure, panels = plots.new_figure(8, 4)
    axes = panels[0, 0]
    for run in (run for run in runs if run.seed == runs[0].seed):
        seconds, values, _ = zip(*run.curve, strict=True)
        is_periodic = run.method.startswith(("LocalSGD", "DiLoCo"))
        color = _COLORS.get(run.method) or plots.color_of(run.method)
        style: dict[str, Any] = {"color": color, "linestyle": "--" if is_periodic else "-", "linewidth": 1.2}
        axes.plot(seconds, [100 * (1 - value) for value in values], marker=".", label=run.method, **style)
    axes.set(xlabel="seconds", ylabel="error on the test images, %", xscale="log", yscale="log")
    figure.legend(loc="outside right center", frameon=False)
    plots.save(figure, path)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: mpirun -n 2 --hostfile hosts python benchmarks/slow_links.py --plot slow_links.png",
    )
    add = parser.add_argument
    add("--target", type=float, default=0.95, help="share of correct test images (default: %(default)s)")
    add("--steps", type=int, default=400, help="most steps of a method (default: %(default)s)")
    add("--period", type=int, default=16, help="steps between exchanges of LocalSGD and DiLoCo (default: %(default)s)")
    add("--overlap", type=int, default=8, help="steps during an overlapped exchange (default: %(default)s)")
    add("--lr", type=float, help=f"learning rate of all (default: {_DILOCO_RATE} for DiLoCo, {_RATE} for the others)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of weights and batches (default: 1 2 3)")
    add("--methods", nargs="+", metavar="M", help="first letters of names of methods (default: all)")
    add("--interface", help="count the bytes of this network interface only")
    add("--plot", metavar="PNG", help="plot the errors over time")
    add("--json", metavar="FILE", help="write all curves to a file")
    return parser


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = make_parser()
    given = parser.parse_args()
    if not 0 <= given.overlap <= given.period <= given.steps:
        parser.error("--overlap is at most --period, and --period at most --steps")
    data = load()
    with mpi.started(with_cuda=False), ExitStack() as resources:
        num_hosts = runtime.current().num_hosts
        methods = make_methods(open_group("gloo", resources), given.period, given.overlap, num_hosts == 1)
        starts = tuple(given.methods or ("",))
        chosen = {name: method for name, method in methods.items() if name.startswith(starts)}
        runs: list[Run] = []
        for seed in given.seeds:  # seed by seed, so that a slow minute does not affect a single method
            for name, method in chosen.items():
                run = train(name, method, data, seed, given)
                runs.append(run)
                if mpi.rank() == 0:
                    end = f"{run.num_steps} steps, {run.curve[-1][0]:.1f} s"
                    print(f"{name}, seed {seed}: {end}", file=sys.stderr, flush=True)
        if mpi.rank() == 0:
            print(f"{mpi.size()} ranks on {counted(num_hosts, 'host')}, accuracy of {100 * given.target:g} %")
            print(as_text(runs, given.target))
            if given.json:
                Path(given.json).write_text(json.dumps([run._asdict() for run in runs]))
            if given.plot:
                draw(runs, given.plot)


if __name__ == "__main__":
    main()
