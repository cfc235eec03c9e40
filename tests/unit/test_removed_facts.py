"""To who adds a row to a table of facts: if one is missing, or a name in a list beside it, a test fails."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = ("collective_specs.py", "tensors/operation_specs.py", "backend_specs.py")
LISTS = {
    "config.py": ("NoAverage",),
    "backend_specs.py": ("BackendName",),
    "collective_specs.py": ("CollectiveName",),
    "backends/gloo_backend.py": ("collectives",),
    "backends/ipc/ipc_backend.py": ("collectives",),
    "backends/nccl/nccl_backend.py": ("collectives",),
    "backends/p2p_backend.py": ("collectives",),
}
MAKE_ROWS = ("_Row", "_action", "setting")
PART = 24
EVERY = 1 if os.environ.get("TORCHMPI_TEST_COMPLETE") else 8
"""One of so many facts is removed; of all of them (scripts/test_cpu.sh --complete) the tests take ten minutes."""
# One process imports torch, which must not import torchmpi. A fork of it for each change imports the package from the
# copy and runs the tests. The first one changes nothing, and compiles the modules for the others.
RUNNER = """
import json, os, sys
import numpy, pytest, torch, torch.distributed
copy, tests, changes = sys.argv[1], sys.argv[2], json.load(sys.stdin)
sys.path.insert(0, copy)
for file, what, text in changes:
    path = os.path.join(copy, "torchmpi", file)
    original = open(path).read()
    open(path, "w").write(text)
    child = os.fork()
    if not child:
        output = os.open(os.devnull, os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.dont_write_bytecode = what != "nothing"
        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--rootdir", copy, tests]))
    _, status = os.waitpid(child, 0)
    open(path, "w").write(original)
    print(json.dumps((file, what, os.waitstatus_to_exitcode(status))), flush=True)
"""


def without(text: str, node: ast.expr | ast.keyword) -> str:
    """The text without an argument or an element, and the comma before or after it."""
    lines = text.splitlines(keepends=True)
    assert node.end_lineno is not None and node.end_col_offset is not None
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    before, after = text[:begin].rstrip(), text[end:].lstrip()
    if before.endswith(","):
        return before[:-1] + text[end:]
    return before + after.removeprefix(",").lstrip()


def facts(file: str, text: str) -> Iterator[tuple[str, str]]:
    """What is removed, and the text without it."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKE_ROWS:
            name = ast.unparse(node.args[0])
            for argument in (*node.args[1:], *node.keywords):
                yield f"{ast.unparse(argument)} of {name}", without(text, argument)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in LISTS.get(file, ()):
            value = node.value.slice if isinstance(node.value, ast.Subscript) else node.value
            for element in value.elts if isinstance(value, ast.Tuple) else ():
                yield f"{ast.unparse(element)} in {ast.unparse(node.targets[0])}", without(text, element)


def test_a_fact_is_removed_with_its_comma():
    text = 'x = (_Row("a", f="b", c=1), _Row("d", 2))'
    assert [found for _, found in facts("collective_specs.py", text)] == [
        'x = (_Row("a", c=1), _Row("d", 2))',
        'x = (_Row("a", f="b"), _Row("d", 2))',
        'x = (_Row("a", f="b", c=1), _Row("d"))',
    ]


def chosen() -> list[tuple[str, str, str]]:
    """The facts that are removed, each with its file."""
    texts = {file: (ROOT / "torchmpi" / file).read_text() for file in {*TABLES, *LISTS}}
    return [(file, *fact) for file, text in texts.items() for fact in list(facts(file, text))[::EVERY]]


def test_facts_of_each_file_are_removed():
    assert {file for file, *_ in chosen()} == {*TABLES, *LISTS}


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(0, len(chosen()), PART))
def test_each_removed_fact_is_noticed(tmp_path, begin):
    """Importing torch takes longer than noticing a change, so that one process tries many."""
    shutil.copytree(ROOT / "torchmpi", tmp_path / "torchmpi", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "helpers", tmp_path / "helpers", ignore=shutil.ignore_patterns("__pycache__"))
    tests = shutil.copy(Path(__file__).with_name("test_tables_of_facts.py"), tmp_path)
    changes = [(TABLES[0], "nothing", (ROOT / "torchmpi" / TABLES[0]).read_text()), *chosen()[begin : begin + PART]]
    result = subprocess.run(
        [sys.executable, "-c", RUNNER, tmp_path, tests],
        input=json.dumps(changes),
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        },
        capture_output=True,
        text=True,
    )
    statuses = [json.loads(line) for line in result.stdout.splitlines()]
    assert statuses[:1] == [[TABLES[0], "nothing", 0]], result.stderr
    noticed = (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)  # the latter when a table cannot be made
    assert [f"{file}: {what}" for file, what, status in statuses[1:] if status not in noticed] == []
    assert len(statuses) == len(changes), result.stderr
