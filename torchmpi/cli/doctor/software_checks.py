"""Checks of versions, settings, forked workers, and of the self test."""

from __future__ import annotations

import re

from ..facts import OLDEST_AND_TESTED, Facts, Finding, Findings
from ..formatting import counted
from .self_test import REFUSED


def check_versions(facts: Facts) -> Findings:
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
    findings = []
    if old:
        remedy = f"Needed: {', '.join(old)}."
        findings.append(Finding("versions", "problem", f"{listing}: too old, or missing", remedy))
    if new:
        remedy = f"Tested up to {', '.join(new)}. If something fails, use that version, and report the failure."
        findings.append(Finding("versions", "warning", f"{listing}: newer than the tested versions", remedy))
    return findings or Finding("versions", "ok", listing)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release part of a version: (2, 13, 0) of ``2.13.0+cpu``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_agreement(facts: Facts) -> Findings:
    """Check that all ranks run the same versions."""
    if len(facts.ranks) < 2:
        return None
    kinds, findings = [*facts.ranks[0].process.versions, "MPI library"], []
    for kind in kinds:
        by_version: dict[str, list[int]] = {}
        for rank, facts_of_rank in enumerate(facts.ranks):
            versions = {**facts_of_rank.process.versions, "MPI library": facts_of_rank.mpi.library}
            by_version.setdefault(str(versions.get(kind)), []).append(rank)
        if len(by_version) > 1:
            found = "; ".join(f"{version} on {_some_ranks(ranks)}" for version, ranks in by_version.items())
            programs = ", ".join(sorted({rank.process.executable for rank in facts.ranks}))
            remedy = f"Start the same Python environment on all hosts; these were started: {programs}."
            findings.append(Finding("agreement", "problem", f"the ranks differ in {kind}: {found}", remedy))
    return findings or Finding("agreement", "ok", f"{counted(len(facts.ranks), 'rank')} with the same versions")


def _some_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")


def check_settings(facts: Facts) -> Findings:
    """Check that the TORCHMPI_ variables are valid."""
    ranks_of: dict[str, list[int]] = {}
    for rank, process in enumerate(facts.processes):
        for error in process.settings_errors:
            ranks_of.setdefault(error, []).append(rank)
    if ranks_of:
        where = {error: f"{_some_ranks(ranks)}: " if facts.in_job else "" for error, ranks in ranks_of.items()}
        remedy = "Correct or unset that variable."
        return [Finding("settings", "problem", prefix + error, remedy) for error, prefix in where.items()]
    given = sorted({name for process in facts.processes for name in process.settings_from_environment})
    return Finding("settings", "ok", f"from the environment: {', '.join(given)}" if given else "the defaults")


def check_names(facts: Facts) -> Finding | None:
    """Check that the names of other backends stand for torchmpi where the environment asks for that."""
    names = facts.here.names
    missing = [name for name, is_taken in names.items() if not is_taken]
    if missing:
        variables = " and ".join(f"TORCHMPI_AS_{name.upper()}" for name in missing)
        remedy = "Install torchmpi with pip: torch finds it by the entry point of the package."
        return Finding("names", "problem", f"{variables} has no effect in this Python", remedy)
    found = ", ".join(f"init_process_group({name!r}) gives a group of torchmpi" for name in names)
    return Finding("names", "ok", found) if names else None


def check_fork(facts: Facts) -> Findings:
    """Check that worker processes can be started safely."""
    here, test = facts.here, facts.self_test
    method, findings = f"workers are started by {here.start_method}", []
    if test is not None and test.error is None and test.forked_child != REFUSED:
        found = f"a forked child that called torchmpi: {test.forked_child}, instead of a NotStartedError"
        remedy = "Start DataLoader workers with multiprocessing_context='spawn', and report this."
        findings.append(Finding("fork", "problem", found, remedy))
    if here.start_method == "fork" and here.cuda_available:
        remedy = "Keep CUDA out of datasets, or use DataLoader(multiprocessing_context='spawn')."
        findings.append(Finding("fork", "warning", f"{method}: such a worker cannot use CUDA", remedy))
    is_fork_safe = not {"RDMAV_FORK_SAFE", "IBV_FORK_SAFE"}.isdisjoint(here.environment)
    if here.start_method == "fork" and here.has_infiniband and not is_fork_safe:
        found = f"{method}, on a host with InfiniBand: on older kernels that corrupts data sent over InfiniBand"
        remedy = "Set RDMAV_FORK_SAFE=1 for all ranks, or use DataLoader(multiprocessing_context='spawn')."
        findings.append(Finding("fork", "warning", found, remedy))
    if test is not None and test.forked_child == REFUSED:
        method += "; a forked child that calls torchmpi gets a NotStartedError"
    return findings or Finding("fork", "ok", method)


def check_self_test(facts: Facts) -> Finding | None:
    """Report the result of the self test."""
    test = facts.self_test
    if test is not None and test.error is None:
        found = f"allreduce on {counted(test.size, 'rank')}, {test.seconds:g} s from start() to stop()"
        if facts.launch is not None and facts.launch.status != 0:
            end, remedy = f"ended with status {facts.launch.status}", "MPI fails in MPI_Finalize:"
            if facts.launch.status is None:
                end = f"had not ended after {facts.launch.seconds:g} s and was killed"
                remedy = "A busy machine needs a longer --timeout. If it hangs again, MPI fails in MPI_Finalize:"
            found += f", but then the job {end}: {facts.launch.output}"
            return Finding("self test", "warning", found, f"{remedy} update the library, or report this.")
        return Finding("self test", "ok", found)
    if test is not None:
        return Finding("self test", "problem", str(test.error), "Follow the message, or report it.")
    if facts.ranks and facts.launch is not None:
        found = f"two ranks started, but did not finish: {facts.launch.output or 'no output'}"
        remedy = f"Run it yourself: {facts.launch.command.replace('python ...', 'python -m torchmpi doctor')}"
        return Finding("self test", "problem", found, remedy)
    return None
