"""To a user of the backend `ipc`: its plans are right in any interleaving of streams, by a model of them."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.ipc_model import Call, Model, Problem
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmpi.backends.ipc import area_kernels, chunk_plan
from torchmpi.backends.ipc.chunk_plan import ALIGNMENT, EMPTIED, FILLED, REDUCED, Fill, Room, Sync, Take
from torchmpi.tensors import partition

COLLECTIVES = ("allreduce 1", "allreduce 2", "reduce", "broadcast", "allgather", "reduce_scatter")


def make(
    collective: str, size: int, half: int, lengths: list[int], root: int, choice: random.Random
) -> tuple[Call, list]:
    """A call and its expected outputs (None: unchanged). `lengths` holds one number, or one for each rank."""
    name, _, shots = collective.partition(" ")
    if name == "allgather":
        own = lengths
    elif name == "reduce_scatter":
        own = [sum(lengths)] * size
    else:
        own = [lengths[0]] * size
    fill = np.random.default_rng(choice.randrange(1 << 30))
    sources = [fill.integers(0, 256, numel, np.uint8) for numel in own]
    total = sum(sources[1:], sources[0].copy()) if name != "allgather" else None
    spans = [(sum(lengths[:rank]), lengths[rank]) for rank in range(size)] if len(lengths) == size else []
    outs = [source.copy() for source in sources]
    if name == "allgather":
        everything = np.concatenate(sources)
        outs = [np.zeros_like(everything) for _ in range(size)]
        for rank, (begin, length) in enumerate(spans):
            outs[rank][begin : begin + length] = sources[rank]
        expected = [everything] * size
        chunks = [list(chunk_plan.allgather(rank, size, lengths, half)) for rank in range(size)]
    elif name == "reduce_scatter":
        outs = [np.zeros(length, np.uint8) for _, length in spans]
        expected = [total[begin : begin + length] for begin, length in spans]
        chunks = [list(chunk_plan.reduce_scatter(rank, size, spans, half)) for rank in range(size)]
    elif name == "broadcast":
        expected = [sources[root]] * size
        chunks = [list(chunk_plan.broadcast(rank, size, own[0], half, root=root)) for rank in range(size)]
    elif name == "reduce":
        expected = [total if rank == root else sources[rank].copy() for rank in range(size)]
        plan = chunk_plan.reduce
        chunks = [list(plan(rank, size, own[0], half, root=root)) for rank in range(size)]
    else:
        expected = [total] * size
        chunks = [list(chunk_plan.allreduce(rank, size, own[0], half, shots=int(shots))) for rank in range(size)]
    in_place = name in ("allreduce", "reduce", "broadcast")
    call = Call(chunks, outs if in_place else sources, outs, [choice.randrange(2) for _ in range(size)])
    return call, expected


def play(size: int, half: int, specifications: list, seed: int) -> None:
    choice = random.Random(seed)
    made = []
    for collective, lengths, root in specifications:
        if collective in ("allgather", "reduce_scatter"):
            lengths = [lengths[rank % len(lengths)] for rank in range(size)]
        made.append(make(collective, size, half, lengths, root % size, choice))
    Model(size, half, seed).play([call for call, _ in made])
    for number, ((call, expected), specification) in enumerate(zip(made, specifications, strict=True)):
        for rank in range(size):
            assert np.array_equal(call.outs[rank], expected[rank]), (number, specification, rank)


LENGTH = st.one_of(st.integers(0, 5000), st.sampled_from((0, 1, 511, 512, 513, 4096)))
LENGTHS = st.lists(LENGTH, min_size=1, max_size=9)
SPECIFICATIONS = st.lists(st.tuples(st.sampled_from(COLLECTIVES), LENGTHS, st.integers(0, 99)), min_size=1, max_size=7)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), SPECIFICATIONS, st.integers(0, 1 << 30))
def test_any_sequence_of_calls_in_any_interleaving(size, factor, specifications, seed):
    play(size, size * ALIGNMENT * factor, specifications, seed)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_every_collective_on_many_ranks(size):
    """Three chunks per call, so that both halves are used again; two if the model would take seconds."""
    choice = random.Random(size)
    half = size * ALIGNMENT
    least = 2 * half if size <= 16 else half
    lengths = [[least + choice.randrange(1, 700)] for _ in COLLECTIVES[:4]] + [[700, 0, 1300], [0, 512, 1025]]
    play(size, half, list(zip(COLLECTIVES, lengths, range(len(COLLECTIVES)), strict=True)), seed=size)


@given(st.integers(1, 64), st.integers(0, 1 << 36), st.integers(0, 1 << 26), st.sampled_from((1, 2, 4, 16)))
def test_parts_cover_a_chunk_once(size, numel, staging_bytes, itemsize):
    half_bytes = chunk_plan.half_bytes(staging_bytes, size)
    half = half_bytes // itemsize
    assert half_bytes >= staging_bytes and half // size >= ALIGNMENT
    end = 0
    for begin, part in chunk_plan.parts(numel % (half + 1), size):
        assert part >= 0 and begin == end and (begin % ALIGNMENT == 0 or part == 0)
        end = begin + part
    assert end == numel % (half + 1)


@given(st.integers(1, 64), st.integers(0, 300), st.integers(1, 16))
def test_scattered_rows_stay_within_their_slot(size, num_rows, row_bytes):
    half = size * ALIGNMENT
    spans = [(first * row_bytes, count * row_bytes) for first, count in partition.even_partition(num_rows, size)]
    for rank in {0, size // 2, size - 1}:
        chunks = chunk_plan.reduce_scatter(rank, size, spans, half)
        fills = [step for steps in chunks for step in steps if type(step) is Fill]
        assert sum(fill.numel for fill in fills) == num_rows * row_bytes
        assert all(fill.area % ALIGNMENT == 0 and fill.area // ALIGNMENT < size for fill in fills)


def test_parameters_of_kernels_are_arrays_and_addresses():
    words = area_kernels.Parameters(4096, [7, 8, 9], 8192, [5])
    memory = (ctypes.c_int64 * 4).from_address(words.address)
    assert (memory[0], memory[2]) == (4096, 8192)
    assert list((ctypes.c_int64 * 3).from_address(memory[1])) == [7, 8, 9]
    assert ctypes.c_int64.from_address(memory[3]).value == 5


# --- the model detects errors


def broken(steps: list[list], change) -> list[list]:
    return [[new for step in chunk for new in change(step)] for chunk in steps]


def without(stage: int, *, waits: bool) -> Callable[[Any], list]:
    """A change that omits the waits for a stage, or its publication."""

    def change(step: Any) -> list:
        if type(step) is not Sync or step.stage != stage:
            return [step]
        return [step._replace(awaits=())] if waits else [step._replace(publishes=False)]

    return change


def published_early(stage: int, kind: type) -> Callable[[Any], list]:
    """A change that publishes a stage before a step instead of after it."""

    def change(step: Any) -> list:
        return [Sync(stage, True), step] if type(step) is kind else without(stage, waits=False)(step)

    return change


BREAKAGES = {
    "no room is made": ("broadcast", lambda step: [] if type(step) is Room else [step]),
    "filled is not awaited": ("allreduce 1", without(FILLED, waits=True)),
    "reduced is not awaited": ("allreduce 2", without(REDUCED, waits=True)),
    "filled is published before the filling": ("allreduce 1", published_early(FILLED, Fill)),
    "emptied is published before the reading": ("broadcast", published_early(EMPTIED, Take)),
    "filled is never published": ("reduce_scatter", without(FILLED, waits=False)),
    "emptied is never published": ("broadcast", without(EMPTIED, waits=False)),
}


@pytest.mark.parametrize("what", BREAKAGES)
def test_the_model_detects_protocol_errors(what):
    collective, change = BREAKAGES[what]
    size, half = 3, 3 * ALIGNMENT
    noticed = 0
    for seed in range(20):
        lengths = [half] * size if collective in ("allgather", "reduce_scatter") else [7 * half]
        call, _expected = make(collective, size, half, lengths, 0, random.Random(seed))
        calls = [call._replace(chunks=[broken(steps, change) for steps in call.chunks])] * 5
        try:
            Model(size, half, seed).play(calls)
        except Problem:
            noticed += 1
    assert noticed >= 15, f"noticed in {noticed} of 20 interleavings"


def test_the_model_detects_that_a_short_allreduce_is_never_published_as_read():
    size, half, noticed = 3, 3 * ALIGNMENT, 0
    for seed in range(20):
        choice = random.Random(seed)
        names = ("allreduce 1", "allreduce 1", "broadcast", "broadcast", "broadcast") * 3
        model = Model(size, half, seed)
        model.publishes_late = False
        try:
            model.play([make(name, size, half, [100], 0, choice)[0] for name in names])
        except Problem:
            noticed += 1
    assert noticed >= 15, f"noticed in {noticed} of 20 interleavings"
