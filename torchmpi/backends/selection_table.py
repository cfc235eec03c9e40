"""Which transport for which call, as data: keys, rules by size, the default, and the table of all of them.

Nothing here knows a backend but by name. A *rule* lists transports by size, ``((4096, "mpi"), (None, "shm"))``: tensors
of up to 4096 bytes go by `mpi`, the others by `shm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from ..errors import ArgumentError

COLLECTIVES = (
    "barrier", "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall",
)  # fmt: skip
DEVICES = ("cpu", "cuda")
SPANS = ("host", "across", "hosts")
"""Where the ranks of a communicator are: on one host; each on a host of its own; on several, some of them together."""
MODES = ("sync", "async")
BY_SIZE = ("allreduce", "reduce", "broadcast", "reduce_scatter")
"""Verbs whose tensors agree in shape on all ranks, so that all find the same line of a rule."""
REDUCING = ("allreduce", "reduce", "reduce_scatter")
_SHORT_BYTES = 64 << 10
DEVICE_TRANSPORTS = ("nccl", "ipc")
"""Transports that work on the device itself, the one to be taken first in front."""
OF_THE_HOST = ("barrier", "scatter")
"""Verbs that go by the rules for the CPU wherever a tensor is: ranks that have none cannot know of its device."""
HIERARCHICAL = "hierarchical"
"""Inside the hosts, then between them: the one transport that adds group by group."""

Rule = tuple[tuple[int | None, str], ...]
"""(largest size in bytes, transport), in order of size; the last size is None, for everything larger."""


class Key(NamedTuple):
    """What a rule is for."""

    collective: str
    device: str
    span: str
    mode: str


def keys(
    collective: str | None = None, device: str | None = None, span: str | None = None, mode: str | None = None
) -> Iterator[Key]:
    """All keys there are, or those with the given parts.

    >>> list(keys("barrier", "cpu", "host"))
    [Key(collective='barrier', device='cpu', span='host', mode='sync')]
    """
    wanted = {
        "collective": (collective, COLLECTIVES),
        "device": (device, DEVICES),
        "span": (span, SPANS),
        "mode": (mode, MODES),
    }
    for name, (part, known) in wanted.items():
        if part is not None and part not in known:
            raise ArgumentError(f"{name}={part!r} is unknown. Use one of: {', '.join(known)}.")
    for found in product(*([part] if part is not None else known for part, known in wanted.values())):
        key = Key(*found)
        is_known = key.device == "cpu" or key.collective not in OF_THE_HOST
        if is_known and (key.collective != "barrier" or key.mode == "sync"):  # there is no barrier_async()
            yield key


def span_of(group: Any) -> str:
    """The span of the ranks of a group, which knows its hosts and its size."""
    num_hosts = len(group.hosts)
    return "host" if num_hosts == 1 else "across" if num_hosts == group.size else "hosts"


def out_of_reach(transport: str, span: str) -> str | None:
    """Why a transport is of no use to ranks so placed, or None if it may be.

    >>> out_of_reach("shm", "host"), out_of_reach("shm", "hosts")
    (None, 'its ranks are on several hosts')
    """
    if transport == "shm" and span != "host":
        return "its ranks are on several hosts"
    if transport == HIERARCHICAL and span != "hosts":
        return "all its ranks are on one host" if span == "host" else "each of its ranks is on a host of its own"
    return None


def device_transport(key: Key, can: Callable[[str], bool], *, forced: str = "auto", aware: bool = False) -> str | None:
    """What CUDA tensors go by unless something else was asked for; None where they go through the host.

    `can` tells which transports are possible; `aware`, whether the MPI library takes memory of a device.

    >>> device_transport(Key("allreduce", "cuda", "host", "sync"), {"mpi", "ipc"}.__contains__)
    'ipc'
    """
    if key.device != "cuda":
        return None
    if forced != "auto" and can(forced):
        return forced
    return next(filter(can, DEVICE_TRANSPORTS), "mpi" if aware else None)


def default_transport(
    key: Key, can: Callable[[str], bool], *, forced: str = "auto", hierarchical: str = "auto", aware: bool = False
) -> str:
    """The transport that is taken unless something else was measured or asked for.

    `can` tells which transports are possible; `mpi` always is. `forced` and `hierarchical` are the settings.

    >>> default_transport(Key("allreduce", "cpu", "host", "sync"), {"mpi", "shm"}.__contains__)
    'shm'
    """
    if forced != "auto" and can(forced):
        return forced
    direct = device_transport(key, can, aware=aware)
    if direct is not None:
        return direct
    if key.span == "hosts" and hierarchical != "off" and can(HIERARCHICAL):
        return HIERARCHICAL
    if key.span == "host" and can("shm"):
        return "shm"
    return "mpi"


def default_rule(
    key: Key,
    can: Callable[[str], bool],
    *,
    num_hosts: int,
    forced: str = "auto",
    hierarchical: str = "auto",
    aware: bool = False,
) -> Rule:
    """The same by size: between three hosts and more, long sums go by messages of our own (benchmarks/link_bytes.py).

    >>> default_rule(Key("allreduce", "cpu", "across", "sync"), {"mpi", "p2p"}.__contains__, num_hosts=3)
    ((65536, 'mpi'), (None, 'p2p'))
    """
    transport = default_transport(key, can, forced=forced, hierarchical=hierarchical, aware=aware)
    is_staged = device_transport(key, can, forced=forced, aware=aware) is None
    is_long_way = key.span == "across" and is_staged and key.collective in REDUCING and num_hosts > 2
    if is_long_way and forced == "auto" and can("p2p"):
        return ((_SHORT_BYTES, transport), (None, "p2p"))
    return ((None, transport),)


def is_all_or_nothing(key: Key, rule: Rule) -> bool:
    """Whether a rule may not be changed for some sizes only: see `checked`."""
    return key.collective in REDUCING and any(transport == HIERARCHICAL for _, transport in rule)


def checked(key: Key, entries: str | Iterable[tuple[int | None, str]]) -> Rule:
    """A rule from what a user or a file says, or a refusal; neighbors with one transport become one.

    >>> checked(Key("reduce", "cpu", "host", "sync"), [(64, "mpi"), (4096, "mpi"), (None, "shm")])
    ((4096, 'mpi'), (None, 'shm'))
    """
    if isinstance(entries, str):
        return ((None, entries),)
    rule = tuple((limit, transport) for limit, transport in entries)
    limits = [limit for limit, _ in rule[:-1]]
    if not rule or rule[-1][0] is not None:
        raise ArgumentError(f"{rule} must end with (None, transport), for tensors of any greater size.")
    if not all(isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 for limit in limits):
        raise ArgumentError(f"{rule}: sizes are whole numbers of bytes above 0; only the last one is None.")
    if limits != sorted(set(limits)):  # type: ignore[type-var]
        raise ArgumentError(f"{rule}: the sizes must increase.")
    if len(rule) > 1 and key.collective not in BY_SIZE:
        raise ArgumentError(
            f"{key.collective} takes one transport for all sizes, since its ranks may differ in length; by size go "
            f"{', '.join(BY_SIZE)}."
        )
    rule = tuple(
        (limit, transport)
        for (limit, transport), (_, following) in zip(rule, (*rule[1:], (None, None)), strict=True)
        if transport != following
    )
    if len(rule) > 1 and is_all_or_nothing(key, rule):
        raise ArgumentError(
            f"{key.collective}: {HIERARCHICAL} takes all sizes or none. It adds group by group, others in rank order: "
            "the "
            "bits of a sum would depend on the size of the tensor."
        )
    return rule


def with_limit(key: Key, rule: Rule, up_to_bytes: int, transport: str) -> Rule:
    """The rule with another transport for tensors of up to so many bytes.

    >>> with_limit(Key("reduce", "cpu", "host", "sync"), ((None, "shm"),), 1024, "mpi")
    ((1024, 'mpi'), (None, 'shm'))
    """
    larger = [(limit, other) for limit, other in rule if limit is None or limit > up_to_bytes]
    return checked(key, [(up_to_bytes, transport), *larger])


def at(rule: Rule, num_bytes: int) -> str:
    """The transport for a tensor of this size.

    >>> at(((1024, "mpi"), (None, "shm")), 1024), at(((1024, "mpi"), (None, "shm")), 1025)
    ('mpi', 'shm')
    """
    return next(transport for limit, transport in rule if limit is None or num_bytes <= limit)


def format_bytes(number: int) -> str:
    """A size as people write it.

    >>> format_bytes(4096), format_bytes(300), format_bytes(724077)
    ('4 KiB', '300 B', '707.1 KiB')
    """
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def format_rule(rule: Rule) -> str:
    """A rule in words.

    >>> format_rule(((4096, "mpi"), (None, "shm")))
    'up to 4 KiB mpi, above shm'
    """
    *smaller, (_, last) = rule
    parts = [f"up to {format_bytes(limit or 0)} {transport}" for limit, transport in smaller]
    return ", ".join([*parts, f"above {last}" if parts else last])


class Table(dict[Key, Rule]):
    """A rule for every key. Printed, it has one line per verb and span."""

    def variants(self, collective: str, span: str) -> str:
        """The rules of a verb and span in words: one where all are the same, else by device and mode."""
        texts: dict[str, str] = {}
        for device in DEVICES:
            modes = {key.mode: format_rule(self[key]) for key in keys(collective, device, span) if key in self}
            if len(set(modes.values())) == 1:
                texts[device] = next(iter(modes.values()))
            else:
                texts |= {f"{device} {mode}": text for mode, text in modes.items()}
        if len(set(texts.values())) == 1:
            return next(iter(texts.values()))
        return "; ".join(f"{label}: {text}" for label, text in texts.items())

    def text(self, spans: Sequence[str] = SPANS) -> str:
        """The lines of some spans."""
        known = dict.fromkeys((key.collective, key.span) for key in self if key.span in spans)
        return "\n".join(f"{collective:14} {span:6}  {self.variants(collective, span)}" for collective, span in known)

    def __str__(self) -> str:
        return self.text()
