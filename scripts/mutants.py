#!/usr/bin/env python
"""Mutation tests of modules whose tests need no launcher: which small changes of the code does no unit test notice?

    nice -n 19 python scripts/mutants.py --modules nn/clipping.py tensors --count 200 --output results/mutants

A mutant is the package with one change: another comparison or arithmetic operator, a constant one larger or smaller,
`and` for `or`, a negated condition, None instead of a result, a statement left out. `--count` of all possible ones are
drawn by `--seed`. Each runs the unit tests that execute its line, the fastest first, until one fails; a run that takes
much longer than without the change counts as failed. With `--launched`, those that no unit test kills then run the
tests of LAUNCHED for their module, on three ranks.

The changes are made in a copy of the files of git, never in the checkout. A worker imports torch once and forks itself
for each mutant. Which test executes which lines is measured once, and again after a change of a test or of the package.

`OUTPUT.jsonl` has a line for each result. If it exists, mutants that were killed are not run again, the others are:
give the same options after adding a test. After a change of the package, which changes the draw, `--again` takes the
survivors of the file instead. `OUTPUT.md` has the table, and the survivors.
`results/mutants-equivalent.tsv` says which of them no test can kill, and why: module, function, change and reason,
separated by tabs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchmpi"
EQUIVALENT = ROOT / "results" / "mutants-equivalent.tsv"
LAUNCHED = {
    "backends/plan_cost": "test_two_level",
    "backends/round_messages": "test_p2p test_timeline",
    "backends/selection_table": "test_selector",
    "collectives/tuning": "test_selector",
    "communicators/flight_record": "test_flight_record",
    "communicators/message_record": "test_flight_record",
    "communicators/release": "test_groups",
    "communicators/observed_calls": "test_flight_record",
    "communicators/splits": "test_communicators",
    "communicators/status_board": "test_flight_record",
    "engine/checkpoint": "test_engine_checkpoint",
    "engine/meters": "test_engine_meters",
    "engine/metrics": "test_engine_validation",
    "engine/scheduling": "test_engine_allreduce",
    "engine/updates": "test_engine_allreduce",
    "horovod": "test_horovod",
    "nn/blocksequential": "test_nn_blocksequential",
    "nn/buckets": "test_nn_sync",
    "nn/clipping": "test_nn_clipping",
    "nn/diloco": "test_nn_local_sgd",
    "nn/error_feedback": "test_nn_error_feedback",
    "nn/local_sgd": "test_nn_local_sgd",
    "nn/replica": "test_nn_replica_check",
    "parameterserver/rules": "test_parameterserver",
    "parameterserver/shards": "test_parameterserver",
    "parameterserver/shard_checkpoint": "test_parameterserver_saving",
    "parameterserver/staleness": "test_parameterserver_updates",
    "parameterserver/updates": "test_parameterserver_updates",
    "supervision/host_ring": "test_host_ring",
    "tensors/buffers": "test_collectives",
    "tensors/dtypes": "test_collectives",
    "tensors/sparse": "test_nn_sync",
    "tensors/writable": "test_read_only",
}
"""The files of tests/mpi whose subject is a module, or a folder; the longest fitting name counts."""
MAX_TEST_SECONDS = 40.0
"""Of the tests that execute a line, the fastest are run, up to this sum of their times."""
OTHER_SUBJECTS = (
    "bench_scripts",
    "fuzz_inputs",
    "mnist_data",
    "object_file",
    "packaging",
    "protocol_model",
    "typing",
    "version",
)
"""Files of tests/unit that take long, and whose subject is no pure module."""

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    function: str
    line: int
    start: int
    end: int
    old: str
    new: str
    number: int
    """How many such changes of the function come before it."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What stays the same if lines above it are added."""
        return self.module, self.function, self.change, self.number

    @property
    def change(self) -> str:
        """The change in one line."""
        return f"{' '.join(self.old.split())} -> {' '.join(self.new.split())}"


