"""``torchmpi doctor --recovery``: a job of three ranks, of which one is killed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from ... import collectives
from ...config import Config
from ...continuing.elastic_job import ElasticJob, elastic
from ...launch import fault_tolerance
from ...session import api, runtime
from ..facts import Facts, Finding

NUM_RANKS = 3
_STEPS, _LAST_STEP_OF_RANK_1, _NUMBERS = 20, 7, range(12)


def why_not(library: str) -> str:
    """Return why an MPI library, of a name and a version, cannot continue without a rank; '' if it may.

    >>> why_not("MPICH 5.0.2"), why_not("Open MPI 4.1.6"), why_not("Open MPI 5.0.11")
    ('MPICH cannot continue without a lost rank', 'Open MPI can do so from version 5.0 on', '')
    """
    name, _, version = library.rpartition(" ")
    return fault_tolerance.why_not(name, tuple(int(part) for part in version.split(".") if part.isdigit()))


def run_rank() -> dict[str, Any]:
    """Add numbers in a rank of the trial, and return the outcome; rank 1 does not return."""
    runtime.start(config=Config(on_lost_rank="raise", verbose=False))
    times: list[float] = []
    """Of the kill, and of the end of the first call after it."""

    @elastic(step=0, total=0)
    def add(job: ElasticJob) -> int:
        while job.step < _STEPS:
            if job.step == _LAST_STEP_OF_RANK_1 and not times:
                times.append(max(collectives.allgather_object(time.monotonic())))
                if api.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            job.total += int(collectives.allreduce(sum(_NUMBERS[api.rank() :: api.size()])))
            if len(times) == 1:
                times.append(time.monotonic())
            job.step += 1
            if job.step % 2 == 0:
                job.commit()
        total: int = job.total
        return total

    is_right = add() == _STEPS * sum(_NUMBERS)
    answer = {"size": api.size(), "is_right": is_right, "seconds": round(times[1] - times[0], 3)}
    runtime.stop()
    return answer


def check_recovery(facts: Facts) -> Finding | None:
    """Check that the others continue when a rank is killed."""
    trial = facts.recovery
    if trial is None:
        return None
    if trial.problem:
        return Finding("recovery", "warning", trial.problem, f"{fault_tolerance.HOW_ELSEWHERE}.")
    num_left = NUM_RANKS - 1
    expected = num_left * [(num_left, True)]
    if trial.status == 0 and [(each["size"], each["is_right"]) for each in trial.answers] == expected:
        seconds = max(each["seconds"] for each in trial.answers)
        found = (
            f"after a kill, {num_left} of {NUM_RANKS} ranks continued from the last commit with right results; "
            f"the first call after it ended {seconds:.2f} s later"
        )
        return Finding("recovery", "ok", found)
    ended = "did not end in time" if trial.status is None else f"ended with status {trial.status}"
    return Finding(
        "recovery",
        "problem",
        f"a trial job, of which a rank is killed, {ended}; {len(trial.answers)} of {num_left} ranks continued. "
        f"{trial.output}",
        f"Do not use --on-lost-rank continue here. {fault_tolerance.HOW_ELSEWHERE}. Run it yourself: {trial.command}",
    )
