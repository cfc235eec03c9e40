"""Point-to-point messages of a process group: nonblocking messages with tags, also from any source."""

from __future__ import annotations

import torch

from ..collectives.message_handle import MessageHandle
from ..communicators.group import Group
from ..errors import ArgumentError, CommunicatorError
from ..tensors import buffers, writable

MAX_TAG = (1 << 20) - 1
"""The greatest tag of a user; current MPI libraries permit larger ones, which the monitored barrier uses."""
ARRIVED_TAG, ANSWER_TAG = MAX_TAG + 1, MAX_TAG + 2


def send(group: Group, tensor: torch.Tensor, peer: int, tag: int) -> MessageHandle:
    """Start to send a tensor, which must not change until the message has ended."""
    _check(group, tensor, "send", peer, tag)
    return MessageHandle(group, "send", tensor, peer, tag, is_receive=False).start()


def receive(group: Group, tensor: torch.Tensor, peer: int | None, tag: int) -> MessageHandle:
    """Start to receive a tensor of the sender's length, from one rank or from any (None)."""
    _check(group, tensor, "recv", peer, tag)
    return MessageHandle(group, "recv", tensor, peer, tag, is_receive=True).start()


def _check(group: Group, tensor: torch.Tensor, name: str, peer: int | None, tag: int) -> None:
    what = f"{group.where}: {name}"
    check_open(group, what)
    buffers.check(tensor, what, written=name == "recv")
    if name == "recv":
        writable.refuse_read_only(tensor, group.where, name)
    if peer is not None and not 0 <= peer < group.size:
        raise ArgumentError(f"{what}: {peer} is not a rank of this group. Use 0 to {group.size - 1}.")
    if not 0 <= tag <= MAX_TAG:
        raise ArgumentError(f"{what}: tag={tag} is out of range. Use 0 to {MAX_TAG}.")


def check_open(group: Group, what: str) -> None:
    """Raise if the group has been destroyed."""
    if group.call_queue.closed:
        raise CommunicatorError(f"{what}: {group.name} has been destroyed. Create a new one.")
