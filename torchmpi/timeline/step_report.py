"""The report on a timeline: where the time of the steps went, which rank was late, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from .. import plots
from ..collective_specs import spec_of
from .aligned_calls import AlignedCalls, earliest_result
from .bench_times import BenchTimes
from .message_waits import MessageWaits
from .step_times import (
    CallSite,
    LateRank,
    RangeTimes,
    StepTimes,
    added,
    call_sites,
    late_ranks,
    late_senders,
    message_sites,
    range_times,
    step_spans,
    times_of_steps,
)
from .trace_reader import Flags, RankTrace

_MOST_SITES = 10
# Below these parts of a step nothing is gained by a change.
_MUCH_WAITING, _MUCH_EXPOSED = 0.1, 0.15
# Of two ranks that are late by turns, one has a little more than half.
_MOST_OF_TWO, _MOST_OF_ALL = 0.7, 0.5
_TINY_BYTES, _MANY_CALLS = 128 << 10, 8
_SHORT_BYTES = 1024  # shorter calls gain little from steps over hosts
_HIERARCHICAL = ("allreduce", "allreduce_many", "reduce", "broadcast", "allgather", "reduce_scatter")
_MARGIN = 1.05
_PARTS = ("computing", "exposed communication", "waiting for a late rank")
_COLORS = ("#7fa8d1", "#e0a458", "#c1554d")


class StepReport(NamedTuple):
    """What a timeline says about a job; the times of the steps are means over steps and ranks."""

    traces: Sequence[RankTrace]
    aligned: AlignedCalls
    steps: dict[int, list[StepTimes]]
    sites: Sequence[CallSite]
    late: Sequence[LateRank]
    error_seconds: float
    ranges: Sequence[RangeTimes]
    bench: BenchTimes | None = None

    @classmethod
    def of(cls, traces: Sequence[RankTrace], bench: BenchTimes | None = None) -> StepReport:
        """Make the report of the traces of a job; `bench` has the times with which calls are compared."""
        aligned, error = AlignedCalls(traces), 2 * max(trace.error_seconds for trace in traces)
        messages, spans = MessageWaits(traces), {trace.rank: step_spans(trace) for trace in traces}
        steps = {trace.rank: times_of_steps(trace, aligned, messages) for trace in traces}
        during = ~aligned.largest(_is_outside(aligned, steps))
        late = added(
            late_ranks(aligned, during & ~aligned.largest(aligned.column("is_step"))),
            late_senders(traces, aligned, messages, spans),
        )
        sites = [*call_sites(aligned, during), *message_sites(traces, messages, spans)]
        sites.sort(key=lambda site: -site.seconds)
        return cls(traces, aligned, steps, sites, late, error, range_times(traces), bench)

    @property
    def num_steps(self) -> int:
        """The number of steps that all ranks have recorded."""
        return min(len(steps) for steps in self.steps.values())

    @property
    def has_optimizer(self) -> bool:
        """Whether the steps are those of an optimizer."""
        return len(step_spans(self.traces[0])) > 1

    @property
    def num_messages(self) -> int:
        """The number of sends, receives and exchanges."""
        return sum(len(trace.messages) for trace in self.traces)

    def part(self, name: str) -> float:
        """Return the mean of a field of :class:`StepTimes`, or of the whole step, in seconds."""
        steps = [step for steps in self.steps.values() for step in steps]
        if not steps:
            return 0.0
        return mean(step.end - step.begin if name == "step" else getattr(step, name) for step in steps)

    # --- text

    def text(self) -> str:
        """Return the report."""
        parts = [self._head(), self._table(), self._about_ranges(), self._about_late(), self._about_sites()]
        return "\n".join([*(line for part in parts if part for line in (*part, "")), self.advice()])

    def _head(self) -> list[str]:
        num_calls = len(self.aligned)
        messages = f", {self.num_messages} sends and receives" if self.num_messages else ""
        lines = [f"{len(self.traces)} ranks, {self.num_steps} steps, {num_calls} calls{messages}"]
        size = self.traces[0].job["size"]
        if len(self.traces) < size:
            lines.append(
                f"{size - len(self.traces)} of {size} ranks have left no trace here, so their calls cannot be lined up."
            )
        for trace in self.traces:
            if not trace.is_complete:
                lines.append(f"rank {trace.rank} did not complete its file: it was killed, or still runs")
            if trace.num_lost:
                lines.append(f"rank {trace.rank} has lost {trace.num_lost} events: they came faster than it can write")
        if self.error_seconds:
            lines.append(f"clocks of the hosts are aligned to {_milliseconds(self.error_seconds)}")
        if (early := -earliest_result(self.aligned)) > self.error_seconds:
            lines.append(
                f"the clocks are wrong by more than that: a result is {_milliseconds(early)} before the last arrival"
            )
        if not self.has_optimizer:
            lines.append("no steps of an optimizer were recorded, so the whole timeline is treated as one")
        return lines

    def _table(self) -> list[str]:
        whole = self.part("step") or 1.0
        rows = [
            ("step", "step", ""),
            ("computing and other work", "computing", ""),
            ("exposed communication", "exposed", "the program waits while data move"),
            ("waiting for a late rank", "waiting", "the program waits for another rank to arrive"),
            ("hidden communication", "hidden", "runs during the computing"),
        ]
        return [
            f"{title:26}{_milliseconds(self.part(name)):>12}{self.part(name) / whole:>7.0%}  {remark}".rstrip()
            for title, name, remark in rows
        ]

    def _about_ranges(self) -> list[str]:
        if not self.ranges:
            return []
        whole = self.part("step") or 1.0
        lines = [f"{'ranges, waits in them included':32}   per step"]
        lines += [
            f"{each.name[:32]:32}{_milliseconds(each.seconds):>11}{each.seconds / whole:>7.0%}"
            + (f"  {each.num_per_step:.3g} times" if each.num_per_step != 1 else "")
            for each in self.ranges[:_MOST_SITES]
        ]
        return lines

    def _about_late(self) -> list[str]:
        if not self.late:
            if self.num_messages:
                return ["No call or receive has waited for a rank. Sends that wait for their receivers are not judged."]
            return ["No rank was waited for."]
        lines = ["rank   last at calls   the others waited"]
        return lines + [f"{each.rank:4}{each.num_calls:16}{_milliseconds(each.seconds):>20}" for each in self.late]

    def _about_sites(self) -> list[str]:
        lines = [
            "most expensive calls, per rank:",
            f"{'seconds':>9}{'waiting':>9}{'calls':>8}{'KB/call':>10}{'GB/s':>8}"
            + (f"{'of bench':>10}" if self.bench else "")
            + "  where",
        ]
        return lines + [
            f"{site.seconds:9.3f}{site.waiting:9.3f}{site.num_calls:8}{site.num_bytes / 1024:10.1f}"
            f"{site.bytes_per_second / 1e9:8.2f}{self._of_bench(site)}  {site.collective}"
            + (f" ({site.backends})" if site.backends else "")
            + f" at {site.line}"
            for site in self.sites[:_MOST_SITES]
        ]

    def _of_bench(self, site: CallSite) -> str:
        if self.bench is None:
            return ""
        share = self.bench.share(site)
        return f"{'-':>10}" if share is None else f"{share:10.0%}"

    # --- advice

    def advice(self) -> str:
        """Return one paragraph that says what to do."""
        found = [
            text for text in (self._late_rank(), self._tiny_calls(), self._flat_calls(), self._no_overlap()) if text
        ]
        whole = self.part("step")
        if not whole:
            return "There is nothing to judge: no rank has recorded a step, a call or a message."
        if not found:
            return f"Computing takes {self.part('computing') / whole:.0%} of a step: communication is not the problem."
        return " ".join(found)

    def _late_rank(self) -> str:
        whole, total = self.part("step"), sum(each.seconds for each in self.late)
        if not whole or not self.late or self.part("waiting") < _MUCH_WAITING * whole:
            return ""
        late = self.late[0]
        share, of_two = late.seconds / total, late.seconds / sum(each.seconds for each in self.late[:2])
        if share < _MOST_OF_ALL or of_two < _MOST_OF_TWO:
            return (
                f"Waiting for late ranks takes {self.part('waiting') / whole:.0%} of a step, for different ranks by "
                f"turns (rank {late.rank}: {share:.0%} of it): the work per step varies, or the ranks share cores. "
                "Balance the batches, and check the cores with `torchmpi info`."
            )
        # A rank that has left no trace is known from the receives that waited for it.
        host = next((f" on host {trace.job['host']}" for trace in self.traces if trace.rank == late.rank), "")
        return (
            f"Rank {late.rank}{host} is slow: it arrives last at {late.num_calls} calls, {share:.0%} "
            f"of all waiting. The others lose {self.part('waiting') / whole:.0%} of each step. Look for more work on "
            "this rank (its data, logging, checkpoints), or for another program or a lower clock rate on its cores."
        )

    def _tiny_calls(self) -> str:
        if not self.has_optimizer:
            return ""
        for site in self.sites:
            per_step = site.num_calls / self.num_steps
            spec = spec_of(site.collective)
            if spec.reduces and not spec.is_rooted and per_step >= _MANY_CALLS and site.num_bytes < _TINY_BYTES:
                return (
                    f"Each step makes {per_step:.0f} calls of {site.num_bytes / 1024:.1f} KB at {site.line}: the "
                    "buckets are too small. Raise bucket_bytes (register_async_backward, synchronize_gradients), or "
                    "bucket_cap_mb of DistributedDataParallel."
                )
        return ""

    def _flat_calls(self) -> str:
        several = {
            key
            for trace in self.traces
            for key, group in trace.groups.items()
            if 1 < group["num_hosts"] < len(group["ranks"])
        }
        aligned = self.aligned
        is_flat = [
            kind.group in several
            and kind.collective in _HIERARCHICAL
            and kind.details.get("backend", "hierarchical") != "hierarchical"
            for kind in aligned.kinds
        ]
        is_long = (aligned.column("num_bytes") >= _SHORT_BYTES) & ~aligned.column("is_step")
        flat = np.unique(aligned.kind[is_long & aligned.of_kinds(is_flat).astype(bool)])
        if not len(flat):
            return ""
        names = sorted({aligned.kinds[each].details["backend"] for each in flat})
        return (
            f"Calls over several hosts run flat (backend {', '.join(names)}), so that every rank of a host sends its "
            "data over the network. Remove TORCHMPI_HIERARCHICAL=off or backend= from the calls, which lets the ranks "
            "of a host combine their data first."
        )

    def _no_overlap(self) -> str:
        whole = self.part("step")
        if not whole or self.part("exposed") < _MUCH_EXPOSED * whole:
            return ""
        if not self.has_optimizer:
            remedy = (
                "begin calls and messages (allreduce_async, send_async, recv_async) before work that does not need "
                "their results, and wait() after it; or make fewer and longer ones."
            ) + (" Sends that wait for a late receiver are part of it." if self.num_messages else "")
        else:
            remedy = (
                "register_async_backward or DistributedDataParallel, larger batches, or 16-bit gradients "
                "(compression=)."
            )
        return (
            f"Exposed communication takes {self.part('exposed') / whole:.0%} of a step, and "
            f"{_milliseconds(self.part('hidden'))} are hidden behind the computing. Overlap more of it: {remedy}"
        )

    # --- picture

    def plot(self, path: Path) -> None:
        """Draw the steps of all ranks to a PNG file; needs matplotlib."""
        figure, all_axes = plots.new_figure(10, 1 + 1.6 * len(self.steps), len(self.steps), sharex=True, sharey=True)
        tallest = 0.0
        for axes, (rank, steps) in zip(all_axes[:, 0], self.steps.items(), strict=True):
            edges, below = np.arange(len(steps) + 1) - 0.5, np.zeros(len(steps))
            for title, color, field in zip(_PARTS, _COLORS, ("computing", "exposed", "waiting"), strict=True):
                above = below + [1000 * getattr(step, field) for step in steps]
                if len(steps):  # one shape for all steps: a bar for each of them takes milliseconds
                    axes.stairs(above, edges, baseline=below, fill=True, color=color, label=title)
                below = above
            axes.set_ylabel(f"rank {rank}\nms")
            tallest = max(tallest, below.max(initial=0.0))
        if tallest:
            all_axes[0, 0].set_ylim(0, _MARGIN * tallest)
        all_axes[-1, 0].set_xlabel("step")
        plots.legend(figure, all_axes)
        plots.save(figure, path)


def _is_outside(aligned: AlignedCalls, steps: dict[int, list[StepTimes]]) -> Flags:
    """Return which parts of calls begin outside of the steps of their rank; before them are starts and compilations."""
    outside = np.zeros(len(aligned.rank), bool)
    for rank, own in steps.items():
        if own:
            begins = (aligned.begin < own[0].begin) | (aligned.begin > own[-1].end)
            outside |= (aligned.rank == rank) & begins
    return outside


def _milliseconds(seconds: float) -> str:
    """Format a time.

    >>> _milliseconds(0.00125)
    '1.25 ms'
    """
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{1000 * seconds:.0f} ms"
