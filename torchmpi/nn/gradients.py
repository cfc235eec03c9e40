"""The gradients of a net in one step: which exist on which rank, and whether they are in shared memory.

Gradients that persist over several steps, with ``zero_grad(set_to_none=False)`` or accumulation over several backward
passes, are moved into shared memory at the second call, so that the ranks of one host reduce them in place. The tensors
remain the same objects; only their memory is exchanged. There is then one block per dtype, which one call reduces.
"""

from __future__ import annotations

import re
import struct
import sys
import weakref
import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import GradientError, MismatchError, ReplicaError
from ..session import runtime
from ..tensors import bucket_plan, reused_memory
from .buckets import aligned_offsets, allocate_flat, dense_view
from .replica import Attachment, Replica, attach, attached

_DENSE, _SPARSE, _FAILED, _SCATTERED, _CHANGED = 1, 2, 4, 8, 16
_MIN_SHARED_BYTES = 32 << 10  # of the largest gradient: smaller ones gain nothing
_AGREEMENT = re.compile(r"allreduce\(uint8 \[(\d+)\], bor\)")  # as in the description of the call below
_MOST_NAMES = 6
SHARED_GRADIENTS = "torchmpi_shared_gradients"


_NOTHING_FROZEN = b"\0\0\0\0\xff\xff\xff\xff"


class Presence(NamedTuple):
    """The gradients that exist on any rank: the same on all ranks."""

    dense: Sequence[Tensor]
    """The parameters of which some rank has a dense gradient."""
    sparse: Sequence[Tensor]
    """The parameters of which some rank has a sparse gradient."""
    is_failed: bool
    """Whether backward failed on some rank."""
    is_scattered: bool
    """Whether some rank has its gradients elsewhere than in shared blocks."""
    has_changed: bool
    """Whether some rank has changed gradients since backward, of these parameters or of others."""
    changed: Sequence[Tensor]
    """These parameters."""


class GradientList:
    """The gradients of some parameters on this rank, read once.

    Attributes:
        parameters: The parameters.
        tensors: Their gradients; None where there is none.
        is_dense: Whether each parameter has a dense gradient.
        is_on_host: Whether all parameters are in host memory.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.tensors: list[Tensor | None] = []
        self.is_dense = self.is_on_host = True
        for parameter in parameters:
            gradient = parameter.grad
            self.tensors.append(gradient)
            if gradient is None or gradient.layout is not torch.strided:
                self.is_dense = False
            if not parameter.is_cpu:
                self.is_on_host = False

    def agree(
        self,
        replica: Replica,
        comm: Communicator,
        *,
        failed: bool = False,
        scattered: bool = True,
        changed: Collection[int] = (),
    ) -> Presence:
        """Exchange one byte per parameter to find out which gradients exist on any rank.

        The exchange takes place at every step, since the gradients of other ranks may have changed.

        Args:
            replica: The net, for the names of parameters.
            comm: The communicator of the ranks.
            failed: Whether backward failed on this rank.
            scattered: Whether the gradients of this rank lie elsewhere than in shared blocks.
            changed: The ids of parameters, these or others, whose gradients this rank has changed since backward.

        Raises:
            GradientError: A gradient is sparse on one rank and dense on another; raised on all ranks.
            ReplicaError: The nets of the ranks have different numbers of parameters, or other ones are frozen.
        """
        state = (_FAILED if failed else 0) | (_SCATTERED if scattered else 0) | (_CHANGED if changed else 0)
        present = bytes([_DENSE]) * len(self.tensors) if self.is_dense and not changed else self._flags(changed)
        given = present + self._frozen(replica) + bytes([state])
        codes = reused_memory.take(torch.uint8, len(given))
        codes.array.data[:] = given
        try:
            collectives.allreduce(codes.tensor, op="bor", comm=comm)
        except MismatchError as error:
            if difference := _difference_of_nets(error, replica, self.parameters):
                raise ReplicaError(f"rank {comm.rank}: {difference}") from None
            raise
        found = codes.array.tobytes()
        codes.give_back()
        if found == given and self.is_dense and not (failed or changed):  # no rank has told anything else
            return Presence(self.parameters, (), False, scattered, False, ())
        flags = list(found)
        state, frozen = flags.pop(), flags[len(self.parameters) :]
        del flags[len(self.parameters) :]
        if any(map(int.__and__, frozen, frozen[len(frozen) // 2 :])):
            raise ReplicaError(
                f"rank {comm.rank}: the ranks have frozen different parameters (requires_grad=False), so their "
                "gradients do not belong together. Freeze the same parameters on every rank."
            )
        altered: list[Tensor] = []
        if state & _CHANGED:
            altered = [each for each, flag in zip(self.parameters, flags, strict=True) if flag & _CHANGED]
            flags = [flag & ~_CHANGED for flag in flags]
        dense, sparse = self.parameters, []
        if flags.count(_DENSE) < len(flags):
            if _DENSE | _SPARSE in flags:
                name = replica.name(self.parameters[flags.index(_DENSE | _SPARSE)])
                raise GradientError(
                    f"rank {comm.rank}: the gradient of {name!r} is sparse on one rank and dense on another. "
                    "Use the same kind of layer on every rank."
                )
            pairs = list(zip(self.parameters, flags, strict=True))
            dense = [parameter for parameter, flag in pairs if flag == _DENSE]
            sparse = [parameter for parameter, flag in pairs if flag == _SPARSE]
        return Presence(dense, sparse, bool(state & _FAILED), bool(state & _SCATTERED), bool(state & _CHANGED), altered)

    def _flags(self, changed: Collection[int]) -> bytes:
        """Return the byte of each parameter."""
        flags = []
        for parameter, gradient in zip(self.parameters, self.tensors, strict=True):
            flag = 0 if gradient is None else _DENSE if gradient.layout is torch.strided else _SPARSE
            flags.append(flag | (_CHANGED if id(parameter) in changed else 0))
        return bytes(flags)

    def _frozen(self, replica: Replica) -> bytes:
        """Return a checksum of which parameters of `replica` are frozen, and its complement.

        If the checksums of the ranks are equal, `bor` over the ranks gives complements again.
        """
        if self.parameters is not replica.trainable or len(self.parameters) == len(replica.parameters):
            return _NOTHING_FROZEN
        checksum = zlib.crc32(bytes([parameter.requires_grad for parameter in replica.parameters]))
        return struct.pack("<2I", checksum, ~checksum & 0xFFFFFFFF)


def gradient_or_zeros(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter, which becomes zeros if there is none.

    >>> gradient_or_zeros(torch.ones(2, requires_grad=True))
    tensor([0., 0.])
    """
    if parameter.grad is None:
        dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)  # since torch 2.10
        parameter.grad = torch.zeros_like(parameter, dtype=dtype)
    return parameter.grad


