"""Options, report and checkpoint files of the examples in this folder."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options of the examples."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="text to train on (default: Python's reference manual)")
    parser.add_argument("--checkpoint", metavar="DIR", help="save checkpoints here, and continue from one if it exists")
    parser.add_argument("--save-every", type=int, default=25, metavar="N", help="steps (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="updates of the weights (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=4, help="batches per update (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=12, help="windows per batch, over all ranks together (default: %(default)s)"
    )
    parser.add_argument("--context", type=int, default=32, help="bytes per window (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=6e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=10, help="steps of warm-up (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient (default: %(default)s)")
    parser.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, help="autocast to bfloat16 (default: on GPUs; few CPUs gain)"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that load data (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1111, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU (default: the GPU if there is one)")
    parser.add_argument(
        "--assert-loss", type=float, default=2.25, metavar="X", help="fail above (default: %(default)s)"
    )
    return parser


def uses_bf16(options: argparse.Namespace, device: torch.device) -> bool:
    return device.type == "cuda" if options.bf16 is None else options.bf16


class Report:
    """Prints the loss on rank 0, and checks the loss at the end."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.is_printing = options, rank == 0

    def print(self, line: str) -> None:
        if self.is_printing:
            print(line, flush=True)

    def step(self, step: int, loss: float, lr: float) -> None:
        self.print(f"step {step:3d}/{self.options.steps}  loss {loss:.4f}  lr {lr:.6f}")

    def finish(self, loss: float) -> None:
        self.print(f"validation loss {loss:.4f}")
        if not loss <= self.options.assert_loss:
            self.print(f"failed: expected a validation loss of at most {self.options.assert_loss}")
            sys.exit(1)


def checkpoint_file(options: argparse.Namespace) -> Path | None:
    return Path(options.checkpoint, "gpt.pt") if options.checkpoint else None


def save(path: Path, step: int, **parts: Any) -> None:
    """Save the state of `parts`. The file is complete whenever the job is killed: the last one, or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"step": step, **{name: part.state_dict() for name, part in parts.items()}}
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def load(path: Path | None, **parts: Any) -> int:
    """Load the state of `parts` from a checkpoint, if there is one, on each rank; return the number of steps done."""
    if path is None or not path.exists():
        return 0
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["step"]
