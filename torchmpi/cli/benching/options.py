"""The command line of ``torchmpi bench``. Imports nothing heavy: it is read for every command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ...backends.base import NAMES
from . import arguments as read
from .ps_plan import PARTS

DEFAULT_SECONDS = 60.0
QUICK_SECONDS = 10.0
DEFAULT_SIZES = "4:256M"
QUICK_SIZES = "4,4K,64K,1M,16M"
PS_SIZES = "4K,64K,1M,16M,100M"
_ABOUT = """Measure torchmpi against what else is installed, in one job, interleaved. Without a command word it measures
collectives. Started alone it launches its own jobs with mpirun; under mpirun it measures that job."""
_EXAMPLES = """examples:
  torchmpi bench                                  allreduce from 4 B to 256 MB, in about a minute
  torchmpi bench --quick                          five sizes, ten seconds
  torchmpi bench --verbs allreduce,broadcast -n 2,4 --json --plot
  mpirun -n 8 torchmpi bench --sizes 1M:64M       the job that mpirun has started
  torchmpi bench ps                               the parameter server, against torch.distributed.rpc
  torchmpi bench train --model resnet             training steps against DistributedDataParallel
  torchmpi bench compare before.json after.json   what has changed"""


def with_default_command(arguments: Sequence[str]) -> list[str]:
    """``bench`` alone means ``bench collectives``.

    >>> with_default_command(["bench", "--quick"])
    ['bench', 'collectives', '--quick']
    >>> with_default_command(["bench", "train"]), with_default_command(["info"])
    (['bench', 'train'], ['info'])
    """
    given = list(arguments)
    if given == ["bench"] or (given[:1] == ["bench"] and given[1].startswith("-") and given[1] not in ("-h", "--help")):
        given.insert(1, "collectives")
    return given


def add_to(commands: Any) -> None:
    """Add ``bench`` and its commands to those of ``torchmpi``."""
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
    _add_starts(kinds)
    _add_leaks(kinds)
    _add_memory(kinds)
    _add_ps(kinds)


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
        "verbs by sizes, backends, dtypes and numbers of ranks (the default)",
        "Time verbs of torchmpi and of its peers on the same buffers, in short batches, in both orders alternately.\n"
        "A batch lasts from its first rank to its last; reported are medians over batches, and their quartiles.",
        "  torchmpi bench --sizes 4,64K,16M --peers mpi4py\n"
        "  torchmpi bench --verbs broadcast --dtypes bfloat16,float32 -n 2,4\n"
        "  torchmpi bench --backends mpi,shm --peers none --json shm.json",
    )
    option = parser.add_argument
    option("--verbs", type=read.names(read.COLLECTIVES, "verb"), default=("allreduce",), metavar="LIST",
           help=f"among {', '.join(read.COLLECTIVES)} (default: allreduce)")  # fmt: skip
    option("--sizes", type=read.sizes, default=None, metavar="SIZES",
           help=f"4:256M (powers of 4) or a list such as 4,64K,1M (default: {DEFAULT_SIZES})")  # fmt: skip
    option("--dtypes", type=read.names(read.DTYPES, "dtype"), default=("float32",), metavar="LIST",
           help=f"among {', '.join(read.DTYPES)} (default: float32)")  # fmt: skip
    option("--backends", type=read.names((read.AUTO, *NAMES, read.DIST), "backend"), default=None, metavar="LIST",
           help="auto (what a call without backend= takes), names, dist (torch.distributed over torchmpi) "
                "(default: auto and all available)")  # fmt: skip
    _add_device(parser, "the copy is one on the device, nccl is a peer, and --async shows what launching costs")
    option("--memory", type=read.names(read.MEMORIES, "kind of memory"), default=read.MEMORIES, metavar="LIST",
           help="plain tensors, shared ones (mpi.empty_shared), or both (default: plain,shared)")  # fmt: skip
    option("--async", dest="asynchronous", action="store_true", help="time the asynchronous verbs and their wait()")
    option("--quick", action="store_true", help=f"sizes {QUICK_SIZES}, {QUICK_SECONDS:g} seconds")
    option("--details", action="store_true", help="one line for each size and contestant")
    _add_peers(parser)
    _add_ranks(parser)
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
    parser.add_argument("--model", dest="models", type=read.names(read.MODELS, "model"), default=read.MODELS,
                        metavar="LIST", help=f"among {', '.join(read.MODELS)} (default: all)")  # fmt: skip
    _add_device(parser, "and mpi4py, which knows no GPU, is left out")
    _add_ranks(parser)
    _add_results(parser, "train", plot=False)


def _add_compare(kinds: Any) -> None:
    parser = _add(
        kinds,
        "compare",
        "two files written with --json, line by line",
        "Show what both files have measured, with the ratio of times B/A. Changes are marked where the quartiles of\n"
        "the two do not overlap.",
        "  torchmpi bench compare before.json after.json",
    )
    parser.add_argument("before", metavar="A.json")
    parser.add_argument("after", metavar="B.json")


def _add_starts(kinds: Any) -> None:
    parser = _add(
        kinds,
        "starts",
        "the speed of many starts without binding, one after another",
        "Start two ranks many times without binding by the launcher, and report the speed of a large allreduce in\n"
        "each: ranks that meet on one core would show.",
        "  torchmpi bench starts --count 20",
    )
    parser.add_argument("--count", type=read.count, default=20, help="number of starts (default: %(default)s)")
    parser.add_argument("--size", type=read.size, default=16 << 20, help="size of the allreduce (default: 16M)")
    _add_json(parser, "starts")
    parser.set_defaults(ranks=(2,))


def _add_leaks(kinds: Any) -> None:
    parser = _add(
        kinds,
        "leaks",
        "growth of memory, descriptors and /dev/shm over many calls",
        "Run many small and many large collectives, and report what has grown on each rank.",
        "  torchmpi bench leaks\n  torchmpi bench leaks --small 10000 --large 100 -n 4",
    )
    parser.add_argument("--small", type=read.count, default=1_000_000, metavar="CALLS", help="4-byte calls (1000000)")
    parser.add_argument("--large", type=read.count, default=10_000, metavar="CALLS", help="1 MB calls (10000)")
    _add_ranks(parser)
    _add_json(parser, "leaks")


def _add_memory(kinds: Any) -> None:
    parser = _add(
        kinds,
        "memory",
        "resident memory that import and start() add",
        "Measure in fresh processes how much resident memory `import torchmpi`, start() and the first calls add to\n"
        "torch and mpi4py, and which part of it are shared segments.",
        "  torchmpi bench memory\n  torchmpi bench memory -n 4 --json",
    )
    _add_ranks(parser)
    _add_json(parser, "memory")


def _add_ps(kinds: Any) -> None:
    parser = _add(
        kinds,
        "ps",
        "the parameter server: its speed against torch.distributed.rpc, idle, in a storm, and over a link",
        "speed: send('add') and receive, each waited for, by all ranks at once and by one, against a parameter server\n"
        "with torch.distributed.rpc (rank 0 serves; two calls of Python or of TorchScript functions, or one call for\n"
        "both) and against plain copies, in turn. idle: the share of a core that servers take. storm: all ranks add\n"
        "whole numbers as fast as they can; the sum must be exact, memory must not grow. link: bytes per second to\n"
        "ranks of other hosts, in a job that mpirun has started on several.",
        "  torchmpi bench ps\n  torchmpi bench ps --parts speed --sizes 4K,1M -n 2,4 --json --plot\n"
        "  torchmpi bench ps --parts storm --seconds 10 --storm-ranks 8\n"
        "  mpirun -n 2 --hostfile hosts torchmpi bench ps --parts link --gbit 1",
    )
    option = parser.add_argument
    option("--parts", type=read.names(PARTS, "part"), default=PARTS, metavar="LIST",
           help=f"among {', '.join(PARTS)} (default: all)")  # fmt: skip
    option("--sizes", type=read.sizes, default=read.sizes(PS_SIZES), metavar="SIZES",
           help=f"of the tensor: a list, or a range of powers of 4 (default: {PS_SIZES})")  # fmt: skip
    option("-n", dest="ranks", type=read.ranks, default=None, metavar="LIST",
           help="numbers of ranks, one job each (default: 2)")  # fmt: skip
    option("--seconds", type=read.seconds, default=DEFAULT_SECONDS, metavar="N",
           help="of speed, and of the storm (default: %(default)g); at least seven batches each")  # fmt: skip
    option("--idle", type=read.seconds, default=10.0, metavar="N", help="seconds of doing nothing (default: 10)")
    option("--storm-ranks", type=read.count, default=4, metavar="N", help="ranks of the storm (default: 4)")
    option("--gbit", type=read.gigabits, default=None, metavar="R", help="speed of the link in Gbit/s, to compare with")
    option("--peers", type=read.names(("rpc", read.NONE), "peer"), default=("rpc",), metavar="LIST",
           help="rpc, or none (default: rpc)")  # fmt: skip
    _add_json(parser, "ps")
    _add_plot(parser, "ps")
    parser.set_defaults(settings={})


def _add_device(parser: argparse.ArgumentParser, more: str) -> None:
    parser.add_argument("--device", choices=read.DEVICES, default="cpu",
                        help="where the tensors are (default: cpu); on cuda a batch ends when the device has finished, "
                        + more)  # fmt: skip


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", dest="ranks", type=read.ranks, default=None, metavar="LIST",
                        help="numbers of ranks, one job each (default: 2 and one per core, at most 8)")  # fmt: skip


def _add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", type=read.names((*read.PEERS, read.NONE), "peer"), default=read.CPU_PEERS,
                        metavar="LIST",
                        help=f"among {', '.join(read.PEERS)}, or none (default: all but nccl)")  # fmt: skip


def _add_results(parser: argparse.ArgumentParser, kind: str, *, plot: bool) -> None:
    parser.add_argument("--seconds", type=read.seconds, default=None, metavar="N",
                        help=f"time to spend on measuring, all jobs together (default: {DEFAULT_SECONDS:g}); each "
                        "contestant gets at least seven batches")  # fmt: skip
    _add_json(parser, kind)
    if plot:
        _add_plot(parser, kind)


def _add_plot(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument("--plot", nargs="?", const=f"torchmpi-bench-{kind}.png", metavar="FILE.png",
                        help="draw all contestants over the sizes (needs matplotlib)")  # fmt: skip


def _add_json(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument("--json", nargs="?", const=f"torchmpi-bench-{kind}.json", metavar="FILE",
                        help="write everything that was measured to a file")  # fmt: skip