class _Collector(ast.NodeVisitor):
    """Collects the mutants of a module."""

    def __init__(self, module: str, source: str) -> None:
        self.module = module
        self.mutants: list[Mutant] = []
        self._source = source.encode()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._function: list[str] = []
        self.visit(ast.parse(source))

    def _add(self, node: Any, new: str) -> None:
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        old = self._source[start:end].decode()
        name = ".".join(self._function) or "<module>"
        mutant = Mutant(self.module, name, node.lineno, start, end, old, new, 0)
        number = sum(each.function == name and each.change == mutant.change for each in self.mutants)
        self.mutants.append(replace(mutant, number=number))

    def _replace(self, node: ast.expr, changed: ast.expr) -> None:
        self._add(node, f"({ast.unparse(changed)})")

    def _scope(self, node: Any) -> None:
        self._function.append(node.name)
        for part in (*node.decorator_list, *getattr(node, "bases", ()), *self._defaults(node), *node.body):
            self.visit(part)
        self._function.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _scope

    @staticmethod
    def _defaults(node: Any) -> list[ast.expr]:
        arguments = getattr(node, "args", None)
        return [] if arguments is None else [each for each in (*arguments.defaults, *arguments.kw_defaults) if each]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visit the value, not the annotation."""
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts are not changed."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Assertions are not changed."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave the statement out, and keep its text."""
        self._add(node, "pass")

    def visit_Call(self, node: ast.Call) -> None:
        """Types in isinstance() and cast() are joined by an operator without arithmetic."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "isinstance":
            self.visit(node.args[0])
        elif name not in ("cast", "TypeVar"):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Negate the condition."""
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self._negate(node)

    def visit_While(self, node: ast.While) -> None:
        """Negate the condition."""
        self._negate(node)

    visit_IfExp = visit_While

    def _negate(self, node: Any) -> None:
        if not isinstance(node.test, ast.Compare | ast.UnaryOp | ast.Constant):  # those have mutants of their own
            self._replace(node.test, ast.UnaryOp(ast.Not(), node.test))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Replace each operator."""
        for index, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[index] = COMPARISONS[type(operator)]()
            self._replace(node, changed)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Replace the operator, except between texts."""
        texts = any(
            isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
            for each in (node.left, node.right)
        )
        if type(node.op) in OPERATORS and not texts:
            changed = copy.deepcopy(node)
            changed.op = OPERATORS[type(node.op)]()
            self._replace(node, changed)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Replace the operator; leave the statement out."""
        if type(node.op) in OPERATORS:
            changed = copy.deepcopy(node)
            changed.op = OPERATORS[type(node.op)]()
            self._add(node, ast.unparse(changed))
        self._add(node, "pass")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Replace `and` by `or` and the reverse."""
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._replace(node, changed)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Leave out `not`, `-` and `~`."""
        self._replace(node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Use the other truth value, or a number that is one larger or one smaller."""
        if isinstance(node.value, bool):
            self._add(node, repr(not node.value))
        elif isinstance(node.value, int | float):
            self._add(node, repr(node.value + 1))
            self._add(node, f"({node.value - 1!r})")

    def visit_Return(self, node: ast.Return) -> None:
        """Return None."""
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add(node, "return None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Leave a call out; docstrings and `yield` stay."""
        if isinstance(node.value, ast.Call):
            self._add(node, "pass")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Leave out assignments to attributes and elements; without one to a name, the next line would raise."""
        if all(isinstance(each, ast.Attribute | ast.Subscript) for each in node.targets):
            self._add(node, "pass")
        self.generic_visit(node)

    def _leave_out(self, node: ast.stmt) -> None:
        self._add(node, "pass")

    visit_Break = visit_Continue = visit_Delete = _leave_out


def mutants_of(files: Iterable[Path]) -> list[Mutant]:
    """Return all mutants of these files that differ from each other and can be compiled."""
    found: dict[tuple[str, int, int, str], Mutant] = {}
    for path in files:
        source = path.read_text()
        for each in _Collector(str(path.relative_to(PACKAGE)), source).mutants:
            try:
                compile(changed_source(source, each), str(path), "exec")
            except SyntaxError:
                continue
            found.setdefault((each.module, each.start, each.end, each.new), each)
    return list(found.values())


def changed_source(source: str, mutant: Mutant) -> str:
    """Return the text of a module with the change."""
    data = source.encode()
    return (data[: mutant.start] + mutant.new.encode() + data[mutant.end :]).decode()


# A worker: a process that has imported torch, and runs tests in forks of itself.


class _Selection:
    """A plugin: some of the tests, the files with the shortest sum of times first."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        sums: Counter[str] = Counter()
        for item in items:
            sums[item.nodeid.split("::")[0]] += self._seconds.get(item.nodeid, 0)
        items[:] = [item for item in items if item.nodeid in self._seconds]
        items.sort(key=lambda item: sums[item.nodeid.split("::")[0]])


class _Trace:
    """A plugin: the lines of the package that each test executes, and its time."""

    def __init__(self, folder: str) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self._folder = folder
        self._lines: set[tuple[str, int]] = set()

    def _enter(self, frame: Any, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._folder) else None

    def _line(self, frame: Any, event: str, argument: object) -> Any:
        if event == "line":
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def pytest_runtest_logreport(self, report: Any) -> None:
        entry = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True})
        entry["seconds"] += report.duration
        entry["passed"] = entry["passed"] and report.passed

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._lines = set()
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        lines: dict[str, list[int]] = {}
        for name, number in sorted(self._lines):
            lines.setdefault(os.path.relpath(name, self._folder), []).append(number)
        self.tests[nodeid]["lines"] = lines


