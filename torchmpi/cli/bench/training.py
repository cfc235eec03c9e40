"""``torchmpi bench train``: time training steps with and without communication, and communication alone."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from ... import nn as mpinn
from ...session import mpi_library
from ..formatting import counted
from .contestants import open_group, why_absent
from .job import BenchJob, job_facts, split_seconds
from .models import TrainingTask, make_task, resnet50
from .report import Row, grouped, has_figure, header, numeric_table, reasons, timing_of
from .timing import TimedCall, measure_calls, timed_on

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


def measure(job: BenchJob, options: argparse.Namespace) -> dict[str, Any]:
    """Return rows of steps for each model, then of communication alone. Collective."""
    reason = job.agreed(why_absent("gloo"))
    if reason is None:
        open_group("gloo", job.comm, job.resources)
    ours = open_group("torchmpi", job.comm, job.resources)
    tasks: list[tuple[str, Callable[[float], list[dict[str, Any]]]]] = [
        (f"{name} steps", partial(_steps, job, name, ours, reason)) for name in options.models
    ]
    tasks.append(("gradients of ResNet-50", partial(_communication, job, reason)))
    weights = [_WEIGHTS[name] for name in options.models] + [1.5]
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + options.seconds
    for index, (text, task) in enumerate(tasks):
        job.show(f"{index + 1}/{len(tasks)} {text}")
        left = job.comm.bcast(max(0.0, end - time.monotonic()))
        rows += task(split_seconds(left, weights, index))
        gc.collect()
    return {"facts": job_facts(job.comm), "rows": rows}


def _row(job: BenchJob, model: str, part: str, contestant: str) -> dict[str, Any]:
    return {"ranks": job.size, "model": model, "part": part, "contestant": contestant}


def _rows(job: BenchJob, model: str, part: str, calls: Sequence[TimedCall], seconds: float) -> list[dict[str, Any]]:
    summaries = measure_calls(calls, job.comm, seconds=seconds, one_clock=job.one_clock)
    return [
        _row(job, model, part, call.name) | dataclasses.asdict(summary)
        for call, summary in zip(calls, summaries, strict=True)
    ]


def _timed(job: BenchJob, name: str, call: Callable[[], object], touch: Callable[[], object]) -> TimedCall:
    return TimedCall(name, (call,), touch, timed_on(job, (call,)))


# --- steps ---------------------------------------------------------------------------------------------------


class Trainer:
    """One replica of a network, and the function that synchronizes its gradients."""

    def __init__(self, task: TrainingTask, synchronize: Callable[[nn.Module], object] | None) -> None:
        self.net, self._inputs, self._targets = task
        self._synchronize = synchronize
        self._criterion = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def step(self) -> None:
        """Run forward, backward, synchronization and update."""
        self._optimizer.zero_grad()
        self._criterion(self.net(self._inputs), self._targets).backward()
        if self._synchronize is not None:
            self._synchronize(self.net)
        self._optimizer.step()


def _trainers(task: TrainingTask, ours: Any, *, has_gloo: bool) -> dict[str, Trainer]:
    copies = {name: task._replace(net=copy.deepcopy(task.net)) for name in (NONE, SYNC, ASYNC, DDP, OUR_DDP)}
    mpinn.register_async_backward(copies[ASYNC].net)
    trainers = {
        NONE: Trainer(copies[NONE], None),
        SYNC: Trainer(copies[SYNC], mpinn.synchronize_gradients),
        ASYNC: Trainer(copies[ASYNC], mpinn.synchronize_gradients_async),
    }
    for name, group in ((OUR_DDP, ours), *([(DDP, None)] if has_gloo else [])):
        # The fastest settings of DistributedDataParallel: no copies in and out of buckets, no broadcast of buffers.
        wrapped = nn.parallel.DistributedDataParallel(
            copies[name].net, process_group=group, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        trainers[name] = Trainer(copies[name]._replace(net=wrapped), None)
    return trainers


def _steps(job: BenchJob, model: str, ours: Any, why_no_gloo: str | None, seconds: float) -> list[dict[str, Any]]:
    task = make_task(model, rank=job.rank)
    task = TrainingTask(task.net.to(job.device), task.inputs.to(job.device), task.targets.to(job.device))
    trainers = _trainers(task, ours, has_gloo=why_no_gloo is None)
    for trainer in trainers.values():
        trainer.step()
    reasons = {name: job.agreed(reason) for name, reason in _differences(trainers).items()}
    calls = [
        _timed(job, name, trainer.step, _nothing) for name, trainer in trainers.items() if reasons.get(name) is None
    ]
    rows = _rows(job, model, _PARTS[0], calls, seconds)
    if why_no_gloo is not None:
        reasons[DDP] = why_no_gloo
    rows += [_row(job, model, _PARTS[0], name) | {"why_not": reason} for name, reason in reasons.items() if reason]
    mpinn.unregister_async_backward(trainers[ASYNC].net)
    return rows


def _differences(trainers: dict[str, Trainer]) -> dict[str, str | None]:
    """Compare the parameters of all trainers after the first step."""
    expected = list(trainers[SYNC].net.parameters())
    found: dict[str, str | None] = {}
    for name in (ASYNC, DDP, OUR_DDP):
        if name in trainers:
            pairs = zip(trainers[name].net.parameters(), expected, strict=True)
            is_same = all(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in pairs)
            found[name] = None if is_same else f"its parameters differ from those of {SYNC} after one step"
    return found


def _nothing() -> None:
    pass  # a training step writes all buffers itself


# --- communication alone -------------------------------------------------------------------------------------


def _communication(job: BenchJob, why_no_gloo: str | None, seconds: float) -> list[dict[str, Any]]:
    """Time the reduction of the 161 gradients of ResNet-50."""
    net, gradients = _net_with_gradients(job)
    parameters = list(net.parameters())
    kept, kept_gradients = _net_with_gradients(job)
    calls = [
        # A list of parameters may have new gradients each time; a module keeps them where they have been moved.
        _timed(job, SYNC, lambda: mpinn.synchronize_gradients(parameters), lambda: _write(gradients)),
        _timed(job, KEPT, lambda: mpinn.synchronize_gradients(kept), lambda: _write(kept_gradients)),
    ]
    if job.device.type == "cpu":  # MPI's collectives need memory of the host
        calls.append(TimedCall(BY_TENSOR, (_by_tensor(job, gradients),), lambda: _write(gradients)))
    copies = [torch.empty_like(gradient) for gradient in gradients]
    calls.append(_timed(job, COPY, partial(torch._foreach_copy_, copies, gradients), partial(_write, gradients)))
    by_gloo = ((SUMS, sum_buckets), (IN_BUCKETS, average_buckets), (COPIED, average_copied))
    if why_no_gloo is None:
        buckets = fill_buckets(gradients)
        flat = [bucket.flat for bucket in buckets]
        for name, function in by_gloo:
            written = gradients if name == COPIED else flat
            calls.append(_timed(job, name, partial(function, buckets), partial(_write, written)))
    rows = _rows(job, "resnet", _PARTS[1], calls, seconds)
    if why_no_gloo is not None:
        rows += [_row(job, "resnet", _PARTS[1], name) | {"why_not": why_no_gloo} for name, _ in by_gloo]
    return rows


def _net_with_gradients(job: BenchJob) -> tuple[nn.Module, list[Tensor]]:
    net = resnet50().to(job.device)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return net, [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def _by_tensor(job: BenchJob, gradients: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that calls mpi4py for each tensor; it sums without dividing."""
    comm, in_place = job.comm, mpi_library.load().IN_PLACE
    arrays = [gradient.numpy() for gradient in gradients]

    def run() -> None:
        for array in arrays:
            comm.Allreduce(in_place, array)

    return run


