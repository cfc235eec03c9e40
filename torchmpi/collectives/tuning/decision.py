"""From samples to rules: which backend is faster beyond the noise, for which sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from ...backend_specs import HIERARCHICAL
from ...backends.selection_table import Key, Rule, at, checked
from ...collective_specs import SPECS

_MARGIN = 1.05
"""A change of backend must give this speedup in seven of eight rounds."""

Samples = dict[str, list[float]]
"""Seconds per call by backend, one sample per round, each of the slowest rank."""


def decide(
    collective: str, measured: dict[str, dict[int, Samples]], current: dict[str, Rule], *, margin: float = _MARGIN
) -> dict[str, Rule]:
    """Return rules by mode, from samples by mode and size. A rule changes only for a speedup beyond the noise.

    >>> slow, fast = [2.0] * 4, [1.0] * 4
    >>> measured = {"sync": {64: {"mpi": fast, "shm": slow}, 4096: {"mpi": slow, "shm": fast}}}
    >>> decide("allreduce", measured, {"sync": ((None, "mpi"),)})
    {'sync': ((512, 'mpi'), (None, 'shm'))}
    """
    if not measured:
        return dict(current)
    if SPECS[collective].reduces:
        everything = [samples for sizes in measured.values() for samples in sizes.values()]
        in_steps = _adds_in_steps(everything, any(name == HIERARCHICAL for _, name in current["sync"]), margin)
        measured = {
            mode: {size: _only(samples, in_steps) for size, samples in sizes.items()}
            for mode, sizes in measured.items()
        }
    spare = next(iter(measured.values()))  # a mode without samples gets the rule of the other mode
    return {mode: _rule(collective, mode, measured.get(mode, spare), rule, margin) for mode, rule in current.items()}


def _rule(collective: str, mode: str, sizes: dict[int, Samples], current: Rule, margin: float) -> Rule:
    key = Key(collective, "cpu", "host", mode)
    if SPECS[collective].compared != "shape":
        return checked(key, best(list(sizes.values()), current[0][1], margin))
    ordered = sorted(sizes)
    # The limit between two measured sizes is their geometric mean.
    limits = [math.isqrt(small * large) for small, large in pairwise(ordered)]
    winners = [best([sizes[size]], at(current, size), margin) for size in ordered]
    return checked(key, zip([*limits, None], winners, strict=True))


def _adds_in_steps(everything: list[Samples], does_now: bool, margin: float) -> bool:
    """Return whether reductions are hierarchical: for all sizes and modes or none, so that the bits are equal."""
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
    """Return the fastest backend over some sizes, or the current one if the difference is within the noise."""
    names = [name for name in sizes[0] if all(name in samples for samples in sizes)]
    fastest = min(names, key=lambda name: sum(math.log(median(samples[name])) for samples in sizes))
    if current not in names:
        return fastest
    gain = speedup([samples[current] for samples in sizes], [samples[fastest] for samples in sizes])
    return fastest if gain > margin else current


def speedup(base: Sequence[list[float]], other: Sequence[list[float]]) -> float:
    """Return the speedup of `other` in seven of eight rounds, as geometric mean over the sizes.

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
