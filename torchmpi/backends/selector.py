"""Selection of the backend of a call: the backends of a run, and the table that selects among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from ..backend_specs import GPU_BACKENDS
from ..collective_specs import COLLECTIVES, SPECS
from ..communicators.conditions import broadcast_short
from ..communicators.group import Group
from ..communicators.plan import Backends
from ..config import Config
from ..errors import ArgumentError, BackendUnavailableError
from ..log import logger
from . import saved_tables, selection_table
from .base import Backend, Operation, bind, by_size, refusal
from .selection_table import (
    Key,
    Rule,
    Table,
    checked,
    default_rule,
    default_transport,
    device_transport,
    is_all_or_nothing,
    keys,
    span_of,
    with_limit,
)

AVAILABLE = ("available", "available (experimental)")
_WHERE = {"host": "within a host", "hosts": "between hosts"}


class Availability(dict[tuple[str, str, str, str], str]):
    """(backend, collective, device, mode) -> ``available`` or ``unavailable: reason``.

    Backends that have not been tested on GPUs are ``available (experimental)``. In a job of several hosts also
    ``available within a host`` or ``available between hosts``, with the reason against the other. Printed, it is a
    table with one line per backend, device and status.
    """

    def __str__(self) -> str:
        lines: dict[tuple[str, str, str], list[str]] = {}
        for (backend, collective, device, mode), status in self.items():
            collectives = lines.setdefault((backend, device, status), [])
            collectives.append(collective if mode == "sync" else f"{collective}_async")
        width = max(len(backend) for backend, *_ in self)
        return "\n".join(
            f"{backend:{width}} {device:5} {status}"
            + (f": {', '.join(collectives)}" if status.startswith("available") else "")
            for (backend, device, status), collectives in lines.items()
        )


class Choice(NamedTuple):
    """A backend, and the largest size in bytes for which it is used (None: any)."""

    up_to_bytes: int | None
    backend: Backend


class CallSpec(NamedTuple):
    """The properties of a call by which a backend accepts or rejects it."""

    collective: str
    device_type: str
    dtype: torch.dtype | None = None
    op: str | None = None


class Selector:
    """The backends of a run, and the selection among them."""

    def __init__(self, backends: dict[str, Backend], world: Group, config: Config) -> None:
        self.backends = backends
        self.tuned = Table()
        """The measured rules, of this run or an earlier one."""
        self._world, self._config = world, config
        self._defaults, self._defaults_uncompared = self._default_tables()
        self.table = Table(self._defaults)

    # --- choosing -------------------------------------------------------------------------------------------

    def choose(
        self,
        collective: str,
        device_type: str,
        name: str,
        group: Group,
        *,
        dtype: torch.dtype | None = None,
        op: str | None = None,
    ) -> Backend:
        """Return the backend of this name; raise BackendUnavailableError with the reason if it cannot run the call."""
        call, where = CallSpec(collective, device_type, dtype, op), f"{group.where}: {collective}: backend={name!r}"
        self._check_known(name, where)
        reason = self._why_not(name, call, group)
        if reason is not None:
            able = [other for other in self.backends if self._why_not(other, call, group) is None]
            raise BackendUnavailableError(
                f"{where} cannot take {device_type} tensors on communicator {group.name}: {reason}. {_advice(able)}"
            )
        return self.backends[name]

    def select(
        self,
        collective: str,
        device_type: str,
        group: Group,
        *,
        dtype: torch.dtype | None = None,
        op: str | None = None,
        wanted: str | None = None,
        mode: str = "sync",
    ) -> list[Choice]:
        """Return the backends of a call by size: `wanted`, or those of the table.

        If the table names a backend that cannot run the call on this group, the default replaces it.
        """
        call = CallSpec(collective, device_type, dtype, op)
        if wanted is not None:
            return [Choice(None, self.choose(collective, device_type, wanted, group, dtype=dtype, op=op))]
        spec = SPECS[collective]
        device = device_type if spec.is_everywhere else "cpu"
        key = Key(spec.form_of or collective, device, span_of(group), mode)
        if key not in self.table:  # no backend accepts such tensors: raises with the reason
            return [Choice(None, self.choose(collective, device_type, "mpi", group))]

        def can(name: str) -> bool:
            return self._why_not(name, call, group) is None

        rule = self._rule_for(key, can, group)
        if not all(can(name) for _, name in rule):
            instead = self._default(key, can, group, hierarchical=None if len(rule) == 1 else "off")
            rule = checked(key, [(limit, name if can(name) else instead) for limit, name in rule])
        return [Choice(limit, self.backends[name]) for limit, name in rule]

    def _rule_for(self, key: Key, can: Callable[[str], bool], group: Group) -> Rule:
        """Return the rule of the table; instead of a default rule, the one for this group and its GPUs.

        CUDA tensors that are staged through the host use the rule for the CPU.
        """
        rule = self.table[key]
        if rule is not self._defaults[key]:
            return rule
        if key.device == "cpu":
            return rule if group.is_strict else self._defaults_uncompared[key]
        direct = device_transport(
            key,
            can,
            forced=self._config.backend,
            gpu_backends=self._gpu_backends(group),
            aware=self._is_aware(key),
        )
        return self._rule_for(key._replace(device="cpu"), can, group) if direct is None else ((None, direct),)

    def bind(
        self,
        group: Group,
        collective: str,
        dtype: torch.dtype | None,
        op: str | None,
        device_type: str,
        *,
        wanted: str | None = None,
        mode: str = "sync",
        around: Callable[[Operation, Backend], Operation] | None = None,
    ) -> tuple[Operation, Backends]:
        """Prepare a collective on a group by the selected backends, as a step of a larger collective.

        `around` adds what tensors on a device require to the operation of a backend.
        """
        choices = self.select(collective, device_type, group, dtype=dtype, op=op, wanted=wanted, mode=mode)
        parts = []
        for limit, backend in choices:
            operation = bind(backend, group, collective, dtype, op)
            parts.append((limit, operation if around is None else around(operation, backend)))
        return by_size(parts, dtype), tuple((limit, backend.name) for limit, backend in choices)

    def _why_not(self, name: str, call: CallSpec, group: Group) -> str | None:
        if name not in self.backends:
            return "it is unknown"
        backend = self.backends[name]
        reason = self._why_off(name) or refusal(backend, call.collective, call.device_type, group)
        return backend.lacks(call.collective, call.dtype, call.op) if reason is None else reason

    def _why_off(self, name: str) -> str | None:
        is_off = self._config.gpu_backends == "none" and name in GPU_BACKENDS
        return "it is switched off (TORCHMPI_GPU_BACKENDS=none)" if is_off else None

    def may_choose(self, name: str) -> bool:
        """Return whether the settings allow a backend that is not requested."""
        return name not in GPU_BACKENDS or name in (*self._gpu_backends(self._world), self._config.backend)

    def _is_aware(self, key: Key) -> bool:
        return key.device == "cuda" and self.backends["mpi"].takes("cuda", key.collective)

    @property
    def network(self) -> Backend:
        """The backend with all collectives between any ranks: `mpi`, or `gloo` if no MPI launcher started them."""
        mpi = self.backends["mpi"]
        return mpi if refusal(mpi, "barrier", "cpu") is None else self.backends["gloo"]

    def _gpu_backends(self, group: Group) -> tuple[str, ...]:
        """Return the backends of the GPU that the settings allow for a group without a request."""
        names = self._config.chosen_gpu_backends
        if self._config.gpu_backends == "auto" and not self._is_tested("ipc", group):
            names = tuple(name for name in names if name != "ipc")
        return names

    def _is_tested(self, name: str, group: Group) -> bool:
        """Return whether such a group has been tested on GPUs with a backend."""
        return name not in self.backends or self.backends[name].is_tested(group)

    def _default(self, key: Key, can: Callable[[str], bool], group: Group, *, hierarchical: str | None = None) -> str:
        return default_transport(
            key,
            can,
            forced=self._config.backend,
            hierarchical=hierarchical or self._config.hierarchical,
            gpu_backends=self._gpu_backends(group),
            aware=self._is_aware(key),
        )

    # --- the table ------------------------------------------------------------------------------------------

    def set(
        self,
        collective: str,
        backend: str,
        *,
        device: str | None = "cpu",
        span: str | None = None,
        mode: str | None = None,
        up_to_bytes: int | None = None,
    ) -> None:
        """Change the rules of a collective; see :class:`torchmpi.session.api.CollectiveSelector`."""
        changed = Table()
        for key in self._keys(collective, device, span, mode):
            if (span is None or device is None) and not self._is_possible(key, backend):
                continue  # applies only where the backend is possible
            if span is None and up_to_bytes is not None and is_all_or_nothing(key, self.table[key]):
                continue  # applies only where the backend may depend on the size
            changed[key] = self._changed_rule(key, backend, up_to_bytes)
        if not changed:
            self._check_possible(self._keys(collective, device, span, mode)[0], backend)
        self._change(changed)

    def _changed_rule(self, key: Key, backend: str, up_to_bytes: int | None) -> Rule:
        self._check_possible(key, backend)
        if up_to_bytes is None:
            return ((None, backend),)
        with _prefixed(self._where(key)):
            return with_limit(key, self.table[key], up_to_bytes, backend)

    def assign(self, parts: tuple[str, ...], entries: str | Iterable[tuple[int | None, str]]) -> None:
        """Replace the rule for one (collective, device, span, mode)."""
        key = self.key(parts)
        with _prefixed(self._where(key)):
            rule = checked(key, entries)
        for _, name in rule:
            self._check_possible(key, name)
        self._change({key: rule})

    def rule(self, parts: tuple[str, ...]) -> Rule:
        """Return the rule for one (collective, device, span, mode)."""
        key = self.key(parts)
        if key not in self.table:
            self._check_possible(key, "mpi")
        return self.table[key]

    def text(
        self,
        collective: str | None = None,
        device: str | None = None,
        span: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
    ) -> str:
        """Format the rules with the given parts; see :func:`torchmpi.session.api.collective_selector_to_string`."""
        if backend is not None:
            self._check_known(backend, f"{self._world.where}: collective_selector: backend={backend!r}")
        spans = self.spans if span is None else (span,)
        wanted = {key for key in self._keys(collective, device, span, mode) if key.span in spans}
        table = Table({key: rule for key, rule in self.table.items() if key in wanted})
        lines = {
            (key.collective, key.span)
            for key, rule in table.items()
            if backend is None or any(name == backend for _, name in rule)
        }
        return str(Table({key: rule for key, rule in table.items() if (key.collective, key.span) in lines}))

    def adopt(self, table: Table) -> None:
        """Use measured rules, which must be the same on all ranks."""
        self._change(table)
        self.tuned.update(table)

    def reset(self) -> None:
        """Restore the default rules."""
        self._change(self._defaults)
        self.tuned.clear()

    def key(self, parts: tuple[str, ...]) -> Key:
        """Return (collective, device, span, mode) as a key of the table; raise ArgumentError if it is not a key."""
        if not isinstance(parts, tuple) or len(parts) != len(Key._fields):
            raise ArgumentError(
                f"{self._world.where}: collective_selector[{parts!r}]: give four strings, {', '.join(Key._fields)}, "
                "as in collective_selector['allreduce', 'cpu', 'host', 'sync']."
            )
        return self._keys(*parts)[0]

    def _keys(self, *parts: str | None) -> list[Key]:
        with _prefixed(f"{self._world.where}: collective_selector"):
            found = list(keys(*parts))
            if not found:
                collective, device, *_ = parts
                assert collective is not None
                if not SPECS[collective].is_everywhere and device == "cuda":
                    raise ArgumentError(
                        f"{collective} uses the rules of device 'cpu' for tensors on any device: set those."
                    )
                raise ArgumentError(f"{collective} has the mode 'sync' only.")
            return found

    def _where(self, key: Key) -> str:
        return f"{self._world.where}: collective_selector[{', '.join(key)}]"

    def _change(self, changed: dict[Key, Rule]) -> None:
        """Apply rules from the next call on.

        Queued calls complete first: a collective in several steps selects the backend of a step when it runs the step.
        """
        context = self._world.context
        context.finish_collectives()
        self.table.update(changed)
        for group in list(context.groups):
            group.forget_plans()

    def _default_tables(self) -> tuple[Table, Table]:
        """Return the default rules: for groups that compare their calls by messages, and for those that do not."""
        possible = {key: {name for name in self.backends if self._is_possible(key, name)} for key in keys(mode="sync")}
        tables = Table(), Table()
        for key in keys():
            if able := possible[key._replace(mode="sync")]:  # the mode makes no difference to what is possible
                rule = partial(
                    default_rule,
                    key,
                    able.__contains__,
                    forced=self._config.backend,
                    hierarchical=self._config.hierarchical,
                    gpu_backends=self._gpu_backends(self._world),
                    aware=self._is_aware(key),
                    is_tcp=not self._world.context.sends_whole,
                )
                for table, compared in zip(tables, (True, False), strict=True):
                    table[key] = rule(compared=compared)
        return tables

    # --- availability ---------------------------------------------------------------------------------------

    def reason_against(self, key: Key, name: str) -> str | None:
        """Return the reason why a backend cannot run such calls in this job, or None."""
        if name not in self.backends:
            return "it is unknown"
        among = self._world if span_of(self._world) == key.span else None
        return (
            self._why_off(name)
            or selection_table.out_of_reach(name, key.span)
            or refusal(self.backends[name], key.collective, key.device, among)
        )

    def _is_possible(self, key: Key, name: str) -> bool:
        return self.reason_against(key, name) is None

    def refusal(self, table: Table) -> str:
        """Return the reason why a table cannot be used in this job, or ''."""
        for key, rule in table.items():
            for _, name in rule:
                reason = self.reason_against(key, name)
                if reason is None and not self.may_choose(name):
                    reason = "it is not chosen here unless TORCHMPI_GPU_BACKENDS names it"
                if reason is not None:
                    return f"it takes {name} for {', '.join(key)}: {reason}"
        return ""

    def _check_possible(self, key: Key, name: str) -> None:
        where = f"{self._where(key)}: backend={name!r}"
        self._check_known(name, where)
        reason = self.reason_against(key, name)
        if reason is not None:
            able = [other for other in self.backends if self._is_possible(key, other)]
            raise BackendUnavailableError(f"{where} cannot run this: {reason}. {_advice(able)}")

    def _check_known(self, name: str, where: str) -> None:
        if name not in self.backends:
            raise BackendUnavailableError(
                f"{where} is unknown. Use one of: {', '.join(self.backends)}, or leave backend out."
            )

    @property
    def spans(self) -> tuple[str, ...]:
        """Spans that communicators of this job can have."""
        widest = span_of(self._world)
        return selection_table.SPANS if widest == "hosts" else ("host", widest) if widest == "across" else ("host",)

    def availability(self) -> Availability:
        """Return the calls that each backend can run in this job."""
        table = Availability()
        for name in self.backends:
            for device in selection_table.DEVICES:
                for collective in COLLECTIVES:
                    status = self._status(name, collective, device)
                    for mode in selection_table.MODES:
                        if mode == "sync" or SPECS[collective].has_async:
                            table[name, collective, device, mode] = status
        return table

    def _status(self, name: str, collective: str, device: str) -> str:
        widest = span_of(self._world)
        spans = ("host", "hosts") if widest == "hosts" else (widest,)
        reasons = {span: self.reason_against(Key(collective, device, span, "sync"), name) for span in spans}
        able = [span for span, reason in reasons.items() if reason is None]
        against = reasons[widest]
        if len(able) == len(reasons):
            return AVAILABLE[not self._is_tested(name, self._world)]
        if not able:
            return f"unavailable: {against}"
        (other,) = reasons.keys() - able
        return f"available {_WHERE[able[0]]} ({_WHERE[other]}: {reasons[other]})"

    # --- measured tables ---------------------------------------------------------------------------------------

    def load_saved(self, job: saved_tables.JobDescription) -> None:
        """Use the table that an earlier run measured on such a job, if there is one. Collective."""
        found = self._saved(job) if self._world.rank == 0 else None
        table = broadcast_short(self._world.comm, found)
        if table is not None:
            self.adopt(table)

    def _saved(self, job: saved_tables.JobDescription) -> Table | None:
        setting = self._config.tuning_file
        path = saved_tables.path_for(setting)
        # A setting of the user overrides a measurement.
        if path is None or (self._config.backend, self._config.hierarchical) != ("auto", "auto"):
            return None
        table, problem = saved_tables.load(path, job)
        if table is not None:
            problem = self.refusal(table)
        expected = not setting and problem in (saved_tables.NO_FILE, saved_tables.NO_ENTRY)
        if problem and not expected and self._config.verbose:
            logger.info(f"{path} is not used: {problem}. Run mpi.autotune() to measure again.")
        return None if problem else table


def _advice(able: list[str]) -> str:
    return f"Leave backend out, or use one of: {', '.join(able)}." if able else "No other backend can."


@contextmanager
def _prefixed(where: str) -> Iterator[None]:
    try:
        yield
    except ArgumentError as error:
        raise type(error)(f"{where}: {error}") from None
