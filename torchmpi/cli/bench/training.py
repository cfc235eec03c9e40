"""``torchmpi bench train``: time training steps with and without communication, and communication alone."""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from ... import nn as mpinn
from ...launch import mpi_library
from ..formatting import counted, table
from .bench_job import BenchJob, job_facts
from .bench_report import Row, grouped, has_figure, page, timing_of, titled
from .contestants import open_group, why_absent
from .models import TrainingTask, make_task, resnet50
from .timing import TimedCall, timed_on, timed_rows

NONE, ALONE, SYNC, KEPT, ASYNC, DDP, OUR_DDP, BY_TENSOR, COPY = (
    "no communication",
    "communication alone",
    "synchronize_gradients",
    "the same, gradients kept",
    "register_async_backward",
    "ddp",
    "ddp on torchmpi",
    "mpi4py",
    "a plain copy",
)
IN_BF16 = {name: f"{name}, bf16" for name in (SYNC, ASYNC)}
SUMS, IN_BUCKETS, COPIED = "gloo buckets", "ddp's way on gloo", "the same, gradients copied"
_STEP, _COMMUNICATION = "step", "communication"
_WEIGHTS = {"mlp": 1.0, "cnn": 2.0, "transformer": 2.0, "resnet": 4.0, "offloaded": 4.0}
_TOLERANCE = 1e-4


def measure(job: BenchJob, options: argparse.Namespace) -> dict[str, Any]:
    """Return rows of steps for each model, then of communication alone. Collective."""
    reason = job.agreed(why_absent("gloo"))
    if reason is None:
        open_group("gloo", job.resources)
    ours = open_group("torchmpi", job.resources)
    tasks = [
        (f"{name} steps", _WEIGHTS[name], partial(_steps, job, name, ours, reason, options)) for name in options.models
    ]
    if not options.quick:
        tasks.append(("gradients of ResNet-50", 1.5, partial(_communication, job, reason)))
    return {"facts": job_facts(job.comm), "rows": job.run_in_turn(tasks, options.seconds)}


def _rows(
    job: BenchJob,
    head: Mapping[str, Any],
    calls: Mapping[str, tuple[Callable[[], object], Callable[[], object]]],
    seconds: float,
    reasons: Mapping[str, str | None],
) -> list[dict[str, Any]]:
    """Time calls, each with a function that writes its buffers; return rows of times and of reasons for none."""
    timed = [TimedCall(name, (call,), touch, timed_on(job, (call,))) for name, (call, touch) in calls.items()]
    rows = timed_rows(job, timed, reasons, seconds, {"ranks": job.size, **head})
    gc.collect()
    return rows


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


