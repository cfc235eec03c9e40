"""Attention to a long text in one process and around a ring of ranks, for ``torchmpi bench parallel``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ... import nn as mpinn
from ...nn.functional import linear_map
from .bench_job import BenchJob
from .decoding import HEAD
from .divided_work import ONE_PROCESS, ParallelContestant, compared

_TOKENS_PER_RANK = 512

Shift = Callable[[Tensor], Tensor]
"""Sends a tensor to the next rank and returns that of the rank before; its gradient goes the other way."""


def sequences(job: BenchJob, width: int, batch: int, groups: Mapping[str, Any]) -> list[ParallelContestant]:
    """Make the contestants: one process, and the ring with messages of each interface."""
    rank, size = job.rank, job.size
    generator = torch.Generator().manual_seed(0)
    # Rank r has the parts r and 2n-1-r of 2n, so that causal attention is the same work on all ranks.
    whole = torch.randn(3, batch, 2 * size, width // HEAD, _TOKENS_PER_RANK // 2, HEAD, generator=generator)
    own = whole[:, :, [rank, 2 * size - 1 - rank]].requires_grad_()
    expected = 0.0
    alone = ParallelContestant(ONE_PROCESS, lambda: None, alone=True)
    if rank == 0:
        together = whole.transpose(2, 3).flatten(3, 4).requires_grad_()
        attend = partial(scaled_dot_product_attention, is_causal=True)
        alone = ParallelContestant(ONE_PROCESS, partial(_step, together, attend), alone=True)
        expected = _step(together, attend) / size
    expected = job.comm.bcast(expected)
    src, dst = (rank - 1) % size, (rank + 1) % size
    shifts: dict[str, Shift] = {"ring attention": partial(mpinn.functional.sendreceive, src=src, dst=dst)}
    shifts |= {f"ring attention on {name}": partial(_through_torch, group=group) for name, group in groups.items()}
    found = [alone]
    for name, shift in shifts.items():
        step = partial(_step, own, partial(_ring, rank=rank, size=size, shift=shift))
        found.append(compared(job, name, step, [expected]))
        messages = partial(_messages, own[1:].detach(), size, shift)
        found.append(ParallelContestant(name.replace("ring attention", "its messages"), messages))
    return found


def _step(inputs: Tensor, attend: Callable[..., Tensor]) -> float:
    """Run forward and backward; return a number that depends on the gradients of queries, keys and values."""
    inputs.grad = None
    attend(*inputs).square().sum().backward()
    assert inputs.grad is not None
    return float(inputs.grad.square().sum())


def _ring(q: Tensor, k: Tensor, v: Tensor, *, rank: int, size: int, shift: Shift) -> Tensor:
    """Return the causal attention of both parts of this rank to the parts of all ranks."""
    early = _block(q[:, 0], k[:, 0], v[:, 0], is_causal=True)
    late = _merged(_block(q[:, 1], k[:, 1], v[:, 1], is_causal=True), _block(q[:, 1], k[:, 0], v[:, 0]))
    both = torch.stack([k, v])
    for distance in range(1, size):
        both = shift(both)
        k, v = both
        late = _merged(late, _block(q[:, 1], k[:, 0], v[:, 0]))
        if distance <= rank:  # the part comes from a rank before this one
            early = _merged(early, _block(q[:, 0], k[:, 0], v[:, 0]))
        else:
            late = _merged(late, _block(q[:, 1], k[:, 1], v[:, 1]))
    return torch.stack([early[0], late[0]], 1)


def _block(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return the attention to one block, and the logarithms of its sums of exponentials."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    return (scores - sums).exp() @ v, sums


def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(a[1], b[1])
    return a[0] * (a[1] - total).exp() + b[0] * (b[1] - total).exp(), total


def _messages(both: Tensor, size: int, shift: Shift) -> None:
    """Pass keys and values around the ring, and as many gradients, without computing attention."""
    for _ in range(2 * (size - 1)):
        shift(both)


def _through_torch(tensor: Tensor, group: Any) -> Tensor:
    """Send to the next rank and receive from the one before by torch.distributed; backward the other way."""
    return linear_map(tensor, partial(_pass, distance=1, group=group), partial(_pass, distance=-1, group=group))


def _pass(tensor: Tensor, *, distance: int, group: Any) -> Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent, received = tensor.detach().contiguous(), torch.empty(tensor.shape)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + distance) % size, group),
        dist.P2POp(dist.irecv, received, (rank - distance) % size, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received
