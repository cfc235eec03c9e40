"""To whoever loses a rank: the others continue in the same processes, also with a spare or new rank in its place."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import failures
from helpers.launching import ROOT, Result, is_open_mpi, job_environment, launcher

pytestmark = pytest.mark.any_mpi
TRAINING = (ROOT / "tests" / "jobs" / "recovery_program.py").read_text()

START = """
import os, signal, sys, threading, time
import torch
from torch import nn
import torchmpi as mpi
from torchmpi.engine import AllReduceSGDEngine

FIRST = int(os.environ["RANK"])  # the rank in the beginning

def die():
    os.kill(os.getpid(), signal.SIGKILL)

mpi.start(config=mpi.Config(on_lost_rank="raise", verbose=False))
"""


WAYS = {
    "without MPI": ["--without-mpi", "--on-lost-rank", "continue"],
    "Open MPI": ["--on-lost-rank", "continue", "--option=--bind-to none"],
}
"""The ways to start ranks that survive the loss of one, with the options of `torchmpi run`."""


def launched(python: list[str], own: list[str], script: Path, arguments: tuple[object, ...]) -> Result:
    """Run a script by `torchmpi run` with the options of `own`, from a warm Python."""
    failures.jobs.append(["python", *own, "python", str(script), *map(str, arguments)])
    done = subprocess.run(
        [*python, *own, *python, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=job_environment({}),
        stdin=subprocess.DEVNULL,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(params=WAYS)
def survive(request, tmp_path, warm_python):
    """``survive(n, "code", *arguments) -> Result``, on ranks that `torchmpi run` starts in each way."""
    if request.param == "Open MPI" and not is_open_mpi(launcher()):
        pytest.skip("only Open MPI has this")

    def run(n: int, code: str, *arguments: object, start: str = START, options: Sequence[str] = ()) -> Result:
        script = tmp_path / "job.py"
        script.write_text(start + textwrap.dedent(code))
        own = ["-m", "torchmpi", "run", "-n", str(n), *WAYS[request.param], *options, "--timeout", "300"]
        return launched(warm_python, own, script, arguments)

    return run


CALLS = """
from torchmpi.session import runtime
moment, victims = sys.argv[1], [int(text) for text in sys.argv[2].split(",")]
small, large = torch.ones(10), torch.ones(1 << 20)
call, num_lost, lost_seconds = 0, 0, []
while call < 20:
    try:
        if call in (5, 12) and num_lost == (call > 5):
            if moment == "queued":
                mpi.allreduce_async(large.clone())
            if FIRST == victims[num_lost] and moment != "collective":
                die()
            if FIRST == victims[num_lost]:
                threading.Timer(0.005, die).start()
            while moment == "collective":
                mpi.allreduce(large.clone())
            if moment == "recv":
                peers = [rank for rank in range(mpi.size()) if rank != mpi.rank()]
                pending = [mpi.recv_async(torch.empty(5), peer) for peer in peers]
                pending[0].wait()
        pending = mpi.allreduce_async(small.clone())
        for tensor in (small, large):
            summed = mpi.allreduce(tensor.clone())
            assert (summed == mpi.size()).all(), summed
        assert (pending.wait() == mpi.size()).all()
        assert mpi.allgather_object(mpi.rank()) == list(range(mpi.size()))
        with mpi.group(range(mpi.size())) as everyone:
            last = mpi.size() - 1
            assert (mpi.broadcast(torch.full((3,), float(mpi.rank())), last, comm=everyone) == last).all()
        call += 1
    except mpi.RankLostError as error:
        assert "is gone" in str(error), error
        comm, end = runtime.current().world.comm, time.monotonic() + 60
        while hasattr(comm, "Is_revoked") and not comm.Is_revoked():
            assert time.monotonic() < end, "a call of MPI between hosts would never end"
            time.sleep(0.01)
        former = mpi.recover()
        call = mpi.allreduce(call, op="max")
        num_lost += 1
        now = f"now {mpi.rank()} of {mpi.size()}, local {mpi.local_size()}"
        print(f"first rank {FIRST}: former {former}, {now}", flush=True)
