"""To a user of autotune(): decisions follow from the measurements, and the file keeps them."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmpi.backend_specs import HIERARCHICAL
from torchmpi.backends import saved_tables
from torchmpi.backends.selection_table import (
    Key,
    Table,
    at,
    checked,
    keys,
)
from torchmpi.collective_specs import COLLECTIVES, SPECS
from torchmpi.collectives.tuning import measuring
from torchmpi.collectives.tuning.decision import best, decide, speedup

MPI = ((None, "mpi"),)


def steady(**seconds):
    """Samples without noise."""
    return {name: [value] * 8 for name, value in seconds.items()}


# --- deciding


def test_a_change_needs_a_speedup_above_the_margin():
    assert best([steady(mpi=1.0, shm=0.97)], "mpi") == "mpi"
    assert best([steady(mpi=1.0, shm=0.5)], "mpi") == "shm"


def test_a_gain_within_the_noise_changes_nothing():
    noisy = {"mpi": [1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0], "shm": [2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0]}
    assert best([noisy], "mpi") == "mpi"


def test_one_disturbed_round_does_not_hide_a_gain():
    assert best([{"mpi": [2.0] * 8, "shm": [1.0] * 7 + [50.0]}], "mpi") == "shm"


def test_speedup_of_several_sizes_is_the_geometric_mean():
    small, large = steady(mpi=1e-6, shm=4e-6), steady(mpi=2e-3, shm=1e-3)
    assert best([small, large], "mpi") == "mpi"
    assert best([small, large, large, large], "mpi") == "shm"


def test_a_missing_backend_is_replaced():
    assert best([steady(mpi=1.0, p2p=1.1)], "shm") == "mpi"


times = st.lists(st.floats(1e-6, 1e3), min_size=8, max_size=8)


@given(times, times)
def test_at_most_one_of_two_is_faster(one, other):
    assert speedup([one], [other]) <= 1.05 or speedup([other], [one]) <= 1.05
    assert speedup([one], [one]) == pytest.approx(1.0)


def test_the_crossover_lies_between_the_sizes_measured():
    measured = {"sync": {64: steady(mpi=1.0, shm=2.0), 4096: steady(mpi=2.0, shm=1.0)}}
    found = decide("broadcast", measured, {"sync": MPI, "async": MPI})
    assert found["sync"] == ((512, "mpi"), (None, "shm"))
    assert found["async"] == found["sync"]  # not measured for lack of time: as the other mode


def test_without_measurements_nothing_changes():
    assert decide("allreduce", {}, {"sync": MPI}) == {"sync": MPI}


def test_collectives_with_uneven_lengths_get_one_transport():
    sizes = {64: steady(mpi=1.0, shm=2.0), 4096: steady(mpi=4.0, shm=1.0), 1 << 20: steady(mpi=4.0, shm=1.0)}
    assert decide("allgather", {"sync": sizes}, {"sync": MPI})["sync"] == ((None, "shm"),)


def test_reductions_are_hierarchical_at_all_sizes_or_none():
    """Hierarchical reductions have other bits than rank-order reductions; the bits must not depend on the size."""
    small, large = steady(mpi=1.0, p2p=0.5, hierarchical=2.0), steady(mpi=3.0, p2p=9.0, hierarchical=1.0)
    measured = {"sync": {64: small, 4096: large}, "async": {64: small, 4096: large}}
    current = {"sync": MPI, "async": MPI}
    assert decide("allreduce", measured, current)["sync"] == ((512, "p2p"), (None, "mpi"))
    measured["sync"][1 << 20] = measured["async"][1 << 20] = large
    measured["sync"][1 << 24] = measured["async"][1 << 24] = large
    assert decide("allreduce", measured, current) == {mode: ((None, HIERARCHICAL),) for mode in current}
    # Collectives that do not reduce may change the backend by size.
    assert decide("broadcast", measured, current)["sync"] == ((512, "p2p"), (None, HIERARCHICAL))


def test_reductions_become_flat_only_if_faster():
    steps = {"sync": ((None, HIERARCHICAL),)}
    assert decide("allreduce", {"sync": {64: steady(mpi=1.0, hierarchical=1.01)}}, steps) == steps
    assert decide("allreduce", {"sync": {64: steady(mpi=1.0, hierarchical=2.0)}}, steps) == {"sync": MPI}


samples = st.dictionaries(st.sampled_from(["mpi", "p2p", HIERARCHICAL]), times, min_size=3)


@given(
    st.sampled_from(COLLECTIVES),
    st.lists(st.integers(1, 1 << 30), min_size=1, max_size=4, unique=True).flatmap(
        lambda sizes: st.fixed_dictionaries({size: samples for size in sizes})
    ),
)
def test_decisions_are_valid_rules(collective, sizes):
    for mode, rule in decide(collective, {"sync": sizes}, {"sync": MPI, "async": MPI}).items():
        assert checked(Key(collective, "cpu", "hosts", mode), rule) == rule
        if SPECS[collective].in_place and not SPECS[collective].reduces:
            for size in sizes:
                assert at(rule, size) in ("mpi", best([sizes[size]], "mpi"))


# --- the file

JOB = saved_tables.describe_job([0, 0, 1], 4, 2, "Open MPI 5.0.11")
OTHER_SHAPE = JOB._replace(shape={**JOB.shape, "ranks_per_host": [4]})
OTHER_VERSION = JOB._replace(versions={**JOB.versions, "mpi": "MPICH 5.0.2"})

tables = st.dictionaries(
    st.sampled_from(list(keys())),
    st.one_of(st.just(MPI), st.just(((None, "shm"),))),
    max_size=6,
).map(Table)


@given(table=tables)
def test_a_table_round_trips(tmp_path_factory, table):
    path = tmp_path_factory.mktemp("tuning") / "deep" / "tuning.json"
    table[Key("allreduce", "cpu", "host", "sync")] = ((4096, "mpi"), (None, "shm"))
    saved_tables.save(path, JOB, table)
    assert saved_tables.load(path, JOB) == (table, "")
    assert os.listdir(path.parent) == ["tuning.json"]


def test_each_shape_of_job_has_one_table(tmp_path):
    path = tmp_path / "tuning.json"
    first, second = (Table({Key("reduce", "cpu", "host", "sync"): ((None, name),)}) for name in ("shm", "p2p"))
    saved_tables.save(path, JOB, first)
    saved_tables.save(path, OTHER_SHAPE, second)
    assert saved_tables.load(path, JOB)[0] == first
    assert saved_tables.load(path, OTHER_SHAPE)[0] == second
    saved_tables.save(path, OTHER_VERSION, second)
    assert saved_tables.load(path, OTHER_VERSION)[0] == second
    found, problem = saved_tables.load(path, JOB)
    assert found is None and "mpi MPICH 5.0.2, not Open MPI 5.0.11" in problem


def damage(change):
    return lambda text: json.dumps(change(json.loads(text)))


def first_row(content):
    return content["entries"][0]["table"][0]


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: "\x80\x81", "cannot be read"),
        (damage(lambda content: [1, 2]), "not a file of this version"),
        (damage(lambda content: content | {"format": 99}), "not a file of this version"),
        (damage(lambda content: content | {"entries": 5}), "no list of entries"),
        (damage(lambda content: first_row(content).update(collective="sing") or content), "damaged"),
        (damage(lambda content: first_row(content).update(rule=[[5, "mpi"]]) or content), "damaged"),
        (damage(lambda content: first_row(content).update(rule=7) or content), "damaged"),
        (damage(lambda content: first_row(content).pop("span") and content), "damaged"),
        (damage(lambda content: content["entries"][0].update(table="x") or content), "damaged"),
        (damage(lambda content: content["entries"][0].update(versions=None) or content), "measured with"),
        (damage(lambda content: content["entries"][0].update(shape=0) or content), saved_tables.NO_ENTRY),
    ],
)
def test_an_unusable_file_is_reported_and_can_be_replaced(tmp_path, damaged, reason):
    path = tmp_path / "tuning.json"
    table = Table({Key("reduce", "cpu", "host", "sync"): MPI})
    saved_tables.save(path, JOB, table)
    path.write_bytes(damaged(path.read_text()).encode("latin-1"))
    found, problem = saved_tables.load(path, JOB)
    assert found is None and reason in problem and "\n" not in problem
    saved_tables.save(path, JOB, table)
    assert saved_tables.load(path, JOB) == (table, "")


def test_a_missing_file_is_not_an_error(tmp_path):
    assert saved_tables.load(tmp_path / "none.json", JOB) == (None, saved_tables.NO_FILE)
    assert "cannot be read" in saved_tables.load(tmp_path, JOB)[1]  # a folder


def test_a_table_that_cannot_be_saved_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    path.mkdir()
    with pytest.raises(OSError):
        saved_tables.save(path, JOB, Table())
    assert os.listdir(tmp_path) == ["tuning.json"]


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        ("none", {}, None),
        ("", {"XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}, "/cache/torchmpi/tuning.json"),
        ("", {"HOME": "/home/me"}, "/home/me/.cache/torchmpi/tuning.json"),
        ("", {"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache/torchmpi/tuning.json"),
        ("/etc/tuning.json", {"HOME": "/home/me"}, "/etc/tuning.json"),
        ("~/tuning.json", {"HOME": "/home/me"}, "/home/me/tuning.json"),
    ],
)
def test_path_of_the_file(setting, environment, expected, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    path = saved_tables.path_for(setting)
    assert (None if path is None else str(path)) == expected


def test_the_shape_counts_ranks_by_host_and_cores_by_rank():
    assert JOB.shape["ranks_per_host"] == [2, 1]
    assert JOB.shape["cores_per_rank"] == 2.0
    assert JOB.shape["cpu"]
    assert set(JOB.versions) == {"mpi", "torch", "torchmpi"}


# --- measuring


class Machine:
    """A clock that only calls of backends move, and the batches that were measured."""

    def __init__(self, monkeypatch, seconds, first=0.0):
        self.now, self.batches, self._seconds, self._first = 0.0, [], seconds, dict.fromkeys(seconds, first)
        monkeypatch.setattr(measuring, "Work", lambda *_: SimpleNamespace(time=self._time))
        monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(measuring.Session, "_slowest", lambda session, values: values)

    def _time(self, name, count):
        """The first call of a backend takes longer: it compiles, connects, allocates."""
        self.batches.append((name, count))
        elapsed = count * self._seconds[name] + self._first.pop(name, 0.0)
        self.now += elapsed
        return elapsed / count

    def measure(self, seconds, num_left=1):
        session = measuring.Session(None, [64], seconds)
        session.num_left = num_left
        subject = measuring.Subject("allreduce", "cpu", "host", None, tuple(self._seconds))
        return session.measure(subject)


def test_a_batch_of_short_calls_takes_two_milliseconds_and_the_first_call_counts_nowhere(monkeypatch):
    machine = Machine(monkeypatch, {"shm": 1e-6, "p2p": 2.5e-4, "mpi": 0.5}, first=10.0)
    found = machine.measure(1000.0, num_left=2)
    assert {mode: set(sizes) for mode, sizes in found.items()} == {"sync": {64}, "async": {64}}
    for samples in (samples for sizes in found.values() for samples in sizes.values()):
        assert {name: set(round(value, 9) for value in values) for name, values in samples.items()} == {
            "shm": {1e-6}, "p2p": {2.5e-4}, "mpi": {0.5},
        }  # fmt: skip
    rounds = machine.batches[6 : 6 + 3 * 24]
    assert {name: {count for other, count in rounds if other == name} for name in ("shm", "p2p", "mpi")} == {
        "shm": {50}, "p2p": {8}, "mpi": {1},
    }  # fmt: skip


def test_each_backend_comes_first_in_half_of_the_rounds(monkeypatch):
    machine = Machine(monkeypatch, {"shm": 0.01, "mpi": 0.01})
    machine.measure(1000.0, num_left=2)
    names = [name for name, _ in machine.batches]
    firsts = names[4 : 4 + 2 * 24 : 2]
    assert firsts.count("shm") == firsts.count("mpi") == 12


def test_no_more_rounds_than_the_remaining_time_has_room_for(monkeypatch):
    """A round has two batches of 2 ms here; what is left is divided among what is still to measure."""
    machine = Machine(monkeypatch, {"shm": 1e-4, "mpi": 1e-4})
    found = machine.measure(0.124, num_left=2)
    (first,), (second,) = (list(sizes.values()) for sizes in found.values())
    assert {len(first[name]) for name in first} == {14}
    assert {len(second[name]) for name in second} == {16}
    assert machine.now <= 0.124
    assert Machine(monkeypatch, {"shm": 1.0, "mpi": 1.0}).measure(10.0) == {}  # not even eight rounds
