"""The table that selects a backend for each call: keys, rules by size, default rules.

Backends appear by name only. A *rule* lists backends by size: with ``((4096, "mpi"), (None, "shm"))``, tensors of up to
4096 bytes use `mpi`, larger ones `shm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, get_args

from ..backend_specs import BACKENDS, GPU_BACKENDS, HIERARCHICAL, HOST_BACKENDS
from ..collective_specs import COLLECTIVES, SAME_SHAPE, SPECS
from ..communicators.group import Group
from ..config import DeviceType, Mode, Span
from ..errors import ArgumentError

DEVICES: tuple[str, ...] = get_args(DeviceType)
SPANS: tuple[str, ...] = get_args(Span)
"""Placement of the ranks of a communicator: all on one host; each on a host of its own; several hosts, some shared."""
MODES: tuple[str, ...] = get_args(Mode)
_SHORT_BYTES = 64 << 10

Rule = tuple[tuple[int | None, str], ...]
"""(largest size in bytes, backend), in order of size; the last size is None, for all larger tensors."""


class Key(NamedTuple):
    """The calls to which a rule applies."""

    collective: str
    device: str
    span: str
    mode: str


def keys(
    collective: str | None = None, device: str | None = None, span: str | None = None, mode: str | None = None
) -> Iterator[Key]:
    """Return all keys, or those with the given parts.

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
        spec = SPECS[key.collective]  # where some ranks have no tensor, the rules for the CPU are those of any device
        if (key.device == "cpu" or spec.is_everywhere) and (key.mode == "sync" or spec.has_async):
            yield key


def span_of(group: Group) -> str:
    """Return the span of a group."""
    num_hosts = len(group.hosts)
    return "host" if num_hosts == 1 else "across" if num_hosts == group.size else "hosts"


def out_of_reach(transport: str, span: str) -> str | None:
    """Return the reason why a backend cannot be used with a placement of ranks, or None.

    >>> out_of_reach("shm", "host"), out_of_reach("shm", "hosts")
    (None, 'its ranks are on several hosts')
    """
    row = BACKENDS.get(transport)  # not in the table: of a test
    reach = None if row is None else row.reach
    if reach == "one host" and span != "host":
        return "its ranks are on several hosts"
    if reach == "several hosts" and span != "hosts":
        return "all its ranks are on one host" if span == "host" else "each of its ranks is on a host of its own"
    return None


def device_transport(
    key: Key,
    can: Callable[[str], bool],
    *,
    forced: str = "auto",
    gpu_backends: Sequence[str] = GPU_BACKENDS,
    aware: bool = False,
) -> str | None:
    """Return the default backend for CUDA tensors; None if they are staged through the host.

    `can` returns whether a backend is possible; `gpu_backends` is a setting; `aware` is whether `mpi` takes such
    tensors.

    >>> device_transport(Key("allreduce", "cuda", "host", "sync"), {"mpi", "ipc"}.__contains__)
    'ipc'
    """
    if key.device != "cuda":
        return None
    if forced != "auto" and can(forced):
        return forced
    return next((name for name in GPU_BACKENDS if name in gpu_backends and can(name)), "mpi" if aware else None)


def default_transport(
    key: Key,
    can: Callable[[str], bool],
    *,
    forced: str = "auto",
    hierarchical: str = "auto",
    gpu_backends: Sequence[str] = GPU_BACKENDS,
    aware: bool = False,
) -> str:
    """Return the backend for calls without a measured or requested backend.

    `can` returns whether a backend is possible; the first one of the table is returned, or the last. `forced`,
    `hierarchical` and `gpu_backends` are the settings. For ranks without an MPI launcher, `gloo` replaces `mpi`; `p2p`
    is faster (docs/design/torch-distributed.md), but lacks some collectives.

    >>> default_transport(Key("allreduce", "cpu", "host", "sync"), {"mpi", "shm"}.__contains__)
    'shm'
    """
    if forced != "auto" and can(forced):
        return forced
    direct = device_transport(key, can, gpu_backends=gpu_backends, aware=aware)
    if direct is not None:
        return direct
    *preferred, last = (name for name in HOST_BACKENDS if name != HIERARCHICAL or hierarchical != "off")
    return next((name for name in preferred if out_of_reach(name, key.span) is None and can(name)), last)


