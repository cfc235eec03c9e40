"""To a reader of the documentation: snippets run, links and modules exist, and tables agree with the code."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

import torchmpi as mpi
import torchmpi.nn
import torchmpi.parameterserver
from torchmpi import config
from torchmpi.config import PREFIX
from torchmpi.errors import TorchMPIError
from torchmpi.tensors import dtypes

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [
    *DOCS,
    *sorted((ROOT / "results").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
]
# Blocks marked `python` are run. Other names, such as `py`, are not allowed for snippets.
LANGUAGES = {"python", "console", "text", "sh", "lua", "diff", "toml"}

# Runs snippets in one job, each in a namespace of its own, as if it were a program. Starting a job for each page takes
# longer than all snippets together.
DRIVER = """
import json, sys
import torch.distributed as dist
import torchmpi as mpi
from torchmpi.session import runtime

blocks = json.load(open(sys.argv[1]))
for block in blocks:
    # Blank lines in front give tracebacks the file and the line numbers of the page.
    code = compile("\\n" * (block["line"] - 1) + block["code"], block["page"], "exec")
    try:
        exec(code, {"__name__": "__main__"})
        assert not dist.is_initialized(), "it leaves a process group behind: destroy_process_group()"
    except BaseException:
        sys.stderr.write(f"snippet failed: {block['page']}:{block['line']}\\n")
        raise
    if runtime.is_running():
        mpi.stop()
    sys.stdout.write(f"ran {block['page']}:{block['line']}\\n")
"""


class Block(NamedTuple):
    """One fenced block; `line` is where its content begins."""

    page: Path
    line: int
    language: str
    code: str
    before: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        before = next((text for text in reversed(lines[:opened]) if text.strip()), "")
        code = "\n".join(lines[opened + 1 : number]) + "\n"
        yield Block(page, opened + 2, lines[opened].removeprefix("```").strip(), code, before)
        opened = None
    assert opened is None, f"{page}:{opened}: the block is never closed"


def snippets_of(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "python" and untested_reason(block) is None]


def untested_reason(block: Block) -> str | None:
    found = re.fullmatch(r"<!-- no-test(?:: *(.*))? -->", block.before.strip())
    return None if found is None else found[1] or ""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page with its blocks emptied, so that line numbers remain."""
    empty = lambda block: "\n" * block[0].count("\n")  # noqa: E731
    return re.sub(r"^```.*?^```$", empty, page.read_text(), flags=re.MULTILINE | re.DOTALL)


# ---- snippets ------------------------------------------------------------------------------------

SNIPPETS = {page: snippets_of(page) for page in DOCS}


def run(launch, folder: Path, blocks: list[dict[str, object]]):
    script, data = folder / "driver.py", folder / "blocks.json"
    script.write_text(DRIVER)
    data.write_text(json.dumps(blocks))
    return launch(2, [script, data])


@pytest.fixture(scope="module")
def ran(launch, tmp_path_factory):
    """The job of all snippets of all pages; after one that fails the others are not run."""
    has_sklearn = importlib.util.find_spec("sklearn") is not None
    blocks = [block for page in DOCS for block in SNIPPETS[page] if has_sklearn or "sklearn" not in block.code]
    content = [{"page": str(block.page), "line": block.line, "code": block.code} for block in blocks]
    return run(launch, tmp_path_factory.mktemp("snippets"), content)


@pytest.mark.parametrize("page", [page for page in DOCS if SNIPPETS[page]], ids=name_of)
def test_snippets_run(page, ran):
    if any("sklearn" in block.code for block in SNIPPETS[page]):
        pytest.importorskip("sklearn", reason="this page trains on scikit-learn's digits: install the extra examples")
    failed = re.search(r"snippet failed: (.*):\d+", ran.stderr)
    if failed and failed[1] != str(page):
        pytest.fail(f"not run, or not to the end of the job: {failed[0]}", pytrace=False)
    for block in SNIPPETS[page]:
        assert ran.stdout.splitlines().count(f"ran {page}:{block.line}") == 2, ran.output
    assert ran.returncode == 0, ran.output


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_blocks_have_the_language_of_their_mark(page):
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block}: {block.language!r} is none of {sorted(LANGUAGES)}"
        assert untested_reason(block) != "", f"{block}: say why: <!-- no-test: reason -->"
        if block.language == "console":
            assert block.code.startswith("$ "), f"{block}: a console block begins with a command, `$ ...`"


# ---- what programs print -------------------------------------------------------------------------

TUTORIAL = ROOT / "docs" / "tutorial.md"
FRACTION = re.compile(r"\d+\.\d+")


