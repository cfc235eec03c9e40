"""A process that applies rules is killed between any two instructions: chunks stay consistent, locks are recovered."""

from __future__ import annotations

import builtins
import ctypes
import errno
import itertools
import os
import platform
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from shard_rig import Rig, Twin, dead_process, fork

from torchmpi.parameterserver import adam, register_rule, rules, sgd
from torchmpi.parameterserver.shards import Actor, process_start
from torchmpi.shared_memory.kernels import shard_layout as fields

NUMEL = 11  # memcpy of the C library uses two stores
STEPPED_RULES = ("add", sgd(0.1, 0.9), adam(0.1))


# --- all states after a kill: the process is single-stepped


class Memory:
    """The shared memory of a chunk and of the first actors; can be saved and restored."""

    def __init__(self, rig: Rig) -> None:
        chunk = np.frombuffer(rig.shards.segment.memory, np.uint8)
        actors = np.frombuffer(rig.actors.memory, np.uint8)
        base, first = rig.shards.segment.address, rig.shards.table[0]
        starts = [int(start) - base for start in first[fields.SHARD_ARRAYS : fields.SHARD_BEGIN]]
        self.parts = [chunk[:24], *(chunk[start : start + 4 * NUMEL] for start in starts)]
        for row in range(0, 6 * fields.BLOCK_BYTES, fields.BLOCK_BYTES):
            scratches = range(row + fields.SCRATCH_START, row + fields.BLOCK_BYTES, fields.CHUNK_BYTES)
            self.parts += [actors[row : row + 72], *(actors[start : start + 4 * NUMEL] for start in scratches)]

    def save(self) -> list[bytes]:
        return [part.tobytes() for part in self.parts]

    def restore(self, saved: list[bytes]) -> None:
        for part, data in zip(self.parts, saved, strict=True):
            part[:] = np.frombuffer(data, np.uint8)


_TRACE_ME, _SINGLE_STEP = 0, 9


def ptrace(request: int, process: int = 0) -> int:
    function = ctypes.PyDLL(None, use_errno=True).ptrace
    function.argtypes, function.restype = [ctypes.c_long] * 4, ctypes.c_long
    return function(request, process, 0, 0)


def states_of(memory: Memory, prepare) -> list[list[bytes]]:
    """The content of memory after each instruction that changed it, in a process that runs what `prepare` returns."""

    def work() -> None:
        if ptrace(_TRACE_ME) != 0:
            os._exit(77)
        task, arguments = prepare()
        os.kill(os.getpid(), signal.SIGSTOP)
        task(*arguments)
        os.kill(os.getpid(), signal.SIGSTOP)

    process = fork(work)
    _, status = os.waitpid(process, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 77:
        pytest.skip("this system allows no ptrace")
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
    states = [memory.save()]
    for _ in range(200_000):
        assert ptrace(_SINGLE_STEP, process) == 0
        _, status = os.waitpid(process, 0)
        assert os.WIFSTOPPED(status), status
        if os.WSTOPSIG(status) == signal.SIGSTOP:
            break
        now = memory.save()
        if now != states[-1]:
            states.append(now)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return states


def content(rig: Rig) -> tuple[object, ...]:
    return (rig.headers()[0, 1:].tolist(), *(rig.arrays(which).tolist() for which in range(3)))


def ready(rig: Rig, actor: Actor, rule, sent: torch.Tensor) -> int:
    """Prepare a pass; return the address of its plan."""
    actor._prepare(rig.shards, sent.data_ptr(), (0, NUMEL), rules.prepare(rule, rig.dtype))
    return actor._address


def rescue(rig: Rig, actor: Actor, sent: torch.Tensor) -> None:
    """Do what a pass does after waiting for a lock for a tenth of a second."""
    holder = int(rig.headers()[0, fields.LOCK])
    if holder:
        ready(rig, actor, "add", sent)
        actor._plan[fields.HOLDER] = holder
        actor._check_holder()
    assert rig.headers()[0, fields.LOCK] == 0


needs_stepping = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="single-stepping breaks atomic operations of other processors"
)


def one_pass(rig: Rig, rule, sent: torch.Tensor):
    """Single-step a pass of the first actor: return the content before, all states, and the content after."""
    rig.apply(rig.actor(0), rule, sent)
    memory, before = Memory(rig), content(rig)

    def prepare():
        actor = rig.actor(0)
        return actor._pass_over, (ready(rig, actor, rule, sent),)

    states = states_of(memory, prepare)
    twin = Twin(rig)
    for _ in range(2):
        twin.apply(rule, sent, (0, NUMEL))
    twin.agrees(rig)
    return memory, before, states, content(rig)


def is_held(state: list[bytes]) -> bool:
    return np.frombuffer(state[0], np.int64)[fields.LOCK] != 0


