"""Lossy compression of the gradients that are sent between hosts, with error feedback.

The ranks of a host add their gradients in full precision; the first rank of each host exchanges compressed sums with
those of the other hosts, and broadcasts the result inside its host. The compression error is added to the next gradient
(error feedback), so that over the steps no part of a gradient is lost, only delayed.

All ranks get the same bits: received values are decoded element by element, by operations that IEEE 754 defines.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import collectives
from ..communicators.communicator import Communicator, NullCommunicator
from ..communicators.group_of_ranks import make
from ..errors import ArgumentError, rank_prefix
from ..tensors import streams

_BLOCK = 256
"""The number of values that share one scale in :class:`EightBit`."""
_SEED = 1


class _Levels(NamedTuple):
    """The communicators of one exchange: the ranks of a host, and the first ranks of all hosts."""

    intra: Communicator | None
    """None if the host has one rank, or if ranks are not taken together by host."""
    inter: Communicator | NullCommunicator


class GradientView(NamedTuple):
    """A parameter, and its gradient as a view of a flat tensor."""

    parameter: Tensor
    gradient: Tensor


class GradientCompressor(ABC):
    """Base class of the compressors that can be passed as ``compression=``.

    A compressor belongs to one net, as it stores the compression error of each gradient. All ranks pass a compressor
    with the same options.

    Args:
        within_hosts: Compress also what the ranks of one host exchange. Without a network between them this is slower.

    Attributes:
        payload_bytes: The bytes that this rank has given to collectives between hosts so far.
    """

    def __init__(self, *, within_hosts: bool = False) -> None:
        self.within_hosts = within_hosts
        self.payload_bytes = 0
        self._levels: weakref.WeakKeyDictionary[Communicator, _Levels] = weakref.WeakKeyDictionary()
        self._states: dict[int, tuple[weakref.ref[Tensor], dict[str, Tensor]]] = {}
        self._loaded: list[dict[str, Tensor]] = []

    def applies(self, comm: Communicator) -> bool:
        """Return whether ranks of `comm` exchange compressed gradients: whether it has several hosts."""
        return comm.size > 1 and (self.within_hosts or comm.num_nodes > 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the compression errors of this rank, for a checkpoint of this rank.

        Example:
            torch.save(compressor.state_dict(), f"compressor-{mpi.rank()}.pt")
        """
        return {
            "parameters": [dict(state) for state in (*(state for _, state in self._states.values()), *self._loaded)]
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with a state of the same rank, on the same number of ranks and hosts; before the first step.

        Args:
            state_dict: The result of :meth:`state_dict`.

        Raises:
            ArgumentError: The compressor was used already.

        Example:
            compressor.load_state_dict(torch.load(f"compressor-{mpi.rank()}.pt"))
        """
        if self._states:
            raise ArgumentError(
                f"{rank_prefix()}load_state_dict(): the compressor was used already. Load the state before training."
            )
        self._loaded = [dict(state) for state in state_dict["parameters"]]

    def prepare(self, comm: Communicator) -> None:
        """Create the communicators for `comm`. The first call is collective over `comm`; later calls do nothing."""
        if comm in self._levels or not self.applies(comm):
            return
        by_host: dict[int, list[int]] = {}
        for rank, member in enumerate(comm.intra.placement.members):
            by_host.setdefault(rank if self.within_hosts else member.group, []).append(rank)
        hosts = list(by_host.values())
        intra: Communicator | None = None
        for ranks in hosts:
            if len(ranks) > 1:
                made = make(comm.intra, ranks, f"{comm.name} compression, host of {ranks[0]}")
                intra = made if isinstance(made, Communicator) else intra
        inter = make(comm.intra, [ranks[0] for ranks in hosts], f"{comm.name} compression")
        self._levels[comm] = _Levels(intra, inter)

    def release(self, comm: Communicator) -> None:
        """Free the communicators for `comm`. Collective over `comm`."""
        for made in self._levels.pop(comm, ()):
            if made is not None:
                made.free()

    def start(
        self, flat: Tensor, members: Sequence[GradientView], comm: Communicator, divisor: int
    ) -> Callable[[], None]:
        """Launch the reduction of `flat` in place and return the function that finishes it."""
        levels = self._levels[comm]
        work = flat.float()  # flat itself, if it is float32
        if levels.intra is not None:
            collectives.reduce(work, 0, comm=levels.intra)
        finish_exchange: Callable[[], object] | None = None
        earlier: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        if isinstance(levels.inter, Communicator):
            earlier = [(state, dict(state)) for state in (self._state(parameter) for parameter, _ in members)]
            finish_exchange = self._exchange(work, _views(work, flat, members), levels.inter)

        def finish() -> None:
            if finish_exchange is not None:
                finish_exchange()
            if levels.intra is not None:
                collectives.broadcast(work, 0, comm=levels.intra)
            streams.use_here(work)
            if earlier and not work.isfinite().all():  # an overflow: a GradScaler leaves out the step
                for state, before in earlier:
                    state.clear()
                    state.update(before)
            if divisor != 1:
                work.div_(divisor)
            if work is not flat:
                flat.copy_(work)

        return finish

    @abstractmethod
    def _exchange(self, work: Tensor, members: Sequence[GradientView], comm: Communicator) -> Callable[[], object]:
        """Begin to replace `work` by its sum over `comm`; return the function that ends it."""

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter."""
        reference, state = self._states.get(id(parameter), (None, {}))
        if reference is None or reference() is not parameter:
            state = self._loaded.pop(0) if self._loaded else {}
            self._states[id(parameter)] = weakref.ref(parameter), state
        return state

    def _add_errors(self, members: Sequence[GradientView]) -> None:
        for parameter, gradient in members:
            error = self._state(parameter).get("error")
            if error is not None:
                gradient.add_(error)

    def _keep_errors(self, members: Sequence[GradientView], errors: Sequence[Tensor]) -> None:
        for (parameter, _), error in zip(members, errors, strict=True):
            self._state(parameter)["error"] = error

    def _count(self, payload: Tensor) -> Tensor:
        self.payload_bytes += payload.nbytes
        return payload


def _views(work: Tensor, flat: Tensor, members: Sequence[GradientView]) -> list[GradientView]:
    """Return the members as views of `work`, which has the length of `flat`."""
    offset = work.storage_offset() - flat.storage_offset()
    return [
        GradientView(parameter, work.as_strided(view.size(), view.stride(), view.storage_offset() + offset))
        for parameter, view in members
    ]


class EightBit(GradientCompressor):
    """Send 8 bits per value, and one scale of 32 bits per 256 values.

    Each rank receives a part of the values of all ranks, adds them in float32 in the order of the ranks, and sends the
    8-bit sum to all. Both roundings have error feedback. Between two hosts, each sends 0.26 of the bytes of float32.

    Args:
        within_hosts: As for :class:`GradientCompressor`.

    Example:
        compressor = mpinn.EightBit()
        mpinn.synchronize_gradients(model, compression=compressor)
    """

    def _exchange(self, work: Tensor, members: Sequence[GradientView], comm: Communicator) -> Callable[[], object]:
        self._add_errors(members)
        chunk = -(-work.numel() // (comm.size * _BLOCK)) * _BLOCK
        padded = torch.nn.functional.pad(work, (0, chunk * comm.size - work.numel()))
        rows = _quantize(padded.view(comm.size, chunk))
        lost = work - _dequantize(rows).view(-1)[: work.numel()]
        self._keep_errors(members, [view for _, view in _views(lost, work, members)])
        handle = collectives.alltoall_async(self._count(rows), comm=comm)

        def finish() -> None:
            received = _dequantize(handle.wait())
            total = received[0].clone()
            for row in received[1:]:
                total += row
            state = self._state(members[0].parameter)
            residue = state.get("residue")
            if residue is not None and residue.shape == total.shape:
                total += residue
            row = _quantize(total.unsqueeze(0))
            state["residue"] = total - _dequantize(row)[0]
            totals = collectives.allgather(self._count(row), comm=comm)
            work.copy_(_dequantize(totals).view(-1)[: work.numel()])

        return finish


def _quantize(rows: Tensor) -> Tensor:
    """Return rows of bytes: one per value, and four per block of values.

    >>> _dequantize(_quantize(torch.tensor([[-1.27, 0.4] + [0.0] * 254])))[0, :2]
    tensor([-1.2700,  0.4000])
    """
    blocks = rows.reshape(rows.shape[0], -1, _BLOCK)
    scales = blocks.abs().amax(dim=2) / 127
    # A block of zeros has the scale 0. One with an infinite value or NaN has a scale that makes all its values so.
    whole = (blocks / scales.unsqueeze(2)).nan_to_num(0, 0, 0).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([whole.flatten(1).view(torch.uint8), scales.view(torch.uint8)], dim=1)


def _dequantize(rows: Tensor) -> Tensor:
    num_blocks = rows.shape[1] // (_BLOCK + 4)
    whole = rows[:, : num_blocks * _BLOCK].view(torch.int8)
    scales = rows[:, num_blocks * _BLOCK :].contiguous().view(torch.float32)
    return (whole.reshape(rows.shape[0], -1, _BLOCK) * scales.unsqueeze(2)).flatten(1)


class TopK(GradientCompressor):
    """Send the largest values of each bucket, with their positions.

    Args:
        fraction: The part of the values that is sent; at least one of each bucket.
        within_hosts: As for :class:`GradientCompressor`.

    Raises:
        ArgumentError: `fraction` is not above 0 and at most 1.

    Example:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = mpinn.DistributedOptimizer(optimizer, model, compression=mpinn.TopK(0.01))
    """

    def __init__(self, fraction: float = 0.01, *, within_hosts: bool = False) -> None:
        super().__init__(within_hosts=within_hosts)
        if not isinstance(fraction, float | int) or not 0 < fraction <= 1:
            raise ArgumentError(
                f"{rank_prefix()}TopK(fraction={fraction!r}): the part of the values that is sent, above 0 and up to 1."
            )
        self.fraction = fraction

    def _exchange(self, work: Tensor, members: Sequence[GradientView], comm: Communicator) -> Callable[[], object]:
        self._add_errors(members)
        num_sent = max(1, math.ceil(self.fraction * work.numel()))
        indices = work.abs().topk(num_sent, sorted=False).indices
        row = torch.cat([indices.int(), work[indices].view(torch.int32)]).unsqueeze(0)
        lost = work.index_fill(0, indices, 0)
        self._keep_errors(members, [view for _, view in _views(lost, work, members)])
        handle = collectives.allgather_async(self._count(row), comm=comm)

        def finish() -> None:
            work.zero_()
            for sent in handle.wait():
                # The positions of one rank differ, so each element is added to once, whatever the order.
                work.index_add_(0, sent[:num_sent].long(), sent[num_sent:].view(torch.float32))

        return finish


class PowerSGD(GradientCompressor):
    """Send two narrow matrices whose product approximates a gradient (Vogels, Karimireddy, Jaggi 2019).

    One step of a power iteration that begins with the result of the step before. Gradients of one dimension, and
    matrices that two narrow ones would not make smaller, are sent as they are. Dimensions after the first are joined.

    Args:
        rank: The width of the narrow matrices.
        within_hosts: As for :class:`GradientCompressor`.

    Raises:
        ArgumentError: `rank` is below 1.

    Example:
        mpinn.register_async_backward(model, compression=mpinn.PowerSGD(4))
    """

    def __init__(self, rank: int = 2, *, within_hosts: bool = False) -> None:
        super().__init__(within_hosts=within_hosts)
        if not isinstance(rank, int) or rank < 1:
            raise ArgumentError(
                f"{rank_prefix()}PowerSGD(rank={rank!r}): the width of the narrow matrices is an integer, at least 1."
            )
        self.rank = rank

    def _exchange(self, work: Tensor, members: Sequence[GradientView], comm: Communicator) -> Callable[[], object]:
        narrow: list[GradientView] = []
        exact: list[Tensor] = []
        for member in members:
            if self._is_narrowed(member.gradient):
                narrow.append(member)
            else:
                exact.append(member.gradient)
        self._add_errors(narrow)
        matrices = [gradient.flatten(1) for _, gradient in narrow]  # copies, unless they are contiguous
        lefts = [matrix @ self._right(member, matrix) for member, matrix in zip(narrow, matrices, strict=True)]
        sent = self._count(_packed([*exact, *lefts], work))
        handle = collectives.allreduce_async(sent, comm=comm)

        def finish() -> None:
            handle.wait()
            *totals, rest = sent.split([*(each.numel() for each in exact), sum(each.numel() for each in lefts)])
            for gradient, total in zip(exact, totals, strict=True):
                gradient.copy_(total.view(gradient.shape))
            if not narrow:
                return
            # One rank makes them orthogonal, as the bits of a decomposition depend on the processor.
            bases = _unpacked(rest, lefts)
            if comm.rank == 0:
                for basis in bases:
                    basis.copy_(torch.linalg.qr(basis)[0])
            collectives.broadcast(self._count(rest), 0, comm=comm)
            own = [matrix.t() @ basis for matrix, basis in zip(matrices, bases, strict=True)]
            rights = _packed(own, work)
            collectives.allreduce(self._count(rights), comm=comm)
            errors = []
            for member, matrix, basis, mine, right in zip(
                narrow, matrices, bases, own, _unpacked(rights, own), strict=True
            ):
                errors.append((matrix - _product(basis, mine)).view(member.gradient.shape))
                member.gradient.copy_(_product(basis, right).view(member.gradient.shape))
                self._state(member.parameter)["right"] = right.clone()
            self._keep_errors(narrow, errors)

        return finish

    def _is_narrowed(self, gradient: Tensor) -> bool:
        if gradient.dim() < 2 or gradient.numel() == 0:
            return False
        height, width = gradient.shape[0], gradient[0].numel()
        return self.rank <= min(height, width) and (height + width) * self.rank < height * width

    def _right(self, member: GradientView, matrix: Tensor) -> Tensor:
        """Return the right matrix of the last step; random numbers at first."""
        right = self._state(member.parameter).get("right")
        if right is None:
            generator = torch.Generator("cpu").manual_seed(_SEED)
            right = torch.randn(matrix.shape[1], self.rank, generator=generator, device="cpu").to(matrix.device)
        return right


def _packed(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors]) if tensors else like.new_empty(0)


def _unpacked(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right.t()`` by products and sums of elements, whose bits are the same on every processor."""
    total = left[:, :1] * right[:, 0]
    for column in range(1, left.shape[1]):
        total += left[:, column : column + 1] * right[:, column]
    return total
