"""A parameter server with one-sided MPI: windows that are sharded as a server is, and that any client may change."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchmpi.launch import mpi_library
from torchmpi.tensors.partition import even_partition

Place = tuple[int, Any, Any, tuple[int, int, Any]]


class OneSided:
    """The values of all ranks in windows, of which a client adds to all or to some rows, and gets them.

    All accesses are in one epoch, from the constructor to :meth:`close`; both are collective. A sum of MPI is atomic
    for each element; a client may get a part of another one's update, which the chunks of torchmpi do not allow.

    Args:
        comm: The communicator.
        shape: Number and length of the rows.
        index: The rows that are changed, in increasing order, which may be others in each call; None for all.
        gradient: Their gradients.
        received: Where their values are received.
    """

    def __init__(
        self,
        comm: Any,
        shape: tuple[int, int],
        index: np.ndarray | None,
        gradient: torch.Tensor,
        received: torch.Tensor,
    ) -> None:
        self._MPI = MPI = mpi_library.load()
        self._gradient, self._received, self._row_numel, self._index = (
            gradient.numpy(),
            received.numpy(),
            shape[1],
            index,
        )
        parts = even_partition(shape[0], comm.size)
        self._parts = [(rank % comm.size, *parts[rank]) for rank in range(comm.rank - comm.size, comm.rank)]
        self._window = MPI.Win.Allocate(4 * shape[1] * parts[comm.rank][1], 4, comm=comm)
        np.frombuffer(self._window.tomemory(), np.float32)[:] = 0
        self._places = [self._whole(*part) for part in self._parts] if index is None else []
        comm.Barrier()
        self._window.Lock_all()

    def add_and_receive(self) -> None:
        """Add to the values, and get them when that has been done."""
        window, sum_of = self._window, self._MPI.SUM
        places = self._places or [self._rows(*part) for part in self._parts]
        for rank, sent, _, place in places:
            window.Accumulate(sent, rank, place, sum_of)
        window.Flush_all()
        for rank, _, received, place in places:
            window.Get(received, rank, place)
        window.Flush_all()
        if self._index is not None:
            for _, _, _, place in places:
                place[2].Free()

    def _buffers(self, begin: int, end: int) -> tuple[Any, Any]:
        return [self._gradient[begin:end], self._MPI.FLOAT], [self._received[begin:end], self._MPI.FLOAT]

    def _whole(self, rank: int, begin: int, num_rows: int) -> Place:
        """Return a rank, what it is sent, where its values are received, and where they are in its window."""
        numel = num_rows * self._row_numel
        return (
            rank,
            *self._buffers(begin * self._row_numel, begin * self._row_numel + numel),
            (0, numel, self._MPI.FLOAT),
        )

    def _rows(self, rank: int, begin: int, num_rows: int) -> Place:
        """Return the same for the rows that are changed."""
        assert self._index is not None
        first, last = np.searchsorted(self._index, (begin, begin + num_rows)).tolist()
        displacements = ((self._index[first:last] - begin) * self._row_numel).tolist()
        datatype = self._MPI.FLOAT.Create_indexed_block(self._row_numel, displacements).Commit()
        return rank, *self._buffers(first * self._row_numel, last * self._row_numel), (0, 1, datatype)

    def close(self) -> None:
        """End the epoch, and free the windows."""
        self._window.Unlock_all()
        self._window.Free()
