"""A model of the protocol of shared memory: all executions of a few calls of two or three ranks.

Memory is that of C11 with release and acquire: a load may return the last value that this rank must see, or any later
one. That includes all that processors with weak ordering (aarch64) do. With `is_tso` every store releases and every
load acquires, which includes all that x86 does. Non-temporal stores are ordered by a fence only, in both.

A rank's stores can be made at once, since others may still read older values. So an execution is determined by the
store that each load reads. The explorer runs one rank until it has to wait: at a load it tries every store that has
been made, and that the rank waits for a later one (partial-order reduction: other orders of the same loads are
equivalent). Of stores that lead to the same state it tries the first, which makes the fewest orders known. Where all
ranks wait for stores that nobody makes, one must be able to go on with the stores that there are.

Data (slots, payloads, KEPT, UNREAD) has no such freedom: vector clocks check that any two accesses, one of which
writes, are ordered by releases and acquires; then the timing of data cannot matter.

Checked are: no unordered access, right results, no state from which the ranks cannot finish, and a condition on the
outcomes of all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

from helpers.protocol_kernels import (
    CALLS,
    FIELD,
    GROUP_ADDRESS,
    LINE,
    OUTPUTS,
    SHARED,
    TABLE,
    TENSORS,
    TRANSFERS,
    Calls,
    Fault,
    Op,
    Rank,
    Suspend,
    load_kernels,
    run_as,
)
from torchmpi.communicators import call_log
from torchmpi.shared_memory import memory_layout
from torchmpi.shared_memory.kernels import records

Outcomes = tuple[str, ...]
_KERNELS = ("barrier", "allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "mpi")
_INITIAL = (0, None, 0)
_PENDING = 1 << 60  # time of a non-temporal store before the fence


class Call(NamedTuple):
    """One call of all ranks."""

    kernel: str
    length: int = 0
    """Elements of one rank's tensor."""
    root: int = -1
    breaks: int | None = None
    """A rank on which the call fails after its kernel."""


class Scenario(NamedTuple):
    """Calls of some ranks, one list for all of them or one for each."""

    size: int
    calls: tuple[Call, ...] | tuple[tuple[Call, ...], ...]
    whole_lines: int = 0
    """Up to this length tensors go through the slots as a whole."""
    item_bytes: int = LINE
    hints: tuple[int, ...] = (0,)
    """What a rank may read in FETCHES_SLOWLY of another."""
    expires: tuple[tuple[int, int], ...] = ()
    """Rank and number of calls that may time out."""
    constants: tuple[tuple[str, int], ...] = ()
    chunk_lines: int = 0
    """Length of a chunk at most; 0 for one line for each rank."""
    polls: bool = False
    """Whether waits are run as the loops that they are, also if no call fails."""

    def calls_of(self, rank: int) -> tuple[Call, ...]:
        """Return the calls of a rank."""
        first: Any = self.calls[0]
        return self.calls if isinstance(first, Call) else self.calls[rank]  # type: ignore[return-value]

    @property
    def fails(self) -> bool:
        """Whether a call may fail."""
        is_common = isinstance(self.calls[0], Call)
        return bool(self.expires) or not is_common or any(call.breaks is not None for call in self.calls_of(0))

    def is_right(self, outcomes: tuple[Outcomes, ...]) -> bool:
        """Return whether the errors of all ranks are those of the documentation.

        After a call that has failed on all ranks the next one succeeds on all; after one that has failed on some ranks
        only, it is refused on all.
        """
        if not self.fails:
            return all(each == "ok" for rank in outcomes for each in rank)
        by_call = list(zip(*outcomes, strict=True))
        for before, after in itertools.pairwise(by_call):
            is_mixed = 0 < before.count("ok") < self.size
            if ("ok" in after) if is_mixed else (set(after) != {"ok"}):
                return False
        return True


class Failure(AssertionError):
    """What the model has found, with the loads that lead to it."""


class _Boundary(NamedTuple):
    """The state of a rank between two calls."""

    index: int
    memory: Mapping[int, Any]
    own: Mapping[int, Any]
    spoiled: int
    outcomes: Outcomes


