"""Measure what a timeline costs: short calls, and DDP steps of the networks of `torchmpi bench train`.

    mpirun -n 2 python benchmarks/timeline_cost.py
    mpirun -n 1 python benchmarks/timeline_cost.py --parts calls,off

Batches with and without a timeline alternate in one job; in the part `off`, without a timeline, the package and the
same code without the comparisons that ask whether there is one. Reported are medians of the slowest rank, the median of
the differences of neighboring batches, and the difference of the fastest batches. Times are those of the processor: of
one thread for calls, which should be measured on one rank, and of all threads for steps. The threads of asynchronous
calls do not take turns: the helper waits until some calls have been queued, and each wait finds a call that has just
ended.
"""

from __future__ import annotations

import argparse
import ast
import gc
import inspect
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.distributed

import torchmpi as mpi
from torchmpi.cli.bench.models import make_task
from torchmpi.communicators.call_queue import CallQueue
from torchmpi.communicators.group import Group
from torchmpi.communicators.handle import Handle
from torchmpi.session import runtime

_MODELS = ("mlp", "cnn", "transformer", "resnet")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="calls,off,steps", help="calls, off, steps (default: all)")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of batches (default 40)")
    parser.add_argument("--models", default=",".join(_MODELS), help="networks, separated by commas")
    options = parser.parse_args()
    mpi.start()
    folder = mpi.broadcast_object(tempfile.mkdtemp())
    if mpi.rank() == 0:
        print(f"{mpi.size()} ranks, torch {torch.__version__}, Python {sys.version.split()[0]}")
    recording = partial(mpi.timeline.start, folder)
    torch.distributed.init_process_group("torchmpi")
    if "calls" in options.parts:
        measure_calls(options.rounds, ("off", nullcontext), ("on", recording))
    if "off" in options.parts:
        without, with_them = contexts_of_comparisons()
        measure_calls(options.rounds, ("without", without), ("with", with_them))
    if "steps" in options.parts:
        for name in options.models.split(","):
            measure_steps(name, options.rounds, ("off", nullcontext), ("on", recording))
    torch.distributed.destroy_process_group()
    mpi.stop()


Side = tuple[str, Callable[[], AbstractContextManager[object]]]
"""The name of one side of a comparison, and a context in which it is measured."""


def measure_calls(rounds: int, *sides: Side) -> None:
    """Print the time of calls of 4 bytes, and of 4 KB on the fast path, in nanoseconds."""
    tensor, repeats = torch.zeros(1), 1000
    synchronous: dict[str, Callable[[], object]] = {
        "allreduce": partial(mpi.allreduce, tensor),
        "allreduce of 4 KB": partial(mpi.allreduce, torch.zeros(1024)),
        "allreduce by MPI": partial(mpi.allreduce, tensor, backend="mpi"),
        "allreduce by p2p": partial(mpi.allreduce, tensor, backend="p2p"),
        "allreduce by gloo": partial(mpi.allreduce, tensor, backend="gloo"),
        "all_reduce of torch": partial(torch.distributed.all_reduce, tensor),
    }
    asynchronous: dict[str, Callable[[], object]] = {
        "asynchronous": partial(mpi.allreduce_async, tensor, backend="mpi"),
        "async_op of torch": partial(torch.distributed.all_reduce, tensor, async_op=True),
    }
    batches = {name: timed(partial(repeated, call, repeats)) for name, call in synchronous.items()}
    for name, call in asynchronous.items():
        of_torch: Any = torch.distributed.group.WORLD
        group = runtime.communicator(None).intra if name == "asynchronous" else of_torch._group
        batches[f"{name}, the call"] = partial(queued, call, group.call_queue, repeats, in_helper=False)
        batches[f"{name}, the helper"] = partial(queued, call, group.call_queue, repeats, in_helper=True)
    batches["a wait"] = partial(waited, repeats)
    for name, batch in batches.items():
        values = [1e9 * value / repeats for value in compared(batch, rounds, *sides)]
        show(name, "ns", values, sides)


def repeated(call: Callable[[], object], repeats: int) -> None:
    """Make calls from one line."""
    for _ in range(repeats):
        call()


