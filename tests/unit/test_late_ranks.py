"""To whoever has a slow job: late ranks are named, with the cause, and even ones never, over recorded paces."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.call_counts import CallCounts
from torchmpi.communicators.call_log import CallLog
from torchmpi.communicators.status_board import StatusBoard
from torchmpi.shared_memory.memory_layout import BLOCK_BYTES
from torchmpi.shared_memory.segments import Segment
from torchmpi.supervision import lateness, pace
from torchmpi.supervision.lateness import Evidence, LateWatch, Looks, Pace, Verdict, is_late, likely_cause, variation
from torchmpi.supervision.pace import Note, PaceReader, StackLooks, place_of

SECOND = 1_000_000_000
LEAST = 0.05
Window = Sequence[Sequence[float]]
"""Of each rank the shares of the time outside of calls, and waiting for others."""
RECORDED: dict[str, list[Window]] = {
    name: [[(outside / 1000, waited / 1000) for outside, waited in window] for window in windows]
    for name, windows in json.loads(
        (Path(__file__).parents[1] / "helpers/paces_of_even_ranks.json").read_text()
    ).items()
}
"""Windows of a second of even ranks, recorded while some twenty processes of others ran on the two cores of the
machine: four ranks that mostly sleep, and two that compute."""


def an_hour(windows: Sequence[Window], seed: int) -> Iterator[Window]:
    """An hour like the recorded minutes: parts of a minute, in random order, so that bursts stay bursts."""
    choose = random.Random(seed)
    for _ in range(60):
        begin = choose.randrange(len(windows) - 60)
        yield from windows[begin : begin + 60]


def delayed(window: Window, late: int, share: float) -> Window:
    """The same window if a rank needed more of the time: it waits less itself, and then the others wait for it."""
    own = min(share, window[late][1])
    length = 1 + share - own
    return [
        ((outside + share) / length, (waited - own) / length)
        if rank == late
        else (outside / length, (waited + share - own) / length)
        for rank, (outside, waited) in enumerate(window)
    ]


def verdicts(windows: Iterator[Window] | Sequence[Window]) -> list[tuple[int, Verdict]]:
    """What is found in windows of a second, with the number of the window."""
    watch, found = LateWatch(LEAST), []
    paces = {rank: Pace() for rank in range(4)}
    for number, window in enumerate(windows):
        for _ in range(lateness.PERIODS_PER_WINDOW):
            length = SECOND // lateness.PERIODS_PER_WINDOW
            paces = {
                rank: Pace(
                    paces[rank].now + length,
                    paces[rank].calls + 5,
                    paces[rank].inside + int((1 - outside) * length),
                    paces[rank].waited + int(waited * length),
                )
                for rank, (outside, waited) in enumerate(window)
            }
            found += [(number, verdict) for verdict in watch.add(paces)]
    return found


def kinds(found: Sequence[tuple[int, Verdict]]) -> list[tuple[str, int]]:
    return [(verdict.kind, verdict.number) for _, verdict in found if verdict.kind != "suspected"]


@pytest.mark.parametrize(("name", "seed"), [("asleep", 1), ("computing", 1), ("computing", 2)])
def test_no_alarm_in_an_hour_of_even_ranks_on_a_busy_machine(name, seed):
    assert kinds(verdicts(an_hour(RECORDED[name], seed))) == []


@pytest.mark.parametrize("late", range(4))
def test_a_tenth_is_found_within_20_seconds_and_its_end_too(late):
    windows = RECORDED["asleep"]
    found = verdicts([
        *windows[:100],
        *(delayed(window, late, 0.1) for window in windows[100:160]),
        *windows[160:190],
    ])  # fmt: skip
    assert kinds(found) == [("late", late), ("over", late)]
    (begin, first), (end, last) = [(number, verdict) for number, verdict in found if verdict.kind != "suspected"]
    assert begin - 100 < 20 and end - 160 < 20
    assert 0.06 < first.share < 0.16
    # It may have begun a few windows before the verdict's, and the report is of the time since.
    assert abs(last.seconds - (end - begin + lateness.NUM_WINDOWS)) < 5


@pytest.mark.parametrize("seed", range(8))
def test_more_noise_than_lateness_is_no_alarm_and_less_is_one(seed):
    """The decision follows the noise: the same lateness is found on a quiet machine, and not on a noisy one."""
    choose = random.Random(seed)

    def windows(noise: float) -> Iterator[Window]:
        level = [0.0] * 3
        for number in range(140):
            if number % 2 == 0:  # a burst
                level = [max(0.0, choose.gauss(0, noise)) for _ in range(3)]
            shares = [min(0.5, each + max(0.0, choose.gauss(0, noise / 2))) for each in level]
            shares[1] += 0.1 * (number >= 100)
            yield [(0.4 + each, max(shares) - each + 0.05) for each in shares]

    assert ("late", 1) in kinds(verdicts(windows(0.01)))
    assert kinds(verdicts(windows(0.3))) == []


@pytest.mark.parametrize("seed", range(30))
def test_properties_of_the_decision(seed):
    choose = random.Random(seed)
    shares = [choose.gauss(choose.uniform(-0.1, 0.2), 0.05) for _ in range(lateness.NUM_WINDOWS)]
    noise = choose.uniform(0, 0.05)
    mixed = choose.sample(shares, len(shares))
    assert is_late(shares, LEAST, noise) == is_late(mixed, LEAST, noise)  # the order does not matter
    if is_late(shares, LEAST, noise):
        assert median(shares) >= LEAST
        assert is_late([share + 0.1 for share in shares], LEAST, noise)
        assert is_late(shares, LEAST / 2, noise / 2)
    assert not is_late([-share for share in shares if share > 0] or [0.0], LEAST, noise)
    windows = {rank: Pace(100, 1, choose.randrange(1, 150), 0) for rank in range(choose.randrange(2, 6))}
    windows = {rank: each._replace(waited=choose.randrange(each.inside)) for rank, each in windows.items()}
    found = lateness.lateness(windows)
    assert len([rank for rank, share in found.items() if share > 0]) < len(found)
    assert all(-1 <= share <= 1 for share in found.values())


def test_of_two_hosts_each_rank_of_the_slow_one_is_late():
    even, late = Pace(100, 5, 40, 30), Pace(100, 5, 15, 5)
    found = lateness.lateness({0: even, 1: even, 2: late, 3: late})
    assert [round(found[rank], 2) for rank in range(4)] == [-0.25, -0.25, 0.25, 0.25]


@pytest.mark.parametrize("seed", range(4))
def test_a_host_whose_network_is_slow_is_named_and_other_round_trips_are_no_alarm(seed):
    """All ranks wait alike, on a busy machine whose round trips vary: only both links of a host tell of its network."""
    choose, watch, found = random.Random(seed), LateWatch(LEAST), []
    paces = {rank: Pace() for rank in range(4)}
    for number, window in enumerate(RECORDED["asleep"][:240]):
        trips = [choose.choice([200, 300, 5000]) * choose.uniform(1, 2) for _ in range(4)]
        slow = number in range(60, 120) and (2, 3)
        slow = slow or (number in range(150, 180) and (1,))  # one link of two hosts: neither is known to be slow
        for link in slow or ():
            trips[link] += 50_000 * choose.uniform(1, 2)
        for _ in range(lateness.PERIODS_PER_WINDOW):
            paces = {
                rank: Pace(now + SECOND // 2, calls + 5, inside + int((1 - outside) * SECOND / 2), 0)
                for (rank, (now, calls, inside, *_)), (outside, _) in zip(paces.items(), window, strict=True)
            }
            found += [(number, each) for each in watch.add(paces, trips if seed else [])]
    of_hosts = [(number, each) for number, each in found if each.of == "host" and each.kind != "suspected"]
    assert [(each.kind, each.number) for _, each in of_hosts] == [("late", 3), ("over", 3)] * bool(seed)
    assert all(abs(number - change) < 20 for (number, _), change in zip(of_hosts, (60, 120), strict=False))


def test_limits_of_the_decision():
    """The median is above four standard errors, and three quarters of the windows are late, which is enough."""
    assert is_late([0.1] * 8, LEAST, 0.1 / 4.1) and not is_late([0.1] * 8, LEAST, 0.1 / 3.9)
    assert is_late([0.1] * 9 + [0.0] * 3, LEAST, 0.0) and not is_late([0.1] * 8 + [0.0] * 4, LEAST, 0.0)
    assert Pace(now=10, waited=25).share_waited == 1.0, "a call may begin before the window"


def test_variation_of_four_parts_is_that_of_their_medians():
    half = lateness.NUM_WINDOWS // 2
    assert variation({0: ([0.0] * half + [0.1] * half) * 2}) == pytest.approx(0.05)


def test_variation_of_few_windows_is_that_of_their_spread():
    even = {0: [0.0, 0.1] * 4, 1: [0.0, -0.1] * 4}
    assert 0.05 < variation(even) < 0.15
    assert variation({0: [0.02] * 8}) == 0


def test_windows_are_as_long_as_the_steps_of_the_program():
    """A rank that ends no call for a while, as in a long evaluation, is no late rank of many windows."""
    watch, found = LateWatch(LEAST), []
    for second in range(200):
        step = second // 50
        found += watch.add({rank: Pace(second * SECOND, step, step * SECOND, step * SECOND * rank) for rank in (0, 1)})
    assert found == []


def test_another_set_of_ranks_begins_anew():
    watch = LateWatch(LEAST)
    windows = [[(0.8, 0.1), (0.9, 0.0)]] * 9
    for number, _ in enumerate(windows):
        assert watch.add({0: Pace(number * SECOND, number, 0), 1: Pace(number * SECOND, number, 0)}) == []
    assert watch.add({0: Pace(SECOND, 1)}) == []
    assert watch.add({rank: Pace(SECOND, 1) for rank in range(3)}) == []


# --- causes ---------------------------------------------------------------------------------------------------------


def looks(queued: float = 0.0, **counts: int) -> Looks:
    """Looks at places, of a hundred: the lines of a phase have its name."""
    phases = {"loading": lateness.LOADING, "forward": lateness.FORWARD, "backward": lateness.BACKWARD}
    places = {f"{phases.get(name, lateness.ELSEWHERE)}\tat {name}.py:7": count for name, count in counts.items()}
    return Looks(100, queued, places)


def evidence(of_looks: Looks | None = None, **numbers: int) -> Evidence:
    return Evidence(Pace(now=SECOND, **numbers), looks() if of_looks is None else of_looks)


USUAL = looks(loading=5, forward=20, backward=30, other=4)


@pytest.mark.parametrize(
    ("late", "cause"),
    [
        (evidence(looks(loading=25, forward=20, backward=30)), "data loading, 25 % of its time instead of 5 %, at"),
        (evidence(looks(loading=5, forward=42, backward=30)), "the forward pass, 42 % of its time instead of 20 %"),
        (evidence(looks(loading=5, forward=20, other=20)), "a line of the program, 20 % of its time instead of 4 %"),
        (evidence(looks(loading=20, forward=34, backward=44)), "all parts of a step take longer"),
        (evidence(USUAL, collecting=SECOND // 5), "garbage collection of Python, 19 % of the time"),
        (evidence(USUAL._replace(queued=0.15)), "other processes run on its cores, 15 % of the time"),
        (evidence(USUAL._replace(queued=0.2), throttled=SECOND // 5), "the CPU limit of its control group"),
        (evidence(USUAL, disk_faults=50), "page faults that read from a disk or from swap, 50 in a second"),
        (evidence(USUAL, in_kernel=SECOND // 6, faults=40_000), "page faults, 39900 in a second"),
        (evidence(USUAL), "not known"),
        (evidence(Looks()), "not known"),
        # What is counted comes first: a rank without a core is slow in every phase.
        (evidence(looks(queued=0.2, loading=30)), "other processes run on its cores"),
        # What all ranks have is no cause: these collect garbage as well.
        (evidence(looks(loading=30), collecting=SECOND // 20), "data loading"),
    ],
)  # fmt: skip
def test_the_cause_is_named(late, cause):
    others = [evidence(USUAL, collecting=SECOND // 100, in_kernel=SECOND // 50, faults=100)] * 3
    assert likely_cause(0.2, late, others).startswith(cause)


# --- what a rank tells ----------------------------------------------------------------------------------------------


def frame_in(file: str, function: str, inner: Callable[[], Any] = lambda: sys._getframe()) -> Any:
    """The innermost frame of a call of a function that is in this file and calls `inner`."""
    scope: dict[str, Any] = {"inner": inner}
    exec(compile(f"def {function}():\n    return inner()", file, "exec"), scope)
    return scope[function]


def in_files(*places: tuple[str, str]) -> Any:
    """Place of a stack through functions of these files, the innermost last."""

    def call() -> Any:
        return place_of(sys._getframe(1))

    for file, function in reversed(places):
        call = frame_in(file, function, call)
    return call()


TORCH = os.path.join(os.path.dirname(os.path.dirname(sys.modules["torch"].__file__ or "")), "torch")
LIBRARIES = (TORCH, pace.PACKAGE)


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        ([], lateness.ELSEWHERE),
        ([(f"{TORCH}/utils/data/dataloader.py", "__next__")], lateness.LOADING),
        ([(f"{TORCH}/utils/data/dataloader.py", "__next__"), ("data.py", "__getitem__")], lateness.LOADING),
        ([(f"{TORCH}/nn/modules/module.py", "_call_impl"), ("net.py", "forward")], lateness.FORWARD),
        ([(f"{TORCH}/_tensor.py", "backward"), (f"{TORCH}/autograd/graph.py", "_run")], lateness.BACKWARD),
        ([(f"{TORCH}/optim/sgd.py", "step")], lateness.OPTIMIZER),
        ([(f"{TORCH}/serialization.py", "save"), (f"{TORCH}/serialization.py", "_save")], lateness.SAVING),
        ([(f"{pace.PACKAGE}engine/data_loading.py", "next")], lateness.LOADING),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(os.path.basename(file) for file, _ in value) or "none",
)  # fmt: skip
def test_phases_of_a_program(stack, phase):
    found = in_files(("/home/user/train.py", "main"), *stack)
    assert found[0] == phase
    of_program = [place for place in [("/home/user/train.py", "main"), *stack] if not place[0].startswith(LIBRARIES)]
    assert (found[1], found[3]) == of_program[-1]


def test_calls_are_no_phase():
    call = (f"{pace.PACKAGE}collectives/dispatch.py", "perform")
    assert in_files(("/home/user/train.py", "main"), call) is None
    assert in_files(("train.py", "main"), (f"{TORCH}/autograd/graph.py", "_engine_run_backward"), call) is None


def test_looks_find_where_the_main_thread_is():
    watched, place, count, found = StackLooks(seconds=60, interval=0.001), "", 0, Looks()
    # Some looks find another line, and many if this thread has no core just there.
    while not (watched.is_over or (found.num >= 30 and "time.sleep(0.001)" in place and count > found.num / 2)):
        time.sleep(0.001)
        found = watched.result()
        place, count = max(found.places.items(), key=lambda item: item[1], default=("", 0))
    watched.stop()
    assert watched.result() == watched.result() and 0 <= found.queued <= 1
    assert place.startswith(f"{lateness.ELSEWHERE}\tat ") and "test_late_ranks.py" in place
    assert count > found.num / 2


def test_a_pace_grows_with_what_the_rank_does():
    import gc

    counts, log, step = CallCounts(), CallLog("world", 0, 2), CallLog("world on one host", 0, 2)
    counts.add("world", False, log)
    counts.add("world on one host", True, step)
    reader = PaceReader(SimpleNamespace(call_counts=counts, flight_record=None))  # type: ignore[arg-type]
    try:
        before = reader.read()
        for each in (log, step, log):
            each.enter(call_code("barrier"), ())
            counts.totals()  # a call counts when it ends, also if it has been looked at before
            time.sleep(0.002)
            each.leave()
        counts.add_message("world", "recv", 4, 3_000_000, 1_000_000)
        gc.collect()
        done = reader.read().since(before)
        assert done.calls == 2 and done.inside >= 7_000_000 and done.waited == 1_000_000
        assert 0 < done.collecting < done.now and done.inside < done.now + 3_000_000
        counts.free(log)
        freed = reader.read().since(before)
        assert (freed.calls, freed.inside, freed.waited) == (done.calls, done.inside, done.waited)
    finally:
        reader.close()
    assert reader._note_collection not in gc.callbacks


def test_notes_on_the_board():
    board = StatusBoard(Segment.create("notes", 2 * BLOCK_BYTES), 2)
    try:
        assert board.read_note(0) is None
        note = Note(Pace(1, 2, 3), looks(0.25, loading=3), 4)
        assert board.write_note(1, note.packed())
        assert Note.unpacked(board.read_note(1)) == note and board.read_note(0) is None
        longest = {f"{lateness.ELSEWHERE}\t{number}{'x' * 200}": 10**6 for number in range(6)}
        full = Note(Pace(*[10**18] * len(Pace._fields)), Looks(10**6, 1 / 3, longest), 10**6)
        assert not board.write_note(1, full.packed()) and Note.unpacked(board.read_note(1)) == note
        assert board.write_note(1, full.without_lines().packed())
        assert Note.unpacked(board.read_note(1)) == full.without_lines()
        board.segment.memory[2 * BLOCK_BYTES - 900] ^= 1  # as while it is written
        assert board.read_note(1) is None
    finally:
        board.close()
