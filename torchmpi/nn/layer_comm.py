"""The communicator of a layer that is divided over ranks, and the linear functions that such layers consist of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import ArgumentError
from ..tensors.partition import part_of
from .replica import Attachment

_NUM_SAMPLES = 64
_MAX_DIFFERENCE = 0.1
"""Relative difference of equal inputs: rounding of 16-bit numbers that earlier layers amplify; others differ by 1."""


class LayerComm(Attachment):
    """The communicator of a layer, with operations on a replicated tensor or on one tensor per rank.

    Copies of the layer share it; pickles do not contain it.
    """

    def __init__(self, comm: Communicator, layer: str) -> None:
        """Make the operations of a layer over `comm`; `layer` is its noun in messages."""
        self.comm = comm
        self._layer = layer
        self._checked: set[bool] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerComm:
        return self

    def check_same_input(self, input: Tensor, is_training: bool = True) -> None:
        """Raise on all ranks if their inputs differ, in the first call of each mode; later ones do not communicate."""
        if is_training not in self._checked and self.comm.size > 1:
            self._checked.add(is_training)
            self._compare(input)

    @torch.no_grad()
    def _compare(self, input: Tensor) -> None:
        values = torch.view_as_real(input) if input.is_complex() else input
        values = values.reshape(-1)
        # The same number of values on all ranks, although their inputs may have different lengths.
        places = torch.arange(_NUM_SAMPLES, device=values.device) * max(len(values) - 1, 0) // (_NUM_SAMPLES - 1)
        sample = values[places].tolist() if len(values) else [0.0] * _NUM_SAMPLES
        mine = torch.tensor([[*sample, len(values)]], dtype=torch.float64, device="cpu")
        samples = collectives.allgather(mine, comm=self.comm)
        lengths, samples = samples[:, -1], samples[:, :-1].nan_to_num()
        errors = (samples - samples[0]).norm(dim=1)
        if bool((lengths != lengths[0]).any()) or bool((errors > _MAX_DIFFERENCE * samples[0].norm()).any()):
            raise ArgumentError(
                f"rank {self.comm.rank}: the ranks of {self.comm!r}, which share {self._layer}, passed different "
                "inputs to it. Give the ranks that share a layer the same part of the data, for instance by "
                "DistributedSampler(dataset, num_replicas=..., rank=...) with the number and the index of the groups, "
                "and random layers the same seed."
            )

    def part(self, length: int) -> tuple[int, int]:
        """Return begin and length of this rank's part of `length` features."""
        return part_of(length, self.comm.size, self.comm.rank)

    def reduce(self, part: Tensor) -> Tensor:
        """Add partial tensors; the sum is replicated."""
        copy = part.detach().clone(memory_format=torch.contiguous_format)
        total: Tensor = collectives.allreduce(copy, comm=self.comm)
        return total

    def replicate(self, whole: Tensor) -> Tensor:
        """Convert a replicated tensor to one partial tensor per rank."""
        return whole.view_as(whole)

    def narrow(self, whole: Tensor) -> Tensor:
        """Select the features of this rank from a replicated tensor."""
        return whole.narrow(-1, *self.part(whole.shape[-1]))

    def gather(self, part: Tensor) -> Tensor:
        """Concatenate the features of all ranks in rank order; the result is replicated."""
        whole: Tensor = collectives.allgather(part.detach().movedim(-1, 0).contiguous(), comm=self.comm)
        return whole.movedim(0, -1)