def queued(call: Callable[[], object], calls: CallQueue, repeats: int, *, in_helper: bool) -> float:
    """Return the seconds that asynchronous calls take in the calling thread, or in the helper."""
    own, of_helper, at_once = 0.0, 0.0, 20
    for _ in range(repeats // at_once):
        with calls.run_lock:
            first = calls.submit(time.thread_time, "begin")
            begin = time.thread_time()
            for _ in range(at_once):
                call()
            own += time.thread_time() - begin
            last = calls.submit(time.thread_time, "end")
        of_helper += last.wait() - first.wait()
    return of_helper if in_helper else own


def waited(repeats: int) -> float:
    """Return the seconds that waits take apart from the waiting: the lock of each handle is free, as at its end."""
    handles: list[Handle[None]] = [Handle("allreduce") for _ in range(repeats)]
    for handle in handles:
        handle._finished.release()
    begin = time.thread_time()
    for handle in handles:
        handle.wait()
    return time.thread_time() - begin


def timed(batch: Callable[[], None], clock: Callable[[], float] = time.thread_time) -> Callable[[], float]:
    """Return a function that returns how long a batch takes."""

    def run() -> float:
        begin = clock()
        batch()
        return clock() - begin

    return run


def measure_steps(model: str, rounds: int, *sides: Side) -> None:
    """Print the time of DDP steps of a network, in milliseconds."""
    net, inputs, targets = make_task(model, rank=mpi.rank())
    net = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()

    for _ in range(2):  # the first one broadcasts, the second one uses the buckets of all further ones
        step()
    before = num_calls()
    step()
    name = f"DDP step, {model}, {num_calls() - before} calls"
    values = [1e3 * value for value in compared(timed(step, time.process_time), rounds, *sides)]
    show(name, "ms", values, sides)


def num_calls() -> int:
    """Return how many calls this rank has made."""
    found = mpi.metrics()["calls"].values()
    return sum(int(each["calls"]) for collectives in found for each in collectives.values())


def compared(batch: Callable[[], float], rounds: int, *sides: Side) -> list[float]:
    """Return seconds of a batch: medians of both sides and of the differences; the difference of the fastest."""
    times: dict[str, list[float]] = {name: [] for name, _ in sides}
    gc.disable()
    for number in range(rounds):
        for name, context in sides[:: 1 if number % 2 else -1]:
            with context():
                batch()  # fills the caches of this side
                mpi.barrier()
                own = batch()
            times[name].append(mpi.allreduce(own, op="max"))
    gc.enable()
    before, after = times.values()
    differences = [more - less for less, more in zip(before, after, strict=True)]
    return [*map(statistics.median, (before, after, differences)), min(after) - min(before)]


def show(name: str, unit: str, values: list[float], sides: tuple[Side, ...]) -> None:
    """Print one row on rank 0."""
    if mpi.rank() == 0:
        before, after, more, least = values
        (first, _), (second, _) = sides
        difference = f"difference {more:7.1f} ({100 * more / before:5.1f} %), fastest {least:7.1f}"
        print(f"{name:39} {first} {before:8.1f} {unit}, {second} {after:8.1f}, {difference}", flush=True)


class WithoutRecorder(ast.NodeTransformer):
    """Removes what a function does with the recorder, and the comparisons that ask whether there is one."""

    num_removed = 0

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Remove the assignment of the recorder."""
        return None if ast.unparse(node.targets[0]) == "recorder" else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        """Remove what is done with a recorder."""
        test = ast.unparse(node.test)
        if "recorder is not None" not in test and test != "observed is not None":
            return self.generic_visit(node)
        self.num_removed += 1
        return ast.Pass()

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        """Take the value without a recorder."""
        if ast.unparse(node.test) != "recorder is None":
            return self.generic_visit(node)
        self.num_removed += 1
        return node.body

    def visit_Compare(self, node: ast.Compare) -> Any:
        """Replace a comparison in an expression."""
        return ast.Constant(value=True) if ast.unparse(node) == "recorder is None" else self.generic_visit(node)


def without_recorder(method: Callable[..., Any]) -> Any:
    """Return a method whose calls are never recorded."""
    remover, source = WithoutRecorder(), textwrap.dedent(inspect.getsource(method))
    tree = ast.fix_missing_locations(remover.visit(ast.parse("from __future__ import annotations\n" + source)))
    assert remover.num_removed and "recorder" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names: dict[str, Any] = {}
    exec(compile(tree, inspect.getsourcefile(method) or "", "exec"), method.__globals__, names)
    return names[method.__name__]


def contexts_of_comparisons() -> list[Callable[[], AbstractContextManager[None]]]:
    """Return contexts in which this process runs code without comparisons, and the same code with them."""
    # Classes stay as they are: the interpreter has specialized the code of their users.
    methods = {method: without_recorder(method).__code__ for method in (Group.perform, CallQueue.submit, Handle.wait)}
    return [partial(replaced, codes) for codes in (methods, {method: method.__code__ for method in methods})]


@contextmanager
def replaced(codes: dict[Any, CodeType]) -> Iterator[None]:
    """Use other codes of methods."""
    originals = {method: method.__code__ for method in codes}
    for method, code in codes.items():
        method.__code__ = code
    try:
        yield
    finally:
        for method, code in originals.items():
            method.__code__ = code


if __name__ == "__main__":
    main()