def default_rule(
    key: Key,
    can: Callable[[str], bool],
    *,
    forced: str = "auto",
    hierarchical: str = "auto",
    gpu_backends: Sequence[str] = GPU_BACKENDS,
    aware: bool = False,
    compared: bool = True,
    is_tcp: bool = True,
) -> Rule:
    """Return the default rule; `compared`: for groups that compare their calls by messages.

    Between hosts, long reductions use `p2p` on networks of TCP (benchmarks/link_bytes.py), and what MPI has for others.
    Short ones that are compared use `p2p`, which sends vectors with the comparison (benchmarks/call_cost.py).

    >>> default_rule(Key("allreduce", "cpu", "across", "sync"), {"mpi", "p2p"}.__contains__)
    ((None, 'p2p'),)
    >>> default_rule(Key("reduce", "cpu", "across", "sync"), {"mpi", "p2p"}.__contains__, compared=False)
    ((65536, 'mpi'), (None, 'p2p'))
    """
    transport = default_transport(
        key, can, forced=forced, hierarchical=hierarchical, gpu_backends=gpu_backends, aware=aware
    )
    is_staged = device_transport(key, can, forced=forced, gpu_backends=gpu_backends, aware=aware) is None
    is_reduction = SPECS[key.collective].reduces
    if key.span != "across" or not is_reduction or not is_staged or forced != "auto" or not can("p2p"):
        return ((None, transport),)
    short = "p2p" if compared else transport
    long = "p2p" if is_tcp else transport
    return ((None, long),) if short == long else ((_SHORT_BYTES, short), (None, long))


def is_all_or_nothing(key: Key, rule: Rule) -> bool:
    """Return whether a rule must have one backend for all sizes: see `checked`."""
    return SPECS[key.collective].reduces and any(transport == HIERARCHICAL for _, transport in rule)


def checked(key: Key, entries: str | Iterable[tuple[int | None, str]]) -> Rule:
    """Check the entries of a user or a file and return them as a rule; merge neighbors with the same backend.

    >>> checked(Key("reduce", "cpu", "host", "sync"), [(64, "mpi"), (4096, "mpi"), (None, "shm")])
    ((4096, 'mpi'), (None, 'shm'))
    """
    if isinstance(entries, str):
        return ((None, entries),)
    rule = tuple((limit, transport) for limit, transport in entries)
    if not rule or rule[-1][0] is not None:
        raise ArgumentError(f"{rule} must end with (None, backend), for all larger tensors.")
    limits = [limit for limit, _ in rule[:-1] if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0]
    if len(limits) < len(rule) - 1:
        raise ArgumentError(f"{rule}: sizes are whole numbers of bytes above 0; only the last one is None.")
    if limits != sorted(set(limits)):
        raise ArgumentError(f"{rule}: the sizes must increase.")
    if len(rule) > 1 and key.collective not in SAME_SHAPE:
        raise ArgumentError(
            f"{key.collective} takes one backend for all sizes, since its ranks may differ in length; only "
            f"{', '.join(SAME_SHAPE)} may select by size."
        )
    rule = tuple(
        (limit, transport)
        for (limit, transport), (_, following) in zip(rule, (*rule[1:], (None, None)), strict=True)
        if transport != following
    )
    if len(rule) > 1 and is_all_or_nothing(key, rule):
        raise ArgumentError(
            f"{key.collective}: {HIERARCHICAL} takes all sizes or none. It adds group by group, others in rank order: "
            "the bits of a sum would depend on the size of the tensor."
        )
    return rule


def with_limit(key: Key, rule: Rule, up_to_bytes: int, transport: str) -> Rule:
    """Return the rule with another backend for tensors of up to a number of bytes.

    >>> with_limit(Key("reduce", "cpu", "host", "sync"), ((None, "shm"),), 1024, "mpi")
    ((1024, 'mpi'), (None, 'shm'))
    """
    larger = [(limit, other) for limit, other in rule if limit is None or limit > up_to_bytes]
    return checked(key, [(up_to_bytes, transport), *larger])


def at(rule: Rule, num_bytes: int) -> str:
    """Return the backend for a tensor of this size.

    >>> at(((1024, "mpi"), (None, "shm")), 1024), at(((1024, "mpi"), (None, "shm")), 1025)
    ('mpi', 'shm')
    """
    return next(transport for limit, transport in rule if limit is None or num_bytes <= limit)


def format_bytes(number: int) -> str:
    """Format a size in bytes.

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
    """Format a rule.

    >>> format_rule(((4096, "mpi"), (None, "shm")))
    'up to 4 KiB mpi, above shm'
    """
    *smaller, (_, last) = rule
    parts = [f"up to {format_bytes(limit or 0)} {transport}" for limit, transport in smaller]
    return ", ".join([*parts, f"above {last}" if parts else last])


class Table(dict[Key, Rule]):
    """A rule for every key. Printed, the table has one line per collective and span."""

    def variants(self, collective: str, span: str) -> str:
        """Format the rules of a collective and span: one if all are the same, else by device and mode."""
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

    def __str__(self) -> str:
        known = dict.fromkeys((key.collective, key.span) for key in self)
        return "\n".join(f"{collective:14} {span:6}  {self.variants(collective, span)}" for collective, span in known)