@needs_stepping
@pytest.mark.parametrize("rule", STEPPED_RULES, ids=str)
def test_kill_after_any_instruction_of_a_pass(rule):
    rig, sent = Rig((NUMEL,), shared=True), torch.linspace(-1, 1, NUMEL)
    memory, before, states, after = one_pass(rig, rule, sent)
    last, outcomes = rig.actor(2), []
    for state in states:
        memory.restore(state)
        rescue(rig, last, sent)
        outcomes.append((before, after).index(content(rig)))
    assert outcomes == sorted(outcomes), "a completed update must not be undone"
    assert sum(map(is_held, states)) > 8 and outcomes.count(0) > 3 and outcomes.count(1) > 3


@needs_stepping
def test_kill_after_any_instruction_of_a_takeover():
    rig, sent = Rig((NUMEL,), shared=True), torch.linspace(-1, 1, NUMEL)
    memory, _before, states, after = one_pass(rig, sgd(0.1, 0.9), sent)
    last, outcomes = rig.actor(2), set()

    def take_over():
        actor = rig.actor(1)
        ready(rig, actor, "add", sent)
        actor._plan[fields.HOLDER] = rig.headers()[0, fields.LOCK]
        return actor._kernels["take_over"], (actor._address,)

    held = [state for state in states if is_held(state)]
    for state in (held[0], *held[-8::2]):  # before the record, and between the stores of the chunk
        memory.restore(state)
        rescue(rig, last, sent)
        outcome = content(rig)
        memory.restore(state)
        for second in states_of(memory, take_over):
            memory.restore(second)
            rescue(rig, last, sent)
            assert content(rig) == outcome, "the second death changed what became of the first"
        outcomes.add(outcome == after)
    assert outcomes == {False, True}


@needs_stepping
def test_kill_after_any_instruction_at_the_end_of_a_registered_rule(monkeypatch):
    monkeypatch.setattr(rules, "_registered", {})
    register_rule("plus", lambda value, sent, state: (value.add_(sent), state.sub_(sent)), num_states=1)
    rig, sent = Rig((NUMEL,), shared=True), torch.linspace(-1, 1, NUMEL)
    last, memory, before = rig.actor(2), Memory(rig), content(rig)

    def end_of_pass():
        actor = rig.actor(0)
        address = ready(rig, actor, "plus", sent)
        assert actor._kernels["take_chunk"](address) == fields.TAKEN
        actor._call_function(rig.shards, sent.data_ptr(), rules.prepare("plus", rig.dtype))
        return actor._kernels["end_chunk"], (address, 1)

    states = states_of(memory, end_of_pass)
    after = content(rig)
    assert after == ([1, 1], sent.tolist(), (-sent).tolist(), [0.0] * NUMEL)
    outcomes = []
    for state in states:
        memory.restore(state)
        rescue(rig, last, sent)
        outcomes.append((before, after).index(content(rig)))
    assert outcomes == sorted(outcomes) and set(outcomes) == {0, 1}


# --- states after several kills, and other ends of a process


def write_block(rig: Rig, number: int, *, process: int, redo: float | None = None, taking: int = 0) -> None:
    """Write the block of a dead actor; with `redo`, about to set all values of its chunk to that number."""
    row = rig.block(number)
    row[:9] = 0
    row[fields.PROCESS], row[fields.STARTED], row[fields.TAKING] = process, 12345, taking
    if redo is not None:
        start = (number - 1) * fields.BLOCK_BYTES + fields.SCRATCH_START
        np.frombuffer(rig.actors.memory, np.float32, NUMEL, start)[:] = redo
        row[fields.REDO], row[fields.NEW_VERSION], row[fields.NEW_STEPS] = 1, 8, 3
        row[fields.NEW_BYTES] = 4 * NUMEL


def dead_states():
    """Name, {actor: (redo, actor that it takes over from)}, holder of the lock, whether the redo record is applied."""
    yield "died before the record", {1: (None, 0)}, 1, False
    yield "died after it", {1: (5.0, 0)}, 1, True
    yield "died in a takeover before the record", {1: (None, 0), 3: (None, 1)}, 3, False
    yield "died in a takeover before the end", {1: (5.0, 0), 3: (None, 1)}, 3, True
    yield "three in a row", {1: (5.0, 0), 3: (None, 1), 4: (None, 3)}, 4, True
    yield "died before the takeover", {1: (5.0, 0), 3: (None, 1)}, 1, True
    yield "a record of another chunk", {1: (None, 0), 2: (5.0, 0)}, 1, False