def _trainers(task: TrainingTask, ours: Any, *, has_gloo: bool, with_bf16: bool) -> dict[str, Trainer]:
    names = (NONE, SYNC, ASYNC, DDP, OUR_DDP, *IN_BF16.values())
    copies = {name: task._replace(net=copy.deepcopy(task.net)) for name in names}
    mpinn.register_async_backward(copies[ASYNC].net)
    trainers = {
        NONE: Trainer(copies[NONE], None),
        SYNC: Trainer(copies[SYNC], mpinn.synchronize_gradients),
        ASYNC: Trainer(copies[ASYNC], mpinn.synchronize_gradients_async),
    }
    if with_bf16:
        sync, by_hooks = IN_BF16[SYNC], IN_BF16[ASYNC]
        mpinn.register_async_backward(copies[by_hooks].net, compression="bf16")
        trainers[sync] = Trainer(copies[sync], partial(mpinn.synchronize_gradients, compression="bf16"))
        trainers[by_hooks] = Trainer(copies[by_hooks], mpinn.synchronize_gradients_async)
    for name, group in ((OUR_DDP, ours), *([(DDP, None)] if has_gloo else [])):
        # The fastest settings of DistributedDataParallel: no copies in and out of buckets, no broadcast of buffers.
        wrapped = nn.parallel.DistributedDataParallel(
            copies[name].net, process_group=group, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        trainers[name] = Trainer(copies[name]._replace(net=wrapped), None)
    return trainers


def _steps(
    job: BenchJob, model: str, ours: Any, why_no_gloo: str | None, options: argparse.Namespace, seconds: float
) -> list[dict[str, Any]]:
    task = make_task(model, rank=job.rank, layer_seconds=options.layer_ms / 1000)
    task = TrainingTask(task.net.to(job.device), task.inputs.to(job.device), task.targets.to(job.device))
    # Within a host, 16 bits only cost time.
    trainers = _trainers(task, ours, has_gloo=why_no_gloo is None, with_bf16=not job.one_clock)
    for trainer in trainers.values():
        trainer.step()
    compared = (ASYNC, DDP, OUR_DDP, *IN_BF16.values())
    reasons = {name: job.agreed(_difference(trainers, name)) for name in compared if name in trainers}
    alone = copy.deepcopy(trainers[SYNC].net)
    for parameter in alone.parameters():
        parameter.grad = torch.zeros_like(parameter)
    functions: dict[str, Callable[[], object]] = {ALONE: partial(mpinn.synchronize_gradients, alone)}
    functions |= {name: trainer.step for name, trainer in trainers.items() if reasons.get(name) is None}
    # A training step writes all buffers itself.
    calls = {name: (function, lambda: None) for name, function in functions.items()}
    reasons |= {} if why_no_gloo is None else {DDP: why_no_gloo}
    rows = _rows(job, {"model": model, "part": _STEP}, calls, seconds, reasons)
    for name in (ASYNC, IN_BF16[ASYNC]):
        if name in trainers:
            mpinn.unregister_async_backward(trainers[name].net)
    return rows


def _difference(trainers: Mapping[str, Trainer], name: str) -> str | None:
    pairs = zip(trainers[name].net.parameters(), trainers[SYNC].net.parameters(), strict=True)
    is_same = all(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in pairs)
    return None if is_same else f"its parameters differ from those of {SYNC} after one step"


# --- communication alone -------------------------------------------------------------------------------------


def _communication(job: BenchJob, why_no_gloo: str | None, seconds: float) -> list[dict[str, Any]]:
    net, gradients = _net_with_gradients(job)
    parameters = list(net.parameters())
    kept, kept_gradients = _net_with_gradients(job)
    copies = [torch.empty_like(gradient) for gradient in gradients]
    write = partial(torch._foreach_zero_, gradients)
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        # The gradients of a module are moved to shared memory; those of a list of parameters are not.
        SYNC: (lambda: mpinn.synchronize_gradients(parameters), write),
        KEPT: (lambda: mpinn.synchronize_gradients(kept), partial(torch._foreach_zero_, kept_gradients)),
        COPY: (partial(torch._foreach_copy_, copies, gradients), write),
    }
    if job.device.type == "cpu":  # MPI's collectives need memory of the host
        calls[BY_TENSOR] = (partial(_by_tensor, job.comm, [gradient.numpy() for gradient in gradients]), write)
    by_gloo = {SUMS: sum_buckets, IN_BUCKETS: average_buckets, COPIED: average_copied}
    if why_no_gloo is None:
        buckets = fill_buckets(gradients)
        write_flat = partial(torch._foreach_zero_, [bucket.flat for bucket in buckets])
        for name, function in by_gloo.items():
            calls[name] = (partial(function, buckets), write if name == COPIED else write_flat)
    head = {"model": "resnet", "part": _COMMUNICATION}
    return _rows(job, head, calls, seconds, dict.fromkeys(by_gloo, why_no_gloo))


def _net_with_gradients(job: BenchJob) -> tuple[nn.Module, list[Tensor]]:
    net = resnet50().to(job.device)
    gradients = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return net, gradients


def _by_tensor(comm: Any, arrays: Sequence[Any]) -> None:
    """Sum arrays with mpi4py, one by one, without dividing."""
    in_place = mpi_library.load().IN_PLACE
    for array in arrays:
        comm.Allreduce(in_place, array)


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
    groups: list[list[Tensor]] = [[]]
    for gradient in reversed(gradients):
        if sum(member.nbytes for member in groups[-1]) >= bucket_bytes:
            groups.append([])
        groups[-1].append(gradient)
    buckets = []
    for members in groups:
        flat = members[0].new_zeros(sum(gradient.numel() for gradient in members))
        parts = torch.split(flat, [gradient.numel() for gradient in members])
        buckets.append(Bucket(flat, members, [part.view_as(to) for part, to in zip(parts, members, strict=True)]))
    return buckets


