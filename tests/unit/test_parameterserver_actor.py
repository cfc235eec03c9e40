"""To a user of servers: rules applied to shards by several processes have the bits of plain torch."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.shard_rig import Rig, Twin, fork
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmpi import errors
from torchmpi.communicators import levels
from torchmpi.parameterserver import Rule, adagrad, adam, axpby, register_rule, rules, scaled_add, sgd
from torchmpi.parameterserver.kernels import shard_layout as fields
from torchmpi.parameterserver.kernels.server_rules import state_dtype
from torchmpi.parameterserver.server_rows import Rows
from torchmpi.parameterserver.shards import CLIENT, SERVER, Actor, RuleFailure, Versions
from torchmpi.shared_memory.process_vm import has_ended

PLAIN_RULES = ("zero", "copy", "add", "max", "min")
FLOAT_RULES = (*PLAIN_RULES, scaled_add(-0.3), axpby(0.25, 0.7))
OPTIMIZERS = (
    sgd(0.1),
    sgd(0.1, 0.9, weight_decay=0.01),
    sgd(0.1, 0.9, nesterov=True),
    adagrad(0.1, weight_decay=0.01),
    adam(0.1),
    adam(0.01, (0.5, 0.75), eps=1e-3, weight_decay=0.1),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int64)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Remove the rules that a test registers."""
    monkeypatch.setattr(rules, "_registered", dict(rules._registered))


def values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


# --- sequential


@st.composite
def passes(draw, rig: Rig, optimizer: Rule):
    """An actor, a rule, and a range of whole chunks."""
    begin, end = sorted(draw(st.tuples(*[st.integers(0, len(rig.chunks()) - 1)] * 2)))
    # A single optimizer: the states of another could lead to square roots of negative numbers.
    rule = draw(st.sampled_from((*FLOAT_RULES, optimizer) if rig.dtype.is_floating_point else PLAIN_RULES))
    return draw(st.integers(0, 5)), rule, (rig.chunks()[begin][0], rig.chunks()[end][1]), draw(st.integers(0, 99))


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_random_sequences_of_passes(data):
    numels = tuple(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4)))
    rig = Rig((*numels, 1), data.draw(st.sampled_from(DTYPES)), chunk=data.draw(st.integers(1, 17)))
    actors = [rig.actor(index, kind) for index in range(3) for kind in (CLIENT, SERVER)]
    twin, optimizer = Twin(rig), data.draw(st.sampled_from(OPTIMIZERS))
    for index, rule, span, seed in data.draw(st.lists(passes(rig, optimizer), min_size=1, max_size=25)):
        actor, sent = actors[index], values(span[1] - span[0], rig.dtype, seed)
        seen = twin.inside(span)
        found = sum(twin.versions[chunk] for chunk in seen)
        rig.apply(actor, rule, sent, span)
        assert (actor.num_chunks, actor.versions) == (len(seen), found)
        twin.apply(rule, sent, span)
        assert torch.equal(rig.read(actors[-1 - index], span), twin.values[slice(*span)])
    twin.agrees(rig)
    rig.close()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64), ids=str)
def test_chunks_of_full_size(dtype):
    """64 KB, several in a shard, with incomplete last chunks."""
    chunk = Rig((1,), dtype).shards.chunk_numel
    rig = Rig((2 * chunk + 7, 0, chunk, chunk - 1), dtype)
    twin, actors = Twin(rig), [rig.actor(0), rig.actor(3)]
    whole, middle = (0, rig.numel), (chunk, 3 * chunk + 7)
    chosen = (*FLOAT_RULES, OPTIMIZERS[-1]) if dtype.is_floating_point else PLAIN_RULES
    for seed, (rule, span) in enumerate(itertools.product(chosen, (whole, middle))):
        sent = values(span[1] - span[0], dtype, seed)
        rig.apply(actors[seed % 2], rule, sent, span)
        twin.apply(rule, sent, span)
    assert torch.equal(rig.read(actors[0]), twin.values)
    twin.agrees(rig)
    rig.close()


def test_long_reads_that_bypass_the_caches():
    rig = Rig(((2 << 20) + 5, 100000))
    actor, sent = rig.actor(0), torch.arange((2 << 20) + 100005, dtype=torch.float32)
    rig.apply(actor, "copy", sent)
    target = torch.full((rig.numel + 3,), -1.0)
    actor.visit(rig.shards, target[1:].data_ptr(), (0, rig.numel), None)
    assert torch.equal(target[1:-2], sent) and target[0] == target[-1] == target[-2] == -1
    rig.close()


