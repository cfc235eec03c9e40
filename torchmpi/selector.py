"""Which backend runs a call."""

from __future__ import annotations

from .backends import NAMES, Backend
from .errors import BackendUnavailableError

VERBS = (
    "barrier", "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall",
)  # fmt: skip
DEVICES = ("cpu", "cuda")
MODES = ("sync", "async")


class Availability(dict[tuple[str, str, str, str], str]):
    """(backend, verb, device, mode) -> ``available``, ``unavailable: reason`` or ``unimplemented``.

    Printed, it is a table with one line per backend, device and verdict.
    """

    def __str__(self) -> str:
        lines: dict[tuple[str, str, str], list[str]] = {}
        for (backend, verb, device, mode), verdict in self.items():
            verbs = lines.setdefault((backend, device, verdict), [])
            entry = verb if mode == "sync" else f"{verb}_async"
            verbs.append(entry)
        return "\n".join(
            f"{backend:5} {device:5} {verdict}" + (f": {', '.join(verbs)}" if verdict == "available" else "")
            for (backend, device, verdict), verbs in lines.items()
        )


class Selector:
    """The backends of a run, and the choice among them."""

    def __init__(self, backends: dict[str, Backend]) -> None:
        self.backends = backends

    def choose(self, verb: str, device_type: str, wanted: str | None, where: str) -> Backend:
        """The backend for a call, or a refusal with the reason."""
        name = wanted or "mpi"
        if name not in NAMES:
            raise BackendUnavailableError(
                f"{where}: {verb}: backend={name!r} is unknown. Use one of: {', '.join(self.backends)}."
            )
        if name not in self.backends:
            raise BackendUnavailableError(
                f"{where}: {verb}: backend={name!r} is not part of this version. Use one of: "
                f"{', '.join(self.backends)}, "
                "or leave backend out."
            )
        backend = self.backends[name]
        reason = backend.why_not(verb, device_type)
        if reason is not None:
            raise BackendUnavailableError(
                f"{where}: {verb}: backend={name!r} cannot take {device_type} tensors: {reason}."
            )
        return backend

    def availability(self) -> Availability:
        """What each backend can do here."""
        table = Availability()
        for name in NAMES:
            backend = self.backends.get(name)
            for device in DEVICES:
                for verb in VERBS:
                    reason = backend.why_not(verb, device) if backend is not None else None
                    verdict = (
                        "unimplemented" if backend is None else f"unavailable: {reason}" if reason else "available"
                    )
                    for mode in MODES:
                        if verb != "barrier" or mode == "sync":
                            table[name, verb, device, mode] = verdict
        return table
