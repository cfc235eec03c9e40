"""The doctor's verdicts on cores and shared memory, from given facts."""

from __future__ import annotations

import pytest
from cli_facts import alone, job

from torchmpi.cli.doctor import host_checks as checks

MIB = 1 << 20
OTHER = {"host": "node2", "machine": "node2 boot"}


def on(*cores: int) -> dict[str, object]:
    return {"cores": list(cores)}


def test_more_ranks_than_cores():
    found = checks.check_cores(job(*[{"num_cpus": 2}] * 3))
    assert found.verdict == "warning" and "3 ranks share 2 cores on node1" in found.found
    spread = job({"num_cpus": 2}, {"num_cpus": 2}, OTHER | {"num_cpus": 2})
    found = checks.check_cores(spread)
    assert found.verdict == "ok" and "2 ranks on node1" in found.found and "1 rank on node2" in found.found


def test_cores_of_a_process_alone():
    assert checks.check_cores(alone()).verdict == "ok"
    bound = checks.check_cores(alone(cores=[3], num_physical_cores=1))
    assert bound.verdict == "warning" and "taskset" in bound.remedy
    single = checks.check_cores(alone(cores=[0, 1], num_cpus=2, num_physical_cores=1))
    assert single.verdict == "warning" and "2 hardware threads" in single.found


@pytest.mark.parametrize(
    ("ranks", "expected", "words"),
    [
        ([on(0, 1), on(2, 3)], "ok", "0-1 | 2-3"),
        ([on(*range(8)), on(*range(8))], "ok", "left to torchmpi"),
        ([on(5), on(5)], "problem", "all 2 ranks on node1 are bound to core 5, of 8"),
        ([on(0, 1), on(0, 1), on(0, 1)], "warning", "only cores 0-1 of 8"),
        ([on(0, 1), on(1, 2)], "warning", "share a core"),
        ([on(0) | {"num_cpus": 1}] * 2, "ok", "nothing to bind"),
        ([on(0, 1) | {"settings": {"bind": "none"}}] * 2, "warning", "TORCHMPI_BIND=none"),
        ([on(0), on(0) | OTHER], "ok", "own cores"),  # the same number on two machines is two cores
        ([on(0), on(0) | OTHER, on(0) | OTHER], "problem", "on node2"),
    ],
)
def test_binding(ranks, expected, words):
    found = checks.check_binding(job(*ranks))
    assert (found.verdict, words in found.found) == (expected, True), found
    assert bool(found.remedy) == (expected != "ok")


def test_the_worst_host_is_reported():
    shared, stuck = [on(0, 1), on(1, 2)], [on(0) | OTHER, on(0) | OTHER]
    assert checks.check_binding(job(*shared, *stuck)).verdict == "problem"
    assert checks.check_binding(job(*stuck, *shared)).verdict == "problem"


@pytest.mark.parametrize(
    ("process", "expected", "words"),
    [
        ({}, None, ""),
        ({"environment": {"OMP_NUM_THREADS": "4, 2", "MKL_NUM_THREADS": "1"}}, "ok", "plausible"),
        ({"environment": {"OMP_NUM_THREADS": "0"}}, "problem", "OMP_NUM_THREADS='0' on node1 is no number"),
        ({"environment": {"NUMBA_NUM_THREADS": "many"}}, "problem", "NUMBA_NUM_THREADS='many'"),
        ({"environment": {"MKL_NUM_THREADS": "512"}}, "warning", "MKL_NUM_THREADS=512 on node1, which has 8 CPUs"),
        ({"settings": {"threads": 9}}, "warning", "TORCHMPI_THREADS=9"),
    ],
)
def test_variables_for_threads(process, expected, words):
    found = checks.check_threads(job({}, process))
    assert (None if found is None else found.verdict) == expected
    assert found is None or words in found.found


def test_cpu_quota():
    found = checks.check_quota(alone(cpu_quota=1.5))
    assert found.verdict == "warning" and "1.5" in found.found and "at most 1 rank there" in found.remedy
    assert checks.check_quota(alone(cpu_quota=8.0)).verdict == "ok"
    bound = [on(0) | {"cpu_quota": 2.0}, on(1) | {"cpu_quota": 2.0}]
    assert checks.check_quota(job(*bound)).verdict == "ok"
    assert checks.check_quota(job(*bound, on(2) | {"cpu_quota": 2.0})).verdict == "warning"


@pytest.mark.parametrize(
    ("memory", "expected", "words"),
    [
        ({"shm_total_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB}, "warning", "64 of 64 MiB free"),
        ({"shm_total_bytes": 64 * MIB, "shm_free_bytes": 8 * MIB}, "problem", "8 of 64 MiB free"),
        ({"shm_free_bytes": 8 * MIB}, "problem", "8 of 8192 MiB free"),
        ({"shm_total_bytes": None, "shm_free_bytes": 0, "shm_is_writable": False}, "warning", "not there"),
        ({"shm_is_writable": False}, "warning", "not writable"),
        ({"shm_total_bytes": 256 * MIB, "shm_free_bytes": 256 * MIB}, "ok", "256 of 256"),
    ],
)
def test_shared_memory(memory, expected, words):
    for facts in (alone(**memory), job({}, OTHER | memory)):  # whichever host it is
        found = checks.check_shared_memory(facts)
        assert (found.verdict, words in found.found) == (expected, True), found


def test_shared_memory_must_suffice_for_all_ranks_of_a_host():
    memory = {"shm_total_bytes": 1024 * MIB, "shm_free_bytes": 100 * MIB}
    assert checks.check_shared_memory(job(*[memory] * 2)).verdict == "ok"
    assert checks.check_shared_memory(job(*[memory] * 8)).verdict == "problem"


def test_leftovers():
    files = [f"/dev/shm/torchmpi-board-{name}" for name in "abcde"]
    found = checks.check_leftovers(alone(leftovers=files))
    assert found.verdict == "warning" and "5 files" in found.found and "board-c and 2 more" in found.found