mpi.stop()
print(f"first rank {FIRST} ended, lost {num_lost}", flush=True)
"""


@pytest.mark.parametrize(
    ("survive", "moment", "victims"),
    [
        ("without MPI", "between", "0,2"),
        ("without MPI", "queued", "2,1"),
        ("without MPI", "recv", "0,1"),
        ("Open MPI", "collective", "1,0"),
        ("Open MPI", "recv", "0,1"),
    ],
    indirect=["survive"],
)
def test_the_others_continue_after_one_kill_and_after_a_second(survive, moment, victims):
    result = survive(3, CALLS, moment, victims)
    one, two = (int(text) for text in victims.split(","))
    last = ({0, 1, 2} - {one, two}).pop()
    after_one = tuple(rank for rank in range(3) if rank != one)
    for index, rank in enumerate(after_one):
        text = f"first rank {rank}: former {after_one}, now {index} of 2, local 2\n"
        assert result.stdout.count(text) == 1, result.output
    alone = (after_one.index(last),)
    assert f"first rank {last}: former {alone}, now 0 of 1, local 1\n" in result.stdout, result.output
    assert re.findall(r"first rank (\d) ended, lost (\d)", result.stdout) == [(str(last), "2")], result.output
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.output


@pytest.mark.parametrize("survive", ["without MPI"], indirect=True)
def test_recover_waits_for_a_loss_of_which_the_program_has_not_been_told(survive):
    """Regression: after an error of a communicator of MPI it saw no lost rank."""
    code = """
        from torchmpi.session import runtime
        running = runtime.current()
        note, running.MPI.survivors.on_loss = (
            running.MPI.survivors.on_loss, lambda reason: threading.Timer(0.3, note, (reason,)).start()
        )
        if FIRST == 1:
            die()
        try:
            running.world.comm.Barrier()
        except running.MPI.Exception:
            mpi.recover()
        print(f"rank {mpi.rank()} of {mpi.size()}", flush=True)
        mpi.stop()
    """
    result = survive(3, code)
    assert result.returncode == 0, result.output
    assert sorted(result.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"], result.output


def test_a_second_rank_is_lost_while_the_others_recover_from_the_first_loss(survive):
    code = """
        from torchmpi.session import runtime
        mpi.barrier()
        if FIRST == 1:
            die()
        if FIRST == 2:
            runtime.start = lambda **_: die()  # when the others have agreed that it is left
        try:
            while True:
                mpi.allreduce(torch.ones(3))
        except mpi.RankLostError:
            former = mpi.recover()
        print(f"{former} {mpi.rank()} {mpi.size()} {mpi.allgather_object(FIRST)}", flush=True)
        mpi.stop()
    """
    result = survive(4, code)
    assert result.returncode == 0, result.output
    assert sorted(result.stdout.splitlines()) == [f"(0, 3) {rank} 2 [0, 3]" for rank in range(2)], result.output
    assert result.stderr.count("continuing on 2 of 4 ranks") == 1 and "lost are ranks 1, 2" in result.stderr


def test_a_second_rank_is_lost_while_an_engine_returns_to_a_copy(survive):
    code = """
        from torchmpi.engine.memory_copies import MemoryCopies
        if FIRST == 2:
            MemoryCopies.last_common = lambda *_, **__: die()
        torch.manual_seed(7)
        rows, network = torch.randn(24, 2, 4), nn.Linear(4, 1)
        engine = AllReduceSGDEngine(progress=False)
        engine.recover(every=2)

        @engine.on("on_update")
        def fail(state):
            if (FIRST, state.t, mpi.size()) == (1, 3, 4):
                die()

        state = engine.train(
            network=network, criterion=nn.MSELoss(), lr=0.1,
            iterator=lambda: [(x, x[:, :1]) for x in rows[mpi.rank() :: mpi.size()]],
        )
        weights = mpi.allgather_object(network.weight.tolist())
        print(f"{mpi.size()} ranks, {state.t} updates, {weights[0] == weights[1]}", flush=True)
        mpi.stop()
    """
    result = survive(4, code)
    assert result.returncode == 0, result.output
    # Two updates of four ranks, then the other 16 batches by two.
    assert result.stdout.splitlines() == 2 * ["2 ranks, 10 updates, True"], result.output


@pytest.fixture(scope="module")
def undisturbed():
    """The output of a run from the checkpoint, by `asynchronous`: neither the moment of a kill nor the way matters."""
    return {}


@pytest.mark.parametrize(
    ("survive", "moment", "asynchronous", "lost"),
    [
        ("without MPI", "forward", 0, 1),
        ("Open MPI", "updated", 0, 0),
        ("without MPI", "backward", 1, 1),
        ("Open MPI", "synchronized", 1, 0),
    ],
    indirect=["survive"],
)
def test_an_engine_continues_with_the_bits_of_a_run_from_that_step(
    survive, tmp_path, undisturbed, moment, asynchronous, lost
):
    result = survive(3, TRAINING, tmp_path, moment, asynchronous, lost, "kill", start="")
    assert result.returncode == 0, result.output
    assert "continuing on 2 of 3 ranks" in result.stderr, result.output
    if asynchronous not in undisturbed:
        undisturbed[asynchronous] = survive(2, TRAINING, tmp_path, moment, asynchronous, 1, "reference", start="")
    reference = undisturbed[asynchronous]
    assert reference.returncode == 0, reference.output
    ours, theirs = (sorted(re.findall(r"result (.*)", each.stdout)) for each in (result, reference))
    assert len(ours) == 2 and ours == theirs, f"{result.output}\n{reference.output}"


KILL = """
import os, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = []

