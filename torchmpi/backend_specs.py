"""The facts about each backend that are needed without its class, one row each, in order of preference.

A new backend is a row here, its name in :data:`BackendName`, and a file with a class that states which
collectives it has and is made from the facts about the job (`torchmpi/backends/job_facts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reach = Literal["any ranks", "one host", "several hosts"]
"""Which ranks it connects: any, those of one host, or those of several hosts of which one has several ranks."""


@dataclass(frozen=True)
class BackendSpec:
    """One backend.

    >>> BACKENDS["nccl"].module, BACKENDS["nccl"].on_device, BACKENDS["shm"].reach
    ('nccl.nccl_backend', True, 'one host')
    """

    name: str
    module: str
    """Its module in `torchmpi.backends`."""
    class_name: str
    reach: Reach = "any ranks"
    on_device: bool = False
    """Whether it runs on the GPU itself, and takes no tensors of the host."""
    is_library: bool = False
    """Whether it leaves the algorithm to a library, whose choice is not known."""
    adds_by_host: bool = False
    """Whether it combines host by host instead of rank by rank."""


_Row = BackendSpec
BACKENDS = {row.name: row for row in (
    _Row("nccl", "nccl.nccl_backend", "NcclBackend", on_device=True, is_library=True),
    _Row("ipc", "ipc.ipc_backend", "IpcBackend", on_device=True),
    _Row("hierarchical", "hierarchical.hierarchical_backend", "HierarchicalBackend", "several hosts",
         adds_by_host=True),
    _Row("shm", "shm", "SharedMemoryBackend", "one host"),
    _Row("mpi", "mpi", "MPIBackend", is_library=True),
    _Row("p2p", "p2p_backend", "P2PBackend"),
    _Row("gloo", "gloo_backend", "GlooBackend", is_library=True),
)}  # fmt: skip
"""All backends by name: a call uses the first one that can run it."""
BackendName = Literal["mpi", "shm", "p2p", "hierarchical", "nccl", "ipc", "gloo"]
"""The same names, as a type."""
GPU_BACKENDS = tuple(row.name for row in BACKENDS.values() if row.on_device)
"""Backends that run on the device itself."""
HOST_BACKENDS = tuple(row.name for row in BACKENDS.values() if not row.on_device)
(HIERARCHICAL,) = (row.name for row in BACKENDS.values() if row.adds_by_host)
"""The backend that runs inside the hosts, then between them, and therefore adds group by group."""
