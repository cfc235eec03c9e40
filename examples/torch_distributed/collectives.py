"""The collectives of ``torch.distributed``, in the world and in groups, with their results.

Plain ``torch.distributed``, after the second part of PyTorch's tutorial "Writing Distributed Applications".

    mpirun -n 4 python examples/torch_distributed/collectives.py
    torchrun --nproc-per-node 4 examples/torch_distributed/collectives.py --backend gloo
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist


def show(name: str, mine: Any, expected: Any) -> None:
    """Print the result of a collective on this rank, and check it."""
    # One write per line: otherwise the ends of lines of several ranks mix.
    print(f"rank {dist.get_rank()}: {name} {mine}\n", end="", flush=True)
    assert mine == expected, f"{name} on rank {dist.get_rank()}: expected {expected}, found {mine}"


def reductions(rank: int, size: int) -> None:
    """Sum, product, minimum and maximum of r + 1 over all ranks r, on all ranks or on one."""
    numbers = [r + 1 for r in range(size)]
    factorial = 1
    for number in numbers:
        factorial *= number
    wanted = {"SUM": sum(numbers), "PRODUCT": factorial, "MIN": 1, "MAX": size}
    for name, result in wanted.items():
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        show(f"all_reduce {name}", tensor.item(), result)
    tensor = torch.tensor([rank + 1])
    dist.reduce(tensor, dst=0)
    if rank == 0:  # the tensor is undefined on other ranks
        show("reduce", tensor.item(), sum(numbers))


def from_one_and_to_one(rank: int, size: int) -> None:
    """Broadcast and scatter from rank 0, and gather on rank 0."""
    tensor = torch.tensor([3.5, -1.0]) if rank == 0 else torch.empty(2)
    dist.broadcast(tensor, src=0)
    show("broadcast", tensor.tolist(), [3.5, -1])
    part = torch.empty(2)
    dist.scatter(part, [torch.full((2,), float(r)) for r in range(size)] if rank == 0 else None, src=0)
    show("scatter", part.tolist(), [rank, rank])
    parts = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(part + 0.5, parts, dst=0)
    if parts is not None:
        show("gather", [p.tolist() for p in parts], [[r + 0.5] * 2 for r in range(size)])


def from_all_to_all(rank: int, size: int) -> None:
    """Every rank receives from every rank: all parts, its part of the sum, or the part for this rank."""
    parts = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([10 * rank]))
    show("all_gather", [p.item() for p in parts], [10 * r for r in range(size)])
    mine = torch.empty(1, dtype=torch.int64)
    dist.reduce_scatter(mine, [torch.tensor([rank + r]) for r in range(size)])
    show("reduce_scatter", mine.item(), size * rank + size * (size - 1) // 2)
    received = torch.empty(size, dtype=torch.int64)
    dist.all_to_all_single(received, 10 * rank + torch.arange(size))
    show("all_to_all_single", received.tolist(), [10 * r + rank for r in range(size)])


def objects(rank: int, size: int) -> None:
    """Collectives on pickled Python objects, such as settings and results."""
    settings = [{"lr": 0.1}] if rank == 0 else [None]
    dist.broadcast_object_list(settings, src=0)
    show("broadcast_object_list", settings, [{"lr": 0.1}])
    names: list[Any] = [None] * size
    dist.all_gather_object(names, f"rank {rank}")
    show("all_gather_object", names, [f"rank {r}" for r in range(size)])


def groups(rank: int, size: int) -> None:
    """Collectives in groups. All ranks call new_group() for every group, also those outside the group."""
    for name, members in {"even": range(0, size, 2), "odd": range(1, size, 2)}.items():
        group = dist.new_group(list(members)) if members else None
        if rank in members:
            tensor = torch.tensor([rank])
            dist.all_reduce(tensor, group=group)
            show(f"all_reduce of the {name} ranks", tensor.item(), sum(members))
            tensor = torch.tensor([rank])
            dist.broadcast(tensor, src=members[-1], group=group)  # src is a rank of the world
            show(f"broadcast to the {name} ranks", tensor.item(), members[-1])


def asynchronous(rank: int, size: int) -> None:
    """With async_op a collective runs in the background until wait()."""
    tensors = [torch.full((1000,), float(rank + i)) for i in range(3)]
    handles = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    busy = sum(range(1000))  # a computation in the meantime
    for handle in handles:
        handle.wait()
    ranks = size * (size - 1) // 2
    show(f"all_reduce of three, during {busy}", [t[-1].item() for t in tensors], [ranks + i * size for i in range(3)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torchmpi", help="of torch.distributed (default: %(default)s)")
    dist.init_process_group(parser.parse_args().backend)
    for part in (reductions, from_one_and_to_one, from_all_to_all, objects, groups, asynchronous):
        part(dist.get_rank(), dist.get_world_size())
        dist.barrier()  # so that the output of the parts does not mix
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