def hook(*_):
    steps.append(os.environ["RANK"])
    if len(steps) == 12 and steps[0] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(hook)
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), {"__name__": "__main__"})
print(f"steps {len(steps)}", flush=True)
"""


@pytest.mark.parametrize(("number", "fewest"), [(0, 24), (1, 60), (2, 60)], ids=["engine", "elastic", "ddp"])
def test_the_programs_of_the_page_survive_a_kill(survive, request, tmp_path, number, fewest):
    if number == 2 and "Open MPI" in request.node.name:
        pytest.skip("process groups are made by the same code as without MPI; scripts/losses.py runs them")
    page = (ROOT / "docs" / "recovery.md").read_text().partition("## Continuing without a lost rank")[2]
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) == 3
    (tmp_path / "program.py").write_text(programs[number])
    result = survive(3, KILL, tmp_path / "program.py", start="")
    assert result.returncode == 0 and "continuing on 2 of 3 ranks" in result.stderr, result.output
    steps = [int(text) for text in re.findall(r"steps (\d+)", result.stdout)]
    assert len(steps) == 2 and min(steps) >= fewest, result.output
    if number:  # the kill comes after step 12, and the last commit was after step 10
        assert max(steps) <= fewest + 2 and "continuing from the last commit" in result.stderr, result.output


def test_the_program_of_the_page_of_servers_survives_a_kill(survive, request, tmp_path):
    if "Open MPI" in request.node.name:
        pytest.skip("the test of the sends runs both")
    page = (ROOT / "docs" / "parameterserver.md").read_text().partition("## After the loss of a rank")[2]
    (tmp_path / "program.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    code = """
        import torchmpi.parameterserver as ps
        send, num_sends = ps.send, 0

        def counted(*arguments):
            global num_sends
            num_sends += 1
            if num_sends == 150 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            return send(*arguments)

        ps.send = counted
        exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), {"__name__": "__main__"})
        print(f"sends {num_sends}", flush=True)
    """
    result = survive(3, code, tmp_path / "program.py", start="import os, signal, sys\n")
    assert result.returncode == 0 and "continuing on 2 of 3 ranks" in result.stderr, result.output
    assert min(int(text) for text in re.findall(r"sends (\d+)", result.stdout)) >= 1000, result.output


def test_without_recover_the_error_ends_the_job(survive):
    result = survive(3, "mpi.barrier()\nif FIRST == 2: die()\nwhile True: mpi.allreduce(torch.ones(3))")
    assert result.returncode == 1, result.output
    assert re.search(r"RankLostError: rank 2.* is gone", result.stderr), result.output


@pytest.mark.parametrize("survive", ["Open MPI"], indirect=True)
@pytest.mark.parametrize(("code", "status"), [
    ("if FIRST == 1: os._exit(5)\nmpi.barrier()", 5),
    ("mpi.stop()\nif FIRST == 1: raise MemoryError()", 1),
])  # fmt: skip
def test_a_rank_that_fails_ends_three_others(survive, code, status):
    """Regression: mpirun lets more than two others live after MPI_Abort: they waited, also for the end of all."""
    result = survive(4, code)
    assert result.returncode == status, result.output


def test_a_rank_that_hangs_is_named_and_the_job_ends(survive):
    code = """
        mpi.barrier()
        if FIRST == 1:
            die()
        try:
            while True:
                mpi.allreduce(torch.ones(3))
        except mpi.RankLostError:
            if FIRST == 2:
                time.sleep(3600)
            mpi.recover(timeout=2)
    """
    result = survive(3, code)
    assert result.returncode == 1, result.output
    assert "rank 2 still runs, but has not called recover() within 2 s" in result.stderr, result.output


def test_what_cannot_continue_is_refused(survive):
    code = """
        import torchmpi.nn as mpinn
        import torchmpi.parameterserver as ps
        attempts = [
            lambda: mpi.allreduce(torch.ones(3), backend="mpi"),
            lambda: mpi.recover(),
            lambda: ps.init(torch.ones(3), comm=1),
            lambda: ps.Clock(2),
            lambda: ps.record(sys.argv[0] + ".npz").__enter__(),
            lambda: ps.ADPSGDUpdate(network).start(),
            lambda: engine.train(network=network, criterion=nn.MSELoss(), iterator=[], lr=0.1),
            lambda: engine.train(
                network=network, criterion=nn.MSELoss(), iterator=lambda: [], optimizer=mpinn.DistributedOptimizer(
                    torch.optim.SGD(network.parameters(), lr=0.1), network
                )
            ),
        ]
        network, engine = nn.Linear(2, 2), AllReduceSGDEngine(progress=False)
        engine.recover()
        for attempt in attempts:
            try:
                attempt()
            except mpi.errors.ArgumentError as error:
                print(error, flush=True)
        mpi.stop()
    """
    result = survive(2, code)
    for text in (
        "recover() without a lost rank",
        "parameter servers are those of all ranks, which are known after a loss: leave out comm=. Or leave that",
        "as all would wait for a lost rank",
        "a run is not recorded",
        "there is no gossip",
        "needs functions for iterator=",
        "closed communicators",
    ):
        assert text in result.stdout, result.output
    assert re.search(r"have returned wrong data|no MPI launcher", result.stdout), result.output  # the backend mpi
    assert result.returncode == 0, result.output


SERVERS = """
import random
import numpy as np
import torchmpi.parameterserver as ps
mpi.stop()
host = f"host{FIRST % 2}" if "hosts" in sys.argv else ""
mpi.start(config=mpi.Config(on_lost_rank="raise", server_copies=True, verbose=False, host_name=host))
account = np.memmap(sys.argv[1], np.int64, "r+", shape=(5, 2, 2))  # first rank, server: sends begun and acknowledged
lost = [{int(each) for each in text.split("+")} for text in sys.argv[2].split(",")]

class Account:
    '''A server of which each send adds 1 to all elements.'''

    def __init__(self, number, numel):
        self.counts, self.ones = account[FIRST, number], torch.ones(numel)
        self.server = ps.init(torch.zeros(numel), name=f"account {number}")
        self.number = number

    def send(self):
        self.counts[0] += 1
        try:
            ps.send(self.server, self.ones).wait()
        except mpi.RankLostError:
            self.counts[0] -= self.server.is_local  # then nothing has been applied
            raise
        self.counts[1] += 1

    def check(self):
        values = ps.receive(self.server).wait()
        begun, acknowledged = (int(account[:, self.number, which].sum()) for which in (0, 1))
        step = self.server.shards.chunk_numel
        for begin, numel in self.server.parts:
            for chunk in values[begin : begin + numel].split(step):
                assert acknowledged <= chunk[0] <= begun and (chunk == chunk[0]).all(), (acknowledged, begun, chunk)
        return values

accounts = [Account(0, 3 * 16384 + 5), Account(1, 400_000)]  # by machine code, and by the queue
mpi.barrier()
num_losses = 0

def die_soon():
    threading.Timer(random.uniform(0, 0.05), die).start()
