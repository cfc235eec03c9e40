"""The sampler that gives each rank a part of a data set."""

from __future__ import annotations

from typing import TypeVar

from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler as TorchSampler

from ..argument_types import checks_types
from ..communicators.levels import Comm
from ..session import runtime

T_co = TypeVar("T_co", covariant=True)


@checks_types
class DistributedSampler(TorchSampler[T_co]):
    """``torch.utils.data.DistributedSampler`` with the number of ranks and the rank of a communicator.

    That of torch asks ``torch.distributed``, which a program with torchmpi need not initialize. All ranks get equally
    many samples: some samples occur twice, or some are left out (`drop_last`). Call ``set_epoch(epoch)`` before each
    epoch; otherwise all epochs have the same order.

    Args:
        dataset: The data set, with a length.
        num_replicas: The number of parts; by default the number of ranks of the communicator.
        rank: The part of this rank; by default the rank in the communicator.
        shuffle: Shuffle the data set, in the same way on all ranks.
        seed: The seed of the order; the same on all ranks.
        drop_last: Leave out samples instead of repeating some, so that the parts have the same length.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Raises:
        NotStartedError: torchmpi is not started, and `num_replicas` or `rank` is None.
        ValueError: `rank` is not less than `num_replicas`.

    Example:
        ::

            sampler = mpinn.DistributedSampler(dataset)
            loader = DataLoader(dataset, batch_size=32, sampler=sampler)
            for epoch in range(10):
                sampler.set_epoch(epoch)
                for x, y in loader:
                    ...
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        comm: Comm = None,
    ) -> None:
        if num_replicas is None or rank is None:
            communicator = runtime.communicator(comm)
            num_replicas = communicator.size if num_replicas is None else num_replicas
            rank = communicator.rank if rank is None else rank
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
