"""To a user of collectives: random calls equal references; ``fuzz_collectives.py`` runs any number of them."""

from __future__ import annotations

import pytest
from fuzz_collectives import Fuzzer
from helpers.shm_rig import any_slots

import torchmpi as mpi

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("world")]


@pytest.mark.parametrize("seed", (1, 2))
def test_random_calls_equal_their_references(seed):
    fuzzer = Fuzzer()
    problems = fuzzer.run(1000 * mpi.size() + seed, 0, 30)
    assert not problems, "\n".join(problems)
    assert fuzzer.num_refused < 60


@any_slots
@pytest.mark.any_mpi
@pytest.mark.ranks(3)
def test_random_calls_through_small_slots_equal_their_references(slots):
    problems = Fuzzer().run(1, 0, 30)
    assert not problems, "\n".join(problems)


def test_a_wrong_result_is_found(monkeypatch):
    """The last rank gets one wrong value in every allreduce."""
    right = mpi.allreduce

    def wrong(tensor, **options):
        result = right(tensor, **options)
        if mpi.rank() == mpi.size() - 1 and result.numel():
            result.view(-1)[-1] += 1
        return result

    fuzzer = Fuzzer()
    monkeypatch.setattr(mpi, "allreduce", wrong)
    assert fuzzer.run(1, 0, 30)
