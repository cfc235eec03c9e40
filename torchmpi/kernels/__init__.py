"""Native code that runs without the GIL: collectives in shared memory, and the reductions in them.

Importing this package loads nothing; `load` imports Numba, compiles what no earlier process has compiled, and gives the
kernels. What was compiled is kept in a folder named after the source, so that no change of it is missed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MODULES = ("reducing", "moving")
_kernels: dict[str, Callable[..., int]] = {}


def load(announce: Callable[[str], object] = lambda message: None) -> dict[str, Callable[..., int]]:
    """All kernels by name. The first process on a machine compiles them, and tells by `announce` that it does.

    >>> sorted(load())
    ['allgather', 'allreduce', 'broadcast', 'exchange', 'meet', 'reduce_scatter']
    """
    if not _kernels:
        from . import native

        folder = native.cache_folder()
        try:
            if folder is None:
                _import(None)
            else:
                _import_once(folder / f"torchmpi-{_source_digest()}", announce)
        except OSError:  # full, without locks, or another user's
            _import(None)
    return _kernels


def _import_once(place: Path, announce: Callable[[str], object]) -> None:
    done = place / "complete"
    if done.exists():
        _import(place)
        return
    place.mkdir(exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one compiles, the other ranks wait for it instead of doing the same
        if not done.exists():
            announce("compiling the shared-memory kernels, once per machine: a few seconds")
        _import(place)
        done.touch()


def _import(place: Path | None) -> None:
    import numba

    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, "" if place is None else str(place)
    try:
        for name in _MODULES:
            importlib.import_module(f".{name}", __package__)
    finally:
        config.CACHE_DIR = before
    from .meeting import entry_points

    _kernels.update(entry_points)


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")) + [Path(__file__).parent.parent / "layout.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


__all__ = ["load"]
