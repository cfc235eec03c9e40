"""Messages between two ranks: blocking, nonblocking, from any source, and in batches.

Plain ``torch.distributed``, after the first part of PyTorch's tutorial "Writing Distributed Applications".

    mpirun -n 2 python examples/torch_distributed/point_to_point.py
    torchrun --nproc-per-node 2 examples/torch_distributed/point_to_point.py --backend gloo
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist


def print_line(text: str) -> None:
    """Print a line with one write: otherwise the ends of lines of several ranks mix."""
    print(f"rank {dist.get_rank()}: {text}\n", end="", flush=True)


def blocking(rank: int, size: int) -> None:
    """Send a tensor from rank 0 through all ranks, each of which adds one and waits for its neighbor."""
    token = torch.zeros(1)
    if rank > 0:
        dist.recv(token, src=rank - 1)
    token += 1
    if rank < size - 1:
        dist.send(token, dst=rank + 1)
    print_line(f"blocking, has {token.item():g}")
    assert token.item() == rank + 1


def nonblocking(rank: int, size: int) -> None:
    """Send around a ring. With blocking sends every rank might wait for its neighbor to receive."""
    outgoing, incoming = torch.full((1000,), float(rank)), torch.empty(1000)
    sent = dist.isend(outgoing, dst=(rank + 1) % size)
    received = dist.irecv(incoming, src=(rank - 1) % size)
    # Until wait() returns, `outgoing` must not be changed and `incoming` must not be read.
    sent.wait()
    received.wait()
    print_line(f"nonblocking, has {incoming[0].item():g} from its left")
    assert torch.all(incoming == (rank - 1) % size)


def tagged(rank: int, size: int) -> None:
    """Receive messages with different tags in another order than they were sent in."""
    if rank == 0:
        work = [dist.isend(torch.full((2,), float(tag)), dst=size - 1, tag=tag) for tag in (1, 2)]
        for request in work:
            request.wait()
    elif rank == size - 1:
        first, second = torch.empty(2), torch.empty(2)
        dist.recv(second, src=0, tag=2)
        dist.recv(first, src=0, tag=1)
        print_line(f"tagged, has {first.tolist()} and {second.tolist()}")
        assert first.tolist() == [1, 1] and second.tolist() == [2, 2]


def from_any_source(rank: int, size: int) -> None:
    """Without `src`, recv takes the first message that arrives and returns its source."""
    if rank > 0:
        dist.send(torch.tensor([rank * rank]), dst=0)
        return
    senders = []
    for _ in range(size - 1):
        square = torch.empty(1, dtype=torch.int64)
        senders.append(dist.recv(square))
        assert square.item() == senders[-1] ** 2
    print_line(f"from any source, has messages from {sorted(senders)}")
    assert sorted(senders) == list(range(1, size))


def batched(rank: int, size: int) -> None:
    """Exchange the first and last cells with both neighbors, as solvers on a grid do."""
    left, right = (rank - 1) % size, (rank + 1) % size
    cells = torch.arange(10.0) + 10 * rank
    before, after = torch.empty(1), torch.empty(1)
    # On two ranks both neighbors are the same rank, and messages are received in the order of sending.
    exchange = [
        dist.P2POp(dist.isend, cells[-1:], right),
        dist.P2POp(dist.isend, cells[:1], left),
        dist.P2POp(dist.irecv, before, left),
        dist.P2POp(dist.irecv, after, right),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    print_line(f"batched, {before.item():g} | {cells.int().tolist()} | {after.item():g}")
    assert (before.item(), after.item()) == (10 * left + 9, 10 * right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torchmpi", help="of torch.distributed (default: %(default)s)")
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        raise SystemExit("at least 2 ranks are needed: mpirun -n 2, or torchrun --nproc-per-node 2")
    for part in (blocking, nonblocking, tagged, from_any_source, batched):
        part(rank, size)
        dist.barrier()  # otherwise the receive from any source might take a message of the next part
    if rank == 0:
        print_line(f"all messages have arrived, on {size} ranks with {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
