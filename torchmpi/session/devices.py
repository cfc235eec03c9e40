"""The device of a rank: its GPU, round robin over the visible ones, or the CPU."""

from __future__ import annotations

import torch

from ..backends.gpus import Devices
from ..config import Config
from ..errors import DeviceError


def choose_device(local_rank: int, with_cuda: bool | None) -> torch.device:
    """Return the device of this rank, and make it the current one of torch if it is a GPU."""
    index = device_index(local_rank, torch.cuda.device_count()) if torch.cuda.is_available() else None
    if with_cuda is False or index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def device_index(local_rank: int, num_visible_devices: int) -> int | None:
    """Return the GPU index of a rank, round robin over the visible GPUs; None without any.

    Where a scheduler shows each rank only its own GPU, the index is 0 on all ranks.

    >>> [device_index(local_rank, 2) for local_rank in range(4)], device_index(3, 1), device_index(0, 0)
    ([0, 1, 0, 1], 0, None)
    """
    return local_rank % num_visible_devices if num_visible_devices > 0 else None


def check_cuda(has_cuda: list[bool]) -> None:
    """Raise if a rank has no CUDA device."""
    if not all(has_cuda):
        without = ", ".join(str(rank) for rank, has in enumerate(has_cuda) if not has)
        raise DeviceError(
            f"start(with_cuda=True), but torch sees no CUDA device on rank {without}. Check CUDA_VISIBLE_DEVICES and "
            "`torchmpi doctor`, or leave with_cuda out to use the CPU."
        )


def about_gpu_backends(config: Config, devices: Devices) -> str:
    """Return the part of the line at start on the backends of the GPU; '' if no rank has one."""
    if not any(devices.uuids):
        return ""
    names = config.chosen_gpu_backends
    if config.gpu_backends == "auto":  # `ipc` among ranks that share a GPU, which `nccl` refuses
        is_shared = devices.first_sharing(range(len(devices))) is not None
        names = names if is_shared and len({*devices.uuids} - {""}) > 1 else ("ipc",) if is_shared else ("nccl",)
    if not names:
        return ", CUDA tensors go through the host"
    plural = "s" * (len(names) > 1)
    return f", GPU backend{plural} {' and '.join(names)} (TORCHMPI_GPU_BACKENDS=none: off)"
