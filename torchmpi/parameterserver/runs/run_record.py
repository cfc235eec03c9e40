"""The record of a run with parameter servers: its columns, its file, and what they say."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ... import files
from ..._version import __version__
from ...errors import ArgumentError
from .observed_run import KINDS, RECEIVE, SEND, STEP, WAIT

__all__ = ["RankTimes", "RunRecord", "read_run"]

CLOCK = "clock"
"""Name of the servers of :class:`torchmpi.parameterserver.Clock`, whose sends are no updates."""
COLUMNS = {
    "kind": np.int8, "rank": np.int32, "server": np.int16, "rule": np.int16, "begin": np.float64, "end": np.float64,
    "version": np.float64, "staleness": np.float64, "bytes": np.int64, "norm": np.float64, "position": np.int64,
    "checksum": np.int64,
}  # fmt: skip
_ABOUT = "about"
_FACTS = {"ranks": int, "simulated": bool, "threads": int, "torch": str, "version": str}
"""What the column `about` has beside the names."""
_FORMAT = "torchmpi run 1"
_MOST_BYTES = 16 << 30
_MOST_STALE, _MOST_SECONDS = 1_000_000, 1e9
_BAR = 40
_MOST_PAIRS, _MOST_HISTOGRAMS = 16, 5
_COLORS = {"computing": "#7fa8d1", "waiting": "#c1554d"}
Column = NDArray[Any]


class RankTimes(NamedTuple):
    """Where the time of a rank went, in seconds, from the end of its first step to its last event.

    Attributes:
        total: All of it.
        computing: Between the steps; a loop without an update has none.
        calling: In sends and receives, by whatever thread; they may overlap with the rest.
        waiting: For calls that had not ended, and for slower ranks (`max_staleness`): the rank was idle.
        num_steps: Number of steps.
    """

    total: float
    computing: float
    calling: float
    waiting: float
    num_steps: int


class RunRecord:
    """Sends, receives, waits and steps of all ranks, in the order of their ends. :func:`read_run` returns one.

    Args:
        columns: An array for each column, all of one length: `kind` (0 a send, 1 a receive, 2 a wait, 3 a step),
            `rank`, `server` and `rule` (indices of the names in `about`; -1 for none), `begin` and `end` (seconds since
            the begin of the record), `version` (rules that the server had applied before; of a step its number),
            `staleness` (rules of other ranks applied since the values were fetched), `bytes`, `norm` of the sent
            values, and with ``ordered=True`` the `position` among all calls and the `checksum` of the values; else -1
            and 0. Unknown numbers are NaN.
        about: ``ranks``, their number; ``servers`` and ``rules``, their names; ``simulated``, whether the workers were.

    Example:
        record = ps.read_run("run.npz")
        table = pandas.DataFrame(record.columns)
        print(record.text())
    """

    def __init__(self, columns: dict[str, Column], about: dict[str, Any]) -> None:
        self.columns, self.about = columns, about

    @classmethod
    def of(
        cls, events: Sequence[tuple[Any, ...]], zero: int = 0, *, num_ranks: int, simulated: bool = False
    ) -> RunRecord:
        """Make a record of the events of an observer, whose times are in nanoseconds; `zero` is the begin."""
        ordered = sorted(events, key=lambda event: event[5])
        servers = {name: number for number, name in enumerate(sorted({event[2] for event in ordered} - {""}))}
        rules = {name: number for number, name in enumerate(sorted({event[3] for event in ordered} - {""}))}
        rows = [
            (kind, rank, servers.get(server, -1), rules.get(rule, -1), (begin - zero) / 1e9, (end - zero) / 1e9, *rest)
            for kind, rank, server, rule, begin, end, *rest in ordered
        ]
        given = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
        columns = {name: np.array(values, dtype) for (name, dtype), values in zip(COLUMNS.items(), given, strict=True)}
        about = {"format": _FORMAT, "version": __version__, "ranks": num_ranks, "simulated": simulated}
        about |= {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
        return cls(columns, {**about, "servers": list(servers), "rules": list(rules)})

    @classmethod
    def joined(cls, records: Sequence[RunRecord]) -> RunRecord:
        """Return one record of those of several ranks."""
        names = {
            column: sorted({name for each in records for name in each.about[f"{column}s"]})
            for column in ("server", "rule")
        }
        columns = {name: np.concatenate([each.columns[name] for each in records]) for name in COLUMNS}
        for column, known in names.items():
            numbers = [
                np.array([*(known.index(name) for name in each.about[f"{column}s"]), -1], COLUMNS[column])
                for each in records
            ]
            parts = [own[each.columns[column]] for own, each in zip(numbers, records, strict=True)]
            columns[column] = np.concatenate(parts)
        order = np.argsort(columns["end"], kind="stable")
        about = {**records[0].about, "servers": names["server"], "rules": names["rule"]}
        return cls({name: column[order] for name, column in columns.items()}, about)

    def __len__(self) -> int:
        return len(self.columns["kind"])

    def __repr__(self) -> str:
        return f"<RunRecord: {len(self)} events of {self.num_ranks} ranks>"

    @property
    def num_ranks(self) -> int:
        """Number of ranks, or of simulated workers."""
        return int(self.about["ranks"])

    def save(self, path: files.StrPath) -> None:
        """Write the record to a file, one array per column.

        Args:
            path: The file, by custom with the suffix ``.npz``.

        Raises:
            OSError: The file cannot be written.

        Example:
            record.save("run.npz")
        """
        with files.replacing(path) as file:
            self._write(file)

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        file = io.BytesIO()
        self._write(file)
        return file.getvalue()

    def _write(self, file: BinaryIO) -> None:
        about = np.frombuffer(json.dumps(self.about).encode(), np.uint8)
        np.savez(file, **self.columns, **{_ABOUT: about})  # type: ignore[arg-type]

    @classmethod
    def from_file(cls, file: BinaryIO) -> RunRecord:
        """Read a record; raise an ArgumentError with the reason if it is none."""
        try:
            if not zipfile.is_zipfile(file):  # numpy would advise to unpickle it
                raise ValueError("it is no .npz file")
            file.seek(0)
            with np.load(file, allow_pickle=False) as loaded:
                if any(entry.compress_type for entry in loaded.zip.infolist()):
                    raise ValueError("it is compressed")
                found = {name: loaded[name] for name in loaded.files}
            about = files.parse_json(bytes(found.pop(_ABOUT, b"")))
            if not isinstance(about, dict) or about.get("format") != _FORMAT:
                raise ValueError(f"column {_ABOUT!r}: its format is not that of this version")
        except Exception as error:  # numpy parses headers with the tokens of Python, and raises what that does
            raise ArgumentError(f"it is no record of a run: {error}") from None
        problem = _problem(found, about)
        if problem:
            raise ArgumentError(f"it is damaged: {problem}")
        return cls({name: found[name] for name in COLUMNS}, about)

    def rows(self, kind: int, rank: int | None = None) -> dict[str, Column]:
        """Return the rows of one kind, and of one rank if given."""
        chosen = self.columns["kind"] == kind
        if rank is not None:
            chosen &= self.columns["rank"] == rank
        return {name: column[chosen] for name, column in self.columns.items()}

    def csv(self) -> str:
        """Return the events as a table of comma-separated values, with the names of kinds, servers and rules.

        Returns:
            The text, with the names of the columns in its first line.

        Example:
            Path("run.csv").write_text(record.csv())
        """
        names = {"kind": [*KINDS], "server": [*self.about["servers"], ""], "rule": [*self.about["rules"], ""]}
        columns = [
            [names[name][value] for value in column]
            if name in names
            else ["" if value != value else value for value in column.tolist()]
            for name, column in self.columns.items()
        ]
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(zip(*columns, strict=True))
        return file.getvalue()

    # --- staleness

    @cached_property
    def updates(self) -> dict[str, Column]:
        """The sends whose staleness is known, without those of clocks."""
        columns, names = self.columns, self.about["servers"]
        clocks = [number for number, name in enumerate(names) if name.split(" (")[0] == CLOCK]
        chosen = (columns["kind"] == SEND) & ~np.isnan(columns["staleness"]) & ~np.isin(columns["server"], clocks)
        return {name: column[chosen] for name, column in columns.items()}

    def staleness(self, rank: int | None = None) -> Column:
        """Return how many updates had each staleness, rounded to whole numbers.

        Args:
            rank: The sender. Default: all.

        Returns:
            An array of counts, for the staleness 0, 1, 2, ...

        Example:
            print(record.staleness())
        """
        sends = self.updates
        ages = sends["staleness"] if rank is None else sends["staleness"][sends["rank"] == rank]
        return np.bincount(np.maximum(np.rint(ages), 0).astype(np.int64), minlength=1)

    def staleness_of_pairs(self) -> dict[tuple[int, int], Column]:
        """Return the part of each other rank in the staleness of each sender.

        Returns:
            For each pair (sender, other): how many updates of the sender did not include 0, 1, 2, ... updates of the
            other.

        Example:
            counts = record.staleness_of_pairs()[0, 3]
        """
        found: dict[tuple[int, int], list[Column]] = {}
        columns = self.columns
        for server in np.unique(self.updates["server"]):
            chosen = (columns["kind"] == SEND) & (columns["server"] == server)
            sends = {name: column[chosen] for name, column in columns.items()}
            order = np.lexsort((sends["end"], sends["version"]))
            ranks, ages = sends["rank"][order], sends["staleness"][order]
            for sender in np.unique(ranks):
                for other, missing in _missing(ranks, ages, int(sender)):
                    found.setdefault((int(sender), other), []).append(missing)
        return {pair: np.bincount(np.concatenate(parts)) for pair, parts in sorted(found.items())}

    # --- times

    def times(self, rank: int) -> RankTimes:
        """Return where the time of a rank went.

        Args:
            rank: The rank.

        Returns:
            The times.

        Example:
            print(record.times(0).waiting)
        """
        own = self.columns["rank"] == rank
        if not own.any():
            return RankTimes(0.0, 0.0, 0.0, 0.0, 0)
        seconds = self.columns["end"] - self.columns["begin"]
        kinds = self.columns["kind"]
        steps = self.rows(STEP, rank)
        begin = float(steps["end"][0] if len(steps["end"]) else self.columns["begin"][own].min())
        total = self.columns["end"][own].max() - begin
        own &= self.columns["begin"] >= begin
        calling = seconds[own & np.isin(kinds, (SEND, RECEIVE))].sum()
        return RankTimes(
            float(total),
            float(np.maximum(steps["begin"][1:] - steps["end"][:-1], 0).sum()),
            float(calling),
            float(seconds[own & (kinds == WAIT)].sum()),
            len(steps["end"]),
        )

    def compute_times(self, rank: int) -> Column:
        """Return the seconds of computation of the steps of a rank, without those of its first one.

        They are the time since the step before, and the time of the step outside of calls and waits.

        Args:
            rank: The rank.

        Returns:
            The times, in the order of the steps.

        Example:
            print(record.compute_times(0).mean())
        """
        steps = self.rows(STEP, rank)
        begins, ends = steps["begin"][1:], steps["end"][1:]
        busy = np.zeros(len(begins))
        for kinds in ((SEND, RECEIVE), (WAIT,)):  # a wait is one for calls, and contains those of a clock
            own = (self.columns["rank"] == rank) & np.isin(self.columns["kind"], kinds)
            spans = np.sort(self.columns["begin"][own]), np.sort(self.columns["end"][own])
            busy = np.maximum(busy, _overlap(*spans, ends) - _overlap(*spans, begins))
        times: Column = np.maximum(begins - steps["end"][:-1], 0) + np.maximum(ends - begins - busy, 0)
        return times

    # --- text and plot

    def text(self) -> str:
        """Return a summary for a terminal: staleness, also by pairs of ranks, and times.

        Returns:
            Some lines.

        Example:
            print(record.text())
        """
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        sends, counts = self.updates, self.staleness()
        what = "simulated workers" if self.about["simulated"] else "ranks"
        begin, end = (self.columns[name] for name in ("begin", "end"))
        seconds = float(end.max() - begin.min()) if len(self) else 0.0
        yield f"{self.num_ranks} {what}, {seconds:.3g} s, {len(sends['rank'])} updates of known staleness"
        if len(sends["rank"]):
            ages = sends["staleness"]
            yield f"staleness: mean {ages.mean():.2f}, largest {ages.max():.0f}"
            yield from _bars(counts)
            yield from self._table_of_pairs()
        yield ""
        yield "rank   steps   seconds  computing  waiting  in calls"
        for rank in range(min(self.num_ranks, _MOST_PAIRS)):
            times = self.times(rank)
            whole = times.total or 1.0
            computing = f"{times.computing / whole:.1%}" if times.num_steps else "-"  # a loop without an update
            yield (
                f"{rank:4d} {times.num_steps:7d} {times.total:9.3g}  {computing:>8} "
                f"{times.waiting / whole:8.1%}  {times.calling / whole:8.1%}"
            )
        if self.num_ranks > _MOST_PAIRS:
            yield f"... and {self.num_ranks - _MOST_PAIRS} others"

    def _table_of_pairs(self) -> Iterator[str]:
        if self.num_ranks > _MOST_PAIRS:
            return
        means = self.mean_of_pairs()
        yield ""
        yield "updates of each rank (column) that an update of a sender (row) did not include, mean"
        yield "       " + "".join(f"{rank:7d}" for rank in range(self.num_ranks))
        for sender, row in enumerate(means):
            yield f"{sender:6d} " + "".join("      -" if np.isnan(value) else f"{value:7.2f}" for value in row)

    def mean_of_pairs(self) -> Column:
        """Return the means of :meth:`staleness_of_pairs`, a row for each sender; NaN where there is none.

        Returns:
            A square array.

        Example:
            record.mean_of_pairs().argmax(axis=1)  # who is ahead of each rank
        """
        means = np.full((self.num_ranks, self.num_ranks), np.nan)
        for (sender, other), counts in self.staleness_of_pairs().items():
            means[sender, other] = (counts * np.arange(len(counts))).sum() / counts.sum()
        return means

    def plot(self, path: files.StrPath) -> None:
        """Draw staleness and times to a PNG file; needs matplotlib.

        Args:
            path: The file.

        Raises:
            ImportError: There is no matplotlib.

        Example:
            record.plot("run.png")
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 4), layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
        subfigures: Any = figure.subfigures(1, 3)
        left, middle, right = subfigures
        counts = self.staleness()
        mean = float(self.updates["staleness"].mean()) if counts.sum() else float("nan")
        axes = left.subplots()
        axes.bar(np.arange(len(counts)), counts, width=0.9, color=_COLORS["computing"])
        axes.set(xlabel="staleness", ylabel="updates", title=f"staleness, mean {mean:.2f}")
        self._draw_pairs(middle)
        self._draw_times(right.subplots())
        canvas.print_png(str(path))

    def _draw_pairs(self, figure: Any) -> None:
        """Draw a histogram for each pair of ranks, or the means if there are many."""
        if self.num_ranks > _MOST_HISTOGRAMS:
            axes = figure.subplots()
            figure.colorbar(axes.imshow(self.mean_of_pairs(), cmap="viridis"), ax=axes)
            axes.set(xlabel="missing updates of rank", ylabel="sender", title="staleness by pair, mean")
            return
        pairs = self.staleness_of_pairs()
        panels = figure.subplots(self.num_ranks, self.num_ranks, sharex=True, sharey=True, squeeze=False)
        for (sender, other), axes in np.ndenumerate(panels):
            counts = pairs.get((sender, other), np.zeros(0))
            axes.bar(np.arange(len(counts)), counts, width=0.9, color=_COLORS["computing"])
            axes.tick_params(labelsize="x-small")
            if other == 0:
                axes.set_ylabel(f"sender {sender}", fontsize="small")
            if sender == self.num_ranks - 1:
                axes.set_xlabel(f"of rank {other}", fontsize="small")
        figure.suptitle("missing updates, by sender and rank", fontsize="medium")

    def _draw_times(self, axes: Any) -> None:
        times = [self.times(rank) for rank in range(self.num_ranks)]
        ranks, below = np.arange(self.num_ranks), np.zeros(self.num_ranks)
        for name, color in _COLORS.items():
            height = np.array([getattr(each, name) for each in times])
            axes.bar(ranks, height, bottom=below, color=color, label=name)
            below = below + height
        rest = np.maximum(np.array([each.total for each in times]) - below, 0)
        axes.bar(ranks, rest, bottom=below, color="#dddddd", label="other")
        axes.set(xlabel="rank", ylabel="seconds", title="times")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize="small", frameon=False)


