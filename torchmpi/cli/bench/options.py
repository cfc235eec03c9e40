"""The options of ``torchmpi bench``, and the parsers of their values. Imports only light modules."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...backends.base import NAMES

COLLECTIVES = ("allreduce", "broadcast", "allgather", "reduce_scatter", "reduce", "alltoall", "gather", "scatter")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
PEERS = ("mpi4py", "gloo", "horovod", "nccl")
CPU_PEERS = PEERS[:3]
DEVICES = ("cpu", "cuda")
AUTO = "auto"
"""The backend that a call without ``backend=`` uses."""
DIST = "dist"
"""torch.distributed with the backend "torchmpi"."""
NONE = "none"
MEMORIES = ("plain", "shared")
MODELS = ("mlp", "cnn", "resnet", "transformer")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZES_HELP = "write 4:256M for the powers of 4 between them, or a list such as 4,64K,1M (K, M, G are powers of 1024)"
_LARGEST_BYTES = 64 << 30
_MOST_RANKS = 1024


def size(text: str) -> int:
    """Parse a number of bytes.

    >>> size("4"), size("64K"), size("1MB")
    (4, 65536, 1048576)
    """
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), flags=re.IGNORECASE)
    num_bytes = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not 0 < num_bytes <= _LARGEST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no size from 1 byte to 64G; {_SIZES_HELP}")
    return num_bytes


def sizes(text: str) -> tuple[int, ...]:
    """Parse a range or a list of sizes; the result is ascending.

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
    """Format a number of bytes with a unit.

    >>> [short_size(number) for number in (4, 1000, 65536, 1 << 20, 3 << 19)]
    ['4', '1000', '64K', '1M', '1.5M']
    """
    for unit in ("G", "M", "K"):
        if num_bytes >= _UNITS[unit]:
            return f"{round(num_bytes / _UNITS[unit], 1):g}{unit}"
    return str(num_bytes)


def names(allowed: Sequence[str], noun: str) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of lists of names.

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
    """Parse numbers of ranks.

    >>> ranks("2,4")
    (2, 4)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= _MOST_RANKS for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers of ranks from 1 to {_MOST_RANKS}, such as 2 or 2,4")
    return tuple(dict.fromkeys(map(int, parts)))


def seconds(text: str) -> float:
    """Parse a time in seconds.

    >>> seconds("2.5")
    2.5
    """
    return _positive(text, 86400, "time in seconds between 0 and 86400")


def gigabits(text: str) -> float:
    """Parse the speed of a link in Gbit/s.

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
    """Parse a number of repetitions.

    >>> count("20")
    20
    """
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


DEFAULT_SECONDS = 60.0
QUICK_SECONDS = 10.0
DEFAULT_SIZES = "4:256M"
QUICK_SIZES = "4,4K,64K,1M,16M"
_ABOUT = """Measure torchmpi and other installed libraries in one job, interleaved. Without a command it measures
collectives. Without mpirun it launches jobs of its own; under mpirun it measures that job."""
_EXAMPLES = """examples:
  torchmpi bench                                  allreduce from 4 B to 256 MB, in about a minute
  torchmpi bench --quick                          five sizes, ten seconds
  torchmpi bench --collectives allreduce,broadcast -n 2,4 --json --plot
  mpirun -n 8 torchmpi bench --sizes 1M:64M       the job that mpirun has started
  torchmpi bench train --model resnet             training steps against DistributedDataParallel
  torchmpi bench compare before.json after.json   what has changed"""
# Commands of earlier versions, and the scripts of the source tree that replace them.
_SCRIPTS = {name: f"benchmarks/{script}.py" for name, script in (
    ("ps", "server"), ("starts", "starts"), ("leaks", "leaks"), ("memory", "memory"),
)}  # fmt: skip


def with_default_command(arguments: Sequence[str]) -> list[str]:
    """Insert the default command: ``bench`` alone means ``bench collectives``.

    >>> with_default_command(["bench", "--quick"])
    ['bench', 'collectives', '--quick']
    >>> with_default_command(["bench", "train"]), with_default_command(["info"])
    (['bench', 'train'], ['info'])
    """
    given = list(arguments)
    if given == ["bench"] or (given[:1] == ["bench"] and given[1].startswith("-") and given[1] not in ("-h", "--help")):
        given.insert(1, "collectives")
    return given


def moved_to_script(arguments: Sequence[str]) -> str:
    """Return the script that replaces a command of earlier versions; '' for all other command lines.

    >>> moved_to_script(["bench", "ps", "--json"]), moved_to_script(["bench", "train"])
    ('benchmarks/server.py', '')
    """
    return _SCRIPTS.get(arguments[1], "") if len(arguments) > 1 and arguments[0] == "bench" else ""


