"""Mixing matrices of gossip: which share of its values a worker gives to which neighbors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...argument_types import checks_types
from ...errors import ArgumentError, kind_of

__all__ = ["exponential_mixing", "graph_mixing", "ring_mixing", "spectral_gap"]

Mixing = Tensor | Callable[[int], Tensor]
"""A matrix, or a function of the number of workers that returns one."""


@checks_types
def ring_mixing(size: int) -> Tensor:
    """Return the mixing matrix of a ring: a third for the worker itself and for each of its two neighbors.

    Args:
        size: Number of workers.

    Returns:
        The matrix: row i, column j is the share that worker j gives to worker i. It is symmetric.

    Example:
        >>> ring_mixing(2)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]], dtype=torch.float64)
    """
    return graph_mixing(size, [(rank, (rank + 1) % size) for rank in range(size) if size > 1])


@checks_types
def exponential_mixing(size: int) -> Tensor:
    """Return the mixing matrix of the exponential graph: worker j gives equal shares to itself and to j + 1, 2, 4, ...

    Its spectral gap falls with the logarithm of the number of workers, that of a ring with the square of the number.

    Args:
        size: Number of workers.

    Returns:
        The matrix, as for :func:`ring_mixing`. It is not symmetric: for push-sum (:class:`SGPUpdate`).

    Example:
        >>> exponential_mixing(4)[:, 0].tolist()[1:]
        [0.3333333333333333, 0.3333333333333333, 0.0]
    """
    offsets = [0] + [1 << power for power in range(max(size - 1, 0).bit_length())]
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        for offset in offsets:
            matrix[(rank + offset) % size, rank] += 1 / len(offsets)
    return matrix


@checks_types
def graph_mixing(size: int, edges: Iterable[tuple[int, int]]) -> Tensor:
    """Return the Metropolis-Hastings matrix of any undirected graph: ``1 / (1 + max(degree of i, degree of j))``.

    Args:
        size: Number of workers.
        edges: Pairs of workers that are neighbors.

    Returns:
        The matrix, as for :func:`ring_mixing`: symmetric, with rows and columns that add up to 1.

    Raises:
        ArgumentError: An edge has a worker that does not exist.

    Example:
        >>> graph_mixing(3, [(0, 1), (0, 2)])[0].tolist()
        [0.33333333333333337, 0.3333333333333333, 0.3333333333333333]
    """
    neighbors = torch.zeros(size, size, dtype=torch.bool)
    for first, second in edges:
        if not (0 <= first < size and 0 <= second < size):
            raise ArgumentError(f"graph_mixing: edge {(first, second)}: the workers are 0 to {size - 1}.")
        if first != second:
            neighbors[first, second] = neighbors[second, first] = True
    degrees = neighbors.sum(0)
    matrix = neighbors / (1.0 + torch.maximum(degrees[:, None], degrees[None, :]).double())
    return matrix + torch.diag(1 - matrix.sum(0))


@checks_types
def spectral_gap(matrix: Tensor) -> float:
    """Return 1 minus the second largest modulus of the eigenvalues: how fast gossip reaches a consensus.

    Args:
        matrix: A mixing matrix.

    Returns:
        The gap: 1 for a consensus in one round, 0 if the graph is not connected.

    Example:
        >>> round(spectral_gap(ring_mixing(8)), 3), round(spectral_gap(exponential_mixing(8)), 3)
        (0.195, 0.5)
    """
    moduli = torch.linalg.eigvals(matrix.double()).abs().sort(descending=True).values
    return 1.0 - float(moduli[1]) if len(moduli) > 1 else 1.0


def checked_mixing(mixing: Mixing, size: int, what: str, *, symmetric: bool) -> Tensor:
    """Return the mixing matrix for a number of workers, or raise an error that begins with `what`."""
    matrix = mixing(size) if callable(mixing) else mixing
    if not isinstance(matrix, Tensor) or matrix.shape != (size, size):
        found = list(matrix.shape) if isinstance(matrix, Tensor) else kind_of(matrix)
        raise ArgumentError(
            f"{what}: the mixing matrix is {found}, and there are {size} workers. Pass a matrix of that size, or a "
            "function of the number of workers such as ps.ring_mixing."
        )
    matrix = matrix.double()
    worst = float((matrix.sum(0) - 1).abs().max())
    if not bool((matrix >= 0).all()) or not worst < 1e-6:
        raise ArgumentError(f"{what}: the shares of each worker, the columns of the mixing matrix, must add up to 1.")
    if symmetric and not torch.allclose(matrix, matrix.T):
        raise ArgumentError(
            f"{what}: two workers average with each other, so the mixing matrix must be symmetric: ps.ring_mixing, or "
            "ps.graph_mixing for any graph. SGPUpdate takes other matrices."
        )
    if size > 1 and not spectral_gap(matrix) > 1e-9:
        raise ArgumentError(
            f"{what}: with this mixing matrix the workers never reach a consensus. Connect the graph, and let workers "
            "keep a share."
        )
    return matrix