def _overlap(begins: Column, ends: Column, times: Column) -> Column:
    """Return how long the intervals have lasted, in sum, until each of some times.

    >>> _overlap(np.array([1.0, 4.0]), np.array([3.0, 5.0]), np.array([0, 2, 9]))
    array([0., 1., 3.])
    """
    sums = [np.concatenate(([0.0], np.cumsum(each))) for each in (begins, ends)]
    begun, ended = (np.searchsorted(each, times) for each in (begins, ends))
    total: Column = sums[1][ended] - sums[0][begun] + (begun - ended) * times
    return total


def _missing(ranks: Column, ages: Column, sender: int) -> Iterator[tuple[int, Column]]:
    """For each other rank: how many of its updates were applied since a sender's fetch, for each update of that.

    >>> ages = np.array([0, 0, 1, 2.0])
    >>> [(other, missing.tolist()) for other, missing in _missing(np.array([1, 2, 1, 0]), ages, 0)]
    [(1, [1]), (2, [1])]
    """
    places = np.flatnonzero((ranks == sender) & ~np.isnan(ages))
    if not len(places):
        return
    others_before = np.concatenate(([0], np.cumsum(ranks != sender)))
    wanted = others_before[places] - np.rint(ages[places]).astype(np.int64)
    first = np.searchsorted(others_before, np.maximum(wanted, 0), side="right") - 1
    for other in np.unique(ranks[ranks != sender]):
        before = np.concatenate(([0], np.cumsum(ranks == other)))
        yield int(other), before[places] - before[first]


