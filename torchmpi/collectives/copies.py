"""From the tensors of the program to the memory that the operation of a backend takes, and back.

Each function returns the operation of a backend with what is done before and after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..collective_specs import CollectiveSpec
from ..communicators import call_parts
from ..communicators.group import Group
from ..communicators.plan import Run
from ..tensors import buffers, streams

_orders: weakref.WeakKeyDictionary[Group, streams.Order] = weakref.WeakKeyDictionary()


def in_order(work: Run, group: Group) -> Run:
    """Keep the operations that a group enqueues on its device in order, although the callers' streams may differ."""
    order = _orders.setdefault(group, streams.Order())

    def run(source: Any, destination: Any, root: int) -> Any:
        tensor = destination if source is None else source
        with streams.on_device(tensor):
            order.enter(tensor)
            return work(source, destination, root)

    return run


def settled(work: Run) -> Run:
    """Wait for the device first: the operation takes device memory without regard to streams."""

    def run(source: Any, destination: Any, root: int) -> Any:
        for tensor in (source, destination):
            if tensor is not None:
                streams.settle(tensor)
        return work(source, destination, root)

    return run


def plain_in_order(work: Run, group: Group) -> Run:
    """Return `plain_in_place` of `in_order` in one function, since this is the path of every short call."""
    ordered, is_kept_by = in_order(work, group), _orders[group].is_kept_by

    def run(tensor: torch.Tensor, out: None, root: int) -> torch.Tensor:
        (work if is_kept_by(tensor) else ordered)(tensor, None, root)
        try:  # buffers.touch without a call
            buffers.increment_version((tensor,))
        except RuntimeError:
            buffers.touch(tensor)
        return tensor

    return run


def plain_in_place(spec: CollectiveSpec, work: Run, group: Group) -> Run:
    """Run on the memory of the tensor, or on that of `out`, into which it is copied: both are plain and equal."""

    def run(tensor: torch.Tensor, out: torch.Tensor | None, root: int) -> torch.Tensor:
        if out is not None and spec.receives(group.rank == root):  # otherwise nothing is changed
            if out.is_inference():
                buffers.overwrite(out, tensor)
            else:
                out.copy_(tensor)  # notifies autograd too
            tensor = out
        work(tensor, None, root)
        buffers.touch(tensor)
        return tensor

    return run


def plain_producing(spec: CollectiveSpec, work: Run) -> Run:
    """Run from plain host memory into `out`, plain too and apart from the tensor, or into a new tensor."""

    def run(tensor: torch.Tensor | None, out: torch.Tensor | None, root: int) -> torch.Tensor | None:
        result: torch.Tensor | None = work(tensor, out, root)
        if out is None or result is None:  # gathered by another rank
            return result
        if result is not out:  # which does not fit: the call has ended on all ranks before this one raises
            buffers.copy_result(result, out, spec.name)
        buffers.touch(out)
        return out

    return run


def copying(spec: CollectiveSpec, work: Run, group: Group) -> Run:
    """Run on a plain copy of a tensor that is not plain, or of which the result goes to `out`."""

    def run(tensor: torch.Tensor, out: torch.Tensor | None, root: int) -> torch.Tensor:
        is_root = group.rank == root
        is_written = spec.changes(is_root) if out is None else spec.receives(is_root)
        target = tensor if out is None else out
        begin = call_parts.begin()
        copy = buffers.plain(tensor, to_host=False)
        if out is not None and is_written and copy.data_ptr() == tensor.data_ptr():
            copy = copy.clone()
        if begin and copy.data_ptr() != tensor.data_ptr():
            call_parts.end("staging", begin)
        work(copy, None, root)
        if not is_written:
            return tensor
        if copy.data_ptr() != target.data_ptr() or not buffers.is_direct(target):
            begin = call_parts.begin()
            buffers.overwrite(target, copy)
            if begin:
                call_parts.end("staging", begin)
        else:
            buffers.touch(target)
        return target

    return run


def producing(spec: CollectiveSpec, work: Run, *, takes: bool) -> Run:
    """Run into a new tensor, or into `out`; through the host as a whole if the backend does not take device memory.

    The lengths may differ between ranks, so chunks would not be the same on all of them.
    """

    def run(tensor: torch.Tensor | None, out: torch.Tensor | None, root: int) -> torch.Tensor | None:
        begin = call_parts.begin()
        source = None if tensor is None else buffers.plain(tensor, to_host=not takes)
        if begin and tensor is not None and source is not None and source.data_ptr() != tensor.data_ptr():
            call_parts.end("staging", begin)
        given: torch.Tensor | None = None
        if out is not None and not takes:
            given = torch.empty(out.shape, dtype=out.dtype, device="cpu", pin_memory=out.device.type != "cpu")
        elif out is not None and buffers.is_direct(out) and (source is None or not buffers.overlap(out, source)):
            given = out.detach()
        # The backend determines the shape of the result. If `out` does not fit, the backend allocates memory, so that
        # the call ends on all ranks before this rank raises.
        result: torch.Tensor | None = work(source, given, root)
        if result is None:
            return None
        begin = call_parts.begin()
        target = out
        if target is None:
            target = result if tensor is None else result.to(tensor.device)
        elif result.data_ptr() != target.data_ptr() or result.shape != target.shape or result.dtype != target.dtype:
            buffers.copy_result(result, target, spec.name)
        if begin and result.data_ptr() != target.data_ptr():
            call_parts.end("staging", begin)
        if out is not None:
            buffers.touch(out)
        return target

    return run


def exchanging(work: Run, group: Group, *, on_device: bool) -> Run:
    """Run on lists of one tensor for each rank, staged through the host unless the backend takes device memory."""

    def on_parts(_: torch.Tensor, parts: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]], root: int) -> None:
        work(*parts, root)

    run_parts = in_order(on_parts, group) if on_device else on_parts

    def run(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], root: int) -> None:
        outgoing = [buffers.plain(source, to_host=not on_device) for source in sources]
        incoming = [
            part.detach()
            if (on_device or part.device.type == "cpu") and buffers.is_direct(part)
            else torch.empty(part.shape, dtype=part.dtype, device=part.device if on_device else "cpu")
            for part in destinations
        ]
        run_parts(outgoing[0], (_apart(outgoing, incoming), incoming), root)
        for part, received in zip(destinations, incoming, strict=True):
            if received.data_ptr() != part.data_ptr() or received.device != part.device:
                buffers.overwrite(part, received)
            else:
                buffers.touch(part)

    return run


def _apart(outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the parts to send; copies of those whose memory is received into before all ranks have read it."""
    written = {part.untyped_storage().data_ptr() for part in incoming}
    if written.isdisjoint([part.untyped_storage().data_ptr() for part in outgoing]):
        return outgoing
    # One copy for all ranks, if all get the same tensor.
    copies = {
        (part.data_ptr(), part.numel()): part.clone()
        for part in {(each.data_ptr(), each.numel()): each for each in outgoing}.values()
        if any(buffers.overlap(part, each) for each in incoming)
    }
    return [copies.get((part.data_ptr(), part.numel()), part) for part in outgoing]
