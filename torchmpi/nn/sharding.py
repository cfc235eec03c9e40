"""Sharded parameters: which ranks hold the shards of a tensor, and which hold the same shard."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..argument_types import checks_types
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..errors import ArgumentError, rank_prefix
from ..session import runtime

SHARDED = "torchmpi_sharded"
"""Attribute of a sharded tensor: a Sharding, or True if no two ranks hold the same shard."""
_DEEPCOPY = "__deepcopy__"


class Sharding:
    """The ranks of a sharded tensor. Copies of the tensor share it; pickles contain no communicators.

    Attributes:
        comm: The ranks that hold the shards of one complete tensor; None in a tensor from a pickle.
        data_comm: The ranks that hold the same shard, which are trained on different data; None if there is no other
            rank with the same shard.
    """

    def __init__(self, comm: Communicator | None, data_comm: Communicator | None) -> None:
        self.comm, self.data_comm = comm, data_comm

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, None)  # communicators would be invalid in another job

    def holders_in(self, comm: Communicator) -> Communicator | None:
        """Return the ranks that hold the same shard, for a call that synchronizes a net over `comm`.

        Args:
            comm: The communicator of the call.

        Returns:
            `data_comm`, or None if no other rank of `comm` holds the shard.

        Raises:
            ArgumentError: `comm` has ranks outside the groups of the shard, or only some of those that hold it.
        """
        if self.comm is None:
            raise ArgumentError(
                f"{rank_prefix()}A sharded parameter comes from a pickle, which contains no communicators. Call "
                "set_sharded(parameter, comm=..., data_comm=...) again, or make the layer anew and load its state_dict."
            )
        holders = {comm.intra.world_ranks[comm.rank]} if self.data_comm is None else _ranks(self.data_comm)
        known, here = self.comm.size * len(holders), _ranks(comm)
        if comm.size <= known and holders <= here:
            return self.data_comm
        if comm.size <= known and len(holders & here) == 1:
            return None
        raise ArgumentError(
            f"rank {comm.rank}: the net is synchronized over the world ranks {sorted(here)}, but has parameters "
            f"sharded over {sorted(_ranks(self.comm))}, with the same shard on {sorted(holders)}. Pass data_comm=, the "
            "ranks that hold the same shard, to the layer, or pass the ranks of its shards as comm= to this call."
        )


@checks_types
def set_sharded(tensor: Tensor, *, comm: Comm = None, data_comm: Comm = None) -> None:
    """Mark a parameter or buffer as one of several shards.

    The ``synchronize_*`` functions, asynchronous hooks, ``DistributedOptimizer`` and checks then treat it as a tensor
    of the ranks of `data_comm`, instead of all ranks. Copies of the parameter are marked too.

    Args:
        tensor: The shard of this rank.
        comm: The ranks that hold the shards of one complete tensor; default: the current communicator.
        data_comm: The ranks that hold the same shard. Default: if `comm` is a level of groups of equal size, pushed
            from the current communicator, the ranks with the same rank in their groups; none if `comm` has all ranks of
            the current communicator.

    Raises:
        ArgumentError: `data_comm` is needed, or has a rank of `comm` besides this one.

    Example:
        model_level = mpi.push_communicator(mpi.rank() // 2)
        mpi.set_communicator(0)
        mpinn.set_sharded(layer.weight, comm=model_level)
    """
    mark(tensor, make_sharding(comm, data_comm))


@checks_types
def sharding_of(tensor: Tensor) -> Sharding | None:
    """Return the ranks of a sharded tensor, or None if the tensor is replicated.

    Args:
        tensor: A parameter or buffer.

    Returns:
        Its ``Sharding``. For a tensor with ``torchmpi_sharded = True``: over the current communicator.

    Raises:
        NotStartedError: The tensor has ``torchmpi_sharded = True``, and torchmpi is not started.

    Example:
        sharding = mpinn.sharding_of(layer.weight)
        print(sharding.comm.rank, sharding.data_comm)
    """
    found = getattr(tensor, SHARDED, None)
    if found is None or isinstance(found, Sharding):
        return found
    return Sharding(runtime.communicator(None), None) if found else None


def mark(tensor: Tensor, sharding: Sharding) -> None:
    """Make `tensor` a shard, also in copies."""
    setattr(tensor, SHARDED, sharding)
    setattr(tensor, _DEEPCOPY, _Copier(tensor))  # torch does not copy the attributes of a parameter


class KeepsShards(nn.Module):
    """A layer with shards: a tensor that replaces a parameter is the same shard."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, such as one of ``load_state_dict(assign=True)``."""
        sharding = getattr(self._parameters.get(name), SHARDED, None)
        super().register_parameter(name, param)
        if sharding is not None and param is not None:
            mark(param, sharding)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsShards:
        # It registers no parameters: that of ``to_empty()`` of the meta device writes new ones into the layer.
        marked = {name: getattr(each, SHARDED, None) for name, each in self.named_parameters(remove_duplicate=False)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, sharding in marked.items():
            if sharding is not None:
                mark(self.get_parameter(name), sharding)
        return self


def make_sharding(comm: Comm, data_comm: Comm) -> Sharding:
    """Return the ranks of a shard, with the defaults of :func:`set_sharded`."""
    communicator = runtime.communicator(comm)
    if data_comm is None:
        return Sharding(communicator, _default_data_comm(communicator))
    holders = runtime.communicator(data_comm)
    if len(_ranks(communicator) & _ranks(holders)) > 1:
        raise ArgumentError(
            f"rank {holders.rank}: the world ranks {sorted(_ranks(communicator))} of comm hold different shards, but "
            f"data_comm, the ranks that hold the same shard, has more than one of them: {sorted(_ranks(holders))}."
        )
    return Sharding(communicator, holders if holders.size > 1 else None)


def _default_data_comm(comm: Communicator) -> Communicator | None:
    current, inter = runtime.communicator(None), comm.inter
    if _ranks(current) <= _ranks(comm):
        return None
    if not inter or not comm.is_cartesian or comm.parent is None or _ranks(comm.parent) != _ranks(current):
        raise ArgumentError(
            f"rank {current.rank}: {comm!r} is no level of groups of equal size that was pushed from the current "
            "communicator, so the ranks that hold the same shard are not known. Pass them as data_comm=, or, if each "
            "group trains a model of its own, make the layer inside `with mpi.use(comm):`."
        )
    return Communicator.of(inter)


def _ranks(comm: Communicator) -> set[int]:
    return set(comm.intra.world_ranks)


class _Copier:
    """The ``__deepcopy__`` of a sharded tensor; None in pickles."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def __call__(self, memo: dict[int, Any]) -> Tensor:
        tensor = self._tensor()
        assert tensor is not None  # its method is called
        copied: Tensor = getattr(type(tensor), _DEEPCOPY)(tensor, memo)
        mark(copied, getattr(tensor, SHARDED))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