"""

SENDS = """
while num_losses < len(lost):
    if FIRST in lost[num_losses]:
        die_soon()
    try:
        while True:
            for each in accounts:
                each.send()
    except mpi.RankLostError:
        mpi.recover()
        num_losses = 1 if mpi.size() == 4 else 2
for _ in range(9):
    for each in accounts:
        each.send()
    objects = mpi.allgather_object([each.server.num_sent for each in accounts])
before = [each.check() for each in accounts]
folder = os.path.dirname(sys.argv[1])
ps.save(folder)
mpi.barrier()
for each in accounts:
    ps.send(each.server, None, "zero").wait()
mpi.barrier()
ps.load(folder)
mpi.barrier()
assert all(torch.equal(ps.receive(each.server).wait(), old) for each, old in zip(accounts, before))
own = [int(account[FIRST, number, 1]) for number in (0, 1)]
print(f"first rank {FIRST} of {mpi.size()}: {own == objects[mpi.rank()]}", flush=True)
mpi.stop()
"""


@pytest.mark.parametrize("place", ["one host", "hosts"])
def test_acknowledged_sends_to_servers_survive_their_owners_and_senders(survive, tmp_path, place):
    """Killed amid sends: each chunk has all acknowledged sends, and the last one of a killed rank or not."""
    (tmp_path / "account").write_bytes(bytes(5 * 2 * 2 * 8))
    result = survive(5, SERVERS + SENDS, tmp_path / "account", "0,2+3", place)
    assert sorted(result.stdout.splitlines()) == [f"first rank {rank} of 2: True" for rank in (1, 4)], result.output
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.output


def test_a_server_ends_with_the_last_rank_of_a_host(survive, request, tmp_path):
    """Its name and its saved values go to a new one."""
    if "Open MPI" in request.node.name:
        pytest.skip("the code of the servers is the same as without MPI")
    code = """
        import torchmpi.parameterserver as ps
        mpi.stop()
        mpi.start(config=mpi.Config(on_lost_rank="raise", verbose=False, host_name="far" if FIRST == 1 else "near"))
        values = torch.arange(1000.0)
        servers = [ps.init(values, name="weights"), ps.init(values[:1], name="bias")]
        ps.save(sys.argv[1])
        if FIRST == 1:
            die()
        try:
            while True:
                mpi.barrier()
        except mpi.RankLostError:
            mpi.recover()
        try:
            ps.receive(servers[0])
        except mpi.errors.CommunicatorError as error:
            print(error, flush=True)
        assert ps.receive(servers[1]).wait() == 0, "that rank had no element of it"
        servers[1].is_saved = False
        again = [ps.init(torch.zeros(1000), name="weights"), ps.init(torch.ones(1), name="new")]
        ps.load(sys.argv[1])
        print(f"rank {mpi.rank()}: {[torch.equal(ps.receive(each).wait(), values[:each.numel]) for each in again]}")
        mpi.stop()
    """
    result = survive(3, code, tmp_path / "saved")
    for rank in range(2):
        ended = f"rank {rank}: parameterserver.receive: weights has ended with the last ranks that had its shards [1]"
        assert ended in result.stdout and f"rank {rank}: [True, True]\n" in result.stdout, result.output
    assert result.returncode == 0, result.output


UPDATES = """
class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20_000))
    def forward(self):
        return self.weight.sum()  # with a gradient of ones

networks = [Loss() for _ in range(2)]
options = {"update_frequency": 2, "init_delay": 0}
updates = [
    ps.DownpourUpdate(networks[0], lr=1.0, name="downpour", **options),
    ps.EASGDUpdate(networks[1], beta=0.5, name="easgd", prefetch=1, **options),
]
optimizer = torch.optim.SGD(networks[1].parameters(), lr=1.0)
while updates[1].step < 300 or num_losses < len(lost):
    if num_losses < len(lost) and FIRST in lost[num_losses] and updates[1].step == 100:
        die_soon()
    try:
        for network, update in zip(networks, updates):
            network.zero_grad()
            network().backward()
            update.update()
            account[FIRST, 0] = updates[0].num_sends
        optimizer.step()
    except mpi.RankLostError as error:
        first_error = error if num_losses == 0 else first_error
        mpi.recover()
        num_losses += 1
try:
    raise first_error  # as a handle does whose call failed before; regression: "recover() without a lost rank"
except mpi.RankLostError:
    assert mpi.recover() == tuple(range(mpi.size()))
for update in updates:
    update.finish()
mpi.barrier()
for update in updates:
    update.pull()
values, num_sends = [network.weight.detach() for network in networks], int(account[:, 0, 0].sum())
# A remaining rank has counted a send that was refused, and the lost rank not its last one.
assert all(num_sends - mpi.size() <= -value <= num_sends + 1 for value in values[0].unique()), (values, num_sends)
assert values[1].max() < -50, values[1]
assert mpi.size() > 2 or updates[1].alpha == 0.25, updates[1].alpha
print(f"rank {mpi.rank()} of {mpi.size()}: {mpi.allgather_object(values[1][0].item())[0] == values[1][0]}", flush=True)
mpi.stop()
"""


def test_downpour_and_elastic_averaging_continue_without_a_lost_rank(survive, tmp_path):
    (tmp_path / "account").write_bytes(bytes(5 * 2 * 2 * 8))
    result = survive(3, SERVERS + UPDATES, tmp_path / "account", "0")
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} of 2: True" for rank in range(2)], result.output
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.output


SPARE = """
torch.manual_seed(7)
batches = [(each, each[:, :3].argmax(1)) for each in torch.randn(36, 6, 8)]
network = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
engine = AllReduceSGDEngine(progress=False)
engine.recover(every=4)