def sum_buckets(buckets: Sequence[Bucket], before: Callable[[Bucket], object] | None = None) -> None:
    """Sum the buckets over ranks, without dividing, each after calling `before` with it."""
    works = []
    for bucket in buckets:
        if before is not None:
            before(bucket)
        works.append(torch.distributed.all_reduce(bucket.flat, async_op=True))
    for work in works:
        work.wait()


def average_buckets(buckets: Sequence[Bucket]) -> None:
    """Average gradients that are views of the buckets.

    DistributedDataParallel does this with ``gradient_as_bucket_view=True`` and ``zero_grad(set_to_none=False)``.
    """
    size = torch.distributed.get_world_size()
    sum_buckets(buckets, lambda bucket: [view.div_(size) for view in bucket.views])


def average_copied(buckets: Sequence[Bucket]) -> None:
    """Average gradients that are copied into the buckets and back, the default of DistributedDataParallel."""
    share = 1 / torch.distributed.get_world_size()

    def fill(bucket: Bucket) -> None:
        for gradient, view in zip(bucket.gradients, bucket.views, strict=True):
            torch.mul(gradient, share, out=view)

    sum_buckets(buckets, fill)
    for bucket in buckets:
        for gradient, view in zip(bucket.gradients, bucket.views, strict=True):
            gradient.copy_(view)


# --- table --------------------------------------------------------------------------------------------------

_GROUP = ("ranks", "model", "part")
_BASES = {_STEP: DDP, _COMMUNICATION: IN_BUCKETS}
_LEGEND = (
    "ms: median over batches, spread: half the distance of the quartiles. communication: share of the step that the",
    "same step without communication does not take. hidden: part of the shorter of computing and communicating that",
    "runs during the other. x: time of DistributedDataParallel (or of its buckets on gloo) over that of this line.",
)


def as_text(report: Mapping[str, Any]) -> str:
    """Format the header, and a table for each model and number of ranks."""
    lines: list[str] = []
    for (ranks, model, part), rows in grouped(report["rows"], _GROUP):
        what = f"{model}: training step" if part == _STEP else "161 gradients of ResNet-50: communication alone"
        lines += titled(f"{what}, {counted(ranks, 'rank')}", _table(rows, part))
    return page(report, lines, _LEGEND, "model")


def _table(rows: Sequence[Row], part: str) -> list[str]:
    times = {row["contestant"]: row["median_us"] for row in rows if has_figure(row)}
    base, computing = times.get(_BASES[part]), times.get(NONE)
    lines = [["", "ms", "spread", *(["communication", "hidden"] if part == _STEP else []), f"x {_BASES[part]}"]]
    for row in filter(has_figure, rows):
        timing = timing_of(row)
        line = [row["contestant"], f"{timing.median_us / 1e3:.2f}", f"{timing.spread:.0%}"]
        if part == _STEP:
            is_step = row["contestant"] != ALONE
            line.append(
                "-" if computing is None or not is_step else f"{max(0.0, 1 - computing / timing.median_us):.0%}"
            )
            line.append(_hidden(times, row["contestant"]))
        lines.append([*line, "-" if base is None else f"{base / timing.median_us:.2f}"])
    return table(lines)


def _hidden(times: Mapping[str, float], name: str) -> str:
    """Return the hidden share of a step that sends what ALONE does, and begins before the end of backward.

    >>> _hidden({NONE: 60.0, ALONE: 40.0, ASYNC: 64.0}, ASYNC)
    '90%'
    """
    if name not in (ASYNC, OUR_DDP) or not {NONE, ALONE} <= times.keys():
        return "-"
    saved = times[NONE] + times[ALONE] - times[name]
    return f"{max(0.0, saved / min(times[NONE], times[ALONE])):.0%}"
