"""The settings of a run: one frozen dataclass, fixed when ``start()`` runs.

Each field can be set in the environment as ``TORCHMPI_<FIELD>``; ``start(config=...)`` overrides the environment.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from . import log
from .backend_specs import GPU_BACKENDS
from .backend_specs import BackendName as BackendName
from .collective_specs import CollectiveName as CollectiveName
from .errors import ConfigError, kind_of

_T = TypeVar("_T")

PREFIX = "TORCHMPI_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}

# The names that calls and settings accept, as types; those of backends and collectives are beside their rows.
NoAverage = Literal["sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor"]  # also of integers
Operation = Literal[NoAverage, "avg"]
DeviceType = Literal["cpu", "cuda"]
Span = Literal["host", "across", "hosts"]
Mode = Literal["sync", "async"]
_Bind = Literal["auto", "none"]
_Check = Literal["auto", "strict", "board", "off"]
_Hierarchical = Literal["auto", "on", "off"]
_OnLostRank = Literal["end", "raise"]
ReplicaCheck = Literal["raise", "warn", "mend"]

# Variables with the same prefix that are not settings of a run.
SET_BY_RUN = (
    "TORCHMPI_RUN_PID", "TORCHMPI_RESTARTS", "TORCHMPI_RUNNING_FILE", "TORCHMPI_SPARES", "TORCHMPI_TERMINAL",
    "TORCHMPI_RESPAWNS", "TORCHMPI_NEWCOMER",
)  # fmt: skip
"""Variables that ``torchmpi run`` sets for its ranks."""
_NOT_FIELDS = (
    "TORCHMPI_TEST_", "TORCHMPI_AS_MPI", "TORCHMPI_AS_GLOO", "TORCHMPI_AS_TORCHRUN", "TORCHMPI_KERNEL_CHECKS",
    "TORCHMPI_KERNEL_DELAYS", "TORCHMPI_JOB_KEY", *SET_BY_RUN, log.VARIABLE,
)  # fmt: skip


def setting(
    default: _T,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float = math.inf,
    shared: bool = False,
) -> _T:
    """Return the field of a setting.

    Args:
        default: Its value where none is given.
        least: Its least value.
        above: A number below all its values.
        below: A number above all its values; of whole numbers at most 2^63.
        shared: Whether it must be the same on all ranks.
    """
    below = min(below, 1 << 63) if isinstance(default, int) else below
    metadata = {"least": least, "above": above, "below": below, "shared": shared}
    field: _T = dataclasses.field(default=default, metadata=metadata)
    return field


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of one run.

    >>> Config(threads=2).threads
    2
    >>> Config.from_environment({"TORCHMPI_VERBOSE": "0"}).verbose
    False
    """

    verbose: bool = True
    """Print one line on rank 0 at start, and the results of ``autotune()``."""
    bind: _Bind = "auto"
    """``auto``: bind each local rank to its own cores, unless the launcher has bound it or there are too few cores;
    ``none``: do not bind."""
    threads: int = setting(0, least=0, below=1 << 31)
    """Number of threads of torch for one operation; 0: one per core that only this rank uses."""
    check: _Check = setting("auto", shared=True)
    """Comparison of calls between ranks. ``board``: through shared memory, without messages (ranks of one host);
    ``strict``: by a header exchanged before each call; ``auto``: board within a host, strict across hosts; ``off``."""
    stall_warning_seconds: float = setting(30.0, least=0)
    """Report a call that waits longer than this, with the ranks that have not arrived."""
    stall_abort_seconds: float = setting(600.0, least=0)
    """End the job when a call waits longer than this; 0: never."""
    heartbeat_seconds: float = setting(30.0, least=0, shared=True)
    """End the job when another host does not answer for this time; 0: do not connect the hosts for that."""
    watchdog_period_seconds: float = setting(0.5, above=0, below=threading.TIMEOUT_MAX)
    """Interval at which the watchdog checks for stalls."""
    late_rank_share: float = setting(0.05, least=0)
    """Name a rank, with the likely cause, for which the other ranks wait for this share of the time or more
    (docs/hangs.md); 0: never."""
    message_bytes: int = setting(1 << 30, above=0, shared=True)
    """Largest message of one call of MPI, whose counts have 32 bits; larger ones are split."""
    pipeline_bytes: int = setting(4 << 20, above=0, shared=True)
    """Size of the chunks in which rank-order reductions are computed, so that the sums stay in the cache."""
    bucket_bytes: int = setting(4 << 20, above=0, shared=True)
    """Largest size of a bucket: tensors that are fused into one message, also those of asynchronous backward."""
    gpu_bucket_bytes: int = setting(32 << 20, above=0, shared=True)
    """The same for CUDA tensors, whose calls take longer to begin."""
    slot_bytes: int = setting(512 << 10, least=0, shared=True)
    """Size of a slot in shared memory, the largest chunk that a rank publishes to the others of its host. Each rank has
    two slots, four if there are two ranks, smaller ones if there are many; 0: no shared memory."""
    read_directly: bool = True
    """Let ranks of a host read each other's tensors with a system call, where that is permitted and faster."""
    fast_path: bool = True
    """Run short collectives that were called before in machine code, without Python (docs/design/fast-path.md)."""
    share_ddp_buckets: bool = True
    """Move the buckets of DistributedDataParallel to memory that the ranks of a host share, so that reductions copy
    nothing."""
    replica_check_steps: int = setting(0, least=0, shared=True)
    """Compare the parameters of each DistributedDataParallel over the ranks after so many steps of its optimizer
    (docs/loss.md); 0: never."""
    replica_check: ReplicaCheck = setting("raise", shared=True)
    """What follows if they differ. ``raise``: an error on all ranks; ``warn``: a line in the log; ``mend``: the same,
    and the ranks that differ get the tensors of the others."""
    staging_bytes: int = setting(32 << 20, least=0, shared=True)
    """Size of a staging area of backend `ipc`, the largest chunk of a CUDA tensor that a rank publishes to the others
    of its host. Each rank has two areas on its GPU for each communicator that uses them; 0: no backend `ipc`."""
    gpu_backends: str = setting("auto", shared=True)
    """Backends of the GPU that may be chosen for CUDA tensors: `nccl`, `ipc` or both, with a comma. `auto`: `nccl`, and
    `ipc` among ranks that share one GPU. Without one, CUDA tensors are staged through the host. `none`: both are off,
    also for ``backend=``."""
    backend: Literal["auto"] | BackendName = setting("auto", shared=True)
    """Backend of every call that it supports; ``auto``: chosen by the selection table, default or measured."""
    hierarchical: _Hierarchical = setting("auto", shared=True)
    """Hierarchical collectives over several hosts. ``on``: wherever possible; ``off``: never; ``auto``: as ``on``,
    unless the selection table was measured."""
    tuning_file: str = ""
    """File in which ``autotune()`` saves its table; empty: in the user's cache folder; ``none``: not saved."""
    host_name: str = ""
    """Name by which ranks are grouped into hosts; empty: the name of the host."""
    abort_on_exception: bool = True
    """End the whole job on an uncaught exception or SIGTERM on one rank."""

    on_lost_rank: _OnLostRank = setting("end", shared=True)
    """Effect of a killed rank on the others. ``end``: they end too; ``raise``: their calls raise ``RankLostError``,
    and the program may continue with ``recover()`` (Open MPI 5, and ranks without MPI)."""
    server_copies: bool = setting(False, shared=True)
    """Parameter servers copy each chunk before they change it, so that a send is undone that a killed rank has half
    applied; without effect if `on_lost_rank` is ``end``."""
    timeline: str = setting("", shared=True)
    """Folder in which each rank records a timeline from start() to stop() (docs/timeline.md); empty: none."""
    flight_record: str = ""
    """Folder in which each rank keeps a file with its last calls (docs/flight-record.md); empty: in memory, where
    ``torchmpi dump`` finds them."""
    metrics: str = ""
    """Destination of the metrics of a rank for Prometheus (docs/metrics.md): a folder, for a file that is rewritten; or
    ``PORT`` or ``ADDRESS:PORT``, to which the local rank is added, for an HTTP server; empty: nowhere."""
    metrics_seconds: float = setting(15.0, above=0, below=threading.TIMEOUT_MAX)
    """Interval at which the file of `metrics` is rewritten."""
    summary: bool = setting(False, shared=True)
    """Print a table of the calls of all ranks on rank 0 at stop()."""
    report: str = ""
    """File to which the report of a job that fails is also written, as JSON; empty: none."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_type(field.name, type(field.default))
            self._check_value(field)
        if not set(self.chosen_gpu_backends) <= set(GPU_BACKENDS):
            raise ConfigError(
                f"gpu_backends={self.gpu_backends!r} is neither auto nor none nor a list of {', '.join(GPU_BACKENDS)}."
            )

    def _check_value(self, field: dataclasses.Field[Any]) -> None:
        value, choices = getattr(self, field.name), _choices().get(field.name)
        if choices and value not in choices:
            raise ConfigError(f"{field.name}={value!r} is not one of {', '.join(choices)}.")
        above, least, below = (field.metadata.get(name) for name in ("above", "least", "below"))
        if above is None and least is None:
            return
        must_be = (
            f"{field.name}={value!r} must be {f'less than {below}' if below <= value < math.inf else 'finite'} and"
        )
        if above is not None and not above < value < below:
            raise ConfigError(f"{must_be} greater than {above or 'zero'}.")
        if least is not None and not least <= value < below:
            raise ConfigError(f"{must_be} {'not negative' if least == 0 else f'at least {least}'}.")

    def _check_type(self, name: str, kind: type) -> None:
        """Raise a ConfigError unless a setting has the type of its default, or one that stands for it."""
        value = getattr(self, name)
        accepted, expected = {
            bool: (bool, "True or False"),
            int: (numbers.Integral, "a whole number"),
            float: (numbers.Real, "a number"),
            str: ((str, os.PathLike), "a string"),
        }[kind]
        is_number_for_flag = kind is bool and isinstance(value, int) and value in (0, 1)
        is_flag_for_number = kind in (int, float) and isinstance(value, bool)
        if is_flag_for_number or not (isinstance(value, accepted) or is_number_for_flag):  # type: ignore[arg-type]
            raise ConfigError(f"{name}={value!r} is {kind_of(value)}; expected {expected}.")

    def bucket_bytes_on(self, device_type: str) -> int:
        """Return the largest size of a bucket of tensors on a type of device.

        >>> Config().bucket_bytes_on("cpu"), Config().bucket_bytes_on("cuda")
        (4194304, 33554432)
        """
        return self.bucket_bytes if device_type == "cpu" else self.gpu_bucket_bytes

    @property
    def chosen_gpu_backends(self) -> tuple[str, ...]:
        """Backends of the GPU that may be chosen without being requested.

        >>> Config(gpu_backends="ipc,nccl").chosen_gpu_backends, Config(gpu_backends="none").chosen_gpu_backends
        (('ipc', 'nccl'), ())
        >>> Config().chosen_gpu_backends
        ('nccl', 'ipc')
        """
        if self.gpu_backends in ("auto", "none"):
            return GPU_BACKENDS if self.gpu_backends == "auto" else ()
        return tuple(name.strip() for name in self.gpu_backends.split(","))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Return the defaults, overridden by every ``TORCHMPI_<FIELD>`` that is set.

        >>> Config.from_environment({"TORCHMPI_BUCKET_BYTES": "1048576"}).bucket_bytes
        1048576
        """
        environment = os.environ if environment is None else environment
        if (level := environment.get(log.VARIABLE, log.DEFAULT_LEVEL)).lower() not in log.LEVELS:
            raise ConfigError(f"{log.VARIABLE}={level!r} is not one of {', '.join(log.LEVELS)}.")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        for variable, text in environment.items():
            if not variable.startswith(PREFIX) or variable.startswith(_NOT_FIELDS):
                continue
            name = variable[len(PREFIX) :].lower()
            if name not in fields:
                known = ", ".join(PREFIX + known.upper() for known in fields)
                raise ConfigError(f"The environment sets {variable}, which is not a setting. Known settings: {known}.")
            values[name] = parse(variable, text, type(fields[name].default))
        return cls(**values)  # type: ignore[arg-type]


