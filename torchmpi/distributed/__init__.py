"""The ``torch.distributed`` backend: ``dist.init_process_group("torchmpi")``.

Where torchmpi is installed, torch knows the backend as soon as torch is imported; a script need not import this. It
has two functions that torch itself has no place for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["monitored_barrier", "register"]


def __getattr__(name: str) -> Any:
    # Loaded with torch itself, into every process: nothing more than a script asks for.
    if name == "monitored_barrier":
        from .process_group import monitored_barrier

        return monitored_barrier
    if name == "register":
        from .registration import register

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
