"""To a contributor: imports go down, without cycles; MPI and numba are imported late; output has one way."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from structure import compared_names, literals

PACKAGE = Path(__file__).resolve().parents[1] / "torchmpi"
LEVELS = (
    ("_version", "backend_specs", "collective_specs", "errors", "files", "log", "plots", "status_line"),
    ("config", "other_names"),
    ("argument_types",),
    ("tensors",),
    ("shared_memory", "timeline"),
    ("launch",),
    ("communicators",),
    ("backends", "supervision"),
    ("session",),
    ("collectives",),
    ("datasets", "nn"),
    ("continuing",),
    ("engine", "parameterserver", "distributed", "horovod"),
    ("cli",),
    ("__init__", "__main__"),
)
"""The entries of the package, lowest first. An entry imports only from lower levels."""
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}

IMPORTED_BY_START = ("mpi4py", "numba")
"""Imported inside functions only: mpi4py starts MPI, numba costs 0.2 s and 56 MB."""
KERNEL_MODULES = (
    "intrinsics", "access", "arrival", "copying", "peer_memory", "reduce_kernels", "chunk_loop", "movement",
    "fast_path_code", "logged_calls", "messages", "ring_messages", "host_calls", "message_pieces", "gpu_calls",
    "list_calls", "strided",
)  # fmt: skip
"""Modules of ``shared_memory/kernels`` that import numba; ``kernels.load()`` imports them."""
COMPILER_MODULES = ("addresses", "compilation", "cpython", "target")
"""The same of ``shared_memory/compiler``."""
SERVER_MODULES = ("shard_passes", "server_rule_loops", "request_code")
"""The same of ``parameterserver/kernels``."""
IMPORTING_NUMBA = {f"shared_memory/kernels/{name}.py" for name in KERNEL_MODULES}
IMPORTING_NUMBA |= {f"shared_memory/compiler/{name}.py" for name in COMPILER_MODULES}
IMPORTING_NUMBA |= {f"parameterserver/kernels/{name}.py" for name in SERVER_MODULES}
IMPORTING_NUMBA |= {f"nn/kernels/{name}.py" for name in ("checksum_code", "row_product_code")}


def module_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """``collectives.dispatch``; a package has the name of its folder, and the root is the empty string."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file; not to be changed."""
    return ast.parse(path.read_text())


MODULES = {module_name(path): path for path in module_files()}


def entry_of(module: str) -> str:
    """The entry of the package root that a module belongs to."""
    return module.split(".")[0] if module else "__init__"


def imported_modules(module: str) -> Iterator[str]:
    """Modules of this package that a module imports, wherever in the file, but for type checking."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = tree_of(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                above = package.split(".") if package else []
                above = above[: len(above) - node.level + 1]
            elif (node.module or "").split(".")[0] == "torchmpi":
                above = []
            else:
                continue
            named = [part for part in (node.module or "").split(".") if part and part != "torchmpi"]
            base = ".".join([*above, *named])
            for alias in node.names:
                target = f"{base}.{alias.name}" if base else alias.name
                yield target if target in MODULES else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torchmpi."):
                    yield alias.name.removeprefix("torchmpi.")


@functools.cache
def graph() -> dict[str, set[str]]:
    """The imports of each module; not when this file is imported, as parsing all modules takes seconds."""
    return {module: set(imported_modules(module)) - {module} for module in MODULES}


def entry_edges() -> set[tuple[str, str]]:
    """The imports between entries, which scripts/draw_levels.py draws."""
    pairs = ((module, target) for module, targets in graph().items() for target in targets)
    return {(entry_of(module), entry_of(target)) for module, target in pairs if entry_of(module) != entry_of(target)}


@pytest.mark.slow
def test_names_of_modules_and_public_classes_are_unique():
    names = [path.stem for path in MODULES.values() if path.stem not in ("__init__", "__main__")]
    for path in MODULES.values():
        classes = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))
        names += [node.name for node in classes if not node.name.startswith("_")]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []


def test_every_entry_has_a_level():
    assert {entry_of(module) for module in MODULES} == set(LEVEL_OF)


def test_imports_go_down():
    """The root package stands above everything; __main__ and the CLI may ask it for the version."""
    edges = [(module, target) for module, targets in graph().items() for target in targets if target]
    assert edges
    upward = [
        f"{module} imports {target}, which is not on a lower level"
        for module, target in edges
        if entry_of(module) != entry_of(target) and LEVEL_OF[entry_of(target)] >= LEVEL_OF[entry_of(module)]
    ]
    assert upward == []


def test_every_folder_is_a_package():
    """Setuptools installs only folders with an ``__init__.py``."""
    folders = {path.parent for path in module_files()}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_no_cycles_between_modules():
    """Also inside packages. A package's ``__init__`` counts as a module of its own, which re-exports the others."""
    cycle: list[str] = []
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        cycle = error.args[1]
    assert not cycle, " imports ".join(reversed(cycle))


