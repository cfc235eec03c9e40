"""To whoever asks what a dead or stopped job was doing: its flight records tell."""

from __future__ import annotations

import pickle
import re
import signal
from importlib.util import find_spec

import pytest
from helpers.launching import IN_CALL

from torchmpi.cli.flight_commands import read_folder

START = f"""{IN_CALL}
import os, signal, subprocess, sys, time
import torch
import torchmpi as mpi
mpi.start()
rank = mpi.rank()
for _ in range(1200):
    mpi.allreduce(torch.ones(3))  # by the fast path
mpi.barrier()
"""


@pytest.fixture
def analysis(alone):
    """``analysis(folder)``: the output of ``torchmpi analyze``."""

    def run(folder) -> str:
        done = alone("-m", "torchmpi", "analyze", folder)
        assert done.returncode == 0, done.output
        return done.stdout

    return run


@pytest.mark.quick
def test_killed_ranks_leave_their_last_calls(job, alone, analysis, tmp_path):
    """The record of a rank that was killed by SIGKILL, and of those that its end has ended.

    Regression: within the first half second the calls had wrong times, and a wrong order.
    """
    code = """
if rank == 1:
    wait_until_in_call(0, 2)
    os.kill(os.getpid(), signal.SIGKILL)
mpi.allreduce(torch.ones(7))
"""
    result = job(3, START + code, env={"TORCHMPI_FLIGHT_RECORD": str(tmp_path / "records")})
    assert result.returncode != 0, result.output
    text = analysis(tmp_path / "records")
    assert "3 of 3 ranks; 0 of them reached the end of stop()." in text
    assert "ranks 0, 2 are in allreduce(float32 [7], sum), call #1203 on world, for " in text
    assert "Not arrived: rank 1, which ended barrier(), call #1202, " in text
    assert text.count("  world #1202 barrier(): ") == 3, text
    assert_torch_reads(alone, tmp_path)


def assert_torch_reads(alone, folder) -> None:
    """Compare what torch's own reader finds in the records with what is in them."""
    if find_spec("torch.distributed.flight_recorder") is None:
        pytest.skip("this torch has no reader of flight records")
    torch_folder, database = folder / "torch", folder / "database"
    commands = (
        ["-m", "torchmpi", "analyze", folder / "records", "--torch", torch_folder],
        ["-m", "torch.distributed.flight_recorder.fr_trace", torch_folder, "-o", database],
    )
    for command in commands:
        done = alone(*command)
        assert done.returncode == 0, done.output
    _, found = pickle.loads(database.read_bytes())
    assert {group.desc for group in found.groups} >= {"world"}
    matched = [each for each in found.collectives if each.pg_desc.endswith(":world") and each.pass_check]
    assert len([each for each in matched if each.collective_name == "gloo:barrier"]) == 1
    assert {each.collective_name for each in matched} == {"gloo:barrier", "gloo:all_reduce"}
    (last,) = [each for each in found.collectives if each.input_sizes == [[7]]]
    assert last.missing_ranks == {1}


@pytest.mark.any_mpi
def test_a_stopped_rank_is_dumped(job, tmp_path):
    code = f"""
processes = mpi.allgather_object(os.getpid())
if rank == 0:
    os.kill(processes[1], {int(signal.SIGSTOP)})
    command = [sys.executable, "-m", "torchmpi", "dump", str(processes[1]), "--out", {str(tmp_path / "out")!r}]
    print(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout, flush=True)
    os.kill(processes[1], {int(signal.SIGCONT)})
mpi.barrier()
mpi.stop()
"""
    result = job(2, START + code)
    assert result.returncode == 0, result.output
    assert "The last calls of 1 rank of this host: " in result.stdout
    assert "1 of 2 ranks; 0 of them reached the end of stop().\nNo record of rank 0." in result.stdout
    (record,) = read_folder(tmp_path / "out")
    assert record.rank == 1
    assert {len(group.calls) for group in record.groups if group.name == "world"} == {1024}


@pytest.mark.any_mpi
def test_a_common_parent_of_two_jobs_is_refused(alone, tmp_path):
    """Regression: the records of both jobs were mixed, as if they were of one."""
    script, out = tmp_path / "parent.py", str(tmp_path / "out")
    script.write_text(f"""
import os, subprocess, sys
import torchmpi as mpi

def run_job():
    mpi.start()
    os.write(started, b".")
    os.read(end, 1)
    os._exit(0)

(ready, started), (end, keep) = os.pipe(), os.pipe()
jobs = [os.fork() or run_job() for _ in range(2)]
for _ in jobs:
    os.read(ready, 1)
for process in (os.getpid(), jobs[1]):
    command = [sys.executable, "-m", "torchmpi", "dump", str(process), "--out", {out!r}]
    print(subprocess.run(command, stdout=-1, stderr=subprocess.STDOUT, text=True).stdout, flush=True)
print("jobs", *jobs)
os.write(keep, b"..")
""")
    done = alone(script)
    assert done.returncode == 0, done.output
    first, second = done.stdout.split("\njobs ")[1].split()
    assert f"has started 2 jobs, whose ranks are the processes {first}; {second}. Name one" in done.stdout, done.output
    assert "The last calls of 1 rank of this host" in done.stdout, done.output


