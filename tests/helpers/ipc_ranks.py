"""Staging areas in memory of the host that processes share, in place of the memory of a GPU.

Operations on host tensors have ended when they return, and so have those that synchronize streams: the host waits.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch

import torchmpi as mpi
from helpers import contract
from torchmpi import Config
from torchmpi.backends import rank_order
from torchmpi.backends.base import announced
from torchmpi.backends.ipc import ipc_backend as ipc
from torchmpi.backends.ipc.area_kernels import AreaKernels
from torchmpi.backends.ipc.staged_group import StagedGroup
from torchmpi.backends.ipc.staging_areas import CudaDevice
from torchmpi.backends.ipc.stream_memory import StreamOperations
from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.group import Group
from torchmpi.communicators.plan import Plan, compared_shape
from torchmpi.shared_memory.kernels.records import StreamOperation
from torchmpi.shared_memory.segments import Segment, Ticket
from torchmpi.tensors import dtypes

_IS_WAIT = 4
_FUNCTIONS = {"operate": 4, "launch": 11}
"""Of the CUDA driver, with the number of their arguments."""
COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
REDUCING = ("allreduce", "reduce", "reduce_scatter")


class HostOperations(StreamOperations):
    """Operations of streams that have ended when they return."""

    __slots__ = ()

    def __init__(self, written: Sequence[int], awaited: Sequence[int]) -> None:
        self._enqueue = operate
        self._prepare(written, awaited)


def operate(stream: int, count: int, address: int, flags: int) -> int:
    """Run the operations at an address, as cuStreamBatchMemOp takes them."""
    words = (ctypes.c_int64 * (StreamOperation.FIELDS * count)).from_address(address)
    for first in range(0, StreamOperation.FIELDS * count, StreamOperation.FIELDS):
        place, number = ctypes.c_int64.from_address(words[first + 1]), words[first + StreamOperation.value]
        if words[first] & 0xFFFFFFFF != _IS_WAIT:
            place.value = number
        while place.value < number:
            time.sleep(0)
    return 0


class HostDevice(CudaDevice):
    """The device that the backend ipc uses, with memory of the host."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))
        self.segments: list[Segment] = []

    def _keep(self, segment: Segment, num_bytes: int) -> torch.Tensor:
        self.segments.append(segment)
        memory = (ctypes.c_uint8 * num_bytes).from_address(segment.address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return self._keep(Segment.create("ipc", num_bytes), num_bytes)

    def share(self, area: torch.Tensor) -> Any:
        return tuple(self.segments[0].ticket), area.numel()

    def open(self, handle: Any) -> torch.Tensor:
        ticket, num_bytes = handle
        return self._keep(Segment.open(Ticket(*ticket)), num_bytes)

    def decline(self, handle: Any) -> None:
        """Do nothing: nobody counts the users of a segment."""

    def page_lock(self, memory: torch.Tensor) -> None:
        """Do nothing: the host needs no page-locked memory."""

    def unlock(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def operations(self, written: Sequence[int], awaited: Sequence[int]) -> StreamOperations:
        return HostOperations(written, awaited)

    def kernels(self, dtype: torch.dtype, op: str, size: int) -> AreaKernels | None:
        """Return None: operations of torch combine."""
        return None

    def is_capturing(self) -> bool:
        """Return False: there are no graphs of host memory."""
        return False

    def current_stream(self) -> int:
        """Return 0: host tensors have no streams."""
        return 0

    def finish(self) -> None:
        """Do nothing: operations on host tensors have ended."""

    def collect(self) -> None:
        for segment in self.segments:
            segment.withdraw()
            segment.close()
        self.segments.clear()


class HostDriver(HostDevice):
    """The same with kernels that machine code launches, by functions in place of those of the CUDA driver."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        self.adding: list[tuple[torch.dtype, str, int]] = []
        """The kernels that add, by half their number; those that fill have the odd numbers."""
        functions = {"operate": operate, "launch": self.launch}
        self.called = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_int64,) * _FUNCTIONS[name])(function)
            for name, function in functions.items()
        }
        self.num_sums = 0

    def kernels(self, dtype: torch.dtype, op: str, size: int) -> AreaKernels | None:
        if not dtype.is_floating_point or dtype.itemsize == 1 or op not in ("sum", "avg") or size < 2:
            return None
        self.adding.append((dtype, op, size))
        add = 2 * len(self.adding) - 2
        return AreaKernels(add, add + 1, 8, 1024)

    def reduction(self, areas: Sequence[torch.Tensor], op: str) -> Any:
        combine = rank_order.combination(areas, op)
        return lambda out, stream: combine(out)

    def driver_functions(self) -> tuple[int, int]:
        operating, launching = (ctypes.cast(self.called[name], ctypes.c_void_p).value or 0 for name in _FUNCTIONS)
        return operating, launching

    def launch(self, kernel: int, *arguments: int) -> int:
        """Run a kernel as cuLaunchKernel would."""
        dtype, op, size = self.adding[kernel // 2]
        parameters = _words(arguments[-2], 6 if kernel % 2 else 3)
        if kernel % 2:
            source, area, numel = (_words(each, 1)[0] for each in parameters[:3])
            ctypes.memmove(area, source, numel * dtype.itemsize)
            for place in _words(parameters[3], size - 1):
                ctypes.c_int64.from_address(place).value = _words(parameters[4], 1)[0]
            return 0
        out, numel = (_words(each, 1)[0] for each in parameters[1:])
        *areas, result = (_at(address, numel, dtype) for address in (*_words(parameters[0], size), out))
        rank_order.combine(areas, op, result)
        self.num_sums += 1
        return 0


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def _at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    memory = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def ops_for(collective: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The operations of a collective; one that does not reduce is called once."""
    return contract.OPS_OF.get(dtype, ()) if collective in REDUCING else ("sum",)


class Devices:
    """All ranks of a host on one GPU."""

    def __init__(self, size: int, *, uuids: tuple[str, ...] = (), apart: tuple[int, int] = (-1, -1)) -> None:
        self.uuids, self.hosts, self._apart = uuids or ("GPU-0",) * size, (0,) * size, apart

    def reaches(self, a: int, b: int) -> bool:
        return (a, b) != self._apart


class Rig:
    """The backend on a group of its own, over memory of the host."""

    def __init__(
        self,
        *,
        backend: Any = None,
        check: str | None = None,
        group: Group | None = None,
        device: type[HostDevice] = HostDevice,
    ) -> None:
        world = mpi.communicator().intra
        self.group = group or Group(world.comm.Dup(), "staged", world.world_ranks, world.context, check=check)
        self.rank, self.size = self.group.rank, self.group.size
        self.backend = backend
        if backend is None:
            self.backend = ipc.IpcBackend(Config(staging_bytes=1 << 20), Devices(self.size))
            self.backend.make_device = device
        self._plans: dict[Any, Plan] = {}

    def run(self, collective: str, tensor: torch.Tensor, *, root: int = 0, op: str = "sum") -> torch.Tensor:
        op_of_collective = op if collective in REDUCING else None
        key = collective, tensor.dtype, op_of_collective
        if key not in self._plans:
            code = call_code(collective, op_of_collective, dtypes.info(tensor.dtype).code)
            operation = announced(self.group, self.backend.bind(self.group, collective, tensor.dtype, op_of_collective))
            self._plans[key] = Plan(collective, code, operation.run, compared_shape(collective))
        result: torch.Tensor = self.group.call(self._plans[key], tensor, None, root)
        return result

    @property
    def staged(self) -> StagedGroup:
        return next(item for item in self.group.attachments if isinstance(item, StagedGroup))


class Call:
    """A call with its expected result."""

    def __init__(
        self, rig: Rig, collective: str, dtype: torch.dtype, op: str, shape: tuple[int, ...], root: int
    ) -> None:
        self.collective, self.dtype, self.op, self.root = collective, dtype, op, root % rig.size
        self.what = f"{collective} {op} {dtype} {shape} root {self.root}"
        rank, size = rig.rank, rig.size
        shapes = [shape] * size
        if collective == "allgather" and shape:
            shapes = [((shape[0] * (r + root)) % (2 * shape[0] + 1), *shape[1:]) for r in range(size)]
        inputs = [contract.values(shape, dtype, r, seed=root) for r, shape in enumerate(shapes)]
        self.tensor = inputs[rank].clone()
        self.expected = inputs[rank]
        if collective == "broadcast":
            self.expected = inputs[self.root]
        elif collective == "allgather":
            self.expected = torch.cat([part.reshape(1) if part.dim() == 0 else part for part in inputs])
        elif collective == "reduce_scatter":
            self.expected = contract.rows(contract.reduced(inputs, op), rank, size)
        elif collective == "allreduce" or rank == self.root:
            self.expected = contract.reduced(inputs, op)

    def check(self, rig: Rig, agree: Any) -> None:
        agree.bits(rig.run(self.collective, self.tensor, root=self.root, op=self.op), self.expected, self.what)