@engine.on("on_update")
def fail(state):
    if (str(FIRST), state.t) in zip(sys.argv[1].split(","), (9, 21)):
        die()

state = engine.train(
    network=network, criterion=nn.CrossEntropyLoss(), optimizer=optimizer, max_epochs=3,
    scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), iterator=lambda: batches[mpi.rank() :: mpi.size()],
)
values = [*network.parameters(), *(each["momentum_buffer"] for each in optimizer.state_dict()["state"].values())]
total = sum(each.detach().double().sum() for each in values).item()
print(f"rank {mpi.rank()} of {mpi.size()}: {state.t} {total.hex()} {optimizer.param_groups[0]['lr']}", flush=True)
mpi.stop()
"""


@pytest.fixture
def replace(tmp_path, warm_python):
    """``replace(n, spares, "code", *arguments) -> Result``, on ranks of Open MPI, of which lost ones are replaced."""
    if not is_open_mpi(launcher()):
        pytest.skip("only Open MPI has this")

    def run(n: int, spares: int, code: str, *arguments: object, start: str = START) -> Result:
        (tmp_path / "job.py").write_text(start + textwrap.dedent(code))
        own = ["-m", "torchmpi", "run", "-n", str(n), "--spares", str(spares), *WAYS["Open MPI"], "--timeout", "300"]
        return launched(warm_python, own, tmp_path / "job.py", arguments)

    return run


AT_EXIT = """
import atexit

@atexit.register  # before that of torchmpi, so it is called after it
def report():
    from mpi4py import MPI
    print("finalized", MPI.Is_finalized(), file=sys.stderr, flush=True)
"""


def test_spare_ranks_take_the_places_of_lost_ones_with_the_bits_of_an_undisturbed_run(replace):
    """Only without a loss MPI_Finalize is called: its barrier had no end in jobs on two hosts that had lost a rank."""
    undisturbed = replace(2, 1, SPARE, "none", start=AT_EXIT + START)
    expected = sorted(undisturbed.stdout.splitlines())
    assert undisturbed.returncode == 0 and len(expected) == 2, undisturbed.output
    assert undisturbed.stderr.count("finalized True") == 3, undisturbed.output
    for victims, num_spares in (("1", 1), ("0,2", 2)):  # 2 is the spare rank that has replaced rank 0
        result = replace(2, num_spares, SPARE, victims, start=AT_EXIT + START)
        assert result.returncode == 0 and result.stderr.count("finalized False") == 2, result.output
        assert sorted(result.stdout.splitlines()) == expected, result.output
        assert result.stderr.count("a spare rank is now rank") == num_spares, result.output


def test_spare_ranks_leave_although_a_rank_is_killed_after_stop(replace):
    """Regression: rank 0, which was killed, releases them; they waited for the others, and failed after ten minutes."""
    result = replace(2, 1, "mpi.barrier()\nmpi.stop()\nif FIRST == 0:\n    time.sleep(0.5)\n    die()", "none")
    assert result.returncode != 124 and "StallError" not in result.stderr, result.output


RESPAWN = """
import torch.distributed as dist

FIRST = "new" if "TORCHMPI_NEWCOMER" in os.environ else FIRST
data = torch.randint(-4, 5, (60, 12, 4), generator=torch.Generator().manual_seed(1)).double()
network = nn.Linear(4, 1, bias=False).double()
nn.init.zeros_(network.weight)
optimizer = torch.optim.SGD(network.parameters(), lr=2.0**-10)
victims = {(4,): (6, 0), (4, 3): (2, 0), (4, 2, 3, 4): (6, 3)}
"The step and the rank of a loss: rank 0, the next one while a new one starts, before a commit, and the last new one."

@mpi.elastic(network=network, optimizer=optimizer, step=0, sizes=(), begun=0)
def train(job):
    job.sizes, job.begun = (*job.sizes, mpi.size()), job.step
    dist.init_process_group("torchmpi")
    model = nn.parallel.DistributedDataParallel(network)
    while len(job.sizes) < 5 or job.step < job.begun + 2:  # after the last loss there is no commit
        if (job.step - job.begun, mpi.rank()) == victims.get(job.sizes):
            time.sleep(0.2)
            die()
        optimizer.zero_grad()
        (mpi.size() * model(data[job.step % 60, mpi.rank() :: mpi.size()]).sum()).backward()
        optimizer.step()
        job.step += 1
        time.sleep(0.01)
        if job.step % 4 == 0:
            job.commit()
    dist.destroy_process_group()
    return job.step, job.sizes

