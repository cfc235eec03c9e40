"""``torchmpi doctor``: gather, judge, report."""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json

from ..errors import MissingMPIError
from ..session.mpi_library import are_foreign
from . import checks_gpu, checks_host, checks_mpi, checks_software
from .facts import Facts
from .finding import Check, Finding
from .gathering import gather_ranks, loaded_library, mpi_facts, process_facts
from .launching import is_rank
from .layout import counted, hanging
from .probe import leave
from .selftest import self_test
from .trial import try_out

CHECKS: tuple[Check, ...] = (
    checks_software.check_versions,
    checks_mpi.check_library,
    checks_mpi.check_several_libraries,
    checks_mpi.check_launcher,
    checks_mpi.check_root,
    checks_mpi.check_variables,
    checks_mpi.check_thread_level,
    checks_software.check_agreement,
    checks_host.check_cores,
    checks_host.check_binding,
    checks_host.check_quota,
    checks_host.check_shared_memory,
    checks_host.check_leftovers,
    checks_gpu.check_cuda,
    checks_gpu.check_nccl,
    checks_gpu.check_peers,
    checks_gpu.check_ipc,
    checks_gpu.check_mps,
    checks_software.check_fork,
    checks_software.check_settings,
    checks_software.check_self_test,
)


def run(options: argparse.Namespace) -> int:
    """Check this machine, or the job of which this process is a rank; 1 if there is a problem."""
    facts = gather(options.timeout)
    findings = diagnose(facts)
    if _reports(facts):
        report = as_json(facts, findings) if options.json else as_text(facts, findings)
        print(report, flush=True)
    if facts.in_job and facts.ranks:
        leave()  # a rank that ends with status 1 before rank 0 has printed would take it along
    return int(any(finding.verdict == "problem" for finding in findings))


def gather(timeout_seconds: float) -> Facts:
    """All facts: of the running job if this is one of its ranks, otherwise of trials."""
    here = process_facts()
    if not is_rank(here.launcher, here.launcher_ranks):
        return try_out(here, seconds=timeout_seconds)
    faulthandler.dump_traceback_later(timeout_seconds, exit=True)  # also while waiting inside MPI
    try:
        mpi = loaded_library()
        if are_foreign(here.launcher, mpi.library):
            # Not further: the library may end the process when it is initialised under another one's launcher.
            return Facts(here, mpi, in_job=True)
        mpi = mpi_facts()
    except MissingMPIError as error:
        return Facts(here, None, str(error.__cause__ or error), mpi_is_missing=True, in_job=True)
    if mpi.size == 1 and here.launcher_ranks > 1:
        return Facts(here, mpi, in_job=True)
    ranks = gather_ranks(mpi)
    # The same facts on all ranks make the same findings and the same exit status.
    here, mpi = ranks[0].process, dataclasses.replace(ranks[0].mpi, rank=mpi.rank)
    result = self_test()
    faulthandler.cancel_dump_traceback_later()
    return Facts(here, mpi, ranks=ranks, self_test=result, in_job=True)


def _reports(facts: Facts) -> bool:
    """Rank 0 speaks for a job; where the processes do not know each other, the first one of the host does."""
    if not facts.in_job or facts.ranks:
        return facts.mpi is None or facts.mpi.rank == 0
    return facts.here.launcher_local_rank in (None, 0)


def diagnose(facts: Facts) -> list[Finding]:
    """What the checks that apply have found."""
    return [finding for check in CHECKS if (finding := check(facts)) is not None]


# --- report ------------------------------------------------------------------------------------------------


def as_text(facts: Facts, findings: list[Finding]) -> str:
    """One paragraph per finding, and the summary."""
    subject = f"this job of {counted(len(facts.ranks), 'rank')}" if facts.in_job and facts.ranks else facts.here.host
    lines = [f"torchmpi doctor: {subject}", ""]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        lines += hanging(f"{finding.verdict:7}  {finding.name:{width}}  ", finding.found)
        if finding.remedy:
            lines += hanging(f"{'':9}{'':{width}}  -> ", finding.remedy)
    return "\n".join([*lines, "", summary(findings)])


def as_json(facts: Facts, findings: list[Finding]) -> str:
    """The findings, and the facts from which they were made."""
    return json.dumps(
        {
            "summary": summary(findings),
            "checks": [dataclasses.asdict(finding) for finding in findings],
            "facts": dataclasses.asdict(facts),
        },
        indent=2,
    )


def summary(findings: list[Finding]) -> str:
    """One sentence.

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
