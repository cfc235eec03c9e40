"""To who reads a meter: it has the value of the arithmetic on all values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmpi.engine import AverageValueMeter, ClassErrorMeter
from torchmpi.errors import ArgumentError

values = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20)


@given(values)
def test_average_and_deviation(numbers):
    meter = AverageValueMeter()
    for number in numbers:
        meter.add(number)
    reference = torch.tensor(numbers, dtype=torch.float64)
    assert meter.value() == pytest.approx(reference.mean().item(), rel=1e-12, abs=1e-9)
    # The difference of two large sums is accurate to the square root of the precision.
    assert meter.std() == pytest.approx(reference.std().item(), rel=1e-6, abs=1e-6 * (1 + max(map(abs, numbers))))
    assert meter.num_samples == len(numbers)


def test_average_of_batches_is_weighted():
    meter = AverageValueMeter()
    meter.add(torch.tensor(1.0, requires_grad=True), num=64)
    meter.add(4.0, num=32)
    assert meter.value() == 2.0


def test_empty_meters():
    assert math.isnan(AverageValueMeter().value()) and math.isnan(AverageValueMeter().std())
    assert math.isnan(ClassErrorMeter().value())


@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 2**31))
def test_class_error(num_rows, num_classes, seed):
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(num_rows, num_classes, generator=generator)
    target = torch.randint(num_classes, (num_rows,), generator=generator)
    meter, accuracy = ClassErrorMeter(topk=(5, 1)), ClassErrorMeter(topk=(1, 5), accuracy=True)
    for rows in range(0, num_rows, 3):
        meter.add(output[rows : rows + 3], target[rows : rows + 3])
        accuracy.add(output[rows : rows + 3], target[rows : rows + 3])
    for k in (1, 5):
        ranked = output.argsort(1, descending=True)[:, :k]
        wrong = sum(int(label) not in row.tolist() for label, row in zip(target, ranked, strict=True))
        assert meter.value(k) == pytest.approx(100 * wrong / num_rows)
        assert accuracy.value(k) == pytest.approx(100 - 100 * wrong / num_rows)


def test_single_row():
    meter = ClassErrorMeter(topk=(1,))
    meter.add(torch.tensor([0.1, 0.9]), torch.tensor(1))
    assert (meter.value(), meter.num_samples) == (0.0, 1)


def test_reset():
    meter = AverageValueMeter()
    meter.add(3.0)
    meter.reset()
    meter.add(1.0)
    assert meter.value() == 1.0


def test_state_dict():
    meter, other = ClassErrorMeter(), ClassErrorMeter()
    meter.add(torch.eye(6), torch.zeros(6, dtype=torch.long))
    other.load_state_dict(meter.state_dict())
    meter.reset()
    assert (other.value(1), other.num_samples) == (pytest.approx(500 / 6), 6)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: ClassErrorMeter(topk=()), "topk"),
        (lambda: ClassErrorMeter(topk=(0,)), "topk"),
        (lambda: ClassErrorMeter(topk=(1,)).value(5), "k=5"),
        (lambda: ClassErrorMeter().add(torch.eye(3), torch.zeros(2)), "2 targets"),
        (
            lambda: ClassErrorMeter((1,)).load_state_dict(ClassErrorMeter((1, 2)).state_dict()),
            "other options",
        ),
    ],
)
def test_misuse_is_refused(misuse, message):
    with pytest.raises(ArgumentError, match=message):
        misuse()


def test_sums_are_on_the_host_whatever_the_default_device_is():
    """Regression: a meter failed that was made, or loaded, under another default device than it was used."""
    meter = AverageValueMeter()
    torch.set_default_device("meta")
    try:
        for each in (meter, AverageValueMeter()):
            each.add(2.0)
            assert each.value() == 2.0
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("rank", [0, 1])
def test_totals_of_all_ranks_are_the_same_on_another_number_of_ranks(rank):
    meter = AverageValueMeter()
    meter.add(3.0, num=4)
    totals = {**meter.state_dict(), "is_global": True}
    resumed = AverageValueMeter()
    resumed.load_state_dict(meter.divided([totals, totals], rank))
    assert resumed.value() == 3.0 and resumed.num_samples == 4
