"""Measure costs, and write the page of their tables to results/; for a machine that does nothing else.

    python scripts/measure_costs.py                        # of every call: results/costs-DATE.md, 40 minutes
    python scripts/measure_costs.py --page hosts           # between hosts made of namespaces, as root; 5 minutes
    python scripts/measure_costs.py --page server          # of parameter servers: results/server-DATE.md
    python scripts/measure_costs.py --sections hvd,nn      # these again; the others are those of the newest page
    python scripts/measure_costs.py --ranks 2 --seconds 2  # a short one

Runs each command of a page on 2 and on 4 ranks, in the environments of the two MPIs that `scripts/test_cpu.sh` has
made. The pages that quote a page of costs then refer to the new one, and `scripts/draw_benchmarks.py cost` draws plots.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
ENVIRONMENTS = ("openmpi", "mpich")
_SIZES = "--sizes 4,64,1K,8K,32K,256K,1M,16M"
_END = "-n {ranks} --seconds {seconds:g}"
_ALIKE = f"{_SIZES} --backends auto --memory plain"
_OF_HOROVOD = "allreduce,broadcast,allgather,reduce_scatter,alltoall,barrier"
_OF_NN = "allreduce,broadcast,allgather,reduce_scatter,alltoall,sendreceive"
_CALLS_OF_A_JOB = 200  # of all sizes between hosts, so that a job takes as long as one within a host


class Section(NamedTuple):
    """A part of a page of results: the tables of one command."""

    title: str
    command: str


def _through(interfaces: str, collectives: str = "all") -> str:
    return f"torchmpi bench --collectives {collectives} --through {interfaces} {_ALIKE} {_END}"


def _between(hosts: int, ranks: int) -> Section:
    # A rank that waits gives its core to another one: to Open MPI by this variable, which MPICH ignores.
    launch = (
        "OMPI_MCA_mpi_yield_when_idle=1 torchmpi run --rsh $HOSTS_STATE/agent --interface $HOSTS_NETWORK.0/24 --hosts "
        f"{','.join(f'h{host}:{ranks}' for host in range(hosts))} --option '--bind-to none'"
    )
    times = "benchmarks/host_times.py --peers gloo --sizes 1K,32K,256K,1M --seconds {call_seconds:g}"
    return Section(f"{hosts} hosts, {ranks} on each", f"{launch} {times}")


class Page(NamedTuple):
    """What a page of results has."""

    title: str
    introduction: str
    sections: Mapping[str, Section]
    """By the names of ``--sections``."""
    num_hosts: int = 0
    """How many hosts are made of namespaces for the commands."""


PAGES = {
    "costs": Page(
        "What each call costs",
        "Ranks on one host; in brackets half the distance of the quartiles. `auto` is torchmpi by its own names, "
        "`dist` torch.distributed on torchmpi, `hvd` its functions for Horovod's programs, `nn` those of "
        "`torchmpi.nn.functional`, `copy` a plain copy of the tensor by all ranks at once.",
        {
            "native": Section("Collectives by their own names", _through("native")),
            "async": Section("Asynchronous calls", f"{_through('native,dist,hvd')} --async"),
            "dist": Section("Through torch.distributed", _through("dist,native")),
            "hvd": Section("Through Horovod's functions", _through("hvd,native", _OF_HOROVOD)),
            "nn": Section("Through functions that autograd differentiates", _through("nn,native", _OF_NN)),
            "calls": Section("Messages and other calls", f"torchmpi bench calls {_SIZES} {_END}"),
        },
    ),
    "hosts": Page(
        "What each call costs between hosts",
        "Hosts are network namespaces of one machine, which share its cores (`HOSTS_CORES=shared scripts/hosts.sh up "
        "4`), with links without limit. In brackets: multiples of the time of the MPI library's call, and how many "
        "Python functions of the package a call enters. Each rank is the root in turn.",
        {f"{hosts}x{ranks}": _between(hosts, ranks) for hosts, ranks in ((2, 1), (2, 2), (4, 2))},
        num_hosts=4,
    ),
    "server": Page(
        "Parameter servers, one-sided MPI and torch RPC",
        "Ranks on one host; in brackets half the distance of the quartiles.",
        {
            "whole": Section("Whole tensors", f"python benchmarks/server.py --parts speed {_END}"),
            "rows": Section("Rows of a table", f"python benchmarks/server.py --parts rows {_END}"),
        },
    ),
}
_INTRODUCTION = """\
# {title}, {date}

Times are medians of alternating batches in microseconds. {introduction} The tables begin with the machine, the
versions and the binding.
Made by `scripts/measure_costs.py --page {name}`, single sections by `--sections`.

