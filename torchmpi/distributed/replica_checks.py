"""Comparison of the replicas of DistributedDataParallel, if the settings of the job ask for it."""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..nn.replica_watch import ReplicaWatch
from ..session import runtime
from .execution import GroupExecution

_watches: WeakKeyDictionary[torch.optim.Optimizer, ReplicaWatch | None] = WeakKeyDictionary()
"""The watch of each optimizer that has made a step; None for one whose parameters are not those of a DDP module."""
_modules: WeakSet[DistributedDataParallel] = WeakSet()
"""The modules that have been called. torch has no list of them, and looking for them among all objects of the program
(`gc.get_objects`) breaks other threads, whose unfinished tuples it returns."""
_is_prepared = False


def prepare() -> None:
    """Have each step of an optimizer counted, if the setting `replica_check_steps` asks for that."""
    global _is_prepared
    if not _is_prepared and runtime.is_running() and runtime.current().config.replica_check_steps:
        _is_prepared = True
        register_module_forward_pre_hook(_note_module)
        register_optimizer_step_post_hook(_after_step)


def _note_module(module: nn.Module, _: object) -> None:
    if isinstance(module, DistributedDataParallel):
        _modules.add(module)


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if not (dist.is_initialized() and runtime.is_running()):
        return
    if optimizer not in _watches:
        _watches[optimizer] = _watch(optimizer)
    watch = _watches[optimizer]
    if watch is not None:
        watch.after_step()


def _watch(optimizer: torch.optim.Optimizer) -> ReplicaWatch | None:
    """Return a watch of the module to which the parameters of an optimizer belong; None if that is none of DDP."""
    config, module = runtime.current().config, _module_of(optimizer)
    backend = None if module is None else module.process_group._get_backend(module.device or torch.device("cpu"))
    if module is None or not isinstance(backend, GroupExecution) or not config.replica_check_steps:
        return None
    comm = backend.communicator
    return ReplicaWatch(
        module.module, optimizer, config.replica_check_steps, config.replica_check, comm, buffers=False, state=False
    )


def _module_of(optimizer: torch.optim.Optimizer) -> DistributedDataParallel | None:
    """Return the DDP module with the parameters of an optimizer, which torch does not tell."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in list(_modules):
        if own & {id(each) for each in module.parameters()}:
            return module
    return None
