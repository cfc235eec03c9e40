"""Horovod's ``DistributedOptimizer``: an optimizer whose ``step()`` averages the gradients of the ranks first.

Gradients are reduced in buckets, in the order of a plan that is the same on all ranks. A bucket starts when the
gradients of its parameters are there and all buckets before it have started; ``synchronize()`` starts the others, with
zeros for gradients that do not exist. So the order of the hooks, which may differ between ranks, does not matter. Each
optimizer has a communicator of its own, since other calls may come before its reductions on one rank and after them on
others.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import collectives
from ..argument_types import checks_types
from ..errors import rank_prefix
from ..nn.gradient_guard import GradientGuard
from ..session import recovery, runtime
from ..tensors import bucket_plan
from .basics import is_initialized, size
from .compressors import Compression, Compressor
from .exceptions import EarlyGradientError, HorovodInternalError, internal_errors
from .mpi_ops import allreduce_async_, grouped_allreduce_async_, sparse_allreduce_async
from .operation_table import synchronize
from .process_sets import ProcessSet, global_process_set, member_of, private_set, release_private
from .scaling import Adasum, Average

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:  # the class made by DistributedOptimizer() is derived from that of the program's optimizer
    _Base = object


class _Settings(NamedTuple):
    """The arguments of `DistributedOptimizer`."""

    compression: type[Compressor]
    passes: int
    op: int
    predivide: float
    groups: int | list[list[Tensor]]
    sparse_as_dense: bool
    process_set: ProcessSet


class _Reduction(NamedTuple):
    """A bucket that is being reduced."""

    members: list[Tensor]
    """The parameters with dense gradients."""
    contexts: list[Any]
    """What their decompression needs."""
    handle: int
    sparse: list[tuple[Tensor, Callable[[], Tensor]]]
    """The parameters with sparse gradients, and the functions that wait for them."""


class SynchronizingOptimizer(_Base):
    """The methods of a wrapped optimizer."""

    def _wrap(self, names: dict[Tensor, str], settings: _Settings) -> None:
        self._settings = settings
        self._parameter_names = names
        self.op, self.process_set = settings.op, settings.process_set
        self.backward_passes_per_step = settings.passes
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._requires_update = [parameter for parameter in parameters if parameter.requires_grad]
        self._known_sparse: set[Tensor] = set()
        self._buckets: list[list[Tensor]] = []
        self._should_synchronize, self._synchronized = True, False
        self._lock = threading.RLock()  # hooks run on the threads of autograd
        self._hooks: list[Any] = []
        self._reductions: list[_Reduction] = []
        self._guard: GradientGuard | None = None
        self._reset()
        included = settings.process_set.included()
        self._private: ProcessSet | None = None
        if size() > 1 and included and len(settings.process_set.ranks or ()) > 1:
            if not recovery.is_newcomer():  # the others make the set anew with their first reduction, and so does this
                self._own_set()
            own = weakref.ref(self)
            self._guard = GradientGuard(
                None,
                member_of(settings.process_set),
                partial(_call_synchronize, own),
                "step() or synchronize() of the optimizer",
                names=lambda parameters: [names[each] for each in parameters],
                error=EarlyGradientError,
            )
            self._guard.known.update(map(id, self._requires_update))
            self._guard.open()
            hook = partial(_call_hook, own)  # parameters that refer to their optimizer are never freed
            self._hooks = [each.register_post_accumulate_grad_hook(hook) for each in self._requires_update]

    def _own_set(self) -> ProcessSet:
        """Return the ranks with a communicator of this optimizer, made at first and after another ``init()``.

        Each time the ranks agree on the buckets.
        """
        private = self._private
        if private is None or member_of(private).intra.call_queue.closed:
            self._private = private = private_set(self.process_set)
            weakref.finalize(self, release_private, private, self._reductions).atexit = False
            self._buckets = self._plan(private)
        return private

    def _reset(self) -> None:
        if self._guard is not None:
            self._guard.clear()
        self._allreduce_delay = dict.fromkeys(self._requires_update, self.backward_passes_per_step)
        self._ready: set[Tensor] = set()
        self._reductions.clear()

    # --- during backward -------------------------------------------------------------------------

    def _on_gradient(self, parameter: Tensor) -> None:
        gradient, guard = parameter.grad, self._guard
        assert gradient is not None and guard is not None  # autograd has just written to it
        if gradient.requires_grad:
            raise AssertionError("Gradients that are differentiated themselves (create_graph=True) cannot be reduced.")
        with self._lock:
            if self._allreduce_delay[parameter] <= 0:
                use = f"another backward than backward_passes_per_step={self.backward_passes_per_step} adds to"
                raise EarlyGradientError(rank_prefix() + guard.message(use, [parameter]))
            guard.note(parameter, gradient)
            self._allreduce_delay[parameter] -= 1
            if self._allreduce_delay[parameter] == 0:
                self._ready.add(parameter)
                self._launch_next(self._ready.issuperset)

    def _launch_next(self, is_ready: Callable[[list[Tensor]], bool]) -> None:
        """Start the next buckets, up to the first that is not ready."""
        self._own_set()
        while len(self._reductions) < len(self._buckets) and is_ready(self._buckets[len(self._reductions)]):
            self._launch(self._buckets[len(self._reductions)])

    def _plan(self, private: ProcessSet) -> list[list[Tensor]]:
        """Assign the parameters to buckets, the same on all ranks. Collective."""
        names = self._parameter_names
        # Backward computes the gradients of the last layers first.
        ordered = list(reversed(self._requires_update))
        own = [(names.get(each, ""), tuple(each.shape), each.dtype) for each in ordered]
        with internal_errors():
            plans = collectives.allgather_object(own, comm=member_of(private))
        if any(plan != own for plan in plans):  # the ranks list their parameters in different orders
            ordered.sort(key=lambda each: names.get(each, ""))
            if any(sorted(plan, key=lambda each: each[0]) != sorted(own, key=lambda each: each[0]) for plan in plans):
                raise HorovodInternalError("DistributedOptimizer: the ranks have parameters of other names or shapes.")
        grouped = _as_groups(self._settings.groups, ordered)
        rest = [each for each in ordered if not any(each is other for group in grouped for other in group)]
        device_type = rest[0].device.type if rest else "cpu"
        planned = bucket_plan.plan_buckets(rest, runtime.current().config.bucket_bytes_on(device_type))
        buckets = grouped + [[rest[index] for index in indices] for indices in planned]
        position = {parameter: index for index, parameter in enumerate(ordered)}
        return sorted(buckets, key=lambda bucket: max(position[each] for each in bucket))

    def _launch(self, bucket: Sequence[Tensor]) -> None:
        """Start the reduction of a bucket."""
        settings, process_set = self._settings, self._own_set()
        members: list[Tensor] = []
        compressed: list[tuple[Tensor, Any]] = []
        sparse: list[tuple[Tensor, Callable[[], Tensor]]] = []
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = _zeros(parameter, is_sparse=parameter in self._known_sparse)
            gradient = parameter.grad
            if gradient.is_sparse:
                self._known_sparse.add(parameter)
                if not settings.sparse_as_dense:
                    name = self._parameter_names.get(parameter)
                    waits = sparse_allreduce_async(gradient, name, self.op, process_set)
                    sparse.append((parameter, waits))
                    continue
                gradient = gradient.to_dense()
            members.append(parameter)
            compressed.append(settings.compression.compress(gradient.detach()))
        handle = grouped_allreduce_async_(
            [tensor for tensor, _ in compressed],
            op=self.op,
            prescale_factor=1 / settings.predivide,
            postscale_factor=settings.predivide,
            process_set=process_set,
        )
        self._reductions.append(_Reduction(members, [context for _, context in compressed], handle, sparse))

    # --- after backward --------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until the gradients are reduced. Gradients that do not exist become zeros first.

        Raises:
            HorovodInternalError: The ranks made different calls.

        Example:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        if self._hooks:
            try:
                with torch.no_grad(), self._lock:
                    self._launch_next(lambda bucket: True)
                    for reduction in self._reductions:
                        self._deliver(reduction)
            finally:
                self._reset()
        self._synchronized = True

    def _deliver(self, reduction: _Reduction) -> None:
        """Wait for a bucket and set the gradients of its parameters."""
        results = synchronize(reduction.handle)
        for parameter, result, context in zip(reduction.members, results, reduction.contexts, strict=True):
            value, gradient = self._settings.compression.decompress(result, context), parameter.grad
            assert gradient is not None
            if gradient.is_sparse:
                parameter.grad = value.to_sparse(gradient.sparse_dim())
            elif value.data_ptr() != gradient.data_ptr() or value.dtype != gradient.dtype:
                gradient.detach().copy_(value)
        for parameter, wait in reduction.sparse:
            parameter.grad = wait()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager in which ``step()`` does not synchronize.

        Example:
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Synchronize the gradients, unless inside `skip_synchronize`, and run the step of the optimizer.

        Args:
            closure: Computes the loss and the gradients, which are synchronized each time that the optimizer calls it.

        Returns:
            What the optimizer returns.

        Example:
            optimizer.step()
        """
        if self._should_synchronize and closure is not None:
            closure = partial(self._synchronized_loss, closure)
        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                    "gradients are reduced again.",
                    stacklevel=2,
                )
            self.synchronize()
        result = super().step(closure)
        self._synchronized = False
        return result

    # Otherwise load_state_dict() puts torch's hooks around this method, and they refuse gradients that it synchronizes.
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronized_loss(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.synchronize()
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients; refused while they are being reduced."""
        if self._guard is not None:
            self._guard.refuse("zero_grad() clears")
        super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes whose gradients are added before they are reduced.

        Args:
            passes: The number.
        """
        self.backward_passes_per_step = passes
        self._reset()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the optimizer, and forget gradients that are being counted."""
        self._reset()
        super().load_state_dict(state_dict)


class AdasumOptimizer(_Base):
    """The methods of an optimizer that reduces the changes of the parameters by Adasum, instead of their gradients."""

    def _wrap(self, names: dict[Tensor, str], settings: _Settings) -> None:
        self._parameter_names, self._settings = names, settings
        self.op, self.process_set = settings.op, settings.process_set
        self.backward_passes_per_step = settings.passes

    def synchronize(self) -> None:
        """Do nothing: gradients are not reduced."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before ``step()``, which does not depend on it.

        Args:
            passes: The number.
        """
        self.backward_passes_per_step = passes

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise, since ``step()`` always reduces the changes."""
        raise AssertionError("op=hvd.Adasum reduces the changes that step() makes, which cannot be skipped.")
        yield

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run the step of the optimizer and replace each change by the Adasum of the changes of all ranks."""
        compression = self._settings.compression
        parameters = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        result = super().step(closure)
        compressed = [
            compression.compress(parameter.detach() - old) for parameter, old in zip(parameters, before, strict=True)
        ]
        handles = [allreduce_async_(delta, op=Adasum) for delta, _ in compressed]
        for parameter, start, handle, (_, context) in zip(parameters, before, handles, compressed, strict=True):
            parameter.copy_(start + compression.decompress(synchronize(handle), context))
        return result


def _call_synchronize(optimizer: weakref.ref[SynchronizingOptimizer]) -> None:
    if (living := optimizer()) is not None:
        living.synchronize()


def _call_hook(optimizer: weakref.ref[SynchronizingOptimizer], parameter: Tensor) -> None:
    if (living := optimizer()) is not None:
        living._on_gradient(parameter)


def _zeros(parameter: Tensor, *, is_sparse: bool) -> Tensor:
    if not is_sparse:
        return torch.zeros_like(parameter)
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def _as_groups(groups: int | list[list[Tensor]], ordered: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the groups of the argument, without parameters that need no gradient."""
    if isinstance(groups, int):
        if groups == 0:
            return []
        length = -(-len(ordered) // groups)
        return [list(ordered[begin : begin + length]) for begin in range(0, len(ordered), length)]
    known = set(ordered)
    kept = [[each for each in group if each in known] for group in groups]
    return [group for group in kept if group]


def _checked_groups(groups: Any, num_groups: int) -> int | list[list[Tensor]]:
    if num_groups:
        warnings.warn("The parameter num_groups is deprecated: use groups.", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return 0
    if isinstance(groups, int) and groups > 0:
        return groups
    if not isinstance(groups, list):
        raise ValueError(f"groups={groups!r} must be a number greater than zero, or a list of lists of parameters.")
    tensors = [each for group in groups for each in group]
    if not all(isinstance(each, Tensor) for each in tensors):
        raise ValueError("groups must be lists of parameters.")
    if len({id(each) for each in tensors}) < len(tensors):
        raise ValueError("A parameter occurs twice in groups.")
    return [list(group) for group in groups]


def _checked_names(optimizer: torch.optim.Optimizer, named_parameters: Any) -> dict[Tensor, str]:
    """Return the name of each parameter."""
    if named_parameters is None:
        return {
            parameter: f"allreduce.noname.{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters must be pairs of a name and a parameter, as model.named_parameters() gives.")
    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"named_parameters has several parameters of the names {repeated}. Names must be unique.")
    found = {parameter: name for name, parameter in pairs}
    missing = [each for group in optimizer.param_groups for each in group["params"] if each not in found]
    if missing:
        raise ValueError(f"named_parameters lacks {len(missing)} parameters of the optimizer. Pass all, or None.")
    return found


@checks_types
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class whose ``step()`` averages the gradients of all ranks first.

    It shares parameter groups and state with the given optimizer. Gradients are reduced while backward runs; those that
    do not exist on a rank are zeros. Sparse gradients are known as such from the first one: unless `sparse_as_dense`,
    every rank must have one in the first step. Collective over `process_set`.

    Args:
        optimizer: Any ``torch.optim`` optimizer.
        named_parameters: ``model.named_parameters()``; None for names by position.
        compression: Conversion for the reduction, such as ``hvd.Compression.fp16``.
        backward_passes_per_step: Number of backward passes whose gradients are added before they are reduced. The sum
            is not divided by it.
        op: Average, Sum, or Adasum, which reduces the changes of the parameters.
        gradient_predivide_factor: Part of the division that is done before the sum, with ``op=hvd.Average``.
        num_groups: Deprecated, use `groups`.
        groups: Parameters that are reduced together: a number of groups, or lists of parameters.
        sparse_as_dense: Reduce sparse gradients as dense ones.
        process_set: The ranks that take part; on other ranks ``step()`` is that of the given optimizer.

    Returns:
        The optimizer, which has ``synchronize()``, ``skip_synchronize()`` and ``set_backward_passes_per_step()`` too.

    Raises:
        ValueError: The arguments cannot be used, or ``init()`` was not called.
        HorovodInternalError: The ranks have other parameters, or make different calls.
        NotImplementedError: ``op=hvd.Adasum`` with a process set.

    Example:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    """
    names = _checked_names(optimizer, named_parameters)
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be greater than zero.")
    if gradient_predivide_factor != 1 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average.")
    chosen = _checked_groups(groups, num_groups)
    settings = _Settings(
        compression, backward_passes_per_step, op, gradient_predivide_factor, chosen, sparse_as_dense, process_set
    )
    methods: type[SynchronizingOptimizer | AdasumOptimizer] = SynchronizingOptimizer
    if op == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("op=hvd.Adasum reduces over all ranks, not over a process set.")
        if is_initialized() and size() > 1:
            methods = AdasumOptimizer
    wrapped: Any = object.__new__(type(type(optimizer).__name__, (methods, type(optimizer)), {"__module__": __name__}))
    # A learning-rate scheduler sets the attribute `step` of the given optimizer, whose step does not synchronize.
    wrapped.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    wrapped._wrap(names, settings)
    result: torch.optim.Optimizer = wrapped
    return result