def programs_and_output(page: Path) -> list[tuple[Block, Block]]:
    """Each program with the block of its command and of what the command prints."""
    found, program = [], None
    for block in blocks_of(page):
        if block.language == "python":
            program = block
        elif program is not None and block.language == "console" and "train.py" in block.code.splitlines()[0]:
            found.append((program, block))
            program = None
    return found


def is_same(line: str, expected: str) -> bool:
    """Whether the words are equal, and the numbers nearly so: their last digits depend on the processor."""
    values, wanted = ([float(number) for number in FRACTION.findall(text)] for text in (line, expected))
    same_words = FRACTION.sub("#", line) == FRACTION.sub("#", expected)
    return same_words and values == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize("number", range(len(programs_and_output(TUTORIAL))), ids=lambda number: f"step {number + 1}")
def test_the_tutorial_prints_this(launch, alone, tmp_path, number):
    program, shown = programs_and_output(TUTORIAL)[number]
    if "sklearn" in program.code:
        pytest.importorskip(
            "sklearn", reason="the tutorial trains on scikit-learn's digits: install the extra examples"
        )
    script = tmp_path / "train.py"
    script.write_text(program.code)
    command, *lines = shown.code.splitlines()
    ranks = re.search(r"-n (\d+)", command)
    result = alone(script) if ranks is None else launch(int(ranks[1]), [script])
    printed = iter(
        [
            *(result.stdout + result.stderr).replace(f"{tmp_path}/", "/home/me/").splitlines(),
            f"status {result.returncode}",
        ]
    )
    # The first line names the MPI and the cores.
    for expected in (line for line in lines if line != "..." and not line.startswith("torchmpi 0.")):
        assert any(is_same(line, expected) for line in printed), (
            f"{shown}: {expected!r} is not printed\n{result.output}"
        )
    assert (result.returncode == 0) == ("status" not in shown.code), result.output


# ---- limits --------------------------------------------------------------------------------------

SAY_LIMITS = ("README.md", *(f"docs/{name}.md" for name in ("install", "horovod", "slurm", "gpu")))
"""Pages that begin with the limits, in the words of docs/support.md."""


def limits_of(page: Path) -> str:
    found = re.search(r"^> \*\*Limits\.\*\*.*(?:\n>.*)*", page.read_text(), flags=re.MULTILINE)
    assert found, f"{name_of(page)} does not say what was tested: copy the limits from docs/support.md"
    return found[0].replace("](docs/", "](")


@pytest.mark.parametrize("name", SAY_LIMITS)
def test_pages_say_the_same_limits(name):
    assert limits_of(ROOT / name) == limits_of(ROOT / "docs" / "support.md")


# ---- figures -------------------------------------------------------------------------------------

GUIDES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "how").glob("*.md")),
]
MEASURED = re.compile(
    r"\d ?(?:us|ms|%)(?!\w)|\d times as (?:fast|long)|\b0?\.\d+ of the time|\b\d+ of \d+ (?:jobs|runs)"
    r"|\d times the|\d ?[MG]i?B (?:per|for each)|\b(?:a|few|some|of) (?:micro|milli)seconds?"
)
GIVEN = (
    "round trip of 50 ms", "sleeps for 50 ms", "compute for 2 ms", "every 10 ms", "every 30 ms",
    "20 us to 8 ms", "5 % faster", "5 % of the time", "3 % of the time",
    "Waits of about a microsecond", "0.1 times the gradient", "2.2 MB for each 16 communicators",
)  # fmt: skip
"""Settings, limits and assumptions of guides, which no measurement has found."""


def measured(text: str) -> list[str]:
    """Return the figures in a text that a measurement has found."""
    text = re.sub("|".join(map(re.escape, GIVEN)), "", re.sub(r"`[^`]*`", "", " ".join(text.split())))
    return MEASURED.findall(text)


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_sections_with_figures_link_to_results(page):
    sections = [text for text in re.split(r"^(?=#+ )", prose(page), flags=re.MULTILINE) if "results/" not in text]
    missing = {text.partition("\n")[0]: measured(text) for text in sections if measured(text)}
    assert not missing, f"{name_of(page)} has figures without a link to a file in results/: {missing}"


def test_figures_are_recognized():
    text = "`x` took 3 ms, 5 times as long, 20 % more, 0.7 of the time, 4 of 5 jobs, every 10 ms, `9 ms`, a microsecond"
    assert measured(text) == ["3 ms", "5 times as long", "0 %", "0.7 of the time", "4 of 5 jobs", "a microsecond"]
    text = " ".join(" ".join(page.read_text().split()) for page in GUIDES)
    assert [given for given in GIVEN if given not in text] == []


# ---- tables and links ----------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), flags=re.MULTILINE)
    cleaned = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in cleaned}


