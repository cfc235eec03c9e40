"""Trial processes of the doctor: one process alone, and two ranks started with mpirun.

A library that does not fit its launcher may end the process, or wait forever, as soon as MPI is initialised. The
doctor therefore initialises MPI in processes of its own, and reads the messages that they print as they proceed.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import shlex
import sys
from typing import Any

from ...errors import MissingMPIError
from ..facts import Facts, LaunchTrial, MPIFacts, ProcessFacts, Program, RankFacts, SelfTest, gather_ranks, mpi_facts
from ..launching import PACKAGE_PARENT, ProcessResult, environment, find_programs, leave_job, run_limited
from .self_test import self_test

_GRACE_SECONDS = 5.0
_TAIL_CHARACTERS = 1500
_TIMEOUT_MARK = "Timeout ("  # printed by faulthandler in a trial process that exceeds its time limit
_MESSAGE_MARK = "torchmpi-probe:"
# For ``python -c``, with the folder that contains torchmpi and the time limit.
_BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv[1]); from torchmpi.cli.doctor import trials; "
    "trials.trial_process(float(sys.argv[2]))"
)


def run_trials(here: ProcessFacts, *, seconds: float) -> Facts:
    """Start a process alone and two ranks with mpirun, and gather their facts."""
    alone = _run([], seconds)
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
    command = _launch_command(programs[0], here)
    result = _run(command, seconds)
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


def _launch_command(program: Program, here: ProcessFacts) -> list[str]:
    command = [program.path]
    if program.library.startswith("Open MPI") and here.num_physical_cores < 2:
        command.append("--oversubscribe")  # its slots are cores; another check reports a single core
    return [*command, "-n", "2"]


def _run(launch_command: list[str], seconds: float) -> ProcessResult:
    command = [*launch_command, sys.executable, "-c", _BOOTSTRAP, str(PACKAGE_PARENT), str(seconds)]
    return run_limited(command, seconds=seconds + _GRACE_SECONDS, environment=environment())


def _fields(output: str) -> dict[str, Any]:
    return {name: value for message in messages(output) for name, value in message.items()}


def _tail(result: ProcessResult) -> str:
    """Return the end of the output, without messages and ruled lines."""
    lines = [line.strip() for text in (result.stdout, result.stderr) for line in text.splitlines()]
    kept = [line for line in lines if line.strip("-=* ") and not messages(line)]
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
                continue  # cut off, or mixed with another line
    return found
