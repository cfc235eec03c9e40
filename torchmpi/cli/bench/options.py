"""The options of ``torchmpi bench``, and the parsers of their values. Imports only light modules."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

from ...collective_specs import SPECS
from ...collective_specs import names as names_of
from ...config import BackendName

AddOption = Callable[..., argparse.Action]
"""The method ``add_argument`` of a parser."""

_ROWS = [row for row in SPECS.values() if row.kind == "collective" or row.flow == "neighbor"]
COLLECTIVES = names_of(sorted(_ROWS, key=lambda row: not row.tensors))
"""Those with tensors first."""
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
PEERS = ("mpi4py", "gloo", "horovod", "nccl")
CPU_PEERS = PEERS[:3]
AUTO = "auto"
"""The backend that a call without ``backend=`` uses."""
NATIVE, DIST, HVD, NN = INTERFACES = ("native", "dist", "hvd", "nn")
"""Through which names torchmpi is called: its own, torch.distributed's, Horovod's, those of torchmpi.nn.functional."""
NONE, ALL = "none", "all"
MEMORIES = ("plain", "shared")
COMPUTING_HERE = ("mlp", "cnn", "resnet", "transformer")
QUICK_MODELS = ("mlp", "cnn")
WORKLOADS = ("decoding", "experts", "training", "sequence")
WIDTHS, QUICK_WIDTHS = (512, 1024, 2048), (512,)
MODELS = (*COMPUTING_HERE, "offloaded")
DEFAULT_SECONDS, QUICK_SECONDS = 60.0, 10.0
DEFAULT_SIZES, QUICK_SIZES, CALL_SIZES = "4:256M", "4,4K,64K,1M,16M", "1K,32K,1M"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZES_HELP = "write 4:256M for the powers of 4 between them, or a list such as 4,64K,1M (K, M, G are powers of 1024)"
_LARGEST_BYTES = 64 << 30
_MOST_RANKS = 1024
_MOST_WIDTH = 1 << 14


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

    >>> sizes("4:256"), sizes("1M,4")
    ((4, 16, 64, 256), (4, 1048576))
    """
    first, colon, last = text.partition(":")
    if not colon:
        return tuple(sorted({size(part) for part in text.split(",")}))
    steps, high = [size(first)], size(last)
    if steps[0] > high:
        raise argparse.ArgumentTypeError(f"{text!r} begins above its end; {_SIZES_HELP}")
    while steps[-1] * 4 <= high:
        steps.append(steps[-1] * 4)
    return tuple(steps)


def short_size(num_bytes: int) -> str:
    """Format a number of bytes with a unit.

    >>> [short_size(number) for number in (4, 1000, 65536, 1 << 20, 3 << 19)]
    ['4', '1000', '64K', '1M', '1.5M']
    """
    unit = next((unit for unit in "GMK" if num_bytes >= _UNITS[unit]), "")
    return f"{round(num_bytes / _UNITS[unit], 1):g}{unit}" if unit else str(num_bytes)


def names(allowed: Sequence[str], noun: str) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of lists of names.

    >>> names(("red", "blue"), "color")("blue,red"), names(("red", "blue", "all"), "color")("all")
    (('blue', 'red'), ('red', 'blue'))
    """

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        for name in chosen:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is no {noun}; choose among {', '.join(allowed)}")
        for name in (NONE, ALL):
            if name in chosen and len(chosen) > 1:
                raise argparse.ArgumentTypeError(f"{text!r}: {name} stands alone")
        if chosen == (ALL,):
            return tuple(name for name in allowed if name not in (NONE, ALL))
        return () if NONE in chosen else chosen

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


def _numbers(step: int, most: int) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of lists of multiples of a number.

    >>> _numbers(64, 1024)("512,1024")
    (512, 1024)
    """

    def parse(text: str) -> tuple[int, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdigit() and 0 < int(part) <= most and int(part) % step == 0 for part in parts):
            example = f"{8 * step},{16 * step}"
            raise argparse.ArgumentTypeError(f"{text!r}: write multiples of {step} up to {most}, such as {example}")
        return tuple(dict.fromkeys(map(int, parts)))

    return parse


widths = _numbers(64, _MOST_WIDTH)
batches = _numbers(1, _MOST_WIDTH)


def _positive(kind: type[float], most: float, noun: str) -> Callable[[str], float]:
    """Return a parser of positive numbers.

    >>> _positive(float, 10, "length")("2.5")
    2.5
    """

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no {noun}")
        return value

    return parse


seconds = _positive(float, 86400, "time in seconds between 0 and 86400")
gigabits = _positive(float, 1e6, "speed of a link in Gbit/s, such as 1 or 2.5")
count = _positive(int, 1e12, "number of at least 1")

