"""To a user of ``allreduce_many``: the bits of one call per tensor, with and without packing."""

from __future__ import annotations

import itertools
import threading
from functools import partial

import pytest
import torch
from helpers import contract
from helpers.joint import try_together
from helpers.outcomes import error_of
from helpers.shm_rig import shared
from hypothesis import strategies

import torchmpi as mpi
from torchmpi import errors

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


def test_allreduce_many_has_the_bits_of_single_calls(agree):
    shapes = [(3,), (1000,), (), (0,), (17, 5), (200_000,), (2,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    inputs = [
        contract.values(shape, dtype, mpi.rank(), seed=i)
        for i, (shape, dtype) in enumerate(itertools.product(shapes, dtypes))
    ]
    inputs[4] = contract.strided(inputs[4])
    one_by_one = [mpi.allreduce(tensor.clone(), op="avg") for tensor in inputs]
    together = mpi.allreduce_many(inputs, op="avg")
    for expected, actual, given in zip(one_by_one, together, inputs, strict=True):
        agree.bits(actual, expected, f"{tuple(actual.shape)} {actual.dtype}")
        agree(actual is given, "not in place")


def test_allreduce_many_of_lazily_conjugated_and_negative_tensors(agree):
    """Regression: torch refused to write the results, after the reduction."""
    for backend in ("mpi", None):
        values = contract.values((3, 5), torch.complex64, mpi.rank())
        tensors = [values.clone().conj(), values.clone().conj().imag]
        expected = [mpi.allreduce(tensor.clone(), backend=backend) for tensor in tensors]
        mpi.allreduce_many(tensors, backend=backend)
        for actual, wanted in zip(tensors, expected, strict=True):
            agree.bits(actual.resolve_conj().resolve_neg(), wanted, str(backend))


def test_allreduce_many_takes_any_iterable_and_refuses_a_tensor_twice(agree):
    """Regression: the checks exhausted a generator, and no tensor was reduced."""
    tensors = [torch.ones(3), torch.ones(4)]
    mpi.allreduce_many(tensor for tensor in tensors)
    agree.equal(tensors[1], torch.full((4,), float(mpi.size())))
    problem = error_of(mpi.allreduce_many, [tensors[0], tensors[0]])
    agree("twice" in problem, problem)


def test_a_refused_list_is_unchanged(agree):
    """Regression: the first dtype had been averaged when the second, which has no average, was refused."""
    tensors = [torch.full((3,), float(mpi.rank() + 1)) for _ in range(2)]
    tensors += [torch.ones(3, dtype=torch.int32), torch.ones(4, dtype=torch.int32)]
    with pytest.raises(mpi.TorchMPIError, match="avg"):
        mpi.allreduce_many(tensors, op="avg")
    agree.equal([tensor.tolist() for tensor in tensors[:2]], [[float(mpi.rank() + 1)] * 3] * 2, "changed")


# --- in shared memory: the limits of tensors, chunks and the parts of the ranks


@pytest.mark.parametrize("backend", (None, "mpi"), ids=("automatic", "packed"))
def test_a_list_completes_without_a_waiter(agree, backend):
    """Regression: callbacks, results and errors came only when somebody waited."""
    lists = [torch.ones(3), torch.ones(4)], [torch.ones(2), torch.ones(5), torch.ones(2, dtype=torch.int32)], []
    for tensors in lists:
        ended, seen = threading.Event(), []
        handle = mpi.allreduce_many_async(tensors, backend=backend)
        handle.when_done(lambda tensors=tensors, seen=seen: seen.extend(tensor.tolist() for tensor in tensors))
        handle.when_done(ended.set)
        agree(ended.wait(30), "callback not called")
        agree.equal(seen, [[mpi.size()] * len(tensor) for tensor in tensors])
        agree(handle.done() and handle.error is None and handle.wait() is not None)


KINDS = ((torch.float32, "sum"), (torch.bfloat16, "avg"), (torch.int32, "max"), (torch.uint8, "bxor"))
FORMS = ("plain", "plain", "plain", "strided", "in shared memory")
LISTS = strategies.lists(
    strategies.tuples(
        strategies.sampled_from((0, 1, 3, 15, 16, 17, 112, 1000, 1025, 4097, 20_001, 70_000)),
        strategies.sampled_from(FORMS),
    ),
    min_size=2,
    max_size=24,
)


def formed(values: torch.Tensor, form: str) -> list[torch.Tensor]:
    """A tensor with these values, or two: the even and the odd ones of one tensor."""
    if form == "strided":
        return [contract.strided(values)] if len(values) % 2 else [values[::2], values[1::2]]
    if form == "in shared memory":
        return [shared(values, 1)]
    return [values]


@pytest.mark.parametrize("asynchronous", (False, True), ids=("sync", "async"))
def test_lists_of_all_lengths_and_forms(slots, asynchronous):
    rank, size = mpi.rank(), mpi.size()

    def reduce(example):
        kind, entries = example
        dtype, op = KINDS[kind]
        tensors, expected = [], []
        for seed, (numel, form) in enumerate(entries):
            inputs = [contract.values((numel,), dtype, r, seed=seed) for r in range(size)]
            expected += formed(contract.reduced(inputs, op), form)
            tensors += formed(inputs[rank], form)
        versions = [tensor._version for tensor in tensors]
        result = mpi.allreduce_many_async(tensors, op=op).wait() if asynchronous else mpi.allreduce_many(tensors, op=op)
        for tensor, wanted, given in zip(tensors, expected, result, strict=True):
            assert given is tensor
            assert contract.same_bits(tensor.contiguous(), wanted.contiguous()), f"{dtype} {op} {len(wanted)}"
        assert all(tensor._version > before for tensor, before in zip(tensors, versions, strict=True))

    try_together(reduce, strategies.tuples(strategies.integers(0, len(KINDS) - 1), LISTS), max_examples=40)


@pytest.mark.parametrize("backend", (None, "mpi"))
def test_overlapping_tensors_are_refused(slots, agree, backend):
    matrix = torch.ones(300, 200)
    overlapping = {
        "parts": [matrix.view(-1)[:1000], matrix.view(-1)[999:]],
        "row and column": [matrix[7], matrix[:, 9]],
        "another dtype between": [matrix[0], torch.ones(2).double(), matrix[:1]],
    }
    for name, tensors in overlapping.items():
        for call in (mpi.allreduce_many, lambda *args, **options: mpi.allreduce_many_async(*args, **options).wait()):
            run = partial(call, tensors, backend=backend)
            agree.raises(errors.ArgumentError, run, "two tensors share memory")
        agree(bool((matrix == 1).all()), f"{name}: unchanged")
    mpi.allreduce_many([matrix[:, :50], matrix[:, 50:]], backend=backend)
    agree(bool((matrix == mpi.size()).all()), "columns have no element in common")


def test_short_lists_by_another_transport(slots, agree):
    """A rule by size: lists for MPI are packed, lists for shared memory are not."""
    mpi.collective_selector.set("allreduce", "shm")
    mpi.collective_selector.set("allreduce", "mpi", up_to_bytes=4096)
    try:
        for numel in (10, 900):
            tensors = [contract.values((numel,), torch.float32, mpi.rank(), seed=seed) for seed in range(3)]
            expected = [mpi.allreduce(tensor.clone(), backend="mpi") for tensor in tensors]
            mpi.allreduce_many(tensors)
            for tensor, wanted in zip(tensors, expected, strict=True):
                agree.bits(tensor, wanted, str(numel))
    finally:
        mpi.collective_selector.reset()


def test_lists_in_another_order_are_a_mismatch(slots, agree):
    """All ranks can continue."""
    lengths = (5, 70_000) if mpi.rank() else (70_000, 5)
    if mpi.size() > 1:
        with pytest.raises(mpi.TorchMPIError, match="made different calls"):
            mpi.allreduce_many([torch.ones(length) for length in lengths])
    tensors = [torch.ones(3), torch.ones(50_000)]
    mpi.allreduce_many(tensors)
    agree(all(bool((tensor == mpi.size()).all()) for tensor in tensors), "after it")
