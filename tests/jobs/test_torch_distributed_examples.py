"""To a reader of the examples for torch.distributed: they run under mpirun and torchrun without changes."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.launching import Result, job_environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "torch_distributed"


TINY = ("--model", "tiny", "--image-size", "32", "--classes", "4", "--cpu")
pytestmark = pytest.mark.any_mpi

pytest.importorskip("sklearn", reason="an example trains on the digits of scikit-learn: install the extra examples")
pytest.importorskip("matplotlib", reason="matplotlib draws the chart: install the extra examples")


@pytest.fixture(autouse=True, scope="module")
def backend_is_known():
    """The programs do not import torchmpi: torch finds the backend by the entry point of the installation."""
    if not entry_points(group="torch.backends", name="torchmpi"):
        pytest.fail("torchmpi is on the path, but not installed, so torch cannot find its backend: pip install -e .")


@pytest.fixture
def torchrun(warm_python):
    """``torchrun(n, "name", *options) -> Result``"""

    def run(n: int, name: str, *options: str | Path) -> Result:
        program = [*warm_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        program += ["--no-python", *warm_python, EXAMPLES / f"{name}.py", *options]
        command = ["timeout", "-k", "5", "120", *program]
        done = subprocess.run(command, capture_output=True, text=True, env=job_environment({}))
        return Result(done.returncode, done.stdout, done.stderr)

    return run


def lines_of(result: Result) -> list[str]:
    """The output of a program, which must have succeeded."""
    assert result.returncode == 0, result.output
    return result.stdout.splitlines()


def check_messages(lines: list[str], n: int) -> None:
    for rank in range(n):
        assert f"rank {rank}: blocking, has {rank + 1}" in lines
        assert f"rank {rank}: nonblocking, has {(rank - 1) % n} from its left" in lines
    assert f"rank {n - 1}: tagged, has [1.0, 1.0] and [2.0, 2.0]" in lines
    assert f"rank 0: from any source, has messages from {list(range(1, n))}" in lines
    assert sum(": batched, " in line for line in lines) == n


def check_sums(lines: list[str]) -> None:
    """Four lengths in three types, and one line of times."""
    assert sum("differs by at most" in line for line in lines) == 12
    assert re.search(r"1000003 x torch.float32: ring \d+\.\d+ ms", lines[-1])


def test_point_to_point(launch):
    check_messages(lines_of(launch(2, [EXAMPLES / "point_to_point.py"])), 2)


def test_point_to_point_under_torchrun(torchrun):
    check_messages(lines_of(torchrun(2, "point_to_point")), 2)


def test_collectives(launch):
    lines = lines_of(launch(2, [EXAMPLES / "collectives.py"]))
    for rank in (0, 1):
        for line in ("all_reduce SUM 3", f"scatter [{rank}.0, {rank}.0]", "all_gather [0, 10]"):
            assert f"rank {rank}: {line}" in lines
    assert "rank 0: gather [[0.5, 0.5], [1.5, 1.5]]" in lines
    assert "rank 0: all_reduce of the even ranks 0" in lines and "rank 1: all_reduce of the odd ranks 1" in lines


def test_ring_allreduce(launch):
    check_sums(lines_of(launch(2, [EXAMPLES / "ring_allreduce.py"])))


def test_ring_allreduce_on_gloo_under_torchrun(torchrun):
    """The programs run without torchmpi."""
    lines = lines_of(torchrun(2, "ring_allreduce", "--backend", "gloo"))
    check_sums(lines)
    assert "gloo's own" in lines[-1]


def test_distributed_sgd(launch):
    lines = lines_of(launch(2, [EXAMPLES / "distributed_sgd.py"], timeout=240))
    assert "718 for each of 2 ranks, torchmpi" in lines[0]
    losses = [float(line.split()[-1]) for line in lines if line.startswith("epoch ")]
    assert len(losses) == 6 and losses[-1] < losses[0] / 10
    assert lines[-1].startswith("test accuracy ") and float(lines[-1].split()[-1]) >= 0.95


def test_resnet(launch, tmp_path):
    record, chart = tmp_path / "resnet.json", tmp_path / "resnet.png"
    options = ["--steps", "12", "--batch-size", "8", "--threads", "1", "--json", record, "--plot", chart]
    lines = lines_of(launch(2, [EXAMPLES / "resnet.py", *TINY, *options]))
    first, last = re.search(r"^tiny, 21,716 parameters, loss (\S+) to (\S+)$", "\n".join(lines), re.M).groups()
    assert float(last) < float(first)
    (run,) = json.loads(record.read_text())["runs"].values()
    for name, num_images in (("together", 16), ("alone", 8)):
        figures = run[name]
        assert 0 < figures["low_ms"] <= figures["median_ms"] <= figures["high_ms"], name
        assert figures["images_per_s"] == pytest.approx(1000 * num_images / figures["median_ms"]), name
    assert f"scaling efficiency against one rank: {100 * run['efficiency']:.1f} %" in lines
    assert f"chart saved in {chart}" in lines and chart.read_bytes().startswith(b"\x89PNG")


def test_cifar10_files(tmp_path):
    from resnet_data import read_cifar10

    with pytest.raises(SystemExit, match="expected files data_batch_"):
        read_cifar10(str(tmp_path))
    pixels = np.arange(3 * 3072).astype(np.uint8).reshape(3, 3072)
    records = np.concatenate([np.array([[7], [0], [9]], np.uint8), pixels], axis=1)
    for number, part in ((1, records[:2]), (2, records[2:])):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(part.tobytes())
    images = read_cifar10(str(tmp_path))
    assert images.tensors[1].tolist() == [7, 0, 9]
    expected = torch.from_numpy(pixels.reshape(3, 3, 32, 32).astype(np.float32)) / 127.5 - 1
    assert torch.equal(images.tensors[0], expected)
    (tmp_path / "data_batch_2.bin").write_bytes(records[2:].tobytes()[:-1])
    with pytest.raises(SystemExit, match=r"data_batch_2.bin: expected records of 3073 bytes, found 3072"):
        read_cifar10(str(tmp_path))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_parts_of_the_images(size):
    from digits import part_of
    from torch.utils.data import TensorDataset

    images = TensorDataset(torch.arange(101))
    parts = [part_of(images, rank, size, seed=5).tensors[0].tolist() for rank in range(size)]
    assert {len(part) for part in parts} == {101 // size}
    together = [row for part in parts for row in part]
    assert len(set(together)) == len(together) and together != sorted(together)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_programs_import_public_names_only(path):
    """And without torchmpi."""
    text = path.read_text()
    assert "environ" not in text
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names if node.module != "__future__"]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            names = [node.attr]
        for name in names:
            assert name.split(".")[0] != "torchmpi", name
            assert not re.search(r"(^|\.)_[^_]", name), name
