"""The metrics of this rank, their export, and the table of all ranks at ``stop()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..communicators.group import GroupContext
from ..config import Config
from ..log import logger

Metrics = dict[str, Any]
"""See :func:`torchmpi.metrics`."""
_MOST_ROWS, _NUM_NAMES = 30, 2


def of(context: GroupContext, rank: int, host: str) -> Metrics:
    """Return the metrics of a rank, also while another thread makes calls."""
    record = context.flight_record
    seconds_per_tick = 0.0 if record is None else record.seconds_per_tick()
    found: dict[bool, dict[str, dict[str, dict[str, float]]]] = {False: {}, True: {}}
    for (name, is_step, collective), count in sorted(context.call_counts.read().items()):
        seconds = count.ticks * seconds_per_tick + count.nanoseconds / 1e9
        numbers = {"calls": count.calls, "bytes": count.bytes, "seconds": seconds}
        found[is_step].setdefault(name, {})[collective] = numbers
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
        "in_flight": in_flight,
        "stalls": context.num_stalls,
        "updates": {name: update.metrics() for name, update in list(context.updates.items())},
    }


def export(config: Config, local_rank: int, rank: int, read: Callable[[], Metrics]) -> Callable[[], None]:
    """Export the metrics as the setting `metrics` says; return the function that ends it."""
    if not config.metrics:
        return lambda: None
    from . import prometheus  # which imports an HTTP server

    try:
        return prometheus.exporter(config.metrics, config.metrics_seconds, local_rank, rank, read).close
    except (OSError, OverflowError) as error:  # a folder that cannot be made, a port in use or above 65535
        logger.warning(f"rank {rank}: no metrics are exported to {config.metrics}: {error}")
        return lambda: None


def show_table(comm: Any, own: Metrics) -> None:
    """Log the table of all ranks on rank 0. Collective."""
    ranks = comm.allgather(own)
    if own["rank"] == 0:
        logger.info(table(ranks))


def table(ranks: Sequence[Metrics]) -> str:
    """Return a table of the calls of these ranks, those with the most seconds first."""
    found: dict[tuple[str, str], list[tuple[float, int, float, float]]] = {}
    for each in ranks:
        for name, collectives in each["calls"].items():
            for collective, numbers in collectives.items():
                row = numbers["seconds"], each["rank"], numbers["calls"], numbers["bytes"]
                found.setdefault((name, collective), []).append(row)
    rows: list[tuple[str, ...]] = [("communicator", "collective", "calls", "MB", "s: min", "mean", "max", "ranks")]
    by_time = sorted(found.items(), key=lambda item: -max(item[1])[0])
    for names, numbers in by_time[:_MOST_ROWS]:
        seconds, calls = [row[0] for row in numbers], sorted({row[2] for row in numbers})
        (least, first, *_), (most, last, *_) = min(numbers), max(numbers)
        num_calls = f"{calls[0]:,}" if len(calls) == 1 else f"{calls[0]:,}-{calls[-1]:,}"
        times = (f"{value:.3f}" for value in (least, sum(seconds) / len(seconds), most))
        megabytes = f"{sum(row[3] for row in numbers) / 1e6:,.3f}"
        rows.append((*names, num_calls, megabytes, *times, f"{first}, {last}"))
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
