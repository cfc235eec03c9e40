"""What runs in the processes that the doctor starts: tells on standard output how far it comes.

A library that does not fit its launcher may end the process, or wait for ever, as soon as MPI is initialised. So
the doctor does that in processes of its own, and believes only what they managed to say.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
from typing import Any

from ..errors import MissingMPIError
from ..session import mpi_library, runtime

_MARK = "torchmpi-probe:"
BOOTSTRAP = "import sys; sys.path.append(sys.argv[1]); from torchmpi.cli import probe; probe.main(float(sys.argv[2]))"
"""For ``python -c``, with the folder in which torchmpi is, and the time limit."""


def main(timeout_seconds: float) -> None:
    """Report on MPI; then, if this is a job, on its ranks, and on torchmpi in it."""
    from .gathering import gather_ranks, mpi_facts
    from .selftest import self_test

    faulthandler.dump_traceback_later(timeout_seconds, exit=True)  # also while waiting inside MPI
    try:
        mpi = mpi_facts()
    except MissingMPIError as error:
        _say(missing=str(error.__cause__ or error))
        return
    _say(mpi=dataclasses.asdict(mpi))
    if mpi.size == 1:
        return
    ranks = gather_ranks(mpi)
    if mpi.rank == 0:
        _say(ranks=[dataclasses.asdict(rank) for rank in ranks])
    result = self_test()
    if mpi.rank == 0:
        _say(self_test=dataclasses.asdict(result))
    leave()


def leave() -> None:
    """End the job if the self test has left torchmpi running somewhere; otherwise wait until all are here."""
    comm = mpi_library.load().COMM_WORLD
    if any(comm.allgather(runtime.is_running())):
        comm.Abort(1)
    comm.Barrier()


def _say(**message: Any) -> None:
    # One write, so that lines of different ranks do not mix.
    os.write(sys.stdout.fileno(), f"{_MARK}{json.dumps(message)}\n".encode())


def messages(output: str) -> list[dict[str, Any]]:
    """What probes said, among whatever else is in the output of the launcher.

    >>> messages('noise\\n[rank 0] torchmpi-probe:{"missing": "libmpi.so"}\\nnoise')
    [{'missing': 'libmpi.so'}]
    """
    found = []
    for line in output.splitlines():
        _, mark, text = line.partition(_MARK)
        if mark:
            try:
                found.append(json.loads(text))
            except ValueError:
                continue  # cut off, or mixed with another line
    return found
