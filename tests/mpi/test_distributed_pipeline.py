"""Pipeline parallelism over torchmpi: each rank has some layers, and sends activations and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.distributed_rig import TIGHT, gradients
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 4), pytest.mark.usefixtures("default_group")]

WIDTH, BATCH, MICROBATCHES = 6, 16, 8


def layer(number: int) -> nn.Module:
    torch.manual_seed(20 + number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(BATCH, WIDTH, generator=generator).double() for _ in range(2))  # type: ignore[return-value]


def in_one_piece(num_stages: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """The layers with their gradients, the output of the last layer, and the loss of each microbatch."""
    layers, (x, y) = [layer(number) for number in range(num_stages)], data()
    outputs, losses = [], []
    for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        outputs.append(nn.Sequential(*layers)(part))
        losses.append(nn.functional.mse_loss(outputs[-1], target))
    (sum(losses) / MICROBATCHES).backward()  # type: ignore[union-attr]
    return layers, torch.cat(outputs).detach(), torch.stack(losses).detach()


def stages(per_rank: int) -> dict[int, PipelineStage]:
    """The layers of this rank: of 4 on 2 ranks, the first and the third, and so on."""
    size = dist.get_world_size()
    own = range(dist.get_rank(), per_rank * size, size)
    return {number: PipelineStage(layer(number), number, per_rank * size, torch.device("cpu")) for number in own}


def run(agree: Any, own: dict[int, PipelineStage], schedule: Any, num_stages: int) -> None:
    x, y = data()
    losses: list[Tensor] = []
    is_last = num_stages - 1 in own
    output = schedule.step(
        *([x] if 0 in own else []), **({"target": y, "losses": losses} if is_last else {"losses": losses})
    )
    layers, expected_output, expected_losses = in_one_piece(num_stages)
    for number, stage in own.items():
        agree.close(gradients(stage.submod), gradients(layers[number]), f"stage {number}", **TIGHT)
    if is_last:
        agree.close(output.detach(), expected_output, **TIGHT)
        agree.close(torch.stack(losses).detach(), expected_losses, **TIGHT)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_one_stage_per_rank(agree, schedule: Callable[..., Any]):
    own = stages(1)
    [stage] = own.values()
    run(agree, own, schedule(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss), dist.get_world_size())


def test_two_stages_per_rank(agree):
    own = stages(2)
    schedule = ScheduleInterleaved1F1B(list(own.values()), MICROBATCHES, loss_fn=nn.functional.mse_loss)
    run(agree, own, schedule, 2 * dist.get_world_size())
