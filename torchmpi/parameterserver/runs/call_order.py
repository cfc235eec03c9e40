"""The order of the calls of all ranks on servers: what a record has of each call, and the comparison with it.

While an order is recorded or repeated, one call of the job runs at a time, with the number that it has in the order.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import ArgumentError
from .observed_run import KINDS, RECEIVE, SEND, ObservedRule, ObservedServer

if TYPE_CHECKING:
    from .run_record import RunRecord


def checksum(data: torch.Tensor, numbers: tuple[float, ...] = ()) -> int:
    """Return a checksum of contiguous values, and of the numbers of a rule.

    >>> checksum(torch.zeros(2)) == checksum(torch.zeros(1, dtype=torch.float64)) != checksum(torch.zeros(2), (0.1,))
    True
    """
    bits: Any = data.detach().reshape(-1).view(torch.uint8).numpy() if data.numel() else b""
    return zlib.crc32(bits, zlib.crc32(repr(numbers).encode()))


class NumberedCalls:
    """Takes note of the numbers and checksums of calls, of which one runs at a time."""

    def __init__(self) -> None:
        self.position = -1
        """Of the call that runs."""
        self._checksum: int | None = None

    def begin(self, server: ObservedServer, rule: ObservedRule | None, data: torch.Tensor) -> None:
        """Note what is sent, or that values follow."""
        self._checksum = None if rule is None else checksum(data, rule.numbers)

    def end(self, data: torch.Tensor) -> tuple[int, int]:
        """Return the number of the call, and the checksum of its values."""
        return self.position, checksum(data) if self._checksum is None else self._checksum


class RecordedRows:
    """The calls of a recorded order, and the refusal of calls that differ from them."""

    def __init__(self, record: RunRecord, path: object, num_ranks: int, where: str) -> None:
        self.record, self._path, self.where = record, path, where
        self._refusal: ArgumentError | None = None
        """The first one."""
        if record.num_ranks != num_ranks:
            raise ArgumentError(
                f"{where}: {path} cannot be repeated: field 'ranks' is {record.num_ranks}, and there are {num_ranks} "
                "now. Repeat it with as many."
            )
        positions = record.columns["position"]
        rows = np.flatnonzero(positions >= 0)
        self._rows = rows[np.argsort(positions[rows], kind="stable")]
        if not len(rows) or not np.array_equal(positions[self._rows], np.arange(len(rows))):
            raise ArgumentError(
                f"{where}: {path} cannot be repeated: column 'position' has no order of calls. Record the run with "
                "ordered=True."
            )
        self._left: dict[tuple[int, str], deque[int]] = {}
        names = record.about["servers"]
        for row in self._rows:
            key = int(record.columns["rank"][row]), str(names[record.columns["server"][row]])
            self._left.setdefault(key, deque()).append(int(row))

    def take(self, server: ObservedServer) -> tuple[int, int]:
        """Return position and row of the next call of a rank to a server."""
        left = self._left.get((server.world_rank, server.label))
        if not left:
            raise ArgumentError(
                f"{self._of(server)}: the recorded run has no further call of this rank to server {server.label!r}. "
                f"{self._remedy}"
            )
        row = left.popleft()
        return int(self.record.columns["position"][row]), row

    def compare(self, server: ObservedServer, row: int, found: Mapping[str, object]) -> None:
        """Raise if a call differs from a row in one of some columns, or an earlier one has been refused."""
        if self._refusal is not None:  # what comes later differs because of that
            raise self._refusal
        for column, value in found.items():
            recorded = self._value(column, row)
            if value != recorded:
                effect = "Nothing of this send has been applied. " if self._value("kind", row) == KINDS[SEND] else ""
                self._refusal = ArgumentError(
                    f"{self._of(server)}: row {row}, column {column!r}: {recorded!r} was recorded, and the program has "
                    f"{value!r} in its call to {server.label!r}. {effect}{self._remedy}"
                )
                raise self._refusal

    def check_all_taken(self, rank: int) -> None:
        """Raise if a rank has made fewer calls than the recorded one."""
        rows = [row for (owner, _), left in self._left.items() if owner == rank for row in left]
        if rows:
            raise ArgumentError(
                f"{self.where}: replay of {self._path}: row {min(rows)} and {len(rows) - 1} others of rank {rank} have "
                f"not been repeated. {self._remedy}"
            )

    def describe(self, position: int) -> str:
        """Describe the call at a position."""
        if position >= len(self._rows):
            return "no further call"
        row = int(self._rows[position])
        kind, rank = self._value("kind", row), self.record.columns["rank"][row]
        return f"row {row}, a {kind} of rank {rank}"

    def describe_missing(self, position: int) -> str:
        """Describe the call at a position, which the program does not make."""
        return f"replay of {self._path}: the program has not made the call of {self.describe(position)}. {self._remedy}"

    def _value(self, column: str, row: int) -> object:
        value = self.record.columns[column][row].item()
        if column == "kind":
            return KINDS[value]
        if column == "rule":
            return self.record.about["rules"][value] if value >= 0 else ""
        return value

    def _of(self, server: ObservedServer) -> str:
        return f"rank {server.world_rank}: replay of {self._path}"

    @property
    def _remedy(self) -> str:
        about: Mapping[str, Any] = self.record.about
        return (
            "Repeat the run with the same program, data and seeds, and with its versions: torchmpi "
            f"{about.get('version')}, torch {about.get('torch')}, {about.get('threads')} torch threads; or record it "
            "again."
        )


class ComparedCalls(NumberedCalls):
    """Compares each call with its row, a send before it changes anything."""

    def __init__(self, rows: RecordedRows) -> None:
        super().__init__()
        self.rows = rows
        self._row = -1
        self._server: ObservedServer | None = None
        """Of a receive, whose values are compared at its end."""

    def set(self, position: int, row: int) -> None:
        """Begin the turn of a call."""
        self.position, self._row = position, row

    def begin(self, server: ObservedServer, rule: ObservedRule | None, data: torch.Tensor) -> None:
        """Raise unless this is the recorded request."""
        super().begin(server, rule, data)
        self._server = server if rule is None else None
        found = {"kind": KINDS[RECEIVE], "bytes": data.nbytes}
        if rule is not None:
            found = {"kind": KINDS[SEND], "rule": rule.name, "bytes": data.nbytes, "checksum": self._checksum}
        self.rows.compare(server, self._row, found)

    def end(self, data: torch.Tensor) -> tuple[int, int]:
        """Raise if received values differ from the recorded ones; return position and checksum."""
        position, found = super().end(data)
        if self._server is not None:
            self.rows.compare(self._server, self._row, {"checksum": found})
        return position, found