def _bars(counts: Column) -> Iterator[str]:
    """Yield a line for each staleness, or for each of at most 16 ranges of it.

    >>> list(_bars(np.array([1, 2])))
    ['       0       1 ####################', '       1       2 ########################################']
    """
    width = -(-len(counts) // 16)
    ranges = [(begin, int(counts[begin : begin + width].sum())) for begin in range(0, len(counts), width)]
    most = max(count for _, count in ranges)
    for begin, count in ranges:
        name = str(begin) if width == 1 else f"{begin}-{begin + width - 1}"
        yield f"{name:>8} {count:7d} {'#' * round(_BAR * count / most)}".rstrip()


def read_run(path: files.StrPath) -> RunRecord:
    """Read the record of a run.

    Args:
        path: A file of :func:`record` or :func:`simulate`.

    Returns:
        The record.

    Raises:
        ArgumentError: The file is no record, or it is damaged; the message names the column.
        OSError: The file cannot be read.

    Example:
        record = ps.read_run("run.npz")
    """
    try:
        with files.open_input(path, _MOST_BYTES) as file:
            return RunRecord.from_file(file)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}. Record the run again, with ps.record() or ps.simulate().") from None


def _problem(columns: dict[str, Column], about: dict[str, Any]) -> str:
    """Return the column and row that no run has written; '' if there is none."""
    length = -1
    for name, dtype in COLUMNS.items():
        column: object = columns.get(name)
        if not isinstance(column, np.ndarray) or column.ndim != 1:
            return f"column {name!r} is missing, or is no array"
        length = len(column) if length < 0 else length
        if column.dtype != dtype or len(column) != length:
            return f"column {name!r} has another type or length"
    names = {name: about.get(name) for name in ("servers", "rules")}
    wrong = [name for name, listed in names.items() if not isinstance(listed, list)]
    if wrong or not all(type(about.get(name)) is kind for name, kind in _FACTS.items()):
        return f"column {_ABOUT!r} lacks {' or '.join(wrong or _FACTS)}"
    limits = {"kind": (0, len(KINDS)), "rank": (0, about["ranks"])}
    limits |= {"server": (-1, len(about["servers"])), "rule": (-1, len(about["rules"])), "bytes": (0, 1 << 62)}
    for name, (least, end) in limits.items():
        outside = np.flatnonzero((columns[name] < least) | (columns[name] >= end))
        if len(outside):
            return f"column {name!r}, row {outside[0]}: {columns[name][outside[0]]} is not from {least} to {end - 1}"
    ages = np.nan_to_num(columns["staleness"])
    for name, bad in (
        ("begin", ~(np.abs(columns["begin"]) <= _MOST_SECONDS)),
        ("end", ~(columns["end"] >= columns["begin"]) | ~(columns["end"] <= 2 * _MOST_SECONDS)),
        ("staleness", ~(np.abs(ages) <= _MOST_STALE)),
    ):
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            return f"column {name!r}, row {row}: {columns[name][row]} is impossible"
    return ""