_ABOUT = """Measure torchmpi and other installed libraries in one job, interleaved. Without a command it measures
collectives. Without mpirun it launches jobs of its own; under mpirun it measures that job."""
_EXAMPLES = """examples:
  torchmpi bench                                  allreduce from 4 B to 256 MB, in about a minute
  torchmpi bench --quick                          five sizes, ten seconds
  torchmpi bench --collectives all --through dist -n 2,4 --json --plot
  mpirun -n 8 torchmpi bench --sizes 1M:64M       the job that mpirun has started
  torchmpi bench calls                            messages, objects, groups and other calls
  torchmpi bench train --model resnet             training steps against DistributedDataParallel
  torchmpi bench parallel                         models divided over the ranks, against one process
  torchmpi bench compare before.json after.json   compare two files"""
_COLLECTIVES = """Time collectives of torchmpi and its peers on the same buffers, in short batches, in alternating
order. A batch lasts from the start of the first rank to the end of the last; medians and quartiles are reported. In
sendreceive each rank sends to the next one and receives from the one before it; a barrier has no size."""
_CALLS = """Time the calls that are no collectives on one tensor: messages, several calls in flight, lists of tensors
through torch.distributed, objects, numbers, strided tensors, many small tensors, gradients of a network, groups."""
_TRAIN = """Time training steps of models without communication, with synchronize_gradients, with
register_async_backward and with DistributedDataParallel on gloo; then communication alone. The model
offloaded has the parameters of ResNet-18 (cnn) in layers that take time but no core, as on an accelerator."""
_PARALLEL = """Time forms of parallelism that divide the work of one model over the ranks, against one process and on
gloo, with the bytes that they hold and send. decoding: generation of tokens, with tensor_parallel and DTensor. experts:
training of a MixtureOfExperts, also with the exchanges of torch.distributed. training: one model with averaged
gradients, DDP, FSDP2, tensor_parallel and the pipeline 1F1B. sequence: ring attention."""
_COMPARE = """Show the lines that both files contain, with the ratio of times B/A. A change is marked if the quartiles
do not overlap."""


