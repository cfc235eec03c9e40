"""To a reader of the GPT examples: they reach their loss, and a killed run continues with the same bits."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.launching import ROOT
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.any_mpi

EXAMPLES = ROOT / "examples" / "llm"
NAMES = ("nn_gpt", "engine_gpt", "ddp_gpt")
ONE_THREAD = {"TORCHMPI_THREADS": "1"}
STEPS = ("--cpu", "--bf16", "--steps=12", "--save-every=4", "--accumulate=3", "--context=16", "--assert-loss=6")
KILLED = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
num_steps = 0

def count(*_):
    global num_steps
    num_steps += 1
    if rank == "1" and num_steps == 10:
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(count)
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def bigram_loss(monkeypatch):
    """The loss of the frequencies of pairs of bytes in the training text, on the validation text."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from gpt_data import load_text

    text = load_text(None).long()
    num_train = len(text) * 9 // 10
    pairs = 256 * text[:-1] + text[1:]
    counts = torch.bincount(pairs[: num_train - 1], minlength=256 * 256).view(256, 256).double() + 0.1
    return -(counts / counts.sum(1, keepdim=True)).log().view(-1)[pairs[num_train:]].mean().item()


def parameters(folder):
    """The parameters in the checkpoint, by name."""
    file, key = folder / "gpt.pt", "model"
    if not file.exists():  # of the engine: a folder for torch.distributed.checkpoint
        file, key = folder.with_suffix(".pt"), "network"
        dcp_to_torch_save(folder, file)
    return torch.load(file, weights_only=True)[key]


@pytest.mark.release
def test_loss(launch, bigram_loss):
    """A loss that needs more context than one byte."""
    result = launch(2, [EXAMPLES / "nn_gpt.py", "--cpu"], env=ONE_THREAD)
    assert result.returncode == 0, result.output
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", result.stdout)]
    assert len(losses) == 11 and losses[-1] < bigram_loss - 0.05, result.output


def test_all_programs_print_the_same_losses(launch):
    short = ("--cpu", "--steps=20", "--assert-loss=6")
    results = {name: launch(2, [EXAMPLES / f"{name}.py", *short], env=ONE_THREAD) for name in NAMES}
    assert not any(result.returncode for result in results.values()), results
    outputs = {result.stdout for result in results.values()}
    assert len(outputs) == 1 and outputs.pop().count("loss ") == 3, results


@pytest.mark.parametrize(
    "name", [name if name == "engine_gpt" else pytest.param(name, marks=pytest.mark.release) for name in NAMES]
)
def test_a_killed_run_continues_to_the_same_bits(launch, tmp_path, name):
    """Rank 1 is killed in the tenth update, after the checkpoint of update 8."""
    program, whole, parted = EXAMPLES / f"{name}.py", tmp_path / "whole", tmp_path / "parted"
    undisturbed = launch(2, [program, *STEPS, "--checkpoint", whole], env=ONE_THREAD)
    assert undisturbed.returncode == 0, undisturbed.output

    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [*STEPS, "--checkpoint", parted]
    killed = launch(2, [script, program, *command], env=ONE_THREAD)
    assert killed.returncode != 0 and "validation loss" not in killed.stdout, killed.output
    expected = parameters(whole)
    assert any(not torch.equal(value, expected[name]) for name, value in parameters(parted).items())

    continued = launch(2, [program, *command], env=ONE_THREAD)
    assert continued.returncode == 0, continued.output
    assert "step  10/12" in continued.stdout
    for name, value in parameters(parted).items():
        assert torch.equal(value, expected[name]), name
    assert continued.stdout.splitlines()[-1] == undisturbed.stdout.splitlines()[-1]  # the validation loss


def test_tensor_parallel_generation(launch):
    """The program compares its tokens and logits with those of the undivided model, also with uneven shares."""
    small = ["--width", "384", "--depth", "2", "--tokens", "6", "--rounds", "1"]
    result = launch(2, [EXAMPLES / "tp_generate.py", *small], env=ONE_THREAD)
    assert result.returncode == 0, result.output
    assert "2 ranks: the tokens and logits of one process" in result.stdout, result.output


def test_more_ranks_than_heads_are_told_how_many_work(launch):
    """Once, before the first step."""
    result = launch(3, [EXAMPLES / "tp_generate.py", "--width", "256", "--depth", "1"], env=ONE_THREAD)
    assert result.returncode != 0, result.output
    assert result.output.count("3 ranks cannot divide 'blocks.0.attention.q', which has 2 parts") == 1, result.output
    assert "Divide the model over 1 to 2 ranks" in result.output, result.output
    assert "tokens per second" not in result.output, result.output


def test_data_parallel_sharded_and_tensor_parallel_training_are_the_same(launch):
    """The same losses but for roundings, and the same text."""
    outputs = []
    for num_ranks, parallel in ((2, "ddp"), (2, "fsdp"), (4, "tp")):
        # The same seed gives other weights where the CPU has AVX-512.
        options = [f"--parallel={parallel}", "--steps=10", "--batch-size=8", "--tokens=2", "--assert-loss=6"]
        result = launch(num_ranks, [EXAMPLES / "parallel_gpt.py", *options], env=ONE_THREAD)
        assert result.returncode == 0, result.output
        assert "Warning" not in result.stderr, result.output
        outputs.append(result.stdout)
    losses = [[float(loss) for loss in re.findall(r"loss (\S+)", output)] for output in outputs]
    assert len(losses[0]) == 2 and losses[1:] == [pytest.approx(losses[0], abs=1e-3)] * 2, outputs
    assert len({re.search("text: (.*)", output)[1] for output in outputs}) == 1, outputs


def test_own_text_and_too_high_a_loss(launch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a rank sends, a rank receives. " * 400)
    options = ["--cpu", "--data", text, "--steps", "10", "--context", "16", "--assert-loss", "0.1"]
    result = launch(2, [EXAMPLES / "nn_gpt.py", *options], env=ONE_THREAD)
    assert result.returncode != 0
    assert result.stdout.count("failed: expected a validation loss of at most 0.1") == 1
    assert "Traceback" not in result.stderr


def test_experts_on_two_ranks_have_the_losses_of_one_process(launch):
    """Also the choices without a place are the same."""
    program = [EXAMPLES / "moe_gpt.py", "--cpu", "--steps=10", "--accumulate=2", "--context=16", "--assert-loss=6"]
    results = [launch(n, program, env=ONE_THREAD) for n in (1, 2)]
    assert not any(result.returncode for result in results), results
    (_, *alone), (first, *divided) = (result.stdout.splitlines() for result in results)
    assert first == "2 ranks on cpu, 4 experts on each"
    assert divided == alone and len(alone) == 3 and " 0 choices" not in alone[1], results
