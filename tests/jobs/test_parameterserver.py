"""Jobs with parameter servers: a rank is killed, a rank forgets to stop, and nobody asks the servers for anything."""

from __future__ import annotations

import pytest

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
    print("running", flush=True)
"""
WAYS = pytest.mark.parametrize("slot_bytes", ("", "0"), ids=("shared memory", "by messages"))
# Starting Python and torch on a busy machine is most of this.
LIMIT_SECONDS = 60


def environment(slot_bytes: str) -> dict[str, str]:
    return {"TORCHMPI_SLOT_BYTES": slot_bytes} if slot_bytes else {}


@WAYS
def test_a_rank_that_is_killed_while_all_send_ends_the_job(job, slot_bytes):
    code = """
end = time.monotonic() + 50
while time.monotonic() < end:
    ps.send(server, ones).wait()
    ps.receive(server).wait()
    if rank == 1 and time.monotonic() > end - 49.5:
        os.kill(os.getpid(), signal.SIGKILL)
print("nobody has ended this", flush=True)
"""
    result = job(2, START + code, timeout=LIMIT_SECONDS, env=environment(slot_bytes))
    assert result.returncode != 0, result.output
    assert "running" in result.stdout and "nobody" not in result.stdout, result.output
    assert result.seconds < 40, result.output


def test_ranks_that_come_to_their_end_without_stop_serve_until_all_have(job):
    code = """
if rank == 0:
    sys.exit(0)  # while the others need its shard
child = os.fork()
if child == 0:  # which would be taken for its parent, and hold locks under its name
    try:
        ps.send(server, ones)
    except mpi.TorchMPIError as error:
        print("refused:", "forked" in str(error), flush=True)
    os._exit(0)
os.waitpid(child, 0)
for _ in range(20):
    ps.send(server, ones)
    time.sleep(0.02)
print("all has arrived", bool((ps.receive(server).wait() == 20).all()), flush=True)
"""
    result = job(2, START + code, timeout=LIMIT_SECONDS, env=environment("0"))
    assert result.returncode == 0, result.output
    assert "refused: True" in result.stdout, result.output
    assert "all has arrived True" in result.stdout, result.output


def test_servers_that_nobody_asks_sleep(job):
    """A wait inside MPI would take a whole core of each rank."""
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
    result = job(2, START + code, timeout=LIMIT_SECONDS, env=environment("0"))
    assert result.returncode == 0, result.output
    shares = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("share")]
    assert len(shares) == 2 and max(shares) < 0.05, result.output


def test_the_wait_for_a_rank_that_has_stopped_names_it(job):
    """In shared memory one waits for a lock, by messages for an answer: the watchdog sees both."""
    code = """
if rank == 1:
    header = server.shards.headers(1)
    header[0, 0] = server.service.client.number  # as if it had stopped in the middle of a chunk
    mpi.barrier()
    time.sleep(50)
mpi.barrier()
ps.send(server, ones).wait()
"""
    env = {"TORCHMPI_STALL_WARNING_SECONDS": "1", "TORCHMPI_STALL_ABORT_SECONDS": "8"}
    result = job(2, START + code, timeout=LIMIT_SECONDS, env=env)
    assert result.returncode != 0, result.output
    assert "for a chunk that rank 1 has locked" in result.stderr, result.output
    assert "exceeds stall_abort_seconds" in result.stderr, result.output
