"""A wrapper of torch optimizers that synchronizes gradients before each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import collectives
from ..argument_types import checks_types
from ..communicators.levels import Comm
from ..errors import ArgumentError, rank_prefix
from ..session import runtime
from .async_backward import AsyncBackward, register_async_backward, synchronize_gradients_async
from .gradient_guard import BY_OPTIMIZER
from .gradient_reduction import Compression, transport
from .replica import attached
from .sync import ASYNC_BACKWARD, DEFERRED_BACKWARD, DeferredBackward, synchronize_gradients

_MISSING: Any = None


@checks_types
class DistributedOptimizer(torch.optim.Optimizer):
    """Wrap an optimizer: ``step()`` averages the gradients over the ranks before the step. All calls are collective.

    The wrapper shares the parameter groups and the state of `opt`, so that learning-rate schedulers and checkpoints
    work with either of them.

    Args:
        opt: Any ``torch.optim`` optimizer.
        model: Module that contains all parameters of `opt`.
        average: Average the gradients; False adds them.
        asynchronous: Register `model` for asynchronous backward;
            ``mpinn.unregister_async_backward(model)`` reverts the registration. False synchronizes in one call.
        backward_passes_per_step: With `asynchronous`, number of backward passes whose gradients are accumulated. Their
            sum is not divided by this number: divide each loss, as without the wrapper.
        compression: As for ``synchronize_gradients``.
        comm: Communicator, group or level; default: the current communicator.

    Raises:
        ArgumentError: A parameter of `opt` is not a parameter of `model`, `model` is registered already or shares
            parameters with another net that is, or `backward_passes_per_step` is less than 1.
        ReplicaError: On all ranks: the models differ in names, shapes or dtypes (with `asynchronous`).

    Example:
        optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for x, y in data:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

        # To use the averaged gradients before the step:
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # does not synchronize again
    """

    _step_supports_amp_scaling = False  # also if `opt` is fused: GradScaler would pass its scale to the wrapper

    def __init__(
        self,
        opt: torch.optim.Optimizer,
        model: nn.Module = _MISSING,
        *,
        average: bool = True,
        asynchronous: bool = True,
        backward_passes_per_step: int = 1,
        compression: Compression | None = None,
        comm: Comm = None,
    ) -> None:
        if model is _MISSING:
            raise ArgumentError(
                f"{rank_prefix()}DistributedOptimizer: model is missing. Pass the optimizer and the model of its "
                "parameters: mpinn.DistributedOptimizer(optimizer, model)."
            )
        if backward_passes_per_step < 1:
            raise ArgumentError(
                f"{rank_prefix()}backward_passes_per_step={backward_passes_per_step} must be at least 1."
            )
        # Optimizer.__init__ is deliberately not called: it would create a second state, besides that of `opt`.
        _check_parameters(opt, model)
        self.optimizer = opt
        self.backward_passes_per_step = backward_passes_per_step
        self._model, self._average, self._asynchronous = model, average, asynchronous
        self._comm, self._compression = runtime.communicator(comm), compression
        transport(compression)
        self._skips = False
        if asynchronous:
            register_async_backward(
                model, backward_passes_per_step, average=average, compression=compression, comm=self._comm
            )
            attached(model, ASYNC_BACKWARD).guard.call = BY_OPTIMIZER
        else:
            deferred = DeferredBackward(model, average=average, compression=compression, comm=self._comm)
            weakref.finalize(self, deferred.close).atexit = False

    def synchronize(self) -> None:
        """Average the gradients, so that they can be clipped or unscaled; the next ``step()`` does not average again.

        Raises:
            GradientError: On all ranks, with ``asynchronous=True``: a backward pass has failed, or a gradient was
                changed since backward.

        Example:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        """
        self._reduce()

    def _reduce(self) -> None:
        if self._asynchronous:
            synchronize_gradients_async(self._model, flush=True)
        else:
            synchronize_gradients(self._model, self._average, compression=self._compression, comm=self._comm)

    @property
    def _registration(self) -> AsyncBackward | DeferredBackward | None:
        """The registration of the model; None if the program has removed it."""
        found: AsyncBackward | DeferredBackward | None = attached(
            self._model, ASYNC_BACKWARD if self._asynchronous else DEFERRED_BACKWARD
        )
        return found

    def _begin_round(self) -> None:
        """Mark the gradients of the next step as not synchronized."""
        registration = self._registration
        if registration is not None:
            registration.is_synchronized = False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager in which ``step()`` does not synchronize gradients.

        Example:
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        skipped, self._skips = self._skips, True
        try:
            yield
        finally:
            self._skips = skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize the gradients, unless that has been done, and call ``step()`` of the wrapped optimizer.

        It has been done after :meth:`synchronize`, ``mpinn.synchronize_gradients_async`` or ``mpinn.clip_grad_norm_``.

        Args:
            closure: Function that computes gradients and returns the loss, as for ``torch.optim.LBFGS``. Gradients
                are synchronized after each call, and the loss is averaged, so that all ranks take the same decisions.

        Returns:
            Result of the wrapped optimizer's ``step()``.

        Raises:
            GradientError: On all ranks: a backward pass has failed, a gradient was changed since backward, or backward
                has run since :meth:`synchronize`.

        Example:
            optimizer.step()
        """
        if self._skips:
            self._begin_round()
            return self.optimizer.step(closure)
        if closure is not None:
            return self.optimizer.step(lambda: self._synchronized_loss(closure))
        registration = self._registration
        if registration is None or not registration.is_synchronized:
            self._reduce()
        self._begin_round()
        return self.optimizer.step()

    def _synchronized_loss(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self._reduce()
        self._begin_round()
        if isinstance(loss, Tensor):
            loss = loss.detach().clone()
        return loss if loss is None else collectives.allreduce(loss, op="avg", comm=self._comm)

    # --- delegation to the wrapped optimizer -----------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the wrapped optimizer does."""
        registration = self._registration
        if isinstance(registration, DeferredBackward):
            registration.forget()
        self._begin_round()
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer; its parameters must be parameters of the model."""
        self.optimizer.add_param_group(param_group)
        try:
            _check_parameters(self.optimizer, self._model)
        except ArgumentError:
            self.optimizer.param_groups.pop()
            raise

    def __getattribute__(self, name: str) -> Any:
        # Methods of the base class such as register_step_pre_hook() use attributes that only `opt` has.
        if name.startswith("register_"):
            return getattr(self.optimizer, name)
        return super().__getattribute__(name)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise ArgumentError(
            f"{rank_prefix()}a DistributedOptimizer cannot be copied or pickled, as it belongs to the communicators of "
            "a job. Save its state_dict(), or copy model and optimizer before the optimizer is wrapped."
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"


def _check_parameters(opt: torch.optim.Optimizer, model: nn.Module) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(opt.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ArgumentError(
                    f"{rank_prefix()}DistributedOptimizer: parameter {position} of group {index}, of shape "
                    f"{list(parameter.shape)}, is not a parameter of the model, so it would not be synchronized. "
                    "Pass the model that contains all parameters."
                )
