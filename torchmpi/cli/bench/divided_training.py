"""Training steps of one model in one process and divided in many ways, for ``torchmpi bench parallel``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.futures import Future

from ... import nn as mpinn
from ...tensors.partition import part_of
from .bench_job import BenchJob
from .divided_work import ONE_PROCESS, ParallelContestant, compared, held_bytes

NO_COMMUNICATION = "no communication"
_NUM_BLOCKS, _COMPARED = 4, 3
_LEARNING_RATE, _MOMENTUM = 0.05, 0.9


class TrainedBlock(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + nn.functional.gelu(self.down(torch.relu(self.up(x))))
        return output


def trainings(job: BenchJob, width: int, batch: int, groups: Mapping[str, Any]) -> list[ParallelContestant]:
    """Make the contestants: one process, the ranks without communication, and the forms of parallelism."""
    torch.manual_seed(0)
    x, y = torch.randn(2, batch, width)
    blocks = range(max(_NUM_BLOCKS, job.size))
    own = slice(job.rank, None, job.size)
    # Each rank has an equal part of the rows, so that the average of the losses is that of one process.
    here = x[own], y[own]
    expected = [0.0] * _COMPARED
    alone = ParallelContestant(ONE_PROCESS, lambda: None, alone=True)
    if job.rank == 0:
        step, held = _trainer(_model(width, blocks), x, y)
        expected = [step() for _ in range(_COMPARED)]
        alone = ParallelContestant(ONE_PROCESS, step, alone=True, held_bytes=held())
    expected = job.comm.bcast(expected)

    step, held = _trainer(_model(width, blocks), *here)
    step()
    found = [alone, ParallelContestant(NO_COMMUNICATION, step, held_bytes=held())]

    def add(name: str, trainer: tuple[Callable[[], float], Callable[[], int]]) -> None:
        found.append(compared(job, name, trainer[0], expected, trainer[1]))

    model = _model(width, blocks)
    mpinn.register_async_backward(model)
    job.resources.callback(mpinn.unregister_async_backward, model)
    add("averaged gradients", _trainer(model, *here, mpinn.synchronize_gradients_async))
    # DDP refuses annotations that are not its own, which a lambda cannot have.
    hook: Callable[[Any, Any], Future[Tensor]] = lambda _, bucket: _completed(bucket.buffer())  # noqa: E731
    step, held = _trainer(_ddp(_model(width, blocks), next(iter(groups.values())), hook), *here)
    step()
    found.append(ParallelContestant("DDP without communication", step, held_bytes=held()))
    for name, group in groups.items():
        add(f"DDP on {name}", _trainer(_ddp(_model(width, blocks), group), *here))
        add(f"DDP in 16 bits on {name}", _trainer(_ddp(_model(width, blocks), group, fp16_compress_hook), *here))
        add(f"FSDP2 on {name}", _trainer(_fsdp(_model(width, blocks), group), *here))
    plan = {"up": mpinn.TensorSplit("columns"), "down": mpinn.TensorSplit("rows")}
    add("tensor_parallel", _trainer(mpinn.tensor_parallel(_model(width, blocks), plan), x, y))
    begin, length = part_of(len(blocks), job.size, job.rank)
    for name, group in groups.items():
        add(f"1F1B on {name}", _pipeline(job, _model(width, blocks[begin : begin + length]), x, y, group))
        found.append(ParallelContestant(f"its messages on {name}", partial(_messages, job, x, group)))
    return found


def _model(width: int, numbers: range) -> nn.Sequential:
    """Make some of the blocks, with the same weights on every rank."""
    return nn.Sequential(*(TrainedBlock(width, number) for number in numbers))


def _trainer(
    model: nn.Module, x: Tensor, y: Tensor, synchronize: Callable[[nn.Module], object] | None = None
) -> tuple[Callable[[], float], Callable[[], int]]:
    """Return a function that runs a step and returns its loss, and one that returns the bytes held."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if synchronize is not None:
            synchronize(model)
        optimizer.step()
        return float(loss.detach())

    return step, partial(held_bytes, model, optimizer)


def _ddp(model: nn.Module, group: Any, hook: Callable[[Any, Any], Future[Tensor]] | None = None) -> nn.Module:
    """Wrap a model with the fastest settings of DistributedDataParallel, and with a hook if given."""
    wrapped = nn.parallel.DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    if hook is not None:
        wrapped.register_comm_hook(group, hook)
    return wrapped


def _completed(buffer: Tensor) -> Future[Tensor]:
    done: Future[Tensor] = Future()
    done.set_result(buffer)
    return done


def _fsdp(model: nn.Sequential, group: Any) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _num_microbatches(job: BenchJob, batch: int) -> int:
    """Return 4 for each rank, fewer for a batch that has not so many rows."""
    return next(number for number in range(min(batch, 4 * job.size), 0, -1) if batch % number == 0)


def _pipeline(
    job: BenchJob, model: nn.Module, x: Tensor, y: Tensor, group: Any
) -> tuple[Callable[[], float], Callable[[], int]]:
    """Return the same as :func:`_trainer` for a pipeline, of which this rank has the stage `model`."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(model, job.rank, job.size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, _num_microbatches(job, len(x)), loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
    is_last = job.rank == job.size - 1
    inputs = (x,) if job.rank == 0 else ()
    targets: dict[str, Any] = {"target": y} if is_last else {}

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(*inputs, **targets, losses=losses)
        optimizer.step()
        return job.size * float(torch.stack(losses).mean().detach()) if is_last else 0.0

    return step, partial(held_bytes, model, optimizer)


def _messages(job: BenchJob, x: Tensor, group: Any) -> None:
    """Pass what the pipeline passes: each microbatch to the next rank, and a gradient for each back."""
    parts = x.chunk(_num_microbatches(job, len(x)))
    for distance in (1, -1):
        source, target = job.rank - distance, job.rank + distance
        sent = []
        for part in parts:
            if 0 <= source < job.size:
                dist.recv(torch.empty_like(part), source, group)
            if 0 <= target < job.size:
                sent.append(dist.isend(part, target, group))
        for work in sent:
            assert work is not None
            work.wait()
