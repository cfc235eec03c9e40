"""The self test: torchmpi started, used and stopped on the ranks of this job."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from ... import collectives
from ...backends.gpus import Devices, ipc_groups
from ...backends.ipc import staging_areas
from ...config import Config
from ...errors import ConfigError, NotStartedError, TorchMPIError
from ...launch import mpi_library
from ...session import runtime
from ..facts import SelfTest

REFUSED = "refused"
_NUMEL = 100_000
_CHILD_SECONDS = 10.0


def self_test() -> SelfTest:
    """Start torchmpi, run allreduce, call it in a forked child, stop. Collective; all ranks get the same result."""
    comm = mpi_library.load().COMM_WORLD
    begin = time.monotonic()
    forked_child, gpu_memory = "", None
    try:
        runtime.start(config=_quiet_config())
        error = _check_allreduce(comm.rank, comm.size)
        gpu_memory = check_gpu_memory(comm, runtime.current().devices, runtime.current().device)
        forked_child = _call_in_forked_child()
        runtime.stop()
    except TorchMPIError as refusal:
        error = str(refusal)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    results = comm.allgather((error, forked_child))
    children = [child for _, child in results if child != REFUSED]
    seconds = round(time.monotonic() - begin, 2)
    errors = _join_errors([error for error, _ in results])
    return SelfTest(comm.size, seconds, errors, children[0] if children else REFUSED, gpu_memory)


def _join_errors(errors: Sequence[str | None]) -> str | None:
    """Join the errors of all ranks, each message once.

    >>> _join_errors(["no", "no"]), _join_errors([None, "no"])
    ('no', 'rank 1: no')
    """
    first = {error: rank for rank, error in reversed(list(enumerate(errors))) if error is not None}
    if len(first) == 1 and None not in errors:
        return next(iter(first))
    return "\n".join(f"rank {rank}: {error}" for error, rank in sorted(first.items(), key=lambda item: item[1])) or None


def _quiet_config() -> Config:
    """Return the user's settings if they are valid; another check reports invalid ones."""
    try:
        return dataclasses.replace(Config.from_environment(), verbose=False)
    except ConfigError:
        return Config(verbose=False)


def _check_allreduce(rank: int, size: int) -> str | None:
    """Check the sum over ranks of rank + 1, synchronously and asynchronously; return a description of the error."""
    expected = size * (size + 1) / 2
    for numel in (1, _NUMEL):
        synchronous = collectives.allreduce(torch.full((numel,), rank + 1.0))
        asynchronous = collectives.allreduce_async(torch.full((numel,), rank + 1.0)).wait()
        for name, result in (("allreduce", synchronous), ("allreduce_async", asynchronous)):
            if not bool((result == expected).all()):
                return f"{name} of {numel} elements gave {result.min()} to {result.max()}, not {expected}"
    return None


def _call_in_forked_child() -> str:
    """Fork as a DataLoader does, call torchmpi in the child, and return the outcome."""
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    child = fork.Process(target=_enter_barrier, args=(writer,), daemon=True)
    with warnings.catch_warnings():
        # Since Python 3.12, about the threads of this process: any rank has some.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    writer.close()
    try:
        answer: str = reader.recv() if reader.poll(_CHILD_SECONDS) else f"no answer in {_CHILD_SECONDS:g} s"
    except EOFError:
        answer = "it ended without an answer"
    child.kill()
    child.join()
    return answer


def _enter_barrier(writer: Connection) -> None:
    try:
        collectives.barrier()
        answer = "entered a barrier"
    except NotStartedError:
        answer = REFUSED
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    writer.send(answer)


def check_gpu_memory(comm: Any, devices: Devices, device: torch.device) -> str | None:
    """Check whether ranks can open each other's memory on GPUs, which the backend ``ipc`` needs.

    Returns the error of the first rank that has one, '' if there is none, or None where no two ranks have GPUs that can
    access each other. Collective; all ranks get the same result.
    """
    ranks = range(len(devices))
    groups = ipc_groups([[devices.reaches(rank, other) for other in ranks] for rank in ranks])
    if len(set(groups)) == len(groups):
        return None
    group = comm.Split(groups[comm.rank], comm.rank)
    problem = staging_areas.trial(group, staging_areas.CudaDevice(device)) if group.size > 1 else ""
    group.Free()
    return next((f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(problem)) if text), "")
