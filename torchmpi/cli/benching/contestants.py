"""What is timed of torchmpi itself, and the plain copy beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

import torchmpi

from .arguments import AUTO, DIST, PEERS
from .workload import IN_PLACE, ROOTED, Allocate, Workload

Call = Callable[[], object]
COPY = "copy"
LAUNCH = "auto launch"


class Contestant(Protocol):
    """Something that can run verbs."""

    name: str

    def why_not(self, collective: str, dtype: str) -> str | None:
        """None, or the reason why it cannot run this here."""

    def allocate(self) -> Allocate | None:
        """Where its tensors come from; None: plain memory, the same for all."""

    def bind(self, work: Workload, root: int) -> Call:
        """One call of the verb on these buffers, ready to be timed."""


class Ours:
    """The verbs of torchmpi, by one backend, or by the one that a call without ``backend=`` gets."""

    def __init__(self, backend: str | None, memory: str, *, asynchronous: bool, device: str = "cpu") -> None:
        self.backend, self.memory, self.asynchronous = backend, memory, asynchronous
        self.device = device
        name = f"torchmpi {backend}" if backend in PEERS else backend or AUTO
        self.name = name + ("" if memory == "plain" else f" {memory}")

    def why_not(self, collective: str, dtype: str) -> str | None:
        if self.memory == "shared" and not hasattr(torchmpi, "empty_shared"):
            return "this version has no mpi.empty_shared"
        if self.backend is None:
            return None
        mode = "async" if self.asynchronous else "sync"
        verdict = torchmpi.collective_availability()[self.backend, collective, self.device, mode]
        return None if verdict == "available" else verdict.removeprefix("unavailable: ")

    def allocate(self) -> Allocate | None:
        if self.memory == "plain":
            return None
        empty_shared: Any = getattr(torchmpi, "empty_shared")  # noqa: B009
        return lambda numel, dtype: empty_shared(numel, dtype=dtype)

    def bind(self, work: Workload, root: int) -> Call:
        positional: list[Any] = [work.source]
        named: dict[str, Any] = {} if self.backend is None else {"backend": self.backend}
        is_root = work.rank == root
        if work.collective == "scatter" and not is_root:
            positional[0] = None
        if work.collective in ROOTED:
            positional.append(root)
        if work.collective not in IN_PLACE and (work.collective != "gather" or is_root):
            positional.append(work.target)
        if not self.asynchronous:
            return partial(getattr(torchmpi, work.collective), *positional, **named)
        start = partial(getattr(torchmpi, f"{work.collective}_async"), *positional, **named)
        return self._measured(start)

    def _measured(self, start: Callable[[], Any]) -> Call:
        """What of an asynchronous call is timed."""
        return lambda: start().wait()


class Launch(Ours):
    """What an asynchronous call costs the thread that makes it: until it returns, without the wait."""

    def __init__(self, device: str) -> None:
        super().__init__(None, "plain", asynchronous=True, device=device)
        self.name = LAUNCH

    def _measured(self, start: Callable[[], Any]) -> Call:
        return start


def our_contestants(
    backends: Sequence[str] | None, memories: Sequence[str], *, asynchronous: bool, device: str = "cpu"
) -> list[Ours]:
    """The default choice and each backend on plain tensors; on shared ones only what was asked for, or the default."""
    asked: Sequence[str] = (AUTO, *_available(device)) if backends is None else backends
    named = [name for name in asked if name != DIST]
    chosen = [(backend, "plain") for backend in named if "plain" in memories]
    chosen += [(backend, "shared") for backend in ((AUTO,) if backends is None else named) if "shared" in memories]
    ours = [
        Ours(None if name == AUTO else name, memory, asynchronous=asynchronous, device=device)
        for name, memory in chosen
        if device == "cpu" or memory == "plain"  # tensors of a device are not in the memory that hosts share
    ]
    return [*ours, Launch(device)] if asynchronous and device != "cpu" else ours


def _available(device_type: str) -> list[str]:
    """The backends that can run some verb on tensors of this device."""
    table = torchmpi.collective_availability()
    names = {name for (name, collective, device, _), verdict in table.items()
             if verdict == "available" and device == device_type and collective != "barrier"}  # fmt: skip
    return [name for name in dict.fromkeys(key[0] for key in table) if name in names]


class Copy:
    """A plain copy of the payload by every rank at once: the limit for whatever writes its result to memory."""

    name = COPY

    def __init__(self) -> None:
        self._target = torch.empty(0)

    def why_not(self, collective: str, dtype: str) -> str | None:
        return None

    def allocate(self) -> Allocate | None:
        return None

    def bind(self, work: Workload, root: int) -> Call:
        source = max(work.source, work.target, key=torch.Tensor.numel)
        self._target = torch.zeros_like(source)
        return partial(self._target.copy_, source)