steps, sizes = train()
expected = -(2.0**-10) * sum(data[step % 60].sum(0) for step in range(steps))  # exact in any order
print(f"first rank {FIRST}: {sizes}, {torch.equal(network.weight[0], expected)}", flush=True)
mpi.stop()
"""


@pytest.mark.parametrize("survive", ["without MPI"], indirect=True)
def test_new_ranks_take_the_places_of_lost_ones_while_the_others_go_on(survive):
    """Rank 0 is lost, the next one while a new rank waits, and a new one; that in its place is not needed any more."""
    result = survive(4, RESPAWN, options=["--respawns", "4"])
    assert result.returncode == 0, result.output
    lines = [f"first rank {first}: (4, 2, 3, 4, 3), True" for first in (2, 3, "new")]
    assert sorted(result.stdout.splitlines()) == lines, result.output
    for size in (3, 4):
        told = f"continuing on {size} ranks: a new rank is ready to join; a new rank is now rank {size - 1}"
        assert result.stderr.count(told) == 1, result.output


@pytest.mark.parametrize("survive", ["without MPI"], indirect=True)
def test_a_new_rank_joins_at_a_copy_of_the_engine(survive):
    code = """
        sizes, network, engine = [], nn.Linear(4, 1), AllReduceSGDEngine(progress=False)
        engine.recover(every=4)

        @engine.on("on_update")
        def note(state):
            sizes.append(mpi.size())
            if FIRST == 1 and state.t == 9 and "TORCHMPI_NEWCOMER" not in os.environ:
                die()
            state.stop = mpi.rank() == 0 and state.t > 20 and sizes[-8:] == 8 * [3]
            time.sleep(0.005)

        batches = 60_000 * [(torch.ones(2, 4), torch.ones(2, 1))]
        state = engine.train(
            network=network, criterion=nn.MSELoss(), lr=0.01, iterator=lambda: batches[mpi.rank() :: mpi.size()],
        )
        values = mpi.allgather_object((state.t, network.weight.tolist()))
        print(f"rank {mpi.rank()} of {mpi.size()}: {values[0] == values[mpi.rank()]}", flush=True)
        mpi.stop()
    """
    result = survive(3, code, options=["--respawns", "1"])
    assert result.returncode == 0, result.output
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} of 3: True" for rank in range(3)], result.output


LOST_WHILE_JOINING = """
from torchmpi.launch.launcherless import newcomer_store
from torchmpi.session import runtime

def choose_devices(self, *arguments, choose=runtime.Runtime._choose_devices, **options):
    die() if self.world.size == 3 else choose(self, *arguments, **options)

if FIRST == 2 and sys.argv[1] == "connecting":
    newcomer_store.reach = lambda *_: die()
elif FIRST == 2:
    runtime.Runtime._choose_devices = choose_devices

@mpi.elastic(step=0, timeout=10_000)
def train(job):
    if FIRST == 1 and "TORCHMPI_NEWCOMER" not in os.environ:
        die()
    while mpi.size() == 3 or "TORCHMPI_NEWCOMER" not in mpi.broadcast_object({**os.environ}, mpi.size() - 1):
        time.sleep(0.01)
        job.commit()

train()
print(f"rank {mpi.rank()} of {mpi.size()}", flush=True)
mpi.stop()
"""


@pytest.mark.parametrize("survive", ["without MPI"], indirect=True)
@pytest.mark.parametrize("moment", ("connecting", "starting"))
def test_a_new_rank_joins_although_another_one_is_lost_meanwhile(survive, moment):
    """Regression: it waited for the connection of the lost one, and the others for it; later, the job ended."""
    result = survive(3, LOST_WHILE_JOINING, moment, options=["--respawns", "1"])
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["rank 0 of 2", "rank 1 of 2"]), result.output
    assert re.search(r"continuing on 2.*ranks: .*(lost is rank 1|rank 1 on host .* is gone)", result.stderr), (
        result.output
    )


@pytest.mark.any_mpi
def test_a_rank_killed_before_start_is_named_although_another_one_is_in_its_place(tmp_path):
    """Regression: the others waited for five minutes, as the new process has the number of the killed one too."""
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal
        import torchmpi as mpi
        if os.environ["RANK"] == "1" and "TORCHMPI_NEWCOMER" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        mpi.start()
        """)
    )
    own = ["-m", "torchmpi", "run", "-n", "3", *WAYS["without MPI"], "--respawns", "1", "--timeout", "300"]
    result = launched([sys.executable], own, script, ())  # forks of one process are not seen as ranks of the launcher
    assert result.returncode == 1, result.output
    assert "rank 1 ended before all ranks had called start()" in result.stderr, result.output


def test_a_spare_rank_gets_the_shards_of_the_lost_one(replace, tmp_path):
    """By `init` with the name of the server; an update with servers too, which takes no collective call."""
    code = """
        import torchmpi.parameterserver as ps
        server = ps.init(torch.full((50_000,), 5.0), name="account")
        network = nn.Linear(3, 1)
        update = ps.DownpourUpdate(network, lr=0.5, update_frequency=1, init_delay=0, name="downpour")
        network(torch.ones(3)).backward()
        update.update()
        ps.send(server, torch.ones(50_000)).wait()

        @mpi.elastic(step=0)
        def train(job):
            if FIRST == 0:
                die()
            mpi.barrier()
            assert (ps.receive(server).wait() == 5 + 3).all()  # all ranks have sent
            update.pull()
            assert len(set(mpi.allgather_object(network.bias.item()))) == 1
            mpi.barrier()
            ps.save(sys.argv[1])

        train()
        parts = [numel for _, numel in server.parts]
        print(f"rank {mpi.rank()} of {mpi.size()}: {parts} {list(server.own_shards)} {server.num_sent}", flush=True)
        mpi.stop()
    """
    result = replace(2, 1, code, tmp_path / "saved")
    assert result.returncode == 0, result.output
    expected = [f"rank {rank} of 2: [25000, 25000] [{rank}] 1" for rank in range(2)]
    assert sorted(result.stdout.splitlines()) == expected, result.output


# Rank 1 is lost, and the others know it. Indented as the programs that contain it.
LOST = """mpi.barrier()
        if FIRST == 1:
            die()
        try:
            while True:
                mpi.barrier()
        except mpi.RankLostError:
            mpi.recover()"""


