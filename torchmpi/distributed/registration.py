"""What happens at ``import torch``: the backend's name becomes known, and nothing else is loaded.

torch calls :func:`register` through the entry point of this package. It must be quick, must not import MPI, and must
not fail: torch would refuse to be imported at all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

SCHEME = "mpi"
DEVICES = ["cpu", "cuda"]
_AS_MPI = "TORCHMPI_AS_MPI"


def register() -> None:
    """Make ``init_process_group("torchmpi")`` and ``init_method="mpi://"`` work in this process. Twice is harmless.

        import torchmpi.distributed
        torchmpi.distributed.register()     # only where torchmpi is not installed, but on the path

    Without MASTER_ADDR in the environment, processes that an MPI launcher started meet through MPI, for every backend.
    """
    try:
        _register()
    except Exception as error:
        warnings.warn(f"torchmpi cannot be used as a torch.distributed backend here: {error!r}", stacklevel=2)


def _register() -> None:
    import torch.distributed as dist

    from . import torch_names

    if not dist.is_available() or hasattr(dist.Backend, torch_names.NAME.upper()):
        return

    dist.Backend.register_backend(torch_names.NAME, _create, extended_api=True, devices=DEVICES)
    dist.register_rendezvous_handler(SCHEME, _meet_through_mpi)  # type: ignore[attr-defined,no-untyped-call]
    torch_names.wrap_rendezvous("env", _environment_or_mpi)
    torch_names.keep_dynamo_out(torch_names.NAME)
    if os.environ.get(_AS_MPI, "") not in ("", "0"):
        torch_names.take_name_of_mpi()


def _create(options: Any, pg_options: Any) -> Any:
    from . import process_group

    return process_group.create(options)


def _meet_through_mpi(url: str, **options: Any) -> Iterator[Any]:
    from . import rendezvous

    return rendezvous.through_mpi(url, **options)


def _environment_or_mpi(original: Any, url: str, **options: Any) -> Iterator[Any]:
    """``env://``, which is also what torch takes if nothing is said."""
    from . import rendezvous

    return rendezvous.through_environment(original, url, **options)
