"""The times of calls of simulated workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ArgumentError
from ..runs.observed_run import RECEIVE, SEND

if TYPE_CHECKING:
    from ..runs.run_record import RunRecord

__all__ = ["SimulatedNetwork"]


@dataclass(frozen=True)
class SimulatedNetwork:
    """Between simulated workers and servers: a call takes two latencies, and its bytes over the bandwidth.

    Calls of different workers do not slow each other down.

    Args:
        latency: Seconds from a worker to the servers, and back. Default: about that within a host.
        bandwidth: Bytes per second of one worker.

    Raises:
        ArgumentError: The latency is negative, or the bandwidth is not positive.

    Example:
        >>> SimulatedNetwork(latency=0.001, bandwidth=1e6).times(0.0, 1000, is_send=True)
        (0.002, 0.003)
    """

    latency: float = 10e-6
    bandwidth: float = 4e9

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ArgumentError(
                f"{self}: expected a latency in seconds from 0, and a bandwidth in bytes per second above 0."
            )

    def times(self, begin: float, num_bytes: int, *, is_send: bool) -> tuple[float, float]:
        """Return when a call is served that begins at a time, and when it ends.

        Args:
            begin: When the worker begins.
            num_bytes: Bytes that it sends or receives.
            is_send: Whether it sends them; then they arrive before the call is served.

        Returns:
            Both times.

        Example:
            >>> SimulatedNetwork(latency=0.001, bandwidth=1e6).times(0.0, 1000, is_send=False)
            (0.001, 0.003)
        """
        moving = num_bytes / self.bandwidth
        served = begin + self.latency + (moving if is_send else 0.0)
        return served, served + self.latency + (0.0 if is_send else moving)

    @classmethod
    def of(cls, record: RunRecord) -> SimulatedNetwork:
        """Return the network with the times of the calls of a recorded run.

        The latency is that of the shortest calls (medians), and the bandwidth follows from the longest ones.

        Args:
            record: The record.

        Returns:
            The network.

        Raises:
            ArgumentError: The record has no calls.

        Example:
            ps.simulate(train, 64, network=ps.SimulatedNetwork.of(ps.read_run("run.npz")))
        """
        columns = record.columns
        calls = np.isin(columns["kind"], (SEND, RECEIVE)) & (columns["bytes"] > 0)
        if not calls.any():
            raise ArgumentError(f"{record} has no sends and receives, so that it has no times of a network.")
        seconds, num_bytes = (columns["end"] - columns["begin"])[calls], columns["bytes"][calls]
        sizes = np.unique(num_bytes)
        least, most = (float(np.median(seconds[num_bytes == size])) for size in (sizes[0], sizes[-1]))
        rate = (sizes[-1] - sizes[0]) / (most - least) if most > least else cls.bandwidth
        return cls(least / 2, float(rate))
