"""To a reader of timelines: clocks of hosts are aligned within their error bounds."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from torchmpi.timeline import clocks
from torchmpi.timeline.clocks import AlignedClock, ClockSample, sample

SECOND, MILLISECOND = 1_000_000_000, 1_000_000


def test_an_offset_lies_within_the_error_of_its_sample():
    clock_ahead = 12_345
    rounds = [
        (t, t + there + clock_ahead, t + there + back) for t, there, back in ((0, 90, 10), (500, 7, 3), (900, 40, 40))
    ]
    best = sample(rounds)
    assert abs(best.offset - clock_ahead) <= best.error == 5


def test_drift_is_removed_between_samples_and_bounded_after_the_last_one():
    clock = AlignedClock([ClockSample(0, 1000, 5), ClockSample(10**9, 21_000, 5)])
    assert clock.aligned(5 * 10**8) == 5 * 10**8 + 11_000
    at_samples, between, later = clock.error([0, 5 * 10**8, 2 * 10**9])
    assert (at_samples, between, later) == (7, 250_007, 500_007)  # 500 ppm of half a second, and of a second
    assert AlignedClock([ClockSample(0, 0, 0)]).error(10**12) == 0  # the clock of rank 0 itself


TRIPS = st.tuples(st.integers(1, SECOND), st.integers(1, 50 * MILLISECOND), st.floats(0, 1))
"""Time since the previous sample, duration of a message and its reply, and when in it the reference is read."""


@given(
    st.integers(-(10**15), 10**15),
    st.lists(st.tuples(st.integers(1, 2 * SECOND), st.floats(-500e-6, 500e-6)), min_size=1, max_size=8),
    st.lists(st.lists(TRIPS, min_size=1, max_size=3), min_size=1, max_size=12),
)
@example(0, [(1, 0.0)], [[(1, 384, 0.0)], [(237, 2, 0.0)], [(1, 1, 0.0)]])
def test_the_true_time_lies_within_the_error_however_the_rate_changes(offset, rates, exchanges):
    """Regression: the rate was assumed to be constant from the first to the last sample."""
    durations, drifts = np.array(rates).T
    knots = np.append(0.0, np.cumsum(durations))
    drifted = np.append(0.0, np.cumsum(durations * drifts))

    def reference(local):
        return local + offset + np.rint(np.interp(local, knots, drifted)).astype(np.int64)

    samples, sent = [], 0
    for trips in exchanges:
        rounds = []
        for pause, duration, part in trips:
            sent += pause
            rounds.append((sent, int(reference(np.int64(sent + int(part * duration)))), sent + duration))
        samples.append(sample(rounds))
    clock = AlignedClock(samples)
    times = np.linspace(-SECOND, max(sent, int(knots[-1])) + SECOND, 500).astype(np.int64)
    wrong = np.abs(clock.aligned(times) - reference(times))
    assert np.all(wrong <= clock.error(times) + 1)  # the reference is rounded
    assert clock.largest_error(int(times[0]), int(times[-1])) >= wrong.max() - 1


def test_more_samples_make_the_error_smaller_and_bad_ones_do_not_make_it_larger():
    ends = [ClockSample(0, 0, 5000), ClockSample(10 * SECOND, 0, 5000)]
    between = [ClockSample(k * SECOND // 4, 0, 5000) for k in range(1, 40)]
    bad = [ClockSample(5 * SECOND + 1, 3 * MILLISECOND, 4 * MILLISECOND)]
    errors = [AlignedClock(found).largest_error(0, 10 * SECOND) for found in (ends, ends + between)]
    assert errors == [2_505_004, 67_504]
    clock = AlignedClock(ends + between + bad)
    assert clock.largest_error(0, 10 * SECOND) == errors[1] and clock.aligned(bad[0].local) == bad[0].local


@given(st.lists(st.tuples(st.integers(0, 9000), st.just(0), st.integers(0, 9)), min_size=1, max_size=6, unique=True))
def test_a_sample_is_left_out_if_another_one_has_a_smaller_error_at_its_time(samples):
    found = np.array(sorted(samples), np.int64)

    def at(other, local):  # in units of the drift, so that nothing is rounded
        return other[2] * clocks._INVERSE_DRIFT + abs(other[0] - local)

    for index, (own, is_beaten) in enumerate(zip(found.tolist(), clocks._is_beaten(found), strict=True)):
        error = own[2] * clocks._INVERSE_DRIFT
        before = any(at(other, own[0]) <= error for other in found[:index].tolist())
        after = any(at(other, own[0]) < error for other in found[index + 1 :].tolist())
        assert is_beaten == (before or after)


def test_the_largest_error_is_that_of_the_times_between():
    clock = AlignedClock([ClockSample(0, 0, 5), ClockSample(10**6, 0, 5), ClockSample(10**12, 0, 5)])
    assert clock.largest_error(1, 10**6 - 1) == clock.error(10**6 - 1)
    assert clock.largest_error(1, 10**6 + 1) == clock.error(10**6 + 1) > 1000 * clock.error(1)
    assert clock.largest_error(10**6 + 1, 10**12 + 1) == clock.error(10**12) == clock.error(10**6 + 1)
