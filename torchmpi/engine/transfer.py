"""Bring batches to the device the network is on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .state import Sample


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `function` to every tensor in nested tuples, lists and mappings; leave everything else as it is.

    >>> map_tensors(torch.neg, (torch.ones(1), ["label"]))
    (tensor([-1.]), ['label'])
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


class Transfer:
    """Copies batches to a device. On a GPU the copies go over a stream of their own, under the running step.

    transfer = Transfer(torch.device("cuda:0"))
    sample = transfer.adopt(transfer.send(sample))   # send() may run in another thread
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, sample: Sample) -> Sample:
        """Copy a batch; it is complete when this returns.

        >>> Transfer(torch.device("cpu")).send(Sample(torch.ones(1), 0)).input
        tensor([1.])
        """
        if self._stream is None:
            return Sample(*(map_tensors(lambda t: t.to(self.device), part) for part in sample))
        with torch.cuda.stream(self._stream):
            sent = Sample(*(map_tensors(lambda t: t.to(self.device, non_blocking=True), part) for part in sample))
        self._stream.synchronize()
        return sent

    def adopt(self, sample: Sample) -> Sample:
        """Make a batch that was sent safe to use on the stream of the calling thread.

        >>> Transfer(torch.device("cpu")).adopt(Sample(1, 2))
        Sample(input=1, target=2)
        """
        if self._stream is not None:
            # The memory belongs to the copy stream: without this it would be given to a later copy as soon as
            # the batch is dropped, although kernels of the step may still have to read it.
            current = torch.cuda.current_stream(self.device)
            for part in sample:
                map_tensors(lambda t: t.record_stream(current) or t, part)  # type: ignore[func-returns-value]
        return sample
