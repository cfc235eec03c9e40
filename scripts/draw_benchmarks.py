"""Draw the plots of the documentation from the tables in results/.

    python scripts/draw_benchmarks.py             # writes docs/images/*.png
    python scripts/draw_benchmarks.py faults      # only those whose names contain a word

Titles are computed from the same tables. `torchmpi bench --plot` draws a new measurement in the same style.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from torchmpi import plots  # noqa: E402
from torchmpi.cli.bench import bench_report  # noqa: E402
from torchmpi.cli.bench.options import size  # noqa: E402

IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "results"
LABELS = {"synchronize_gradients": "torchmpi", "ddp": "ddp on gloo", "ddp's way on gloo": "ddp on gloo"}
FAULT_TABLES = {
    "Open MPI": "torchmpi, Open MPI",
    "MPICH": "torchmpi, MPICH",
    "torchrun, backend torchmpi": "torchmpi, torchrun",
    "torchrun, DistributedDataParallel on gloo": "ddp on gloo, torchrun",
}
"""Columns of results/reliability.md, and their names in plots."""


# --- reading tables -----------------------------------------------------------------------------------------


def bench_tables(page: str, heading: str) -> list[dict[str, Any]]:
    """Return the times that `torchmpi bench` printed in the first block under a heading, as rows of a report."""
    block = page.partition(heading)[2].partition("```text\n")[2].partition("\n```")[0]
    rows: list[dict[str, Any]] = []
    for title, table in re.findall(r"^(\S.*: us \(spread\))\n\n((?: .*\n?)+)", block, re.MULTILINE):
        found = re.match(r"(?:(.+?)(?: (float32))?, )?(\d+) ranks?(, asynchronous)?:", title)
        assert found, title
        call, dtype, ranks, mode = found.groups()
        head, *lines = (re.split(r" {2,}", line.strip()) for line in table.splitlines())
        for line in lines:
            cells = dict(zip(head, line, strict=False))
            if cells["bytes"] in ("0", "-"):
                continue  # a barrier, or an object
            shared = {
                "ranks": int(ranks), "verb": call or cells["call"], "dtype": dtype or "float32",
                "mode": "async" if mode else "sync", "bytes": size(cells["bytes"]),
            }  # fmt: skip
            for contestant, cell in cells.items():
                time = re.fullmatch(r"([0-9.]+) \((\d+)%\)", cell)
                if time:
                    us, spread = float(time[1]), float(time[2]) / 100
                    low, high = us * max(0.1, 1 - spread), us * (1 + spread)
                    rows.append(shared | {"contestant": contestant, "median_us": us, "low_us": low, "high_us": high})
    return rows


def training_steps(page: str) -> dict[str, dict[str, float]]:
    """Return milliseconds by network and contestant."""
    steps = {}
    for name, table in re.findall(r"^(\w+): training step, 2 ranks\n\n.*\n((?:  .+\n)+)", page, re.MULTILINE):
        rows = re.findall(r"^  (\S.*?) +([0-9.]+) +\d+%", table, re.MULTILINE)
        steps[name] = {contestant: float(ms) for contestant, ms in rows if contestant != "register_async_backward"}
    return steps


def gradients_alone(page: str) -> dict[str, float]:
    """Return milliseconds of the average of all gradients of a network, without computing."""
    table = re.search(r"^161 gradients of ResNet-50: .*\n\n.*\n((?:  .+\n)+)", page, re.MULTILINE)
    assert table, "no table of gradients in results/benchmark-tables.md"
    rows = dict(re.findall(r"^  (\S.*?) +([0-9.]+) +\d+%", table[1], re.MULTILINE))
    return {
        name: float(rows[name]) for name in ("a plain copy", "synchronize_gradients", "mpi4py", "ddp's way on gloo")
    }


def several_hosts(page: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return milliseconds by library, placement and contestant."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for placement, library, bare, steps in re.findall(
        r"^\| ([^|]+) \| (Open MPI|MPICH) \| (\d+) \([^|]*\) \| (\d+) \(", page, re.MULTILINE
    ):
        found.setdefault(library, {})[placement] = {"MPI library": float(bare), "torchmpi": float(steps)}
    return found


def fault_counts(page: str) -> dict[str, dict[str, int]]:
    """Return by library how many jobs there were, how many ended well, and how many others the page explains."""
    rows = {}
    for name in FAULT_TABLES:
        line = re.search(rf"^\| {re.escape(name)} \|(( \d+ \|){{7}})$", page, re.MULTILINE)
        assert line, f"no row of {name} in results/reliability.md"
        jobs, *_, well, explained = map(int, re.findall(r"\d+", line[1]))
        rows[name] = {"jobs": jobs, "well": well, "explained": explained}
    return rows


def fault_seconds(page: str) -> dict[str, dict[str, list[float]]]:
    """Return by fault and library the seconds until the job had ended, for moments that all libraries have."""
    found: dict[str, dict[str, list[float]]] = {}
    table = page.partition("## Side by side")[2].partition("\n## ")[0]
    for line in re.findall(r"^\| (.+) \|$", table, re.MULTILINE)[2:]:
        fault, _, *cells = (cell.strip() for cell in line.split("|"))
        seconds = [re.search(r"([0-9.]+) s", cell) for cell in cells]
        if all(seconds):
            for name, each in zip(FAULT_TABLES, seconds, strict=True):
                assert each is not None
                found.setdefault(fault.replace("`", ""), {}).setdefault(name, []).append(float(each[1]))
    return found


def stages_of_memory(page: str) -> dict[str, float]:
    """Return the MiB that each stage adds to rank 0."""
    rows = re.findall(r"^0 +(\S.*?) +\d+ +\+([0-9.]+) +\+", page.partition("benchmarks/memory.py")[2], re.MULTILINE)
    return {name: float(mib) for name, mib in rows}


def links(page: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return seconds and MB per host by heading and method, of a table of benchmarks/slow_links.py."""
    found = {}
    for heading, table in re.findall(r"^## (TCP .+)\n\n(?:.+\n\n)?```text\n.+\n((?:.+\n)+?)```", page, re.MULTILINE):
        rows = (re.split(r" {2,}", line) for line in table.splitlines())
        found[heading] = {name: {"seconds": float(row[1]), "MB": float(row[4])} for name, *row in rows}
    return found


