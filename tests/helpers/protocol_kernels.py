"""The kernels of shared memory, run by Python one memory access at a time, for the model of their protocol.

The sources of the kernels are loaded with other intrinsics: an access to memory that only one rank uses is made at
once, a store to other memory is recorded, and for a load from it the explorer decides on the value. A rank is restarted
from the beginning of its call with the values known so far, so that the explorer can continue it from any state.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

from torchmpi.backends.shm import SharedCalls, SharedGroup
from torchmpi.communicators import call_log
from torchmpi.communicators.call_codes import ON_DEVICE
from torchmpi.communicators.call_log import CallLog
from torchmpi.errors import TorchMPIError
from torchmpi.shared_memory import kernels, memory_layout, typed_records
from torchmpi.shared_memory.kernels import records
from torchmpi.shared_memory.typed_records import Record

FIELD, LINE = 8, 64
SHARED = 1 << 50  # address of the segment, the same in all ranks
GROUP_ADDRESS, TRANSFERS, TABLE, CALLS, TENSORS, OUTPUTS = ((1 + i) << 32 for i in range(6))
_FOLDER = Path(kernels.__file__).parent
_FILE = "<kernels>"
_MODULES = ("arrival", "movement", "reduce_kernels")
_HINTS = (memory_layout.Block.fetches_slowly,)
# Sizes and durations that would only add states; RING_LENGTH is shortened by the scenarios of its reuse.
_CONSTANTS = {"_MIN_CHUNK_BYTES": 0, "_SHORTEST_SLEEP_MICROSECONDS": 1000}

Op = tuple[Any, ...]


Fault = tuple[str, str, str]
"""A change of a source of the kernels: module, text, and what replaces it."""

# --- the sources --------------------------------------------------------------------------------------------------


class _Names(ast.NodeTransformer):
    """Keeps the result of every call in a local variable: the local variables are then the whole state of a frame."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        self.count += 1
        return ast.NamedExpr(ast.Name(f"_t{self.count}", ast.Store()), node)


def _forget(node: ast.AST | None) -> list[ast.stmt]:
    """Return statements that clear the results of the calls in a node, which are used no more."""
    names = [each.target.id for each in ast.walk(node) if isinstance(each, ast.NamedExpr)] if node else []
    targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
    return [ast.Assign(targets, ast.Constant(None))] if targets else []


