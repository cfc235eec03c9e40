"""The options of the comparison, and the resulting runs."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import NamedTuple

from methods import METHODS, PERIODIC, learning_rate

GRID = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Plan(NamedTuple):
    """Options of a run; `period` is 0 for methods without one."""

    seed: int
    method: str
    period: int
    lr: float


def parse_options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", metavar="DIR", help="directory of MNIST IDX files (default: scikit-learn's digits)")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="M", help=", ".join(METHODS))
    add("--periods", nargs="+", type=int, default=[1, 4, 16, 64], metavar="N", help="steps (default: 1 4 16 64)")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="S", help="(default: 1 2 3)")
    add("--epochs", type=float, default=45, help="passes over the images, by all ranks together (default: 45)")
    add("--lr", nargs="+", type=float, metavar="X", help="learning rates for all (default: one tuned for each)")
    add("--slow", type=float, default=0, metavar="MS", help="the last rank sleeps so long after each of its steps")
    add("--tune", action="store_true", help="try a grid of learning rates, testing on a fifth of the training images")
    add("--quick", action="store_true", help="one seed, periods 4 and 16, a third of the epochs")
    add("--out", type=Path, default=Path("results/async_sgd"), metavar="DIR", help="(default: results/async_sgd)")
    options = parser.parse_args()
    if min(options.periods) < 1:
        parser.error("--periods must be 1 or more")
    if options.quick:
        options.seeds, options.periods, options.epochs = options.seeds[:1], [4, 16], options.epochs / 3
    if options.tune and not options.lr:
        options.lr = GRID
    return options


def make_plans(options: argparse.Namespace) -> list[Plan]:
    """All runs in order, seed by seed, so that a slow minute does not affect a single method."""
    return [
        Plan(seed, method, period, lr)
        for seed, method in product(options.seeds, options.methods)
        for period in (options.periods if method in PERIODIC else [0])
        for lr in options.lr or [learning_rate(method, period)]
    ]
