"""How much the sums of compressed gradients may lack."""

from __future__ import annotations

import torch

import torchmpi as mpi
import torchmpi.nn as mpinn

UNIT = 1 / 254
"""Half of a unit of a byte, which is 1/127 of the largest value of a block."""


def kept(compressor: mpinn.GradientCompressor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks of what they keep for the next step. Collective."""
    own = compressor._state(parameter).get("error", torch.zeros(parameter.shape, dtype=torch.float64))
    return mpi.allreduce(own.double())


def most_kept_by_8_bits(largest: float, num_ranks: int) -> float:
    """Return the most that ranks keep of a value, together, if no gradient of any of them is above `largest`.

    Each rank keeps at most half a unit, of its gradient with what it has kept, and the rank that adds keeps as much of
    the sum with what was kept of it.
    """
    once = num_ranks * largest * UNIT / (1 - UNIT)
    return once + (num_ranks * largest + once) * UNIT / (1 - UNIT)
