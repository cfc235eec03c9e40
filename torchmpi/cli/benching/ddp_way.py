"""What DistributedDataParallel does with gradients, without the backward pass around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor

# What it makes unless told otherwise; the first bucket, of 1 MB, is left out.
BUCKET_BYTES = 25 << 20


class Bucket(NamedTuple):
    """A flat tensor, and what lies in it."""

    flat: Tensor
    gradients: list[Tensor]
    views: list[Tensor]
    """Where in the flat tensor each of the gradients belongs."""


def fill_buckets(gradients: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Buckets for gradients of one dtype, from the last to the first; each at least `bucket_bytes` but the last.

    >>> [len(bucket.flat) for bucket in fill_buckets([torch.zeros(3), torch.zeros(2), torch.zeros(2)], 16)]
    [4, 3]
    """
    buckets: list[Bucket] = []
    members: list[Tensor] = []
    for gradient in reversed(gradients):
        members.append(gradient)
        if sum(member.nbytes for member in members) >= bucket_bytes:
            buckets.append(_bucket_of(members))
            members = []
    return [*buckets, _bucket_of(members)] if members else buckets


def _bucket_of(gradients: list[Tensor]) -> Bucket:
    flat = gradients[0].new_zeros(sum(gradient.numel() for gradient in gradients))
    parts = flat.split([gradient.numel() for gradient in gradients])
    return Bucket(flat, gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])


def add_up(buckets: Sequence[Bucket]) -> None:
    """The communication in it and nothing else: all on their way, then wait."""
    for work in [torch.distributed.all_reduce(bucket.flat, async_op=True) for bucket in buckets]:
        work.wait()


def average(buckets: Sequence[Bucket]) -> None:
    """What becomes of gradients that are, and stay, views of the buckets: ``gradient_as_bucket_view=True``, and
    ``zero_grad(set_to_none=False)``. The cheapest way.
    """
    size = torch.distributed.get_world_size()
    works = []
    for bucket in buckets:
        for view in bucket.views:
            view.div_(size)
        works.append(torch.distributed.all_reduce(bucket.flat, async_op=True))
    for work in works:
        work.wait()


def average_copied(buckets: Sequence[Bucket]) -> None:
    """What becomes of gradients that are elsewhere, as they are unless told otherwise."""
    share = 1 / torch.distributed.get_world_size()
    works = []
    for bucket in buckets:
        for gradient, view in zip(bucket.gradients, bucket.views, strict=True):
            torch.mul(gradient, share, out=view)
        works.append(torch.distributed.all_reduce(bucket.flat, async_op=True))
    for work, bucket in zip(works, buckets, strict=True):
        work.wait()
        for gradient, view in zip(bucket.gradients, bucket.views, strict=True):
            gradient.copy_(view)
