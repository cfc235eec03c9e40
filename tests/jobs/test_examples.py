"""To a reader of the MNIST examples: equal curves on any number of ranks, accuracy, plots, and errors for bad data."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from helpers.launching import ROOT, write_mnist

pytestmark = pytest.mark.any_mpi

EXAMPLES = ROOT / "examples" / "mnist"


PARAMETER_SERVER = {
    "mnist_parameterserver_dsgd": 0.95,
    # Asynchronous runs differ: they reach 0.96 to 0.975, and the limit has a sufficient margin.
    "mnist_parameterserver_downpour": 0.92,
    "mnist_parameterserver_easgd": 0.92,
    "mnist_parameterserver_easgd_dataparallel": 0.92,
    "mnist_parameterserver_diloco": 0.95,
}


pytest.importorskip("sklearn", reason="the examples train on the digits of scikit-learn: install the extra examples")
pytest.importorskip("matplotlib", reason="matplotlib draws the curves: install the extra examples")


@pytest.fixture(scope="module")
def records() -> dict[tuple[Any, ...], dict[str, Any]]:
    return {}


@pytest.fixture
def example(launch, tmp_path, records, digits):
    """``example("mnist_allreduce", 4, "--epochs", "2")`` gives the record of a job; it is run only once."""
    one_thread = {"TORCHMPI_THREADS": "1"}  # a second thread has no effect for these networks

    def run(name: str, n: int, *options: str) -> dict[str, Any]:
        key = (name, n, options)
        if key not in records:
            path = tmp_path / f"{name}.json"
            arguments = ["--cpu", "--data", digits, "--json", path, *options]
            result = launch(n, [EXAMPLES / f"{name}.py", *arguments], timeout=240, env=one_thread)
            assert result.returncode == 0, result.output
            records[key] = {**json.loads(path.read_text()), "output": result.stdout, "log": result.stderr}
        return records[key]

    return run


# A batch of 50 is no multiple of 4 or 3, and the last batch has 37 images. Both tests use the same jobs.
SYNCHRONOUS = ("--epochs", "6", "--batch-size", "50", "--assert-accuracy", "0.95")
SAME_CURVE = [
    ("mnist_allreduce", 1),
    ("mnist_allreduce", 2),
    ("mnist_allreduce", 4),
    ("mnist_allreduce_async", 3),
    ("mnist_modelparallel", 3),
]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "n"), SAME_CURVE)
def test_same_curve_on_any_number_of_ranks(example, name, n):
    reference, record = example("mnist_sequential", 1, *SYNCHRONOUS), example(name, n, *SYNCHRONOUS)
    assert len(record["loss"]) == 6
    assert record["loss"] == pytest.approx(reference["loss"], abs=1e-5, rel=0)
    assert record["error"] == pytest.approx(reference["error"], abs=1e-3)
    # Rounding may change the class of an image that is at the border of two: of one of 360.
    assert record["accuracy"] == pytest.approx(reference["accuracy"], abs=1.01 / 360)


@pytest.mark.parametrize(("name", "n"), [("mnist_sequential", 1), *SAME_CURVE, ("mnist_engine", 3)])
def test_accuracy(example, name, n):
    record = example(name, n, *SYNCHRONOUS)
    assert record["accuracy"] >= 0.95
    assert record["loss"][-1] < record["loss"][0] / 10
    lines = record["output"].splitlines()
    assert sum(line.startswith("epoch ") for line in lines) == 6  # rank 0 alone prints
    assert f"test accuracy {record['accuracy']:.4f}" in lines


def test_digits_of_scikit_learn(launch):
    """Without --data; the other jobs read the same images from files."""
    result = launch(2, [EXAMPLES / "mnist_allreduce.py", "--cpu"])
    assert result.returncode == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "data: scikit-learn digits, 1437 training and 360 test images of 8x8"
    assert sum(line.startswith("epoch ") for line in lines) == 10
    (line,) = (line for line in lines if line.startswith("test accuracy "))
    assert float(line.split()[-1]) >= 0.95


@pytest.mark.parametrize("name", PARAMETER_SERVER)
def test_accuracy_with_a_parameter_server(example, name):
    wanted, n = PARAMETER_SERVER[name], 4 if name.endswith("dataparallel") else 3  # groups of two; below, two ranks
    record = example(name, n, "--assert-accuracy", str(wanted))
    assert record["accuracy"] >= wanted
    assert record["loss"][-1] < record["loss"][0] / 4
    lines = record["output"].splitlines()
    assert sum(line.startswith("epoch ") for line in lines) == 10  # rank 0 alone prints
    assert f"test accuracy {record['accuracy']:.4f}" in lines


def test_synchronous_training_through_a_server_has_the_same_curve(example):
    """The gradients of the ranks are added in any order, so the last digits differ."""
    name = "mnist_parameterserver_dsgd"
    one = example(name, 1, "--epochs", "2")
    three = example(name, 3, "--assert-accuracy", str(PARAMETER_SERVER[name]))  # the job of the test above
    assert three["loss"][:2] == pytest.approx(one["loss"], abs=1e-4)
    assert three["error"][:2] == pytest.approx(one["error"], abs=2e-3)
    with_momentum = example(name, 3, *SYNCHRONOUS, "--momentum", "0.9")
    assert with_momentum["loss"] == pytest.approx(example("mnist_sequential", 1, *SYNCHRONOUS)["loss"], abs=1e-4)


def test_other_momentum_than_the_default(example):
    record = example("mnist_parameterserver_downpour", 2, "--momentum", "0.5", "--lr", "0.1", "--epochs", "6")
    assert record["accuracy"] >= 0.8


def test_bounded_staleness(example):
    """No rank begins a round while another rank is more than one round behind, which limits the staleness."""
    options = ("--max-staleness", "1", "--prefetch", "0", "--send-frequency", "1", "--tau", "5", "--epochs", "4")
    record = example("mnist_parameterserver_downpour", 3, *options)
    (line,) = (line for line in record["output"].splitlines() if line.startswith("staleness of rank 0's sends"))
    most = int(line.split(" on average, ")[1].split()[0])
    # Two other ranks. Between two fetches of this rank each may proceed from one round behind to three ahead of that:
    # less than five rounds of five sends.
    assert most < 2 * 5 * 5


def test_plot_and_too_low_an_accuracy(launch, tmp_path, digits):
    path, other = tmp_path / "curves.png", tmp_path / "other.json"
    other.write_text('{"loss": [2.0, 1.0], "error": [0.5, 0.4]}')
    options = ["--cpu", "--data", digits, "--epochs", "1", "--assert-accuracy", "0.999", "--plot", path]
    options += ["--beside", other]
    result = launch(2, [EXAMPLES / "mnist_allreduce.py", *options])
    assert result.returncode != 0
    assert result.stdout.count("failed: expected a test accuracy of at least 0.999") == 1
    assert "Traceback" not in result.stderr
    assert result.stdout.count(f"curves saved in {path}") == 1
    assert path.read_bytes().startswith(b"\x89PNG")


def test_sequential_needs_no_torchmpi(launch, digits):
    example = EXAMPLES / "mnist_sequential.py"
    code = f"""
import runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
sys.argv = ["example", "--cpu", "--data", {str(digits)!r}, "--epochs", "1"]
runpy.run_path({str(example)!r}, run_name="__main__")
print("dirty" if any(name.startswith(("torchmpi", "mpi4py")) for name in sys.modules) else "clean")
"""
    # An installed torchmpi would be imported by torch itself, to be found as a backend of torch.distributed.
    assert "clean" in launch(1, ["-c", code], env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).stdout


@pytest.mark.parametrize("asynchronous", [[], ["--asynchronous"]])
def test_engine_resumes_in_the_middle_of_an_epoch(launch, tmp_path, digits, asynchronous):
    """The last checkpoint, after update 25 of 36, continues to the same end."""
    options = ["--cpu", "--data", digits, "--epochs", "3", "--checkpoint", tmp_path / "a.ckpt", *asynchronous]
    records = []
    for step, more in (("whole", []), ("resumed", ["--resume"])):
        path = tmp_path / f"{step}.json"
        result = launch(2, [EXAMPLES / "mnist_engine.py", *options, "--json", path, *more])
        assert result.returncode == 0, result.output
        records.append(json.loads(path.read_text()))
        printed = [line for line in result.stdout.splitlines() if line.startswith("epoch ")]
        assert len(printed) == (1 if more else 3)
    assert records[0] == records[1]


def test_engine_shows_progress_on_rank_0(example):
    record = example("mnist_engine", 3, *SYNCHRONOUS)
    assert record["log"].count("epoch 6/6: 100%|") == 1


def test_mnist_files(launch, tmp_path):
    write_mnist(tmp_path, 1000)
    options = ["--cpu", "--data", tmp_path, "--epochs", "10", "--assert-accuracy", "0.9"]
    result = launch(2, [EXAMPLES / "mnist_allreduce.py", *options])
    assert result.returncode == 0, result.output
    assert "800 training and 200 test images (only the t10k files are there" in result.stdout


def test_truncated_file_ends_the_job(launch, tmp_path):
    write_mnist(tmp_path, 100)
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-40])
    result = launch(2, [EXAMPLES / "mnist_engine.py", "--cpu", "--data", tmp_path])
    assert result.returncode != 0
    assert f"{labels}: expected 100 bytes of data for shape (100,), found 60" in result.stderr


PROGRAMS = [
    path for folder in ("mnist", "llm", "async_sgd", "single_file") for path in (EXAMPLES.parent / folder).glob("*.py")
]


@pytest.mark.parametrize("path", sorted(PROGRAMS), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_programs_import_public_names_only(path):
    imports = [line for line in path.read_text().splitlines() if line.startswith(("import torchmpi", "from torchmpi"))]
    packages = ("torchmpi as mpi", "torchmpi.nn as mpinn", "torchmpi.parameterserver as ps", "torchmpi.horovod as hvd")
    public = (
        *(f"import {package}" for package in packages),
        "from torchmpi.engine import",
        "from torchmpi import plots",
    )
    assert all(line.startswith(public) for line in imports) and " _" not in " ".join(imports)


def test_the_table_says_what_programs_need():
    """Regression: that one program of llm needs Transformers was not said."""
    needs = dict(
        re.findall(r"^\| \[`(\w+)`\].*\|([^|]*)\|$", (EXAMPLES.parent / "README.md").read_text(), re.MULTILINE)
    )
    needed = {*sys.stdlib_module_names, "numpy", "torch", "torchmpi", "mnist_data"}
    for path in (*PROGRAMS, *EXAMPLES.parent.glob("torch_distributed/*.py")):
        found = re.findall(r"^ *(?:from|import) (\w+)[\w.]*(?: import .*| as \w+|)$", path.read_text(), re.MULTILINE)
        for name in {*found} - needed - {each.stem for each in path.parent.glob("*.py")}:
            is_extra = name in ("matplotlib", "PIL", "sklearn")
            words = ["extra `examples`"] if is_extra else [f"`{path.name}`", f"`{name}>="]
            assert all(word in needs[path.parent.name] for word in words), f"{path} imports {name}"


def test_engine_refuses_resume_without_a_checkpoint(launch):
    result = launch(1, [EXAMPLES / "mnist_engine.py", "--resume"])
    assert result.returncode == 2 and "--resume needs --checkpoint" in result.stderr
