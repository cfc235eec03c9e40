"""The backend for GPUs of one host, and which calls it accepts; :mod:`.staged_group` has its collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...communicators.group import Group
from ...config import Config
from ..base import Backend, Operation
from ..gpus import Devices
from ..job_facts import JobFacts

if TYPE_CHECKING:
    from .staging_areas import CudaDevice


class IpcBackend(Backend):
    """Collectives of ranks that share a GPU, or whose GPUs can access each other."""

    name = "ipc"
    device_types = ("cuda",)
    collectives = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
    announces = False
    enqueues = True

    def __init__(self, config: Config, devices: Devices, problem: str = "") -> None:
        """Create the backend; `problem`: the reason why its processes cannot share GPU memory; '' if they can."""
        self.config, self.devices, self.problem = config, devices, problem
        self.refused: dict[int, str] = {}
        """Why the staging areas of a group could not be allocated, by the key of the group; equal on all its ranks."""

    @classmethod
    def make(cls, job: JobFacts) -> IpcBackend:
        return cls(job.config, job.devices, _why_not_in(job))

    def takes(self, device_type: str, collective: str) -> bool:
        return device_type == "cuda"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Accept ranks of one host with peer access."""
        if not self.config.staging_bytes:
            return "it is switched off (staging_bytes=0)"
        return self.problem or (None if group is None else self._why_not_among(group))

    def is_tested(self, group: Group) -> bool:
        """Return whether such groups have been tested on GPUs: only ranks that share one."""
        return len({(self.devices.hosts[rank], self.devices.uuids[rank]) for rank in group.world_ranks}) == 1

    def _why_not_among(self, group: Group) -> str | None:
        devices, ranks = self.devices, group.world_ranks
        if len({devices.hosts[rank] for rank in ranks}) > 1:
            return "its ranks are on several hosts"
        for rank in ranks:
            if not devices.uuids[rank]:
                return f"rank {rank} has no GPU"
        for index, rank in enumerate(ranks):
            for other in ranks[:index]:
                if not (devices.reaches(rank, other) and devices.reaches(other, rank)):
                    return f"the GPUs of ranks {other} and {rank} cannot reach each other"
        if group.status_board is None:
            return "its ranks have no shared memory to synchronize in (slot_bytes=0, or the system provides none)"
        return self.refused.get(group.key)

    def make_device(self, device: torch.device) -> CudaDevice:
        """Return what the staging areas of a group are made and read by."""
        from .staging_areas import CudaDevice

        return CudaDevice(device)

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        from .staged_group import StagedGroup, prepare

        with group.binding:
            staged = next((item for item in group.attachments if isinstance(item, StagedGroup)), None)
            if staged is None:
                staged = StagedGroup(group, self.config.staging_bytes, self.make_device, self.refused)
                group.attachments.append(staged)
        return prepare(staged, collective, dtype, op)


def _why_not_in(job: JobFacts) -> str:
    """Return the reason why processes of a job cannot share GPU memory, determined by a test; '' if they can."""
    config, world, devices = job.config, job.world, job.devices
    is_auto = config.backend != "ipc" and config.gpu_backends == "auto"
    is_wanted = config.backend == "ipc" or "ipc" in config.chosen_gpu_backends
    is_wanted &= not is_auto or devices.first_sharing(range(world.size)) is not None
    if not (is_wanted and any(devices.uuids) and config.staging_bytes and config.slot_bytes):
        return ""  # not chosen without being requested (its first call tries then), or unavailable
    places = [(device.host, device.uuid if is_auto else bool(device.uuid)) for device in devices]
    near, has_gpu = world.Split(places.index(places[world.rank]), world.rank), bool(devices[world.rank].uuid)
    is_tried = has_gpu and near.size > 1
    problem = ""
    if is_tried:
        from . import staging_areas

        problem = staging_areas.trial(near, staging_areas.CudaDevice(job.device))
    near.Free()
    found = [f"rank {rank}: {text}" for rank, text in enumerate(world.allgather(problem)) if text]
    return found[0] if found else ""
