"""The store of torch through which ranks meet that no MPI launcher has started."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING or torch.distributed.is_available():
    from torch._C._distributed_c10d import Store, TCPStore
else:  # a torch without process groups
    Store = object


def open_tcp_store(address: str, port: int, size: int, is_server: bool, timeout: timedelta, **options: Any) -> Store:
    """Open or join a TCPStore that does not wait for the others, also where torch was built without libuv (Debian)."""
    options |= {"wait_for_workers": False}
    try:
        return TCPStore(address, port, size, is_server, timeout, **options)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        return TCPStore(address, port, size, is_server, timeout, use_libuv=False, **options)