def test_a_missing_message_is_named(job, analysis, tmp_path):
    code = f"""
from pathlib import Path
from torchmpi.cli import flight_analysis, flight_commands
import torch.distributed as dist
dist.init_process_group("torchmpi")
if rank == 1:
    dist.send(torch.ones(3), 0, tag=3)
elif rank == 2:
    text = ""
    while not ("rank 1 has sent 1 of 2" in text and "rank 2 has sent none" in text):
        text = flight_analysis.report(flight_commands.read_folder(Path({str(tmp_path / "records")!r})))
    os.kill(os.getpid(), signal.SIGKILL)
elif rank == 0:
    for _ in range(2):
        dist.recv(torch.ones(3), 1, tag=3)
mpi.recv(torch.ones(5), 2)
"""
    result = job(3, START + code, env={"TORCHMPI_FLIGHT_RECORD": str(tmp_path / "records")})
    assert result.returncode != 0, result.output
    text = analysis(tmp_path / "records")
    assert re.search(r"\* rank 0 waits for a message with tag 3 from rank 1 \(float32, 12 bytes\) on \S.*, for \S+ s; "
                     r"rank 1 has sent 1 of 2\.", text), text  # fmt: skip
    assert re.search(r"\* rank 1 waits for a message from rank 2 \(float32, 20 bytes\) on world, for \S+ s; rank 2 has "
                     r"sent none\.", text), text  # fmt: skip


@pytest.mark.any_mpi
def test_ranks_of_other_hosts_are_dumped(job, tmp_path):
    code = f"""
processes = mpi.allgather_object(os.getpid())
dump = "from torchmpi.cli import flight_commands, main; flight_commands._GATHER_SECONDS = "
if rank == 0:
    for number, limit in enumerate(("60;", "1;")):
        code = dump + limit + "raise SystemExit(main())"
        command = [sys.executable, "-c", code, "dump", str(processes[0]), "--out", {str(tmp_path / "out")!r}]
        print(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout, flush=True)
        os.kill(processes[2], (signal.SIGSTOP, signal.SIGCONT)[number])
mpi.barrier()
mpi.stop()
"""
    of_host = """
from torchmpi.launch import launcher
os.environ["TORCHMPI_HOST_NAME"] = f"node{launcher.detect().rank // 2}"
"""
    result = job(3, START.replace("import torch\n", of_host + "import torch\n", 1) + code)
    assert result.returncode == 0, result.output
    first, second = result.stdout.split("The last calls of 1 rank of this host: ")[1:]
    assert "The ranks of other hosts have written theirs: rank 2\n" in first
    assert "2 of 3 ranks; 0 of them reached the end of stop().\nNo record of rank 1." in first
    assert "No record has come from rank 2 on other hosts in 1 s: they are stopped " in second
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rank0.flight", "rank2.flight"]


@pytest.mark.any_mpi
def test_a_job_that_ends_well_leaves_its_records_and_shows_stacks_on_request(job, analysis, tmp_path):
    """Rank 1 gets SIGUSR1 while it waits in a kernel; rank 0 has its own handler, which it installs after start()."""
    code = f"""
import logging
from pathlib import Path
log = Path({str(tmp_path / "log")!r})
log.touch()
processes = mpi.allgather_object(os.getpid())
if rank == 1:
    logging.getLogger("torchmpi").addHandler(logging.FileHandler(log))
mpi.barrier()
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
if rank == 0:
    signal.signal(signal.SIGUSR1, lambda *_: print("own handler", flush=True))
    wait_until_in_call(1)
    [os.kill(process, signal.SIGUSR1) for process in processes]
    limit = time.monotonic() + 60
    while "SIGUSR1" not in log.read_text() and time.monotonic() < limit:
        time.sleep(0.01)
mpi.barrier()
mpi.stop()
if rank == 0:
    os.kill(os.getpid(), signal.SIGUSR1)
"""
    result = job(2, START + code, env={"TORCHMPI_FLIGHT_RECORD": str(tmp_path / "records")})
    assert result.returncode == 0, result.output
    assert result.stdout.count("own handler") == 2, result.output
    text = (tmp_path / "log").read_text()
    assert "after SIGUSR1: barrier(), call #1205 on communicator world, " in text, text
    assert "last calls on communicator world: #1205: barrier(); #1204: barrier(); #1203: allgather(" in text
    assert f"flight record: {tmp_path / 'records' / 'rank1.flight'}\n" in text
    main_thread = text.partition("MainThread:\n")[2]
    assert 0 < main_thread.find("mpi.barrier()") < main_thread.find("torchmpi watchdog:\n")
    assert "rank 0, process" not in result.stderr
    assert "2 of 2 ranks; 2 of them reached the end of stop().\n* no rank is in a call on world" in analysis(
        tmp_path / "records"
    )
    assert sorted(path.name for path in (tmp_path / "records").iterdir()) == ["rank0.flight", "rank1.flight"]
