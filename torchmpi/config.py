"""All tunables, in one frozen dataclass, fixed when ``start()`` runs.

Each field can be given in the environment as ``TORCHMPI_<FIELD>``; what is passed to ``start(config=...)`` wins.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from .errors import ConfigError

PREFIX = "TORCHMPI_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_CHOICES = {
    "bind": ("auto", "none"),
    "check": ("auto", "strict", "board", "off"),
    "hierarchical": ("auto", "on", "off"),
}
_POSITIVE = ("watchdog_period_seconds", "message_bytes", "pipeline_bytes", "bucket_bytes")
# The environment has settings of other parts of the project under the same prefix.
_NOT_FIELDS = ("TORCHMPI_TEST_", "TORCHMPI_AS_MPI", "TORCHMPI_KERNEL_CHECKS")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of one run.

    >>> Config(threads=2).threads
    2
    >>> Config.from_environment({"TORCHMPI_VERBOSE": "0"}).verbose
    False
    """

    verbose: bool = True
    """Print one line on rank 0 at start."""
    bind: str = "auto"
    """``auto``: give each local rank its own cores if the launcher has not and the ranks fit; ``none``: leave it."""
    threads: int = 0
    """Threads torch may use for one operation; 0 = the cores this rank has to itself."""
    check: str = "auto"
    """How calls are compared between ranks. ``board``: through a shared page, no extra message (ranks of one host);
    ``strict``: a header is exchanged before each call; ``auto``: board within a host, strict across; ``off``."""
    stall_warning_seconds: float = 30.0
    """Report a wait that takes longer than this, naming the ranks that have not arrived."""
    stall_abort_seconds: float = 600.0
    """End the job when a wait takes longer than this; 0 = never."""
    watchdog_period_seconds: float = 0.5
    """How often the watchdog looks."""
    message_bytes: int = 1 << 30
    """Largest message handed to MPI in one call (its counts are 32 bit); more goes in several."""
    pipeline_bytes: int = 4 << 20
    """Piece in which ordered reductions are computed, so that the sums stay in the cache."""
    bucket_bytes: int = 4 << 20
    """Size up to which tensors are fused into one message."""
    slot_bytes: int = 512 << 10
    """Largest piece of a tensor that a rank shows the others of its host at once (each has two such slots in shared
    memory, four if there are two ranks, smaller ones where there are many); 0 = no shared memory."""
    read_directly: bool = True
    """Let ranks of a host read each other's tensors by a call of the system where it allows that, and it is faster."""
    fast_path: bool = True
    """Run short collectives that were made before in machine code, without Python (docs/design/fast-path.md)."""
    share_ddp_buckets: bool = True
    """Move the buckets of DistributedDataParallel to memory that the ranks of a host share, so that nothing is copied
    to reduce them."""
    staging_bytes: int = 32 << 20
    """Largest piece of a CUDA tensor that a rank shows the others of its host at once by `ipc` (each has two such areas
    on its GPU for each communicator that needs them); 0 = none."""
    backend: str = "auto"
    """Backend that runs every call it can; ``auto``: the one that suits the call, by default or as measured."""
    hierarchical: str = "auto"
    """Collectives over several hosts in steps, inside the hosts and between them. ``on``: wherever possible; ``off``:
    never; ``auto``: as ``on`` unless something else was measured."""
    tuning_file: str = ""
    """Where ``autotune()`` keeps what it measured; empty: in the user's cache folder; ``none``: nowhere."""
    host_name: str = ""
    """Name under which this rank is grouped into hosts; empty = the host's own."""
    abort_on_exception: bool = True
    """An uncaught exception or SIGTERM on one rank ends the whole job."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}.")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be greater than zero.")
        for name in ("threads", "slot_bytes", "staging_bytes", "stall_warning_seconds", "stall_abort_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must not be negative.")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """The defaults, overridden by every ``TORCHMPI_<FIELD>`` that is set.

        >>> Config.from_environment({"TORCHMPI_BUCKET_BYTES": "1048576"}).bucket_bytes
        1048576
        """
        environment = os.environ if environment is None else environment
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        for variable, text in environment.items():
            if not variable.startswith(PREFIX) or variable.startswith(_NOT_FIELDS):
                continue
            name = variable[len(PREFIX) :].lower()
            if name not in fields:
                known = ", ".join(PREFIX + known.upper() for known in fields)
                raise ConfigError(f"The environment sets {variable}, which is no setting. Known are: {known}.")
            values[name] = _parse(variable, text, type(fields[name].default))
        return cls(**values)  # type: ignore[arg-type]


def _parse(variable: str, text: str, kind: type) -> object:
    if kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(f"{variable}={text!r} is neither yes nor no; use 1 or 0.")
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a valid {kind.__name__}.") from None
