"""To whoever makes different calls on one host: all ranks raise, also where a backend would tell some only."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import torchmpi as mpi
from torchmpi.errors import MismatchError
from torchmpi.session import runtime

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.min_ranks(2)]


@pytest.mark.parametrize("backend", ["mpi", "p2p"])
@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter"])
def test_different_shapes_are_an_error_on_all_ranks_of_a_host(agree, collective, backend):
    """Regression: MPI raised on the ranks that received too much; the others returned, or waited for the watchdog."""
    rank, size = mpi.rank(), mpi.size()
    status = mpi.collective_availability()[backend, collective, "cpu", "sync"]
    if runtime.current().world.log_board is None or status != "available":
        pytest.skip("the ranks share no memory, or were not started by MPI")
    for odd in range(size):
        for numel in (size, 70_000 * size):
            tensor = torch.ones(numel + size * (odd == rank))
            call = partial(getattr(mpi, collective), tensor, backend=backend)
            agree.raises(MismatchError, call, f"float32 [{numel}]", f"float32 [{numel + size}]")
            agree.equal(mpi.allreduce(1), size, "the next call")
