"""The training loop on all ranks: each rank takes its own batches, and all apply the same averaged gradient."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from .. import nn as mpinn
from ..argument_types import checks_types
from ..errors import ArgumentError, DeviceError, RankLostError, TorchMPIError
from ..log import logger
from ..nn.async_backward import AsyncBackward
from ..nn.replica import attached
from ..nn.sync import ASYNC_BACKWARD
from ..session import api, recovery, runtime
from ..tensors import streams
from .checkpoint import Saved
from .coordination import AllRanks
from .data_loading import Epoch, Source, is_function
from .memory_copies import MemoryCopies
from .sgd_engine import SGDEngine
from .state import Sample, State
from .training_run import TrainingRun
from .updates import trained_parameters


@checks_types
class AllReduceSGDEngine(SGDEngine):
    """Data-parallel training on all ranks of the current communicator. All methods are collective.

    Args:
        use_gpu: None takes ``mpi.device()``, True requires a GPU, False uses the CPU.
        asynchronous: Send gradients during the backward pass.
        device_sync: Wait for the GPU before the forward and the backward pass.
        dynamic_network: With `asynchronous`, check before each update whether the set of trainable parameters has
            changed. False saves the check for networks that do not change.
        debug: Check before each update that all ranks have the same parameters.
        prefetch: Number of batches loaded ahead in a thread; 0 loads each batch when it is needed.
        progress: Show a progress bar on standard error, on rank 0.

    Raises:
        ArgumentError: `prefetch` is negative.
        DeviceError: By ``train()`` and ``test()``: `use_gpu` is True and this rank has no GPU.
        ReplicaError: By ``train()``, on all ranks: the networks differ in names, shapes or dtypes, or with `debug` in
            values.

    Example:
        engine = AllReduceSGDEngine(asynchronous=True)
        engine.train(network=net, criterion=nn.CrossEntropyLoss(), iterator=my_part, lr=0.1, max_epochs=5)
    """

    def __init__(
        self,
        use_gpu: bool | None = None,
        asynchronous: bool = False,
        device_sync: bool = True,
        dynamic_network: bool = True,
        *,
        debug: bool = False,
        prefetch: int = 1,
        progress: bool = True,
    ) -> None:
        super().__init__(prefetch=prefetch, progress=progress)
        self._coordinator = AllRanks()
        self._use_gpu, self._device_sync = use_gpu, device_sync
        self._asynchronous, self._dynamic_network, self._debug = asynchronous, dynamic_network, debug
        self._registered: tuple[nn.Module, list[int]] | None = None
        self._copy_every: int | None = None
        self._recovery_seconds = 0.0
        self._copies = MemoryCopies()

    def recover(self, every: int = 10, *, timeout: float = 60.0) -> None:
        """Let ``train()`` continue on the remaining ranks when a rank is lost, from a copy of the state in memory.

        It needs the setting ``on_lost_rank="raise"``. The remaining ranks call :func:`torchmpi.recover`, return to the
        last copy that all of them have, divide the rest of the epoch among themselves, and repeat the updates since
        then, with their hooks. Copies are taken at the beginning of each epoch and after each `every` updates; they
        contain what a checkpoint contains, and each takes its memory twice. `iterator` and `validate` of ``train()``
        must be functions, which are called again to divide the data; ``fit()`` passes such functions.

        Args:
            every: Number of updates between copies.
            timeout: As for :func:`torchmpi.recover`.

        Raises:
            ArgumentError: `every` is less than 1. By ``train()``: the setting is another one, or `iterator` or
                `validate` is not a function.

        Example:
            mpi.start(config=mpi.Config(on_lost_rank="raise"))
            engine = AllReduceSGDEngine()
            engine.recover(every=20)
            engine.train(
                network=net, criterion=loss, lr=0.1, iterator=lambda: batches[mpi.rank() :: mpi.size()]
            )
        """
        if every < 1:
            raise ArgumentError(f"recover(every={every}): expected a number of updates")
        self._copy_every, self._recovery_seconds = every, timeout

    def _check_sources(self, *sources: Source) -> None:
        if self._copy_every is None:
            return
        self._copies = MemoryCopies()
        if not runtime.current().context.raises_lost_ranks:
            raise ArgumentError(
                f"rank {api.rank()}: recover() needs start(config=Config(on_lost_rank='raise')), or "
                "TORCHMPI_ON_LOST_RANK=raise: without it, the job ends when a rank is lost."
            )
        if not all(is_function(source) for source in sources):
            raise ArgumentError(
                f"rank {api.rank()}: recover() needs functions for iterator= and validate=, such as iterator=lambda: "
                "batches[mpi.rank() :: mpi.size()], since the data are divided anew when a rank is lost."
            )

    def _copy_state(self, run: TrainingRun) -> None:
        every = self._copy_every
        if every is not None and (run.phase == "between epochs" or run.state.t % every == 0):
            # A call on a device that was aborted, because a rank is lost, has left undefined values in the parameters.
            streams.settle(next(run.state.network.parameters()))
            if loss := runtime.current().context.loss:
                raise RankLostError(f"{loss}, before a copy of the state.")
            self._copies.take(run, self._kept | run.kept)

    def _saved_after_loss(self, run: TrainingRun, error: TorchMPIError) -> Saved:
        if self._copy_every is None or not runtime.current().context.loss:
            raise error
        num_before, state = api.size(), run.state
        while True:
            recovery.recover(self._recovery_seconds)
            try:
                self._unregister()
                run.divide_anew()
                kept, num_lost = self._kept | run.kept, num_before - api.size()
                saved = self._copies.last_common(run, kept, num_lost, self._coordinator)
                if api.rank() == 0:
                    logger.info(f"continuing from epoch {saved.common['epoch'] + 1}, after update {saved.common['t']}")
                self._begin(state)
                return saved
            except RankLostError:  # another one
                continue

    def _pick_device(self, network: nn.Module) -> torch.device:
        device = api.device()
        if self._use_gpu is False:
            return torch.device("cpu")
        if self._use_gpu and device.type != "cuda":
            raise DeviceError(
                f"rank {api.rank()}: use_gpu=True, but the device of this rank is the {device}. "
                "Use start(with_cuda=True) on hosts with GPUs, or use_gpu=None to use a GPU only where there is one."
            )
        return device

    def _begin(self, state: State) -> None:
        if self._copy_every is not None and isinstance(state.optimizer, mpinn.DistributedOptimizer):
            raise ArgumentError(
                f"rank {api.rank()}: recover() would leave a DistributedOptimizer with closed communicators. Pass the "
                "optimizer of torch: the engine synchronizes the gradients."
            )
        _refuse_unsynchronized(state)
        for module in _trained(state):
            mpinn.synchronize_parameters(module)
        if self._asynchronous:
            self._register(state)

    def _begin_step(self, state: State, num_active: int) -> None:
        if num_active < self._coordinator.size and (name := _sync_batchnorm(state.network)):
            _refuse_sync_batchnorm(name)
        known = [] if self._registered is None else self._registered[1]
        if self._asynchronous and self._dynamic_network and known != _trainable_ids(state):
            self._register(state)
        if self._debug:
            for module in _trained(state):
                # Without buffers: the statistics of batch norm differ, as each rank has its own data.
                mpinn.check_with_allreduce(module, buffers=False)

    def _next_of_update(self, state: State, epoch: Epoch) -> Sample | None:
        sample = epoch.next()
        if name := _sync_batchnorm(state.network):
            num_active = self._coordinator.count(sample is not None)
            if 0 < num_active < self._coordinator.size:
                _refuse_sync_batchnorm(name)
        return sample

    def _wait_for(self, device: torch.device) -> None:
        if self._device_sync and device.type == "cuda":
            torch.cuda.synchronize(device)

    def _synchronize(self, state: State) -> None:
        if isinstance(state.optimizer, mpinn.DistributedOptimizer):
            state.optimizer.synchronize()
        if self._registered is not None:
            mpinn.synchronize_gradients_async(self._registered[0], flush=True)
            return
        for module in _own(state):
            mpinn.synchronize_gradients(module)

    def _clip_norm(self, parameters: list[Tensor], limit: float) -> Tensor:
        return mpinn.clip_grad_norm_(parameters, limit)

    def _end(self, state: State) -> None:
        self._unregister()

    def _fail(self) -> None:
        if self._registered is not None:
            backward: AsyncBackward | None = attached(self._registered[0], ASYNC_BACKWARD)
            self._registered = None
            if backward is not None:
                backward.abandon()

    def _register(self, state: State) -> None:
        self._unregister()
        modules = _own(state)
        if modules:  # together, as a criterion may share parameters with the network
            together = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
            mpinn.register_async_backward(together, state.accumulate)
            self._registered = together, _trainable_ids(state)

    def _unregister(self) -> None:
        if self._registered is not None:
            (module, _), self._registered = self._registered, None
            mpinn.unregister_async_backward(module)


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
