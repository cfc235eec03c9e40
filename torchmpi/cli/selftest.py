"""torchmpi itself, tried out on the ranks of this job."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import time
import warnings

import torch

from .. import collectives, mpi_library, runtime
from ..config import Config
from ..errors import ConfigError, NotStartedError, TorchMPIError
from .facts import SelfTest

REFUSED = "refused"
_NUMEL = 100_000
_CHILD_SECONDS = 10.0


def self_test() -> SelfTest:
    """Start, allreduce, ask a forked child, stop. Collective; the result is the same on all ranks."""
    comm = mpi_library.load().COMM_WORLD
    begin = time.monotonic()
    forked_child = ""
    try:
        runtime.start(config=_quiet())
        error = _check_allreduce(comm.rank, comm.size)
        forked_child = _ask_forked_child()
        runtime.stop()
    except TorchMPIError as refusal:
        error = str(refusal)
    answers = comm.allgather((error, forked_child))
    wrong = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]
    children = [child for _, child in answers if child != REFUSED]
    seconds = round(time.monotonic() - begin, 2)
    return SelfTest(comm.size, seconds, "\n".join(wrong[:3]) or None, children[0] if children else REFUSED)


def _quiet() -> Config:
    """The user's settings where they are valid: that they are not is another finding."""
    try:
        return dataclasses.replace(Config.from_environment(), verbose=False)
    except ConfigError:
        return Config(verbose=False)


def _check_allreduce(rank: int, size: int) -> str | None:
    """What is wrong with the sum over ranks of rank + 1, both ways of calling it."""
    expected = size * (size + 1) / 2
    for numel in (1, _NUMEL):
        now = collectives.allreduce(torch.full((numel,), rank + 1.0))
        later = collectives.allreduce_async(torch.full((numel,), rank + 1.0)).wait()
        for name, result in (("allreduce", now), ("allreduce_async", later)):
            if not bool((result == expected).all()):
                return f"{name} of {numel} elements gave {result.min()} to {result.max()}, not {expected}"
    return None


def _ask_forked_child() -> str:
    """Fork as a DataLoader does; the child calls torchmpi and tells what came of it."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Since Python 3.12, about the threads of this process: any rank has some.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            collectives.barrier()
            answer = "was let into a barrier"
        except NotStartedError:
            answer = REFUSED
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    answered, _, _ = select.select([reader], [], [], _CHILD_SECONDS)
    if answered:
        answer = os.read(reader, 4096).decode(errors="replace") or "it ended without an answer"
    else:
        answer = f"no answer in {_CHILD_SECONDS:g} s"
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    os.waitpid(child, 0)
    return answer