class Program:
    """The calls of one rank as an automaton: in each state it asks for something, and a value leads to the next."""

    def __init__(self, scenario: Scenario, rank: int, found: Mapping[str, Any]) -> None:
        self.scenario, self.rank, self.found = scenario, rank, found
        self.calls = scenario.calls_of(rank)
        self.ring_length = dict(scenario.constants).get("RING_LENGTH", memory_layout.RING_LENGTH)
        self.ops: list[Op] = []
        self._starts: list[tuple[_Boundary, tuple[Any, ...]]] = []
        self._numbers: dict[Any, int] = {}
        self._next: dict[tuple[int, Any], tuple[list[Op], int]] = {}
        chunk_lines = scenario.chunk_lines or scenario.size
        group = {
            records.GroupRecord.rank: rank,
            records.GroupRecord.size: scenario.size,
            records.GroupRecord.blocks: SHARED,
            records.GroupRecord.slots: SHARED + memory_layout.slots_begin(scenario.size),
            records.GroupRecord.num_slots: memory_layout.num_slots(scenario.size),
            records.GroupRecord.slot_bytes: LINE * max(chunk_lines, scenario.whole_lines),
            records.GroupRecord.max_chunk_bytes: LINE * chunk_lines,
            records.GroupRecord.whole_bytes: LINE * scenario.whole_lines,
            records.GroupRecord.own_segments: TABLE,
            # The ranks are not in their first call, unless the reuse of the ring is examined.
            records.GroupRecord.free_until: 0 if scenario.constants else memory_layout.RING_LENGTH,
        }
        memory = {GROUP_ADDRESS + FIELD * field: value for field, value in group.items()}
        self.first = self._run(_Boundary(0, memory, {}, 0, ()), ())

    def step(self, number: int, value: Any) -> tuple[list[Op], int]:
        """Continue a state with a value; return what the rank does, and its next state."""
        known = self._next.get((number, value))
        if known is None:
            boundary, values = self._starts[number]
            known = self._next[number, value] = self._run(boundary, (*values, value))
        return known

    def _run(self, boundary: _Boundary, known: tuple[Any, ...]) -> tuple[list[Op], int]:
        done: list[Op] = []
        while boundary.index < len(self.calls):
            call, seq = self.calls[boundary.index], boundary.index + 1
            may_expire = (self.rank, seq) in self.scenario.expires
            rank = Rank(self.rank, self.scenario.size, self.scenario.item_bytes, may_expire)
            rank.memory, rank.own, rank.known = dict(boundary.memory), dict(boundary.own), known
            rank.memory |= self._inputs(call, seq)
            run_as(rank)
            with mock.patch.object(call_log, "RING_LENGTH", self.ring_length):
                calls = Calls(rank, self.found, boundary.index, boundary.spoiled)
            code = _KERNELS.index(call.kernel) | (call.root + 1) << 8
            breaks = call.breaks == self.rank
            problem = None
            try:
                with mock.patch.object(call_log, "RING_LENGTH", self.ring_length):
                    outcome = calls.run(code, (call.length,), call.kernel, self._arguments(call), breaks)
                if outcome == "ok":
                    problem = self._problem(call, seq, rank)
            except Suspend:
                assert rank.asked is not None
                op, effects, state = rank.asked
                return [*done, *effects], self._number((boundary.index, boundary.outcomes, state), op, boundary, known)
            except Exception as error:
                problem = f"{call.kernel}: {type(error).__name__}: {error}"
            if problem is not None:
                return done, self._number(problem, ("wrong", problem), boundary, known)
            done += rank.effects
            memory = {address: value for address, value in rank.memory.items() if address < TENSORS}
            boundary = _Boundary(seq, memory, rank.own, calls.log._spoiled, (*boundary.outcomes, outcome))
            known = ()
        op = ("end", boundary.outcomes)
        return done, self._number(op, op, boundary, known)

    def _number(self, key: Any, op: Op, boundary: _Boundary, known: tuple[Any, ...]) -> int:
        number = self._numbers.setdefault(key, len(self.ops))
        if number == len(self.ops):
            self.ops.append(op)
            self._starts.append((boundary, known))
        assert self.ops[number] == op, "two states of a program have one key"
        return number

    # --- arguments and results

    def _inputs(self, call: Call, seq: int) -> dict[int, Any]:
        fields = {
            records.KernelCall.group: GROUP_ADDRESS,
            records.KernelCall.item_bytes: self.scenario.item_bytes,
            records.KernelCall.root: call.root,
            records.KernelCall.transfers: TRANSFERS,
        }
        values = [(self.rank, index, seq) for index in range(call.length)]
        tensor = {TENSORS + self.scenario.item_bytes * index: value for index, value in enumerate(values)}
        return {**{CALLS + FIELD * field: value for field, value in fields.items()}, **tensor}

    def _arguments(self, call: Call) -> tuple[int, ...]:
        num_bytes = call.length * self.scenario.item_bytes
        return {
            "barrier": (0, 0),
            "mpi": (),
            "allreduce": (TENSORS, call.length),
            "broadcast": (TENSORS, num_bytes),
            "allgather": (TENSORS, num_bytes, OUTPUTS),
            "reduce_scatter": (TENSORS, call.length, self.scenario.item_bytes, OUTPUTS),
            "alltoall": (TENSORS, call.length, self.scenario.item_bytes, OUTPUTS),
        }[call.kernel]

    def _problem(self, call: Call, seq: int, rank: Rank) -> str | None:
        size, length = self.scenario.size, call.length
        inputs = [[(other, index, seq) for index in range(length)] for other in range(size)]
        least, more = divmod(length, size)
        begin = self.rank * least + min(self.rank, more)
        end = begin + least + (self.rank < more)
        total: list[Any] = list(zip(*inputs, strict=True))
        expected: list[Any]
        if call.kernel in ("allreduce", "broadcast", "barrier", "mpi"):
            target, expected = TENSORS, inputs[self.rank]
            if call.kernel == "broadcast":
                expected = inputs[call.root]
            elif call.kernel == "allreduce" and call.root in (-1, self.rank):
                expected = total
        else:
            target = OUTPUTS
            moved = [value[begin:end] if call.kernel == "alltoall" else value for value in inputs]
            expected = total[begin:end] if call.kernel == "reduce_scatter" else list(itertools.chain(*moved))
        actual = [rank.memory.get(target + self.scenario.item_bytes * index) for index in range(len(expected))]
        return None if actual == expected else f"wrong result of {call.kernel}: {actual} instead of {expected}"


