"""What the kernels of shared memory know of a group: its slots, whose memory is mapped where, and how to wait."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..communicators.call_log import ABORTED, NATIVE
from ..shared_memory import memory_layout
from ..shared_memory.kernels import context
from ..shared_memory.memory_layout import MEMORY, PAYLOAD, REFUSED, RING_LENGTH, SEQUENCE, SIGNATURE, entry, num_slots
from ..shared_memory.shared_tensors import SharedHeap

_EAGER_SPINS, _EAGER_YIELDS = 2000, 2000
# With more ranks than cores, or beside the computation of its own rank, whoever waits is in the way.
_CROWDED_SPINS, _POLITE_SPINS, _POLITE_YIELDS = 200, 50, 50
# Two chunks of each rank on a core are in its second cache, with what they are combined with.
_MOST_CHUNK_BYTES, _CROWDED_CHUNK_BYTES = 256 << 10, 128 << 10
WHOLE_BYTES = 16 << 10
"""Up to this size every rank combines everything itself, which takes one meeting instead of two."""


class SharedGroup:
    """What the kernels know of a group."""

    def __init__(self, group: Any, heap: SharedHeap) -> None:
        size, status_board = group.size, group.status_board
        self.heap, self.status_board, self.size = heap, status_board, size
        self.fields = np.zeros(context.context_words(size), np.int64)
        self.address = int(self.fields.ctypes.data)
        self.mappings = np.zeros((size, context.MAPPINGS_PER_RANK, 2), np.int64)
        self._num_mapped = [0] * size
        slots = num_slots(size)
        self.slot_bytes = (status_board.segment.ticket.num_bytes - memory_layout.slots_begin(size)) // (slots * size)
        fields = self.fields
        fields[context.RANK], fields[context.SIZE] = group.rank, size
        fields[context.ROWS] = status_board.segment.address
        fields[context.SLOTS] = status_board.segment.address + memory_layout.slots_begin(size)
        is_crowded = group.context.is_crowded
        fields[context.NUM_SLOTS], fields[context.CROWDED] = slots, is_crowded
        fields[context.SLOT_BYTES], fields[context.WHOLE_BYTES] = self.slot_bytes, min(WHOLE_BYTES, self.slot_bytes)
        fields[context.MOST_CHUNK_BYTES] = _CROWDED_CHUNK_BYTES if is_crowded else _MOST_CHUNK_BYTES
        fields[context.OWN_SEGMENTS] = heap.table.ctypes.data
        fields[context.MAPPINGS] = self.mappings.ctypes.data
        processes = [group.context.processes.get(rank, 0) for rank in group.world_ranks]
        self._processes = np.array(processes, np.int64)
        fields[context.PROCESSES] = self._processes.ctypes.data if all(processes) else 0
        self._eager = (_CROWDED_SPINS if is_crowded else _EAGER_SPINS), _EAGER_YIELDS
        self.be_patient(polite=False)
        self._rank, self._call_log = group.rank, group.call_log

    def abort(self) -> None:
        """Tell the others that this rank does not finish a call, and count chunks from a number that all can agree on.

        It is greater than all before, so that what a failed call left in the slots and counters is not taken for new.
        """
        if self._call_log.current is None:
            return
        seq = self._call_log.current[0]
        if self._call_log.log_board is not None:
            self._call_log.spoil_entry(NATIVE ^ int(self.fields[context.CHUNKS]))
        elif self.fields[context.LAST_ABORTED] != seq:
            own = self.payload(self._rank, seq) - PAYLOAD
            self.status_board.fields[own + SIGNATURE] ^= (
                ABORTED if self.status_board.fields[own + SEQUENCE] == seq else 0
            )
        self.fields[context.LAST_ABORTED] = seq
        self.status_board.set(self._rank, REFUSED, seq)
        self.fields[context.CHUNKS] = seq << memory_layout.CHUNK_BITS
        self.heap.note_failed_call()

    def expire(self, seq: int) -> None:
        """Let the kernel that waits in this call return."""
        self.fields[context.EXPIRED] = seq

    def be_patient(self, *, polite: bool) -> None:
        """How to wait from now on."""
        spins, yields = (_POLITE_SPINS, _POLITE_YIELDS) if polite else self._eager
        self.fields[context.SPINS], self.fields[context.YIELDS] = spins, yields

    def payload(self, rank: int, seq: int) -> int:
        """Index of the payload of a call among the words of the page."""
        return entry(rank, seq & (RING_LENGTH - 1)) + PAYLOAD

    def map_segment(self, rank: int, seq: int) -> None:
        """Map the segment in which a rank says that its tensor is."""
        at = self.payload(rank, seq) + MEMORY
        key, file, num_bytes = self.status_board.fields[at : at + 3]
        place = self._num_mapped[rank] % context.MAPPINGS_PER_RANK
        self._num_mapped[rank] += 1
        self.mappings[rank, place] = 0, self.heap.map(key, file, num_bytes)
        self.mappings[rank, place, 0] = key
