"""To a user of GPUs: which one a rank gets, and the groups that follow from them, from given facts."""

from __future__ import annotations

import inspect
from itertools import combinations
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing import reductions

from torchmpi.backends import gpus
from torchmpi.backends.gpus import Devices, RankDevice
from torchmpi.backends.ipc import staging_areas

uuids = st.sampled_from(["", "a", "b", "c"])
ranks_of = st.lists(st.builds(RankDevice, st.integers(0, 1), uuids, st.frozensets(uuids)), min_size=1, max_size=6)


@given(ranks_of)
def test_the_first_pair_shares_a_gpu_and_none_means_none(facts):
    table, ranks = Devices(facts), range(len(facts))

    def is_shared(one, other):
        return bool(table[one].uuid) and table[one][:2] == table[other][:2]

    found = table.first_sharing(ranks)
    assert is_shared(*found) if found else not any(is_shared(*pair) for pair in combinations(ranks, 2))


def test_one_gpu_of_each_host_is_not_the_same_gpu():
    """Cloned virtual machines may show the same UUID."""
    assert Devices([RankDevice(0, "a"), RankDevice(1, "a")]).first_sharing([0, 1]) is None


def test_without_cuda_no_rank_communicates():
    found = Devices.gather(None, [0, 0, 1], torch.device("cpu"), has_cuda=False)
    assert found == (RankDevice(0), RankDevice(0), RankDevice(1)) and found.num_hosts == 2
    assert found.uuids == ("", "", "") and found.hosts == (0, 0, 1)


def test_each_rank_reports_its_device_and_the_devices_it_can_access(monkeypatch):
    access = [[True, True, False], [True, True, True], [False, True, True]]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: access[i][j])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"GPU-{i}"))
    world = SimpleNamespace(rank=1, allgather=lambda own: [RankDevice(0), own])
    table = Devices.gather(world, [0, 4], torch.device("cuda", 2), has_cuda=True)
    assert table[1] == RankDevice(4, "GPU-2", frozenset({"GPU-1", "GPU-2"}))
    # Groups of GPUs that can all access each other: 0 and 1, and 2 alone, since 0 cannot access 2.
    keys = [gpus.ipc_key(torch.device("cuda", index)) for index in range(3)]
    assert keys == ["GPU-0 GPU-1", "GPU-0 GPU-1", "GPU-2"]


def test_the_functions_of_torch_for_shared_gpu_memory_are_the_expected_ones():
    """Partly private functions, whose arguments may change in another version of torch; the test needs no GPU."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[staging_areas._DEVICE_FIELD] == "storage_device" and len(names) == 15
    assert all(hasattr(torch.cuda.Event, name) for name in ("ipc_handle", "from_ipc_handle", "record", "wait"))