def predicted(page: str) -> dict[str, dict[str, dict[int, float]]]:
    """Return milliseconds by size, plan and number of ranks, as benchmarks/simulate.py has printed them."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for num_bytes, ranks, plan, ms in re.findall(
        r"^ *(\d+) bytes, +(\d+) ranks +(\w+) +([0-9.]+) ms", page, re.MULTILINE
    ):
        found.setdefault(f"{int(num_bytes) >> 10} KB", {}).setdefault(plan, {})[int(ranks)] = float(ms)
    return found


# --- plots --------------------------------------------------------------------------------------------------


def bars(panel: Any, rows: Mapping[str, Mapping[str, float]], unit: str) -> None:
    """Draw a group of horizontal bars for each row, the first row on top."""
    contestants = list(next(iter(rows.values())))
    height = 0.8 / len(contestants)
    for i, contestant in enumerate(contestants):
        values = [row[contestant] for row in rows.values()]
        places = [row + (i - (len(contestants) - 1) / 2) * height for row in range(len(rows))]
        label = LABELS.get(contestant, contestant)
        drawn = panel.barh(places, values, height * 0.92, color=plots.color_of(label), label=label)
        panel.bar_label(drawn, fmt="%.0f", padding=2, fontsize=8)
    panel.set_yticks(range(len(rows)), list(rows))
    panel.tick_params(axis="y", length=0)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_xlabel(unit)
    panel.grid(visible=False)


def step_times() -> Any:
    """A training step by each library, and the gradients of one network alone."""
    page = (RESULTS / "benchmark-tables.md").read_text()
    steps, alone = training_steps(page), gradients_alone(page)
    figure, panels = plots.new_figure(11, 3.4, 1, len(steps) + 1)
    for panel, (name, values) in zip(panels[0], steps.items(), strict=False):
        bars(panel, {"": values}, "ms per step")
        panel.set_title(name, fontsize=10)
    plain, ours, bare, gloo = alone.values()
    names = {"copy": plain, "synchronize_gradients": ours, "MPI library": bare, "ddp": gloo}
    bars(panels[0][-1], {"": names}, "ms")
    panels[0][-1].set_title("ResNet-50, gradients only", fontsize=10)
    part = [values["synchronize_gradients"] / values["ddp"] for values in steps.values()]
    plots.state(
        figure,
        f"A training step takes {min(part):.0%} to {max(part):.0%} of the time of DistributedDataParallel on gloo",
        "Two ranks on a virtual machine with two cores; results/benchmark-tables.md#training",
    )
    plots.legend(figure, panels)
    return figure


def hosts() -> Any:
    """An allreduce over three hosts, by placement of the ranks."""
    found = several_hosts((RESULTS / "hosts.md").read_text())
    figure, panels = plots.new_figure(11, 3.8, 1, len(found))
    for panel, (library, rows) in zip(panels[0], found.items(), strict=True):
        named = {f"{place} ranks" if place[:2] == "2," else place: row for place, row in rows.items()}
        bars(panel, named, "ms")
        panel.set_title(library, fontsize=10)
    times = [row["torchmpi"] for rows in found.values() for row in rows.values()]
    others = [row["MPI library"] for rows in found.values() for row in rows.values()]
    plots.state(
        figure,
        f"64 MiB over three hosts take {min(times):.0f} to {max(times):.0f} ms wherever the ranks are; "
        f"the MPI library takes {min(others):.0f} to {max(others):.0f}",
        "Network namespaces of one machine, links of 1 Gbit/s, least 746 ms; results/hosts.md",
    )
    plots.legend(figure, panels)
    return figure


def faults_well() -> Any:
    """How many jobs ended well after a fault, by library."""
    counts = fault_counts((RESULTS / "reliability.md").read_text())
    figure, panels = plots.new_figure(11, 3.2)
    panel = panels[0, 0]
    well, rest, bad = [], [], []
    for row in counts.values():
        well.append(100 * row["well"] / row["jobs"])
        rest.append(100 * row["explained"] / row["jobs"])
        bad.append(100 - well[-1] - rest[-1])
    places, names = range(len(counts)), [FAULT_TABLES[name] for name in counts]
    colors = [plots.color_of("gloo" if "gloo" in name else "torchmpi") for name in names]
    drawn = panel.barh(places, well, color=colors)
    texts = [f"{row['well']} of {row['jobs']}" for row in counts.values()]
    panel.bar_label(drawn, texts, label_type="center", color="white", fontsize=9, weight="bold")
    panel.barh(places, rest, left=well, color="#a9c7e8", label="not all of this; the page says why")
    left = [a + b for a, b in zip(well, rest, strict=True)]
    panel.barh(places, bad, left=left, color="#e3e6eb", label="not all of this")
    panel.set_yticks(places, names)
    panel.invert_yaxis()
    panel.set(xlabel="% of the jobs in which one rank failed", xlim=(0, 100))
    panel.grid(visible=False)
    first, last = counts["Open MPI"], counts["torchrun, DistributedDataParallel on gloo"]
    plots.state(
        figure,
        f"After a fault {first['well']} of {first['jobs']} jobs under Open MPI end well; on gloo {last['well']} "
        f"of {last['jobs']}",
        "In time, status not 0, rank and cause named, nothing left behind; results/reliability.md",
    )
    plots.legend(figure, panels)
    return figure


def faults_seconds() -> Any:
    """Seconds from a fault of one rank to the end of the job."""
    found = fault_seconds((RESULTS / "reliability.md").read_text())
    figure, panels = plots.new_figure(11, 4.6)
    panel = panels[0, 0]
    marks = {"Open MPI": ("#2a6db0", "o"), "MPICH": ("#2a6db0", "s"), "torchrun, backend torchmpi": ("#14919b", "^")}
    for i, name in enumerate(FAULT_TABLES):
        color, marker = marks.get(name, (plots.color_of("gloo"), "D"))
        points = [
            (seconds, row + (i - 1.5) * 0.17)
            for row, by_library in enumerate(found.values())
            for seconds in by_library[name]
        ]
        filled = "none" if name == "MPICH" else color
        panel.scatter(
            *zip(*points, strict=True), s=26, marker=marker, facecolors=filled, edgecolors=color,
            label=FAULT_TABLES[name],
        )  # fmt: skip
    panel.set_yticks(range(len(found)), list(found))
    panel.invert_yaxis()
    panel.set(xscale="log", xlabel="seconds from the fault to the end of the job")
    panel.set_xticks([0.1, 0.3, 1, 3, 10, 30], ["0.1", "0.3", "1", "3", "10", "30"])
    middle = {name: median(s for by_library in found.values() for s in by_library[name]) for name in FAULT_TABLES}
    plots.state(
        figure,
        f"A job ends {middle['Open MPI']:.1f} s after a fault under Open MPI in the median, "
        f"{middle['MPICH']:.1f} s under MPICH; on gloo {middle['torchrun, DistributedDataParallel on gloo']:.1f} s",
        "Each point is a job of three ranks on a busy machine with two cores; sleep and SIGSTOP have a limit of 8 s; "
        "results/reliability.md",
    )
    plots.legend(figure, panels)
    return figure


def memory() -> Any:
    """Memory of a rank, by stage."""
    stages = stages_of_memory((RESULTS / "benchmark-tables.md").read_text())
    total, base = stages["torchmpi altogether"], stages["torch and mpi4py"]
    figure, panels = plots.new_figure(11, 2.4)
    panel, left = panels[0, 0], 0.0
    shades = {"torch and mpi4py": "#c3cad4", "start()": "#2a6db0", "first calls": "#7db3ea"}
    for name, color in shades.items():
        panel.barh([0], [stages[name]], left=left, color=color, label=f"{name}: {stages[name]:.1f}")
        left += stages[name]
    panel.set_yticks([])
    panel.set(xlabel="resident MiB of rank 0", ylim=(-0.8, 0.8))
    plots.state(
        figure,
        f"torchmpi adds {total:.0f} MiB to the {base:.0f} MiB of a rank with torch and mpi4py",
        "Two ranks, Open MPI; benchmarks/memory.py, results/benchmark-tables.md#memory-and-leaks",
    )
    plots.legend(figure, panels)
    return figure


def slow_links() -> Any:
    """Seconds until a network is trained over a slow link."""
    found = links((RESULTS / "slow-links.md").read_text())
    every_step = "synchronize_gradients"
    figure, panels = plots.new_figure(11, 4.4, 1, len(found))
    for panel, (heading, rows) in zip(panels[0], found.items(), strict=True):
        colors = [plots.color_of("gloo" if "gloo" in name else "torchmpi") for name in rows]
        drawn = panel.barh(list(rows), [row["seconds"] for row in rows.values()], color=colors)
        panel.bar_label(drawn, fmt="%.0f", padding=2, fontsize=8)
        panel.invert_yaxis()
        panel.grid(visible=False)
        panel.set_title(heading, fontsize=10)
        panel.set_xlabel("seconds until 90 % of the test images are right")
    best = {heading: min(rows.items(), key=lambda item: item[1]["seconds"]) for heading, rows in found.items()}
    times = [found[heading][every_step]["seconds"] / row["seconds"] for heading, (_, row) in best.items()]
    plots.state(
        figure,
        f"Rare exchanges train {min(times):.0f} to {max(times):.0f} times as fast as an exchange at every step",
        "100 Mbit/s, a round trip of 50 ms, 1 % of the packets lost, two hosts, one run; results/slow-links.md",
    )
    return figure


def simulated_ranks() -> Any:
    """Predicted time of an allreduce over the number of ranks, by plan."""
    found = predicted((RESULTS / SIMULATED).read_text())
    names = {"hierarchical": "torchmpi, steps over hosts", "p2p": "torchmpi, p2p on all ranks"}
    figure, panels = plots.new_figure(1 + 3.6 * len(found), 4.2, 1, len(found))
    ratios = []
    for panel, (title, by_plan) in zip(panels[0], found.items(), strict=True):
        for name, times in by_plan.items():
            panel.plot(
                list(times), list(times.values()), "-" if name in names else "--", marker="o", markersize=3.5,
                color=plots.color_of(name), label=names.get(name, name),
            )  # fmt: skip
        panel.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms, predicted")
        panel.set_title(title, fontsize=10)
        most = max(by_plan["hierarchical"])
        others = min(times[most] for name, times in by_plan.items() if name not in names)
        ratios.append(f"{others / by_plan['hierarchical'][most]:.1f} times at {title}")
    plots.state(
        figure,
        f"Speed of steps over hosts on {most:,} ranks, over the best flat algorithm: {', '.join(ratios)}",
        f"8 ranks on a host; virtual time, no measurement; results/{SIMULATED}",
    )
    plots.legend(figure, panels)
    return figure


def bench_facts(page: str, heading: str) -> dict[str, Any]:
    """Return MPI, torch and processor of the first measurement under a heading, or of the page."""
    found = []
    for pattern in (r"(?:Open MPI|MPICH) [\d.]+\d", r"(?<=orch )[\d.]+\d", r"(?<=processor  ).*|AMD EPYC"):
        first = re.search(pattern, page.partition(heading)[2]) or re.search(pattern, page)
        assert first, (heading, pattern)
        found.append(first[0])
    mpi, torch, processor = found
    return {"mpi": mpi, "versions": {"torch": torch}, "processor": processor}


def bench_plot(file: str, heading: str) -> Callable[[Path], None]:
    """Return a function that draws tables of `torchmpi bench` as its option --plot does."""

    def draw(path: Path) -> None:
        page = (RESULTS / file).read_text()
        report = {"jobs": [{"facts": bench_facts(page, heading)}], "rows": bench_tables(page, heading)}
        bench_report.draw(report, str(path))

    return draw


def drawn(make: Callable[[], Any]) -> Callable[[Path], None]:
    return lambda path: plots.save(make(), path)


COSTS, SIMULATED = (max(file.name for file in RESULTS.glob(f"{name}-*.md")) for name in ("costs", "simulated-ranks"))
PLOTS: dict[str, Callable[[Path], None]] = {
    "bench_train": drawn(step_times),
    "bench_hosts": drawn(hosts),
    "faults_well": drawn(faults_well),
    "faults_seconds": drawn(faults_seconds),
    "memory": drawn(memory),
    "slow_links": drawn(slow_links),
    "simulated_ranks": drawn(simulated_ranks),
    "bench_allreduce": bench_plot("benchmark-tables.md", "## Allreduce within a host"),
    "cost_native": bench_plot(COSTS, "## Collectives by their own names"),
    "cost_async": bench_plot(COSTS, "## Asynchronous calls"),
    "cost_dist": bench_plot(COSTS, "## Through torch.distributed"),
    "cost_hvd": bench_plot(COSTS, "## Through Horovod's functions"),
    "cost_nn": bench_plot(COSTS, "## Through functions that autograd differentiates"),
    "cost_calls": bench_plot(COSTS, "## Messages and other calls"),
}


def main(words: Sequence[str]) -> None:
    for name, draw in PLOTS.items():
        if not words or any(word in name for word in words):
            draw(IMAGES / f"{name}.png")
            print(f"docs/images/{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
