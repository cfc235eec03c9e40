"""Measure costs, and write the page of their tables to results/; for a machine that does nothing else.

    python scripts/measure_costs.py                        # of every call: results/costs-DATE.md, half an hour
    python scripts/measure_costs.py --page server          # of parameter servers: results/server-DATE.md
    python scripts/measure_costs.py --ranks 2 --seconds 2  # a short one

Runs each command of a page on 2 and on 4 ranks, in the environments of the two MPIs that `scripts/test_cpu.sh` has
made. The pages that quote a page of costs then refer to the new one, and `scripts/draw_benchmarks.py cost` draws plots.
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ("openmpi", "mpich")
_SIZES = "--sizes 4,64,1K,8K,32K,256K,1M,16M"
_ALL = f"torchmpi bench --collectives all {_SIZES} --backends auto --memory plain"


class Page(NamedTuple):
    """What a page of results has."""

    title: str
    introduction: str
    sections: Mapping[str, str]
    """The commands, by the title of their tables."""
    quoted_in: str
    """The page that refers to the newest one of these."""


PAGES = {
    "costs": Page(
        "What each call costs",
        "`auto` is torchmpi by its own names, `dist` through torch.distributed, `hvd` through its functions for "
        "Horovod's programs, `copy` a plain copy of the tensor by all ranks at once.",
        {
            "Collectives by their own names": _ALL,
            "Asynchronous calls": f"{_ALL} --async --through native,dist",
            "Through torch.distributed and Horovod's functions": f"{_ALL} --through dist,hvd",
            "Messages and other calls": f"torchmpi bench calls {_SIZES}",
        },
        "docs/costs.md",
    ),
    "server": Page(
        "Parameter servers, one-sided MPI and torch RPC",
        "All contestants of a table are timed in one job, in alternating batches.",
        {
            "Whole tensors": "python benchmarks/server.py --parts speed",
            "Rows of a table": "python benchmarks/server.py --parts rows",
        },
        "docs/benchmarks.md",
    ),
}
_INTRODUCTION = """\
# {title}, {date}

Ranks on one host; the tables begin with the machine, the versions and the binding. Times are medians of alternating
batches in microseconds, with half the distance of the quartiles. {introduction}
Load of the machine before the first job: {load:.1f}. Made by `{command}`.
"""


def measured(environment: Path, command: Sequence[str]) -> str:
    """Return what a command prints in an environment."""
    folder = environment / "bin"
    variables = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    whole = [str(folder / command[0]), *command[1:]]
    return subprocess.run(whole, env=variables, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def written(tables: Mapping[tuple[str, str], Sequence[tuple[str, str]]], **introduction: object) -> str:
    """Return a page: by title and command, the tables with their titles.

    >>> facts = dict.fromkeys(("title", "date", "introduction", "command"), "") | {"load": 0.1}
    >>> tables = {("Messages", "torchmpi bench calls -n 2"): [("MPICH, 2 ranks", "times")]}
    >>> print(written(tables, **facts).partition("## ")[2])
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
    parts = [_INTRODUCTION.format(**introduction)]
    for (title, command), found in tables.items():
        parts.append(f"## {title}\n\n`{command}`\n")
        parts += [f"### {title}: {kind}\n\n```text\n{text.strip()}\n```\n" for kind, text in found]
    return "\n".join(parts)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", choices=PAGES, default="costs", help="default %(default)s")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, default %(default)s")
    parser.add_argument("--seconds", type=float, default=60, help="of each job, default %(default)g")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv", help="their folder, default %(default)s")
    parser.add_argument("--output", type=Path, help="the file, default results/PAGE-DATE.md")
    options = parser.parse_args()
    date, load = datetime.datetime.now(datetime.timezone.utc).date().isoformat(), os.getloadavg()[0]
    page, numbers, tables = PAGES[options.page], options.ranks.split(","), {}
    for title, command in page.sections.items():
        rest, found = f"{command} --seconds {options.seconds:g}", []
        for ranks in numbers:  # the first table of a section is drawn
            for name in ENVIRONMENTS:
                print(f"{title}: {name}, {ranks} ranks", file=sys.stderr, flush=True)
                text = measured(options.environments / name, [*rest.split(), "-n", ranks])
                mpi = re.search(rf"^ *{ranks} ranks +([^,]+),", text, re.MULTILINE)
                found.append((f"{name if mpi is None else mpi[1]}, {ranks} ranks", text))
        tables[title, f"{rest} -n {'|'.join(numbers)}"] = found
    file = options.output or ROOT / "results" / f"{options.page}-{date}.md"
    facts = {"title": page.title, "introduction": page.introduction, "date": date, "load": load}
    file.write_text(written(tables, command=" ".join(["python scripts/measure_costs.py", *sys.argv[1:]]), **facts))
    print(file)
    if options.output is None:
        quoting = ROOT / page.quoted_in
        new = re.sub(rf"results/{options.page}-[\d-]+\.md", f"results/{file.name}", quoting.read_text())
        quoting.write_text(new)


if __name__ == "__main__":
    main()