# --- all executions -------------------------------------------------------------------------------------------------

Clock = tuple[int, ...]
Message = tuple[Any, Clock | None, int]
"""A store to a field: value, the clock that it releases, and its time."""
Cell = tuple[Any, int, int, tuple[int, ...]]
"""Data: value, who has written it and when, and when each rank has read it."""


class State:
    """The states of the programs, and the memory that they share."""

    __slots__ = ("cells", "clocks", "messages", "numbers", "waits")

    def __init__(self, numbers: list[int], clocks: list[Clock]) -> None:
        self.numbers, self.clocks = numbers, clocks
        self.waits = [-1] * len(numbers)
        """Of ranks that wait for a later store: one more than the stores to the field so far, or 0; -1 of others."""
        self.messages: dict[int, tuple[int, tuple[Message, ...]]] = {}
        """For each field: the number of stores, and those that a rank may still read."""
        self.cells: dict[int, Cell] = {}

    def copy(self) -> State:
        """Return a state to be changed."""
        copied = State(list(self.numbers), list(self.clocks))
        copied.waits = list(self.waits)
        copied.messages, copied.cells = dict(self.messages), dict(self.cells)
        return copied

    def key(self) -> Any:
        """Return a value that is equal for equal states."""
        shared = frozenset(self.messages.items()), frozenset(self.cells.items())
        return tuple(self.numbers), tuple(self.clocks), tuple(self.waits), *shared


def _join(a: Clock, b: Clock) -> Clock:
    return tuple(map(max, a, b))


