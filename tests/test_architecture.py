"""The house: imports go strictly downwards, and siblings do not import each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "torchmpi"

FLOORS = (
    ("_version", "errors"),
    ("config", "topology", "schedule", "rules", "layout"),
    (
        "dtypes", "dlpack", "streams", "devices", "handle", "scalars", "affinity", "mpi_library", "segments", "archive",
        "peers", "sockets",
    ),  # fmt: skip
    ("buffers", "lane", "turns", "progress", "inquiry", "tuning_file", "kernels"),
    ("gates",),
    ("groups", "fusion", "heap", "sparse"),
    ("pieces",),
    ("stack",),
    ("backends",),
    ("hierarchy", "selector", "watchdog", "failure"),
    ("runtime",),
    ("staging",),
    ("plans",),
    ("calls",),
    ("many",),
    ("collectives", "messages", "lifecycle"),
    ("tuning", "nn"),
    ("engine", "parameterserver", "distributed"),
    ("cli",),
    ("__init__", "__main__"),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# Loaded by start(), not by import: they start MPI, or cost a fifth of a second.
LATE = ("mpi4py", "numba")
# These are what is loaded late: kernels.load() imports them.
LATE_MODULES = (
    "memory", "meeting", "placing", "finding", "reading", "reducing", "rounds", "moving", "dividing", "sharding",
    "entering", "wrapping", "gate_ir", "building",
)  # fmt: skip
LATE_MODULES += ("cuda_lanes", "cuda_intrinsics")  # by kernels.cuda_reduction


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The top-level module or folder that a file belongs to."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of this package that a file imports, wherever in the file."""
    folder = path.parent.relative_to(PACKAGE).parts
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - node.level + 1]
            for alias in node.names:
                target = (*base, *(node.module.split(".") if node.module else (alias.name,)))
                rooms.add(target[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torchmpi":
            target = (node.module or "").split(".")[1:] or [alias.name for alias in node.names]
            rooms.add(target[0])
        elif isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("torchmpi.")}
    return rooms


def test_every_room_has_a_floor():
    assert {room(path) for path in modules()} == set(FLOOR_OF)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    own = room(path)
    for target in imported_rooms(path):
        # The package's own face stands above everything; __main__ and the CLI may ask it for the version.
        if target != own and target in FLOOR_OF:
            assert FLOOR_OF[target] < FLOOR_OF[own], (
                f"{own} (floor {FLOOR_OF[own]}) imports {target} ({FLOOR_OF[target]})"
            )


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_mpi_and_numba_are_imported_inside_functions_only(path):
    if room(path) == "kernels" and path.stem in LATE_MODULES:
        return
    late = {*LATE, *LATE_MODULES} if room(path) == "kernels" else set(LATE)
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "", *(alias.name for alias in node.names)] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & late, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_small_and_say_what_they_are_for(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), f"{path.name} has no docstring"
    assert text.count("\n") <= 420, f"{path.name} has {text.count(chr(10))} lines: split it"


def test_device_differences_are_erased_below():
    """`if tensor.is_cuda` belongs to the few files that know about devices."""
    allowed = {"dtypes", "buffers", "streams", "selector", "runtime", "lifecycle", "backends", "cli"}
    for path in modules():
        if room(path) not in allowed:
            assert ".is_cuda" not in path.read_text(), path.name


def test_public_functions_are_documented():
    import torchmpi
    import torchmpi.engine
    import torchmpi.nn
    import torchmpi.parameterserver

    for module in (torchmpi, torchmpi.nn, torchmpi.engine, torchmpi.parameterserver):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                assert value.__doc__, f"{module.__name__}.{name} has no docstring"