def add_to(commands: Any) -> None:
    """Add ``bench`` and its commands to the parser of ``torchmpi``."""
    bench = commands.add_parser(
        "bench",
        help="measure collectives and training steps, against mpi4py, gloo and Horovod",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = bench.add_subparsers(dest="kind", metavar="COMMAND", required=True)
    _add_collectives(kinds)
    _add_train(kinds)
    _add_compare(kinds)


def _add(kinds: Any, name: str, help_: str, about: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        name,
        help=help_,
        description=about,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_collectives(kinds: Any) -> None:
    parser = _add(
        kinds,
        "collectives",
        "collectives by sizes, backends, dtypes and numbers of ranks (the default)",
        "Time collectives of torchmpi and its peers on the same buffers, in short batches, in alternating order.\n"
        "A batch lasts from the first rank that begins to the last that ends; medians and quartiles are reported.",
        "  torchmpi bench --sizes 4,64K,16M --peers mpi4py\n"
        "  torchmpi bench --collectives broadcast --dtypes bfloat16,float32 -n 2,4\n"
        "  torchmpi bench --backends mpi,shm --peers none --json shm.json",
    )
    option = parser.add_argument
    option("--collectives", "--verbs", dest="verbs", type=names(COLLECTIVES, "collective"), default=("allreduce",),
           metavar="LIST",
           help=f"among {', '.join(COLLECTIVES)} (default: allreduce)")  # fmt: skip
    option("--sizes", type=sizes, default=None, metavar="SIZES",
           help=f"4:256M (powers of 4) or a list such as 4,64K,1M (default: {DEFAULT_SIZES})")  # fmt: skip
    option("--dtypes", type=names(DTYPES, "dtype"), default=("float32",), metavar="LIST",
           help=f"among {', '.join(DTYPES)} (default: float32)")  # fmt: skip
    option("--backends", type=names((AUTO, *NAMES, DIST), "backend"), default=None, metavar="LIST",
           help="auto (what a call without backend= uses), names, dist (torch.distributed over torchmpi) "
                "(default: auto and all available)")  # fmt: skip
    _add_device(parser, "the copy is on the device, nccl is a peer, and --async also times the launch")
    option("--memory", type=names(MEMORIES, "kind of memory"), default=MEMORIES, metavar="LIST",
           help="plain tensors, shared ones (mpi.empty_shared), or both (default: plain,shared)")  # fmt: skip
    option(
        "--async", dest="asynchronous", action="store_true", help="time the asynchronous collectives and their wait()"
    )
    option("--quick", action="store_true", help=f"sizes {QUICK_SIZES}, {QUICK_SECONDS:g} seconds")
    option("--details", action="store_true", help="one line for each size and contestant")
    _add_peers(parser)
    add_ranks(parser)
    _add_results(parser, "collectives", plot=True)


def _add_train(kinds: Any) -> None:
    parser = _add(
        kinds,
        "train",
        "training steps, with and without overlap, against DistributedDataParallel",
        "Time training steps of four models without communication, with synchronize_gradients, with\n"
        "register_async_backward and with DistributedDataParallel on gloo; then communication alone.",
        "  torchmpi bench train\n  torchmpi bench train --model mlp,resnet -n 2,4 --json",
    )
    parser.add_argument("--model", dest="models", type=names(MODELS, "model"), default=MODELS,
                        metavar="LIST", help=f"among {', '.join(MODELS)} (default: all)")  # fmt: skip
    _add_device(parser, "and mpi4py, which does not support GPUs, is omitted")
    add_ranks(parser)
    _add_results(parser, "train", plot=False)


def _add_compare(kinds: Any) -> None:
    parser = _add(
        kinds,
        "compare",
        "two files written with --json, line by line",
        "Show the lines that both files contain, with the ratio of times B/A. A change is marked if the quartiles\n"
        "do not overlap.",
        "  torchmpi bench compare before.json after.json",
    )
    parser.add_argument("before", metavar="A.json")
    parser.add_argument("after", metavar="B.json")


def _add_device(parser: argparse.ArgumentParser, more: str) -> None:
    parser.add_argument("--device", choices=DEVICES, default="cpu",
                        help="device of the tensors (default: cpu); on cuda a batch ends when the device has finished, "
                        + more)  # fmt: skip


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add ``-n``."""
    parser.add_argument("-n", dest="ranks", type=ranks, default=None, metavar="LIST",
                        help="numbers of ranks, one job each (default: 2 and one per core, at most 8)")  # fmt: skip


def _add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", type=names((*PEERS, NONE), "peer"), default=CPU_PEERS,
                        metavar="LIST",
                        help=f"among {', '.join(PEERS)}, or none (default: all but nccl)")  # fmt: skip


def _add_results(parser: argparse.ArgumentParser, kind: str, *, plot: bool) -> None:
    parser.add_argument("--seconds", type=seconds, default=None, metavar="N",
                        help=f"time for measuring, all jobs together (default: {DEFAULT_SECONDS:g}); each "
                        "contestant gets at least seven batches")  # fmt: skip
    add_json(parser, kind)
    if plot:
        add_plot(parser, kind)


def add_plot(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add ``--plot``."""
    parser.add_argument("--plot", nargs="?", const=f"torchmpi-bench-{kind}.png", metavar="FILE.png",
                        help="plot all contestants over the sizes (needs matplotlib)")  # fmt: skip


def add_json(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", nargs="?", const=f"torchmpi-bench-{kind}.json", metavar="FILE",
                        help="write all results to a file")  # fmt: skip
