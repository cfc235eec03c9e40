"""The command ``torchmpi doctor``: gather facts in this job or in trials, run the checks, report the findings.

A library that does not fit its launcher may end the process, or wait forever, as soon as MPI is initialized. Outside of
a job the doctor therefore initializes MPI in processes of its own, one alone and two ranks started with mpirun, and
reads the messages that they print as they proceed.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

from ...errors import ArgumentError, MissingMPIError
from ...launch import launcher
from ...status_line import StatusLine
from ..facts import (
    Facts,
    Finding,
    Findings,
    LaunchTrial,
    MPIFacts,
    ProcessFacts,
    RankFacts,
    RecoveryTrial,
    SelfTest,
    gather_ranks,
    loaded_library,
    mpi_facts,
    process_facts,
)
from ..formatting import counted, hanging
from ..launching import BOOTSTRAP, PACKAGE_PARENT, ProcessResult, find_programs, leave_job, run_limited
from . import gpu_checks, host_checks, mpi_checks, recovery_trial, software_checks
from .self_test import self_test

CHECKS: tuple[Callable[[Facts], Findings], ...] = (
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
    host_checks.check_sessions,
    host_checks.check_threads,
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
    software_checks.check_names,
    software_checks.check_self_test,
    recovery_trial.check_recovery,
)
_MOST_FINDINGS = 4
"""Findings of one check that are shown, problems first: hosts are often alike."""
_GRACE_SECONDS = 5.0
_TAIL_CHARACTERS = 1500
_TIMEOUT_MARK = "Timeout ("  # printed by faulthandler in a trial process that exceeds its time limit
_MESSAGE_MARK = "torchmpi-probe:"
_RECOVERY = "from torchmpi.cli.doctor import diagnosis; diagnosis.recovery_process()"
_RUN = "from torchmpi.cli.command_line import main; sys.exit(main(sys.argv[2:]))"
_TRIAL = "from torchmpi.cli.doctor import diagnosis; diagnosis.trial_process(float(sys.argv[2]))"


def run(options: argparse.Namespace) -> int:
    """Check this machine, or the job of which this process is a rank; return 1 if there is a problem."""
    if options.recovery and launcher.is_rank():
        raise ArgumentError(
            "--recovery starts a job of its own, so it cannot be used in a job. Call it without mpirun."
        )
    facts = gather(options.timeout)
    if options.recovery:
        facts = dataclasses.replace(facts, recovery=try_recovery(facts, options.timeout))
    findings = diagnose(facts)
    reports = _reports(facts)
    if reports:
        report = as_json(facts, findings) if options.json else as_text(facts, findings)
        print(report, flush=True)
    # A process that ends with status 1 before the report is printed would end the job.
    if facts.in_job and facts.ranks:
        leave_job()
    elif not reports:
        return 0
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
            # Stop here: the library may end the process when it is initialized under an incompatible launcher.
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
    findings = []
    for check in CHECKS:
        found = check(facts)
        each = dict.fromkeys(found if isinstance(found, list) else [found] if found else [])  # ranks of a host agree
        sorted_ones = sorted(each, key=lambda finding: finding.verdict != "problem")
        shown, rest = sorted_ones[:_MOST_FINDINGS], sorted_ones[_MOST_FINDINGS:]
        if rest:
            shown[-1] = dataclasses.replace(shown[-1], found=f"{shown[-1].found}; and {len(rest)} more of this kind")
        findings += shown
    return findings


# --- trials -------------------------------------------------------------------------------------------------------


def run_trials(here: ProcessFacts, *, seconds: float) -> Facts:
    """Start a process alone and two ranks with mpirun, and gather their facts."""
    status = StatusLine()
    alone = _run([], seconds, status, f"a process loads MPI; at most {seconds:g} s")
    fields = _fields(alone.stdout)
    programs = find_programs()
    if "missing" in fields:
        return Facts(here, None, fields["missing"], mpi_is_missing=True, programs=programs)
    mpi, error = None, None
    if "mpi" in fields:
        mpi = MPIFacts(**fields["mpi"])
    else:
        error = _tail(alone) or f"it ended with status {alone.status} and no output"
    if not programs:
        return Facts(here, mpi, error)
    # The slots of Open MPI are cores; another check reports a single core.
    is_crowded = programs[0].library.startswith("Open MPI") and here.num_physical_cores < 2
    command = [programs[0].path, *(["--oversubscribe"] if is_crowded else []), "-n", "2"]
    what = f"{shlex.join(command)} starts two ranks, which compile kernels the first time; at most {seconds:g} s"
    result = _run(command, seconds, status, what)
    status.clear()
    fields = _fields(result.stdout)
    launch = LaunchTrial(
        command=shlex.join([*command, "python", "..."]),
        status=None if _TIMEOUT_MARK in result.stderr else result.status,
        seconds=round(result.seconds, 1),
        sizes=[message["mpi"]["size"] for message in messages(result.stdout) if "mpi" in message],
        output=_tail(result),
    )
    return Facts(
        here,
        mpi,
        error,
        programs=programs,
        launch=launch,
        ranks=[RankFacts.from_json(rank) for rank in fields.get("ranks", [])],
        self_test=SelfTest(**fields["self_test"]) if "self_test" in fields else None,
    )


def try_recovery(facts: Facts, seconds: float) -> RecoveryTrial:
    """Start three ranks with the MPI of this Python, of which one is killed."""
    if facts.mpi is None or not facts.programs:
        return RecoveryTrial("not tried, as ranks cannot be started with MPI")
    if problem := recovery_trial.why_not(facts.mpi.library):
        return RecoveryTrial(problem)
    ranks = ["-n", str(recovery_trial.NUM_RANKS), "--on-lost-rank", "continue", "--timeout", f"{seconds:g}"]
    program = [sys.executable, "-c", BOOTSTRAP + _RECOVERY, str(PACKAGE_PARENT)]
    command = [sys.executable, "-c", BOOTSTRAP + _RUN, str(PACKAGE_PARENT), "run", *ranks, *program]
    status = StatusLine()
    result = _run_shown(command, seconds, status, f"a rank of a trial job is killed; at most {seconds:g} s")
    status.clear()
    return RecoveryTrial(
        "",
        shlex.join(["torchmpi", "run", *ranks, *program]),
        result.status,
        [message["recovered"] for message in messages(result.stdout) if "recovered" in message],
        _tail(result),
    )


def _run(launch_command: list[str], seconds: float, status: StatusLine, what: str) -> ProcessResult:
    command = [*launch_command, sys.executable, "-c", BOOTSTRAP + _TRIAL, str(PACKAGE_PARENT), str(seconds)]
    return _run_shown(command, seconds, status, what)


def _run_shown(command: list[str], seconds: float, status: StatusLine, what: str) -> ProcessResult:
    status.begin(f"torchmpi doctor: {what} ...")
    begin = status.seconds

    def tick() -> None:
        status.show(f"torchmpi doctor: {what} ... {status.seconds - begin:.0f} s")

    return run_limited(command, seconds=seconds + _GRACE_SECONDS, tick=tick)


def _fields(output: str) -> dict[str, Any]:
    return {name: value for message in messages(output) for name, value in message.items()}


def _tail(result: ProcessResult) -> str:
    """Return the end of the output, without messages and ruled lines."""
    lines = f"{result.stdout}\n{result.stderr}".splitlines()
    kept = [line.strip() for line in lines if line.strip("-=* ") and not messages(line)]
    return "\n".join(kept)[-_TAIL_CHARACTERS:]


# --- in the trial process ----------------------------------------------------------------------------------


def trial_process(timeout_seconds: float) -> None:
    """Report on MPI; in a job also on its ranks, and on torchmpi running in it."""
    faulthandler.dump_traceback_later(timeout_seconds, exit=True)  # also while waiting inside MPI
    try:
        mpi = mpi_facts()
    except MissingMPIError as error:
        _send(missing=str(error.__cause__ or error))
        return
    _send(mpi=dataclasses.asdict(mpi))
    if mpi.size == 1:
        return
    ranks = gather_ranks(mpi)
    if mpi.rank == 0:
        _send(ranks=[dataclasses.asdict(rank) for rank in ranks])
    result = self_test()
    if mpi.rank == 0:
        _send(self_test=dataclasses.asdict(result))
    leave_job()


def recovery_process() -> None:
    """Report on a rank that continues after the loss of another one."""
    _send(recovered=recovery_trial.run_rank())


def _send(**message: Any) -> None:
    # One write, so that lines of different ranks do not mix.
    os.write(sys.stdout.fileno(), f"{_MESSAGE_MARK}{json.dumps(message)}\n".encode())


def messages(output: str) -> list[dict[str, Any]]:
    r"""Return the messages of trial processes in the output of a launcher.

    >>> messages('noise\n[rank 0] torchmpi-probe:{"missing": "libmpi.so"}\nnoise')
    [{'missing': 'libmpi.so'}]
    """
    found = []
    for line in output.splitlines():
        _, mark, text = line.partition(_MESSAGE_MARK)
        if mark:
            try:
                found.append(json.loads(text))
            except ValueError:
                continue  # truncated, or mixed with another line
    return found


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
    """Summarize the findings in one sentence.

    >>> summary([Finding("root", "problem", "refused", "allow it"), Finding("cores", "ok", "4")])
    '1 problem (root) among 2 checks.'
    """
    num_checks, parts = len({finding.name for finding in findings}), []
    for verdict in ("problem", "warning"):
        names = [finding.name for finding in findings if finding.verdict == verdict]
        if names:
            parts.append(f"{counted(len(names), verdict)} ({', '.join(dict.fromkeys(names))})")
    if not parts:
        return f"All {num_checks} checks are ok."
    return f"{' and '.join(parts)} among {counted(num_checks, 'check')}."
