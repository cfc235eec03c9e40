"""The Python functions of the package that a call enters: a count that does not depend on the load of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torchmpi
from torchmpi.shared_memory.kernels import no_garbage_collection


def python_calls(call: Callable[[], Any]) -> tuple[list[CodeType], Any]:
    """Return the functions of the package that a call enters in the caller's thread, and what it returns."""
    package, functions = str(Path(torchmpi.__file__).parent), list[CodeType]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            functions.append(frame.f_code)

    with no_garbage_collection():  # which enters callbacks of the package at any moment
        sys.setprofile(note)
        try:
            result = call()
        finally:
            sys.setprofile(None)
    return functions, result
