"""The metrics of this rank, their export, and the table of all ranks at ``stop()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..communicators.group import GroupContext
from ..log import logger
from ..timeline.observer import JobObserver, ObservedJob

Metrics = dict[str, Any]
"""See :func:`torchmpi.metrics`."""
_MOST_ROWS, _NUM_NAMES = 30, 2
_HEAD = ("communicator", "call", "calls", "MB", "s: min", "mean", "max", "waited", "moved", "stalls", "ranks")
_TIMES = ("seconds", "waited", "moved")


def of(context: GroupContext, rank: int, host: str) -> Metrics:
    """Return the metrics of a rank, also while another thread makes calls."""
    record = context.flight_record
    seconds_per_tick = 0.0 if record is None else record.seconds_per_tick()
    found: dict[bool, dict[str, dict[str, dict[str, float]]]] = {False: {}, True: {}}
    for (name, is_step, collective), count in sorted(context.call_counts.read().items()):
        known = count.ticks * seconds_per_tick + count.known_nanoseconds / 1e9
        seconds = known + count.nanoseconds / 1e9
        numbers = _numbers(count.calls, count.bytes, seconds, known, count.waited_nanoseconds / 1e9, count.stalls)
        found[is_step].setdefault(name, {})[collective] = numbers
    messages: dict[str, dict[str, dict[str, float]]] = {}
    for (name, kind), sent in sorted(context.call_counts.read_messages().items()):
        seconds = sent.time / 1e9 + sent.ticks * seconds_per_tick
        known = sent.known / 1e9 + sent.known_ticks * seconds_per_tick
        numbers = _numbers(sent.calls, sent.bytes, seconds, known, sent.waited / 1e9, sent.stalls)
        messages.setdefault(name, {})[kind] = numbers
    in_flight: dict[str, int] = {}
    for group in list(context.groups):
        num_calls = max(group.call_queue.pending, int(group.call_log.current is not None))
        in_flight[group.name] = in_flight.get(group.name, 0) + num_calls
    return {
        "rank": rank,
        "host": host,
        "seconds": sum(each["seconds"] for by_name in found[False].values() for each in by_name.values()),
        "calls": found[False],
        "steps": found[True],
        "messages": messages,
        "in_flight": in_flight,
        "stalls": context.num_stalls,
        "updates": {name: update.metrics() for name, update in list(context.updates.items())},
    }


def _numbers(calls: int, num_bytes: int, seconds: float, known: float, waited: float, stalls: int) -> dict[str, float]:
    """Return the numbers of calls; `known`: the part of the seconds in which it is known how long the rank waited."""
    waited = min(waited, known)  # two clocks
    times = {"seconds": seconds, "waited": waited, "moved": known - waited}
    return {"calls": calls, "bytes": num_bytes, **times, "stalls": stalls}


def exporter(job: ObservedJob, target: str) -> JobObserver:
    """Return what exports the metrics as the setting `metrics` says."""
    from . import prometheus  # which imports an HTTP server

    try:
        return prometheus.exporter(target, job.config.metrics_seconds, job.local_rank, job.rank, job.metrics)
    except (OSError, OverflowError) as error:  # a folder that cannot be made, a port in use or above 65535
        logger.warning(f"rank {job.rank}: no metrics are exported to {target}: {error}")
        return JobObserver()


class Summary(JobObserver):
    """Logs the table of all ranks on rank 0 at ``stop()``."""

    def __init__(self, job: ObservedJob, _is_wanted: bool) -> None:
        self._job = job

    def meet(self) -> None:
        """Log the table. Collective."""
        ranks = self._job.comm.allgather(self._job.metrics())
        if self._job.rank == 0:
            logger.info(table(ranks))


def table(ranks: Sequence[Metrics]) -> str:
    """Return a table of the calls of these ranks, those with the most seconds first."""
    found: dict[tuple[str, str], list[tuple[int, dict[str, float]]]] = {}
    for each in ranks:
        for name, calls in [*each["calls"].items(), *each["messages"].items()]:
            for call, numbers in calls.items():
                found.setdefault((name, call), []).append((each["rank"], numbers))
    rows: list[tuple[str, ...]] = [_HEAD]
    by_time = sorted(found.items(), key=lambda item: -max(numbers["seconds"] for _, numbers in item[1]))
    for names, of_ranks in by_time[:_MOST_ROWS]:
        seconds = sorted((numbers["seconds"], rank) for rank, numbers in of_ranks)
        num_calls = sorted({int(numbers["calls"]) for _, numbers in of_ranks})
        mean = {field: sum(numbers[field] for _, numbers in of_ranks) / len(of_ranks) for field in _TIMES}
        is_known = mean["waited"] + mean["moved"] > 0
        megabytes, stalls = (sum(numbers[field] for _, numbers in of_ranks) for field in ("bytes", "stalls"))
        rows.append((
            *names,
            f"{num_calls[0]:,}" if len(num_calls) == 1 else f"{num_calls[0]:,}-{num_calls[-1]:,}",
            f"{megabytes / 1e6:,.3f}",
            *(f"{value:.3f}" for value in (seconds[0][0], mean["seconds"], seconds[-1][0])),
            *(f"{mean[field]:.3f}" if is_known else "?" for field in ("waited", "moved")),
            str(int(stalls)),
            f"{seconds[0][1]}, {seconds[-1][1]}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < _NUM_NAMES else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    left_out = [f"and {len(by_time) - _MOST_ROWS} more"] if len(by_time) > _MOST_ROWS else []
    head = f"calls of {len(ranks)} ranks; the ranks named are those with the least and the most seconds:"
    return "\n".join([head, *lines, *left_out])
