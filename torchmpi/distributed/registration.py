"""Registration of the backend with torch.

``import torch`` calls :func:`register` through an entry point of this package. The function must be fast, must not
import MPI and must not raise, otherwise ``import torch`` would fail.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

SCHEME = "mpi"
DEVICES = ["cpu", "cuda"]
_AS_MPI, _AS_TORCHRUN = "TORCHMPI_AS_MPI", "TORCHMPI_AS_TORCHRUN"


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
    if _is_set(_AS_TORCHRUN):
        from ..session import launcher

        for name, number in launcher.torch_variables().items():
            os.environ.setdefault(name, number)

    import torch.distributed as dist

    from . import torch_names

    if not dist.is_available() or torch_names.NAME in dist.Backend.backend_list:
        return

    dist.Backend.register_backend(torch_names.NAME, _create, extended_api=True, devices=DEVICES)
    dist.register_rendezvous_handler(SCHEME, _rendezvous_through_mpi)  # type: ignore[attr-defined,no-untyped-call]
    torch_names.call_when_named(lambda: torch_names.wrap_rendezvous("env", _environment_or_mpi))
    torch_names.refuse_mixtures()
    torch_names.leave_flight_recorder()
    torch_names.keep_dynamo_out(torch_names.NAME)
    if _is_set(_AS_MPI):
        torch_names.take_name_of_mpi()


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def _create(options: Any, pg_options: Any) -> Any:
    from . import process_group

    return process_group.create(options)


def _rendezvous_through_mpi(url: str, **options: Any) -> Iterator[Any]:
    from . import rendezvous

    return rendezvous.through_mpi(url, **options)


def _environment_or_mpi(original: Any, url: str, **options: Any) -> Iterator[Any]:
    """Handle ``env://``, torch's default, in a program that names the backend."""
    from . import rendezvous

    return rendezvous.through_environment(original, url, **options)
