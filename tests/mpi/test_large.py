"""To a user of huge tensors: more elements than a 32-bit count holds, if there is enough memory."""

from __future__ import annotations

import pytest
import torch

import torchmpi as mpi

# Through shared memory: the same under every MPI.
# Touching 8 GB takes a minute and a half of CPU: before a release.
pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(2), pytest.mark.usefixtures("world"), pytest.mark.release]
NUMEL = 2**31 + 5


def memory_for(num_bytes_per_rank: int) -> bool:
    """The same answer on all ranks: the one of rank 0."""
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    return bool(mpi.broadcast(int(available > 1.5 * num_bytes_per_rank * mpi.size())))


@pytest.fixture(scope="module")
def memory(world) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors for all calls, as memory that is used for the first time takes longer than they do."""
    if mpi.size() != 2:
        pytest.skip("one number of ranks is enough")
    if not memory_for(2 * NUMEL):
        pytest.skip(f"needs {2 * NUMEL * mpi.size() * 1.5 / 2**30:.0f} GiB of free memory")
    return torch.empty(NUMEL, dtype=torch.uint8), torch.empty(NUMEL // 2 + 1, dtype=torch.uint8)


@pytest.mark.parametrize("backend", (None, "gloo"))
def test_more_than_two_to_the_31_elements(agree, memory, backend):
    rank, size = mpi.rank(), mpi.size()
    tensor, half = memory[0].fill_(rank + 1), memory[1].zero_()
    mpi.allreduce(tensor, op="max", backend=backend)
    ends = tensor[[0, 2**30, 2**31 - 1, -1]].tolist()
    agree.equal(ends, [size] * 4, "allreduce")
    tensor[-1] = rank + 10
    mpi.broadcast(tensor, root=1, backend=backend)
    agree.equal(tensor[-1].item(), 11, "broadcast")
    part = mpi.reduce_scatter(tensor, half[: (NUMEL + 1 - rank) // 2], op="max", backend=backend)
    agree.equal(int(part[-1]), 2 if rank == 0 else 11, "reduce_scatter")
    half[2**30] = 20 + rank
    whole = mpi.allgather(half[: 2**30 + 1], tensor[: 2**31 + 2], backend=backend)
    agree.equal((int(whole[2**30]), int(whole[-1])), (20, 21), "allgather")