"""


def measured(environment: Path, command: Sequence[str]) -> str:
    """Return what a command prints in an environment; it may begin with variables."""
    folder = environment / "bin"
    variables = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["env", *command], env=variables, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@contextmanager
def hosts_up(number: int) -> Iterator[None]:
    """Make hosts of namespaces, which share the cores of this machine, and remove them at the end."""
    os.environ.setdefault("HOSTS_STATE", "/run/torchmpi-hosts")
    os.environ.setdefault("HOSTS_NETWORK", "10.87.21")
    script = ROOT / "scripts" / "hosts.sh"
    try:
        subprocess.run([script, "up", str(number)], env=os.environ | {"HOSTS_CORES": "shared"}, check=True)
        yield
    finally:
        subprocess.run([script, "down"], check=True)


def written(section: Section, conditions: str, tables: Sequence[tuple[str, str]]) -> str:
    """Return the text of a section, with titles of its tables.

    >>> print(written(Section("Messages", "torchmpi bench calls -n 2|4"), "Load 0.1.", [("MPICH, 2 ranks", "times")]))
    ## Messages
    <BLANKLINE>
    `torchmpi bench calls -n 2|4`
    <BLANKLINE>
    Load 0.1.
    <BLANKLINE>
    ### Messages: MPICH, 2 ranks
    <BLANKLINE>
    ```text
    times
    ```
    <BLANKLINE>
    """
    parts = [f"## {section.title}\n\n`{section.command}`\n\n{conditions}\n"]
    parts += [f"### {section.title}: {kind}\n\n```text\n{text.strip()}\n```\n" for kind, text in tables]
    return "\n".join(parts)


def sections_of(page: str) -> dict[str, str]:
    """Return the sections of a page by their titles.

    >>> sections_of("# Costs\\n\\n## A\\n\\n1\\n\\n## B\\n\\n2\\n")
    {'A': '## A\\n\\n1\\n', 'B': '## B\\n\\n2\\n'}
    """
    found = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {text.partition("\n")[0].removeprefix("## "): f"{text.strip()}\n" for text in found}


def measured_section(section: Section, options: argparse.Namespace) -> str:
    """Run the command of a section with each MPI and number of ranks, and return its text."""
    now, load = datetime.datetime.now(datetime.timezone.utc).date(), os.getloadavg()[0]
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    times = {"seconds": options.seconds, "call_seconds": options.seconds / _CALLS_OF_A_JOB}
    tables = []
    for command in dict.fromkeys(section.command.format(ranks=n, **times) for n in options.ranks.split(",")):
        for name in ENVIRONMENTS:  # the first table of a section is drawn
            print(f"{section.title}: {name}, {command}", file=sys.stderr, flush=True)
            text = measured(options.environments / name, shlex.split(os.path.expandvars(command)))
            found = re.search(r"^ *(\d+ ranks?) +([^,]+),", text, re.MULTILINE)
            tables.append((name if found is None else f"{found[2]}, {found[1]}", text))
    shown = section.command.format(ranks=options.ranks.replace(",", "|"), **times)
    conditions = f"{now}, commit `{commit}`, load of the machine before: {load:.1f}."
    return written(Section(section.title, shown), conditions, tables)


def quote(page: str, file: Path) -> None:
    """Let the pages that refer to the tables of a page of results refer to those in a file."""
    for quoting in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), RESULTS / "hosts.md"):
        text = quoting.read_text()
        new = re.sub(rf"\b{page}-\d{{4}}-\d\d-\d\d\.md", file.name, text)
        if new != text:
            quoting.write_text(new)


def main(arguments: Sequence[str]) -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", choices=PAGES, default="costs", help="default %(default)s")
    parser.add_argument(
        "--sections", help="names among " + "; ".join(",".join(page.sections) for page in PAGES.values())
    )
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks within a host, default %(default)s")
    parser.add_argument("--seconds", type=float, default=60, help="of each job, default %(default)g")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv", help="their folder, default %(default)s")
    parser.add_argument("--output", type=Path, help="the file, default results/PAGE-DATE.md")
    options = parser.parse_args(arguments)
    page, date = PAGES[options.page], datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    chosen = options.sections.split(",") if options.sections else list(page.sections)
    if unknown := [name for name in chosen if name not in page.sections]:
        parser.error(f"--sections: no {', '.join(unknown)} among {', '.join(page.sections)}")
    file = options.output or RESULTS / f"{options.page}-{date}.md"
    before = file if file.exists() else max(RESULTS.glob(f"{options.page}-*.md"), default=None)
    texts = {} if before is None else sections_of(before.read_text())
    introduction = _INTRODUCTION.format(title=page.title, date=date, introduction=page.introduction, name=options.page)
    with hosts_up(page.num_hosts) if page.num_hosts else nullcontext():
        for section in (page.sections[name] for name in chosen):
            texts[section.title] = measured_section(section, options)
            kept = [texts[each.title] for each in page.sections.values() if each.title in texts]
            file.write_text(introduction + "\n".join(kept))
    print(file)
    if options.output is None:
        quote(options.page, file)


if __name__ == "__main__":
    main(sys.argv[1:])
