"""The plans of the backends on simulated ranks: groups, and the operations that the backends bind on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchmpi.backends import base
from torchmpi.backends.base import Operation, refusal
from torchmpi.backends.call_comparison import CallComparison
from torchmpi.backends.hierarchical.hierarchical_backend import HierarchicalBackend
from torchmpi.backends.mpi import MPIBackend
from torchmpi.backends.p2p_backend import P2PBackend
from torchmpi.backends.selection_table import Key, default_rule
from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.group import Group, GroupContext
from torchmpi.communicators.plan import Backends, Plan
from torchmpi.config import Config
from torchmpi.parameterserver.simulation.meeting_backend import MeetingBackend
from torchmpi.tensors import dtypes

from .messages import BackgroundQueue, Comm, World


class Ranks:
    """The backends on one simulated rank."""

    def __init__(self, comm: Comm, *, compared: bool = True, inter: str = "rule", config: Config | None = None) -> None:
        """Prepare the group of all ranks.

        `compared`: whether calls are compared, as they are between hosts. `inter` is the backend between the hosts of
        a hierarchical collective, `rule` for the one that the selector chooses.
        """
        world: World = comm.world
        self.config, self.inter = config or Config(), inter
        self.mpi, self.shared = MPIBackend(self.config), MeetingBackend()
        self.backends: dict[str, base.Backend] = {
            "mpi": self.mpi,
            "p2p": P2PBackend(self.config),
            "hierarchical": HierarchicalBackend(self.config, self._bind_step),
        }
        check = "strict" if compared else "off"
        context = GroupContext(world.MPI, world.hosts, check=check, threaded=True, slot_bytes=0)
        context.make_comparison = lambda group: CallComparison(group, self.shared, self.mpi)
        self.group = Group(comm, "world", tuple(comm.members), context)
        for part in (self.group, self.group.intra_host, self.group.inter_host):
            if part is not None:
                part.call_queue = BackgroundQueue(world)  # type: ignore[assignment]
        if self.group.intra_host is not None:
            self.group.intra_host.is_strict = False  # compared in shared memory

    def _bind_step(
        self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None, device_type: str
    ) -> tuple[Operation, Backends]:
        if len(group.hosts) == 1:
            return base.bind(self.shared, group, collective, dtype, op), ((None, self.shared.name),)
        if self.inter != "rule":
            return base.bind(self.backends[self.inter], group, collective, dtype, op), ((None, self.inter),)
        key = Key(collective, "cpu", "across", "sync")
        able = {name for name in ("mpi", "p2p") if refusal(self.backends[name], collective, "cpu", group) is None}
        rule = default_rule(key, able.__contains__, compared=False)
        parts = [(limit, base.bind(self.backends[name], group, collective, dtype, op)) for limit, name in rule]
        return base.by_size(parts, dtype), rule

    def prepare(self, collective: str, backend: str, dtype: torch.dtype | None, op: str | None) -> Callable[..., Any]:
        """Return a collective of the whole group: ``call(tensor, out=None, root=0)``."""
        operation = base.bind(self.backends[backend], self.group, collective, dtype, op)
        code = call_code(collective, op, 0 if dtype is None else dtypes.info(dtype).code)
        plan = Plan(collective, code, operation.run)

        def call(tensor: Any = None, out: Any = None, root: int = 0) -> Any:
            return self.group.call(plan, tensor, out, root)

        return call