def links_of(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_targets(page):
    broken = []
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = page if not path else page.parent / path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{name_of(page)} has links that lead nowhere: {broken}"


def test_the_map_shows_every_page():
    index = ROOT / "docs" / "index.md"
    shown = {(index.parent / link.partition("#")[0]).resolve() for link in links_of(index) if "://" not in link}
    missing = [name_of(page) for page in DOCS[1:] if page != index and page not in shown]
    assert not missing, f"docs/index.md does not mention {missing}"


# ---- names and tables ----------------------------------------------------------------------------


def public_names(module: ModuleType) -> list[str]:
    """Functions and classes a package exports, without its submodules."""
    objects = {name: getattr(module, name) for name in module.__all__}
    return [name for name, value in objects.items() if inspect.isfunction(value) or inspect.isclass(value)]


@pytest.mark.parametrize("module", [mpi, torchmpi.nn, torchmpi.parameterserver], ids=lambda module: module.__name__)
def test_every_public_name_is_documented(module):
    text = "\n".join(page.read_text() for page in DOCS)
    names = public_names(module)
    assert names
    # As code: mpi.name, or `name` with or without arguments; a word in a sentence is not enough.
    as_code = r"\b(mpi|mpinn|ps)\.{0}\b|`{0}[`(]|import .*\b{0}\b"
    missing = [name for name in names if not re.search(as_code.format(name), text)]
    assert not missing, f"the documentation never mentions {missing} of {module.__name__}"


def rows_of_table(page: Path, first_column: str) -> list[list[str]]:
    """The cells of the table whose header begins with `first_column`, code marks removed."""
    lines = page.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


def test_settings_table_agrees_with_config():
    _, *rows = rows_of_table(ROOT / "docs" / "runtime.md", "setting")
    fields = {field.name: field.default for field in dataclasses.fields(mpi.Config)}
    shown = {name: ast.literal_eval(default) for name, _, default, _ in rows}
    assert shown == fields
    for name, variable, _, meaning in rows:
        assert variable == PREFIX + name.upper()
        assert meaning, f"{name} has no meaning"


def test_table_of_other_variables_is_complete():
    """All but those that tests and `torchmpi run` set for themselves."""
    _, *rows = rows_of_table(ROOT / "docs" / "runtime.md", "variable")
    internal = {"TORCHMPI_TEST_", "TORCHMPI_RUN_PID", "TORCHMPI_RUNNING_FILE"}
    assert {name for name, _ in rows} == set(config._NOT_FIELDS) - internal
    assert all(effect for _, effect in rows)


def test_operations_table_agrees_with_dtypes():
    header, *rows = rows_of_table(ROOT / "docs" / "collectives.md", "dtype")
    ops = header[1:]
    assert tuple(ops) == dtypes.OPS
    shown = {}
    for names, *cells in rows:
        assert set(cells) <= {"yes", "no"}
        allowed = {op for op, cell in zip(ops, cells, strict=True) if cell == "yes"}
        shown |= dict.fromkeys(names.replace("`", "").split(", "), allowed)
    sendable = [dtype for dtype in torch_dtypes() if can_be_sent(dtype)]
    assert shown == {dtypes.short_name(dtype): operations_of(dtype) for dtype in sendable}


def torch_dtypes() -> set[torch.dtype]:
    return {value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def can_be_sent(dtype: torch.dtype) -> bool:
    try:
        return bool(dtypes.info(dtype))
    except TorchMPIError:
        return False


def operations_of(dtype: torch.dtype) -> set[str]:
    found = set()
    for op in dtypes.OPS:
        try:
            dtypes.check_reduction(dtype, op)
        except TorchMPIError:
            continue
        found.add(op)
    return found


# ---- modules and terms ---------------------------------------------------------------------------

PACKAGE = ROOT / "torchmpi"
GLOSSARY = ROOT / "docs" / "glossary.md"
FOR_CONTRIBUTORS = [GLOSSARY, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]


@cache
def source_files() -> list[str]:
    """The paths of all files of Python, without those of environments and builds."""
    folders = [each for each in ROOT.iterdir() if each.is_dir() and each.name != "build" and each.name[0] != "."]
    return [f"/{path.relative_to(ROOT)}" for each in folders for path in each.rglob("*.py")]


@pytest.mark.parametrize("page", FOR_CONTRIBUTORS, ids=name_of)
def test_modules_named_on_a_page_exist(page):
    """A file in code marks exists; its path may be relative to any folder."""
    missing = [
        f"{name_of(page)}:{number}: {name}"
        for number, line in enumerate(prose(page).splitlines(), 1)
        for name in re.findall(r"`([\w/]+\.py)`", line)
        if not any(file.endswith(f"/{name}") for file in source_files())
    ]
    assert not missing, "\n".join(missing)
