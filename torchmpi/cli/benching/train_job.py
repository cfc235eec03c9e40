"""Inside a job: training steps with and without communication, and the communication of gradients alone."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from ... import nn as mpinn
from ...session import mpi_library
from . import ddp_way
from .clock import Entrant, measure
from .device_clock import timed_on
from .job import Job, job_facts, split_seconds
from .models import Task, make_task, resnet50
from .peers import open_group, why_absent

Row = dict[str, Any]
NONE, SYNC, KEPT, ASYNC, DDP, OUR_DDP, BY_TENSOR, COPY = (
    "no communication",
    "synchronize_gradients",
    "the same, gradients kept",
    "register_async_backward",
    "ddp",
    "ddp on torchmpi",
    "mpi4py",
    "a plain copy",
)
SUMS, IN_BUCKETS, COPIED = "gloo buckets", "ddp's way on gloo", "the same, gradients copied"
_PARTS = ("step", "communication")
_WEIGHTS = {"mlp": 1.0, "cnn": 2.0, "transformer": 2.0, "resnet": 4.0}
_TOLERANCE = 1e-4


def measure_job(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Rows of steps for each model, then of communication alone. Collective."""
    reason = job.agreed(why_absent("gloo"))
    if reason is None:
        open_group("gloo", job.comm, job.resources)
    ours = open_group("torchmpi", job.comm, job.resources)
    tasks: list[tuple[str, Callable[[float], list[Row]]]] = []
    for name in options.models:
        tasks.append((f"{name} steps", lambda seconds, name=name: _steps(job, name, ours, reason, seconds)))  # type: ignore[misc]
    tasks.append(("gradients of ResNet-50", lambda seconds: _communication(job, reason, seconds)))
    weights = [_WEIGHTS[name] for name in options.models] + [1.5]
    rows: list[Row] = []
    end = time.monotonic() + options.seconds
    for index, (text, task) in enumerate(tasks):
        job.show(f"{index + 1}/{len(tasks)} {text}")
        left = job.comm.bcast(max(0.0, end - time.monotonic()))
        rows += task(split_seconds(left, weights, index))
        gc.collect()
    return {"facts": job_facts(job.comm), "rows": rows}


def _row(job: Job, model: str, part: str, contestant: str) -> Row:
    return {"ranks": job.size, "model": model, "part": part, "contestant": contestant}


def _rows(job: Job, model: str, part: str, entrants: Sequence[Entrant], seconds: float) -> list[Row]:
    samples = measure(entrants, job.comm, seconds=seconds, one_clock=job.one_clock)
    return [
        _row(job, model, part, entrant.name) | dataclasses.asdict(sample)
        for entrant, sample in zip(entrants, samples, strict=True)
    ]


def _entrant(job: Job, name: str, call: Callable[[], object], touch: Callable[[], object]) -> Entrant:
    return Entrant(name, (call,), touch, timed_on(job, (call,)))


# --- steps ---------------------------------------------------------------------------------------------------


class Trainer:
    """One replica of a network, and its way of communicating."""

    def __init__(self, task: Task, synchronize: Callable[[nn.Module], object] | None) -> None:
        self.net, self._inputs, self._targets = task
        self._synchronize = synchronize
        self._criterion = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def step(self) -> None:
        """Forward, backward, gradients of all ranks, update."""
        self._optimizer.zero_grad()
        self._criterion(self.net(self._inputs), self._targets).backward()
        if self._synchronize is not None:
            self._synchronize(self.net)
        self._optimizer.step()