@pytest.mark.parametrize("seed", range(12))
def test_passes_over_rows(seed):
    """Rows of any length in shards of any length: values, states and versions as by the rule on each row alone."""
    choose = random.Random(seed)
    row_numel, num_rows = choose.choice((1, 3, 8, 30)), choose.randint(1, 14)
    numel = row_numel * num_rows
    cuts = sorted(choose.randint(0, numel) for _ in range(3))
    rig = Rig(tuple(b - a for a, b in itertools.pairwise((0, *cuts, numel))), chunk=choose.choice((7, 16, 64)))
    actor, expected, state = rig.actor(1), torch.zeros(numel), torch.zeros(numel)
    versions = torch.zeros(len(rig.chunks()))
    known = Versions(len(rig.chunks()))
    for step in range(4):
        numbers = np.array(sorted(choose.sample(range(num_rows), choose.randint(1, num_rows))))
        rows, sent = Rows(numbers, row_numel), values(len(numbers) * row_numel, torch.float32, seed + step)
        elements = (torch.tensor(numbers)[:, None] * row_numel + torch.arange(row_numel)).view(-1)
        rule = rules.prepare(adagrad(0.5) if step % 2 else "add", torch.float32)
        if rule.num_states:
            rows.steps = actor.count_step(rig.shards, (0, numel))
        actor.visit(rig.shards, sent.data_ptr(), (0, rows.numel), rule, versions=known, rows=rows)
        if step % 2:
            state[elements] += sent * sent
            expected[elements] -= 0.5 * sent / (state[elements].sqrt() + 1e-10)
        else:
            expected[elements] += sent
        touched = [i for i, (a, b) in enumerate(rig.chunks()) if ((elements >= a) & (elements < b)).any()]
        versions[touched] += 1
        assert actor.num_chunks == len(touched)
        torch.testing.assert_close(rig.arrays(), expected)
        found = torch.full_like(sent, -1.0)
        actor.visit(rig.shards, found.data_ptr(), (0, rows.numel), None, rows=rows)
        torch.testing.assert_close(found, expected[elements])
        pieces = [rows.message_spans(begin, size, rig.shards.chunk_numel, 70) for begin, size in rig.shards.parts]
        joined = [span for piece in pieces for span in piece]
        assert [a for a, _ in joined[1:]] == [b for _, b in joined[:-1]] and joined[-1][1] == rows.numel
        of_parts = [rows.chunks(*part, rig.shards.chunk_numel) for part in rig.shards.parts]
        first = rig.shards.first_chunks
        assert [int(number) + first[i] for i, part in enumerate(of_parts) for number in part] == touched
    assert rig.headers()[:, fields.Header.version].tolist() == versions.tolist() == known.own.tolist()
    rig.close()


def test_a_span_without_elements_does_nothing():
    rig = Rig((0, 0, 5))
    actor = rig.actor(0)
    for span in ((0, 0), (5, 5)):
        rig.apply(actor, "add", torch.empty(0), span)
        assert (actor.num_chunks, actor.versions) == (0, 0)
    assert rig.headers()[:, fields.Header.version].tolist() == [0]


# --- concurrent


def test_concurrent_adds_of_processes_and_threads():
    """Integers, for an exact sum; overlapping ranges, and small chunks for contention."""
    rig = Rig((300, 257, 64), torch.int64, chunk=64, shared=True)
    spans = [(begin, end) for begin, _ in rig.chunks() for _, end in rig.chunks() if begin < end]
    rounds = 300

    def sends(number: int):
        choose = random.Random(number)
        for index in range(rounds):
            span = choose.choice(spans)
            yield torch.arange(span[1] - span[0]) + number * index, span

    def work(number: int) -> None:
        actor = rig.actor(number // 2, number % 2)
        for sent, span in sends(number):
            rig.apply(actor, "add", sent, span)

    def process(first: int) -> None:
        thread = threading.Thread(target=work, args=(first + 1,))
        thread.start()
        work(first)
        thread.join()

    children = [fork(lambda first=first: process(first)) for first in (2, 4, 6)]
    process(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    twin = Twin(rig)
    for number in range(8):
        for sent, span in sends(number):
            twin.apply("add", sent, span)
    twin.agrees(rig)
    rig.close()


def test_reads_are_consistent_per_chunk():
    rig = Rig((5000, 5000), torch.int32, chunk=1000, shared=True)
    writers = [rig.actor(index) for index in range(2)]
    reader, stop = rig.actor(2), threading.Event()

    def write(number: int) -> None:
        for value in range(1, 10**6):
            rig.apply(writers[number], "copy", torch.full((10000,), 2 * value + number, dtype=torch.int32))
            if stop.is_set():
                break

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    torn = []
    for _ in range(300):
        data = rig.read(reader)
        torn += [span for span in rig.chunks() if data[slice(*span)].unique().numel() > 1]
    stop.set()
    for thread in threads:
        thread.join()
    assert not torn
    rig.close()


# --- registered rules


def clipped(value, sent, limit=1.0):
    value.add_(sent.clamp(-limit, limit))


def with_states(value, sent, momentum, count):
    assert momentum.dtype == count.dtype == state_dtype(value.dtype)
    momentum.mul_(0.5).add_(sent)
    count.add_(1)
    value.sub_(momentum)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.float64), ids=str)
