"""To a user of long calls over hosts: all blocks of sums lie in their memory, for any hosts, ranks and rows."""

from __future__ import annotations

import itertools

from torchmpi.backends.call_comparison import MOST_LONG_BYTES, long_memory_bytes
from torchmpi.backends.long_calls import block_begin, padded_rows


def test_all_blocks_lie_in_the_memory():
    """Regression: of one row each block has its length, and half of the blocks were behind the memory."""
    numbers = (*range(1, 12), 31, 32, 63, 64)
    for num_hosts, num_local, item_bytes in itertools.product(numbers, numbers, (1, 4, 8)):
        size = num_hosts * num_local
        for num_rows in {1, 2, 3, 7, size - 1, size, size + 1, 5 * size + 1, 1000} - {0}:
            row_bytes = MOST_LONG_BYTES // padded_rows(num_rows, size) // item_bytes * item_bytes
            end = block_begin(num_rows, row_bytes, size, 2 * num_hosts, is_wider=True)
            assert end <= long_memory_bytes(num_hosts), (num_hosts, num_local, num_rows)
