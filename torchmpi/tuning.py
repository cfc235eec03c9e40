"""Measuring which transport is the fastest: what ``autotune()`` does.

The transports take turns, forwards and backwards, so that a disturbance hits all of them; the buffers are written
between batches, as a program would; what counts is the slowest rank. :func:`decide` then makes rules of the samples.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from . import collectives, plans, runtime, topology, tuning_file
from .communicator import Comm, Communicator, Group
from .errors import ArgumentError
from .rules import (
    BY_SIZE, HIERARCHICAL, MODES, REDUCING, SPANS, VERBS, Key, Rule, Table, at, checked, format_rule, out_of_reach, span_of,
)  # fmt: skip

SIZES = (256, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
_ORDER = ("allreduce", *(verb for verb in VERBS if verb != "allreduce"))  # should the time not suffice for all
_MARGIN = 1.05
"""A change of transport must pay this much in seven of eight rounds."""
_BATCH_SECONDS = 0.002
_MOST_CALLS = 50
_FEWEST_ROUNDS, _MOST_ROUNDS = 8, 24

Samples = dict[str, list[float]]
"""Seconds per call by transport, one for each round; those of the slowest rank."""


def autotune(
    verbs: str | Iterable[str] | None = None,
    sizes: Iterable[int] | None = None,
    *,
    comm: Comm = None,
    seconds: float = 10.0,
    save: bool = True,
) -> Table:
    """Measure the transports there are, and take the fastest from now on. Collective over all ranks of the job.

    Fills :data:`collective_selector` for `verbs` (all) from calls with `sizes` bytes on the communicator (and, if that
    spans hosts, within the hosts), within about so many `seconds`; gives the table. Saved, it is there after the next
    ``start()`` of a job of the same shape on the same software.

        print(mpi.autotune())
        mpi.autotune("allreduce", sizes=[1 << 20], seconds=2, save=False)
    """
    running = runtime.current()
    chosen, numbers = _checked_arguments(running, verbs, sizes, seconds)
    say = _sayer(running)
    session = _Session(running, numbers, seconds)
    subjects = _subjects(running, chosen, comm)
    if not subjects:
        say("nothing to measure: there is no second transport for any of these verbs")
        return Table(running.selector.table)
    say(f"{len(subjects)} rules to find, in at most about {seconds:g} s")
    session.num_left = len(subjects) * len(MODES) * len(numbers)
    for subject in subjects:
        current = {key.mode: running.selector.table[key] for key in subject.keys()}
        measured = session.measure(subject)
        # All ranks have the same samples, and would decide alike, but for a last bit perhaps: rank 0 does.
        rules = decide(subject.verb, measured, current) if running.world.rank == 0 else {}
        rules = collectives.broadcast_object(rules, comm=running.communicators.levels[0])
        if measured:
            running.selector.adopt(Table({Key(*subject[:3], mode): rule for mode, rule in rules.items()}))
        say(f"{subject}: {_news(rules, current) if measured else 'not measured, the time was up'}")
    if save and running.world.rank == 0:
        _save(running, say)
    return Table(running.selector.table)


# --- deciding ------------------------------------------------------------------------------------------------


def decide(
    verb: str, measured: dict[str, dict[int, Samples]], current: dict[str, Rule], *, margin: float = _MARGIN
) -> dict[str, Rule]:
    """Rules by mode, from samples by mode and size. What is not faster beyond the noise does not change.

    >>> slow, fast = [2.0] * 4, [1.0] * 4
    >>> measured = {"sync": {64: {"mpi": fast, "shm": slow}, 4096: {"mpi": slow, "shm": fast}}}
    >>> decide("allreduce", measured, {"sync": ((None, "mpi"),)})
    {'sync': ((512, 'mpi'), (None, 'shm'))}
    """
    if not measured:
        return dict(current)
    if verb in REDUCING:
        everything = [samples for sizes in measured.values() for samples in sizes.values()]
        in_steps = _adds_in_steps(everything, any(name == HIERARCHICAL for _, name in current["sync"]), margin)
        measured = {
            mode: {size: _only(samples, in_steps) for size, samples in sizes.items()}
            for mode, sizes in measured.items()
        }
    spare = next(iter(measured.values()))  # a mode for which there was no time does as the other one
    return {mode: _rule(verb, mode, measured.get(mode, spare), rule, margin) for mode, rule in current.items()}


def _rule(verb: str, mode: str, sizes: dict[int, Samples], current: Rule, margin: float) -> Rule:
    key = Key(verb, "cpu", "host", mode)
    if verb not in BY_SIZE:
        return checked(key, best(list(sizes.values()), current[0][1], margin))
    ordered = sorted(sizes)
    # Between two sizes that were measured nobody knows: half way, as factors go.
    limits = [math.isqrt(small * large) for small, large in zip(ordered, ordered[1:], strict=False)]
    winners = [best([sizes[size]], at(current, size), margin) for size in ordered]
    return checked(key, zip([*limits, None], winners, strict=True))


def _adds_in_steps(everything: list[Samples], does_now: bool, margin: float) -> bool:
    """Whether a reduction goes group by group: at all sizes and in both modes or in none, for the sake of its bits."""
    known = [samples for samples in everything if HIERARCHICAL in samples and len(samples) > 1]
    if not known:
        return does_now
    flat = [_only(samples, False) for samples in known]
    flat_best = [min(samples.values(), key=median) for samples in flat]
    in_steps = [samples[HIERARCHICAL] for samples in known]
    if does_now:
        return speedup(in_steps, flat_best) <= margin
    return speedup(flat_best, in_steps) > margin


def _only(samples: Samples, in_steps: bool) -> Samples:
    kept = {name: times for name, times in samples.items() if (name == HIERARCHICAL) == in_steps}
    return kept or samples


def best(sizes: Sequence[Samples], current: str, margin: float = _MARGIN) -> str:
    """The fastest transport over some sizes together, or the current one if that is as good within the noise."""
    names = [name for name in sizes[0] if all(name in samples for samples in sizes)]
    fastest = min(names, key=lambda name: sum(math.log(median(samples[name])) for samples in sizes))
    if current not in names:
        return fastest
    gain = speedup([samples[current] for samples in sizes], [samples[fastest] for samples in sizes])
    return fastest if gain > margin else current


def speedup(base: Sequence[list[float]], other: Sequence[list[float]]) -> float:
    """How many times faster the other one is in seven of eight rounds, geometric mean over the sizes.

    >>> speedup([[2.0] * 8], [[1.0] * 7 + [9.0]])
    2.0
    """
    pairs = list(zip(base, other, strict=True))
    num_rounds = min(len(times) for pair in pairs for times in pair)
    ratios = sorted(
        math.exp(sum(math.log(one[index] / two[index]) for one, two in pairs) / len(pairs))
        for index in range(num_rounds)
    )
    return ratios[num_rounds // 8]


# --- measuring -----------------------------------------------------------------------------------------------


class _Subject(NamedTuple):
    """What one rule is sought for, and who competes."""

    verb: str
    device: str
    span: str
    communicator: Communicator
    names: tuple[str, ...]

    def keys(self) -> list[Key]:
        return [Key(*self[:3], mode) for mode in (MODES if self.verb != "barrier" else MODES[:1])]

    def __str__(self) -> str:
        return f"{self.verb} {self.device} {self.span}"


def _subjects(running: runtime.Runtime, verbs: Sequence[str], comm: Comm) -> list[_Subject]:
    """What there is to choose, the same on all ranks."""
    selector, world = running.selector, running.communicators.levels[0]
    targets = _targets(running, comm)
    devices = dict.fromkeys(("cpu", running.device.type))
    possible = {
        (verb, device, span): {
            name
            for name, backend in selector.backends.items()
            if out_of_reach(name, span) is None and backend.why_not(verb, device, communicator.intra) is None
        }
        for device in devices
        for span, communicator in targets.items()
        for verb in verbs
    }
    everywhere = collectives.allgather_object(possible, comm=world)
    subjects = []
    for key in possible:
        able = set.intersection(*(theirs.get(key, set()) for theirs in everywhere))
        names = tuple(name for name in selector.backends if name in able)
        if len(names) > 1:
            subjects.append(_Subject(*key, targets[key[2]], names))
    return subjects


def _targets(running: runtime.Runtime, comm: Comm) -> dict[str, Communicator]:
    """The communicators to measure on, by span: the one given, after those of its steps if it can go in steps."""
    given = runtime.communicator(comm)
    span = span_of(given.intra)
    targets = {span: given}
    if span == "hosts":
        parts = {"host": given.intra.local, "across": given.intra.across}
        targets |= {part: _communicator_of(group) for part, group in parts.items() if group is not None}
    everywhere = collectives.allgather_object((span, list(targets)), comm=running.communicators.levels[0])
    if any(theirs != span for theirs, _ in everywhere):
        raise ArgumentError(
            f"{running.world.where}: autotune(comm={comm!r}): the groups of this communicator differ between ranks in "
            f"how they are spread over hosts ({', '.join(theirs for theirs, _ in everywhere)}). Use one where they do "
            "not, such as 0."
        )
    return {part: targets[part] for part in SPANS if all(part in theirs for _, theirs in everywhere)}


def _communicator_of(group: Group) -> Communicator:
    """A group by itself, as verbs take it."""
    split = topology.plan_split([0] * group.size, cartesian=True)
    return Communicator(-1, group.name, group, None, split=split, parent=None)


class _Session:
    """The measurements of one autotune(), and the time that is left for them."""

    def __init__(self, running: runtime.Runtime, sizes: Sequence[int], seconds: float) -> None:
        self._running, self._sizes, self._seconds = running, sizes, seconds
        self._begin = time.perf_counter()
        self._spent = 0.0  # as all ranks know it
        self.num_left = 0

    def measure(self, subject: _Subject) -> dict[str, dict[int, Samples]]:
        """Samples by mode and size, as far as the time goes."""
        found: dict[str, dict[int, Samples]] = defaultdict(dict)
        modes = [key.mode for key in subject.keys()]
        sizes = self._sizes if subject.verb != "barrier" else self._sizes[:1]
        for mode in modes:
            for size in sizes:
                samples = self._compete(_Work(self._running, subject, size, mode), subject.names)
                if samples is not None:
                    found[mode][size] = samples
                self.num_left -= 1
        self.num_left -= len(MODES) * len(self._sizes) - len(modes) * len(sizes)
        # Of small tensors alone nothing follows for large ones.
        return {mode: samples for mode, samples in found.items() if len(samples) == len(sizes)}

    def _compete(self, work: _Work, names: Sequence[str]) -> Samples | None:
        if self._spent >= self._seconds:
            return None
        for name in names:
            work.time(name, 1)  # compiles, connects, allocates
        begin = time.perf_counter()
        once = [work.time(name, 1) for name in names]
        end = time.perf_counter()
        *once, round_seconds, self._spent = self._slowest([*once, end - begin, end - self._begin])
        counts = [min(_MOST_CALLS, max(1, int(_BATCH_SECONDS / seconds))) for seconds in once]
        round_seconds += sum((count - 1) * seconds for count, seconds in zip(counts, once, strict=True))
        remaining = self._seconds - self._spent
        num_rounds = min(_MOST_ROUNDS, int(remaining / max(1, self.num_left) / round_seconds))
        num_rounds = max(_FEWEST_ROUNDS, num_rounds // 2 * 2)  # as often forwards as backwards
        if num_rounds * round_seconds > remaining:
            return None
        times = []
        for index in range(num_rounds):
            order = range(len(names))[:: -1 if index % 2 else 1]
            row = {which: work.time(names[which], counts[which]) for which in order}
            times += [row[which] for which in range(len(names))]
        *times, self._spent = self._slowest([*times, time.perf_counter() - self._begin])
        return {name: times[which :: len(names)] for which, name in enumerate(names)}

    def _slowest(self, values: list[float]) -> list[float]:
        """The largest of all ranks, one by one."""
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        world = self._running.communicators.levels[0]
        slowest: list[float] = collectives.allreduce(tensor, op="max", comm=world, backend="mpi").tolist()
        return slowest


class _Work:
    """One verb on tensors of one size, as a user would call it."""

    def __init__(self, running: runtime.Runtime, subject: _Subject, size: int, mode: str) -> None:
        verb, device, _, communicator, _ = subject
        group = communicator.intra
        self._communicator, self._is_async = communicator, mode == "async"
        # The size is that of the largest tensor of the call: for a gather, of its result.
        numel = max(1, size // torch.float32.itemsize // (group.size if verb in ("allgather", "gather") else 1))
        self._tensor = torch.zeros(numel, device=running.device if device != "cpu" else "cpu")
        given = None if verb == "scatter" and group.rank != 0 else self._tensor
        self._call: Callable[[str], Any]
        if verb == "barrier":
            self._call = partial(self._barrier, running, {})
        else:
            function = getattr(collectives, f"{verb}_async" if self._is_async else verb)
            self._call = lambda name: function(given, comm=communicator, backend=name)

    def _barrier(self, running: runtime.Runtime, known: dict[str, plans.Plan], name: str) -> None:
        if name not in known:  # barrier() itself has no backend=
            key = ("barrier", None, None, "cpu", True, name, False)
            known[name] = plans.prepare(running, self._communicator, key)
        self._communicator.intra.call(known[name], None, None, 0)

    def time(self, name: str, count: int) -> float:
        """Seconds per call."""
        self._tensor.zero_()  # a program has just written its gradients
        collectives.barrier(self._communicator)
        begin = time.perf_counter()
        for _ in range(count):
            result = self._call(name)
            if self._is_async:
                result.wait()
        return (time.perf_counter() - begin) / count


# --- around it -----------------------------------------------------------------------------------------------


def _checked_arguments(
    running: runtime.Runtime, verbs: str | Iterable[str] | None, sizes: Iterable[int] | None, seconds: float
) -> tuple[list[str], list[int]]:
    where = f"{running.world.where}: autotune"
    chosen = [verbs] if isinstance(verbs, str) else list(verbs or _ORDER)
    numbers = sorted(set(SIZES if sizes is None else sizes))
    for verb in chosen:
        if verb not in VERBS:
            raise ArgumentError(f"{where}: verb {verb!r} is unknown. Use some of: {', '.join(VERBS)}.")
    if not numbers or not all(type(size) is int and size > 0 for size in numbers):
        raise ArgumentError(f"{where}: sizes={sizes!r} must be whole numbers of bytes above 0, at least one.")
    if not seconds > 0:
        raise ArgumentError(f"{where}: seconds={seconds!r} must be greater than zero.")
    for name in ("backend", "hierarchical"):
        value = getattr(running.config, name)
        if value != "auto":
            raise ArgumentError(f"{where}: the setting {name}={value!r} has decided already. Leave it at 'auto'.")
    if len(running.communicators.span.levels) > 1:
        raise ArgumentError(
            f"{where}: a collective span is set, and its steps would be measured in the place of whole calls. Call "
            "set_collective_span(level, level) first."
        )
    return chosen, numbers


def _sayer(running: runtime.Runtime) -> Callable[[str], None]:
    def say(text: str) -> None:
        if running.world.rank == 0 and running.config.verbose:
            print(f"torchmpi autotune: {text}", file=sys.stderr, flush=True)

    return say


def _news(rules: dict[str, Rule], current: dict[str, Rule]) -> str:
    """What was found for each mode, and what it replaces."""
    texts = {
        mode: format_rule(rule) + (f" (was {format_rule(current[mode])})" if rule != current[mode] else "")
        for mode, rule in rules.items()
    }
    if len(set(texts.values())) == 1:
        return texts["sync"]
    return "; ".join(f"{mode}: {text}" for mode, text in texts.items())


def _save(running: runtime.Runtime, say: Callable[[str], None]) -> None:
    path = tuning_file.path_for(running.config.tuning_file)
    if path is None:
        return
    try:
        tuning_file.save(path, running.job, running.selector.tuned)
    except OSError as error:
        say(f"could not be saved ({error}); it holds until stop()")
    else:
        say(f"saved in {path}")
