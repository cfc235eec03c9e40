"""Point-to-point messages of a process group: nonblocking messages with tags, also from any source."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..collectives.message_handle import MessageHandle
from ..collectives.short_messages import cache_message, receive_later
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..errors import ArgumentError, CommunicatorError
from ..session import runtime
from ..shared_memory import fast_path
from ..tensors import buffers, writable
from .work import EndedMessage, GroupWorks, MessageWork

MAX_TAG = (1 << 20) - 1
"""The greatest tag of a user; current MPI libraries permit larger ones, which the monitored barrier uses."""
ARRIVED_TAG, ANSWER_TAG = MAX_TAG + 1, MAX_TAG + 2


def send(communicator: Communicator, works: GroupWorks, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
    """Start to send a tensor, which must not change until the message has ended."""
    group, key = communicator.intra, fast_path.joint_key(peer, tag)
    message = fast_path.send(tensor, None, key, communicator, None)
    if message is tensor:
        return EndedMessage(tensor, group.rank)
    if message is None:
        _check(group, tensor, "send", peer, tag)
        if buffers.is_plain(tensor):
            cache_message("send", group, tensor, key, communicator, -1, peer, tag, is_background=True)
        message = MessageHandle(group, "send", tensor, peer, tag, is_receive=False).start()
    return MessageWork(message, [tensor], works, group.timeout_seconds)


def receive(
    communicator: Communicator, works: GroupWorks, tensor: torch.Tensor, peer: int | None, tag: int
) -> dist.Work:
    """Start to receive a tensor of the sender's length, from one rank or from any (None)."""
    group, key = communicator.intra, None if peer is None else fast_path.joint_key(peer, tag)
    message: Handle[Any] | None = None if key is None else receive_later(tensor, key, communicator)
    if message is None:
        runtime.current()  # raises in a forked child
        _check(group, tensor, "recv", peer, tag)
        if peer is not None and buffers.is_plain(tensor):
            cache_message("recv", group, tensor, key, communicator, peer, -1, tag, is_background=True)
        message = MessageHandle(group, "recv", tensor, peer, tag, is_receive=True).start()
    return MessageWork(message, [tensor], works, group.timeout_seconds)


def _check(group: Group, tensor: torch.Tensor, name: str, peer: int | None, tag: int) -> None:
    what = f"{group.where}: {name}"
    check_open(group, what)
    buffers.check(tensor, what, written=name == "recv")
    if name == "recv":
        writable.refuse_read_only(group.where, name, tensor)
    if peer is not None and not 0 <= peer < group.size:
        raise ArgumentError(f"{what}: {peer} is not a rank of this group. Use 0 to {group.size - 1}.")
    if not 0 <= tag <= MAX_TAG:
        raise ArgumentError(f"{what}: tag={tag} is out of range. Use 0 to {MAX_TAG}.")


def check_open(group: Group, what: str) -> None:
    """Raise if the group has been destroyed."""
    if group.call_queue.closed:
        raise CommunicatorError(f"{what}: {group.name} has been destroyed. Create a new one.")
