"""The doctor's verdicts on GPUs, from given facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cli_facts import alone, job

from torchmpi.backends.gpus import Devices, RankDevice
from torchmpi.cli.doctor import gpu_checks as checks
from torchmpi.cli.doctor.self_test import check_gpu_memory
from torchmpi.cli.facts import SelfTest
from torchmpi.cli.info import _gpu_section

OTHER = {"host": "node2", "machine": "node2 boot"}
GPUS = {"cuda_available": True, "has_nvidia_driver": True, "gpus": ["GPU-a", "GPU-b"]}


def only(gpu: str) -> dict[str, object]:
    return GPUS | {"gpus": [gpu]}


@pytest.mark.parametrize(
    ("ranks", "expected", "words"),
    [
        ([{}, {}], "ok", "CPUs"),
        ([GPUS, GPUS], "ok", "2 GPUs"),
        ([GPUS, GPUS, GPUS], "warning", "3 ranks on node1 share 2 GPUs, 2 on one of them"),
        ([only("GPU-a"), only("GPU-b")], "ok", "1 GPU visible"),  # as a scheduler shows them
        ([only("GPU-a"), only("GPU-a")], "warning", "share 1 GPU"),
        ([only("GPU-a"), only("GPU-a") | OTHER], "ok", "1 GPU"),
        ([GPUS, OTHER], "problem", "rank 1 sees no GPU"),
    ],
)
def test_gpus_of_ranks(ranks, expected, words):
    found = checks.check_cuda(job(*ranks))
    assert (found.verdict, words in found.found) == (expected, True), found


@pytest.mark.parametrize(
    ("process", "expected", "words"),
    [
        ({"cuda_built": None}, "warning", "built without CUDA"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, "warning", "hides all GPUs"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "-1"}}, "warning", "hides all GPUs"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "7"}}, "problem", "CUDA_VISIBLE_DEVICES=7"),
        ({}, "problem", "can use no GPU"),
    ],
)
def test_gpus_that_torch_cannot_use(process, expected, words):
    found = checks.check_cuda(alone(has_nvidia_driver=True, **process))
    assert (found.verdict, words in found.found) == (expected, True), found


def test_nccl():
    assert checks.check_nccl(alone()) is None
    found = checks.check_nccl(job(GPUS | {"nccl": "2.27.5"}, GPUS | {"nccl": "2.27.5"}))
    assert found.verdict == "ok" and "2.27.5" in found.found
    found = checks.check_nccl(job(GPUS | {"nccl": "2.27.5"}, GPUS | {"nccl": "2.29.2"}))
    assert found.verdict == "problem" and "2.27.5, 2.29.2" in found.found
    found = checks.check_nccl(job(GPUS | {"nccl": "2.27.5"}, GPUS | OTHER | {"nccl_error": "no such file"}))
    assert found.verdict == "warning" and "node2: no such file" in found.found


def test_peer_access():
    assert checks.check_peers(alone()) is None
    assert checks.check_peers(alone(**GPUS, peer_access=[[True]])) is None
    found = checks.check_peers(alone(**GPUS, peer_access=[[True, True], [True, True]]))
    assert found.verdict == "ok" and "all 2 GPUs" in found.found
    access = [[True, False, True], [False, True, False], [True, False, True]]
    found = checks.check_peers(alone(**GPUS, peer_access=access))
    assert found.verdict == "warning" and "0+2 | 1" in found.found


@pytest.mark.parametrize(
    ("gpu_memory", "expected"), [(None, None), ("", "ok"), ("rank 0 cannot open that of rank 1: refused", "problem")]
)
def test_ipc(gpu_memory, expected):
    found = checks.check_ipc(replace(alone(), self_test=SelfTest(2, 0.5, None, "refused", gpu_memory)))
    assert (None if found is None else found.verdict) == expected
    assert expected != "problem" or (gpu_memory in found.found and "--ipc=host" in found.remedy)


def test_mps():
    shared = [only("GPU-a"), only("GPU-a")]
    assert checks.check_mps(job(only("GPU-a"), only("GPU-b"))) is None
    assert checks.check_mps(alone(**GPUS)) is None
    found = checks.check_mps(job(*shared))
    assert found.verdict == "warning" and "nvidia-cuda-mps-control -d" in found.remedy
    assert checks.check_mps(job(*[gpu | {"mps": "/tmp/nvidia-mps"} for gpu in shared])).verdict == "ok"
    found = checks.check_mps(alone(environment={"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}))
    assert found.verdict == "warning" and "/nowhere" in found.found


def test_info_lists_the_ranks_on_each_gpu():
    cpu = {"rank": 0, "host": "a", "device_uuid": None, "nccl": None}
    assert _gpu_section([cpu]) == []
    on_gpus = [{"rank": rank, "host": "a", "device_uuid": f"GPU-{rank // 2}", "nccl": "2.27.5"} for rank in range(3)]
    assert _gpu_section(on_gpus) == [
        "GPUs", "  NCCL        2.27.5", "  GPU-0 on a  ranks 0, 1", "  GPU-1 on a  rank 2",
    ]  # fmt: skip


# --- opening each other's memory, with handles of the host's


class Ranks:
    """Two ranks in one process: the gathered values are those of both."""

    def __init__(self, monkeypatch, *, handles):
        self.rank, self.handles = 0, handles
        monkeypatch.setattr("torchmpi.cli.doctor.self_test._handle_of", lambda tensor: handles[0])

    def allgather(self, value):
        return [value, self.handles[1] if value is self.handles[0] else ""]


SHARED = Devices([RankDevice(0, "GPU-a", frozenset({"GPU-a"}))] * 2)


def refuse():
    raise RuntimeError("invalid device context")


@pytest.mark.parametrize(
    ("handle", "expected"),
    [
        ((torch.tensor, ([2.0],)), ""),
        ((torch.tensor, ([7.0],)), "rank 0 read 7.0 from rank 1, which wrote 2"),
        ((refuse, ()), "rank 0 cannot open that of rank 1: invalid device context"),
    ],
)
def test_outcomes_of_opening_the_memory_of_another_rank(monkeypatch, handle, expected):
    comm = Ranks(monkeypatch, handles=[(torch.tensor, ([1.0],)), handle])
    assert check_gpu_memory(comm, SHARED, torch.device("cpu")) == expected


def test_no_trial_without_peer_access(monkeypatch):
    for devices in (
        Devices([RankDevice(0), RankDevice(0)]),
        Devices([RankDevice(0, "a", frozenset("a")), RankDevice(1, "b")]),
    ):
        assert check_gpu_memory(None, devices, torch.device("cpu")) is None
