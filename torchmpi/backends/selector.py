"""Which backend runs a call: the backends of a run, and the table that chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from ..config import Config
from ..errors import ArgumentError, BackendUnavailableError, ConfigError
from ..log import logger
from . import saved_tables, selection_table
from .base import NAMES, Backend, Operation, bind, by_size
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

_WHERE = {"host": "within a host", "hosts": "between hosts"}


class Availability(dict[tuple[str, str, str, str], str]):
    """(backend, verb, device, mode) -> ``available``, ``unavailable: reason`` or ``unimplemented``.

    In a job of several hosts also ``available within a host`` or ``available between hosts``, with the reason against
    the other. Printed, it is a table with one line per backend, device and verdict.
    """

    def __str__(self) -> str:
        lines: dict[tuple[str, str, str], list[str]] = {}
        for (backend, collective, device, mode), verdict in self.items():
            verbs = lines.setdefault((backend, device, verdict), [])
            entry = collective if mode == "sync" else f"{collective}_async"
            verbs.append(entry)
        width = max(len(backend) for backend, *_ in self)
        return "\n".join(
            f"{backend:{width}} {device:5} {verdict}"
            + (f": {', '.join(verbs)}" if verdict.startswith("available") else "")
            for (backend, device, verdict), verbs in lines.items()
        )


class Choice(NamedTuple):
    """A backend, and the size in bytes up to which it is taken (None: any)."""

    up_to_bytes: int | None
    backend: Backend


class Call(NamedTuple):
    """What a backend is asked for."""

    collective: str
    device_type: str
    dtype: torch.dtype | None = None
    op: str | None = None


class Selector:
    """The backends of a run, and the choice among them."""

    def __init__(self, backends: dict[str, Backend], world: Any, config: Config) -> None:
        self.backends = backends
        self.tuned = Table()
        """The rules that were measured, now or in an earlier run."""
        self._world, self._config = world, config
        self._check_forced()
        self._defaults = self._default_table()
        self.table = Table(self._defaults)

    # --- choosing -------------------------------------------------------------------------------------------

    def choose(
        self,
        collective: str,
        device_type: str,
        name: str,
        group: Any,
        *,
        dtype: torch.dtype | None = None,
        op: str | None = None,
    ) -> Backend:
        """The backend of this name, or a refusal with the reason."""
        call, where = Call(collective, device_type, dtype, op), f"{group.where}: {collective}: backend={name!r}"
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
        group: Any,
        *,
        dtype: torch.dtype | None = None,
        op: str | None = None,
        wanted: str | None = None,
        mode: str = "sync",
    ) -> list[Choice]:
        """What runs a verb on a group, by size: the backend that is wanted, or what the table says.

        Where the table names a transport that cannot take such a call on this group, the default takes its place.
        """
        call = Call(collective, device_type, dtype, op)
        if wanted is not None:
            return [Choice(None, self.choose(collective, device_type, wanted, group, dtype=dtype, op=op))]
        key = Key(collective, "cpu" if collective in selection_table.OF_THE_HOST else device_type, span_of(group), mode)
        if key not in self.table:  # nothing takes such tensors here: refused with the reason
            return [Choice(None, self.choose(collective, device_type, "mpi", group))]

        def can(name: str) -> bool:
            return self._why_not(name, call, group) is None

        rule = self._rule_for(key, can)
        if not all(can(name) for _, name in rule):
            instead = self._default(key, can, hierarchical=None if len(rule) == 1 else "off")
            rule = checked(key, [(limit, name if can(name) else instead) for limit, name in rule])
        return [Choice(limit, self.backends[name]) for limit, name in rule]

    def _rule_for(self, key: Key, can: Callable[[str], bool]) -> Rule:
        """The rule of the table; for CUDA tensors without one of their own, what suits the GPUs of the very group.

        Through the host, they go by what the table says for the CPU.
        """
        rule = self.table[key]
        if key.device == "cpu" or rule is not self._defaults[key]:
            return rule
        direct = device_transport(key, can, forced=self._config.backend, aware=self._is_aware)
        return self.table[key._replace(device="cpu")] if direct is None else ((None, direct),)

    def bind(
        self,
        group: Any,
        collective: str,
        dtype: torch.dtype | None,
        op: str | None,
        *,
        device_type: str = "cpu",
        wanted: str | None = None,
        mode: str = "sync",
    ) -> Operation:
        """A verb on a group, ready to run on plain tensors: a step of something larger, as :meth:`select` has it."""
        choices = self.select(collective, device_type, group, dtype=dtype, op=op, wanted=wanted, mode=mode)
        return by_size([(limit, bind(backend, group, collective, dtype, op)) for limit, backend in choices], dtype)

    def _why_not(self, name: str, call: Call, group: Any) -> str | None:
        if name not in self.backends:
            return "it is not part of this version"
        backend = self.backends[name]
        reason = backend.why_not(call.collective, call.device_type, group)
        lacks = getattr(backend, "lacks", None)
        if reason is not None or lacks is None:
            return reason
        what: str | None = lacks(call.collective, call.dtype, call.op)
        return what

    @property
    def _is_aware(self) -> bool:
        """Whether the MPI library takes memory of a device."""
        return self.backends["mpi"].takes("cuda")

    def _default(self, key: Key, can: Callable[[str], bool], *, hierarchical: str | None = None) -> str:
        return default_transport(
            key,
            can,
            forced=self._config.backend,
            hierarchical=hierarchical or self._config.hierarchical,
            aware=self._is_aware,
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
        """Change the rules of a verb; see :class:`torchmpi.session.api.CollectiveSelector`."""
        changed = Table()
        for key in self._keys(collective, device, span, mode):
            if (span is None or device is None) and not self._is_possible(key, backend):
                continue  # wherever the backend reaches
            if span is None and up_to_bytes is not None and is_all_or_nothing(key, self.table[key]):
                continue  # and wherever sizes may differ in their transport
            changed[key] = self._changed_rule(key, backend, up_to_bytes)
        if not changed:
            self._check_possible(self._keys(collective, device, span, mode)[0], backend)
        self._change(changed)

    def _changed_rule(self, key: Key, backend: str, up_to_bytes: int | None) -> Rule:
        self._check_possible(key, backend)
        if up_to_bytes is None:
            return ((None, backend),)
        with _about(self._where(key)):
            return with_limit(key, self.table[key], up_to_bytes, backend)

    def assign(self, parts: tuple[str, ...], entries: str | Iterable[tuple[int | None, str]]) -> None:
        """Replace the rule for one (verb, device, span, mode)."""
        key = self.key(parts)
        with _about(self._where(key)):
            rule = checked(key, entries)
        for _, name in rule:
            self._check_possible(key, name)
        self._change({key: rule})

    def rule(self, parts: tuple[str, ...]) -> Rule:
        """The rule for one (verb, device, span, mode)."""
        key = self.key(parts)
        if key not in self.table:
            self._check_possible(key, "mpi")
        return self.table[key]

    def adopt(self, table: Table) -> None:
        """Take over measured rules, which all ranks must have the same."""
        self._change(table)
        self.tuned.update(table)

    def reset(self) -> None:
        """Back to the defaults."""
        self._change(self._defaults)
        self.tuned.clear()

    def key(self, parts: tuple[str, ...]) -> Key:
        """(verb, device, span, mode) as a key of the table, or a refusal."""
        if not isinstance(parts, tuple) or len(parts) != len(Key._fields):
            raise ArgumentError(
                f"{self._world.where}: collective_selector[{parts!r}]: give four words, {', '.join(Key._fields)}, "
                "as in collective_selector['allreduce', 'cpu', 'host', 'sync']."
            )
        return self._keys(*parts)[0]

    def _keys(self, *parts: str | None) -> list[Key]:
        with _about(f"{self._world.where}: collective_selector"):
            found = list(keys(*parts))
            if not found:
                collective, device, *_ = parts
                if collective in selection_table.OF_THE_HOST and device == "cuda":
                    raise ArgumentError(
                        f"{collective} goes by the rules of device 'cpu' wherever its tensor is: set those."
                    )
                raise ArgumentError("barrier has the mode 'sync' only.")
            return found

    def _where(self, key: Key) -> str:
        return f"{self._world.where}: collective_selector[{', '.join(key)}]"

    def _change(self, changed: dict[Key, Rule]) -> None:
        """Make rules valid from the next call on. What is queued keeps the backend it was submitted with.

        It is waited for: calls in several steps choose the transport of a step when they come to it.
        """
        context = self._world.context
        context.finish_collectives()
        self.table.update(changed)
        for group in list(context.groups):
            group.forget_plans()

    def _default_table(self) -> Table:
        table = Table()
        for key in keys():
            if any(self._is_possible(key, name) for name in self.backends):
                table[key] = default_rule(
                    key,
                    partial(self._is_possible, key),
                    num_hosts=len(self._world.hosts),
                    forced=self._config.backend,
                    hierarchical=self._config.hierarchical,
                    aware=self._is_aware,
                )
        return table

    # --- what is possible -----------------------------------------------------------------------------------

    def reason_against(self, key: Key, name: str) -> str | None:
        """Why a backend cannot be had for such calls in this job, or None if it can."""
        if name not in self.backends:
            return "it is not part of this version"
        among = self._world if span_of(self._world) == key.span else None
        return selection_table.out_of_reach(name, key.span) or self.backends[name].why_not(
            key.collective, key.device, among
        )

    def _is_possible(self, key: Key, name: str) -> bool:
        return self.reason_against(key, name) is None

    def refusal(self, table: Table) -> str:
        """Why a table cannot be used in this job; '' if it can."""
        for key, rule in table.items():
            for _, name in rule:
                reason = self.reason_against(key, name)
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
            what = "is not part of this version" if name in NAMES else "is unknown"
            raise BackendUnavailableError(
                f"{where} {what}. Use one of: {', '.join(self.backends)}, or leave backend out."
            )

    def _check_forced(self) -> None:
        name = self._config.backend
        if name != "auto" and name not in self.backends:
            what = "is not part of this version" if name in NAMES else "is unknown"
            raise ConfigError(f"The setting backend={name!r} {what}. Use one of: auto, {', '.join(self.backends)}.")

    @property
    def spans(self) -> tuple[str, ...]:
        """Those that communicators of this job can have."""
        widest = span_of(self._world)
        return selection_table.SPANS if widest == "hosts" else ("host", widest) if widest == "across" else ("host",)

    def availability(self) -> Availability:
        """What each backend can do here."""
        table = Availability()
        for name in dict.fromkeys((*NAMES, *self.backends)):
            for device in selection_table.DEVICES:
                for collective in selection_table.COLLECTIVES:
                    verdict = self._verdict(name, collective, device)
                    for mode in selection_table.MODES:
                        if collective != "barrier" or mode == "sync":
                            table[name, collective, device, mode] = verdict
        return table

    def _verdict(self, name: str, collective: str, device: str) -> str:
        if name not in self.backends:
            return "unimplemented"
        widest = span_of(self._world)
        spans = ("host", "hosts") if widest == "hosts" else (widest,)
        reasons = {span: self.reason_against(Key(collective, device, span, "sync"), name) for span in spans}
        able = [span for span, reason in reasons.items() if reason is None]
        against = reasons[widest]
        if len(able) == len(reasons):
            return "available"
        if not able:
            return f"unavailable: {against}"
        (other,) = reasons.keys() - able
        return f"available {_WHERE[able[0]]} ({_WHERE[other]}: {reasons[other]})"

    # --- between runs ---------------------------------------------------------------------------------------

    def pick_up(self, job: saved_tables.Job) -> None:
        """Take over what was measured in an earlier run on a job like this. Collective."""
        found = self._saved(job) if self._world.rank == 0 else None
        table = self._world.comm.bcast(found)
        if table is not None:
            self.adopt(table)

    def _saved(self, job: saved_tables.Job) -> Table | None:
        setting = self._config.tuning_file
        path = saved_tables.path_for(setting)
        # What was asked for goes before what was measured.
        if path is None or (self._config.backend, self._config.hierarchical) != ("auto", "auto"):
            return None
        table, problem = saved_tables.load(path, job)
        if table is not None:
            problem = self.refusal(table)
        expected = not setting and problem in (saved_tables.NO_FILE, saved_tables.NO_ENTRY)
        if problem and not expected and self._config.verbose:
            logger.info(f"{path} is not used: {problem}. mpi.autotune() measures anew.")
        return None if problem else table


def _advice(able: list[str]) -> str:
    return f"Leave backend out, or use one of: {', '.join(able)}." if able else "No other backend can."


@contextmanager
def _about(where: str) -> Iterator[None]:
    """Put in front of a refusal what it is about."""
    try:
        yield
    except ArgumentError as error:
        raise type(error)(f"{where}: {error}") from None
