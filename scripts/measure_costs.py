"""Measure what every call costs, and write the page of its tables to results/; for a machine that does nothing else.

    python scripts/measure_costs.py                        # results/costs-DATE.md, half an hour
    python scripts/measure_costs.py --ranks 2 --seconds 2  # a short one

Runs each command below on 2 and on 4 ranks, in the environments of the two MPIs that `scripts/test_cpu.sh` has made.
The page of the costs then refers to the new tables, and `scripts/draw_benchmarks.py cost` draws its plots from them.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "costs.md"
ENVIRONMENTS = ("openmpi", "mpich")
_SIZES = "--sizes 4,64,1K,8K,32K,256K,1M,16M"
_ALL = f"--collectives all {_SIZES} --backends auto --memory plain"
SECTIONS = {
    "Collectives by their own names": _ALL,
    "Asynchronous calls": f"{_ALL} --async --through native,dist",
    "Through torch.distributed and Horovod's functions": f"{_ALL} --through dist,hvd",
    "Messages and other calls": f"calls {_SIZES}",
}
"""The arguments of `torchmpi bench`, by the title of their tables."""
_INTRODUCTION = """\
# What each call costs, {date}

Ranks on one host; the tables begin with the machine, the versions and the binding. Times are medians of alternating
batches in microseconds, with half the distance of the quartiles. `auto` is torchmpi by its own names, `dist` through
torch.distributed, `hvd` through its functions for Horovod's programs, `copy` a plain copy of the tensor by all ranks at
once. Load of the machine before the first job: {load:.1f}. Made by `python scripts/measure_costs.py`.
"""


def measured(environment: Path, arguments: Sequence[str]) -> str:
    """Return what `torchmpi bench` of an environment prints."""
    folder = environment / "bin"
    variables = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [str(folder / "torchmpi"), "bench", *arguments]
    return subprocess.run(command, env=variables, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def page(tables: Mapping[tuple[str, str], Sequence[tuple[str, str]]], date: str, load: float) -> str:
    """Return the page: by title and arguments, the tables with their titles.

    >>> print(page({("Messages", "calls -n 2"): [("MPICH, 2 ranks", "times")]}, "2026-11-30", 0.1).partition("## ")[2])
    Messages
    <BLANKLINE>
    `torchmpi bench calls -n 2`
    <BLANKLINE>
    ### Messages: MPICH, 2 ranks
    <BLANKLINE>
    ```text
    times
    ```
    <BLANKLINE>
    """
    parts = [_INTRODUCTION.format(date=date, load=load)]
    for (title, arguments), found in tables.items():
        parts.append(f"## {title}\n\n`torchmpi bench {arguments}`\n")
        parts += [f"### {title}: {kind}\n\n```text\n{text.strip()}\n```\n" for kind, text in found]
    return "\n".join(parts)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, default %(default)s")
    parser.add_argument("--seconds", type=float, default=60, help="of each job, default %(default)g")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv", help="their folder, default %(default)s")
    parser.add_argument("--output", type=Path, help="the file, default results/costs-DATE.md")
    options = parser.parse_args()
    date, load = datetime.datetime.now(datetime.timezone.utc).date().isoformat(), os.getloadavg()[0]
    numbers = options.ranks.split(",")
    tables = {}
    for title, arguments in SECTIONS.items():
        rest, found = f"{arguments} --seconds {options.seconds:g}", []
        for ranks in numbers:  # the first table of a section is drawn
            for name in ENVIRONMENTS:
                print(f"{title}: {name}, {ranks} ranks", file=sys.stderr, flush=True)
                text = measured(options.environments / name, [*rest.split(), "-n", ranks])
                mpi = re.search(rf"^ *{ranks} ranks +([^,]+),", text, re.MULTILINE)
                found.append((f"{name if mpi is None else mpi[1]}, {ranks} ranks", text))
        tables[title, f"{rest} -n {'|'.join(numbers)}"] = found
    file = options.output or ROOT / "results" / f"costs-{date}.md"
    file.write_text(page(tables, date, load))
    print(file)
    if options.output is None:
        PAGE.write_text(re.sub(r"results/costs-[\d-]+\.md", f"results/{file.name}", PAGE.read_text()))


if __name__ == "__main__":
    main()
