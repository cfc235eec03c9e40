"""Registration of the backend with torch.

``import torch`` calls :func:`register` through an entry point of this package. The function must be fast, must not
import MPI and must not raise, otherwise ``import torch`` would fail.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

SCHEME = "mpi"
DEVICES = ["cpu", "cuda"]
_AS_MPI, _AS_GLOO, _AS_TORCHRUN = "TORCHMPI_AS_MPI", "TORCHMPI_AS_GLOO", "TORCHMPI_AS_TORCHRUN"
_OF_MPI_LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_MISSING = re.compile(r"(?:^'|environment variable )((?:LOCAL_)?(?:RANK|WORLD_SIZE)|MASTER_(?:ADDR|PORT))('$| )")
"""Text of a KeyError, and of torch's error, for a variable that torchrun sets."""
# False if a program that is run by another name has no address when torch is imported: one that it sets later is made
# by a library, which needs it for another backend.
_has_address = True


def register() -> None:
    """Register the backend ``torchmpi`` and the rendezvous ``mpi://`` with torch.

    ``import torch`` calls this function if torchmpi is installed; a program needs it only if torchmpi is on the path
    but not installed. Further calls have no effect. Programs that do not name the backend are not affected: the handler
    of ``env://`` is replaced when ``torchmpi`` is first passed to torch as the name of a backend.

    Example::

        import torchmpi.distributed
        torchmpi.distributed.register()
    """
    try:
        _register()
    except Exception as error:
        warnings.warn(f"torchmpi cannot be used as a torch.distributed backend here: {error!r}", stacklevel=2)


def _register() -> None:
    global _has_address
    has_address, is_like_torchrun = "MASTER_ADDR" in os.environ, _is_set(_AS_TORCHRUN) or _is_set(_AS_GLOO)
    if is_like_torchrun:  # programs for gloo are written for torchrun
        from ..launch import launcher

        for name, value in (launcher.torch_variables() | launcher.torch_address()).items():
            os.environ.setdefault(name, value)
    if any(name in os.environ for name in _OF_MPI_LAUNCHERS):
        _explain_missing_variables()

    import torch.distributed as dist

    from . import torch_names

    if not dist.is_available() or torch_names.NAME in dist.Backend.backend_list:
        return

    dist.Backend.register_backend(torch_names.NAME, _later(".creation", "create"), extended_api=True, devices=DEVICES)
    dist.register_rendezvous_handler(SCHEME, _later(".rendezvous", "through_mpi"))  # type: ignore[attr-defined,no-untyped-call]
    torch_names.call_when_named(lambda: torch_names.wrap_rendezvous("env", _environment_or_mpi))
    torch_names.refuse_mixtures()
    torch_names.leave_flight_recorder()
    torch_names.keep_dynamo_out(torch_names.NAME)
    if _is_set(_AS_MPI):
        torch_names.take_name_of_mpi(_later(".creation", "create_for_mpi"))
    if _is_set(_AS_GLOO):
        torch_names.take_name_of_gloo(_later(".creation", "create_for_gloo"), DEVICES)
        torch_names.wrap_rendezvous("env", _environment_or_mpi)
    _has_address = has_address or not (_is_set(_AS_MPI) or is_like_torchrun)


def _explain_missing_variables() -> None:
    """Say after an uncaught exception that a launcher of MPI does not set the variables that torchrun sets."""
    original = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        original(kind, error, trace)
        if found := _MISSING.search(str(error)):
            from ..launch import launcher
            from ..log import log_fatal

            log_fatal(launcher.about_missing(found[1]))

    sys.excepthook = show


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def names_wanted() -> dict[str, bool]:
    """Return the names of other backends that the environment asks for, and whether torch takes each for torchmpi's."""
    wanted = [name for name in ("mpi", "gloo") if _is_set(f"TORCHMPI_AS_{name.upper()}")]
    if not wanted:
        return {}
    from . import torch_names

    taken = torch_names.names_taken()
    return {name: name in taken for name in wanted}


def _later(module: str, function: str) -> Callable[..., Any]:
    """Return a function whose module is imported when it is called."""

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module, __package__), function)(*arguments, **options)

    return call


def _environment_or_mpi(original: Any, url: str, **options: Any) -> Iterator[Any]:
    """Handle ``env://``, torch's default, in a program that names the backend."""
    from . import rendezvous

    return rendezvous.through_environment(original, url, has_address=_has_address, **options)