def _trainers(task: Task, ours: Any, *, has_gloo: bool) -> dict[str, Trainer]:
    copies = {name: task._replace(net=copy.deepcopy(task.net)) for name in (NONE, SYNC, ASYNC, DDP, OUR_DDP)}
    mpinn.register_async_backward(copies[ASYNC].net)
    trainers = {
        NONE: Trainer(copies[NONE], None),
        SYNC: Trainer(copies[SYNC], mpinn.synchronize_gradients),
        ASYNC: Trainer(copies[ASYNC], mpinn.synchronize_gradients_async),
    }
    for name, group in ((OUR_DDP, ours), *([(DDP, None)] if has_gloo else [])):
        # Its fastest settings: no copies in and out of buckets; buffers are not ours to send either.
        wrapped = nn.parallel.DistributedDataParallel(
            copies[name].net, process_group=group, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        trainers[name] = Trainer(copies[name]._replace(net=wrapped), None)
    return trainers


def _steps(job: Job, model: str, ours: Any, why_no_gloo: str | None, seconds: float) -> list[Row]:
    task = make_task(model, rank=job.rank)
    task = Task(task.net.to(job.device), task.inputs.to(job.device), task.targets.to(job.device))
    trainers = _trainers(task, ours, has_gloo=why_no_gloo is None)
    for trainer in trainers.values():
        trainer.step()
    reasons = {name: job.agreed(reason) for name, reason in _differences(trainers).items()}
    entrants = [
        _entrant(job, name, trainer.step, _nothing) for name, trainer in trainers.items() if reasons.get(name) is None
    ]
    rows = _rows(job, model, _PARTS[0], entrants, seconds)
    if why_no_gloo is not None:
        reasons[DDP] = why_no_gloo
    rows += [_row(job, model, _PARTS[0], name) | {"why_not": reason} for name, reason in reasons.items() if reason]
    mpinn.unregister_async_backward(trainers[ASYNC].net)
    return rows


def _differences(trainers: dict[str, Trainer]) -> dict[str, str | None]:
    """After the first step all ways of communicating must have led to the same parameters."""
    expected = list(trainers[SYNC].net.parameters())
    found: dict[str, str | None] = {}
    for name in (ASYNC, DDP, OUR_DDP):
        if name in trainers:
            pairs = zip(trainers[name].net.parameters(), expected, strict=True)
            is_same = all(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in pairs)
            found[name] = None if is_same else f"its parameters differ from those of {SYNC} after one step"
    return found


def _nothing() -> None:
    """The step itself writes everything."""


# --- communication alone -------------------------------------------------------------------------------------


def _communication(job: Job, why_no_gloo: str | None, seconds: float) -> list[Row]:
    """The 161 gradients of ResNet-50 by each way."""
    net, gradients = _net_with_gradients(job)
    parameters = list(net.parameters())
    kept, kept_gradients = _net_with_gradients(job)
    entrants = [
        # A list of parameters, whose gradients may be others each time; a net keeps them where it has moved them.
        _entrant(job, SYNC, lambda: mpinn.synchronize_gradients(parameters), lambda: _write(gradients)),
        _entrant(job, KEPT, lambda: mpinn.synchronize_gradients(kept), lambda: _write(kept_gradients)),
    ]
    if job.device.type == "cpu":  # MPI's own collectives see memory of the host
        entrants.append(Entrant(BY_TENSOR, (_by_tensor(job, gradients),), lambda: _write(gradients)))
    copies = [torch.empty_like(gradient) for gradient in gradients]
    entrants.append(_entrant(job, COPY, partial(torch._foreach_copy_, copies, gradients), partial(_write, gradients)))
    by_gloo = ((SUMS, ddp_way.add_up), (IN_BUCKETS, ddp_way.average), (COPIED, ddp_way.average_copied))
    if why_no_gloo is None:
        buckets = ddp_way.fill_buckets(gradients)
        flat = [bucket.flat for bucket in buckets]
        for name, way in by_gloo:
            written = gradients if name == COPIED else flat
            entrants.append(_entrant(job, name, partial(way, buckets), partial(_write, written)))
    rows = _rows(job, "resnet", _PARTS[1], entrants, seconds)
    if why_no_gloo is not None:
        rows += [_row(job, "resnet", _PARTS[1], name) | {"why_not": why_no_gloo} for name, _ in by_gloo]
    return rows


def _net_with_gradients(job: Job) -> tuple[nn.Module, list[Tensor]]:
    net = resnet50().to(job.device)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return net, [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def _by_tensor(job: Job, gradients: Sequence[Tensor]) -> Callable[[], None]:
    """Bare mpi4py, a call for each tensor: sums, without the division."""
    comm, in_place = job.comm, mpi_library.load().IN_PLACE
    arrays = [gradient.numpy() for gradient in gradients]

    def run() -> None:
        for array in arrays:
            comm.Allreduce(in_place, array)

    return run


def _write(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()
