"""``python -m torchmpi.horovod``: programs for Horovod, unchanged."""

from __future__ import annotations

import textwrap

PROGRAM = """
import argparse
import sys

import torch
import horovod
import horovod.torch as hvd
from horovod.common.util import num_rank_is_power_2, split_list
from horovod.torch.compression import Compressor
from horovod.torch.mpi_ops import allreduce_async, synchronize

import beside  # in the folder of the program

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for _ in range(steps):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
same = hvd.allgather(model.weight.detach())
total = synchronize(allreduce_async(torch.ones(1), op=hvd.Sum)).item()
assert issubclass(hvd.Compression.none, Compressor) and num_rank_is_power_2(4)
assert split_list([1, 2, 3], 2) == [[1, 2], [3]]
try:
    horovod.run(print)
except NotImplementedError as error:
    refusal = str(error)
if hvd.rank() == 0:
    print(bool((same == same[0]).all()), total, beside.NAME, __name__, sys.argv[1:], "mpirun" in refusal)
"""  # hvd.shutdown() is not called: most programs leave it to the end


def test_a_program_is_run_unchanged(launch, tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'found'\n")
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM))
    result = launch(2, ["-m", "torchmpi.horovod", program, "--steps", "3"])
    assert result.returncode == 0, result.output
    assert result.stdout.splitlines()[-1] == "True 2.0 found __main__ ['--steps', '3'] True", result.output


def test_horovod_is_known_only_there(alone):
    result = alone("-c", "import torchmpi.horovod\ntry:\n    import horovod\nexcept ImportError:\n    print('unknown')")
    assert result.stdout == "unknown\n", result.output
    usage = alone("-m", "torchmpi.horovod")
    assert usage.returncode == 2 and "mpirun -n 4 python -m torchmpi.horovod train.py" in usage.stderr, usage.output
