"""Programs for elastic Horovod, with a fixed number of ranks.

The states and the decorator have their interface: a program runs once through. A job under MPI neither loses nor gets
ranks, so that nothing is ever restored but by the program itself.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from . import basics
from .exceptions import HorovodInternalError, HostsUpdatedInterrupt
from .state_broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class ElasticState:
    """State of a program: what a subclass saves, restores and synchronizes."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Add functions that `on_reset` calls.

        Args:
            callbacks: The functions.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the registered functions."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Call `save`."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: the hosts of a job under MPI do not change."""

    def save(self) -> None:
        """Keep a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy the state of rank 0 to all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to other ranks."""


class ObjectState(ElasticState):
    """State of plain attributes.

    Args:
        **kwargs: The attributes, anything that can be pickled.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._saved = kwargs
        self.__dict__.update(kwargs)

    def save(self) -> None:
        """Keep a copy of the attributes."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        """Return to the copy."""
        self.__dict__.update(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Copy the attributes of rank 0 to all ranks, and save them."""
        if self._saved:
            self._saved = broadcast_object({name: getattr(self, name) for name in self._saved})
            self.restore()


class StateHandler:
    """Saves, restores and synchronizes one object of a `TorchState`.

    Args:
        value: The object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of its ``state_dict()``."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Copy the ``state_dict()`` of rank 0 to all ranks."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()

    def set_value(self, value: Any) -> None:
        """Take another object.

        Args:
            value: The object.
        """
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Handles a module."""

    def sync(self) -> None:
        """Copy parameters and buffers of rank 0 to all ranks."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """Handles an optimizer."""

    def sync(self) -> None:
        """Copy state and options of rank 0 to all ranks."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """Handles an `ElasticSampler`, which counts the samples of all ranks."""


class ElasticSampler(Sampler[int]):
    """Gives each rank a part of the samples that are not processed yet.

    Args:
        dataset: The dataset.
        shuffle: Shuffle the samples, in another order in each epoch.
        seed: Seed of the order, the same on all ranks.

    Example:
        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
    """

    def __init__(self, dataset: Dataset[Any], shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch.

        Args:
            epoch: Its number.
        """
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of every rank as processed.

        Args:
            batch_idx: Not used.
            batch_size: The number of samples of a batch of one rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a state.

        Args:
            state_dict: What :meth:`state_dict` has returned.
        """
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the samples that are not processed."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        order = list(range(len(self.dataset)))  # type: ignore[arg-type]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    @property
    def indices(self) -> list[int]:
        """The samples of this rank; the first ones of all repeat if they cannot be divided evenly."""
        remaining = self.remaining_indices
        if not remaining:
            return []
        padded = (remaining * -(-self.total_size // len(remaining)))[: self.total_size]
        return padded[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


_handlers: list[tuple[type, type[StateHandler]]] = [
    (nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the types of objects that `TorchState` handles, and their handlers."""
    return _handlers


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the types of objects that `TorchState` handles.

    Args:
        registry: Pairs of a type and a subclass of `StateHandler`.
    """
    _handlers[:] = registry


class TorchState(ObjectState):
    """State of a training: modules, optimizers, schedulers, samplers, and plain attributes.

    Args:
        model: A module.
        optimizer: An optimizer.
        **kwargs: Further modules, optimizers, schedulers and samplers; any other value becomes an attribute.

    Example:
        state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0)
        state.sync()
    """

    _state_handlers: dict[str, StateHandler]

    def __init__(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers: dict[str, StateHandler] = {}
        for name, value in given.items():
            kind = next((handler for handled, handler in _handlers if isinstance(value, handled)), None)
            if kind is not None:
                handlers[name] = kind(value)
        self.__dict__["_state_handlers"] = handlers
        plain = {name: value for name, value in given.items() if name not in handlers and name in kwargs}
        super().__init__(**plain)
        for name, handler in handlers.items():
            self.__dict__[name] = handler.value
        for name in {"model", "optimizer"} - set(handlers):
            self.__dict__[name] = None

    def __setattr__(self, name: str, value: Any) -> None:
        if (handler := self._state_handlers.get(name)) is not None:
            handler.set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep copies in memory."""
        for handler in self._state_handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the copies."""
        for handler in self._state_handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Copy the state of rank 0 to all ranks."""
        for handler in self._state_handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divide the samples again."""
        for handler in self._state_handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the training function of an elastic program: it gets a synchronized state and runs once.

    Args:
        func: ``func(state, *args, **kwargs)``.

    Returns:
        A function with the same parameters.

    Raises:
        HorovodInternalError: A call failed. Elastic Horovod would continue with other ranks; here the job ends.

    Example:
        @hvd.elastic.run
        def train(state):
            ...
    """

    @functools.wraps(func)
    def wrapped(state: ElasticState, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        try:
            return func(state, *args, **kwargs)
        except HostsUpdatedInterrupt as error:
            raise HorovodInternalError(_REFUSAL) from error
        except HorovodInternalError as error:
            raise HorovodInternalError(f"{error} {_REFUSAL}") from error

    return wrapped


_REFUSAL = (
    "A job under MPI cannot continue with other ranks, as elastic Horovod would: the number of ranks is fixed. Write "
    "checkpoints and start the job again (torchmpi run --restarts), or see torchmpi.recover()."
)


def run_fn(func: Callable[..., Any], reset: Callable[[], object]) -> Callable[..., Any]:
    """Decorate a training function, as :func:`run` does.

    Args:
        func: ``func(state, *args, **kwargs)``.
        reset: Not used: ranks do not change.

    Returns:
        A function with the same parameters.
    """
    return run(func)
