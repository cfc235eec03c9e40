#!/usr/bin/env python
"""List functions of tests/ that are copies of each other: the same body with other numbers, texts or local names.

    python scripts/repeated_tests.py
    python scripts/repeated_tests.py --least 20 tests/unit

Bodies are compared as trees: docstrings, annotations and decorators do not count, each constant is one of its type, and
local names are numbered in their order. Copies of tests are cases of one parametrized test; copies of other functions
belong into tests/helpers. `--least` is the number of nodes of the smallest body that is listed. The status is 1 if
there are copies.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Function(NamedTuple):
    """A function of a file, by its place."""

    path: Path
    name: str
    line: int
    num_lines: int
    num_nodes: int

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.name} ({self.num_lines} lines)"


def normalized(function: Definition) -> tuple[str, int]:
    """Return the body without what may differ between copies, and its number of nodes.

    >>> one, two = (ast.parse(text).body[0] for text in ("def f(a):\\n return g(a, 1)", "def h(b):\\n return g(b, 2)"))
    >>> normalized(one) == normalized(two)
    True
    """
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    nodes = [node for statement in body for node in ast.walk(statement)]
    arguments = function.args
    local = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    local |= {each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None}
    local |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    local |= {node.name for node in nodes if isinstance(node, Definition | ast.ClassDef)}
    numbers: dict[str, int] = {}

    def text(value: object) -> str:
        if isinstance(value, ast.Constant):
            return f"<{type(value.value).__name__}>"
        if isinstance(value, ast.JoinedStr):
            return "<str>"
        if isinstance(value, ast.AST):
            omitted = ("annotation", "returns", "type_comment", "ctx", "kind", "decorator_list")
            fields = [text(field) for name, field in ast.iter_fields(value) if name not in omitted]
            return f"{type(value).__name__}({','.join(fields)})"
        if isinstance(value, list):
            return f"[{','.join(map(text, value))}]"
        if isinstance(value, str) and value in local:
            return f"v{numbers.setdefault(value, len(numbers))}"
        return repr(value)

    return text(body), len(nodes)


def functions_of(path: Path) -> Iterator[tuple[str, Function]]:
    """Yield each function of a file that is not inside another one, with its normalized body."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, Definition):
                body, num_nodes = normalized(node)
                last = node.end_lineno or node.lineno
                yield body, Function(path, node.name, node.lineno, last - node.lineno + 1, num_nodes)
            elif isinstance(node, ast.ClassDef):
                pending.append(node)


def copies(paths: list[Path], least: int) -> list[list[Function]]:
    """Return the groups of functions with the same normalized body, the longest bodies first."""
    found: dict[str, list[Function]] = {}
    for path in paths:
        for body, function in functions_of(path):
            if function.num_nodes >= least:
                found.setdefault(body, []).append(function)
    groups = [sorted(group) for group in found.values() if len(group) > 1]
    return sorted(groups, key=lambda group: (-group[0].num_nodes * (len(group) - 1), group))


def main() -> int:
    """Read the options and list the copies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[ROOT / "tests"])
    parser.add_argument("--least", type=int, default=30, help="nodes of the smallest body (default: 30)")
    arguments = parser.parse_args()
    paths = sorted(path for folder in arguments.folders for path in folder.resolve().rglob("*.py"))
    groups = copies(paths, arguments.least)
    for group in groups:
        print(f"{group[0].num_nodes} nodes:", *(f"\n  {each}" for each in group), sep="")
    print(f"{len(groups)} groups of copies, in {len(paths)} files")
    return int(bool(groups))


if __name__ == "__main__":
    sys.exit(main())
