"""To a reader of examples/single_file: the programs reach their accuracies, each complete in one short file."""

from __future__ import annotations

import re

import pytest
from helpers.launching import ROOT

pytestmark = pytest.mark.any_mpi

FOLDER = ROOT / "examples" / "single_file"


# All in one job: importing torch takes longer than most of them.
DRIVER = """
import runpy, sys
import torch.distributed as dist
import torchmpi as mpi

for path in sys.argv[1:]:
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
    assert not mpi.is_started() and not dist.is_initialized(), f"{path} leaves a job behind"
"""
LEAST = {
    "ddp": (r"test accuracy ([0-9.]+)", 0.93),
    "diloco": (r"test accuracy ([0-9.]+)", 0.9),
    "evaluation": (r"361 images, accuracy ([0-9.]+)", 0.88),
    "hvd": (r"test accuracy ([0-9.]+)", 0.93),
    "nn_loop": (r"test accuracy ([0-9.]+)", 0.93),
    "resnet_folder": (r"test accuracy ([0-9.]+)", 0.85),
    "sweep": (r", 0\.3: ([0-9.]+)", 0.93),
}
"""What rank 0 of each program prints, and the least value of it; the programs assert it too, on all ranks."""


def run(launch, tmp_path, names, n=2):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    return launch(n, [driver, *(FOLDER / f"{name}.py" for name in names)], env={"TORCHMPI_THREADS": "1"})


def test_accuracies(launch, tmp_path):
    pytest.importorskip("sklearn", reason="the digits of scikit-learn: install the extra examples")
    pytest.importorskip("PIL", reason="resnet_folder.py draws images with Pillow")
    result = run(launch, tmp_path, [*LEAST, "gpt", "ring_attention"])
    assert result.returncode == 0, result.output
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines() if re.match(r"\w+: ", line))
    for name, (pattern, least) in LEAST.items():
        found = re.search(pattern, lines[name])
        assert found and float(found[1]) >= least, (name, lines[name])
    assert float(re.search(r"validation loss ([0-9.]+)", lines["gpt"])[1]) < 2.9, lines["gpt"]
    assert "as in one process" in lines["ring_attention"]  # it has compared losses and gradients of each step
    # The averages of the same gradients: the three interfaces end with the same network but for the last bits.
    accuracies = [float(re.search(LEAST[name][0], lines[name])[1]) for name in ("ddp", "hvd", "nn_loop")]
    assert accuracies == pytest.approx(accuracies[:1] * 3, abs=1.01 / 360)


def test_three_kinds_of_ranks(launch, tmp_path):
    """A learner, an actor, and a rank that tests the policy while it is learned."""
    result = run(launch, tmp_path, ["actor_learner"], n=3)
    assert result.returncode == 0, result.output
    scores = re.findall(r"([0-9.]+) after (\d+)", re.search("evaluations: .*", result.stdout)[0])
    assert scores[-1][1] == "400" and float(scores[-1][0]) < 0.5 < float(scores[0][0]), scores


@pytest.mark.release  # importing Transformers takes most of it
def test_lora(launch, tmp_path):
    pytest.importorskip("transformers", reason="for lora.py: pip install 'transformers>=5.0'")
    result = run(launch, tmp_path, ["lora"])
    assert result.returncode == 0, result.output
    assert float(re.search(r"accuracy of the next token ([0-9.]+)", result.stdout)[1]) > 0.9, result.output
