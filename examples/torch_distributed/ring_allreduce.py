"""An allreduce made of messages: chunks travel round a ring, first adding up, then being handed out.

Each of the n ranks sends and receives 2 (n - 1) chunks of an n-th of the tensor, however many ranks there are: nobody
sends more than twice the tensor. ``dist.all_reduce`` does the same, faster; this shows how it can be done.

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
    """Send to the right neighbour what it wants, and receive from the left one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(outgoing, dst=(rank + 1) % size)
    dist.recv(incoming, src=(rank - 1) % size)
    sent.wait()


def ring_allreduce(tensor: Tensor) -> None:
    """Replace `tensor`, which is contiguous and equally long on all ranks, by the sum over the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(size)  # views; their lengths differ by one at most, and some may be empty
    # Going round, a chunk collects what each rank adds. The chunk that rank r passes on in a step is the one
    # that came in the step before, so after n - 1 steps rank r has all of chunk r + 1.
    for step in range(size - 1):
        outgoing, mine = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arrived = torch.empty_like(mine)
        exchange(outgoing, arrived)
        mine += arrived
    # Once more round, complete chunks replace the incomplete ones.
    for step in range(size - 1):
        exchange(chunks[(rank - step + 1) % size], chunks[(rank - step) % size])


def check(numel: int, dtype: torch.dtype) -> None:
    """The ring's sum is that of dist.all_reduce, and the same on all ranks, bit for bit."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ring = torch.randint(-1000, 1000, (numel,), generator=generator).to(dtype)
    if dtype.is_floating_point:
        ring /= 7  # now sums are rounded, and the order of adding matters
    reference, original = ring.clone(), ring.clone()
    ring_allreduce(ring)
    dist.all_reduce(reference)
    of_rank_0 = ring.clone()
    dist.broadcast(of_rank_0, src=0)
    # Rounding errors grow with what was added, not with what is left of it.
    tolerance = torch.finfo(dtype).eps * original.abs().max().item() if dtype.is_floating_point else 0
    limit = torch.tensor([tolerance * dist.get_world_size()], dtype=torch.float64)
    dist.all_reduce(limit)
    error = (ring - reference).abs().max().item() if numel else 0
    assert error <= limit.item(), f"{numel} x {dtype}: the ring's sum is {error} off"
    assert torch.equal(ring, of_rank_0), f"{numel} x {dtype}: not what rank 0 has"
    if dist.get_rank() == 0:
        print(f"{numel:>8} x {dtype!s:<14} differs by at most {error:.1e}", flush=True)


def milliseconds(allreduce: Callable[[Tensor], object], numel: int) -> float:
    """The median of ten, after one to warm up."""
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
    # One number leaves most chunks empty, and most lengths do not divide by the number of ranks.
    for numel in (1, 5, 1000, options.numel):
        for dtype in (torch.int64, torch.float32, torch.float64):
            check(numel, dtype)
    ring, own = (milliseconds(function, options.numel) for function in (ring_allreduce, dist.all_reduce))
    if dist.get_rank() == 0:
        text = f"{options.numel:>8} x torch.float32: ring {ring:.2f} ms, {dist.get_backend()}'s own {own:.2f} ms"
        print(text, flush=True)
    dist.barrier()  # nobody leaves while others still talk, or while a thread of gloo still holds the last tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
