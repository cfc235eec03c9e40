"""The MNIST examples as a user runs them: same curves on any number of ranks, accuracy, plots, bad data."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "mnist"
DISTRIBUTED = ("mnist_allreduce", "mnist_allreduce_async", "mnist_modelparallel", "mnist_engine")
PARAMETER_SERVER = {
    "mnist_parameterserver_dsgd": 0.95,
    # Asynchronous runs differ: they reach 0.96 to 0.975, and get a margin that chance does not use up.
    "mnist_parameterserver_downpour": 0.92,
    "mnist_parameterserver_easgd": 0.92,
    "mnist_parameterserver_easgd_dataparallel": 0.92,
    "mnist_parameterserver_diloco": 0.95,
}
MAX_LINES = 120
once = pytest.mark.once

pytest.importorskip("sklearn", reason="the examples train on the digits of scikit-learn: install the extra examples")


@pytest.fixture(scope="module")
def records() -> dict[tuple[Any, ...], dict[str, Any]]:
    return {}


@pytest.fixture
def example(launch, tmp_path, records):
    """``example("mnist_allreduce", 4, "--epochs", "2")`` gives the record of a job; it is run only once."""

    def run(name: str, n: int, *options: str) -> dict[str, Any]:
        key = (name, n, options)
        if key not in records:
            path = tmp_path / f"{name}.json"
            result = launch(n, [EXAMPLES / f"{name}.py", "--cpu", "--json", path, *options], timeout=240)
            assert result.returncode == 0, result.output
            records[key] = {**json.loads(path.read_text()), "output": result.stdout, "log": result.stderr}
        return records[key]

    return run


# A batch of 50 does not divide by 4, and leaves a last batch of 37 images.
CURVE = ("--epochs", "4", "--batch-size", "50")
ACCURACY = ("--assert-accuracy", "0.95")


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("mnist_allreduce", 1),
        ("mnist_allreduce", 2),
        ("mnist_allreduce", 4),
        ("mnist_allreduce_async", 4),
        ("mnist_modelparallel", 3),
    ],
)
def test_same_curve_on_any_number_of_ranks(example, name, n):
    reference, record = example("mnist_sequential", 1, *CURVE), example(name, n, *CURVE)
    assert len(record["loss"]) == 4
    assert record["loss"] == pytest.approx(reference["loss"], abs=1e-5, rel=0)
    assert record["error"] == pytest.approx(reference["error"], abs=1e-3)
    assert record["accuracy"] == pytest.approx(reference["accuracy"], abs=0.003)


@pytest.mark.parametrize("name", ["mnist_sequential", *DISTRIBUTED])
def test_accuracy(example, name):
    record = example(name, 1 if name == "mnist_sequential" else 4, *ACCURACY)
    assert record["accuracy"] >= 0.95
    assert record["loss"][-1] < record["loss"][0] / 10
    lines = record["output"].splitlines()
    assert lines[0] == "data: scikit-learn digits, 1437 training and 360 test images of 8x8"
    assert sum(line.startswith("epoch ") for line in lines) == 10  # rank 0 alone prints
    assert f"test accuracy {record['accuracy']:.4f}" in lines


@pytest.mark.parametrize("n", [pytest.param(2, marks=once), 3, pytest.param(4, marks=once)])
@pytest.mark.parametrize("name", PARAMETER_SERVER)
def test_accuracy_with_a_parameter_server(example, name, n):
    wanted = PARAMETER_SERVER[name]
    record = example(name, n, "--assert-accuracy", str(wanted))
    assert record["accuracy"] >= wanted
    assert record["loss"][-1] < record["loss"][0] / 4
    lines = record["output"].splitlines()
    assert sum(line.startswith("epoch ") for line in lines) == 10  # rank 0 alone prints
    assert f"test accuracy {record['accuracy']:.4f}" in lines


def test_synchronous_training_through_a_server_has_the_same_curve(example):
    """The gradients of the ranks add up in any order, so not to the last digit."""
    one, three = (example("mnist_parameterserver_dsgd", n, "--epochs", "2") for n in (1, 3))
    assert three["loss"] == pytest.approx(one["loss"], abs=1e-4)
    assert three["error"] == pytest.approx(one["error"], abs=2e-3)


@once
def test_elastic_averaging_without_momentum(example):
    """The other of the two updates that the example has."""
    record = example("mnist_parameterserver_easgd", 2, "--momentum", "0", "--lr", "0.2")
    assert record["accuracy"] >= 0.9


@once
def test_bounded_staleness(example):
    """No rank begins a round while another is more than one behind: so no send can have missed much."""
    options = ("--max-staleness", "1", "--prefetch", "0", "--send-frequency", "1", "--tau", "5", "--epochs", "4")
    record = example("mnist_parameterserver_downpour", 3, *options)
    (line,) = (line for line in record["output"].splitlines() if line.startswith("staleness of rank 0's sends"))
    most = int(line.split(" on average, ")[1].split()[0])
    # Two others. One may be a round behind when this rank fetches, and three ahead of that when it last sends before it
    # fetches again, held up at its own next fetch: less than five rounds of five sends.
    assert most < 2 * 5 * 5


@once
def test_too_low_an_accuracy_fails(launch):
    options = ["--cpu", "--epochs", "1", "--assert-accuracy", "0.999"]
    result = launch(2, [EXAMPLES / "mnist_allreduce.py", *options])
    assert result.returncode != 0
    assert result.stdout.count("failed: expected a test accuracy of at least 0.999") == 1
    assert "Traceback" not in result.stderr


@once
def test_sequential_needs_no_torchmpi(launch):
    example = EXAMPLES / "mnist_sequential.py"
    code = f"""
import runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
sys.argv = ["example", "--cpu", "--epochs", "1"]
runpy.run_path({str(example)!r}, run_name="__main__")
print("dirty" if any(name.startswith(("torchmpi", "mpi4py")) for name in sys.modules) else "clean")
"""
    assert "clean" in launch(1, ["-c", code]).stdout


@pytest.mark.parametrize("asynchronous", [[], ["--asynchronous"]])
def test_engine_resumes_in_the_middle_of_an_epoch(launch, tmp_path, asynchronous):
    """The last checkpoint, after update 25 of 36, continues to the same end."""
    options = ["--cpu", "--epochs", "3", "--checkpoint", tmp_path / "a.ckpt", *asynchronous]
    records = []
    for step, more in (("whole", []), ("resumed", ["--resume"])):
        path = tmp_path / f"{step}.json"
        result = launch(2, [EXAMPLES / "mnist_engine.py", *options, "--json", path, *more], timeout=120)
        assert result.returncode == 0, result.output
        records.append(json.loads(path.read_text()))
        printed = [line for line in result.stdout.splitlines() if line.startswith("epoch ")]
        assert len(printed) == (1 if more else 3)
    assert records[0] == records[1]


def test_engine_shows_progress_on_rank_0(example):
    record = example("mnist_engine", 4, *ACCURACY)
    assert record["log"].count("epoch 10/10 [") == 1


@once
def test_plot(launch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws the curves: install the extra examples")
    path = tmp_path / "curves.png"
    result = launch(2, [EXAMPLES / "mnist_allreduce.py", "--cpu", "--epochs", "2", "--plot", path], timeout=120)
    assert result.returncode == 0, result.output
    assert f"curves saved in {path}" in result.stdout
    assert path.read_bytes().startswith(b"\x89PNG")


@once
def test_plot_without_matplotlib(launch, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    options = ["--cpu", "--epochs", "1", "--plot", tmp_path / "curves.png"]
    result = launch(1, [EXAMPLES / "mnist_sequential.py", *options], env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0, result.output
    assert "no plot: matplotlib is not installed" in result.stdout
    assert not (tmp_path / "curves.png").exists()


def write_mnist(directory: Path, num: int) -> None:
    """The digits, in the format of MNIST and under the names of its test files."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels, header = (images[:num] * 15).astype("uint8"), bytes((0, 0, 8, 3))
    shape = b"".join(length.to_bytes(4, "big") for length in (num, 8, 8))
    (directory / "t10k-images.idx3-ubyte.gz").write_bytes(gzip.compress(header + shape + pixels.tobytes()))
    content = bytes((0, 0, 8, 1)) + num.to_bytes(4, "big") + labels[:num].astype("uint8").tobytes()
    (directory / "t10k-labels-idx1-ubyte").write_bytes(content)


@once
def test_mnist_files(launch, tmp_path):
    write_mnist(tmp_path, 1000)
    options = ["--cpu", "--data", tmp_path, "--epochs", "10", "--assert-accuracy", "0.9"]
    result = launch(2, [EXAMPLES / "mnist_allreduce.py", *options], timeout=120)
    assert result.returncode == 0, result.output
    assert "800 training and 200 test images (only the t10k files are there" in result.stdout


@once
def test_truncated_file_ends_the_job(launch, tmp_path):
    write_mnist(tmp_path, 100)
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-40])
    result = launch(2, [EXAMPLES / "mnist_engine.py", "--cpu", "--data", tmp_path])
    assert result.returncode != 0
    assert f"{labels}: expected 100 bytes of data for shape (100,), found 60" in result.stderr


@once
@pytest.mark.parametrize("name", ["mnist_sequential", *DISTRIBUTED, *PARAMETER_SERVER])
def test_help_and_length(launch, name):
    """An example explains itself, is short, and uses public names only."""
    result = launch(1, [EXAMPLES / f"{name}.py", "--help"])
    assert result.returncode == 0, result.output
    for option in ("--epochs", "--batch-size", "--lr", "--seed", "--data", "--plot", "--gpu", "--cpu"):
        assert option in result.stdout
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) < MAX_LINES
    imports = [line for line in text.splitlines() if line.startswith(("import torchmpi", "from torchmpi"))]
    packages = ("torchmpi as mpi", "torchmpi.nn as mpinn", "torchmpi.parameterserver as ps")
    public = (*(f"import {package}" for package in packages), "from torchmpi.engine import")
    assert all(line.startswith(public) for line in imports) and " _" not in " ".join(imports)


@once
def test_engine_refuses_resume_without_a_checkpoint(launch):
    result = launch(1, [EXAMPLES / "mnist_engine.py", "--resume"])
    assert result.returncode == 2 and "--resume needs --checkpoint" in result.stderr
