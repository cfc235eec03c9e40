"""The replicated tensors of a net, which are equal on all ranks, and state attached to a net."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..communicators.communicator import Communicator
from ..errors import ArgumentError, kind_of, rank_prefix
from ..timeline import events
from .sharding import SHARDED, Sharding

Net = nn.Module | Iterable[Tensor]


class Replica:
    """The replicated tensors of a net: parameters and buffers, each once, in the order of the modules; and its shards.

    Implemented as one recursion over the modules, because ``named_parameters()`` takes a millisecond for a net with
    200 parameters. Names are computed only for messages.

    >>> shared = nn.Linear(2, 2, bias=False)
    >>> len(Replica(nn.Sequential(shared, shared)).parameters)
    1
    """

    def __init__(self, net: Net) -> None:
        self.net = self._root = net if isinstance(net, nn.Module) else None
        self.modules: list[nn.Module] = []
        self.parameters: list[Tensor] = []
        self.buffers: list[Tensor] = []
        self.trainable: list[Tensor] = []
        """The parameters that require a gradient."""
        self.shards: list[Tensor] = []
        """The sharded parameters and buffers."""
        seen: set[int] = set()
        left: list[Any] = [net if isinstance(net, nn.Module) else _checked(net)]
        while left:
            module = left.pop()
            if isinstance(module, nn.Module):
                if id(module) in seen:
                    continue
                seen.add(id(module))
                self.modules.append(module)
                if isinstance(module, nn.SyncBatchNorm) and module.training:
                    self._check_sync_batchnorm(module)
                kinds: Any = (module._parameters.values(), self.parameters), (module._buffers.values(), self.buffers)
                for child in reversed(module._modules.values()):
                    if child is not None:
                        left.append(child)
            else:
                kinds = ((module, self.parameters),)
            for tensors, found in kinds:
                for tensor in tensors:
                    if tensor is None or id(tensor) in seen:
                        continue
                    if getattr(tensor, SHARDED, False):
                        seen.add(id(tensor))
                        self.shards.append(tensor)
                        continue
                    if is_lazy(tensor):
                        raise ArgumentError(
                            f"{rank_prefix()}The net has lazy parameters without a shape. Run one batch through "
                            "it first."
                        )
                    seen.add(id(tensor))
                    found.append(tensor)
                    if found is self.parameters and tensor.requires_grad:
                        self.trainable.append(tensor)

    def _check_sync_batchnorm(self, layer: nn.SyncBatchNorm) -> None:
        """Raise if a layer of torch would not synchronize, which it does over torch.distributed only."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return
        assert self._root is not None
        name = next(name for name, module in self._root.named_modules() if module is layer)
        raise ArgumentError(
            f"{rank_prefix()}{name!r} is a torch.nn.SyncBatchNorm, which synchronizes over torch.distributed only, but "
            "torch.distributed is not initialized: each rank would normalize with the statistics of its own batch. "
            "Convert the net with mpinn.SyncBatchNorm.convert_sync_batchnorm(net)."
        )

    def shard_parts(self, comm: Communicator, *, average: bool = True) -> list[tuple[Replica, Communicator]]:
        """Return the shards, as replicas, with the ranks that hold the same ones.

        Args:
            comm: The communicator of a call that synchronizes the net.
            average: Whether the call averages; sums are refused.

        Returns:
            One replica for each set of ranks. Shards that only one rank of `comm` holds are left out.

        Raises:
            ArgumentError: The ranks of a shard do not fit to `comm`, or `average` is False.
        """
        parts: dict[int, tuple[Replica, Communicator]] = {}
        for tensor in self.shards:
            sharding = getattr(tensor, SHARDED)
            if not isinstance(sharding, Sharding) or comm.size == 1:
                continue
            if not average:
                raise ArgumentError(
                    f"{rank_prefix()}average=False: ranks that share a layer have the same batch, so a sum over "
                    "all ranks would count "
                    "it several times for replicated parameters, but once for shards. Use average=True."
                )
            holders = sharding.holders_in(comm)
            if holders is None:
                continue
            part, _ = parts.setdefault(id(holders.intra), (Replica([]), holders))
            part._root = self._root
            is_parameter = isinstance(tensor, nn.Parameter) or self.net is None
            (part.parameters if is_parameter else part.buffers).append(tensor)
            if is_parameter and tensor.requires_grad:
                part.trainable.append(tensor)
        return list(parts.values())

    def names(self, tensors: Iterable[Tensor]) -> list[str]:
        known: dict[int, str] = {}
        if self._root is not None:
            known = {id(tensor): name for name, tensor in self._root.named_buffers()}
            known.update((id(tensor), name) for name, tensor in self._root.named_parameters())
        return [known.get(id(tensor), f"tensor {index}") for index, tensor in enumerate(tensors)]

    def labelled(self, label: str, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Label calls in timelines, with the names of the first and the last of their tensors."""
        if events.recorder is None or not tensors:
            return nullcontext()
        return events.labelled(f"{label}: {' to '.join(dict.fromkeys(self.names((tensors[0], tensors[-1]))))}")

    def name(self, tensor: Tensor) -> str:
        everything = self.parameters + self.buffers + self.shards
        names = self.names(everything)
        return next((name for name, other in zip(names, everything, strict=True) if other is tensor), "a tensor")


def _checked(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    if not isinstance(tensors, Iterable):
        raise ArgumentError(f"{rank_prefix()}Expected a module or an iterable of tensors, not {kind_of(tensors)}.")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise ArgumentError(
                f"{rank_prefix()}Expected a module or an iterable of tensors, found a {kind} in the iterable."
            )
        yield tensor


def sparse_by_declaration(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters of embeddings with ``sparse=True``, whose gradients are sparse.

    >>> table = nn.Embedding(10, 3, sparse=True)
    >>> sparse_by_declaration([table]) == {id(table.weight)}
    True
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for module in modules if isinstance(module, kinds) and module.sparse}


class Attachment:
    """Base of state that belongs to one net: copies and pickles of the net contain ``None`` instead."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def attached(net: Net, name: str) -> Any:
    """Return the state attached to `net` as `name`, or None."""
    return net.__dict__.get(name) if isinstance(net, nn.Module) else None


def attach(net: nn.Module, name: str, state: Attachment | None) -> None:
    """Attach `state` to `net`; None removes the state."""
    if state is None:
        net.__dict__.pop(name, None)
    else:
        net.__dict__[name] = state
