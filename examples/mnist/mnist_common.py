"""Options, network and report of the MNIST examples."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torch import nn

HIDDEN = 128


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options of the examples."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (default: %(default)s)")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=128,
        help="images per step, over all ranks together (default: %(default)s)",
    )
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1111, help="seed of weights and shuffling (default: %(default)s)")
    parser.add_argument("--data", metavar="DIR", help="directory of MNIST IDX files (default: scikit-learn's digits)")
    parser.add_argument("--plot", metavar="FILE", help="save the curves as an image")
    parser.add_argument("--json", metavar="FILE", help="save the curves as JSON")
    parser.add_argument("--beside", metavar="FILE", help="draw the curves of this JSON file of another run, too")
    parser.add_argument("--assert-accuracy", type=float, metavar="A", help="fail if the test accuracy is below A")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", dest="gpu", action="store_true", default=None, help="use the GPU, fail without one")
    device.add_argument("--cpu", dest="gpu", action="store_false", help="use the CPU (default: GPU if there is one)")
    return parser


def parse_options(description: str | None) -> argparse.Namespace:
    return make_parser(description).parse_args()


def make_network(num_inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


class Report:
    """Loss and error per epoch, printed and saved by rank 0."""

    def __init__(self, options: argparse.Namespace, *, origin: str, rank: int = 0) -> None:
        self.options, self.rank = options, rank
        self.losses: list[float] = []
        self.errors: list[float] = []
        self.print(f"data: {origin}")

    def print(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def epoch(self, loss: float, error: float) -> None:
        """Record one epoch: mean loss and fraction of wrong answers over the training images."""
        self.losses.append(loss)
        self.errors.append(error)
        self.print(f"epoch {len(self.losses):2d}/{self.options.epochs}  loss {loss:.6f}  error {100 * error:5.2f} %")

    def finish(self, accuracy: float) -> None:
        """Print the test accuracy, save curves and plot if requested, and fail if the accuracy is too low."""
        self.print(f"test accuracy {accuracy:.4f}")
        if self.rank == 0 and self.options.json:
            record = {"loss": self.losses, "error": self.errors, "accuracy": accuracy}
            Path(self.options.json).write_text(json.dumps(record))
        if self.rank == 0 and self.options.plot:
            self.plot(Path(self.options.plot))
        wanted = self.options.assert_accuracy
        if wanted is not None and not accuracy >= wanted:
            self.print(f"failed: expected a test accuracy of at least {wanted}")
            sys.exit(1)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "errors": list(self.errors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.errors = list(state["losses"]), list(state["errors"])

    def plot(self, path: Path) -> None:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            self.print("no plot: matplotlib is not installed (pip install matplotlib)")
            return
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        FigureCanvasAgg(figure)
        runs = {Path(sys.argv[0]).stem: {"loss": self.losses, "error": self.errors}}
        if self.options.beside:
            other = Path(self.options.beside)
            runs[other.stem] = json.loads(other.read_text())
        panels = figure.subplots(1, 2)
        for axes, key, scale, title in zip(
            panels, ("loss", "error"), (1, 100), ("training loss", "training error, %"), strict=True
        ):
            for (name, run), dashes in zip(runs.items(), ("-", "--"), strict=False):
                values = [scale * value for value in run[key]]
                axes.plot(range(1, len(values) + 1), values, dashes, marker=".", label=name)
            axes.set(xlabel="epoch", title=title, ylim=(0, None))
            axes.grid(alpha=0.3)
        if len(runs) > 1:
            panels[0].legend()
        figure.savefig(path, dpi=120)
        self.print(f"curves saved in {path.resolve()}")