def test_registered_rules(dtype):
    register_rule("clipped", clipped)
    register_rule("with_states", with_states, num_states=2)
    rig = Rig((20, 0, 13), dtype, chunk=8)
    actors = [rig.actor(0), rig.actor(1)]
    model, momentum = torch.zeros(33, dtype=dtype), torch.zeros(33, dtype=state_dtype(dtype))
    for round in range(6):
        sent = values(33, dtype, round)
        rig.apply(actors[round % 2], Rule("clipped", (0.5,)) if round % 3 else "clipped", sent)
        model.add_(sent.clamp(-0.5, 0.5) if round % 3 else sent.clamp(-1, 1))
        rig.apply(actors[round % 2], "with_states", sent)
        momentum.mul_(0.5).add_(sent)
        model.sub_(momentum)
    assert torch.equal(rig.arrays(), model) and torch.equal(rig.arrays(1), momentum)
    assert rig.headers().tolist() == [[0, 12, 6]] * 5
    assert (actors[1].num_chunks, actors[1].versions) == (5, 5 * 11)


def test_a_rule_does_not_change_the_tensor_of_the_sender():
    register_rule("in_place", lambda values, sent: values.add_(sent.clamp_(-1, 1)))
    rig, sent = Rig((11,)), torch.full((11,), 5.0)
    rig.apply(rig.actor(0), "in_place", sent)
    assert rig.arrays().tolist() == [1.0] * 11 and sent.tolist() == [5.0] * 11


def test_a_rule_that_raises_leaves_the_chunk_unchanged_and_unlocked():
    def picky(value, sent):
        value.add_(1)
        if (sent < 0).any():
            raise ValueError("negative")

    register_rule("picky", picky)
    rig = Rig((20,), chunk=5)
    actor, sent = rig.actor(0), torch.ones(20)
    sent[12] = -1
    with pytest.raises(RuleFailure, match="ValueError: negative"):
        rig.apply(actor, "picky", sent)
    assert actor.applied(rig.shards) == [(0, 10)]
    assert rig.read(rig.actor(1)).tolist() == [1.0] * 10 + [0.0] * 10
    assert rig.headers().tolist() == [[0, 1, 0]] * 2 + [[0, 0, 0]] * 2
    rig.apply(actor, "picky", torch.ones(20))
    assert rig.headers()[:, fields.Header.version].tolist() == [2, 2, 1, 1]


@pytest.mark.slow
@torch.enable_grad()  # restores the mode: an exception between two instructions of `with torch.no_grad()` leaves it off
@pytest.mark.parametrize("fails", (False, True))
def test_an_interrupt_in_a_registered_rule_leaves_no_lock(fails):
    """Ctrl-C before each Python instruction. The process stays alive, so others would wait for the lock forever.

    Regression: the jump back to the condition of a loop is in no ``try`` block since Python 3.12, nor is the code that
    ends such a block; and later calls of this thread were refused, as if they were made by the rule.
    """

    def rule(value, sent):
        value.add_(sent)
        if fails and value[0] % 2 == 0:
            raise ValueError("even")

    register_rule("plus", rule)
    rig, countdown, folders = Rig((10,), chunk=5), 0, (str(Path(rules.__file__).parents[1]), __file__)
    actor, prepared, sent = rig.actor(0), rules.prepare("plus", torch.float32), torch.ones(10)

    def trace(frame, event, argument):
        nonlocal countdown
        frame.f_trace_opcodes = True
        if event == "opcode":
            countdown -= 1
            if countdown == 0:
                raise KeyboardInterrupt
        return trace if frame.f_code.co_filename.startswith(folders) else None

    num_failures = 0
    for place in itertools.count(1):
        rig.shards.headers(0).zero_()
        rig.shards.array(0).zero_()
        countdown = place
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in range(2):
                actor.visit(rig.shards, sent.data_ptr(), (0, 10), prepared)
        except KeyboardInterrupt:
            pass
        except RuleFailure:
            num_failures += 1
        finally:
            sys.settrace(before)
        header = rig.headers()
        assert header[:, fields.Header.lock].tolist() == [0, 0], f"before instruction {place}"
        expected = header[:, fields.Header.version].to(torch.float32).repeat_interleave(5)
        assert torch.equal(rig.arrays(), expected), f"before instruction {place}"
        assert levels.communicator_of_block() is None, f"before instruction {place}"
        if countdown > 0:
            break
    assert place > 300 and (num_failures > 0) == fails