@pytest.mark.parametrize("case", list(dead_states()), ids=lambda case: case[0])
@pytest.mark.parametrize("in_python", (False, True), ids=("native", "in Python"))
def test_states_after_several_kills(case, in_python, monkeypatch):
    """In a pass, which waits for the lock, checks its holder, and takes over."""
    _, rows, holder, is_redone = case
    monkeypatch.setattr(rules, "_registered", {})
    register_rule("plus", lambda value, sent: value.add_(sent))
    rig = Rig((NUMEL,))
    process = dead_process()
    for number, (redo, taking) in rows.items():
        write_block(rig, number, process=process, redo=redo, taking=taking)
    rig.shards.headers(0)[0, :3] = torch.tensor([holder, 7, 2])
    rig.shards.array(0)[:3] = 5.0 if is_redone else 0.0  # partly written
    rig.apply(rig.actor(2), "plus" if in_python else "add", torch.ones(NUMEL))
    assert rig.headers().tolist() == [[0, 9, 3] if is_redone else [0, 8, 2]]
    assert rig.arrays().tolist() == [6.0 if is_redone else 1.0] * NUMEL
    rig.close()


def test_a_reused_process_id():
    rig = Rig((NUMEL,))
    write_block(rig, 1, process=os.getpid())  # alive, but not since then
    rig.shards.headers(0)[0, fields.LOCK] = 1
    assert rig.read(rig.actor(2)).tolist() == [0.0] * NUMEL


def test_a_zombie_process_is_dead():
    rig = Rig((NUMEL,), shared=True)
    process = fork(lambda: (rig.actor(0), os.kill(os.getpid(), signal.SIGKILL)))
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    rig.shards.headers(0)[0, fields.LOCK] = 1
    assert rig.read(rig.actor(2)).tolist() == [0.0] * NUMEL
    os.waitpid(process, 0)


def test_a_live_holder_keeps_the_lock_and_is_reported():
    rig = Rig((NUMEL,))
    holder, other, seen = rig.actor(0), rig.actor(2), []
    rig.shards.headers(0)[0, fields.LOCK] = holder.number

    def on_wait(number: int) -> None:
        seen.append(number)
        if len(seen) == 2:
            rig.shards.headers(0)[0, fields.LOCK] = 0

    other.on_wait = on_wait
    rig.apply(other, "add", torch.ones(NUMEL))
    assert seen == [holder.number] * 2
    assert rig.arrays().tolist() == [1.0] * NUMEL


def test_without_file_descriptors_no_process_is_considered_dead(monkeypatch):
    """The lock of a live holder was taken over."""
    rig = Rig((NUMEL,))
    holder = rig.actor(0)

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(builtins, "open", full)
    assert not holder.table.is_dead(holder.number)
    monkeypatch.undo()
    assert process_start(os.getpid()) > 0 and not holder.table.is_dead(holder.number)


# --- kills at random times, with concurrent actors


def numbers_of(rule, gradient: float):
    """An element and its states after 0, 1, 2, ... updates."""
    rig = Rig((1,))
    actor, sent = rig.actor(0), torch.full((1,), gradient)
    while True:
        yield [rig.arrays(which).item() for which in range(3)]
        rig.apply(actor, rule, sent)


@pytest.mark.parametrize("rule", ("copy", adam(0.1)), ids=("copy", "adam"))
def test_random_kills_during_concurrent_updates(rule):
    """All elements of a chunk are equal and correspond to its VERSION: a partial or lost update would show."""
    chunk, choose = 4096, random.Random(1)
    rig = Rig((3 * chunk, chunk + 5), chunk=chunk, shared=True)
    own, numbers, series = rig.actor(0), [], numbers_of(rule, 0.5)

    def work(index: int) -> None:
        actor = rig.actor(index)
        for round in range(10**6):
            rig.apply(actor, rule, torch.full((rig.numel,), 10.0 * round + index if rule == "copy" else 0.5))

    for _ in range(5):
        children = [fork(lambda index=index: work(index)) for index in (1, 2, 3)]
        for child in children:
            end = time.monotonic() + choose.uniform(0.002, 0.02)
            while time.monotonic() < end:
                rig.read(own)
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        rig.read(own)  # takes over the locks of killed processes
        header, arrays = rig.headers().tolist(), [rig.arrays(which) for which in range(3)]
        numbers += itertools.islice(series, max(0, max(row[fields.VERSION] for row in header) + 1 - len(numbers)))
        for (lock, version, steps), (begin, end) in zip(header, rig.chunks(), strict=True):
            found = [array[begin:end].unique().tolist() for array in arrays]
            assert [len(several) for several in found] == [1, 1, 1], f"the chunk at {begin} is not whole"
            if rule != "copy":
                assert [several[0] for several in found] == numbers[version], f"chunk at {begin}, version {version}"
            assert (lock, steps) == (0, 0 if rule == "copy" else version)
    assert min(row[fields.VERSION] for row in header) > 10
    rig.close()
