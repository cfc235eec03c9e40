"""Run PyTorch's own distributed tests, or torchft's, with torchmpi in the place of gloo, and with gloo itself.

    git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch /tmp/pytorch
    python scripts/test_torch_files.py /tmp/pytorch [--file WORD] [-k WORD] [--write results/torch-tests.md]

    pip install torchft-nightly parameterized
    python scripts/test_torch_files.py .../site-packages [-k WORD] [--write results/torch-tests.md]

The tests are not modified. They start their own processes: forks of one that has imported torch, which saves hours and
is the only change here. With TORCHMPI_AS_GLOO=1 torch creates groups of torchmpi where a test names gloo; a test that
constructs ProcessGroupGloo gets one of torchmpi too. Prints the tests that fail with torchmpi and not with gloo, and a
table; ends with status 1 if one of them is not listed in EXPLAINED.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import importlib.metadata
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

FILES = (
    "test_c10d_gloo.py",
    "test_c10d_common.py",
    "test_c10d_spawn_gloo.py",
    "test_c10d_fault_tolerance.py",
    "test_c10d_hooks.py",
    "test_c10d_object_collectives.py",
    "test_c10d_functional_native.py",
    "test_functional_api.py",
    "test_device_mesh.py",
    "tensor/**/test_*.py",
    "_tensor/**/test_*.py",
    "_composable/**/test_*.py",
    "fsdp/test_*.py",
    "pipelining/test_*.py",
    "torchft/process_group_test.py",
)
"""Below test/distributed of a checkout of PyTorch, or where torchft is installed, which has its tests."""
BACKENDS = ("gloo", "torchmpi")
TORCHFT = "torchft"
_OF_TORCHFT = "TEST_TORCHFT_BACKEND"
SECONDS_OF_A_TEST = 60
_TEXTS = "invalid arguments raise errors with another text than that of gloo"
EXPLAINED = {
    "ProcessGroupGlooTest.test_set_gloo_pg_timeout": "asks the group for the options of gloo",
    "ProcessGroupGlooTest.test_allreduce_coalesced_checks": "different dtypes and empty lists are accepted",
    "ProcessGroupGlooTest.test_*_checks": _TEXTS,
    "GlooProcessGroupWithDispatchedCollectivesTests.test_all_to_all_single": "tensors need not be contiguous",
    "RedistributeTest.test_replicate_to_shard_forward_backward": "autograd learns of the broadcast into a tensor of "
    "which the test has made views by chunk() before, and raises when they are read",
    "DistributedDataParallelTest.test_gloo_backend_cpu_module*": "asks the group for a network device of gloo",
    "CommTest.test_broadcast_coalesced_gloo_cpu": "asks the group for a network device of gloo",
    "ProcessGroupTest.test_gloo_timeout": "the error after its 10 ms has another text than that of gloo",
    "GlooFaultToleranceTest.*": "reconfigure() is refused: C++ keeps the size of a process group in Python",
    "NormalGlooMultiPgTest.*": "its ranks are threads of one process, which is one rank of torchmpi",
}
"""Patterns of the tests that fail with torchmpi and not with gloo, with the reason."""
BEGIN, END = "<!-- begin: run with {} -->", "<!-- end -->"


class Result(NamedTuple):
    """The outcome of a test: passed, failed or skipped."""

    file: str
    test: str
    outcome: str
    reason: str = ""


class Inside(NamedTuple):
    """The choice of tests, and the file of events."""

    pattern: str
    only: list[str] | None
    events: Path


# --- inside: all tests of one file ------------------------------------------------


def run_file(path: Path, backend: str, options: Inside) -> None:
    """Run the chosen tests of a file that have not begun yet, and write an event at the start and the end of each."""
    with_backend(backend)
    if path.parent.name == TORCHFT:
        with_torchft(backend)
    else:
        sys.path.insert(0, str(path.parent))
    sys.argv[1:] = []
    module = import_of_any_version(f"{TORCHFT}.{path.stem}" if path.parent.name == TORCHFT else path.stem)
    begun = {json.loads(line)["test"] for line in options.events.read_text().splitlines()}
    with options.events.open("a", buffering=1) as file:
        for test in tests_of(module):
            name = test.id().removeprefix(f"{module.__name__}.")
            if options.pattern in name and name not in begun and (options.only is None or name in options.only):
                print(json.dumps({"test": name}), file=file)
                print(f"\n=== {path.name} {name} with {backend}", file=sys.stderr, flush=True)
                outcome, reason = outcome_of(test)
                print(json.dumps({"test": name, "outcome": outcome, "reason": reason}), file=file)


def import_of_any_version(name: str) -> ModuleType:
    """Import tests of another version of torch: what this torch does not have is a class that fails when it is used."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing, attribute = str(error.name), ""
        except ImportError as error:
            found = re.match(r"cannot import name '(\w+)' from '(torch[\w.]*)'", str(error))
            missing, attribute = (found[2], found[1]) if found else ("", "")
        if not missing.startswith("torch."):
            return importlib.import_module(name)
        if attribute:
            setattr(sys.modules[missing], attribute, type(attribute, (), {}))
        else:
            sys.modules[missing] = _Missing(missing)
            sys.modules[missing].__path__ = []


