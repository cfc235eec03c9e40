"""Frameworks with their own launcher and backend selection, if installed, under mpirun on torchmpi.

Also: workers at the end of a job, and torch.compile to machine code.
"""

from __future__ import annotations

import importlib.util
import shutil
import textwrap

import pytest

COMMON = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH = 64, 16
x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0)).double()
data = TensorDataset(x, x.sum(1, keepdim=True))

def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()

def train(model, optimizer, batches, backward):
    for x, y in batches:
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

def compare(model):
    alone = net()
    train(alone, sgd(alone), DataLoader(data, batch_size=BATCH), lambda loss: loss.backward())
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    print(f"rank {dist.get_rank()} on {dist.get_backend()}: like one process", flush=True)
"""

ACCELERATE = """
from accelerate import Accelerator

dist.init_process_group("torchmpi")
accelerator = Accelerator(cpu=True)

model, batches = net(), DataLoader(data, batch_size=BATCH // accelerator.num_processes)
model, optimizer, batches = accelerator.prepare(model, sgd(model), batches)
train(model, optimizer, batches, accelerator.backward)
compare(accelerator.unwrap_model(model))
ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
assert ranks.tolist() == list(range(dist.get_world_size())), ranks
accelerator.wait_for_everyone()
accelerator.end_training()
"""

FABRIC = """
from lightning.fabric import Fabric

dist.init_process_group("torchmpi")
fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")

fabric.launch()
model = net()
model, optimizer = fabric.setup(model, sgd(model))
batches = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH // fabric.world_size))
train(model, optimizer, batches, fabric.backward)
compare(model.module)
ranks = fabric.all_reduce(torch.tensor([float(fabric.global_rank)]), reduce_op="sum")
assert ranks.item() == sum(range(fabric.world_size)), ranks
fabric.barrier()
"""

WORKERS = """
dist.init_process_group("torchmpi")
batches = DataLoader(data, batch_size=BATCH, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
total = sum(x.sum() for x, _ in batches)
dist.all_reduce(total)
torch.testing.assert_close(total, x.sum() * dist.get_world_size())
print(f"rank {dist.get_rank()} on {dist.get_backend()}: like one process", flush=True)
dist.destroy_process_group()  # the workers are still there, and wait for the next epoch
"""

COMPILED = """
import torch._inductor.config
import torch.distributed._functional_collectives as funcol

torch._inductor.config.cpp_cache_precompile_headers = False  # they take longer than this one function
dist.init_process_group("torchmpi")

def step(x):
    total = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
    return (total + 1) * x

x = torch.arange(6.0) + dist.get_rank()
compiled = torch.compile(step, fullgraph=True)
assert torch.equal(compiled(x), step(x))
print(f"rank {dist.get_rank()} on {dist.get_backend()}: like one process", flush=True)
dist.destroy_process_group()
"""


def check(job, script: str, num_ranks: int = 2, **options: object) -> None:
    result = job(num_ranks, textwrap.dedent(COMMON + script), timeout=180, **options)
    assert result.returncode == 0, result.output
    for rank in range(num_ranks):
        assert f"rank {rank} on torchmpi: like one process" in result.stdout, result.output


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed here: pip install {package}")


@needs("accelerate")
def test_accelerate(job):
    check(job, ACCELERATE)


@needs("lightning")
def test_fabric(job):
    check(job, FABRIC)


def test_remaining_workers_do_not_keep_the_job(job):
    check(job, WORKERS)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: no g++")
def test_compiled_to_machine_code(job, tmp_path):
    """tests/mpi checks only the graphs, since compilation takes ten seconds of a core for each rank."""
    check(job, COMPILED, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"})
