"""Training steps of blocks in one process and in a pipeline of ranks, for ``torchmpi bench parallel``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...tensors.partition import part_of
from .bench_job import BenchJob
from .divided_work import ONE_PROCESS, ParallelContestant

_NUM_BLOCKS, _MICROBATCHES, _ROWS = 4, 8, 16
_TOLERANCE = 1e-4


class PipelineBlock(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.down(torch.relu(self.up(x))))


def pipelines(job: BenchJob, width: int, groups: Mapping[str, Any]) -> list[ParallelContestant]:
    """Make the contestants: one process, and a pipeline of all ranks on each group."""
    num_blocks = max(_NUM_BLOCKS, job.size)
    torch.manual_seed(0)
    x, y = torch.randn(2, _MICROBATCHES * _ROWS, width)
    begin, length = part_of(num_blocks, job.size, job.rank)
    norms: list[float] = []
    found = [ParallelContestant(ONE_PROCESS, lambda: None, alone=True)]
    if job.rank == 0:
        whole = _blocks(width, range(num_blocks))
        step = partial(_step, whole, x, y)
        step()
        norms = [_norm(block) for block in whole]
        found = [ParallelContestant(ONE_PROCESS, step, alone=True)]
    norms = job.comm.bcast(norms)
    for name, group in groups.items():
        if group is None:
            found.append(
                ParallelContestant(f"1F1B on {name}", lambda: None, why_not=f"this torch was built without {name}")
            )
            continue
        stage = _blocks(width, range(begin, begin + length))
        step = _pipeline(job, stage, x, y, group)
        step()
        expected = norms[begin : begin + length]
        is_right = all(math.isclose(_norm(a), b, rel_tol=_TOLERANCE) for a, b in zip(stage, expected, strict=True))
        why_not = None if is_right else "wrong: the gradients differ from those of one process"
        found.append(ParallelContestant(f"1F1B on {name}", step, why_not=why_not))
    return found


def _blocks(width: int, numbers: range) -> nn.Sequential:
    return nn.Sequential(*(PipelineBlock(width, number) for number in numbers))


def _norm(block: nn.Module) -> float:
    """Return the norm of the gradients."""
    return math.sqrt(sum(float(each.grad.square().sum()) for each in block.parameters() if each.grad is not None))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def _step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Run forward and backward of all microbatches."""
    model.zero_grad()
    for part, target in zip(x.chunk(_MICROBATCHES), y.chunk(_MICROBATCHES), strict=True):
        (_loss(model(part), target) / _MICROBATCHES).backward()


def _pipeline(job: BenchJob, model: nn.Module, x: Tensor, y: Tensor, group: Any) -> partial[None]:
    """Return the same as :func:`_step` over the ranks, of which this one has the stage `model`."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(model, job.rank, job.size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, _MICROBATCHES, loss_fn=_loss)
    inputs = (x,) if job.rank == 0 else ()
    targets: dict[str, Any] = {"target": y} if job.rank == job.size - 1 else {}

    def step() -> None:
        model.zero_grad()
        schedule.step(*inputs, **targets)

    return partial(step)