class _Missing(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def tests_of(module: ModuleType) -> Iterator[unittest.TestCase]:
    """Return the tests that a module defines."""
    for case in list(vars(module).values()):
        if isinstance(case, type) and issubclass(case, unittest.TestCase) and case.__module__ == module.__name__:
            for name in unittest.defaultTestLoader.getTestCaseNames(case):
                yield case(name)


def with_backend(backend: str) -> None:
    """Let tests fork their processes, and construct groups of this backend."""
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    case = common_distributed.MultiProcessTestCase
    case._spawn_processes = lambda self: self._start_processes(multiprocessing.get_context("fork").Process)
    common_distributed.TIMEOUT_OVERRIDE.clear()
    if backend == "torchmpi":
        dist.ProcessGroupGloo = type("ProcessGroupGloo", (_InPlaceOfGloo,), _members_of(dist.ProcessGroupGloo))


def with_torchft(backend: str) -> None:
    """Let torchft fork its processes, and construct groups of this backend; also in these processes."""
    import torch.multiprocessing
    from torchft import process_group

    os.environ[_OF_TORCHFT] = backend
    context = multiprocessing.get_context("forkserver")  # not of this process, which may be a rank
    context.set_forkserver_preload(["torchft.process_group", "torchmpi.distributed.creation"])
    torch.multiprocessing.get_context = lambda method: context
    if backend == "torchmpi":
        process_group.ProcessGroupGloo._create_pg = _create_in_torchft
        process_group.ProcessGroupBabyGloo._create_pg = classmethod(_create_in_torchft)


def _create_in_torchft(wrapper: Any, store: Any, rank: int, size: int) -> Any:
    # As with gloo, the others do not end with a rank, however that has ended.
    os.environ["TORCHMPI_ON_LOST_RANK"] = "raise" if size > 1 else "end"
    os.environ["TORCHMPI_ABORT_ON_EXCEPTION"] = "0"
    return _InPlaceOfGloo(store, rank, size, timeout=getattr(wrapper, "_timeout", None))


def _members_of(gloo: Any) -> dict[str, Any]:
    names = ("_Options", "Options", "create_device", "create_default_device")
    return {name: staticmethod(getattr(gloo, name)) for name in names if hasattr(gloo, name)}


class _InPlaceOfGloo:
    """Constructs a group of torchmpi with the arguments of ProcessGroupGloo.

    Its calls are asynchronous, as all calls of gloo are.
    """

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> Any:
        from torchmpi.distributed import creation, torch_names

        given = torch_names.BackendOptions()
        given.store, given.group_rank, given.group_size, given.group_id = store, rank, size, "constructed"
        given.global_ranks_in_group = []
        limit = timeout if timeout is not None else getattr(options, "_timeout", None)
        if limit is not None:
            given.timeout = limit
        group = creation.create_for_gloo(given, None)
        for name in ("allreduce", "allreduce_coalesced", "allgather", "broadcast", "gather", "reduce", "scatter"):
            setattr(group, name, _asynchronous(getattr(group, name)))
        return group


def _asynchronous(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        for each in (*arguments, *named.values()):
            if hasattr(each, "asyncOp"):
                each.asyncOp = True
        return call(*arguments, **named)

    return run


def outcome_of(test: unittest.TestCase) -> tuple[str, str]:
    """Run a test."""
    if not getattr(test, "world_size", 1):
        return "skipped", "no GPUs"  # as many processes as GPUs
    gc.collect()  # a store of an earlier test would be closed by a fork, which does not have its thread
    result = unittest.TestResult()
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_OF_A_TEST + 20, 20)  # again for what ends the test
    try:
        unittest.TestSuite([test]).run(result)  # with the beginning and the end of its class
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for process in multiprocessing.active_children():
            process.kill()
        if "torchmpi.session.runtime" in sys.modules:
            sys.modules["torchmpi.session.runtime"].stop()  # tests of torchft leave groups of one rank
    problems = [text for _, text in result.errors + result.failures]
    if problems:
        print(problems[0], file=sys.stderr, flush=True)
        return "failed", reason_of(problems[0])
    if result.unexpectedSuccesses:
        return "failed", "unexpected success"
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


def _on_alarm(*_: object) -> None:
    raise TimeoutError(f"the test did not end within {SECONDS_OF_A_TEST + 20} s")


def reason_of(text: str) -> str:
    """Return the line of a traceback with the error that came first."""
    lines = [line for line in text.splitlines() if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    lines = [line for line in lines if "exited with error code" not in line] or lines
    return (lines or text.strip().splitlines() or [""])[0][:300]


# --- outside ----------------------------------------------------------------------


def run(
    path: Path, root: Path, backend: str, options: argparse.Namespace, only: list[str] | None
) -> tuple[list[Result], int]:
    """Run the tests of a file with one backend, and count the process groups of torchmpi.

    A process that dies is followed by another.
    """
    environment = {
        **os.environ,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS_OF_A_TEST),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",  # tests of torchft are numbered in the order of a set
        "TORCHMPI_AS_GLOO": str(int(backend == "torchmpi")),
    }
    file = str(path.relative_to(root))
    place = root if path.parent.name == TORCHFT else path.parent  # it has modules with names of the standard library
    with tempfile.TemporaryDirectory() as folder, options.log.open("a+b") as log:
        start_of_log = log.tell()
        events = Path(folder) / "events"
        events.touch()
        inside = [sys.executable, __file__, "--inside", str(path), backend, options.k, json.dumps(only), str(events)]
        while True:
            known = events.stat().st_size
            job = subprocess.Popen(inside, cwd=place, stdout=log, stderr=log, env=environment, start_new_session=True)
            status = job.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            if status == 0 or events.stat().st_size == known:
                break
        found: dict[str, Result] = {}
        for line in events.read_text().splitlines():
            event = {"outcome": "failed", "reason": "the process of the tests died", **json.loads(line)}
            found[event["test"]] = Result(file, event["test"], event["outcome"], event["reason"])
        if status:
            found["(file)"] = Result(file, "(file)", "failed", "cannot be imported with this PyTorch")
        log.seek(start_of_log)
        return list(found.values()), log.read().count(b"): torchmpi, ")


def run_with_both(path: Path, root: Path, options: argparse.Namespace, known: dict[str, Any]) -> None:
    """Run the tests of a file with gloo, and those that pass with torchmpi."""
    only = None
    for backend in BACKENDS:
        key = f"{backend} {path.relative_to(root)} {options.k}"
        begin = time.monotonic()
        if key not in known:
            known[key], num_groups = run(path, root, backend, options, only) if only != [] else ([], 0)
            known[f"groups {path.relative_to(root)}"] = num_groups  # the last one, of torchmpi
        results = [Result(*each) for each in known[key]]
        only = [each.test for each in results if each.outcome == "passed"]
        count = dict(Counter(each.outcome for each in results))
        print(f"{time.monotonic() - begin:6.1f} s  {backend:8}  {path.relative_to(root)}  {count}", flush=True)
    for each in results:
        if each.outcome != "passed":
            print(f"          {each.outcome}: {each.test}  {each.reason}", flush=True)


def explanation(result: Result) -> str | None:
    """Return the known reason of a failure."""
    return next((why for pattern, why in EXPLAINED.items() if fnmatch.fnmatchcase(result.test, pattern)), None)


def as_page(results: dict[str, list[Result]], num_groups: dict[str, int], about: str) -> list[str]:
    """Return the tables."""
    lines = [
        about,
        "",
        "| file | gloo: passed, failed, skipped | of those passed, torchmpi: passed, failed, skipped | groups |",
        "|---|---|---|---|",
    ]
    files = {each.file: 0 for each in results["gloo"]}
    for each in results["gloo"]:
        files[each.file] += each.outcome != "skipped"

    def counts(chosen: Iterable[Result]) -> str:
        count = Counter(each.outcome for each in chosen)
        return ", ".join(str(count[outcome]) for outcome in ("passed", "failed", "skipped"))

    for file in (each for each, num_run in files.items() if num_run):
        of_file = [counts(each for each in results[backend] if each.file == file) for backend in BACKENDS]
        lines.append(f"| `{file}` | {of_file[0]} | {of_file[1]} | {num_groups[file]} |")
    skipped = [each for each in results["gloo"] if not files[each.file]]
    num_skipped_files = sum(not num_run for num_run in files.values())
    lines.append(f"| {num_skipped_files} files of which all tests were skipped | {counts(skipped)} | 0, 0, 0 | 0 |")
    of_all = " | ".join(counts(results[backend]) for backend in BACKENDS)
    lines.append(f"| all | {of_all} | {sum(num_groups.values())} |")
    names_all = sum(map(bool, files.values())) == 1
    lines += ["", f"### {'With' if names_all else 'Not passed with'} torchmpi", "", "| test | reason |", "|---|---|"]
    for each in results["torchmpi"]:
        if each.outcome != "passed" or names_all:
            reason = "passed" if each.outcome == "passed" else explanation(each) or f"{each.outcome}: {each.reason}"
            lines.append(f"| `{each.test}` | {reason.replace('|', '/')} |")
    lines += ["", "### Failed with gloo", "", "| file | reason | tests |", "|---|---|---|"]
    failed = Counter((each.file, each.reason) for each in results["gloo"] if each.outcome == "failed")
    lines += [
        f"| `{file}` | {reason[:150].replace('|', '/')} | {number} |" for (file, reason), number in failed.items()
    ]
    return lines


def software(root: Path) -> str:
    """Return the versions in a sentence."""
    import torch

    if (root / TORCHFT).exists():
        distribution = importlib.metadata.packages_distributions()[TORCHFT][0]
        tested = f"{distribution} {importlib.metadata.version(distribution)}"
    else:
        tested = f"PyTorch {(root.parents[1] / 'version.txt').read_text().strip()}"
    return f"Tests of {tested}, run with PyTorch {torch.__version__} on CPUs, one host."


def write(page: Path, lines: list[str], *, is_of_torchft: bool) -> None:
    """Replace the tables of this version of PyTorch, or add them at the end of the page."""
    import torch

    begin = BEGIN.format(f"{'torchft and ' * is_of_torchft}PyTorch {torch.__version__.partition('+')[0]}")
    before, _, rest = page.read_text().partition(begin)
    after = rest.partition(END)[2] or "\n"
    page.write_text("\n".join([f"{before.rstrip()}\n\n{begin}", *lines, f"{END}{after}"]))


def main() -> None:
    """Run the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of PyTorch, or the folder where torchft is")
    parser.add_argument("-k", default="", help="only tests whose name contains this")
    parser.add_argument("--file", default="", help="only files whose path contains this")
    parser.add_argument("--log", type=Path, default=Path("build/test/torch-files.log"), help="output of the tests")
    parser.add_argument("--results", type=Path, help="keep the results here, and take those that are there already")
    parser.add_argument("--write", type=Path, help="write the tables to this page")
    options = parser.parse_args()
    if not importlib.metadata.entry_points(group="torch.backends", name="torchmpi"):
        parser.error("torchmpi is not installed in this environment: torch would create groups of gloo in its place")
    root = options.checkout.resolve()
    if (root / "test" / "distributed").exists():
        root = root / "test" / "distributed"
    options.log = options.log.resolve()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {}
    if options.results is not None and options.results.exists():
        known = json.loads(options.results.read_text())
    found = dict.fromkeys(path for pattern in FILES for path in sorted(root.glob(pattern)))
    for path in (each for each in found if options.file in str(each.relative_to(root))):
        run_with_both(path, root, options, known)
        if options.results is not None:
            options.results.write_text(json.dumps(known))
    results = {
        backend: [Result(*each) for key, values in known.items() if key.startswith(f"{backend} ") for each in values]
        for backend in BACKENDS
    }
    num_groups = {key.removeprefix("groups "): number for key, number in known.items() if key.startswith("groups ")}
    lines = as_page(results, num_groups, software(root))
    if options.write:
        write(options.write, lines, is_of_torchft=(root / TORCHFT).exists())
    print("\n".join(lines))
    sys.exit(any(each.outcome == "failed" and explanation(each) is None for each in results["torchmpi"]))


if __name__ == "__mp_main__" and _OF_TORCHFT in os.environ:
    with_torchft(os.environ[_OF_TORCHFT])
if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        file, backend, pattern, only, events = sys.argv[2:7]
        run_file(Path(file), backend, Inside(pattern, json.loads(only), Path(events)))
        sys.stderr.flush()
        os._exit(0)  # threads that tests have left may not end
    else:
        main()