def _run_pytest(folder: str, request: dict[str, Any]) -> int:
    """Run pytest in this process, a fork; return 0 if all tests passed."""
    import pytest

    os.setsid()
    os.chdir(folder)
    log = os.open(os.path.join(folder, "..", "log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    options = ["-q", "-x", "-p", "no:cacheprovider", "--capture=sys", f"--basetemp={folder}/../tests"]
    if "trace" in request:
        trace = _Trace(os.path.join(folder, "torchmpi"))
        options.remove("-x")
        code = pytest.main([*options, *request["files"]], plugins=[trace])
        Path(request["trace"]).write_text(json.dumps(trace.tests))
    else:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        code = pytest.main([*options, *request["files"]], plugins=[_Selection(request["seconds"])])
    return int(code)


def work(folder: str) -> None:
    """Answer requests on the standard input by results on the standard output."""
    import hypothesis
    import numpy  # noqa: F401, for the forks
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    # A failure is enough, without a search for the smallest example.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, phases=phases)
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    for line in sys.stdin:
        request = json.loads(line)
        since = time.monotonic()
        child = os.fork()
        if child == 0:
            status = 70
            try:
                status = _run_pytest(folder, request)
            finally:
                os._exit(status)
        result = "timeout"
        while time.monotonic() - since < request["timeout"]:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                result = {0: "survived", 5: "survived"}.get(code, "killed")
                break
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also what the tests have left behind
        if result == "timeout":
            os.waitpid(child, 0)
        print(json.dumps({"result": result, "seconds": round(time.monotonic() - since, 2)}), flush=True)


def _is_open_mpi() -> bool:
    answer = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True)
    return "Open MPI" in answer.stdout


def launched_files(module: str) -> str | None:
    """Return the files of tests/mpi for a module.

    >>> launched_files("parameterserver/updates/easgd.py"), launched_files("log.py")
    ('test_parameterserver_updates', None)
    """
    path = Path(module).with_suffix("")
    return next((LAUNCHED[str(each)] for each in (path, *path.parents) if str(each) in LAUNCHED), None)


class _Worker:
    """A copy of the files, and the process that runs their tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "copy"
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode()
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        # A mutant must not write to the files of this user: one left a tuning file there, which later jobs found.
        own = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(self.folder)}
        self._environment = {**os.environ, **own}
        environment = {**self._environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(self.folder)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def run(self, mutant: Mutant, seconds: dict[str, float]) -> dict[str, Any]:
        path = self.folder / "torchmpi" / mutant.module
        original = path.read_text()
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            cached.unlink()
        path.write_text(changed_source(original, mutant))
        try:
            files = sorted({nodeid.split("::")[0] for nodeid in seconds})
            return self.ask(files=files, seconds=seconds, timeout=30 + 4 * sum(seconds.values()))
        finally:
            path.write_text(original)

    def run_launched(self, mutant: Mutant | None, names: str, limit: float) -> dict[str, Any]:
        """Run files of tests/mpi on three ranks, without or with a change; a hang counts as failed."""
        command = ["mpirun", "-n", "3", sys.executable, "-m", "pytest", "--with-mpi", "-x", "-q"]
        command[1:1] = ["--oversubscribe"] if _is_open_mpi() else []
        command += ["-p", "no:cacheprovider", "--capture=sys", "-m", "n3"]
        command += [f"tests/mpi/{each}.py" for each in names.split()]
        path = self.folder / "torchmpi" / ("errors.py" if mutant is None else mutant.module)
        original, since = path.read_text(), time.monotonic()
        if mutant is not None:
            path.write_text(changed_source(original, mutant))
        # Each rank makes a folder for its tests in it.
        environment = {**self._environment, "TMPDIR": str(self.folder.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )
        try:
            result = "survived" if process.wait(limit) == 0 else "killed"
        except subprocess.TimeoutExpired:
            result = "timeout"
        finally:
            path.write_text(original)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # Open MPI ends its ranks, which have groups of their own
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return {"result": result, "seconds": round(time.monotonic() - since, 2)}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def traces(worker: _Worker, only: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the lines that each unit test executes, of all tests that pass; of these files only, if there are any."""
    kept = ROOT / "build" / "mutants"
    kept.mkdir(parents=True, exist_ok=True)
    units = sorted((ROOT / "tests" / "unit").glob("*.py"))
    shared = [each for each in units if not each.name.startswith("test_")]
    common = _digest([*sorted(PACKAGE.rglob("*.py")), *shared, *sorted((ROOT / "tests" / "helpers").glob("*.py"))])
    tests: dict[str, dict[str, Any]] = {}
    names = set(only) or {path.stem for path in units if path.stem.removeprefix("test_") not in OTHER_SUBJECTS}
    for path in units:
        if path in shared or path.stem not in names or not (worker.folder / path.relative_to(ROOT)).exists():
            continue
        file = kept / f"{path.stem}-{common[:12]}-{_digest([path])[:12]}.json"
        if not file.exists():
            print(f"which lines does {path.name} execute?", flush=True)
            worker.ask(files=[f"tests/unit/{path.name}"], trace=str(file), timeout=1800)
        tests.update(json.loads(file.read_text()))
    return {nodeid: entry for nodeid, entry in tests.items() if entry["passed"]}


def tests_of(mutants: Iterable[Mutant], tests: dict[str, dict[str, Any]]) -> dict[Mutant, dict[str, float]]:
    """Return the tests that execute the line of each mutant, with their times.

    What a module executes when it is imported is noticed by the tests that execute any line of it.
    """
    by_line: dict[tuple[str, int], set[str]] = {}
    by_module: dict[str, set[str]] = {}
    for nodeid, entry in tests.items():
        for module, lines in entry["lines"].items():
            by_module.setdefault(module, set()).add(nodeid)
            for line in lines:
                by_line.setdefault((module, line), set()).add(nodeid)
    chosen: dict[Mutant, dict[str, float]] = {}
    for mutant in mutants:
        source = (PACKAGE / mutant.module).read_text()
        first, last = _statement(source, mutant.line)
        nodeids: set[str] = set()
        if _is_at_import(source, mutant.line):
            nodeids = by_module.get(mutant.module, set())
        for line in range(first, last + 1):
            nodeids = nodeids | by_line.get((mutant.module, line), set())
        chosen[mutant] = {}
        total = 0.0
        for nodeid in sorted(nodeids, key=lambda each: (tests[each]["seconds"], each)):
            total += tests[nodeid]["seconds"]
            if total > MAX_TEST_SECONDS and chosen[mutant]:
                break
            chosen[mutant][nodeid] = tests[nodeid]["seconds"]
    return chosen


def _statement(source: str, line: int) -> tuple[int, int]:
    """Return the first and the last line of the simple statement, or of the head of the compound one, of a line."""
    best = (line, line)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or node.end_lineno is None:
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
        if node.lineno <= line <= max(last, node.lineno):
            best = (node.lineno, max(last, node.lineno))
    return best


def _is_at_import(source: str, line: int) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:  # noqa: SIM102
            if node.body[0].lineno <= line <= node.end_lineno:
                return False
    return True


def explained() -> dict[tuple[str, str, str], str]:
    """Return the reasons why some mutants cannot be killed."""
    rows = EQUIVALENT.read_text().splitlines()[1:] if EQUIVALENT.exists() else []
    return {
        (module, function, change): reason for module, function, change, reason in (row.split("\t") for row in rows)
    }


def report(results: list[dict[str, Any]], title: str) -> str:
    """Return the table and the survivors as Markdown."""
    reasons = explained()
    kinds: dict[str, Counter[str]] = {}
    survivors: list[tuple[Mutant, str, str]] = []
    for each in results:
        mutant = Mutant(**each["mutant"])
        kind = {"timeout": "killed"}.get(each["result"], each["result"])
        reason = reasons.get((mutant.module, mutant.function, mutant.change), "")
        if kind != "killed":
            kind = "equivalent" if reason else "survived"
            survivors.append((mutant, each["result"], reason))
        kinds.setdefault(mutant.module, Counter())[kind] += 1
    total = sum(kinds.values(), Counter())
    lines = [f"# {title}", "", "| module | mutants | killed | equivalent | survived |", "|---|---|---|---|---|"]
    for name, row in [*sorted(kinds.items()), ("**all**", total)]:
        lines.append(f"| {name} | {sum(row.values())} | {row['killed']} | {row['equivalent']} | {row['survived']} |")
    share = (total["killed"] + total["equivalent"]) / max(1, sum(total.values()))
    lines += ["", f"Killed or equivalent: {share:.1%}.", "", "## Survivors", ""]
    lines += ["| module | line | function | change | result | reason |", "|---|---|---|---|---|---|"]
    for mutant, result, reason in sorted(survivors, key=lambda each: (bool(each[2]), each[0].module, each[0].line)):
        change = mutant.change.replace("|", "\\|")
        where = f"{mutant.module} | {mutant.line} | {mutant.function}"
        lines.append(f"| {where} | `{change}` | {result} | {reason} |")
    return "\n".join(lines) + "\n"


def _files(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        path = PACKAGE / name
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def campaign(arguments: argparse.Namespace) -> None:
    """Draw the mutants, run them and write the results."""
    output = arguments.output.with_suffix(".jsonl")
    output.parent.mkdir(parents=True, exist_ok=True)
    earlier = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    killed = {Mutant(**each["mutant"]).key for each in earlier if each["result"] in ("killed", "timeout")}
    survivors = [mutant for each in earlier if (mutant := Mutant(**each["mutant"])).key not in killed]
    files = sorted(set(_files(arguments.modules or {each.module for each in survivors})))
    found = mutants_of(files)
    if arguments.again:
        keys = {each.key for each in survivors}
        drawn = [each for each in found if each.key in keys]
    else:
        drawn = random.Random(arguments.seed).sample(found, min(arguments.count, len(found)))
    print(f"{len(drawn)} of {len(found)} mutants of {len(files)} modules", flush=True)
    todo: queue.Queue[Mutant] = queue.Queue()
    for mutant in drawn:
        if mutant.key not in killed:
            todo.put(mutant)
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workers = [_Worker(Path(folder) / str(index)) for index in range(arguments.jobs)]
        chosen = tests_of(drawn, traces(workers[0], arguments.tests))

        limits: dict[str, float] = {}

        def run(worker: _Worker) -> None:
            while True:
                try:
                    mutant = todo.get_nowait()
                except queue.Empty:
                    return
                tests = chosen[mutant]
                answer = worker.run(mutant, tests) if tests else {"result": "not executed", "seconds": 0.0}
                name = launched_files(mutant.module) if arguments.launched else None
                if name is not None and answer["result"] in ("survived", "not executed"):
                    with lock:
                        if name not in limits:
                            alone = worker.run_launched(None, name, 600)
                            limits[name] = 30 + 4 * alone["seconds"] if alone["result"] == "survived" else 0.0
                            print(f"{name}: {alone}", flush=True)
                    if limits[name]:
                        answer = {**worker.run_launched(mutant, name, limits[name]), "launched": name}
                with lock:
                    print(f"{answer['result']:12} {answer['seconds']:6.1f} s  {mutant.module}:{mutant.line}  "
                          f"{mutant.change}  [{todo.qsize()} left]", flush=True)  # fmt: skip
                    with output.open("a") as stream:
                        stream.write(json.dumps({"mutant": asdict(mutant), **answer, "tests": len(tests)}) + "\n")

        threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker in workers:
            worker.close()
    # The last result of each mutant.
    entries = (json.loads(line) for line in output.read_text().splitlines())
    last = {Mutant(**each["mutant"]).key: each for each in entries}
    text = report(list(last.values()), f"Mutants, seed {arguments.seed}")
    arguments.output.with_suffix(".md").write_text(text)
    print(text)


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", default=[], help="files and folders, relative to torchmpi/")
    parser.add_argument("--count", type=int, default=100, help="the number of mutants (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="draws the mutants (default: 1)")
    parser.add_argument("--again", action="store_true", help="run the survivors of the output, instead of drawn ones")
    parser.add_argument("--tests", nargs="+", default=[], help="files of tests/unit to use, such as test_config")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (default: 1)")
    parser.add_argument("--output", type=Path, default=Path("results/mutants"), help="without suffix")
    parser.add_argument("--launched", action="store_true", help="also run tests on three ranks")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker)
    else:
        campaign(arguments)


if __name__ == "__main__":
    main()
