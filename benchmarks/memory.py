"""Measure in new processes the resident memory that `import torchmpi`, start() and the first calls add.

The base is a process that has imported torch and mpi4py. The part that consists of shared segments is reported too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torchmpi.cli.bench import options as parsing
from torchmpi.cli.bench.bench_report import header
from torchmpi.cli.bench.command import measure_and_print, run_jobs, run_script
from torchmpi.cli.formatting import table
from torchmpi.cli.launching import PACKAGE_PARENT
from torchmpi.errors import ArgumentError
from torchmpi.launch import launcher

_MIB = 1 << 20
_MEMORY = ("resident_bytes", "shared_resident_bytes", "segment_bytes")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="examples:\n  python benchmarks/memory.py\n  python benchmarks/memory.py -n 4 --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsing.add_ranks(parser.add_argument)
    parsing.add_json(parser.add_argument, "memory")
    parser.set_defaults(kind="memory")
    return parser


def run(options: argparse.Namespace) -> int:
    """Measure, print and save the results."""
    if launcher.is_rank():
        raise ArgumentError("this script starts jobs of its own. Run it without mpirun.")
    program = [str(Path(__file__).with_name("memory_process.py")), str(PACKAGE_PARENT)]
    start_jobs = partial(run_jobs, program=program)
    return measure_and_print(options, as_text, start_jobs=start_jobs, title="benchmarks/memory.py")


def as_text(report: Mapping[str, Any]) -> str:
    """Format the memory that each stage adds, on each rank."""
    rows = [["rank", "after", "resident MiB", "added", "of it shared", "shared segments mapped MiB"]]
    for row in report["rows"]:
        resident, _, segments = (row[name] / _MIB for name in _MEMORY)
        added, added_shared = (row[f"{name}_added"] / _MIB for name in _MEMORY[:2])
        rows.append([str(row["rank"]), row["part"], f"{resident:.0f}", f"{added:+.1f}", f"{added_shared:+.1f}",
                     f"{segments:.1f}"])  # fmt: skip
    note = "added: by this stage; the last line of a rank: by all of torchmpi."
    return "\n".join([*header(report), "", *table(rows), "", note])


def memory_rows(ranks: int, rank: int, stages: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    """Return one row for each stage, and one for all stages after the first."""
    rows: list[dict[str, Any]] = []
    names = list(stages)
    pairs = list(zip(names[1:], names, strict=False))
    for name, before in [(names[0], None), *pairs]:
        rows.append(_stage_row(ranks, rank, name, stages[name], stages[before] if before else None))
    rows.append(_stage_row(ranks, rank, "torchmpi altogether", stages[names[-1]], stages[names[0]]))
    return rows


def _stage_row(
    ranks: int, rank: int, name: str, now: Mapping[str, int], before: Mapping[str, int] | None
) -> dict[str, Any]:
    added = {f"{key}_added": now[key] - (before[key] if before else 0) for key in _MEMORY}
    return {"ranks": ranks, "rank": rank, "part": name, **{key: now[key] for key in _MEMORY}, **added}


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), run))
