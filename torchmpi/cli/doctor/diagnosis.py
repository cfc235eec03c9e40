"""The command ``torchmpi doctor``: gather facts, run the checks, report the findings."""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json

from ...errors import MissingMPIError
from ...session import launcher
from ..facts import Facts, gather_ranks, loaded_library, mpi_facts, process_facts
from ..formatting import counted, hanging
from ..launching import leave_job
from . import gpu_checks, host_checks, mpi_checks, software_checks
from .finding import Check, Finding
from .self_test import self_test
from .trials import run_trials

CHECKS: tuple[Check, ...] = (
    software_checks.check_versions,
    mpi_checks.check_library,
    mpi_checks.check_several_libraries,
    mpi_checks.check_launcher,
    mpi_checks.check_root,
    mpi_checks.check_variables,
    mpi_checks.check_thread_level,
    software_checks.check_agreement,
    host_checks.check_cores,
    host_checks.check_binding,
    host_checks.check_quota,
    host_checks.check_shared_memory,
    host_checks.check_leftovers,
    gpu_checks.check_cuda,
    gpu_checks.check_nccl,
    gpu_checks.check_peers,
    gpu_checks.check_ipc,
    gpu_checks.check_mps,
    software_checks.check_fork,
    software_checks.check_settings,
    software_checks.check_self_test,
)


def run(options: argparse.Namespace) -> int:
    """Check this machine, or the job of which this process is a rank; return 1 if there is a problem."""
    facts = gather(options.timeout)
    findings = diagnose(facts)
    if _reports(facts):
        report = as_json(facts, findings) if options.json else as_text(facts, findings)
        print(report, flush=True)
    if facts.in_job and facts.ranks:
        leave_job()  # a rank that ends with status 1 before rank 0 has printed would end the job
    return int(any(finding.verdict == "problem" for finding in findings))


def gather(timeout_seconds: float) -> Facts:
    """Gather the facts of the running job if this process is one of its ranks, otherwise of trials."""
    here = process_facts()
    if not launcher.is_rank():
        return run_trials(here, seconds=timeout_seconds)
    faulthandler.dump_traceback_later(timeout_seconds, exit=True)  # also while waiting inside MPI
    try:
        mpi = loaded_library()
        if launcher.are_incompatible(here.launcher, mpi.library):
            # Stop here: the library may end the process when it is initialised under an incompatible launcher.
            return Facts(here, mpi, in_job=True)
        mpi = mpi_facts()
    except MissingMPIError as error:
        return Facts(here, None, str(error.__cause__ or error), mpi_is_missing=True, in_job=True)
    if mpi.size == 1 and here.launcher_ranks > 1:
        return Facts(here, mpi, in_job=True)
    ranks = gather_ranks(mpi)
    # The same facts on all ranks lead to the same findings and the same exit status.
    here, mpi = ranks[0].process, dataclasses.replace(ranks[0].mpi, rank=mpi.rank)
    result = self_test()
    faulthandler.cancel_dump_traceback_later()
    return Facts(here, mpi, ranks=ranks, self_test=result, in_job=True)


def _reports(facts: Facts) -> bool:
    """Return whether this process prints the report: rank 0, or the first on the host if they form no job."""
    if not facts.in_job or facts.ranks:
        return facts.mpi is None or facts.mpi.rank == 0
    return facts.here.launcher_local_rank in (None, 0)


def diagnose(facts: Facts) -> list[Finding]:
    """Return the findings of the checks that apply."""
    return [finding for check in CHECKS if (finding := check(facts)) is not None]


# --- report ------------------------------------------------------------------------------------------------


def as_text(facts: Facts, findings: list[Finding]) -> str:
    """Format one paragraph per finding, and the summary."""
    subject = f"this job of {counted(len(facts.ranks), 'rank')}" if facts.in_job and facts.ranks else facts.here.host
    lines = [f"torchmpi doctor: {subject}", ""]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        lines += hanging(f"{finding.verdict:7}  {finding.name:{width}}  ", finding.found)
        if finding.remedy:
            lines += hanging(f"{'':9}{'':{width}}  -> ", finding.remedy)
    return "\n".join([*lines, "", summary(findings)])


def as_json(facts: Facts, findings: list[Finding]) -> str:
    """Format the findings, and the facts they are based on."""
    return json.dumps(
        {
            "summary": summary(findings),
            "checks": [dataclasses.asdict(finding) for finding in findings],
            "facts": dataclasses.asdict(facts),
        },
        indent=2,
    )


def summary(findings: list[Finding]) -> str:
    """Summarise the findings in one sentence.

    >>> summary([Finding("root", "problem", "refused", "allow it"), Finding("cores", "ok", "4")])
    '1 problem (root) among 2 checks.'
    """
    parts = []
    for verdict in ("problem", "warning"):
        names = [finding.name for finding in findings if finding.verdict == verdict]
        if names:
            parts.append(f"{counted(len(names), verdict)} ({', '.join(names)})")
    if not parts:
        return f"All {len(findings)} checks are ok."
    return f"{' and '.join(parts)} among {len(findings)} checks."
