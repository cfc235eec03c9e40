"""Functions that the version of torch of the tables lacks, in the last section; later versions run these checks."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from calls import BOTH_ROOTS, MODES
from features import Check, Wrong, equal, feature, finished, ones, raises, rank

SECTION = "Since PyTorch 2.14"


def new(name: str, mode: str = "", *, renews: bool = False) -> Any:
    """Register a check of a function, which fails with one reason where torch lacks the function."""

    def absent() -> None:
        raise Wrong("not in this version of PyTorch")

    def register(check: Check) -> Check:
        found = check if hasattr(dist, name) else absent
        return feature(SECTION, f"`{name}`{mode}", renews=renews)(found)

    return register


def check_gather(name: str, root: int, *, asynchronous: bool) -> None:
    """Concatenate along dim 0."""
    output = torch.zeros(4, 3) if rank() == root else None
    work = getattr(dist, name)(ones(2, 3), output, dst=root, async_op=asynchronous)
    if asynchronous:
        finished(work)
    if output is not None:
        equal(output, torch.tensor([1.0, 1.0, 2.0, 2.0]).view(4, 1).expand(4, 3))


for name in ("gather_single", "gather_into_tensor"):
    for mode, asynchronous in MODES.items():
        for root in BOTH_ROOTS:
            new(name, f"|{mode}")(partial(check_gather, name, root, asynchronous=asynchronous))


@new("get_backend_impl")
def _() -> None:
    group = dist.group.WORLD
    for chosen in (None, group, group.group_name):
        equal(dist.get_backend_impl(chosen), group.get_backend(torch.device("cpu")))
    equal(dist.get_backend_impl(device=torch.device("cpu")).size(), 2)


@new("set_timeout", renews=True)
def _() -> None:
    group = dist.new_group([0, 1])
    dist.set_timeout(timedelta(seconds=1), group)
    if rank() == 0:
        raises(RuntimeError, lambda: dist.all_reduce(ones(), group=group))
