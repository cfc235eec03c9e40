"""To a user of ps.record(): each event once, with staleness and versions, and a replay with the same bits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from helpers import updates_rig
from helpers.outcomes import refusal
from helpers.updates_rig import make_net, quadratic_step, set_gradients, step_in_turn

import torchmpi as mpi
import torchmpi.parameterserver as ps
from torchmpi.parameterserver.runs.observed_run import RECEIVE, SEND, STEP

no_servers_left = updates_rig.no_servers_left
pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(3), pytest.mark.usefixtures("world")]
STEPS = 6


def test_record_of_steps_in_turn(agree, tmp_path):
    path = Path(mpi.broadcast_object(str(tmp_path))) / "run.npz"
    net, size = make_net(), mpi.size()
    update = ps.DownpourUpdate(net, lr=0.125, update_frequency=1, init_delay=0, max_staleness=1)
    with ps.record(path, norms=True):
        refused = refusal(lambda: ps.record(path).__enter__())
        update.start()
        for step in range(STEPS):
            set_gradients(net, 10 * step + mpi.rank())
            step_in_turn(update)
        update.finish()
        mpi.barrier()
    record = ps.read_run(path)
    agree("ArgumentError" in refused and "recorded or repeated already" in refused, refused)
    agree.equal((record.num_ranks, record.about["servers"]), (size, ["clock", "parameters 0"]))
    sends = record.updates
    # The first gradient belongs to values that nobody has fetched. From then on, the gradient of a step is that of the
    # values before, fetched at the last turn of the rank: each other rank has sent once since then.
    agree.equal(sorted(sends["rank"].tolist()), sorted(list(range(size)) * (STEPS - 2)))
    agree.equal(set(sends["staleness"].tolist()), {float(size - 1)})
    agree.equal((update.staleness.count, update.staleness.mean), (STEPS - 2, size - 1.0))
    pairs = record.staleness_of_pairs()
    agree.equal(len(pairs), size * (size - 1))
    agree({tuple(counts) for counts in pairs.values()} == {(0, STEPS - 2)}, pairs)
    # Versions are those of the order in which the ranks took their turns; the first rule is the copy of rank 0.
    all_sends = record.rows(SEND)
    of_parameters = all_sends["server"] == 1
    agree.equal(all_sends["version"][of_parameters].tolist(), [float(number) for number in range(STEPS * size + 1)])
    agree.equal(all_sends["rank"][of_parameters].tolist(), [0, *list(range(size)) * STEPS])
    agree(bool((all_sends["norm"][of_parameters] > 0).all()), "norms")
    own = record.rows(STEP, mpi.rank())
    agree.equal(own["version"].tolist(), [float(step) for step in range(STEPS)])
    fetches = record.rows(RECEIVE, mpi.rank())
    agree.equal(int(fetches["bytes"][fetches["server"] == 1].sum()), update.servers.servers[0].bytes_received)
    agree(bool((record.columns["begin"] >= 0).all()), "times begin with the record")


def test_there_is_no_file_without_a_record(agree, tmp_path):
    path = Path(mpi.broadcast_object(str(tmp_path))) / "run.npz"

    def fail() -> None:
        with ps.record(path):
            raise RuntimeError("in the block")

    message = refusal(fail)
    mpi.barrier()
    agree.equal((message, path.exists()), ("RuntimeError: in the block", False))
    missing = refusal(lambda: ps.replay(path).__enter__())  # which rank 0 reads, on all ranks
    agree("FileNotFoundError" in missing and "run.npz" in missing, missing)
    with ps.record(path):
        pass
    mpi.barrier()
    agree.equal(len(ps.read_run(path)), 0)


def train(sleeps: float, lr: float = 0.0625, num_steps: int = 10) -> list[float]:
    """Train with a clock and a prefetch, at a speed of each rank."""
    ps.free_all()  # but what orders the calls
    net = make_net(mpi.rank())
    update = ps.DownpourUpdate(net, lr=lr, update_frequency=2, init_delay=0, prefetch=1, max_staleness=2)
    for step in range(num_steps):
        quadratic_step(net, torch.ones(2, 6) * (step + mpi.rank()))
        time.sleep(sleeps * mpi.rank())
        update.update()
    update.finish()
    mpi.barrier()
    update.pull()
    values = torch.cat([each.detach().flatten() for each in net.parameters()]).tolist()
    update.free()
    return values


def test_an_order_is_repeated_bit_for_bit(agree, tmp_path):
    folder = Path(mpi.broadcast_object(str(tmp_path)))
    with ps.record(folder / "run.npz", ordered=True):
        first = train(0.003)
    again = []
    for sleeps in (0.0, 0.001):
        with ps.replay(folder / "run.npz", record=folder / "again.npz"):
            again.append(train(sleeps))
    agree(again[0] == first and again[1] == first, "results differ")
    records = [ps.read_run(folder / name) for name in ("run.npz", "again.npz")]
    for column in ("position", "checksum", "rank", "kind", "version", "bytes"):
        of_calls = [each.columns[column][each.columns["position"] >= 0] for each in records]
        order = [each.columns["position"][each.columns["position"] >= 0].argsort() for each in records]
        agree.equal(of_calls[0][order[0]].tolist(), of_calls[1][order[1]].tolist())


def test_other_runs_are_not_repeated(agree, tmp_path):
    folder = Path(mpi.broadcast_object(str(tmp_path)))
    server = ps.init(torch.zeros(4))
    with ps.record(folder / "run.npz", ordered=True):
        ps.send(server, torch.ones(4) * mpi.rank()).wait()
    mpi.barrier()

    def repeat(values: float, rule: str = "add", num_sends: int = 1) -> str:
        def sends() -> None:
            with ps.replay(folder / "run.npz"):
                for _ in range(num_sends):
                    ps.send(server, torch.full((4,), values), rule).wait()

        message = refusal(sends)
        mpi.barrier()
        return message

    before = ps.receive(server).wait().tolist()
    mpi.barrier()
    messages = [repeat(mpi.rank() + 0.5), repeat(float(mpi.rank()), "copy"), repeat(0.0, num_sends=0)]
    after = ps.receive(server).wait().tolist()
    expected = ["column 'checksum': ", "column 'rule': 'add' was recorded", "have not been repeated"]
    for message, part in zip(messages, expected, strict=True):
        agree("ArgumentError: " in message and part in message and "run.npz: row " in message, message)
    agree.equal(after, before)
    mpi.barrier()
    agree("further call of this rank to server" in repeat(float(mpi.rank()), num_sends=2), "one send too many")
