"""To whoever waits for a job to start: ranks that end before start(), or do not call it, are named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers.launching import is_open_mpi

RANK = """
import os, sys, time
import torchmpi as mpi
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
"""
COLD = {"PYTHONHASHSEED": "0"}
"""Ranks must be children of the launcher, as the processes that it starts are looked up; see conftest."""
STALL = COLD | {"TORCHMPI_STALL_WARNING_SECONDS": "1", "TORCHMPI_STALL_ABORT_SECONDS": "3"}


@pytest.mark.parametrize("end", ("mpi.Config(check='bad')", pytest.param("sys.exit(0)", marks=pytest.mark.any_mpi)))
def test_a_rank_that_ends_before_start_ends_the_job(job, end):
    """Regression: under MPICH the others stayed in MPI_Init. Open MPI's launcher ends the job itself."""
    result = job(2, RANK + f"if rank == 1: {end}\nmpi.start()", env=COLD)
    assert result.returncode != 0, result.output
    reported = re.search(r"rank 1 ended before all ranks had called start\(\), in which rank 0 waits\.", result.stderr)
    assert reported or "prterun" in result.stderr, result.output
    assert ("check='bad' is not one of" in result.stderr) == ("bad" in end), result.output


def test_a_start_that_fails_on_all_ranks_leaves_nothing_in_shared_memory(job):
    """Regression: under MPICH, the file that all ranks map in MPI_Init."""
    code = """
import re
try:
    mpi.start()
finally:
    print(*re.findall(r"/dev/shm/\\S+", open("/proc/self/maps").read()), flush=True)
"""
    result = job(2, RANK + code, env={"TORCHMPI_METRICS_SECONDS": "none"})
    assert "TORCHMPI_METRICS_SECONDS='none' is not a valid float" in result.stderr, result.output
    paths = re.findall(r"/dev/shm/\S+", result.stdout)
    assert paths and [path for path in paths if Path(path).exists()] == [], result.output


@pytest.mark.parametrize(
    "before",
    (
        "if rank != 1: mpi.start()",
        pytest.param(
            "os.environ['TORCHMPI_ABORT_ON_EXCEPTION'] = '0'\nmpi.start(config=patient)\nmpi.stop()",
            marks=pytest.mark.any_mpi,
        ),
    ),
    ids=("first", "second"),
)
def test_a_rank_that_does_not_call_start_is_named(job, before):
    """Regression: the others waited without a word, in MPI_Init or in the first collective of a second start, and with
    abort_on_exception=0 the line about the end of the job was printed twice a second, without an end."""
    # A rank that comes to start() three seconds after another one would be missing too: import everything before.
    together = """
from pathlib import Path
mpi.start
here = Path(__file__).parent
(here / f"rank{rank}").touch()
while len(list(here.glob("rank?"))) < 2: time.sleep(0.01)
patient = mpi.Config(stall_warning_seconds=60, stall_abort_seconds=60)
"""
    result = job(2, RANK + together + before + "\nif rank == 1: time.sleep(200)\nmpi.start()", env=STALL)
    assert result.returncode != 0, result.output
    assert result.stderr.count("rank 0 has waited") == 2, result.output
    assert result.stderr.count("in start(). Not arrived:\n  rank 1: process ") == 2, result.output
    assert result.stderr.count("exceeds stall_abort_seconds") == 1, result.output


@pytest.mark.parametrize(
    ("flags", "options", "problem"),
    ((0, "size=1m", "has 1 of 1 MiB free, but MPICH"), (1, "", "is not there or not writable, but MPICH")),
    ids=("small", "read-only"),
)
def test_shared_memory_that_does_not_serve_is_reported(job, mpirun, flags, options, problem):
    """Regression: MPI_Init of MPICH ended with SIGBUS or lines of UCX. Open MPI says that it uses another transport."""
    if is_open_mpi(mpirun[0]):
        pytest.skip("about MPICH")
    code = f"""
import ctypes
libc = ctypes.CDLL(None)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):  # a private namespace of mounts
    sys.exit("not permitted")
assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", {flags}, b"{options}") == 0
mpi.start()
"""
    result = job(2, RANK + code)
    if "not permitted" in result.stderr:
        pytest.skip("no namespaces of mounts: needs root")
    assert problem in result.stderr and "--shm-size=1g" in result.stderr, result.output
    assert result.returncode != 0, result.output


@pytest.mark.parametrize(
    "options", ([], pytest.param(["--without-mpi"], marks=pytest.mark.any_mpi)), ids=("MPI", "without MPI")
)
def test_standard_streams_may_be_closed(alone, tmp_path, options):
    """Regression: MPICH's mpirun did not start, and a connection between ranks got the number of stderr."""
    script = tmp_path / "job.py"
    script.write_text("""if True:
        import os
        from pathlib import Path
        import torchmpi as mpi
        os.closerange(0, 3)
        mpi.start()
        streams = {os.readlink(f"/proc/self/fd/{number}") for number in range(3)}
        os.write(2, b"a message of a library")
        mpi.barrier()
        Path(__file__).with_name(f"rank{mpi.rank()}").write_text(*streams)
        mpi.stop()
    """)
    run = [sys.executable, "-m", "torchmpi", "run", *options, "-n", "2", script]
    result = alone("-c", 'exec "$@" <&- >&- 2>&-', "bash", *run, python="bash")
    assert result.returncode == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["/dev/null"] * 2


@pytest.mark.parametrize("run", ([], ["-m", "torchmpi", "run", "-n", "1"]), ids=("alone", "run"))
def test_home_may_be_missing(alone, warm_python, tmp_path, run):
    """Regression: Open MPI ended the process in MPI_Init, and its mpirun did not start."""
    script = tmp_path / "job.py"
    script.write_text("import os\nimport torchmpi as mpi\nmpi.start()\nprint('home', os.environ['HOME'])\nmpi.stop()\n")
    result = alone("-u", "HOME", *warm_python, *run, script, python="env")
    assert result.returncode == 0 and "home /" in result.stdout, result.output
