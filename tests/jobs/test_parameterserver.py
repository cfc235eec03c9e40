"""To a user of parameter servers: killed ranks end the job, a missing stop() does not hurt, and idle servers sleep."""

from __future__ import annotations

import re

import pytest

any_mpi = pytest.mark.any_mpi

START = """
import os, signal, sys, time
import torch
import torchmpi as mpi
import torchmpi.parameterserver as ps
mpi.start()
rank = mpi.rank()
server = ps.init(torch.zeros(100_000, dtype=torch.int64))
ones = torch.ones(100_000, dtype=torch.int64)
mpi.barrier()
if rank == 0:
    open(__file__ + ".running", "w").close()  # launchers drop output that they have not read when a rank dies
"""
HOSTS = "from mpi4py import MPI\nimport os\nos.environ['TORCHMPI_HOST_NAME'] = f'host{MPI.COMM_WORLD.rank}'\n"
TRANSPORTS = pytest.mark.parametrize("slot_bytes", ("", "0"), ids=("shared memory", "by messages"))
# Starting Python and torch on a busy machine is most of this.


def environment(slot_bytes: str) -> dict[str, str]:
    return {"TORCHMPI_SLOT_BYTES": slot_bytes} if slot_bytes else {}


@pytest.mark.quick
@TRANSPORTS
def test_a_rank_that_is_killed_in_a_rule_ends_the_job(job, tmp_path, slot_bytes):
    """The rank holds the lock of a chunk; no other rank gets values with a part of its update."""
    code = """
def fatal(value, sent):
    value.add_(sent)
    os.kill(os.getpid(), signal.SIGKILL)
ps.register_rule("fatal", fatal)
end, num_sent = time.monotonic() + 30, 0
while time.monotonic() < end:
    num_sent += 1
    if rank == 1 and num_sent > 20:
        ps.send(server, 10**9 * ones, "fatal")
    ps.send(server, ones).wait()
    if ps.receive(server).wait().max() >= 10**9:
        print("part of an update", flush=True)
open(__file__ + ".not_ended", "w").close()
"""
    result = job(2, START + code, env=environment(slot_bytes))
    assert result.returncode != 0, result.output
    assert "part" not in result.stdout, result.output
    assert (tmp_path / "job.py.running").exists() and not (tmp_path / "job.py.not_ended").exists(), result.output


def test_ranks_that_exit_without_stop_serve_until_all_have_exited(job):
    """Regression: the watchdog ended the job when a send had waited two seconds for a rank in stop()."""
    code = """
slept = []
def slow(values, sent):
    if rank == 0 and not slept:
        slept.append(time.sleep(3))
    values.add_(sent)
ps.register_rule("slow", slow)
if rank == 0:
    sys.exit(0)  # while the other rank needs its shard
child = os.fork()
if child == 0:  # its locks would be attributed to its parent
    try:
        ps.send(server, ones)
    except mpi.TorchMPIError as error:
        print("refused:", "forked" in str(error), flush=True)
    os._exit(0)
os.waitpid(child, 0)
for _ in range(20):
    ps.send(server, ones)
    time.sleep(0.02)
ps.send(server, ones, "slow")
print("all has arrived", bool((ps.receive(server).wait() == 21).all()), flush=True)
"""
    env = {"TORCHMPI_STALL_WARNING_SECONDS": "1", "TORCHMPI_WATCHDOG_PERIOD_SECONDS": "0.2"}
    result = job(2, HOSTS + START + code, env=env)
    assert result.returncode == 0, result.output
    assert "refused: True" in result.stdout, result.output
    assert "all has arrived True" in result.stdout, result.output
    waits = r"has waited \d+ s in parameterserver.send \(server 0, waiting for the reply of rank 0\)"
    assert re.search(waits, result.stderr), result.output
    assert "communicator world.\n" in result.stderr, result.output  # without the place of a rank


@any_mpi
def test_idle_servers_sleep(job):
    """A wait inside MPI would occupy a core per rank."""
    code = """
ps.send(server, ones).wait()
time.sleep(0.5)
shares = []
for _ in range(3):
    before = time.process_time()
    time.sleep(1)
    shares.append(time.process_time() - before)
print(f"share {min(shares):.4f}", flush=True)
"""
    result = job(2, START + code, env=environment("0"))
    assert result.returncode == 0, result.output
    shares = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("share")]
    assert len(shares) == 2 and max(shares) < 0.05, result.output


@any_mpi
def test_a_stalled_wait_for_a_lock_names_its_holder(job):
    """The watchdog reports which rank holds the lock."""
    code = """
if rank == 1:
    header = server.shards.headers(1)
    header[0, 0] = 2 * os.getpid()  # as if it had stopped in a chunk
    mpi.barrier()
    time.sleep(50)
mpi.barrier()
ps.send(server, ones).wait()
"""
    env = {"TORCHMPI_STALL_WARNING_SECONDS": "1", "TORCHMPI_STALL_ABORT_SECONDS": "8"}
    result = job(2, START + code, env=env)
    assert result.returncode != 0, result.output
    assert "for a chunk that rank 1 has locked" in result.stderr, result.output
    assert "exceeds stall_abort_seconds" in result.stderr, result.output
