"""Tries whether ranks can open each other's memory on GPUs, as the backend ``ipc`` has to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..backends.devices import Devices


def try_opening(comm: Any, devices: Devices, device: torch.device) -> str | None:
    """What went wrong on any rank, '' if nothing did; None where no two ranks have GPUs that reach each other.

    Collective; the same answer on all ranks.
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
    problems = comm.allgather(problem)  # also: nobody has anything open any more, so that the memory can go
    del tensor
    if device.type == "cuda":
        torch.cuda.ipc_collect()
    return next(filter(None, problems), "")


def _partners(rank: int, devices: Devices) -> Iterator[int]:
    """The ranks whose memory a rank should be able to open."""
    for other in range(len(devices)):
        is_mutual = devices.reaches(rank, other) and devices.reaches(other, rank)
        if other != rank and devices.uuids[rank] and devices.uuids[other] and is_mutual:
            yield other


def _handle_of(tensor: torch.Tensor) -> Any:
    """By what another process finds the tensor."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)


def _read(handle: Any, rank: int, other: int) -> str:
    """Open the tensor of another rank, and look whether its rank is in it."""
    if handle is None:
        return ""  # that rank says why
    open_tensor, arguments = handle
    try:
        value = open_tensor(*arguments).item()
    except RuntimeError as error:
        return f"rank {rank} cannot open that of rank {other}: {error}"
    return "" if value == other + 1 else f"rank {rank} read {value} from rank {other}, which wrote {other + 1}"
