"""Reads sizes, lists of names and numbers of ranks from the command line. Pure; refusals say what is allowed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence

COLLECTIVES = ("allreduce", "broadcast", "allgather", "reduce_scatter", "reduce", "alltoall", "gather", "scatter")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
PEERS = ("mpi4py", "gloo", "horovod", "nccl")
CPU_PEERS = PEERS[:3]
DEVICES = ("cpu", "cuda")
AUTO = "auto"
"""The backend that a call without ``backend=`` takes."""
DIST = "dist"
"""torch.distributed over the backend "torchmpi"."""
NONE = "none"
MEMORIES = ("plain", "shared")
MODELS = ("mlp", "cnn", "resnet", "transformer")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZES_HELP = "write 4:256M for the powers of 4 between them, or a list such as 4,64K,1M (K, M, G are powers of 1024)"
_LARGEST_BYTES = 64 << 30
_MOST_RANKS = 1024


def size(text: str) -> int:
    """A number of bytes.

    >>> size("4"), size("64K"), size("1MB")
    (4, 65536, 1048576)
    """
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), flags=re.IGNORECASE)
    num_bytes = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not 0 < num_bytes <= _LARGEST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no size from 1 byte to 64G; {_SIZES_HELP}")
    return num_bytes


def sizes(text: str) -> tuple[int, ...]:
    """A range or a list of sizes, ascending.

    >>> sizes("4:256")
    (4, 16, 64, 256)
    >>> sizes("1M,4")
    (4, 1048576)
    """
    first, colon, last = text.partition(":")
    if not colon:
        return tuple(sorted({size(part) for part in text.split(",")}))
    low, high = size(first), size(last)
    if low > high:
        raise argparse.ArgumentTypeError(f"{text!r} begins above its end; {_SIZES_HELP}")
    steps = []
    while low <= high:
        steps.append(low)
        low *= 4
    return tuple(steps)


def short_size(num_bytes: int) -> str:
    """As people write it.

    >>> [short_size(number) for number in (4, 1000, 65536, 1 << 20, 3 << 19)]
    ['4', '1000', '64K', '1M', '1.5M']
    """
    for unit in ("G", "M", "K"):
        if num_bytes >= _UNITS[unit]:
            return f"{round(num_bytes / _UNITS[unit], 1):g}{unit}"
    return str(num_bytes)


def names(allowed: Sequence[str], noun: str) -> Callable[[str], tuple[str, ...]]:
    """A parser of lists of names.

    >>> names(("red", "blue"), "colour")("blue,red")
    ('blue', 'red')
    """

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        for name in chosen:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is no {noun}; choose among {', '.join(allowed)}")
        if NONE in chosen:
            if len(chosen) > 1:
                raise argparse.ArgumentTypeError(f"{text!r}: {NONE} stands alone")
            return ()
        return chosen

    return parse


def ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks, one job each.

    >>> ranks("2,4")
    (2, 4)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= _MOST_RANKS for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers of ranks from 1 to {_MOST_RANKS}, such as 2 or 2,4")
    return tuple(dict.fromkeys(map(int, parts)))


def seconds(text: str) -> float:
    """A time in seconds, more than none.

    >>> seconds("2.5")
    2.5
    """
    return _positive(text, 86400, "time in seconds between 0 and 86400")


def gigabits(text: str) -> float:
    """The speed of a link in Gbit/s.

    >>> gigabits("2.5")
    2.5
    """
    return _positive(text, 1e6, "speed of a link in Gbit/s, such as 1 or 2.5")


def _positive(text: str, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
    return value


def count(text: str) -> int:
    """A number of repetitions.

    >>> count("20")
    20
    """
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)
