"""``autotune()``: measures the backends and fills the selection table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ... import collectives
from ...argument_types import checks_types
from ...backends import saved_tables
from ...backends.base import refusal
from ...backends.selection_table import (
    MODES,
    SPANS,
    Key,
    Rule,
    Table,
    format_rule,
    out_of_reach,
    span_of,
)
from ...collective_specs import COLLECTIVES, SPECS
from ...communicators.communicator import NO_LEVEL, Communicator
from ...communicators.levels import Comm
from ...config import CollectiveName
from ...errors import ArgumentError
from ...log import logger
from ...session import runtime
from ...status_line import StatusLine, quiet_seconds
from .decision import decide
from .measuring import Session, Subject

SIZES = (256, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
_ORDER = (
    "allreduce",
    *(collective for collective in COLLECTIVES if collective != "allreduce"),
)  # allreduce first, in case the time does not suffice for all


@checks_types
def autotune(
    verbs: CollectiveName | Iterable[CollectiveName] | None = None,
    sizes: Iterable[int] | None = None,
    *,
    comm: Comm = None,
    seconds: float = 10.0,
    save: bool = True,
) -> Table:
    """Measure the available backends and select the fastest. Collective over all ranks of the job.

    The result fills :data:`collective_selector`. A saved result is loaded by the next ``start()`` of a job with the
    same hosts, ranks and software.

    Args:
        verbs: Name or names of the collectives to measure; None for all.
        sizes: Sizes of the tensors to measure with, in bytes; None for a default list.
        comm: The level to measure on, as a number or a Communicator; None for the current one. If it spans several
            hosts, its parts within and across hosts are measured first.
        seconds: Approximate duration of all measurements.
        save: Save the result to the file of the setting ``tuning_file``.

    Returns:
        The selection table.

    Raises:
        ArgumentError: An argument is invalid, `comm` is not a level, a setting has chosen the backend already, a
            collective span is set, or the groups of the level differ between ranks in how they are spread over hosts.

    Example:
        print(mpi.autotune())
        mpi.autotune("allreduce", sizes=[1 << 20], seconds=2, save=False)
    """
    running = runtime.current()
    chosen, numbers = _checked_arguments(running, verbs, sizes, seconds)
    say = _sayer(running)
    session = Session(running, numbers, seconds)
    subjects = _subjects(running, chosen, comm)
    if not subjects:
        say("nothing to measure: no second backend is available for any of these collectives")
        return Table(running.selector.table)
    say(f"{len(subjects)} rules to find, in at most about {seconds:g} s")
    session.num_left = len(subjects) * len(MODES) * len(numbers)
    status = StatusLine(quiet_seconds=quiet_seconds())
    for index, subject in enumerate(subjects):
        if running.world.rank == 0 and running.config.verbose:
            status.show(f"torchmpi autotune: {index + 1}/{len(subjects)} {subject}, {status.seconds:.0f} s")
        current = {key.mode: running.selector.table[key] for key in subject.modes()}
        measured = session.measure(subject)
        # All ranks have the same samples, but might differ in rounding: rank 0 decides.
        rules = decide(subject.collective, measured, current) if running.world.rank == 0 else {}
        rules = collectives.broadcast_object(rules, comm=running.communicators.levels[0])
        if measured:
            running.selector.adopt(Table({Key(*subject[:3], mode): rule for mode, rule in rules.items()}))
        status.clear()
        say(f"{subject}: {_news(rules, current) if measured else 'not measured, the time limit was reached'}")
    if save and running.world.rank == 0:
        _save(running, say)
    return Table(running.selector.table)


def _subjects(running: runtime.Runtime, verbs: Sequence[str], comm: Comm) -> list[Subject]:
    """Return the rules to find, the same on all ranks."""
    selector, world = running.selector, running.communicators.levels[0]
    targets = _targets(running, comm)
    devices = dict.fromkeys(("cpu", running.device.type))
    possible = {
        (collective, device, span): {
            name
            for name, backend in selector.backends.items()
            if selector.may_choose(name)
            and out_of_reach(name, span) is None
            and refusal(backend, collective, device, communicator.intra) is None
        }
        for device in devices
        for span, communicator in targets.items()
        for collective in verbs
        if device == "cpu" or SPECS[collective].is_everywhere
    }
    everywhere = collectives.allgather_object(possible, comm=world)
    subjects = []
    for key in possible:
        able = set.intersection(*(theirs.get(key, set()) for theirs in everywhere))
        names = tuple(name for name in selector.backends if name in able)
        if len(names) > 1:
            subjects.append(Subject(*key, targets[key[2]], names))
    return subjects


def _targets(running: runtime.Runtime, comm: Comm) -> dict[str, Communicator]:
    """Return the communicators to measure on, by span; those for the steps of the given communicator come first."""
    given = runtime.communicator(comm)
    if given.level == NO_LEVEL:
        raise ArgumentError(
            f"{running.world.where}: autotune(comm={comm!r}): all ranks measure together, on a level. Use its number, "
            "such as 0."
        )
    span = span_of(given.intra)
    targets = {span: given}
    if span == "hosts":
        parts = {"host": given.intra.intra_host, "across": given.intra.inter_host}
        targets |= {part: Communicator.of(group) for part, group in parts.items() if group is not None}
    everywhere = collectives.allgather_object((span, list(targets)), comm=running.communicators.levels[0])
    if any(theirs != span for theirs, _ in everywhere):
        raise ArgumentError(
            f"{running.world.where}: autotune(comm={comm!r}): the groups of this communicator differ between ranks in "
            f"how they are spread over hosts ({', '.join(theirs for theirs, _ in everywhere)}). Use another "
            "communicator, such as 0."
        )
    return {part: targets[part] for part in SPANS if all(part in theirs for _, theirs in everywhere)}


def _checked_arguments(
    running: runtime.Runtime, verbs: str | Iterable[str] | None, sizes: Iterable[int] | None, seconds: float
) -> tuple[list[str], list[int]]:
    where = f"{running.world.where}: autotune"
    chosen = [verbs] if isinstance(verbs, str) else list(verbs or _ORDER)
    numbers = sorted(set(SIZES if sizes is None else sizes))
    for collective in chosen:
        if collective not in COLLECTIVES:
            raise ArgumentError(f"{where}: collective {collective!r} is unknown. Known: {', '.join(COLLECTIVES)}.")
    if not numbers or not all(type(size) is int and size > 0 for size in numbers):
        raise ArgumentError(f"{where}: sizes={sizes!r} must be whole numbers of bytes above 0, at least one.")
    if not seconds > 0:
        raise ArgumentError(f"{where}: seconds={seconds!r} must be greater than zero.")
    for name in ("backend", "hierarchical"):
        value = getattr(running.config, name)
        if value != "auto":
            raise ArgumentError(f"{where}: the setting {name}={value!r} determines the backend. Leave it at 'auto'.")
    if len(running.communicators.span.levels) > 1:
        raise ArgumentError(
            f"{where}: a collective span is set, and its steps would be measured instead of whole calls. Call "
            "set_collective_span(level, level) first."
        )
    return chosen, numbers


def _sayer(running: runtime.Runtime) -> Callable[[str], None]:
    def say(text: str) -> None:
        if running.world.rank == 0 and running.config.verbose:
            logger.info(f"torchmpi autotune: {text}")

    return say


def _news(rules: dict[str, Rule], current: dict[str, Rule]) -> str:
    texts = {
        mode: format_rule(rule) + (f" (was {format_rule(current[mode])})" if rule != current[mode] else "")
        for mode, rule in rules.items()
    }
    if len(set(texts.values())) == 1:
        return texts["sync"]
    return "; ".join(f"{mode}: {text}" for mode, text in texts.items())


def _save(running: runtime.Runtime, say: Callable[[str], None]) -> None:
    path = saved_tables.path_for(running.config.tuning_file)
    if path is None:
        return
    try:
        saved_tables.save(path, running.job, running.selector.tuned)
    except OSError as error:
        say(f"could not be saved ({error}); the table is valid until stop()")
    else:
        say(f"saved in {path}")