@pytest.mark.parametrize("survive", ["Open MPI"], indirect=True)
def test_a_rank_leaves_after_a_loss_although_another_one_does_not_come_to_its_end(survive, tmp_path):
    """Regression: it waited for ever in the agreement that comes before MPI_Finalize. The other one waits for it."""
    code = f"""
        from torchmpi.launch import fault_tolerance
        fault_tolerance._LEAVE_SECONDS = 0.5
        {LOST}
        mpi.stop()
        left, end = sys.argv[1], time.monotonic() + 60
        while FIRST == 2 and not os.path.exists(left):
            assert time.monotonic() < end, "the other rank has not left"
            time.sleep(0.01)
        print("end", FIRST, flush=True)
    """
    at_exit = "import atexit, os, sys\natexit.register(lambda: open(sys.argv[1], 'w'))\n"  # called after torchmpi's
    result = survive(3, code, tmp_path / "left", start=at_exit + START)
    assert result.returncode == 0 and sorted(result.stdout.split()) == ["0", "2", "end", "end"], result.output
    assert "rank 0 ends alone: 0.5 s after it, another rank has not come to the end" in result.stderr, result.output


@pytest.mark.parametrize("survive", ["Open MPI"], indirect=True)
def test_a_rank_waits_for_the_reason_if_another_one_has_ended_its_calls(survive):
    """Regression: a rank of which the launcher said nothing for half a second failed, with an error of MPI."""
    code = """
        from torchmpi.launch import mpi_library
        MPI = runtime.current().MPI
        failed, begin = MPI._failed, time.monotonic()
        MPI._failed = lambda: failed() if time.monotonic() > begin + 1.5 else []
        mpi.barrier()
        if FIRST == 1:
            die()
        MPI.COMM_WORLD.Revoke()
        assert "is gone" in mpi_library.loss_behind_error()
        mpi.recover()
        mpi.stop()
    """
    result = survive(2, code, start=START + "from torchmpi.session import runtime\n")
    assert result.returncode == 0, result.output


@pytest.mark.parametrize("survive", ["Open MPI"], indirect=True)
def test_an_agreement_that_fails_is_named(survive):
    """Regression: Shrink() once returned an internal error, which was reported as a rank that hangs."""
    code = f"""
        from torchmpi.launch.fault_tolerance import FaultTolerantMPI
        FaultTolerantMPI._shrunk = lambda self: self._library.COMM_NULL.Shrink()
        {LOST}
    """
    result = survive(3, code)
    assert result.returncode == 1 and "hangs" not in result.stderr, result.output
    assert re.search(r"RankLostError: rank [02] on host .* cannot go on: MPI_ERR_COMM", result.stderr), result.output


def test_an_error_in_a_spare_rank_ends_the_job(replace):
    """Regression: its world is COMM_NULL, whose size was asked for, so that the others were left in their agreement."""
    code = """
        mpi.barrier()
        if FIRST == 1:
            die()
        while True:
            try:
                mpi.barrier()
            except mpi.RankLostError:
                time.sleep(0.1)  # recover() would wait for the spare rank
    """
    fails = """
        from torchmpi.launch.fault_tolerance import FaultTolerantMPI
        def fail(*_):
            raise MemoryError("no memory in the spare rank")
        if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
            FaultTolerantMPI.agree = fail
    """
    start = START.replace("mpi.start", f"{textwrap.dedent(fails)}mpi.start")
    result = replace(2, 1, code, start=start)
    assert result.returncode not in (0, 124) and "no memory in the spare rank" in result.stderr, result.output
    assert "COMM_NULL" not in result.stderr and "invalid communicator" not in result.stderr, result.output


HOROVOD = """
import os, signal, sys
import torch
from torch import nn
import torchmpi.horovod as hvd

is_victim = os.environ["RANK"] == "0"
hvd.init()
data = torch.randn(48, 8, generator=torch.Generator().manual_seed(3))

def make():
    torch.manual_seed(hvd.rank())
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True)
    return hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0, steps=0)

def train(state):
    while state.epoch < 2:
        for index, rows in enumerate(torch.utils.data.DataLoader(data, batch_size=4, sampler=state.sampler)):
            state.optimizer.zero_grad()
            loss = state.model(rows).square().mean()
            if is_victim and state.steps == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            state.optimizer.step()
            state.scheduler.step()
            state.sampler.record_batch(index, len(rows))
            state.steps += 1
            if state.steps % 2 == 0:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    return state.steps, state.scheduler.get_last_lr(), state.model.weight.tolist()

first = hvd.elastic.run(train)(make())
again = hvd.elastic.run(train)(make())  # undisturbed
print(f"rank {hvd.rank()} of {hvd.size()}: {first[0]} steps, {first == again}", flush=True)
hvd.shutdown()
"""


def test_a_spare_rank_becomes_rank_0_of_an_elastic_program_of_horovod(replace):
    """With the bits of an undisturbed run. Regression: the hooks of torch refused the first step after sync()."""
    result = replace(2, 1, HOROVOD, start="")
    assert result.returncode == 0, result.output
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} of 2: 12 steps, True" for rank in range(2)]
    assert result.stderr.count("a spare rank is now rank 0") == 1, result.output


def test_a_call_of_a_spare_rank_before_its_loop_is_refused(replace):
    """The others made theirs long ago, and are at the beginning of theirs: it must not be taken for a part of that."""
    code = """
        print("heard", mpi.broadcast_object(FIRST), flush=True)

        @mpi.elastic(step=0)
        def train(job):
            if FIRST == 1:
                die()
            while True:
                mpi.barrier()

        train()
    """
    result = replace(2, 1, code)
    assert result.returncode not in (0, 124), result.output
    assert "called begin_again()" in result.stderr and "was spare" in result.stderr, result.output
    assert result.stdout.count("heard 0") == 2, result.output


