"""Programs for elastic Horovod: after a loss, the remaining ranks return to the last commit, and begin again.

That needs ``on_lost_rank="raise"`` (``torchmpi run --on-lost-rank continue``). Otherwise the job ends when a rank is
lost, and the function runs once. Lost ranks come back as spare ranks or as new ones; no hosts are added.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from ..continuing import attempts
from ..launch import respawning
from ..log import logger
from ..session import recovery
from . import basics
from .exceptions import HorovodInternalError, HostsUpdatedInterrupt
from .state_broadcast import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters

_root: ContextVar[int] = ContextVar("root of sync", default=0)
"""The rank whose state `sync` copies: 0, unless a spare rank that has no state has taken its place."""


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
        """Let a new rank join, if one waits that was started in place of a lost one; no hosts are added to a job.

        With ``torchmpi run --respawns``, a call of all ranks, and so is `commit`.
        """
        if respawning.limit() and not recovery.why_not():
            with recovery.copying():
                pass

    def save(self) -> None:
        """Keep a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy the state of the first rank to all ranks."""
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
        self.__dict__.update(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Copy the attributes of rank 0 to all ranks, and save them."""
        if self._saved:
            self._saved = broadcast_object({name: getattr(self, name) for name in self._saved}, _root.get())
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
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), _root.get()))
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
        broadcast_parameters(self.value.state_dict(), _root.get())
        self.save()


class OptimizerStateHandler(StateHandler):
    """Handles an optimizer."""

    def sync(self) -> None:
        """Copy state and options of rank 0 to all ranks."""
        broadcast_optimizer_state(self.value, _root.get())
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
        for handler in self._state_handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._state_handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divide the samples again."""
        for handler in self._state_handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the training function of an elastic program: it gets a synchronized state, again after each loss.

    After the loss of a rank the others restore the last commit, get new numbers, and call the functions of
    ``register_reset_callbacks()``; so does a spare or a new rank that has taken the place of the lost one. `sync` then
    copies the state of the first rank that has one. That needs the setting ``on_lost_rank="raise"``, which
    ``torchmpi run --on-lost-rank continue`` sets; otherwise the job ends when a rank is lost, and rank 0 warns of that.

    Args:
        func: ``func(state, *args, **kwargs)``.

    Returns:
        A function with the same parameters.

    Raises:
        HorovodInternalError: A call failed, although no rank is lost; or a spare rank has become rank 0, and the state
            is no `ObjectState`, whose `sync` copies that of another rank.
        RankLostError: The other ranks continue without this one, or too few are left.

    Example:
        @hvd.elastic.run
        def train(state):
            ...
    """

    @functools.wraps(func)
    def wrapped(state: ElasticState, *args: Any, **kwargs: Any) -> Any:
        attempt = partial(func, state, *args, **kwargs)
        basics.rank()  # raises before init()
        try:
            if problem := recovery.why_not():
                if basics.rank() == 0 < basics.size() - 1:
                    logger.warning(f"hvd.elastic.run does not continue after the loss of a rank: {problem}")
                state.sync()
                return attempt()
            problem = "no rank is lost"
            again = _Again(state)
            return attempts.repeat(again.begin, attempt, again.recovered, _RECOVERY_SECONDS)
        except HostsUpdatedInterrupt as error:
            raise HorovodInternalError(f"elastic.run: {_NO_HOSTS}") from error
        except HorovodInternalError as error:
            raise HorovodInternalError(f"{error} The training does not continue with other ranks: {problem}") from error

    return wrapped


_RECOVERY_SECONDS = 60.0
_NO_HOSTS = (
    "hosts are not added to a job. Write checkpoints and start it again with other hosts, or start spare ranks: "
    "torchmpi run --spares."
)


class _Again:
    """What the attempts of an elastic program have in common."""

    def __init__(self, state: ElasticState) -> None:
        self._state = state
        self._has_recovered = False

    def recovered(self, former: tuple[int, ...]) -> None:
        """Note that ranks have new numbers."""
        self._has_recovered = True

    def begin(self) -> None:
        """Give all ranks the state of the first rank that has one. Collective."""
        state = self._state
        if self._has_recovered:
            basics.init_again()
            state.restore()
            state.on_reset()
        recovery.begin_again()
        have_state = allgather_object(not recovery.is_newcomer())
        root = have_state.index(True) if True in have_state else 0
        if root > 0 and not isinstance(state, ObjectState):
            raise HorovodInternalError(
                f"rank {basics.rank()}: a spare rank has become rank 0, of which the sync() of {type(state).__name__} "
                "copies the state. Derive it from ObjectState or TorchState."
            )
        token = _root.set(root)
        try:
            state.sync()
        finally:
            _root.reset(token)
        recovery.note_state()
        self._has_recovered = False


def run_fn(func: Callable[..., Any], reset: Callable[[], object]) -> Callable[..., Any]:
    """Decorate a training function, as :func:`run` does.

    Args:
        func: ``func(state, *args, **kwargs)``.
        reset: Not used: the ranks are those of ``torchmpi.recover()``.

    Returns:
        A function with the same parameters.
    """
    return run(func)
