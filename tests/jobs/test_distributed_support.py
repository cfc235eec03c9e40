"""To a reader of results/torch-distributed-support.md: each line is a check, run here and compared.

``REWRITE_TABLES=1 python -m pytest tests/jobs/test_distributed_support.py`` writes the results to the page.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.launching import ROOT, job_environment

pytestmark = pytest.mark.any_mpi

PAGE = ROOT / "docs" / "torch-distributed.md"
TABLES = ROOT / "results" / "torch-distributed-support.md"
DESIGN = ROOT / "docs" / "design" / "torch-distributed.md"
PACKAGE = ROOT / "torchmpi" / "distributed"
DRIVER = Path(__file__).with_name("distributed_support") / "driver.py"
BEGIN, END = "<!-- tables: made by tests/jobs/test_distributed_support.py -->\n", "<!-- end of tables -->\n"
COLUMNS = ("torchmpi", "gloo")
WITHOUT_MPI = ("Errors", "Groups", "Messages", "Objects", "Operations and dtypes", "Work objects")
"""The sections of features for which ranks without an MPI have other code."""
SINCE = "Since PyTorch"
"""The beginning of the titles of sections with functions that a version of torch later than that of the tables has."""
SECONDS = 160
NO_FEATURES = {
    # Availability of libraries, the start of each check, and names without communication.
    "is_gloo_available", "is_mpi_available", "is_nccl_available", "is_ucc_available", "is_xccl_available",
    "is_torchelastic_launched", "get_debug_level", "init_process_group", "reduce_op", "group",
}  # fmt: skip

NEEDS_NCCL = ("Communication hooks", "`bf16_compress_hook`")
"""Works if PyTorch has been built with NCCL; the page has what its builds for CPUs do."""

Key = tuple[str, str]
Cells = dict[Key, str]
"""By section and name of a feature."""


# --- the page -------------------------------------------------------------------------------------------------------


def section_of_page(title: str, page: Path = PAGE) -> str:
    """Return the text under a heading of a page."""
    return page.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def shown() -> str:
    """Return the tables as they are now."""
    return TABLES.read_text().split(BEGIN)[1].split(END)[0]


def cells_of(tables: str, column: str) -> Cells:
    """A column of the tables."""
    section, found = "", {}
    for line in tables.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| |"):
            name, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
            found[section, name] = cells[COLUMNS.index(column)]
    return found


def tables_of(columns: dict[str, Cells]) -> str:
    """The columns as tables, one for each section."""
    lines, section = [], None
    for key in columns["torchmpi"]:
        if key[0] != section:
            section = key[0]
            lines += ["", f"## {section}", "", "| | `torchmpi` | `gloo` |", "|---|---|---|"]
        lines.append(f"| {key[1]} | {' | '.join(columns[name].get(key, '?') for name in COLUMNS)} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def rewrite(column: str, fresh: Cells) -> None:
    """Replace a column on the page and keep the cells of the other column for the same features."""
    columns = {name: cells_of(shown(), name) for name in COLUMNS}
    columns = {name: {key: cells.get(key, "?") for key in fresh} for name, cells in columns.items()} | {column: fresh}
    begin, rest = TABLES.read_text().split(BEGIN)
    TABLES.write_text(begin + BEGIN + tables_of(columns) + END + rest.split(END)[1])


# --- results -----------------------------------------------------------------------------------------------------


def cells_from(rows: Path) -> Cells:
    """Read the results of the driver; all checks of a feature form one cell."""
    outcomes: dict[Key, dict[str, list[str | None]]] = {}
    for section, title, reason in json.loads(rows.read_text()):
        name, _, mode = title.partition("|")
        outcomes.setdefault((section, name), {}).setdefault(mode, []).append(reason)
    return {key: cell_of(modes) for key, modes in outcomes.items()}


def cell_of(modes: dict[str, list[str | None]]) -> str:
    """Return ``yes``, or ``no`` with the reason of the first failure; both if asynchronous calls differ."""
    answers = {}
    for mode, reasons in modes.items():
        reason = next(("ends the process" if reason is None else reason for reason in reasons if reason != ""), "")
        answers[mode] = "no: " + reason.replace("|", "\\|").replace("<", "\\<") if reason else "yes"
    if len(set(answers.values())) == 1:
        return next(iter(answers.values()))
    return ", ".join(f"{mode} {answer}" for mode, answer in answers.items())


def how_it_differs(column: str, fresh: Cells) -> str:
    """Lines of the page and fresh ones."""
    columns = {name: cells_of(shown(), name) for name in COLUMNS} | {column: fresh}
    page, made = shown().splitlines(), tables_of(columns).splitlines()
    return "\n".join(difflib.unified_diff(page, made, "page", "fresh", lineterm=""))


def skip_with_another_torch() -> None:
    tested = re.search(r"PyTorch (\d+\.\d+)", TABLES.read_text())
    assert tested is not None
    if not torch.__version__.startswith(tested[1] + "."):
        pytest.skip(f"the tables are for {tested[0]}, this is {torch.__version__}")


# The column of gloo changes only with the version of torch, which is one of the reasons to write the tables anew.
@pytest.mark.parametrize("column", COLUMNS if os.environ.get("REWRITE_TABLES") else COLUMNS[:1])
def test_the_tables_are_current(column, launch, tmp_path):
    skip_with_another_torch()
    result = launch(2, [DRIVER, column, tmp_path], timeout=SECONDS)
    rows = tmp_path / "rows.json"
    assert rows.exists(), result.output
    fresh = cells_from(rows)
    fatal = [name for (_, name), cell in fresh.items() if "ends the process" in cell]
    assert len(fatal) == (result.returncode != 0), f"{fatal}\n{result.output}"
    if dist.is_nccl_available():
        assert fresh[NEEDS_NCCL] == "yes"
        fresh[NEEDS_NCCL] = cells_of(shown(), column)[NEEDS_NCCL]
    if os.environ.get("REWRITE_TABLES"):
        rewrite(column, fresh)
    assert cells_of(shown(), column) == fresh, how_it_differs(column, fresh)


def test_torchrun_supports_the_same_features(tmp_path, warm_python):
    """What is above calls and messages does not depend on how ranks were started; PyTorch determines the rendezvous."""
    skip_with_another_torch()
    command = [*warm_python, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    begun = [*command, *warm_python, DRIVER, "torchmpi", tmp_path, f"^({'|'.join(WITHOUT_MPI)}):"]
    done = subprocess.run(
        ["timeout", "-k", "5", str(SECONDS), *map(str, begun)], capture_output=True, text=True, env=job_environment({})
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    fresh = cells_from(tmp_path / "rows.json")
    expected = {key: cell for key, cell in cells_of(shown(), "torchmpi").items() if key[0] in WITHOUT_MPI}
    assert fresh == expected, how_it_differs("torchmpi", fresh)


def test_functions_that_the_version_of_the_tables_lacks_work(launch, tmp_path):
    """Regression: gather_single, new in torch 2.14, found no backend."""
    lacking = [name for section, name in cells_of(shown(), "torchmpi") if section.startswith(SINCE)]
    present = [name for name in lacking if hasattr(dist, name.strip("`"))]
    if lacking and not present:
        pytest.skip(f"torch {torch.__version__} has none of {', '.join(lacking)}")
    result = launch(2, [DRIVER, "torchmpi", tmp_path, f"^{SINCE}"], timeout=SECONDS)
    assert result.returncode == 0, result.output
    fresh = {name: cell for (_, name), cell in cells_from(tmp_path / "rows.json").items()}
    assert {name: fresh[name] for name in present} == dict.fromkeys(present, "yes"), result.output


# --- explanations on the page --------------------------------------------------------------------------------------


def test_every_no_is_explained():
    text = section_of_page("Unsupported features")
    names = [name for (_, name), cell in cells_of(shown(), "torchmpi").items() if cell != "yes"]
    missing = [name for name in names if re.findall(r"`[^`]+`", name)[0] not in text]
    assert names and not missing, f"the page does not say why these do not work: {missing}"


def test_every_function_of_torch_distributed_is_in_the_tables():
    module = dist.distributed_c10d
    functions = {name for name in module.__all__ if name.islower() and callable(getattr(module, name))} - NO_FEATURES
    names = " ".join(name for _, name in cells_of(shown(), "torchmpi"))
    missing = [name for name in sorted(functions) if not re.search(rf"`{name}[`(]", names)]
    assert len(functions) > 30 and not missing, f"the tables lack {missing}"


def test_the_private_names_of_torch_are_on_the_page():
    text = section_of_page("Private names", DESIGN)
    listed = set(re.findall(r"\b_[a-zA-Z]\w+|\b[A-Z]\w+Options\b", text))
    needed = private_names_in_torch_names() | overridden_private_names()
    assert len(needed) > 15
    assert needed <= listed, f"the page lacks {sorted(needed - listed)}"
    files = [
        *PACKAGE.glob("*.py"),
        *(PACKAGE.parent / name for name in ("timeline/torch_profiler.py", "tensors/modes.py")),
    ]
    sources = "\n".join(path.read_text() for path in files)
    unused = sorted(name for name in listed if not re.search(rf"\b{name}\b", sources))
    assert not unused, f"the page names {unused}, which nothing uses"


def private_names_in_torch_names() -> set[str]:
    """Return the names that torch_names.py uses: all of the bindings, elsewhere those that begin with an underscore."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / "torch_names.py").read_text())):
        words = []
        while isinstance(node, ast.Attribute):
            words.append(node.attr)
            node = node.value
        if words and isinstance(node, ast.Name):
            if node.id == "c10d" and words[-1].endswith("Options"):
                found.add(words[-1])
            elif node.id in ("torch", "dist", "module"):
                found |= {word for word in words if re.match(r"_[a-zA-Z]", word)}
    return found


def overridden_private_names() -> set[str]:
    """Return the private methods of torch that the process group overrides."""
    from torchmpi.distributed import process_group, work

    pairs = [(process_group.ProcessGroup, dist.ProcessGroup)]
    pairs += [(kind, dist.Work) for kind in (work.CompletedWork, work.PendingWork, work.MessageWork)]
    return {
        name
        for ours, theirs in pairs
        for kind in ours.__mro__
        if kind.__module__.startswith("torchmpi.")
        for name in vars(kind)
        if re.match(r"_[a-zA-Z]", name) and hasattr(theirs, name)
    }