def _write(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


# --- the communication of DistributedDataParallel -------------------------------------------------------------

# Its default; its first bucket, of 1 MB, is omitted.
BUCKET_BYTES = 25 << 20


class Bucket(NamedTuple):
    """A flat tensor and its gradients."""

    flat: Tensor
    gradients: list[Tensor]
    views: list[Tensor]
    """The part of the flat tensor for each gradient."""


def fill_buckets(gradients: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Make buckets of gradients of one dtype, last gradient first; each but the last has at least `bucket_bytes`.

    >>> [len(bucket.flat) for bucket in fill_buckets([torch.zeros(3), torch.zeros(2), torch.zeros(2)], 16)]
    [4, 3]
    """
    buckets: list[Bucket] = []
    members: list[Tensor] = []
    for gradient in reversed(gradients):
        members.append(gradient)
        if sum(member.nbytes for member in members) >= bucket_bytes:
            buckets.append(_bucket_of(members))
            members = []
    return [*buckets, _bucket_of(members)] if members else buckets


def _bucket_of(gradients: list[Tensor]) -> Bucket:
    flat = gradients[0].new_zeros(sum(gradient.numel() for gradient in gradients))
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    return Bucket(flat, gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])


def sum_buckets(buckets: Sequence[Bucket]) -> None:
    """Sum the buckets over ranks, without dividing."""
    for work in [torch.distributed.all_reduce(bucket.flat, async_op=True) for bucket in buckets]:
        work.wait()


def average_buckets(buckets: Sequence[Bucket]) -> None:
    """Average gradients that are views of the buckets.

    DistributedDataParallel does this with ``gradient_as_bucket_view=True`` and ``zero_grad(set_to_none=False)``.
    """
    size = torch.distributed.get_world_size()
    works = []
    for bucket in buckets:
        for view in bucket.views:
            view.div_(size)
        works.append(torch.distributed.all_reduce(bucket.flat, async_op=True))
    for work in works:
        work.wait()


def average_copied(buckets: Sequence[Bucket]) -> None:
    """Average gradients that are copied into the buckets and back, the default of DistributedDataParallel."""
    share = 1 / torch.distributed.get_world_size()
    works = []
    for bucket in buckets:
        for gradient, view in zip(bucket.gradients, bucket.views, strict=True):
            torch.mul(gradient, share, out=view)
        works.append(torch.distributed.all_reduce(bucket.flat, async_op=True))
    for work, bucket in zip(works, buckets, strict=True):
        work.wait()
        for gradient, view in zip(bucket.gradients, bucket.views, strict=True):
            gradient.copy_(view)


# --- table --------------------------------------------------------------------------------------------------

_GROUP = ("ranks", "model", "part")
_BASES = {"step": "ddp", "communication": "ddp's way on gloo"}
_ALONE = "no communication"


def as_text(report: Mapping[str, Any]) -> str:
    """Format the header, and a table for each model and number of ranks."""
    lines = header(report)
    for (ranks, model, part), rows in grouped(report["rows"], _GROUP):
        what = f"{model}: training step" if part == "step" else "161 gradients of ResNet-50: communication alone"
        lines += ["", f"{what}, {counted(ranks, 'rank')}", "", *(f"  {line}" for line in _table(rows, part))]
    lines += ["", *_LEGEND]
    missing = reasons(report["rows"], "model")
    return "\n".join([*lines, *(["", "no figures", *(f"  {line}" for line in missing)] if missing else [])])


_LEGEND = (
    "ms: median over batches, spread: half the distance of the quartiles. communication: share of the step that the",
    "same step without communication does not take. x: time of DistributedDataParallel (or of what it does on gloo)",
    "over that of this line.",
)


def _table(rows: Sequence[Row], part: str) -> list[str]:
    times = {row["contestant"]: row["median_us"] for row in rows if has_figure(row)}
    base, alone = times.get(_BASES[part]), times.get(_ALONE)
    heading = ["", "ms", "spread", *(["communication"] if part == "step" else []), f"x {_BASES[part]}"]
    lines = [heading]
    for row in filter(has_figure, rows):
        timing = timing_of(row)
        line = [row["contestant"], f"{timing.median_us / 1e3:.2f}", f"{timing.spread:.0%}"]
        if part == "step":
            line.append("-" if alone is None else f"{max(0.0, 1 - alone / timing.median_us):.0%}")
        lines.append([*line, "-" if base is None else f"{base / timing.median_us:.2f}"])
    return numeric_table(lines)
