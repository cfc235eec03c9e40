"""Any torch optimizer, with gradients synchronised before each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import ArgumentError, GradientError
from .channel import resolve
from .hooks import register_async_backward, synchronize_gradients_async
from .sync import synchronize_gradients


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps `opt` so that ``step()`` first averages the gradients of `model` over the ranks.

    It shares the parameter groups and state of `opt`, so learning-rate schedulers and checkpoints work with
    either. With ``asynchronous=True`` (default) the model is registered for asynchronous backward, gradients
    being accumulated over `backward_passes_per_step`; ``mpinn.unregister_async_backward(model)`` undoes that.

        optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for x, y in data:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    To do something with the averaged gradients before the step:

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    """

    def __init__(
        self,
        opt: torch.optim.Optimizer,
        model: nn.Module,
        *,
        average: bool = True,
        asynchronous: bool = True,
        backward_passes_per_step: int = 1,
        comm: int | Communicator | None = None,
    ) -> None:
        # Optimizer.__init__ is not called on purpose: it would make state of its own. Everything lives in
        # `opt`.
        _check_parameters(opt, model)
        self.optimizer = opt
        self._model, self._average, self._asynchronous = model, average, asynchronous
        self._comm = resolve(comm)
        self._is_synchronized = False
        self._skips = False
        if asynchronous:
            register_async_backward(model, backward_passes_per_step, average=average, comm=self._comm)

    def synchronize(self) -> None:
        """Average the gradients now. Follow with ``step()`` inside ``skip_synchronize()``."""
        if self._asynchronous:
            synchronize_gradients_async(self._model, flush=True)
        else:
            synchronize_gradients(self._model, self._average, comm=self._comm)
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this block ``step()`` takes the gradients as they are."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Synchronise, then step. A `closure`'s loss is averaged too, since some optimizers decide by it."""
        if self._skips:
            self._is_synchronized = False
            return self.optimizer.step(closure)
        if self._is_synchronized:
            raise GradientError(
                f"rank {self._comm.rank}: step() would synchronise what synchronize() has synchronised. "
                "Write `with optimizer.skip_synchronize(): optimizer.step()`."
            )
        if closure is not None:
            return self.optimizer.step(lambda: self._synchronized_loss(closure))
        self.synchronize()
        self._is_synchronized = False
        return self.optimizer.step()

    def _synchronized_loss(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        self._is_synchronized = False
        if isinstance(loss, Tensor):
            loss = loss.detach().clone()
        return loss if loss is None else collectives.allreduce(loss, op="avg", comm=self._comm)

    # --- everything else is the wrapped optimizer's ---------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._is_synchronized = False
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        _check_parameters(self.optimizer, self._model)

    def __getattribute__(self, name: str) -> Any:
        # Methods of the base class such as register_step_pre_hook() work on attributes that only `opt` has.
        if name.startswith("register_"):
            return getattr(self.optimizer, name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"


def _check_parameters(opt: torch.optim.Optimizer, model: nn.Module) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(opt.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ArgumentError(
                    f"DistributedOptimizer: parameter {position} of group {index}, of shape "
                    f"{list(parameter.shape)}, is no parameter of the model: nobody would synchronise it. "
                    "Pass the model that holds all of them."
                )
