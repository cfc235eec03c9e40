"""To a user of several hosts: the order of a pipeline and the arithmetic of reductions, without processes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchmpi.backends import range_reduction, rank_order
from torchmpi.backends.base import Operation
from torchmpi.backends.hierarchical import steps
from torchmpi.backends.nccl.recipes import recipe
from torchmpi.backends.pipeline import run_pipelined
from torchmpi.collective_specs import SPECS
from torchmpi.communicators import algorithms, splits


@pytest.mark.parametrize("num_chunks", (0, 1, 2, 5))
def test_pipeline_keeps_each_part_in_order_and_two_chunks_at_a_time(num_chunks: int) -> None:
    log: list[tuple[str, int]] = []

    class Handle:
        def __init__(self, k: int) -> None:
            self.k = k

        def wait(self) -> None:
            log.append(("waited", self.k))

    def across(k: int) -> Handle:
        log.append(("across", k))
        return Handle(k)

    run_pipelined(num_chunks, lambda k: log.append(("before", k)), across, lambda k: log.append(("after", k)))
    for k in range(num_chunks):
        assert [what for what, chunk in log if chunk == k] == ["before", "across", "waited", "after"]
    for what in ("before", "across", "after"):
        assert [chunk for other, chunk in log if other == what] == list(range(num_chunks))
    for k in range(num_chunks - 2):
        assert log.index(("after", k)) < log.index(("before", k + 2))
    for k in range(num_chunks - 1):
        assert log.index(("across", k + 1)) < log.index(("waited", k)), "the next chunk is started before the wait"


def test_dtype_of_partial_results() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert all(rank_order.accumulator_of(dtype, op) is torch.float32 for op in ("sum", "avg", "prod"))
        assert all(rank_order.accumulator_of(dtype, op) is dtype for op in ("min", "max"))
    for dtype in (torch.float32, torch.float64, torch.int8, torch.bool):
        assert rank_order.accumulator_of(dtype, "max") is dtype


def test_divide_takes_complex_and_inference_tensors() -> None:
    with torch.inference_mode():
        made_there = torch.full((2,), 6.0)
    rank_order.divide(made_there, 3)
    values = torch.tensor([3 + 6j])
    rank_order.divide(values, 3)
    assert made_there.tolist() == [2.0, 2.0] and values.tolist() == [1 + 2j]


def test_means_are_divided_by_a_tensor_of_the_same_device() -> None:
    """On GPUs torch multiplies by the reciprocal of a Python number or of a number on the host, and rounds twice."""

    class Divisors(TorchDispatchMode):
        found: ClassVar[list[Any]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.found += [args[1]] if "div" in func.__name__ else []
            return func(*args, **(kwargs or {}))

    decode = recipe(torch.bfloat16, "avg", 3).decode
    assert decode is not None
    with Divisors() as divisors:
        rank_order.divide(torch.ones(2, device="meta"), 3)
        decode(torch.ones(2, device="meta"))
    assert [getattr(each, "device", None) for each in divisors.found] == [torch.device("meta")] * 2


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.complex64), ids=str)
def test_the_combiner_without_llvm_gives_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> int:
        raise OSError("no LLVM")

    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(101, dtype=dtype, generator=generator) for _ in range(3)]
    for op in ("sum", "avg", "prod"):
        compiled, readable = torch.empty(101, dtype=dtype), parts[0].clone()
        rank_order.combiner(dtype, op)(parts, compiled)
        with monkeypatch.context() as patch:
            patch.setattr(rank_order.reduction, "address", missing)
            rank_order.combiner(dtype, op)([readable, *parts[1:]], readable)
        assert torch.equal(compiled, readable)


PLACEMENTS = (("aabb", False), ("abab", True), ("aab", False), ("abcb", False))


def plans_of(grouping: str, *, is_cartesian: bool) -> Iterator[tuple[str, splits.Split, int, steps.Steps]]:
    """Yield the plans of all collectives over one level, with the collective, the split and the rank."""
    split = splits.plan_split(list(grouping), cartesian=is_cartesian)
    for rank in range(len(grouping)):
        for collective in ("allreduce", "reduce", "broadcast", "barrier"):
            yield collective, split, rank, splits.steps_for(collective, rank, [split], root=1)
        yield "reduce", split, rank, splits.reduce_group_by_group(rank, split, 1)
        for algorithm in splits.ALLREDUCES:
            if is_cartesian or algorithm[0] != algorithms.SLICES:
                yield "allreduce", split, rank, splits.allreduce_over_hosts(algorithm, rank, split)


def test_steps_between_groups_may_run_in_the_background() -> None:
    for grouping, is_cartesian in PLACEMENTS:
        for _, _, _, plan in plans_of(grouping, is_cartesian=is_cartesian):
            before, between, after, _ = steps.phases(plan)
            assert (*before, *between, *after) == plan
            assert {step.group for step in before + after} <= {"intra"} and {step.group for step in between} <= {
                "inter"
            }
            assert between or len(before) == min(1, len(plan))


def test_ranks_with_the_total_of_a_reduction_round_it_and_then_move_it() -> None:
    for grouping, is_cartesian in PLACEMENTS:
        for collective, split, rank, plan in plans_of(grouping, is_cartesian=is_cartesian):
            last = steps.phases(plan).last
            if collective not in ("allreduce", "reduce"):
                assert last is None
                continue
            assert last is not None
            assert not any(SPECS[step.collective].reduces for step in plan[plan.index(last) + 1 :])
            if collective == "allreduce" and last.collective == "reduce":  # the first rank has the total
                assert split.members[rank].intra_rank != 0 and plan[-1].collective == "broadcast"


def test_a_reduce_scatter_of_rows_reduces_the_elements_of_these_rows() -> None:
    source = torch.arange(28.0).view(7, 4)

    class Copies:
        """The ranges of a sum over one rank."""

        def reduce_scatter(
            self, source: torch.Tensor, destination: torch.Tensor, ranges: list[tuple[int, int]]
        ) -> None:
            first, count = ranges[rank]
            destination.view(-1).copy_(source.view(-1)[first : first + count])

    for rank, (first, last) in enumerate(((0, 3), (3, 5), (5, 7))):
        group: Any = SimpleNamespace(rank=rank, size=3)
        reduction: Any = Copies()
        scattered = range_reduction.operation(group, reduction, "reduce_scatter").run(source, None, 0)
        assert torch.equal(scattered, source[first:last])


def test_the_plan_of_a_step_names_its_backends() -> None:
    """For timelines, which show the backend of each step; a plan is made once."""
    bound: list[str] = []

    def bind(group: Any, collective: str, *_: object) -> tuple[Any, Any]:
        bound.append(collective)
        return Operation(lambda source, destination, root: source), ((4096, "p2p"), (None, "shm"))

    group: Any = SimpleNamespace(plans={}, perform=lambda plan, *_: plan)
    runner = steps.StepRunner("avg", bind)
    plans = [runner.perform(group, "allreduce", torch.ones(2)) for _ in range(2)]
    assert plans[0] is plans[1] and bound == ["allreduce"]
    assert plans[0].backends == ((4096, "p2p"), (None, "shm"))
    assert plans[0].names(plans[0].code)[1] == "sum"  # divided once, at the end
