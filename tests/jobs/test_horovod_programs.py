"""To a user of Horovod: its programs run unchanged under ``python -m torchmpi.horovod``."""

from __future__ import annotations

import textwrap

import pytest

any_mpi = pytest.mark.any_mpi
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


@any_mpi
def test_a_program_is_run_unchanged(launch, tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'found'\n")
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM))
    result = launch(2, ["-m", "torchmpi.horovod", program, "--steps", "3"])
    assert result.returncode == 0, result.output
    assert result.stdout.splitlines()[-1] == "True 2.0 found __main__ ['--steps', '3'] True", result.output


@any_mpi
def test_horovod_is_known_only_there(alone):
    result = alone("-c", "import torchmpi.horovod\ntry:\n    import horovod\nexcept ImportError:\n    print('unknown')")
    assert result.stdout == "unknown\n", result.output
    usage = alone("-m", "torchmpi.horovod")
    assert usage.returncode == 2 and "mpirun -n 4 python -m torchmpi.horovod train.py" in usage.stderr, usage.output


@any_mpi
def test_ranks_that_end_after_different_numbers_of_calls(job):
    """Regression: the exit handler caught the mismatch, and a second stop() waited for a rank that had ended."""
    code = """
    import torch
    import torchmpi.horovod as hvd

    hvd.init()
    for call in [hvd.allreduce] if hvd.rank() == 0 else [hvd.allgather] * 2:
        try:
            call(torch.ones(1))
        except hvd.HorovodInternalError:
            pass
    """
    result = job(2, code, env={"TORCHMPI_STALL_ABORT_SECONDS": "20"})
    assert result.returncode == 1 and "without mpi.stop()" in result.output, result.output
    assert "stall_abort_seconds" not in result.output, result.output


@any_mpi
def test_process_sets_and_ranks_that_are_given_at_the_start(job):
    code = """
    import torch
    import torchmpi.horovod as hvd

    try:
        hvd.rank()
    except ValueError as error:
        assert "hvd.init()" in str(error)
    try:
        hvd.allreduce(torch.ones(1))
    except ValueError as error:
        assert "hvd.init()" in str(error)
    pair, last = hvd.ProcessSet([1, 0]), hvd.ProcessSet(range(2, 3))
    try:
        hvd.init(process_sets=[pair, last, hvd.ProcessSet([0, 1])])
    except ValueError as error:
        assert "exists twice" in str(error) and not hvd.is_initialized()
    hvd.init(process_sets=[pair, last])
    own = pair if hvd.rank() < 2 else last
    sets = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=own).item(), pair.process_set_id, last.process_set_id
    try:
        hvd.add_process_set([0, 2])
    except ValueError as error:
        assert "dynamic" in str(error)
    hvd.shutdown()
    assert not hvd.is_initialized() and pair.process_set_id is None

    import torchmpi as mpi

    mpi.start()
    ranks = [0, 1] if mpi.rank() < 2 else [2]
    hvd.init(comm=ranks)
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    print(*sets, hvd.rank(), hvd.size(), total, hvd.broadcast_object(mpi.rank(0), hvd.size() - 1), flush=True)
    hvd.shutdown()
    mpi.stop()
    """
    result = job(3, code)
    assert result.returncode == 0, result.output
    lines = sorted(line for line in result.stdout.splitlines() if line[:1].isdigit())
    assert lines == ["1.0 1 2 0 1 1.0 2", "2.0 1 2 0 2 2.0 1", "2.0 1 2 1 2 2.0 1"], result.output


def test_communicators_of_mpi4py(job):
    """The program splits them itself; each rank passes the one that it is in."""
    code = """
    import torch
    import torchmpi.horovod as hvd
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    halves = world.Split(world.rank % 2, -world.rank)
    mine, last = hvd.ProcessSet(halves), hvd.ProcessSet([2])
    try:
        hvd.init(comm=world, process_sets=[mine, hvd.ProcessSet(world.Dup())])
    except ValueError as error:
        assert "[0, 1, 2] exists twice" in str(error), error
    hvd.init(comm=world, process_sets=[mine, last])
    assert hvd.global_process_set.mpi_comm is world and (mine.process_set_id, last.process_set_id) == (1, 2)
    total = hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum, process_set=mine).item()
    hvd.barrier(mine)
    print("set", hvd.rank(), hvd.size(), mine.ranks, total, flush=True)
    hvd.shutdown()

    import torchmpi as mpi

    mpi.start()
    hvd.init(comm=halves, process_sets=[hvd.ProcessSet(MPI.COMM_SELF)] if halves.size > 1 else [])
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    print("all", world.rank, hvd.rank(), hvd.size(), total, hvd.broadcast_object(world.rank, 0), flush=True)
    hvd.shutdown()
    try:
        hvd.init(comm=halves, process_sets=[hvd.ProcessSet(world)])
    except ValueError as error:
        assert "does not have" in str(error), error
    mpi.stop()
    """
    result = job(3, code)
    assert result.returncode == 0, result.output
    lines = sorted(line for line in result.stdout.splitlines() if line[:3] in ("set", "all"))
    assert lines == [
        "all 0 0 2 2.0 0", "all 1 0 1 1.0 1", "all 2 1 2 2.0 0",
        "set 0 3 [0, 2] 2.0", "set 1 3 [1] 1.0", "set 2 3 [0, 2] 2.0",
    ], result.output  # fmt: skip