def _with_forgetting(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    result: list[ast.stmt] = []
    for statement in body:
        result.append(statement)
        if isinstance(statement, ast.Return | ast.Break | ast.Continue):
            continue
        test = getattr(statement, "test", None)
        for block in ("body", "orelse"):
            if getattr(statement, block, None):
                setattr(statement, block, [*_forget(test), *_with_forgetting(getattr(statement, block))])
        result += _forget(statement)
    return result


class _Record(Record):
    """A record in the memory of the rank that runs."""

    @classmethod
    def cells_at(cls, address: int) -> Any:
        return _Fields(address)

    @classmethod
    def words(cls, address: int) -> Any:
        return _Words(address)


class _Words(_Record):
    def __getitem__(self, index: int) -> Any:
        return self.cells[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self.cells[index] = value


def _declarations() -> dict[str, dict[str, Any]]:
    """Run the sources that declare records, with records of this module."""
    spaces = {"typed_records": {**vars(typed_records), "Record": _Record, "Words": _Words}}
    for path in (_FOLDER.parent / "memory_layout.py", _FOLDER / "records.py"):
        tree, space = ast.parse(path.read_text()), {"__name__": path.stem}
        for node in [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]:
            tree.body.remove(node)
            space |= {alias.name: spaces[str(node.module)][alias.name] for alias in node.names}
        exec(compile(tree, str(path), "exec"), space)
        spaces[path.stem] = space
    return spaces


def _called_with_numbers(function: Any) -> Any:
    """Return a kernel as Python calls it, which passes records as numbers."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    kinds = [function.__globals__.get(function.__annotations__.get(name)) for name in names]

    def call(*arguments: Any) -> Any:
        return function(*(each if kind is None else kind(each) for kind, each in zip(kinds, arguments, strict=True)))

    return call


@cache
def _compiled(source: str) -> tuple[CodeType, list[tuple[str, list[str]]]]:
    """Return the code of a module of the kernels without its imports, and these: the modules and their names."""
    tree, imports = ast.parse(source), []
    for node in [node for node in tree.body if isinstance(node, ast.ImportFrom)]:
        tree.body.remove(node)
        imports.append((str(node.module), [alias.name for alias in node.names]))
    for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        function.decorator_list = []
        _Names().visit(function)
        function.body = _with_forgetting(function.body)
    return compile(ast.fix_missing_locations(tree), _FILE, "exec"), imports


def _load_module(name: str, loaded: dict[str, dict[str, Any]], constants: Mapping[str, int], faults: Any) -> Any:
    """Run the source of a module of the kernels, after those that it imports."""
    if name in loaded:
        return loaded[name]
    source = (_FOLDER / f"{name}.py").read_text()
    for module, before, after in faults:
        if module == name:
            assert source.count(before) == 1, f"{module} has {source.count(before)} times: {before}"
            source = source.replace(before, after)
    code, imports = _compiled(source)
    space: dict[str, Any] = {}
    for module, names in imports:
        if module in _DECLARATIONS:
            space |= {each: constants.get(each, _DECLARATIONS[module][each]) for each in names}
        elif module == "intrinsics":
            space |= {each: INTRINSICS[each] for each in names}
        elif module == "kernel_sets":
            space["ENABLE_CHECKS"] = False
        elif module == "compiler.compilation":
            space |= dict.fromkeys(names, lambda function: function)
        elif module != "__future__":
            imported = _load_module(module, loaded, constants, faults)
            space |= {each: imported[each] for each in names}
    exec(code, space)
    if name == "copying":
        space["copy_past"] = _copy_past  # blocks of whole lines, which are longer than the slots of a model
    space |= {each: value for each, value in _CONSTANTS.items() if each in space}
    loaded[name] = space
    return space


def _wait(group: int, address: int, value: int) -> int:
    now_running.ask("wait", (address,), value)
    return 0


def _wait_all(group: int, field: int, value: int) -> int:
    now_running.ask("wait", now_running.others(field), value)
    return 0


def _have_all(group: int, field: int, value: int) -> bool:
    return bool(now_running.ask("test", now_running.others(field), value))


def load_kernels(constants: Mapping[str, int], faults: Iterable[Fault], *, polls: bool) -> dict[str, Any]:
    """Return the kernels by name; without `polls` a wait, which then cannot fail, and a comparison are one step."""
    loaded: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    faults = list(faults)
    _load_module("arrival", loaded, constants, faults)
    if not polls:
        loaded["arrival"] |= {"wait": _wait, "wait_long": _wait, "wait_all": _wait_all, "have_all": _have_all}
    for name in _MODULES:
        space = _load_module(name, loaded, constants, faults)
        names = [each for each in kernels.COLLECTIVES.names if each in space]
        found |= {each: _called_with_numbers(space[each]) for each in names}
    unused = [fault for fault in faults if fault[0] not in loaded]
    assert not unused, f"no such module: {unused}"
    return found


# --- memory -------------------------------------------------------------------------------------------------------


class Suspend(BaseException):
    """A rank has asked the explorer for a value."""


class Rank:
    """The memory that only this rank uses, and what it has done since the explorer returned the last value."""

    def __init__(self, rank: int, size: int, item_bytes: int, may_expire: bool) -> None:
        self.rank, self.size, self.item_bytes, self.may_expire = rank, size, item_bytes, may_expire
        self.memory: dict[int, Any] = {}
        self.own: dict[int, Any] = {}
        """Fields of its own block, as this rank wrote them."""
        self.known: tuple[Any, ...] = ()
        self.position = 0
        self.effects: list[Op] = []
        self.asked: tuple[Op, list[Op], Hashable] | None = None
        """What it has asked for, what it has done since the last answer, and its state."""

    def ask(self, *op: Any) -> Any:
        if self.position == len(self.known):
            if self.asked is None:  # otherwise an `except` of the program has caught Suspend
                state = op, self._frames(), frozenset(self.memory.items()), frozenset(self.own.items())
                self.asked = op, list(self.effects), state
            raise Suspend
        value = self.known[self.position]
        self.position += 1
        if self.position == len(self.known):
            self.effects = []
        return value

    def _frames(self) -> Hashable:
        """Return the state of the kernel's frames; outside kernels the values so far, which determine everything."""
        frame, found = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename == _FILE:
                code: CodeType = frame.f_code
                found.append((code, frame.f_lasti, tuple(frame.f_locals.items())))
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(found) or self.known

    # --- fields

    def load(self, address: int, acquires: bool) -> Any:
        if address < SHARED:
            if self.may_expire and address == GROUP_ADDRESS + FIELD * records.GroupRecord.expired:
                return (
                    self.memory[GROUP_ADDRESS + FIELD * records.GroupRecord.current_seq]
                    if self.ask("choose", (0, 1))
                    else 0
                )
            return self.memory.get(address, 0)
        owner, field, is_data = self._place(address)
        if field in _HINTS:
            return self.ask("hint", owner)
        if is_data:
            return self.read([address])[0]
        if owner == self.rank:
            return self.own.get(address, 0)
        return self.ask("load", address, acquires)

    def others(self, field: int) -> tuple[int, ...]:
        """Return the addresses of a field in the blocks of the other ranks."""
        others = (other for other in range(self.size) if other != self.rank)
        return tuple(SHARED + other * memory_layout.BLOCK_BYTES + FIELD * field for other in others)

    def store(self, address: int, value: Any, releases: bool) -> None:
        if address < SHARED:
            self.memory[address] = value
            return
        owner, _, is_data = self._place(address)
        assert owner == self.rank, "a rank writes to its own block only"
        if is_data:
            self.effects.append(("write", (address,), (value,), False))
        else:
            self.own[address] = value
            self.effects.append(("store", address, value, releases))

    def _place(self, address: int) -> tuple[int, int, bool]:
        """Return the rank of a field of the status blocks, its number, and whether it is data, not synchronization."""
        owner, offset = divmod(address - SHARED, memory_layout.BLOCK_BYTES)
        assert owner < self.size and address % FIELD == 0
        field = offset // FIELD
        in_entry = (field - memory_layout.Block.ring) % memory_layout.Entry.FIELDS
        in_ring = field >= memory_layout.Block.ring
        is_data = in_ring and in_entry >= memory_layout.Entry.payload
        return owner, field, is_data or memory_layout.Block.kept <= field <= memory_layout.Block.unread

    # --- data

    def read(self, addresses: Iterable[int]) -> list[Any]:
        addresses = list(addresses)
        shared = tuple(address for address in addresses if address >= SHARED)
        values = iter(self.ask("read", shared)) if shared else iter(())
        return [next(values) if address >= SHARED else self.memory.get(address, 0) for address in addresses]

    def write(self, addresses: Iterable[int], values: Iterable[Any], bypasses: bool = False) -> None:
        shared = []
        for address, value in zip(addresses, values, strict=True):
            if address >= SHARED:
                shared.append((address, value))
            else:
                self.memory[address] = value
        if shared:
            self.effects.append(("write", *zip(*shared, strict=True), bypasses))

    def copy(self, target: int, source: int, num_bytes: int, bypasses: bool = False) -> int:
        assert num_bytes >= 0, "negative length"
        blocks_end = SHARED + self.size * memory_layout.BLOCK_BYTES
        in_block = SHARED <= target < blocks_end or SHARED <= source < blocks_end
        step = FIELD if in_block else self.item_bytes
        assert num_bytes % step == 0
        offsets = range(0, num_bytes, step)
        self.write([target + i for i in offsets], self.read(source + i for i in offsets), bypasses)
        return 0


now_running: Rank
"""The rank that runs at the moment."""


def run_as(rank: Rank) -> None:
    """Let a rank run."""
    global now_running
    now_running = rank


def _copy_past(target: int, source: int, num_bytes: int) -> int:
    return now_running.copy(target, source, num_bytes, True)


def _reduce(function: int, outs: int, num_outs: int, sources: int, num_sources: int, numel: int) -> None:
    """Combine symbolically: a result is the tuple of its operands."""
    rank = now_running
    firsts = [rank.memory[sources + FIELD * i] for i in range(num_sources)]
    targets = [rank.memory[outs + FIELD * i] for i in range(num_outs)]
    offsets = [i * rank.item_bytes for i in range(numel)]
    values = rank.read(first + offset for first in firsts for offset in offsets)
    results = list(zip(*(values[i * numel : (i + 1) * numel] for i in range(num_sources)), strict=True))
    for target in targets:
        rank.write([target + offset for offset in offsets], results)


INTRINSICS: dict[str, Any] = {
    "load": lambda address: now_running.load(address, False),
    "store": lambda address, value: now_running.store(address, value, False),
    "load_acquire": lambda address: now_running.load(address, True),
    "store_release": lambda address, value: now_running.store(address, value, True),
    "field_address": lambda record, field: record + FIELD * field,
    "copy": lambda target, source, num_bytes: now_running.copy(int(target), int(source), num_bytes),
    "fence": lambda: now_running.effects.append(("fence",)),
    "reduce": _reduce,
    "now": lambda: 0,
    **dict.fromkeys(("pause", "give_way", "sleep", "prefetch_lines", "claim_lines"), lambda *_: None),
    **dict.fromkeys(("copy_lines", "copy_lines_past", "this_core", "read_memory"), None),
}


# --- a rank's program: calls through the classes that also make real ones -------------------------------------------


class _Fields:
    """The status board, or the group record, as Python sees it."""

    def __init__(self, base: int) -> None:
        self.base = base

    def __getitem__(self, index: int) -> Any:
        return now_running.load(self.base + FIELD * int(index), False)

    def __setitem__(self, index: int, value: Any) -> None:
        value = int(value) if isinstance(value, Record) else value
        now_running.store(self.base + FIELD * int(index), value, False)


_DECLARATIONS = _declarations()


class _Board:
    fields = _Fields(SHARED)

    def block_address(self, rank: int) -> int:
        return SHARED + rank * memory_layout.BLOCK_BYTES

    def get(self, rank: int, field: int) -> Any:
        # Only texts of messages depend on these two.
        is_constant = field in (memory_layout.Block.exited, memory_layout.Block.blames)
        return 0 if is_constant else self.fields[rank * memory_layout.BLOCK_FIELDS + field]

    def set(self, rank: int, field: int, value: int) -> None:
        if field != memory_layout.Block.blames:
            self.fields[rank * memory_layout.BLOCK_FIELDS + field] = value


class _Log(CallLog):
    def _describe_call_of(self, other: int, seq: int) -> str:
        return ""

    def _waited_until(self, end: int) -> int:
        return 0  # times are no part of the model

    def wait_for_room(self, seq: int, code: int, shape: tuple[int, ...]) -> None:
        """Wait in one step, instead of polling."""
        now_running.ask("wait", now_running.others(memory_layout.Block.entered), seq - call_log.RING_LENGTH + 1)


class Calls:
    """The calls of a rank, made by :class:`SharedCalls` with the kernels of the model."""

    def __init__(self, rank: Rank, found: Mapping[str, Any], seq: int, spoiled: int) -> None:
        board: Any = _Board()
        _Log.publish = found["announce"]
        self.log = _Log("model", rank.rank, rank.size, board)
        self.log.log_fields[memory_layout.LogFields.sequence], self.log._spoiled = seq, spoiled
        self.shared = SharedGroup.__new__(SharedGroup)
        self.shared._rank, self.shared._call_log, self.shared.status_board = rank.rank, self.log, board
        self.shared.record = _DECLARATIONS["records"]["GroupRecord"](GROUP_ADDRESS)
        nothing: Any = SimpleNamespace(note_failed_call=lambda: None, where="model")
        self.shared.heap = nothing
        self.calls = SharedCalls.__new__(SharedCalls)
        self.calls.group = self.calls.call_queue = nothing
        self.calls.call_log, self.calls.shared = self.log, self.shared
        self.calls.rank, self.calls.size, self.calls.kernels = rank.rank, rank.size, dict(found)
        self.calls._lock_fields = [0, 0, 0]  # type: ignore[assignment]

    def run(self, code: int, shape: tuple[int, ...], kernel: str, arguments: tuple[int, ...], breaks: bool) -> str:
        """Make a call as `Group.perform` and `SharedOperation` do: return "ok" or the name of its error.

        The kernel "mpi" stands for none: a call of a backend in which no rank waits for another one, as in a broadcast
        of MPI at its root.
        """
        if kernel == "mpi":
            self.log.enter(code | ON_DEVICE, shape)  # without the time of its arrival
            self.log.announce()
            self.log.leave()
            return "ok"
        self.log.free = sys.maxsize  # of calls of kernels, machine code waits for the entry
        self.log.enter(code, shape)
        try:
            try:
                self.calls.run(kernel, CALLS, *arguments)
                if breaks and kernel != "barrier":
                    raise MemoryError
            except BaseException as error:
                if not isinstance(error, Suspend):
                    self.shared.abort()
                raise
            if breaks:  # in another backend, which has compared the calls by a barrier
                raise MemoryError
        except (TorchMPIError, MemoryError) as error:
            self.log.abandon()
            return type(error).__name__
        self.log.leave()
        return "ok"
