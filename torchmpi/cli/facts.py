"""What the commands know: plain data, gathered in :mod:`.gathering` and judged by the checks.

Everything here turns into JSON and back without loss, since facts travel from one process to another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class ProcessFacts:
    """One process, its software and the machine as it sees it, before torchmpi or MPI start."""

    host: str
    machine: str
    """Equal for processes of one machine, where two machines may have the same name."""
    executable: str
    versions: Mapping[str, str | None]
    """Of torchmpi, Python and the packages it needs; None: not installed."""
    launcher: str | None
    launcher_ranks: int
    launcher_local_rank: int | None
    environment: Mapping[str, str]
    """The variables that the checks know, and no others."""
    is_root: bool
    cores: Sequence[int]
    num_cpus: int
    """CPUs of the machine, allowed to this process or not."""
    num_physical_cores: int
    """Physical cores behind `cores`."""
    cpu_quota: float | None
    """CPUs' worth of time this container may use; None: no limit."""
    start_method: str
    """How multiprocessing starts workers."""
    has_infiniband: bool
    shm_total_bytes: int | None
    """Size of /dev/shm; None: there is none."""
    shm_free_bytes: int
    shm_is_writable: bool
    leftovers: Sequence[str]
    """Files in /dev/shm that dead jobs of this user have left."""
    mpi_packages: Mapping[str, str]
    """Python packages that bring an MPI library, with their versions."""
    mpi_files: Sequence[str]
    """MPI libraries in this Python environment."""
    cuda_built: str | None
    """The CUDA for which torch was built."""
    cuda_available: bool
    has_nvidia_driver: bool
    gpus: Sequence[str]
    """Identifiers of the GPUs this process sees."""
    peer_access: Sequence[Sequence[bool]]
    """Which of them can read the memory of which."""
    nccl: str | None
    """Version of the NCCL that can be loaded; None: no GPU, or `nccl_error` says why."""
    nccl_error: str | None
    mps: str | None
    """Where a daemon of NVIDIA's Multi-Process Service listens."""
    settings: Mapping[str, Any]
    settings_from_environment: Sequence[str]
    settings_error: str | None


@dataclasses.dataclass(frozen=True)
class MPIFacts:
    """The MPI library of one process."""

    rank: int
    size: int
    library: str
    paths: Sequence[str]
    """Files of MPI libraries in the memory of the process; more than one is trouble."""
    thread_level: str | None
    """None: MPI has not been initialised."""
    is_cuda_aware: bool | None


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """One rank of a job."""

    process: ProcessFacts
    mpi: MPIFacts

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankFacts:
        """The inverse of ``dataclasses.asdict``."""
        return cls(ProcessFacts(**data["process"]), MPIFacts(**data["mpi"]))


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """torchmpi started, used and stopped on the ranks of a job."""

    size: int
    seconds: float
    error: str | None
    """What went wrong, on whichever rank."""
    forked_child: str
    """What happened to a forked child that called torchmpi: ``refused`` is right."""
    gpu_memory: str | None = None
    """Why ranks could not open each other's memory on GPUs; empty: they could; None: there was nothing to try."""


@dataclasses.dataclass(frozen=True)
class Program:
    """An mpirun or mpiexec."""

    path: str
    library: str
    """``Open MPI 5.0.11``, as far as it says so."""
    is_on_path: bool


@dataclasses.dataclass(frozen=True)
class Launch:
    """Two ranks, really started with a launcher."""

    command: str
    status: int | None
    """None: it did not end in time and was killed."""
    seconds: float
    sizes: Sequence[int]
    """How many ranks each process saw; empty if none came as far as that."""
    output: str
    """The end of what it printed besides, for when it failed."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything the checks look at."""

    here: ProcessFacts
    mpi: MPIFacts | None
    """None: no library, or it did not start; `mpi_error` says why."""
    mpi_error: str | None = None
    mpi_is_missing: bool = False
    programs: Sequence[Program] = ()
    """The launchers found, the one to use first; not looked for inside a job."""
    launch: Launch | None = None
    """The trial; None inside a job, or if there was nothing to try."""
    ranks: Sequence[RankFacts] = ()
    """The ranks of this job, or of the trial."""
    self_test: SelfTest | None = None
    in_job: bool = False

    @property
    def uses_open_mpi(self) -> bool:
        """Whether the launcher, or the library, is Open MPI's."""
        libraries = [program.library for program in self.programs[:1]] + ([self.mpi.library] if self.mpi else [])
        return any(library.startswith("Open MPI") for library in libraries)

    @property
    def processes(self) -> list[ProcessFacts]:
        """Those of the ranks, or this one if there are no ranks."""
        return [rank.process for rank in self.ranks] or [self.here]

    def by_machine(self) -> dict[str, list[ProcessFacts]]:
        """The processes of each machine, in rank order."""
        machines: dict[str, list[ProcessFacts]] = {}
        for process in self.processes:
            machines.setdefault(process.machine, []).append(process)
        return machines
