"""The coordinator of the ranks of a communicator: all apply the same averaged gradient."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import collectives
from .. import nn as mpinn
from ..errors import ArgumentError, DeviceError
from ..nn.replica import attached
from ..nn.sync import ASYNC_BACKWARD
from ..session import api
from .state import State
from .updates import trained_parameters


class AllRanks:
    """The ranks of the current communicator. For the arguments see :class:`AllReduceSGDEngine`."""

    def __init__(
        self,
        use_gpu: bool | None = None,
        asynchronous: bool = False,
        dynamic_network: bool = True,
        debug: bool = False,
    ) -> None:
        self._use_gpu, self._asynchronous = use_gpu, asynchronous
        self._dynamic_network, self._debug = dynamic_network, debug
        self._registered: tuple[nn.Module, list[int]] | None = None
        """The module whose gradients are reduced during the backward pass, and the numbers of its parameters."""

    @property
    def rank(self) -> int:
        return api.rank()

    @property
    def size(self) -> int:
        return api.size()

    # --- agreement -----------------------------------------------------------------------------------------

    def count(self, number: int) -> int:
        return int(collectives.allreduce(int(number)))

    def broadcast(self, value: Any, root: int = 0) -> Any:
        return collectives.broadcast_object(value, root)

    def gather(self, value: Any) -> list[Any]:
        return list(collectives.allgather_object(value))

    def collect(self, rows: Tensor) -> Tensor | None:
        return collectives.gather(rows)

    # --- training ------------------------------------------------------------------------------------------

    def device(self, network: nn.Module) -> torch.device:
        """Return the device that ``start()`` has chosen for this rank, unless `use_gpu` excludes it."""
        device = api.device()
        if self._use_gpu is False:
            return torch.device("cpu")
        if self._use_gpu and device.type != "cuda":
            raise DeviceError(
                f"rank {api.rank()}: use_gpu=True, but the device of this rank is the {device}. "
                "Use start(with_cuda=True) on hosts with GPUs, or use_gpu=None to use a GPU only where there is one."
            )
        return device

    def begin(self, state: State) -> None:
        """Copy the parameters of rank 0 to all ranks, and register reductions during the backward pass."""
        _refuse_unsynchronized(state)
        for module in _trained(state):
            mpinn.synchronize_parameters(module)
        if self._asynchronous:
            self._register(state)

    def begin_update(self, state: State, num_active: int) -> None:
        """Check that all ranks can make the update, and register parameters that have become trainable."""
        if num_active < self.size and (name := _sync_batchnorm(state.network)):
            _refuse_sync_batchnorm(name)
        known = [] if self._registered is None else self._registered[1]
        if self._asynchronous and self._dynamic_network and known != _trainable_ids(state):
            self._register(state)
        if self._debug:
            for module in _trained(state):
                # Without buffers: the statistics of batch norm differ, as each rank has its own data.
                mpinn.check_with_allreduce(module, buffers=False)

    def next_batch(self, state: State, has_batch: bool) -> None:
        """Refuse ranks without a batch if the forward pass communicates."""
        if (name := _sync_batchnorm(state.network)) and 0 < self.count(has_batch) < self.size:
            _refuse_sync_batchnorm(name)

    def average_gradients(self, state: State) -> None:
        """Wait for the reductions of the backward pass, or reduce the gradients now."""
        if isinstance(state.optimizer, mpinn.DistributedOptimizer):
            state.optimizer.synchronize()
        if self._registered is not None:
            mpinn.synchronize_gradients_async(self._registered[0], flush=True)
            return
        for module in _own(state):
            mpinn.synchronize_gradients(module)

    def clip_norm(self, parameters: list[Tensor], limit: float) -> Tensor:
        """Clip by the norm of complete gradients, also where a layer is sharded."""
        return mpinn.clip_grad_norm_(parameters, limit)

    def end(self, *, failed: bool = False) -> None:
        """Remove the registration."""
        if self._registered is None:
            return
        (module, _), self._registered = self._registered, None
        if not failed:
            mpinn.unregister_async_backward(module)
        elif (backward := attached(module, ASYNC_BACKWARD)) is not None:
            backward.abandon()

    # --- details -------------------------------------------------------------------------------------------

    def _register(self, state: State) -> None:
        self.end()
        modules = _own(state)
        if modules:  # together, as a criterion may share parameters with the network
            together = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
            mpinn.register_async_backward(together, state.accumulate)
            self._registered = together, _trainable_ids(state)


def _trained(state: State) -> list[nn.Module]:
    modules = (module for module in (state.network, state.criterion) if isinstance(module, nn.Module))
    return [module for module in modules if module is state.network or _trainable(module)]


def _own(state: State) -> list[nn.Module]:
    """Return the modules whose gradients the engine synchronizes: not the network of a DistributedOptimizer."""
    has_synchronizer = isinstance(state.optimizer, mpinn.DistributedOptimizer)
    return [module for module in _trained(state) if not (has_synchronizer and module is state.network)]


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _trainable_ids(state: State) -> list[int]:
    return [id(parameter) for module in _own(state) for parameter in _trainable(module)]


def _sync_batchnorm(network: nn.Module) -> str:
    """Return the name of a layer that communicates in the forward pass, so that all ranks must run it; '' for none."""
    for name, module in network.named_modules():
        if isinstance(module, mpinn.SyncBatchNorm) and module.training:
            return name or "the network"
    return ""


def _refuse_sync_batchnorm(name: str) -> NoReturn:
    raise ArgumentError(
        f"rank {api.rank()}: some ranks have no batch for this forward pass, but {name!r} is a SyncBatchNorm, which "
        "needs the batches of all ranks. Give all ranks equally many batches; for fit(), choose the number of "
        f"examples, or batch_size, such that the last batch has at least {api.size()} examples."
    )


def _refuse_unsynchronized(state: State) -> None:
    """Refuse parameters that the optimizer would change, but of which nobody averages the gradients."""
    assert state.optimizer is not None
    if isinstance(state.optimizer, mpinn.DistributedOptimizer):
        return  # refuses such parameters itself
    known = set(map(id, trained_parameters(state.network, state.criterion)))
    for index, group in enumerate(state.optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.requires_grad and id(parameter) not in known:
                raise ArgumentError(
                    f"rank {api.rank()}: parameter {position} of the optimizer's group {index}, of shape "
                    f"{list(parameter.shape)}, belongs neither to network nor to criterion, so its gradient would not "
                    "be averaged over the ranks. Make it a parameter of one of them."
                )
