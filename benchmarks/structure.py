"""Print the measures of the package's structure: entries, levels, edges, cycles, duplicate names, lines, loose types.

    python benchmarks/structure.py [CHECKOUT]

Everything is read from the source text; nothing of the package is imported. Run it on two checkouts to compare them.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

Graph = Mapping[str, set[str]]


def modules_of(package: Path) -> dict[str, Path]:
    """The modules of a package by dotted name, without the name of the package itself."""
    named = {path.relative_to(package).with_suffix("").parts: path for path in sorted(package.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in named.items()}


def imports(module: str, modules: Mapping[str, Path], package: str) -> Iterator[str]:
    """The modules of the package that a module imports, wherever in the file."""
    inside = module if modules[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(modules[module].read_text())):
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if node.level:
                above = inside.split(".") if inside else []
                base = ".".join([*above[: len(above) - node.level + 1], *filter(None, parts)])
            elif parts[0] == package:
                base = ".".join(parts[1:])
            else:
                continue
            for alias in node.names:
                target = f"{base}.{alias.name}" if base else alias.name
                yield target if target in modules else base
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix(f"{package}.") for alias in node.names if alias.name.startswith(f"{package}.")
            )


def entry_graph(graph: Graph) -> dict[str, set[str]]:
    """The imports between the entries of the package root."""

    def entry(module: str) -> str:
        return module.split(".")[0] or "__init__"

    found: dict[str, set[str]] = {entry(module): set() for module in graph}
    for module, targets in graph.items():
        found[entry(module)] |= {entry(target) for target in targets} - {entry(module), "__init__"}
    return found


def components(graph: Graph) -> list[set[str]]:
    """The groups of modules that import each other in a circle."""
    reachable: dict[str, set[str]] = {}
    for start in graph:
        seen, pending = set(), list(graph[start])
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                pending.extend(graph.get(node, ()))
        reachable[start] = seen
    circular = [node for node in graph if node in reachable[node]]
    groups = {
        frozenset(other for other in circular if other in reachable[n] and n in reachable[other]) for n in circular
    }
    return [set(group) for group in groups]


def num_levels(graph: Graph) -> int:
    """The length of the longest chain of imports between entries; circles between them count as one level."""
    merged = {node: min(group) for group in components(graph) for node in group}
    condensed: dict[str, set[str]] = defaultdict(set)
    for node, targets in graph.items():
        own = merged.get(node, node)
        condensed[own] |= {merged.get(target, target) for target in targets} - {own}
    depth: dict[str, int] = {}
    for node in TopologicalSorter(condensed).static_order():
        depth[node] = 1 + max((depth[target] for target in condensed.get(node, ())), default=0)
    return max(depth.values())


NAMES = {"CollectiveName": "collective_specs.py", "Operation": "config.py", "NoAverage": "config.py"}
"""The types whose values are names of collectives and of reduction operations, each with its file."""
FACTS = {"combine", "prepare", "finish", "flow", "compared", "kind"}
"""Columns of the tables of facts: comparisons with their values are no comparisons with names."""


def literals(package: Path) -> set[str]:
    """The strings in the definitions of the types in `NAMES`."""
    trees = [ast.parse((package / file).read_text()) for file in dict.fromkeys(NAMES.values())]
    assignments = (node for tree in trees for node in tree.body if isinstance(node, ast.Assign))
    values = [node.value for node in assignments if {ast.unparse(target) for target in node.targets} & set(NAMES)]
    return {
        node.value
        for value in values
        for node in ast.walk(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    } - {"Literal"}


def compared_names(tree: ast.AST, names: set[str]) -> list[int]:
    r"""The lines with a comparison with one of some names, or with a tuple, list or set that has one of them.

    >>> tree = ast.parse('is_sum = op == "sum" or op in ("sum", "avg")\nis_max = spec.combine == "max"')
    >>> compared_names(tree, {"sum", "max"})
    [1, 1]
    """

    def strings(node: ast.expr) -> set[str]:
        parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
        return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            is_fact = any(isinstance(each, ast.Attribute) and each.attr in FACTS for each in operands)
            if not is_fact and any(strings(each) & names for each in operands):
                found.append(node.lineno)
    return sorted(found)


KINDS = ("code", "docstring", "comment", "blank")


def kinds_of(text: str) -> Counter[str]:
    """Count the lines of a file by kind; blank lines inside a docstring belong to it."""
    kinds = [
        "comment" if line.startswith("#") else "code" if line else "blank" for line in map(str.strip, text.splitlines())
    ]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            kinds[node.lineno - 1 : node.end_lineno] = ["docstring"] * length
    return Counter(kinds)


def print_sizes(package: Path, tests: Path) -> None:
    """Print the lines of each entry of the package, and of the tests, by kind."""
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    for path in package.rglob("*.py"):
        sizes[path.relative_to(package).parts[0].removesuffix(".py")] += kinds_of(path.read_text())
    sizes["the package"] = sum(sizes.values(), Counter())
    for path in tests.rglob("*.py"):
        sizes["the tests"] += kinds_of(path.read_text())
    print(f"\n{'lines of':20} {'all':>7}", *(f"{kind:>10}" for kind in KINDS))
    for name, size in sizes.items():
        print(f"{name:20} {size.total():7}", *(f"{size[kind]:10}" for kind in KINDS))


def main() -> None:
    """Print one line for each measure, and one for the size of each entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    checkout = parser.parse_args().checkout
    package = checkout / "torchmpi"
    modules = modules_of(package)
    graph = {module: set(imports(module, modules, package.name)) - {module} for module in modules}
    entries = entry_graph(graph)
    classes = Counter(
        node.name
        for path in modules.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    stems = Counter(path.stem for path in modules.values() if path.stem != "__init__")
    text = "\n".join(path.read_text() for path in modules.values())
    folders = sum((package / name).is_dir() for name in entries)
    names = literals(package)
    rows = {
        "comparisons with names of collectives and operations": sum(
            len(compared_names(ast.parse(path.read_text()), names)) for path in modules.values()
        ),
        "entries of the package root": f"{len(entries)} ({len(entries) - folders} modules, {folders} packages)",
        "levels of imports between entries": num_levels(entries),
        "imports between entries": sum(map(len, entries.values())),
        "circles of imports between modules": len(components(graph)),
        "module names used more than once": sum(count > 1 for count in stems.values()),
        "public class names used more than once": sum(count > 1 for count in classes.values()),
        "modules": len(modules),
        "lines with Any": sum(bool(re.search(r"\bAny\b", line)) for line in text.split("\n")),
        "`# type: ignore`": text.count("# type: ignore"),
        "`group: Any`": len(re.findall(r"\bgroup: Any\b", text)),
    }
    for name, value in rows.items():
        print(f"{name:53} {value}")
    print_sizes(package, checkout / "tests")


if __name__ == "__main__":
    main()