def test_without_a_spare_rank_left_the_number_of_ranks_decreases(replace):
    result = replace(2, 1, SPARE, "0,2")
    assert result.returncode == 0, result.output
    assert re.match(r"rank 0 of 1: \d+ ", result.stdout), result.output
    assert "continuing on 2 of 2 ranks" in result.stderr and "continuing on 1 of 2 ranks" in result.stderr


REFUSED = """
import torchmpi as mpi
mpi.start()
try:
    mpi.elastic(step=0)(print)()
except mpi.errors.ArgumentError as error:
    print("refused:", error, flush=True)
mpi.stop()
mpi.start(config=mpi.Config(on_lost_rank='raise'))
"""


def test_mpi_is_refused_without_fault_tolerance(job):
    result = job(2, REFUSED)
    assert result.returncode != 0 and "ends the job when a rank is killed" in result.stderr, result.output
    ways = ["--without-mpi", "--restarts"] if not is_open_mpi(launcher()) else ["--on-lost-rank continue", "--with-ft"]
    assert all(way in result.stderr for way in ways), result.output
    refused = re.findall(r"refused: rank \d: elastic\(\): (.*)", result.stdout)
    assert len(refused) == 2 and all(way in text for way in ways for text in refused), result.output


def test_open_mpi_that_was_initialized_before_is_refused(job):
    if not is_open_mpi(launcher()):
        pytest.skip("others are refused anyway")
    result = job(1, f"from mpi4py import MPI\n{REFUSED}", env={"OMPI_MCA_mpi_ft_enable": "1"})  # as --with-ft sets
    assert result.returncode != 0, result.output
    assert "initialized before mpi.start(), which must choose the collectives of Open MPI" in result.stderr


def test_run_refuses_other_libraries(alone):
    if is_open_mpi(launcher()):
        pytest.skip("Open MPI can continue")
    result = alone("-m", "torchmpi", "run", "-n", 2, "--on-lost-rank", "continue", "true")
    assert result.returncode == 1, result.output
    assert "cannot continue without a lost rank" in result.stderr, result.output
    assert "--without-mpi" in result.stderr and "--restarts" in result.stderr, result.output


ALL_KILLED = {
    "after a barrier": "mpi.barrier()\ndie()",
    "the last one in recover()": """
        from torchmpi.session import runtime
        if FIRST == 1:
            die()
        runtime.start = lambda *arguments, **options: die()
        try:
            while True:
                mpi.barrier()
        except mpi.RankLostError:
            mpi.recover()
    """,
}


@pytest.mark.parametrize("when", ALL_KILLED)
def test_it_is_no_success_if_all_ranks_are_killed(survive, when):
    result = survive(2, ALL_KILLED[when])
    assert result.returncode == 128 + signal.SIGKILL, result.output


def test_a_rank_that_fails_before_start_ends_the_others(alone):
    code = """
        from torchmpi.cli import separate_ranks
        separate_ranks._GRACE_SECONDS = 0.1
        script = "[ $RANK = 1 ] && exit 3; exec sleep 300"
        raise SystemExit(separate_ranks.SeparateRanks(["sh", "-c", script], 3).run())
    """
    result = alone("-c", textwrap.dedent(code))
    assert result.returncode == 3, result.output
    assert "rank 1 ended with status 3. Ranks that still run are terminated: 0, 2." in result.stderr, result.output


@pytest.mark.parametrize("num_ranks, end, begin", (
    (3, "os.kill(os.getpid(), signal.SIGKILL)", "mpi.start(config=mpi.Config(on_lost_rank='raise'))"),
    (2, "os.kill(os.getpid(), signal.SIGKILL)", "dist.init_process_group('torchmpi')"),
), ids=("killed", "killed-before-torch"))  # fmt: skip
def test_a_rank_that_ends_before_start_ends_the_others(alone, tmp_path, num_ranks, end, begin):
    """Regression: the others waited for it for five minutes, or for the timeout of torch."""
    ends_before_start(alone, tmp_path, num_ranks, end, begin)


@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode
    != 0,
    reason="containers are made with unshare, which needs root, and a root folder that is a mount",
)
def test_a_rank_that_ends_before_start_in_a_container_ends_the_others(alone, tmp_path):
    """Regression: with the leader of the session outside, as with `docker exec`, the others waited for five minutes."""
    container = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    ends_before_start(alone, tmp_path, 2, "sys.exit(0)", "mpi.start()", container)


def ends_before_start(alone, folder, num_ranks, end, begin, container=()):
    """Check a job in which rank 1 does `end`, and the others do `begin`."""
    script = folder / "job.py"
    script.write_text(f"""
import os, signal, sys
if os.environ["RANK"] == "1": {end}
import torch.distributed as dist
import torchmpi as mpi
{begin}
""")
    run = ("-m", "torchmpi", "run", "-n", num_ranks, "--without-mpi", "--timeout", "300", script)
    # Not warm: the ranks are looked up among the children of `torchmpi run`.
    first, *others = [*container, sys.executable, *run]
    result = alone(*others, python=first)
    assert result.returncode == 1, result.output
    # Of rank 2, if rank 0 takes longer to import torch. The slower one may come before it is terminated, and the other
    # has ended by then too.
    reports = [line for line in result.stderr.splitlines() if "ended before all ranks had called start()" in line]
    assert reports and re.search(r"rank 1 ended .*, in which rank [02] waits\.", reports[0]), result.output
    assert [line for line in reports[1:] if not re.search("rank (0, 1|1, 2) ended", line)] == [], result.output
