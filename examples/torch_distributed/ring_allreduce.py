"""A ring allreduce made of messages: chunks are passed round a ring, first to be added, then to be distributed.

Each of the n ranks sends and receives 2 (n - 1) chunks of an n-th of the tensor, which is less than twice the tensor
for any n. ``dist.all_reduce`` does the same faster.

    mpirun -n 4 python examples/torch_distributed/ring_allreduce.py
    torchrun --nproc-per-node 4 examples/torch_distributed/ring_allreduce.py --backend gloo
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(outgoing: Tensor, incoming: Tensor) -> None:
    """Send to the right neighbor and receive from the left one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(outgoing, dst=(rank + 1) % size)
    dist.recv(incoming, src=(rank - 1) % size)
    sent.wait()


def ring_allreduce(tensor: Tensor) -> None:
    """Replace `tensor`, which is contiguous and of equal length on all ranks, by the sum over the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(size)  # views, with lengths that differ by at most one, or are 0
    # In each step a rank receives a chunk, adds its own values, and passes the chunk on in the next step. After n - 1
    # steps rank r has the complete sum of chunk r + 1.
    for step in range(size - 1):
        outgoing, mine = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arrived = torch.empty_like(mine)
        exchange(outgoing, arrived)
        mine += arrived
    # In a second round complete chunks replace the incomplete ones.
    for step in range(size - 1):
        exchange(chunks[(rank - step + 1) % size], chunks[(rank - step) % size])


def check(numel: int, dtype: torch.dtype) -> None:
    """Compare the ring's sum with dist.all_reduce, and check that it has the same bits on all ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ring = torch.randint(-1000, 1000, (numel,), generator=generator).to(dtype)
    if dtype.is_floating_point:
        ring /= 7  # sums are rounded, so the order of additions matters
    reference, original = ring.clone(), ring.clone()
    ring_allreduce(ring)
    dist.all_reduce(reference)
    of_rank_0 = ring.clone()
    dist.broadcast(of_rank_0, src=0)
    # Rounding errors depend on the size of the summands, not of the sum.
    tolerance = torch.finfo(dtype).eps * original.abs().max().item() if dtype.is_floating_point else 0
    limit = torch.tensor([tolerance * dist.get_world_size()], dtype=torch.float64)
    dist.all_reduce(limit)
    error = (ring - reference).abs().max().item() if numel else 0
    assert error <= limit.item(), f"{numel} x {dtype}: the ring's sum has an error of {error}"
    assert torch.equal(ring, of_rank_0), f"{numel} x {dtype}: differs from rank 0"
    if dist.get_rank() == 0:
        print(f"{numel:>8} x {dtype!s:<14} differs by at most {error:.1e}", flush=True)


def milliseconds(allreduce: Callable[[Tensor], object], numel: int) -> float:
    """Return the median of ten calls, after one for warming up."""
    tensor, times = torch.zeros(numel), []
    for _ in range(11):
        dist.barrier()
        begin = time.perf_counter()
        allreduce(tensor)
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torchmpi", help="of torch.distributed (default: %(default)s)")
    parser.add_argument("--numel", type=int, default=1_000_003, help="numbers in the largest tensor (%(default)s)")
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    # With one number most chunks are empty, and most lengths are no multiple of the number of ranks.
    for numel in (1, 5, 1000, options.numel):
        for dtype in (torch.int64, torch.float32, torch.float64):
            check(numel, dtype)
    ring, own = (milliseconds(function, options.numel) for function in (ring_allreduce, dist.all_reduce))
    if dist.get_rank() == 0:
        text = f"{options.numel:>8} x torch.float32: ring {ring:.2f} ms, {dist.get_backend()}'s own {own:.2f} ms"
        print(text, flush=True)
    dist.barrier()  # no rank may leave while others communicate, or while a thread of gloo holds the last tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
