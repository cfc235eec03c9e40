"""The replicated tensors of a net, which are equal on all ranks, and state attached to a net."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import ArgumentError

Net = nn.Module | Iterable[Tensor]

SHARDED = "torchmpi_sharded"
"""Attribute of a parameter of which each rank holds a different shard, so that it is not synchronized."""


class Replica:
    """The replicated tensors of a net: parameters and buffers, each once, in the order of the modules.

    Implemented as one recursion over the modules, because ``named_parameters()`` takes a millisecond for a net with
    200 parameters. Names are computed only for messages.

    >>> shared = nn.Linear(2, 2, bias=False)
    >>> len(Replica(nn.Sequential(shared, shared)).parameters)
    1
    """

    def __init__(self, net: Net) -> None:
        self.net = net if isinstance(net, nn.Module) else None
        self.modules: list[nn.Module] = []
        self.parameters: list[Tensor] = []
        self.buffers: list[Tensor] = []
        self.trainable: list[Tensor] = []
        """The parameters that require a gradient."""
        seen: set[int] = set()
        left: list[Any] = [net if isinstance(net, nn.Module) else _checked(net)]
        while left:
            module = left.pop()
            if isinstance(module, nn.Module):
                if id(module) in seen:
                    continue
                seen.add(id(module))
                self.modules.append(module)
                kinds: Any = (module._parameters.values(), self.parameters), (module._buffers.values(), self.buffers)
                for child in reversed(module._modules.values()):
                    if child is not None:
                        left.append(child)
            else:
                kinds = ((module, self.parameters),)
            for tensors, found in kinds:
                for tensor in tensors:
                    if tensor is None or id(tensor) in seen or getattr(tensor, SHARDED, False):
                        continue
                    if is_lazy(tensor):
                        raise ArgumentError(
                            "The net has lazy parameters without a shape. Run one batch through it first."
                        )
                    seen.add(id(tensor))
                    found.append(tensor)
                    if found is self.parameters and tensor.requires_grad:
                        self.trainable.append(tensor)

    def names(self, tensors: Iterable[Tensor]) -> list[str]:
        """Return the names of `tensors`."""
        known: dict[int, str] = {}
        if self.net is not None:
            known = {id(tensor): name for name, tensor in self.net.named_buffers()}
            known.update((id(tensor), name) for name, tensor in self.net.named_parameters())
        return [known.get(id(tensor), f"tensor {index}") for index, tensor in enumerate(tensors)]

    def name(self, tensor: Tensor) -> str:
        """Return the name of one tensor."""
        everything = self.parameters + self.buffers
        names = self.names(everything)
        return next((name for name, other in zip(names, everything, strict=True) if other is tensor), "a tensor")


def _checked(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise ArgumentError(f"Expected a module or an iterable of tensors, found a {kind} in the iterable.")
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
