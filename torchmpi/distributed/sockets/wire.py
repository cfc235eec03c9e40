"""What goes over a connection: frames, each a head of fixed length and, for a message, its bytes."""

from __future__ import annotations

import struct

HEAD = struct.Struct("<QQiB3x")
"""Context and length of a message, its tag, and the kind of frame. An abort has in the first place the rank that began
it, and its status for a tag."""
MESSAGE, GOODBYE, ABORT = range(3)

GREETING = struct.Struct("<16sI")
"""What who connects says first: the secret of the job, and its rank."""
SECRET_BYTES = 16


def head(context: int, tag: int, num_bytes: int, kind: int = MESSAGE) -> bytes:
    """The head of a frame.

    >>> len(head(7, 1, 1 << 40))
    24
    """
    return HEAD.pack(context, num_bytes, tag, kind)
