"""The curves of all contestants as a PNG, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ...errors import ArgumentError
from ..layout import counted
from .arguments import PEERS, short_size
from .contestants import COPY
from .report import Row, grouped, has_figure

_PANELS = ("ranks", "verb", "dtype", "mode")
_MARKERS = "osDv^<>Pp*"
_INCHES = (6.4, 4.8)


def check_can_plot() -> None:
    """Refuse before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ArgumentError("--plot needs matplotlib. Install it with `pip install torchmpi[examples]`.")


def draw(report: Mapping[str, Any], path: str) -> None:
    """One panel for each verb, dtype and number of ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(grouped([row for row in report["rows"] if has_figure(row)], _PANELS))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(_INCHES[0] * columns, _INCHES[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, (panel, found) in zip(axes, panels, strict=False):
        _draw_panel(axis, panel, found)
    for axis in list(axes)[len(panels) :]:
        axis.set_axis_off()
    first = report["jobs"][0]["facts"]
    figure.suptitle(f"{first['mpi']}, torch {first['versions']['torch']}, {first['processor']}", fontsize="medium")
    figure.savefig(path, dpi=130)


def _draw_panel(axis: Any, panel: tuple[Any, ...], rows: Sequence[Row]) -> None:
    ranks, collective, dtype, mode = panel
    for index, ((name,), points) in enumerate(grouped(rows, ("contestant",))):
        style = ":" if name == COPY else "--" if name in PEERS else "-"
        times = [row["median_us"] for row in points]
        axis.plot([row["bytes"] for row in points], times, style, label=name,
                  marker=None if name == COPY else _MARKERS[index % len(_MARKERS)], markersize=4)  # fmt: skip
        axis.fill_between([row["bytes"] for row in points], [row["low_us"] for row in points],
                          [row["high_us"] for row in points], alpha=0.15)  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({row["bytes"] for row in rows})[::2]
    axis.set_xticks(ticks, [short_size(tick) for tick in ticks])
    axis.set_xlabel("bytes")
    axis.set_ylabel("microseconds")
    axis.set_title(f"{collective} {dtype}, {counted(ranks, 'rank')}" + (", asynchronous" if mode == "async" else ""))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
