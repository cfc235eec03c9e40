"""Measure saving and loading of an engine checkpoint with the tensors of ResNet-50 and momentum, in one process.

    python benchmarks/checkpoints.py --folder /path/on/the/disk

The parts of the cost are measured too: digests (SHA-256 of all tensors), and writing the same bytes with torch.save,
with and without waiting for the disk. Printed are the median, the fastest and the slowest of the repeats.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from torchmpi.engine import checkpoint
from torchmpi.engine.coordination import SingleProcess


def resnet50() -> dict[str, torch.Tensor]:
    """Return tensors with the shapes of the parameters of ResNet-50."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, width_in, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            shapes += [(width,)] * 4 + [(4 * width,)] * 2
            if block == 0:
                shapes += [(4 * width, width_in, 1, 1), (4 * width,), (4 * width,)]
            width_in = 4 * width
    shapes += [(1000, 2048), (1000,)]
    return {f"layer{number}": torch.randn(shape) for number, shape in enumerate(shapes)}


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write (default: the current folder)")
    parser.add_argument("--repeats", type=int, default=5, help="(default %(default)s)")
    options = parser.parse_args()
    trees = {"network": resnet50(), "optimizer": {"momentum": resnet50()}}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path, plain = Path(name) / "run.ckpt", Path(name) / "plain.pt"
        process = SingleProcess()
        saver = checkpoint.Saver(process)

        def write(*, is_synchronized: bool) -> None:
            with plain.open("wb") as file:
                torch.save(trees, file)
                if is_synchronized:
                    os.fsync(file.fileno())

        calls: dict[str, Callable[[], object]] = {
            "save": lambda: saver.save(path, checkpoint.Content({}, {}, trees)),
            "load": lambda: checkpoint.read(path, process),
            "digests": lambda: checkpoint.digest(trees),
            "torch.save": lambda: write(is_synchronized=False),
            "torch.save, fsync": lambda: write(is_synchronized=True),
            "torch.load": lambda: torch.load(plain, weights_only=True),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(options.repeats):
            for name, call in calls.items():
                times[name].append(seconds(call))
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        saver.close()
    print(f"{num_bytes / 1e6:.1f} MB, torch {torch.__version__}")
    for name, values in times.items():
        print(f"{name:>18} {statistics.median(values):6.2f} s ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
