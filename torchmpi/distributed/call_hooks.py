"""Hooks of PyTorch 2.14: before and after the calls of a process group, and before it is aborted.

torch runs them in C++, through which the calls of a process group in Python do not pass. While a program has registered
hooks, the methods of its group are replaced on this object; without hooks a call does nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..errors import ArgumentError, MismatchError, RankLostError, StallError, TransportError
from ..log import logger
from . import torch_names
from .execution import GroupExecution
from .torch_names import BackendOptions, is_asynchronous
from .work import PendingWork

AbortHook = Callable[[], object]
Hook = TypeVar("Hook", bound=Callable[..., object])

_FAILURES = MismatchError, RankLostError, StallError, TransportError
"""Errors of calls that other ranks take part in; after others the group is as it was."""


class BeforeCall(NamedTuple):
    """What a hook gets before a call: torch's ``PreHookArgs``."""

    name: Any
    async_op: bool
    input_tensors: list[torch.Tensor]
    output_tensors: list[torch.Tensor]
    root: int
    op_id: int


class AfterCall(NamedTuple):
    """What a hook gets after a call: torch's ``PostHookArgs``, which would lose the Python half of the work."""

    name: Any
    async_op: bool
    work: dist.Work
    op_id: int


PreHook = Callable[[BeforeCall], object]
PostHook = Callable[[AfterCall], object]


class _Form(NamedTuple):
    """Positions of what the hooks of a method get; torch names the arguments of its backends by position too."""

    operation: str
    inputs: int | None = 0
    outputs: int | None = None
    peer: int | None = None
    """Of the other rank of a message. The root of a collective is in its options."""


_FORMS = {
    name: form
    for names, form in (
        ("allreduce allreduce_coalesced", _Form("ALLREDUCE")),
        ("broadcast", _Form("BROADCAST")),
        ("reduce", _Form("REDUCE")),
        ("allgather allgather_coalesced _allgather_base all_gather_single", _Form("ALLGATHER", 1, 0)),
        ("all_gather_single_coalesced allgather_into_tensor_coalesced", _Form("ALLGATHER", 1, 0)),
        ("gather gather_single", _Form("GATHER", 1, 0)),
        ("scatter", _Form("SCATTER", 1, 0)),
        ("reduce_scatter _reduce_scatter_base reduce_scatter_single", _Form("REDUCE_SCATTER", 1, 0)),
        ("reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced", _Form("REDUCE_SCATTER", 1, 0)),
        ("alltoall alltoall_base all_to_all_single", _Form("ALLTOALL", 1, 0)),
        ("send", _Form("SEND", peer=1)),
        ("recv", _Form("RECV", None, 0, peer=1)),
        ("recv_anysource", _Form("RECV", None, 0)),
        ("barrier", _Form("BARRIER", None)),
    )
    for name in names.split()
}


class HookedGroup(GroupExecution):
    """A process group whose calls may have hooks, each under a number that its program chooses."""

    def __init__(self, options: BackendOptions, backend_name: str) -> None:
        super().__init__(options, backend_name)
        self._pre_hooks: dict[int, PreHook] = {}
        self._post_hooks: dict[int, PostHook] = {}
        self._abort_hooks: dict[int, AbortHook] = {}
        self._num_hooked = 0
        self._is_in_hooked_call = False

    def register_pre_hook(self, hook_id: int, hook: PreHook) -> None:
        """Call `hook` with a :class:`BeforeCall` before each call of the group."""
        self._register(self._pre_hooks, hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove a hook; no error if there is none."""
        self._unregister(self._pre_hooks, hook_id)

    def register_post_hook(self, hook_id: int, hook: PostHook) -> None:
        """Call `hook` with an :class:`AfterCall` after each call of the group; an asynchronous one has begun."""
        self._register(self._post_hooks, hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove a hook; no error if there is none."""
        self._unregister(self._post_hooks, hook_id)

    def register_abort_hook(self, hook_id: int, hook: AbortHook) -> None:
        """Call `hook` before the group is aborted, and when a call has failed: a timeout, a lost rank, a mismatch."""
        self._register(self._abort_hooks, hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove a hook; no error if there is none."""
        self._unregister(self._abort_hooks, hook_id)

    def _register(self, hooks: dict[int, Hook], number: int, hook: Hook) -> None:
        if torch_names.HookOpName is None:
            raise ArgumentError(
                f"{self._where}: hooks of process groups need torch 2.14, and this is {torch.__version__}."
            )
        if not callable(hook):
            raise ArgumentError(f"{self._where}: hook {number} is {hook!r}. Pass a function.")
        hooks[number] = hook
        for name in _FORMS:
            setattr(self, name, partial(self._call_with_hooks, name))

    def _unregister(self, hooks: dict[int, Hook], number: int) -> None:
        hooks.pop(number, None)
        if not (self._pre_hooks or self._post_hooks or self._abort_hooks):
            for name in _FORMS:
                vars(self).pop(name, None)

    def _call_with_hooks(self, method_name: str, *arguments: Any, **named: Any) -> dist.Work:
        method: Callable[[], dist.Work] = partial(getattr(type(self), method_name), self, *arguments, **named)
        if self._is_in_hooked_call:  # a call that consists of others, or one that a hook makes
            return method()
        self._is_in_hooked_call = True
        try:
            form, given = _FORMS[method_name], (*arguments, *named.values())
            options = next((each for each in given if hasattr(each, "timeout")), None)
            number, self._num_hooked = self._num_hooked, self._num_hooked + 1
            name = getattr(torch_names.HookOpName, form.operation)
            is_async = options is None or is_asynchronous(options)
            if self._pre_hooks:
                root = getattr(options, "rootRank", -1) if form.peer is None else given[form.peer]
                inputs, outputs = ([] if at is None else list(_tensors(given[at])) for at in form[1:3])
                about = BeforeCall(name, is_async, inputs, outputs, root, number)
                for before in list(self._pre_hooks.values()):
                    before(about)
            try:
                work = method()
            except _FAILURES:
                self.run_abort_hooks()
                raise
            if isinstance(work, PendingWork):
                work.when_failed(self.run_abort_hooks)
            for after in list(self._post_hooks.values()):
                after(AfterCall(name, is_async, work, number))
            return work
        finally:
            self._is_in_hooked_call = False

    def run_abort_hooks(self) -> None:
        """Run the hooks; their errors are logged."""
        for number, hook in list(self._abort_hooks.items()):
            try:
                hook()
            except Exception as error:  # the error of the call is what the program must see
                logger.warning(f"{self._where}: abort hook {number} failed: {error!r}")


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a list of tensors, of a list of lists, or a tensor."""
    if isinstance(given, torch.Tensor):
        yield given
    else:
        for each in given:
            yield from _tensors(each)