def with_default_command(arguments: Sequence[str]) -> list[str]:
    """Insert the default command: ``bench`` alone means ``bench collectives``.

    >>> with_default_command(["bench", "--quick"]), with_default_command(["bench", "train"])
    (['bench', 'collectives', '--quick'], ['bench', 'train'])
    """
    given = list(arguments)
    if given == ["bench"] or (given[:1] == ["bench"] and given[1].startswith("-") and given[1] not in ("-h", "--help")):
        given.insert(1, "collectives")
    return given


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` and its commands to the parser of ``torchmpi``."""
    raw = argparse.RawDescriptionHelpFormatter
    bench = commands.add_parser(
        "bench",
        help="measure collectives and training steps, against mpi4py, gloo and Horovod",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    kinds = bench.add_subparsers(dest="kind", metavar="COMMAND", required=True)

    def add(name: str, summary: str, about: str, *examples: str) -> AddOption:
        epilog = "\n  ".join(["examples:", *(f"torchmpi bench {example}" for example in examples)])
        parser = kinds.add_parser(name, help=summary, description=about, epilog=epilog, formatter_class=raw)
        return parser.add_argument

    _add_collectives(
        add(
            "collectives",
            "collectives by sizes, backends, dtypes and numbers of ranks (the default)",
            _COLLECTIVES,
            "--sizes 4,64K,16M --peers mpi4py",
            "--collectives broadcast --dtypes bfloat16,float32 -n 2,4",
            "--collectives allreduce,sendreceive,barrier --out-of-place --quick",
            "--backends mpi,shm --peers none --json shm.json",
        )
    )
    option = add(
        "calls",
        "messages, calls in flight, lists, objects, numbers, groups, strided and many tensors",
        _CALLS,
        "calls",
        "calls --sizes 4,1M -n 2,4 --peers none --json",
    )
    option("--sizes", type=sizes, metavar="SIZES",
           help=f"sizes of the calls that have one (default: {CALL_SIZES})")  # fmt: skip
    option("--quick", action="store_true", help=f"{QUICK_SECONDS:g} seconds")
    _add_list(option, "--peers", ("mpi4py", "gloo", NONE), "peer", default=("mpi4py", "gloo"), note="both")
    _add_job(option, "calls")
    add_plot(option, "calls")
    option = add(
        "train",
        "training steps, with and without overlap, against DistributedDataParallel",
        _TRAIN,
        "train",
        "train --quick",
        "train --model mlp,resnet -n 2,4 --json",
    )
    _add_list(option, "--model", MODELS, "model", default=None, dest="models", note="all but offloaded")
    option("--layer-ms", type=seconds, default=10.0, metavar="N",
           help="milliseconds of each of the 21 layers of offloaded in forward; twice as many in backward "
                "(default: 10)")  # fmt: skip
    option("--quick", action="store_true",
           help=f"steps of {' and '.join(QUICK_MODELS)} only, {QUICK_SECONDS:g} seconds")  # fmt: skip
    _add_device(option, "and mpi4py, which does not support GPUs, is omitted")
    _add_job(option, "train")
    option = add(
        "parallel",
        "models divided over the ranks, against one process and DTensor",
        _PARALLEL,
        "parallel",
        "parallel --widths 512,1024 --batches 8,128 -n 2,4 --json",
    )
    _add_list(option, "--workloads", WORKLOADS, "workload", default=WORKLOADS, note="all")
    option("--widths", type=widths, metavar="LIST",
           help=f"sizes of the model, multiples of 64 (default: {','.join(map(str, WIDTHS))})")  # fmt: skip
    option("--batches", type=batches, default=(32,), metavar="LIST",
           help="rows of the whole batch in training, multiples of the ranks (default: 32)")  # fmt: skip
    option("--quick", action="store_true", help=f"width {QUICK_WIDTHS[0]} only, {QUICK_SECONDS:g} seconds")
    _add_job(option, "parallel")
    option = add("compare", "two files written with --json, line by line", _COMPARE, "compare before.json after.json")
    option("before", metavar="A.json")
    option("after", metavar="B.json")


def _add_collectives(option: AddOption) -> None:
    _add_list(option, "--collectives", (*COLLECTIVES, ALL), "collective", "--collective", "--verbs",
              default=("allreduce",), dest="verbs")  # fmt: skip
    _add_list(option, "--through", (*INTERFACES, ALL), "interface", default=(NATIVE,), note="native: its own names. "
              "dist: torch.distributed, hvd: Horovod's, nn: torchmpi.nn.functional. Ratios are those of the first "
              "one")  # fmt: skip
    option("--sizes", type=sizes, metavar="SIZES",
           help=f"4:256M (powers of 4) or a list such as 4,64K,1M (default: {DEFAULT_SIZES})")  # fmt: skip
    _add_list(option, "--dtypes", DTYPES, "dtype", default=("float32",))
    option("--backends", type=names((AUTO, *get_args(BackendName)), "backend"), metavar="LIST",
           help="auto (the choice for calls without backend=) and names (default: auto and all available)")  # fmt: skip
    _add_device(option, "the copy is on the device, nccl is a peer, and --async also times the launch")
    _add_list(option, "--memory", MEMORIES, "kind of memory", default=MEMORIES, note="both: ordinary tensors and "
              "those of mpi.empty_shared")  # fmt: skip
    option("--async", dest="asynchronous", action="store_true",
           help="time the asynchronous collectives and their wait()")  # fmt: skip
    option("--out-of-place", action="store_true", help="give allreduce, reduce and broadcast another tensor as result")
    option("--quick", action="store_true", help=f"sizes {QUICK_SIZES}, {QUICK_SECONDS:g} seconds")
    option("--details", action="store_true", help="one line for each size and contestant")
    _add_list(option, "--peers", (*PEERS, NONE), "peer", default=CPU_PEERS, note="all but nccl")
    _add_job(option, "collectives")
    add_plot(option, "collectives")


def _add_list(
    option: AddOption, name: str, allowed: Sequence[str], noun: str, *aliases: str, note: str = "", **more: Any
) -> None:
    help_ = f"among {', '.join(allowed)} (default: {note or ','.join(more['default'])})"
    option(name, *aliases, type=names(allowed, noun), metavar="LIST", help=help_, **more)


def _add_device(option: AddOption, more: str) -> None:
    text = f"device of the tensors (default: cpu); on cuda a batch ends when the device has finished, {more}"
    option("--device", choices=("cpu", "cuda"), default="cpu", help=text)


def _add_job(option: AddOption, kind: str) -> None:
    add_ranks(option)
    option("--seconds", type=seconds, metavar="N",
           help=f"time for measuring, all jobs together (default: {DEFAULT_SECONDS:g}); each contestant gets at least "
                "seven batches")  # fmt: skip
    add_json(option, kind)


def add_ranks(option: AddOption) -> None:
    """Add ``-n`` by the method ``add_argument`` of a parser."""
    option("-n", dest="ranks", type=ranks, metavar="LIST",
           help="numbers of ranks, one job each (default: 2 and one per core, at most 8)")  # fmt: skip


def add_plot(option: AddOption, kind: str) -> None:
    """Add ``--plot``."""
    option("--plot", nargs="?", const=f"torchmpi-bench-{kind}.png", metavar="FILE.png",
           help="plot all contestants over the sizes (needs matplotlib)")  # fmt: skip


def add_json(option: AddOption, kind: str) -> None:
    """Add ``--json``."""
    option("--json", nargs="?", const=f"torchmpi-bench-{kind}.json", metavar="FILE",
           help="write all results to a file")  # fmt: skip