class Explorer:
    """Visits all states of a scenario."""

    def __init__(self, scenario: Scenario, *, is_tso: bool = False, faults: Iterable[Fault] = ()) -> None:
        self.scenario, self.is_tso, self.size = scenario, is_tso, scenario.size
        found = load_kernels(dict(scenario.constants), faults, polls=scenario.polls or scenario.fails)
        self.programs = [Program(scenario, rank, found) for rank in range(self.size)]
        self.num_states = 0
        self.outcomes: set[tuple[Outcomes, ...]] = set()

    def run(self, most_states: int = 1_000_000) -> Explorer:
        """Visit all states; raise :class:`Failure` for the first problem."""
        clocks = [tuple(int(rank == other) for other in range(self.size)) for rank in range(self.size)]
        first = State([program.first[1] for program in self.programs], clocks)
        self._came: list[tuple[int, str]] = [(-1, "start")]
        for rank, program in enumerate(self.programs):
            self._apply(first, rank, program.first[0], 0, "")
        for rank in range(self.size):
            self._advance(first, rank, 0, "")
        numbers, waiting = {first.key(): 0}, [(0, first)]
        while waiting:
            number, state = waiting.pop()
            if all(op[0] == "end" for op in self._ops(state)):
                self._check_outcomes(state, number)
                continue
            followings = list(self._following(state, number))
            # If one could, a rank waits here for a store after the last one; where it does not, it goes on.
            if not followings and not any(self._can_go_on(state, rank, number) for rank in range(self.size)):
                self._fail("the ranks wait for each other", number)
            for following, what in followings:
                key = following.key()
                if key not in numbers:
                    numbers[key] = len(numbers)
                    self._came.append((number, what))
                    waiting.append((numbers[key], following))
                    if len(numbers) > most_states:
                        raise Failure(f"more than {most_states} states")
        self.num_states = len(numbers)
        return self

    def _ops(self, state: State) -> list[Op]:
        return [program.ops[at] for program, at in zip(self.programs, state.numbers, strict=True)]

    def _check_outcomes(self, state: State, number: int) -> None:
        outcomes = tuple(op[1] for op in self._ops(state))
        self.outcomes.add(outcomes)
        if not self.scenario.is_right(outcomes):
            self._fail(f"outcomes {outcomes}", number)

    def _following(self, state: State, number: int) -> Iterator[tuple[State, str]]:
        """Yield the next states of the first rank that does not wait; none if all wait or have ended."""
        for rank, op in enumerate(self._ops(state)):
            if op[0] == "end":
                continue
            if state.waits[rank] >= 0 and not self._has_come(state, rank, op):
                continue
            yield from self._after(state, rank, op, number)
            if op[0] == "load" or (op[0] in ("wait", "test") and self._when_reached(state, rank, op) is None):
                following = state.copy()
                following.waits[rank] = 1 + state.messages.get(op[1], (0, ()))[0] if op[0] == "load" else 0
                yield following, ""
            return

    def _has_come(self, state: State, rank: int, op: Op) -> bool:
        if op[0] == "load":
            return state.messages.get(op[1], (0, ()))[0] >= state.waits[rank]
        return self._when_reached(state, rank, op) is not None

    def _can_go_on(self, state: State, rank: int, number: int) -> bool:
        """Return whether a rank, alone and with the stores that there are, stores to a field or ends."""
        released = state.copy()
        released.waits[rank] = -1
        seen, waiting = {released.key()}, [released]
        while waiting:
            each = waiting.pop()
            op = self._ops(each)[rank]
            if op[0] == "end" or each.messages != state.messages:
                return state.numbers[rank] != each.numbers[rank]
            for following in self._after(each, rank, op, number):
                if (key := following[0].key()) not in seen:
                    seen.add(key)
                    waiting.append(following[0])
        return False

    # --- one rank

    def _after(self, state: State, rank: int, op: Op, number: int) -> Iterator[tuple[State, str]]:
        for value, clock, what in self._choices(state, rank, op):
            following, step = state.copy(), f"rank {rank}: {what}"
            following.waits[rank] = -1
            if clock is not None:
                following.clocks[rank] = _join(state.clocks[rank], clock)
            self._continue(following, rank, value, number, step)
            self._advance(following, rank, number, step)
            yield following, step

    def _choices(self, state: State, rank: int, op: Op) -> Iterator[tuple[Any, Clock | None, str]]:
        if op[0] == "choose":
            yield from ((value, None, f"{'times out' if value else 'waits'}") for value in op[1])
        elif op[0] == "hint":
            yield from ((value, None, f"hint {value}") for value in self.scenario.hints)
        elif op[0] == "load":
            _, address, acquires = op
            seen = []
            for value, clock, _ in self._readable(state, rank, address):
                # A later store that leads to the same state would only make more orders known.
                if (after := self.programs[rank].step(state.numbers[rank], value)) not in seen:
                    seen.append(after)
                    yield value, clock if acquires or self.is_tso else None, f"{_name(address)} = {value}"
        elif op[0] in ("wait", "test"):
            _, addresses, least = op
            what = f"{_name(addresses[0])}{', ...' * (len(addresses) > 1)}"
            oldest = [self._readable(state, rank, address)[0][0] for address in addresses]
            if op[0] == "test" and min(oldest) < least and state.waits[rank] < 0:
                yield False, None, f"{what} < {least}"
            clock = self._when_reached(state, rank, op)
            if clock is not None:
                yield True, clock, f"{what} >= {least}"

    def _when_reached(self, state: State, rank: int, op: Op) -> Clock | None:
        """Return what the first stores of a value, or a greater one, to some fields make known; None without them."""
        clock = state.clocks[rank]
        for address in op[1]:
            readable = self._readable(state, rank, address)
            reached = next((message for message in readable if message[0] >= op[2]), None)
            if reached is None:
                return None
            clock = _join(clock, reached[1] or clock)
        return clock

    def _readable(self, state: State, rank: int, address: int) -> tuple[Message, ...]:
        """Return the stores to a field that a rank may read: the last one that it must know, and later ones."""
        count, messages = state.messages.get(address, (0, (_INITIAL,)))
        seen = state.clocks[rank][(address - SHARED) // memory_layout.BLOCK_BYTES]
        first = max(index for index, message in enumerate(messages) if message[2] <= seen)
        if state.waits[rank] > 0:
            first = max(first, len(messages) - (count + 1 - state.waits[rank]))
        return messages[first:]

    def _advance(self, state: State, rank: int, number: int, what: str) -> None:
        """Let a rank go on until it asks for something that depends on the order of execution."""
        program = self.programs[rank]
        while True:
            op = program.ops[state.numbers[rank]]
            value: Any = 0
            if op[0] == "wrong":
                self._fail(f"rank {rank}: {op[1]}", number, what)
            elif op[0] == "read":
                value = tuple(self._read(state, rank, cell, number, what) for cell in op[1])
            elif op[0] == "hint" and len(self.scenario.hints) == 1:
                value = self.scenario.hints[0]
            elif op[0] != "load" or self.scenario.fails or _field(op[1]) != memory_layout.Block.refused:
                return
            self._continue(state, rank, value, number, what)

    def _continue(self, state: State, rank: int, value: Any, number: int, what: str) -> None:
        effects, state.numbers[rank] = self.programs[rank].step(state.numbers[rank], value)
        self._apply(state, rank, effects, number, what)

    def _apply(self, state: State, rank: int, effects: Iterable[Op], number: int, what: str) -> None:
        for effect in effects:
            if effect[0] == "store":
                _, address, value, releases = effect
                self._store(state, rank, address, value, releases or self.is_tso)
            elif effect[0] == "write":
                _, cells, values, bypasses = effect
                for cell, value in zip(cells, values, strict=True):
                    self._write(state, rank, cell, value, bypasses, number, what)
            else:  # a fence
                for cell, (value, writer, time, reads) in state.cells.items():
                    if writer == rank and time == _PENDING:
                        state.cells[cell] = value, writer, state.clocks[rank][rank], reads

    def _store(self, state: State, rank: int, address: int, value: Any, releases: bool) -> None:
        clock, time = state.clocks[rank], state.clocks[rank][rank]
        count, messages = state.messages.get(address, (0, (_INITIAL,)))
        messages = (*messages, (value, clock if releases else None, time))
        # What no rank can read any more is forgotten.
        firsts = [
            max(index for index, message in enumerate(messages) if message[2] <= state.clocks[other][rank])
            for other in range(self.size)
            if other != rank
        ]
        state.messages[address] = count + 1, messages[min(firsts) :]
        if releases:
            state.clocks[rank] = (*clock[:rank], time + 1, *clock[rank + 1 :])

    def _read(self, state: State, rank: int, cell: int, number: int, what: str) -> Any:
        value, writer, time, reads = state.cells.get(cell, (0, rank, 0, (0,) * self.size))
        if writer != rank and state.clocks[rank][writer] < time:
            self._fail(f"rank {rank} reads {_name(cell)}, which rank {writer} writes at the same time", number, what)
        reads = (*reads[:rank], state.clocks[rank][rank], *reads[rank + 1 :])
        state.cells[cell] = value, writer, time, reads
        return value

    def _write(self, state: State, rank: int, cell: int, value: Any, bypasses: bool, number: int, what: str) -> None:
        _, writer, time, reads = state.cells.get(cell, (0, rank, 0, (0,) * self.size))
        clock = state.clocks[rank]
        if writer != rank and clock[writer] < time:
            self._fail(f"rank {rank} writes {_name(cell)} at the same time as rank {writer}", number, what)
        for other, read in enumerate(reads):
            if other != rank and clock[other] < read:
                self._fail(f"rank {rank} writes {_name(cell)}, which rank {other} reads at the same time", number, what)
        state.cells[cell] = value, rank, _PENDING if bypasses else clock[rank], (0,) * self.size

    def _fail(self, problem: str, number: int, what: str = "") -> None:
        steps = [what] if what else []
        while number >= 0:
            number, step = self._came[number]
            steps += [step] if step else []
        raise Failure("\n".join([problem, *reversed(steps)]))


def _field(address: int) -> int:
    return (address - SHARED) % memory_layout.BLOCK_BYTES // FIELD


def _name(address: int) -> str:
    rank, field = (address - SHARED) // memory_layout.BLOCK_BYTES, _field(address)
    for name, declared in memory_layout.Block.fields.items():
        if declared.number == field and name != "ring":
            return f"{name} of rank {rank}"
    entry, rest = divmod(field - memory_layout.Block.ring, memory_layout.Entry.FIELDS)
    if 0 <= entry < memory_layout.RING_LENGTH:
        kind = ("sequence number", "signature", "payload")[min(rest, memory_layout.Entry.payload)]
        return f"{kind} of entry {entry} of rank {rank}"
    return f"byte {address - SHARED} of the segment"
