"""Checks of versions, settings, forked workers, and of the self test."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..facts import OLDEST_AND_TESTED, Facts, Finding
from ..formatting import counted
from .self_test import REFUSED


def check_versions(facts: Facts) -> Finding | None:
    """Check that all packages are installed, supported, and not newer than tested."""
    versions = facts.here.versions
    listing = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    old, new = [], []
    for name, (oldest, tested) in OLDEST_AND_TESTED.items():
        found = _numbers(versions.get(name) or "0")
        if found < _numbers(oldest):
            old.append(f"{name}>={oldest}")
        elif found[:2] > _numbers(tested):
            new.append(f"{name} {tested}")
    if old:
        return Finding("versions", "problem", f"{listing}: too old, or missing", f"Needed: {', '.join(old)}.")
    if new:
        remedy = f"Tested up to {', '.join(new)}. If something fails, use that version, and report the failure."
        return Finding("versions", "warning", f"{listing}: newer than the tested versions", remedy)
    return Finding("versions", "ok", listing)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release part of a version: (2, 13, 0) of ``2.13.0+cpu``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_agreement(facts: Facts) -> Finding | None:
    """Check that all ranks run the same versions."""
    if len(facts.ranks) < 2:
        return None
    kinds = [*facts.ranks[0].process.versions, "MPI library"]
    for kind in kinds:
        by_version: dict[str, list[int]] = {}
        for rank, facts_of_rank in enumerate(facts.ranks):
            versions = {**facts_of_rank.process.versions, "MPI library": facts_of_rank.mpi.library}
            by_version.setdefault(str(versions.get(kind)), []).append(rank)
        if len(by_version) > 1:
            found = "; ".join(f"{version} on {_some_ranks(ranks)}" for version, ranks in by_version.items())
            programs = ", ".join(sorted({rank.process.executable for rank in facts.ranks}))
            remedy = f"Start the same Python environment on all hosts; these were started: {programs}."
            return Finding("agreement", "problem", f"the ranks differ in {kind}: {found}", remedy)
    return Finding("agreement", "ok", f"{counted(len(facts.ranks), 'rank')} with the same versions")


def _some_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")


def check_settings(facts: Facts) -> Finding | None:
    """Check that the TORCHMPI_ variables are valid."""
    for rank, process in enumerate(facts.processes):
        if process.settings_error is not None:
            where = f"rank {rank}: " if facts.in_job else ""
            return Finding("settings", "problem", where + process.settings_error, "Correct or unset that variable.")
    given = sorted({name for process in facts.processes for name in process.settings_from_environment})
    return Finding("settings", "ok", f"from the environment: {', '.join(given)}" if given else "the defaults")


def check_fork(facts: Facts) -> Finding | None:
    """Check that worker processes can be started safely."""
    here, test = facts.here, facts.self_test
    method = f"workers are started by {here.start_method}"
    if test is not None and test.error is None and test.forked_child != REFUSED:
        return Finding(
            "fork",
            "problem",
            f"a forked child that called torchmpi: {test.forked_child}, instead of a NotStartedError",
            "Start DataLoader workers with multiprocessing_context='spawn', and report this.",
        )
    if here.start_method == "fork" and here.cuda_available:
        return Finding(
            "fork",
            "warning",
            f"{method}: such a worker cannot use CUDA",
            "Keep CUDA out of datasets, or use DataLoader(multiprocessing_context='spawn').",
        )
    if here.start_method == "fork" and here.has_infiniband and not _is_fork_safe(here.environment):
        return Finding(
            "fork",
            "warning",
            f"{method}, on a host with InfiniBand: on older kernels that corrupts data sent over InfiniBand",
            "Set RDMAV_FORK_SAFE=1 for all ranks, or use DataLoader(multiprocessing_context='spawn').",
        )
    if test is not None and test.forked_child == REFUSED:
        method += "; a forked child that calls torchmpi gets a NotStartedError"
    return Finding("fork", "ok", method)


def _is_fork_safe(environment: Mapping[str, str]) -> bool:
    return bool({"RDMAV_FORK_SAFE", "IBV_FORK_SAFE"} & environment.keys())


def check_self_test(facts: Facts) -> Finding | None:
    """Report the result of the self test."""
    test = facts.self_test
    if test is not None and test.error is None:
        found = f"allreduce on {counted(test.size, 'rank')}, {test.seconds:g} s from start() to stop()"
        if facts.launch is not None and facts.launch.status != 0:
            found += f", but then the job ended with status {facts.launch.status}: {facts.launch.output}"
            return Finding(
                "self test", "warning", found, "MPI fails in MPI_Finalize: update the library, or report this."
            )
        return Finding("self test", "ok", found)
    if test is not None:
        return Finding("self test", "problem", str(test.error), "Follow the message, or report it.")
    if facts.ranks and facts.launch is not None:
        found = f"two ranks started, but did not finish: {facts.launch.output or 'no output'}"
        remedy = f"Run it yourself: {facts.launch.command.replace('python ...', 'python -m torchmpi doctor')}"
        return Finding("self test", "problem", found, remedy)
    return None
