"""The self test: torchmpi started, used and stopped on the ranks of this job."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from ... import collectives
from ...backends.gpus import Devices
from ...config import Config
from ...errors import ConfigError, NotStartedError, TorchMPIError
from ...session import mpi_library, runtime
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


# --- memory on GPUs ----------------------------------------------------------------------------------------


def check_gpu_memory(comm: Any, devices: Devices, device: torch.device) -> str | None:
    """Check whether ranks can open each other's memory on GPUs, which the backend ``ipc`` needs.

    Returns the error of any rank, '' if there was none, or None where no two ranks have GPUs that can access each
    other. Collective; all ranks get the same result.
    """
    partners = {rank: list(_partners(rank, devices)) for rank in range(len(devices))}
    if not any(partners.values()):
        return None
    tensor, handle, problem = None, None, ""
    if devices[comm.rank].uuid:
        try:
            tensor = torch.full((1,), comm.rank + 1.0, device=device)
            handle = _handle_of(tensor)
        except RuntimeError as error:
            problem = f"rank {comm.rank} cannot share its memory: {error}"
    handles = comm.allgather(handle)
    for other in partners[comm.rank]:
        problem = problem or _read(handles[other], comm.rank, other)
    problems = comm.allgather(problem)  # also a barrier: no rank has the memory open when it is released
    del tensor
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    return next(filter(None, problems), "")


def _partners(rank: int, devices: Devices) -> Iterator[int]:
    """Yield the ranks whose memory a rank should be able to open."""
    for other in range(len(devices)):
        is_mutual = devices.reaches(rank, other) and devices.reaches(other, rank)
        if other != rank and devices.uuids[rank] and devices.uuids[other] and is_mutual:
            yield other


def _handle_of(tensor: torch.Tensor) -> Any:
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def _read(handle: Any, rank: int, other: int) -> str:
    """Open the tensor of another rank, and check that it holds that rank + 1."""
    if handle is None:
        return ""  # the other rank reports the error
    open_tensor, arguments = handle
    try:
        value = open_tensor(*arguments).item()
    except RuntimeError as error:
        return f"rank {rank} cannot open that of rank {other}: {error}"
    return "" if value == other + 1 else f"rank {rank} read {value} from rank {other}, which wrote {other + 1}"