def imported_names(path: Path) -> Iterator[str]:
    """The first parts of the names that a file imports at its top."""
    for node in tree_of(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "").split(".")[0], *(alias.name for alias in node.names))


def test_mpi_and_numba_are_imported_inside_functions_only():
    found = {
        module: set(imported_names(path))
        & {*IMPORTED_BY_START, *(KERNEL_MODULES if module.startswith("shared_memory.kernels") else ())}
        for module, path in MODULES.items()
        if str(path.relative_to(PACKAGE)) not in IMPORTING_NUMBA
    }
    assert {module: names for module, names in found.items() if names} == {}


def test_device_differences_are_confined():
    """`if tensor.is_cuda` belongs to the few packages that know about devices."""
    allowed = {"tensors", "backends", "session", "cli"}
    for module, path in MODULES.items():
        if entry_of(module) not in allowed:
            assert ".is_cuda" not in path.read_text(), module


COMPARED_NAMES = {
    "backends.nccl.recipes": (1, "the NaN of the two operations with an order"),
    "collectives.tuning.tuner": (1, "measures an allreduce first"),
    "engine.early_stop": (2, "the mode of early stopping"),
    "engine.measurement": (1, "the reduction of torch's losses"),
    "launch.affinity": (1, "the word for no limit in a file of the system"),
    "shared_memory.compiler.simd_ir": (4, "the instructions of each step of an operation"),
}
"""How often a module compares with names of collectives or operations, outside the tables of facts, and what for.

The numbers go down only: a property of a collective or operation belongs into its row.
"""


def test_collectives_and_operations_are_compared_by_their_facts():
    names = literals(PACKAGE)
    assert {"allreduce", "avg"} <= names
    found = {module: len(compared_names(tree_of(path), names)) for module, path in MODULES.items()}
    assert {module: number for module, number in found.items() if number} == {
        module: number for module, (number, _) in COMPARED_NAMES.items()
    }


def test_a_comparison_with_a_name_is_found():
    text = 'is_sum = op == "sum"\nis_max = spec.combine == "max"\nis_rooted = name in ("reduce", "gather")'
    assert compared_names(ast.parse(text), {"sum", "max", "reduce"}) == [1, 3]


OUTPUT_WITHOUT_LOGGER = {
    "log": "the handler of the logger, and what signal handlers write",
    "engine.progressbar": "a bar that is drawn again on one line",
    "status_line": "a line of progress that is drawn again",
    "cli.rank_start": "runs before the program, and does not import torch, which the logger's package does",
    "horovod.__main__": "the usage of a command",
    "supervision.failure": "flushes the streams at the end, and prints what the exception hook has left in a buffer",
    "launch.mpi_library": "flushes the streams when the process ends",
    "launch.launcherless.endpoint": "flushes the streams when the process ends",
    "horovod.distributed_optimizer": "warnings of Horovod's interface",
    "horovod.mpi_ops": "warnings of Horovod's interface",
    "distributed.registration": "a warning during `import torch`, which a program may filter",
    "distributed.torch_names": "a warning on the version of torch, which a program may filter",
}
"""Modules that print without the logger `torchmpi`, each with the reason. Results of commands go to standard output."""


def prints_without_logger(tree: ast.AST, *, is_command: bool) -> bool:
    """Whether a module names standard error, raises warnings, or prints; a command may print its result."""
    nodes = (each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name))
    names = {f"{each.value.id}.{each.attr}" for each in nodes}
    if names & {"sys.stderr", "sys.__stderr__", "sys.__stdout__", "warnings.warn", "traceback.print_exc"}:
        return True
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return not is_command and any(isinstance(func, ast.Name) and func.id == "print" for func in calls)


@pytest.mark.slow
def test_all_output_but_results_goes_through_the_logger():
    trees = {module: tree_of(path) for module, path in MODULES.items()}
    found = {name for name, tree in trees.items() if prints_without_logger(tree, is_command=entry_of(name) == "cli")}
    assert found == set(OUTPUT_WITHOUT_LOGGER)


@pytest.mark.parametrize(
    ("line", "expected"),
    [("print(1)", True), ("sys.stderr.write('')", True), ("warnings.warn('')", True), ("logger.info('')", False)],
)
def test_output_without_the_logger_is_found(line, expected):
    assert prints_without_logger(ast.parse(line), is_command=False) is expected