# --- killed processes


def test_a_chunk_whose_writer_was_killed_is_refused_and_others_are_usable():
    def fatal(value, sent):
        value.add_(sent)
        if sent[0] == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    register_rule("fatal", fatal)
    rig, sent = Rig((20,), chunk=5, shared=True), torch.arange(20.0)
    process = fork(lambda: rig.apply(rig.actor(0), "fatal", sent))
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # so far a zombie
    actor, refused = rig.actor(1), rf"process {process}\) has ended while it changed a chunk"
    with pytest.raises(errors.TransportError, match=refused):
        rig.read(actor)
    os.waitpid(process, 0)
    for rule in ("add", "fatal"):
        with pytest.raises(errors.TransportError, match=refused):
            rig.apply(actor, rule, sent)
    assert rig.read(actor, (0, 5)).tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert rig.read(actor, (10, 20)).tolist() == [0.0] * 10
    assert rig.headers()[:, fields.Header.version].tolist() == [3, 0, 0, 0]
    rig.close()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ("copy", "python", "rows", adam(0.1)), ids=("copy", "python", "rows", "adam"))
def test_all_chunks_are_whole_after_random_kills_if_there_are_copies(rule):
    """Also if who undoes half of a send is killed in it; without copies, elements have got it or have not."""
    register_rule("python", lambda value, sent: value.copy_(sent))
    chunk, choose, num_taken = 4096, random.Random(1), 0

    def work(rig: Rig, index: int) -> None:
        actor = rig.actor(index)
        actor.on_taken_over = lambda *_: None
        for round in range(10**6):
            sent = torch.full((rig.numel,), 0.5 if isinstance(rule, Rule) else 10.0 * round + index)
            if rule == "rows":
                rows = Rows(np.arange(rig.numel), 1)
                prepared = rules.prepare("copy", torch.float32)
                actor.visit(rig.shards, sent.data_ptr(), (0, rig.numel), prepared, rows=rows)
            else:
                rig.apply(actor, rule, sent)

    for attempt in range(50):
        has_copies = attempt > 0
        rig = Rig((3 * chunk, chunk + 5), chunk=chunk, shared=True, num_images=8 * has_copies)
        children = [fork(lambda rig=rig, index=index: work(rig, index)) for index in (1, 2, 3)]
        for child in children:
            time.sleep(choose.uniform(0.002, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        own, found = rig.actor(0), []
        own.on_taken_over = lambda rank, span, is_whole, found=found: found.append((*span, is_whole))
        locked = [span for span, header in zip(rig.chunks(), rig.headers().tolist(), strict=True) if header[0]]
        rig.read(own) if attempt % 2 else own.repair(rig.shards)
        num_taken += len(found)
        assert sorted(found) == [(*span, has_copies) for span in locked]
        assert not rig.num_pending() and not rig.headers()[:, 0].any()
        for (_, version, steps), (begin, end) in zip(rig.headers().tolist(), rig.chunks(), strict=True):
            values = [rig.arrays(which)[begin:end].unique().numel() for which in range(3)]
            if has_copies:
                assert values == [1, 1, 1]
                assert not isinstance(rule, Rule) or steps == version
            elif not isinstance(rule, Rule):  # of which later sends do not replace a half
                assert max(values) <= 2
        rig.close()
        if attempt >= 4 and num_taken:
            break
    assert num_taken


def test_a_live_holder_keeps_the_lock_and_is_reported():
    rig = Rig((11,))
    other, seen = Actor(CLIENT, ranks={os.getpid(): 7}), []
    rig.shards.headers(0)[0, fields.Header.lock] = 2 * os.getpid() + SERVER

    def on_wait(rank: int) -> None:
        seen.append(rank)
        if len(seen) == 2:
            rig.shards.headers(0)[0, fields.Header.lock] = 0

    other.on_wait = on_wait
    rig.apply(other, "add", torch.ones(11))
    assert seen == [7, 7]
    assert rig.arrays().tolist() == [1.0] * 11


def test_without_file_descriptors_no_process_is_considered_dead(monkeypatch):
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", full)
    assert not has_ended(os.getpid())
