"""The style of all plots: one color for each contestant everywhere, titles that state a finding, no display."""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Iterable
from typing import Any

COLORS = {
    "torchmpi": "#2a6db0",
    "auto": "#2a6db0",  # torchmpi, with the backend that it chooses
    "auto shared": "#7db3ea",
    "auto async": "#3f51b5",
    "auto launch": "#123f6b",
    "hierarchical": "#2a6db0",
    "dist": "#14919b",  # torch.distributed on torchmpi
    "ddp on torchmpi": "#14919b",
    "dist async": "#17becf",
    "hvd": "#d16ba5",  # torchmpi's functions for Horovod's programs
    "nn": "#8c564b",  # torchmpi.nn.functional
    "MPI library": "#2b8551",
    "mpi4py": "#2b8551",
    "mpi4py in place": "#a7c957",
    "mpi": "#8ac7a2",  # the backend of torchmpi
    "gloo": "#c4701c",
    "ddp on gloo": "#c4701c",
    "torchmpi gloo": "#ecb988",
    "horovod": "#7650b0",
    "nccl": "#b0306a",
    "torchmpi nccl": "#e08ab0",
    "shm": "#5a6fc0",
    "p2p": "#b8970f",
    "ipc": "#6b7f1e",
    "copy": "#8a94a3",
    "fill": "#c3cad4",
    "no communication": "#c3cad4",
}
"""The color of each contestant, by the names that tables and files have."""
_OTHERS = ("#8c564b", "#d62728", "#e377c2", "#17becf", "#bcbd22", "#3b3b98", "#00794c")
_DPI = 110
_DIM = "#535d6b"
_TITLE = {"fontsize": 12, "weight": "bold", "color": "#1c2430"}
_INCHES_OF_CHARACTER = 0.105
_INCHES_OF_LABEL, _INCHES_OF_SAMPLE = 0.075, 0.5
"""Of a character of a legend, and of the line and the space beside it."""


def color_of(contestant: str) -> str:
    """Return the color of a contestant, which depends on its name alone.

    >>> color_of("gloo") == color_of("ddp on gloo"), color_of("a new one") == color_of("a new one")
    (True, True)
    """
    return COLORS.get(contestant) or _OTHERS[zlib.crc32(contestant.encode()) % len(_OTHERS)]


def colors_of(contestants: Iterable[str]) -> dict[str, str]:
    """Return the colors of the contestants of one plot: those of :func:`color_of`, but all different.

    >>> len(set(colors_of(["ASGD", "DC-ASGD"]).values()))
    2
    """
    found: dict[str, str] = {}
    for name in contestants:
        own = color_of(name)
        found[name] = next((color for color in (own, *_OTHERS) if color not in found.values()), own)
    return found


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return a figure of matplotlib that needs no display, and its panels as an array of rows and columns."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    return figure, panels


def state(figure: Any, finding: str, source: str = "") -> None:
    """Give a figure a title that says what it shows, and below it the machine or the file that it is from."""
    lines = textwrap.wrap(finding, int(figure.get_figwidth() / _INCHES_OF_CHARACTER))
    figure.suptitle("\n".join([*lines, "\n"] if source else lines), x=0.01, ha="left", **_TITLE)
    if source:  # under the title, whatever the height of the figure is
        y = 1 - (0.22 + 0.2 * len(lines)) / figure.get_figheight()
        figure.text(0.01, y, source, fontsize=8.5, color=_DIM, va="center")


def legend(figure: Any, panels: Any) -> None:
    """Add one legend for all panels, below them, with as many columns as fit."""
    from numpy import array_split

    found: dict[str, Any] = {}
    for panel in panels.flat:
        for line, name in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(name, line)
    columns = min(6, len(found))
    while columns > 1:
        widths = (max(map(len, part)) for part in array_split(list(found), columns))
        if sum(_INCHES_OF_SAMPLE + _INCHES_OF_LABEL * width for width in widths) <= figure.get_figwidth():
            break
        columns -= 1
    figure.legend(found.values(), found, loc="outside lower left", ncols=columns, frameon=False, fontsize=9)


def save(figure: Any, path: object) -> None:
    """Write a figure in the format of the suffix of a path; PNG if that is none of matplotlib's."""
    from matplotlib import rc_context

    suffix = str(path).rpartition(".")[2].lower()
    known = figure.canvas.get_supported_filetypes()
    options: dict[str, Any] = {"metadata": {"Date": None}} if suffix == "svg" else {}  # equal figures, equal files
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "torchmpi"}):
        figure.savefig(str(path), dpi=_DPI, format=suffix if suffix in known else "png", **options)
