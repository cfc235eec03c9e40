"""A Sequential whose parameters are stored in a few contiguous blocks, with one collective per block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..argument_types import checks_types
from ..errors import ArgumentError, rank_prefix
from .buckets import ViewBucket, allocate_flat, dense_view, partition_by_size
from .replica import Attachment, Replica, sparse_by_declaration


@checks_types
class BlockSequential(nn.Sequential):
    """``nn.Sequential`` with its parameters stored in contiguous blocks of about equal size.

    Parameters remain the same objects, with the same names in ``state_dict()``; only their memory is moved. Optimizers,
    ``load_state_dict`` and ``.to()`` work as usual. ``synchronize_parameters``, ``synchronize_gradients`` and the
    asynchronous hooks use one collective per block.

    Args:
        partitions: Number of blocks, if all parameters have one dtype and device; others get blocks of their own.
        *modules: As for ``nn.Sequential``.

    Raises:
        ArgumentError: `partitions` is not a positive integer, or a module contains a BlockSequential.

    Example:
        >>> net = BlockSequential(2, nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        >>> [block.numel() for block in net.parameter_blocks()]
        [20, 20]
    """

    def __init__(self, partitions: int, *modules: Any) -> None:
        if not isinstance(partitions, int) or partitions < 1:
            raise ArgumentError(
                f"{rank_prefix()}BlockSequential(partitions={partitions!r}, ...): partitions must be an integer, "
                "1 or more."
            )
        super().__init__(*modules)
        if any(isinstance(module, BlockSequential) for module in list(self.modules())[1:]):
            raise ArgumentError(
                f"{rank_prefix()}A BlockSequential cannot contain another one: a parameter can be stored in only "
                "one block."
            )
        self.partitions = partitions
        self._blocks: _Blocks | None = None
        self.parameter_blocks()

    def parameter_blocks(self) -> list[Tensor]:
        """Return the flat tensors that contain the parameters.

        Returns:
            One tensor per block, in the order of the parameters.

        Example:
            >>> net = BlockSequential(1, nn.Linear(2, 1))
            >>> flat = net.parameter_blocks()[0].fill_(1.0)
            >>> net[0].weight.tolist()
            [[1.0, 1.0]]
        """
        return self._current().flats

    def gradient_blocks(self) -> list[Tensor]:
        """Make the ``.grad`` of every trainable parameter a view of a block, and return the blocks.

        A gradient that is None becomes zeros.

        Returns:
            One flat tensor per block, in the order of the parameters.

        Example:
            >>> net = BlockSequential(1, nn.Linear(2, 1))
            >>> flat = net.gradient_blocks()[0].fill_(1.0)
            >>> net[0].bias.grad
            tensor([1.])
        """
        with torch.no_grad():
            buckets = self.gradient_buckets()
            for bucket in buckets:
                bucket.pack()
                bucket.give({id(parameter) for parameter in bucket.parameters})
        return [bucket.flat for bucket in buckets]

    def gradient_buckets(self) -> list[ViewBucket]:
        """Return the buckets of `gradient_blocks`, without a change of the gradients."""
        return self._current().gradient_buckets(self)

    def _current(self) -> _Blocks:
        if self._blocks is None or not self._blocks.are_in_place(Replica(self).parameters):
            self._blocks = _Blocks(Replica(self).parameters, self.partitions)
        return self._blocks

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockSequential:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # A conversion gives each parameter memory of its own.
        self._blocks = None
        self.parameter_blocks()
        return self


class _Blocks(Attachment):
    """The memory of the parameters of one BlockSequential. A copy of the net allocates blocks of its own."""

    def __init__(self, parameters: list[Tensor], partitions: int) -> None:
        self.groups = _group(parameters, partitions)
        self.flats: list[Tensor] = []
        self._addresses: list[tuple[Tensor, int]] = []
        self._buckets: list[ViewBucket] = []
        self._bucket_key: tuple[Any, ...] = ()
        with torch.no_grad():
            for group in self.groups:
                self._move(group)

    def _move(self, group: list[Tensor]) -> None:
        flat = allocate_flat(sum(parameter.numel() for parameter in group), group[0])
        offset = 0
        for parameter in group:
            view = dense_view(flat, offset, parameter.detach())
            view.copy_(parameter)
            parameter.data = view
            self._addresses.append((parameter, view.data_ptr()))
            offset += parameter.numel()
        self.flats.append(flat)

    def are_in_place(self, parameters: list[Tensor]) -> bool:
        return len(parameters) == len(self._addresses) and all(
            parameter is known and parameter.data_ptr() == address
            for parameter, (known, address) in zip(parameters, self._addresses, strict=True)
        )

    def gradient_buckets(self, net: nn.Module) -> list[ViewBucket]:
        """Return one bucket per block, of the parameters that are trainable and have dense gradients."""
        sparse = sparse_by_declaration(net.modules())
        groups = [[p for p in group if p.requires_grad and id(p) not in sparse] for group in self.groups]
        key = tuple(id(parameter) for group in groups for parameter in group)
        if key != self._bucket_key:
            self._buckets = [ViewBucket(group) for group in groups if group]
            self._bucket_key = key
        return self._buckets


def _group(parameters: list[Tensor], partitions: int) -> list[list[Tensor]]:
    """Divide parameters into partitions by size, and each partition by dtype and device."""
    groups: list[list[Tensor]] = []
    for run in partition_by_size([parameter.numel() for parameter in parameters], partitions):
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for index in run:
            parameter = parameters[index]
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        groups.extend(kinds.values())
    return groups


def parameter_blocks_of(modules: Iterable[nn.Module]) -> tuple[list[Tensor], set[int]]:
    """Return the parameter blocks of all `modules`, and the ids of the parameters in them."""
    blocks: list[Tensor] = []
    inside: set[int] = set()
    for module in _block_sequentials(modules):
        blocks.extend(module.parameter_blocks())
        inside.update(id(parameter) for parameter in Replica(module).parameters)
    return blocks, inside


def gradient_buckets_of(modules: Iterable[nn.Module]) -> list[ViewBucket]:
    """Return the gradient buckets of all `modules`."""
    return [bucket for module in _block_sequentials(modules) for bucket in module.gradient_buckets()]


def _block_sequentials(modules: Iterable[nn.Module]) -> list[BlockSequential]:
    """Return the BlockSequential modules; raise if two of them share a parameter, which would be reduced twice."""
    found = [module for module in modules if isinstance(module, BlockSequential)]
    stored: set[int] = set()
    for module in found if len(found) > 1 else ():
        own = {id(parameter) for parameter in Replica(module).parameters}
        if stored & own:
            raise ArgumentError(
                f"{rank_prefix()}Two BlockSequential modules share a parameter, which can be stored in only one block. "
                "Make one BlockSequential of both, or use nn.Sequential for one of them."
            )
        stored |= own
    return found
