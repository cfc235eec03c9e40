"""The part of a process group that torch reads: its names, its devices and its memory."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import ArgumentError
from ..session import runtime
from . import torch_names
from .torch_names import BackendOptions


class GroupProperties(dist.ProcessGroup):
    """Properties of a process group, under the names by which torch asks for them."""

    supports_splitting = supports_coalescing = supports_time_estimate = False
    supports_shrinking = True
    supports_reconfigure = supports_window = False
    """torch 2.14: other ranks in place. C++ (DDP) keeps the size of a process group in Python as a constant."""

    def __init__(self, options: BackendOptions, backend_name: str) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._store, self._backend_name = options.store, backend_name
        self._name, self._description = str(options.group_id), "undefined"

    def getBackendName(self) -> str:
        """Return ``torchmpi``. For the name ``gloo`` C++ would look for gloo's own class (DDP's logger does)."""
        return torch_names.NAME

    def _get_backend_name(self) -> str:
        """Return the name for which the group stands, as Python code reads it."""
        return self._backend_name

    def getGroupName(self) -> str:
        """Return the name under which functional collectives find the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name; called by torch when the group has been created."""
        self._name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        """Return the user's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the description; called by torch when the group has been created."""
        self._description = description

    _set_group_desc = setGroupDesc  # type: ignore[assignment]

    # As Python code reads them.
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        with_cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *with_cuda]

    def _get_backend(self, device: torch.device) -> GroupProperties:  # type: ignore[override]
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether :meth:`allocate_tensor` has memory for the device."""
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a tensor that the ranks of the host share; FSDP2 calls it for its buffers if configured to."""
        return runtime.current().empty_shared((size,), dtype)

    def _refuse(self, *arguments: Any, **named: Any) -> NoReturn:
        raise ArgumentError(
            f"process group {self._name}: {torch_names.NAME} has no reconfigure() and no windows. After a "
            "RankLostError call dist.shrink_group([lost ranks]), or use torchmpi.elastic(). Instead of a "
            "window use torchmpi.parameterserver."
        )

    get_reconfigure_handle = reconfigure = new_window = _refuse

    def get_group_store(self) -> torch_names.Store:
        """Return the store with which the group was created."""
        return self._store
