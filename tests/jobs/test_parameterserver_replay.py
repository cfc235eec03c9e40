"""To an author of asynchronous algorithms: a run is repeated bit for bit from its record, also in simulation."""

from __future__ import annotations

import pytest

PROGRAM = '''
import os, subprocess, sys, time
from mpi4py import MPI
os.environ["TORCHMPI_HOST_NAME"] = "ab"[MPI.COMM_WORLD.rank // 2]
import torch
import torchmpi as mpi
import torchmpi.parameterserver as ps


class HalfWay(ps.Update):
    """Moves network and center to their middle."""

    def integrate(self, center):
        for own, theirs in zip(self.parameters, center):
            own.lerp_(theirs, 0.5)

    def send(self, integrated):
        if integrated:
            self.push([each.detach() for each in self.parameters], ps.axpby(0.5, 0.5))


def train(sleeps=0.0):
    torch.manual_seed(mpi.rank())
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with HalfWay(model, update_frequency=2, init_delay=0, max_staleness=3) as update:
        for step in range(24):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            time.sleep(sleeps)
            update.update()
            optimizer.step()
    mpi.barrier()
    update.pull()
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


path = sys.argv[0] + ".npz"
mpi.start()
rank, size = mpi.rank(), mpi.size()
with ps.record(path, ordered=True):
    first = train(0.002 * rank)
for sleeps, load in ((0.0, 0), (0.002 * (size - 1 - rank), 0), (0.001, 2)):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load if rank == 0 else 0)]
    with ps.replay(path):
        again = train(sleeps)
    for process in busy:
        process.kill()
    assert again == first, (first, again)
mpi.stop()
if rank == 0:
    repeated = ps.simulate(train, size, replay=path)
    assert repeated.results == [first] * size, (first, repeated.results)
    many = ps.simulate(train, 8, compute=lambda worker, step, random: random.lognormal(-3, 0.5))
    assert max(abs(weight - 1) for weight in many.results[0][:4]) < 0.2, many.results[0]
    print("simulated and repeated", repeated.record.staleness().sum(), many.record.num_ranks)
'''


@pytest.mark.any_mpi
def test_an_own_algorithm_runs_on_ranks_repeated_and_simulated(job):
    result = job(4, PROGRAM)
    assert result.returncode == 0, result.output
    assert "simulated and repeated" in result.stdout, result.output
