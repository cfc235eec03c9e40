"""torchmpi itself, tried out on the ranks of this job."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import time
import warnings
from collections.abc import Sequence

import torch

from .. import collectives
from ..config import Config
from ..errors import ConfigError, NotStartedError, TorchMPIError
from ..session import mpi_library, runtime
from .facts import SelfTest
from .opening import try_opening

REFUSED = "refused"
_NUMEL = 100_000
_CHILD_SECONDS = 10.0


def self_test() -> SelfTest:
    """Start, allreduce, ask a forked child, stop. Collective; the result is the same on all ranks."""
    comm = mpi_library.load().COMM_WORLD
    begin = time.monotonic()
    forked_child, gpu_memory = "", None
    try:
        runtime.start(config=_quiet())
        error = _check_allreduce(comm.rank, comm.size)
        gpu_memory = try_opening(comm, runtime.current().devices, runtime.current().device)
        forked_child = _ask_forked_child()
        runtime.stop()
    except TorchMPIError as refusal:
        error = str(refusal)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    answers = comm.allgather((error, forked_child))
    children = [child for _, child in answers if child != REFUSED]
    seconds = round(time.monotonic() - begin, 2)
    wrong = _in_short([error for error, _ in answers])
    return SelfTest(comm.size, seconds, wrong, children[0] if children else REFUSED, gpu_memory)


def _in_short(errors: Sequence[str | None]) -> str | None:
    """What is wrong on some rank; each message once.

    >>> _in_short(["no", "no"]), _in_short([None, "no"])
    ('no', 'rank 1: no')
    """
    first = {error: rank for rank, error in reversed(list(enumerate(errors))) if error is not None}
    if len(first) == 1 and None not in errors:
        return next(iter(first))
    return "\n".join(f"rank {rank}: {error}" for error, rank in sorted(first.items(), key=lambda item: item[1])) or None


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
