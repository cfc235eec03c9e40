"""To a user of servers: shards, chunks and messages cover each element once, and bad rules are refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.rule_references import COEFFICIENTS
from helpers.shard_rig import Rig
from hypothesis import given
from hypothesis import strategies as st

import torchmpi.parameterserver as ps
from torchmpi import errors
from torchmpi.parameterserver import Rule, adagrad, adam, axpby, register_rule, rules, scaled_add, sgd
from torchmpi.parameterserver.kernels import server_rules as native
from torchmpi.parameterserver.kernels.shard_layout import CHUNK_BYTES, NUM_ARRAYS, Header
from torchmpi.parameterserver.shards import MESSAGE_BYTES, chunk_numel, layout, message_ranges
from torchmpi.tensors.partition import even_partition

ITEMS = ((8, 8), (4, 4), (2, 4), (1, 4))
"""Sizes of the values of a server, and of their states."""
PAGE = 4096


def num_chunks(numel: int, chunk: int) -> int:
    return -(-numel // chunk)


# --- memory


def test_arrays_of_all_shards_have_room_and_do_not_overlap():
    for size, (item_bytes, state_bytes) in itertools.product(range(1, 65), ITEMS):
        chunk = chunk_numel(item_bytes, state_bytes)
        for numel in (0, 1, size - 1, size, size + 1, chunk * size - 1, chunk * size, chunk * size + 1, 1000003):
            numels = tuple(length for _, length in even_partition(numel, size))
            plan = layout(numels, item_bytes, state_bytes)
            spans = []
            for own, headers, arrays in zip(numels, plan.headers, plan.arrays, strict=True):
                assert len(arrays) == NUM_ARRAYS
                spans.append((headers, num_chunks(own, chunk) * Header.BYTES))
                spans += [(arrays[0], own * item_bytes), *((state, own * state_bytes) for state in arrays[1:])]
            assert all(begin % PAGE == 0 for begin, _ in spans), "an unused array must share no page with a used one"
            used = sorted((begin, begin + length) for begin, length in spans if length)
            ends = [0, *(end for _, end in used)]
            assert all(begin >= end for (begin, _), end in zip(used, ends, strict=False))
            assert ends[-1] <= plan.num_bytes and plan.num_bytes > 0, "a mapping of no bytes is impossible"


@pytest.mark.parametrize(("item_bytes", "state_bytes"), ITEMS)
def test_a_chunk_fits_into_the_scratch_with_each_of_its_arrays(item_bytes, state_bytes):
    chunk = chunk_numel(item_bytes, state_bytes)
    assert chunk * max(item_bytes, state_bytes) == CHUNK_BYTES


def test_tensors_of_more_than_four_billion_elements():
    numels = tuple(length for _, length in even_partition((1 << 33) + 5, 3))
    plan = layout(numels, 8, 8)
    assert plan.arrays[2][2] + numels[2] * 8 <= plan.num_bytes < 3.01 * 8 * sum(numels)


# --- messages


def check_messages(numel: int, chunk: int, item_bytes: int, max_bytes: int = MESSAGE_BYTES) -> None:
    cut = message_ranges(numel, chunk, item_bytes, max_bytes)
    assert [begin for begin, _ in cut] == [0, *(end for _, end in cut[:-1])][: len(cut)]
    assert (cut[-1][1] if cut else 0) == numel
    for begin, end in cut:
        assert begin < end and begin % chunk == 0, "a chunk must not arrive in two messages"
        assert (end - begin) * item_bytes <= max(max_bytes, chunk * item_bytes)
    lengths = {end - begin for begin, end in cut[:-1]}
    assert len(lengths) <= 1 and all(length >= cut[-1][1] - cut[-1][0] for length in lengths)


def test_messages_of_every_shard_end_at_chunks():
    for size, (item_bytes, state_bytes) in itertools.product(range(1, 65), ITEMS):
        chunk = chunk_numel(item_bytes, state_bytes)
        most = MESSAGE_BYTES // item_bytes
        for numel in (0, 1, chunk - 1, chunk, chunk + 1, most - 1, most, most + 1, 7 * most + 3):
            for _, length in even_partition(size * numel + size // 2, size)[:: max(1, size - 1)]:
                check_messages(length, chunk, item_bytes)
                ranges = message_ranges(length, chunk, item_bytes)
                assert all((end - begin) * item_bytes <= MESSAGE_BYTES for begin, end in ranges)


@given(st.integers(0, 10000), st.integers(1, 300), st.integers(1, 16), st.integers(1, 10000))
def test_messages_of_any_size(numel, chunk, item_bytes, max_bytes):
    check_messages(numel, chunk, item_bytes, max_bytes)


# --- rules


@pytest.fixture
def registry(monkeypatch):
    """Remove the rules that a test registers."""
    monkeypatch.setattr(rules, "_registered", {})


def test_every_built_in_rule_can_be_prepared():
    for name, row in native.BUILT_IN.items():
        rule = name
        if row.coefficients:  # a function of this name makes the rule, from what the coefficients are made of
            rule = Rule(name, COEFFICIENTS[name][0])
            assert getattr(rules, name).__name__ in ps.__all__
        prepared = rules.prepare(rule, torch.float32)
        assert prepared.address and prepared.function is None
        assert (prepared.name, prepared.num_states) == (name, row.num_states)
    made = (scaled_add(2), axpby(1, 2), sgd(0.1, 0.9), adagrad(0.1), adam(0.1))
    assert [rules.prepare(rule, torch.float32).name for rule in made] == [rule.name for rule in made]


def test_sgd_without_momentum_has_no_state():
    """Regression: an infinite gradient stayed in a momentum buffer, as 0 * inf."""
    prepared = rules.prepare(sgd(0.1), torch.float32)
    assert (prepared.name, prepared.num_states) == ("sgd", 0)
    rig = Rig((1,))
    for rule, number in ((sgd(0.5), math.inf), ("zero", 0.0), (sgd(0.5), 1.0)):
        rig.apply(rig.actor(0), rule, torch.tensor([number]))
    assert rig.arrays().item() == -0.5
    rig.close()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: sgd(-1.0), "lr=-1.0: expected a number from 0"),
        (lambda: sgd(math.nan), "lr=nan"),
        (lambda: sgd(0.1, nesterov=True), "nesterov=True needs a momentum"),
        (lambda: adagrad(0.1, eps=-1), "eps=-1"),
        (lambda: adam(0.1, weight_decay=-1), "weight_decay=-1"),
        (lambda: adam(0.1, (1.0, 0.999)), "expected two numbers from 0 to below 1"),
        (lambda: adam(0.1, 0.9), r"betas=0.9\): expected a list or tuple"),
        (lambda: adam(0.1, (0.9, "b")), "betas='b': expected a number"),
        (lambda: sgd(None), r"lr=None\): expected a number"),
        (lambda: scaled_add("a"), r"alpha='a'\): expected a number"),
        (lambda: adagrad(torch.ones(2)), "expected a number"),
        (lambda: Rule("x", [0.5]), r"Rule\('x', \[0.5\]\): the coefficients are a tuple of numbers, such as \(0.5,\)"),
        (lambda: Rule("x", 0.5), "the coefficients are a tuple of numbers"),
    ],
)
def test_rules_refuse_wrong_coefficients(make, problem):
    with pytest.raises(errors.ArgumentError, match=problem):
        make()


@pytest.mark.parametrize(
    ("rule", "dtype", "kind", "remedy"),
    [
        ("sum", torch.float32, errors.ArgumentError, "Available: "),
        ("", torch.float32, errors.ArgumentError, "Available: "),
        ("scaled_add", torch.float32, errors.ArgumentError, "scaled_add(...)"),
        (Rule("add", (1.0,)), torch.float32, errors.ArgumentError, "needs 0 coefficients"),
        (Rule("axpby", (1.0,)), torch.float32, errors.ArgumentError, "needs 2 coefficients"),
        (Rule("scaled_add", ("a",)), torch.float32, errors.ArgumentError, "a coefficient is no number"),
        (Rule("add", (1.0,) * 7), torch.float32, errors.ArgumentError, "6 are possible"),
        (None, torch.float32, errors.ArgumentError, "a rule is a name"),
        (torch.add, torch.float32, errors.ArgumentError, "by register_rule(name, function)"),
        (sgd(0.1), torch.int32, errors.DtypeError, "float32"),
        (scaled_add(0.5), torch.int64, errors.DtypeError, "float32"),
    ],
)
def test_rejected_rules(rule, dtype, kind, remedy):
    with pytest.raises(kind) as caught:
        rules.prepare(rule, dtype)
    assert type(caught.value) is kind and remedy in str(caught.value)


@pytest.mark.parametrize(
    ("name", "function", "num_states", "problem"),
    [
        ("add", max, 0, "built in"),
        ("two words", max, 0, "not a name"),
        ("", max, 0, "not a name"),
        (3, max, 0, "expected a string"),
        ("mine", None, 0, "NoneType"),
        ("ä" * 33, max, 0, "longer than 64 bytes"),
        ("mine", max, 3, "num_states=3"),
        ("mine", max, -1, "num_states=-1"),
        ("mine", max, 1.5, "num_states=1.5"),
    ],
)
def test_rejected_registrations(registry, name, function, num_states, problem):
    with pytest.raises(errors.ArgumentError, match=problem):
        register_rule(name, function, num_states=num_states)
    assert not rules._registered


def test_registered_rules_are_found_with_their_coefficients(registry):
    register_rule("mine", max, num_states=2)
    prepared = rules.prepare(Rule("mine", (1.0, 2.0)), torch.int8)
    assert (prepared.function, prepared.num_states, prepared.coefficients) == (max, 2, (1.0, 2.0))
    register_rule("mine", min)
    assert rules.prepare("mine", torch.int8).function is min
    with pytest.raises(errors.ArgumentError, match="mine"):
        rules.prepare("unknown", torch.int8)