@functools.cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Return the values of the settings that have few, from their types.

    >>> _choices()["bind"], _choices()["backend"][:2]
    (('auto', 'none'), ('auto', 'mpi'))
    """
    return {name: values for name, hint in get_type_hints(Config).items() if (values := _values_of(hint))}


def _values_of(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(value for part in get_args(hint) for value in _values_of(part))


def shared_settings(config: Config) -> dict[str, object]:
    """Return the settings that must be the same on all ranks.

    >>> shared_settings(Config(summary=True))["summary"]
    True
    """
    return {each.name: getattr(config, each.name) for each in dataclasses.fields(config) if each.metadata.get("shared")}


def cache_folder() -> Path | None:
    """Return the folder of this user for compiled code and measured tables: in ``XDG_CACHE_HOME``, or ``~/.cache``.

    None for a user without a home: in a container, a user id that is not in /etc/passwd, or one for which HOME names
    the home of another user; and for system users with the home /dev/null.
    """
    import platformdirs

    try:
        folder = platformdirs.user_cache_path("torchmpi")
        folder.stat()
    except FileNotFoundError:
        pass
    except (RuntimeError, OSError):
        return None
    return folder if folder.is_absolute() else None  # relative: no home, in older versions of platformdirs


def parse(variable: str, text: str, kind: type) -> Any:
    """Return the value of an environment variable, or raise ConfigError."""
    if kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(f"{variable}={text!r} is neither yes nor no; use 1 or 0.")
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a valid {kind.__name__}.") from None