class SharedGradients(Attachment):
    """The gradients of a net at the last call, and their addresses."""

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []
        self._is_settled = False
        """Whether the gradients of the last call have been moved, or will not be moved."""
        self.blocks: list[tuple[int, int]] = []
        """For each shared block the index of its first gradient, and its length; empty if nothing was moved."""

    def move(self, gradients: Sequence[Tensor]) -> None:
        """Move gradients into shared blocks, if they are those of the last call and still in private memory."""
        if not self._are_seen(gradients):
            self._seen = [(weakref.ref(gradient), gradient.data_ptr()) for gradient in gradients]
            self._is_settled, self.blocks = False, []
            return
        if self._is_settled:
            return
        self._is_settled = True
        heap = runtime.current().heap
        if max((gradient.nbytes for gradient in gradients), default=0) < _MIN_SHARED_BYTES:
            return
        if any(not each.is_contiguous() or heap.holds(each.data_ptr()) or _is_aliased(each) for each in gradients):
            return
        self.blocks = [
            (indices[0], _move_to_shared([gradients[index] for index in indices]))
            for indices in bucket_plan.plan_buckets(gradients, sys.maxsize)  # one for each dtype
        ]
        self._seen = [(weakref.ref(gradient), gradient.data_ptr()) for gradient in gradients]

    def flats(self, gradients: Sequence[Tensor | None]) -> list[Tensor] | None:
        """Return the shared blocks as flat tensors, or None unless each gradient is still in them."""
        if not self.blocks or not self._are_seen(gradients):
            return None
        firsts = [gradient.detach() for first, _ in self.blocks if (gradient := gradients[first]) is not None]
        if not all(runtime.current().heap.holds(first.data_ptr()) for first in firsts):
            return None
        return [first.as_strided((numel,), (1,), 0) for first, (_, numel) in zip(firsts, self.blocks, strict=True)]

    def _are_seen(self, gradients: Sequence[Tensor | None]) -> bool:
        """Return whether these are the gradients of the last call, at the same addresses."""
        if len(gradients) != len(self._seen):
            return False
        for gradient, (reference, address) in zip(gradients, self._seen, strict=True):
            if gradient is None or reference() is not gradient or gradient.data_ptr() != address:
                return False
        return True


def _is_aliased(gradient: Tensor) -> bool:
    """Return whether another tensor has the memory of `gradient`, and would keep it, such as a flat one of the program.

    >>> flat = torch.zeros(2)
    >>> _is_aliased(flat), _is_aliased(flat.view(1, 2))
    (False, True)
    """
    num_uses = getattr(torch._C, "_storage_Use_Count", None)
    if num_uses is None:  # another version of torch, with which gradients stay where they are
        return True
    fresh = torch.empty(1, device="cpu")
    return bool(num_uses(gradient.untyped_storage()._cdata) > num_uses(fresh.untyped_storage()._cdata))


def _move_to_shared(gradients: Sequence[Tensor]) -> int:
    """Move gradients into one segment, since each segment costs descriptors, and return its length."""
    offsets, numel = aligned_offsets(gradients)
    flat = allocate_flat(numel, gradients[0]).zero_()  # the gaps are reduced too
    for gradient, offset in zip(gradients, offsets, strict=True):
        view = dense_view(flat, offset, gradient)
        gradient.data = view.copy_(gradient)
    return numel


def shared_gradients(net: nn.Module | None) -> SharedGradients | None:
    """Return the state of the gradients of a net; None for a list of parameters."""
    if net is None:
        return None
    shared: SharedGradients | None = attached(net, SHARED_GRADIENTS)
    if shared is None:
        shared = SharedGradients()
        attach(net, SHARED_GRADIENTS, shared)
    return shared


def _difference_of_nets(error: MismatchError, replica: Replica, parameters: Sequence[Tensor]) -> str:
    """Describe nets whose gradients cannot be compared; '' if the ranks made different calls for another reason."""
    found = {rank: _AGREEMENT.match(call) for rank, call in error.calls.items()}
    counts = {rank: int(match[1]) - 1 - len(_NOTHING_FROZEN) for rank, match in found.items() if match is not None}
    if len(set(counts.values())) < 2:
        return ""
    listing = " and ".join(f"{count} on rank {rank}" for rank, count in sorted(counts.items()))
    more = [repr(name) for name in replica.names(parameters)[min(counts.values()) :]]
    names = ", ".join(more[:_MOST_NAMES]) + (
        f" and {len(more) - _MOST_NAMES} others" if len(more) > _MOST_NAMES else ""
    )
    here = f" If the first ones are the same, this rank has {names} in addition." if more else ""
    return f"The nets differ: the number of parameters is {listing}.{here} Build the same net on every rank."
