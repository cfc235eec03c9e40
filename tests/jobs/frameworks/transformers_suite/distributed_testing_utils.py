"""The module by which Transformers' distributed tests start their ranks, which its sources on PyPI do not contain.

Ranks are processes of torch.multiprocessing on this host. Their backend is gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    pass


def _start_rank_processes(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    mp.spawn(function, args, nprocs)


def _rank(rank: int, function: Callable[..., None], world_size: int, port: int, args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group(_get_distributed_backend(), store=store, rank=rank, world_size=world_size)
    function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def run_distributed(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: the function runs on that number of ranks, with the rank before its arguments."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            # This process keeps the store until all ranks have ended.
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            _start_rank_processes(_rank, (function, world_size, store.port, args), world_size)

        return run

    return decorate
