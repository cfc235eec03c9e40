"""To a user of torch.distributed: every method to start it works in programs that do not import torchmpi."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest
from helpers.launching import free_port, job_environment

any_mpi = pytest.mark.any_mpi
# Programs here do not import torchmpi: torch finds it by its entry point.
pytestmark = pytest.mark.skipif(
    not any(entry.name == "torchmpi" for entry in importlib.metadata.entry_points(group="torch.backends")),
    reason="torchmpi is on the path, but not installed: pip install -e .",
)


def cold(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "default", "-c", code],
        capture_output=True,
        text=True,
        timeout=400,
        env=job_environment(environment),
    )


def said(result, text: str, times: int) -> None:
    assert result.returncode == 0 and result.stdout.count(text) == times, result.output


@pytest.mark.quick
def test_a_script_without_torchmpi(job):
    """One changed line, no environment variables, no explicit end; the output has no warnings or errors."""
    code = """
import os
import torch
import torch.distributed as dist
assert not {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} & os.environ.keys()
dist.init_process_group("torchmpi")
tensor = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
pending = dist.all_reduce(torch.ones(100000), async_op=True)
print("sum", tensor.tolist(), flush=True)
"""
    result = job(3, code, env={"TORCHMPI_VERBOSE": "0"})
    said(result, "sum [6.0, 6.0, 6.0]", 3)
    for complaint in ("Traceback", "arning", "WARNING", "torchmpi"):
        assert complaint not in result.stderr, result.output


EVERY_WAY = """
import os
import torch
import torch.distributed as dist
from mpi4py import MPI  # what it listens to is its own business

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}

def listening():
    # The listening ports of this process, with their addresses.
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    own = {os.readlink(file) for file in files if os.path.lexists(file)}
    entries = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/self/net/{table}").readlines()[1:]]
    return {entry[1] for entry in entries if entry[3] == "0A" and f"socket:[{entry[9]}]" in own}

def check(way, backend="torchmpi", order=1, private=False, **options):
    before = listening()
    dist.init_process_group(backend, **options)
    opened = listening() - before
    expected = rank if order > 0 else size - 1 - rank
    tensor = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(tensor)
    gathered = [None] * size
    dist.all_gather_object(gathered, dist.get_rank())
    good = (
        dist.get_rank() == expected and dist.get_world_size() == size and gathered == list(range(size))
        and tensor.item() == sum(10.0**number for number in range(size)) and ":" + backend in ":" + dist.get_backend()
    )
    if private:
        good &= bool(opened) == (rank == 0) and {place.split(":")[0] for place in opened} <= LOOPBACK
    dist.destroy_process_group()
    # Two methods use one port: a rank that is ahead would connect to the store of the method before.
    MPI.COMM_WORLD.Barrier()
    print(way, "is", "right" if good else f"wrong: {expected=}, {gathered=}, {tensor=}, {opened=}", flush=True)

for options in ({"rank": 0, "world_size": size + 1}, {"init_method": "mpi://", "rank": 5, "world_size": size}):
    try:
        dist.init_process_group("torchmpi", **options)
    except ValueError as error:
        print("numbers of others refused", "is right" if "Leave both out" in str(error) else error, flush=True)
check("nothing said", private=True)
check("mpi", init_method="mpi://", private=True)
check("mpi with numbers", init_method="mpi://", rank=rank, world_size=size)
check("environment", init_method="env://", private=True)
check("environment with numbers", rank=rank, world_size=size)
check("gloo through mpi", backend="gloo", init_method="mpi://")
check("both devices", backend="cpu:torchmpi,cuda:torchmpi")
folder = os.path.dirname(os.path.abspath(__file__))  # of this job, by the test
check("file", init_method=f"file://{folder}/first", rank=rank, world_size=size)
check("file backwards", order=-1, init_method=f"file://{folder}/second", rank=size - 1 - rank, world_size=size)
port = open(f"{folder}/port").read()
check("tcp", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
check("address without a rank")
check("the call of torch's tutorial for MPI", rank=0, world_size=0)
os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(size))
check("variables")
check("variables for gloo", backend="gloo")
"""


def test_every_rendezvous_method(job, tmp_path):
    """The store that is opened through MPI listens on this host only."""
    (tmp_path / "port").write_text(str(free_port()))
    result = job(2, EVERY_WAY, env={"TORCHMPI_VERBOSE": "0"})
    assert "wrong" not in result.stdout, result.output
    said(result, " is right", 2 * 16)


@any_mpi
def test_programs_on_gloo_are_not_affected(job):
    """Regression: an installed torchmpi replaced the rendezvous of all programs."""
    code = """
import importlib, sys, traceback
import torch.distributed as dist
handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
try:
    dist.init_process_group("gloo")
except ValueError as error:
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    print("env:// fails:", "RANK expected" in str(error), any("torchmpi" in name for name in modules), flush=True)
print("handler", handlers["env"].__name__, "mpi4py" in sys.modules, flush=True)
dist.init_process_group("gloo", init_method="mpi://")
print("ranks", dist.get_world_size(), "handler", handlers["env"].__name__, flush=True)
dist.barrier()  # gloo fails on a rank that still connects to one that has destroyed its group
dist.destroy_process_group()
"""
    result = job(2, code)
    said(result, "env:// fails: True False", 2)
    said(result, "handler _env_rendezvous_handler False", 2)
    said(result, "ranks 2 handler _env_rendezvous_handler", 2)


@any_mpi
def test_forks_of_multiprocessing_end_without_destroying_the_group(tmp_path, warm_python):
    """A fork ends by os._exit(), which is taken for the failure of a rank elsewhere."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import multiprocessing, sys
import torch, torch.distributed as dist
import torchmpi.distributed

def run(rank, status):
    torchmpi.distributed.register()
    dist.init_process_group("torchmpi", init_method=f"file://{tmp_path}/{{status}}", rank=rank, world_size=2)
    t = torch.ones(3)
    dist.all_reduce(t)
    assert t[0] == 2
    if status:
        sys.exit(status)

if __name__ == "__main__":
    for status in (0, 7):
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=run, args=(rank, status)) for rank in range(2)]
        for each in processes:
            each.start()
        for each in processes:
            each.join()
        print([each.exitcode for each in processes])
""")
    command = [*warm_python, str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, env=job_environment({}))
    assert (result.returncode, result.stdout) == (0, "[0, 0]\n[7, 7]\n"), result.stdout + result.stderr
    assert "ends the job" not in result.stderr, result.stderr


@any_mpi
def test_the_name_mpi_on_demand(alone):
    """Programs ask whether it is there before they use it."""
    code = """
import torch.distributed as dist
print("available", dist.is_mpi_available(), dist.is_backend_available("mpi"), dist.is_backend_available("cpu:mpi"))
print("devices", dist.BackendConfig("mpi").get_device_backend_map())
for name in ("mpi", dist.Backend.MPI, "MPI", "cpu:mpi,cuda:mpi"):
    dist.init_process_group(name)
    assert name.startswith("cpu") or dist.get_backend() == "torchmpi"
    print("backend", dist.get_backend_config(), flush=True)
    dist.destroy_process_group()
dist.init_process_group("cpu:mpi,cuda:nccl")
"""
    asked, not_asked = (
        alone("-c", code, TORCHMPI_AS_MPI="1"),
        alone("-c", code, MASTER_ADDR="127.0.0.1", MASTER_PORT="1"),
    )
    assert "available True True True" in asked.stdout and "{'cpu': 'torchmpi', 'cuda': 'torchmpi'}" in asked.stdout
    assert asked.stdout.count("backend cpu:torchmpi,cuda:torchmpi") == 4, asked.stderr
    assert asked.stderr.count("(TORCHMPI_AS_MPI): torchmpi, 1 rank on 1 host") == 4, asked.stderr
    assert asked.returncode != 0 and "mixes torchmpi with others" in asked.stderr, asked.stderr
    assert not_asked.returncode != 0 and "torchmpi" not in not_asked.stdout, not_asked.stderr
    assert "available False False" in not_asked.stdout, not_asked.stdout


FOR_GLOO = """
import os
import torch
import torch.distributed as dist
from datetime import timedelta

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if LATE:  # as Accelerate and Lightning do
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "1"
for name in ("gloo", None):
    dist.init_process_group(name, rank=rank, world_size=size)
    assert name is None or dist.get_backend() == dist.Backend.GLOO
    pair = dist.new_group(backend="gloo")
    assert dist.get_rank(pair) == rank
    tensor = torch.full((3,), rank + 1)
    dist.all_reduce(tensor, group=pair)
    assert tensor.tolist() == [size * (size + 1) // 2] * 3
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    dist.destroy_process_group()
# In one write, since torchrun mixes the output of the ranks.
sys.stdout.write(f"done by {'torchmpi' if 'torchmpi.distributed.process_group' in sys.modules else 'gloo'}\\n")
"""


@any_mpi
def test_the_name_gloo_on_demand(tmp_path, warm_python):
    """Of programs that `torchmpi run` starts; those of torchrun are below."""
    script = tmp_path / "job.py"
    script.write_text(f"LATE = True\nimport sys\n{FOR_GLOO}")
    command = [*warm_python, "-m", "torchmpi", "run", "-n", "2", "--as", "gloo", str(script)]
    said_gloo(
        subprocess.run(["timeout", "-k", "5", "90", *command], capture_output=True, text=True, env=job_environment({}))
    )


def said_gloo(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0 and result.stdout.count("done by torchmpi") == 2, f"{result.stdout}\n{result.stderr}"
    assert result.stderr.count("(TORCHMPI_AS_GLOO): torchmpi, 2 ranks on 1 host") == 4, result.stderr


@any_mpi
def test_gloo_does_what_torchmpi_rejects(job):
    """Nothing but the version of torch is different, so the group of gloo must work."""
    code = """
import torch
import torch.distributed as dist

torch.__version__ = "2.6.0"
dist.init_process_group("gloo")
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.monitored_barrier()
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
print("sum", tensor.tolist(), type(backend).__name__, dist.get_backend(), dist.get_backend_config(), flush=True)
dist.destroy_process_group()
"""
    result = job(2, code, env={"TORCHMPI_AS_GLOO": "1"})
    said(result, "sum [2.0, 2.0, 2.0] ProcessGroupGloo gloo cpu:gloo,cuda:gloo", 2)
    assert result.stderr.count("(TORCHMPI_AS_GLOO): gloo, 2 ranks, since ") == 1, result.stderr


EXAMPLE = """
import os
import torch
import torch.distributed as dist

names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")  # as ddp/example.py of PyTorch reads them
found = {name: os.environ[name] for name in names}
dist.init_process_group("gloo")
total = torch.tensor(float(found["RANK"]))
dist.all_reduce(total)
ports = [None] * 2
dist.all_gather_object(ports, found["MASTER_PORT"])
print("sum", total.item(), "ports", len(set(ports)), type(dist.group.WORLD).__module__, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("variable", "module"),
    [pytest.param("GLOO", "torchmpi.distributed", marks=any_mpi), ("TORCHRUN", "torch.distributed")],
)
def test_programs_that_read_all_variables_of_torchrun(job, variable, module):
    """Under an mpirun on one host; with TORCHMPI_AS_TORCHRUN alone, gloo itself finds its ranks by them."""
    result = job(2, EXAMPLE, env={f"TORCHMPI_AS_{variable}": "1"})
    assert result.returncode == 0 and result.stdout.count(f"sum 1.0 ports 1 {module}.") == 2, result.output


@any_mpi
def test_a_missing_variable_of_torchrun_is_explained(job):
    result = job(2, EXAMPLE, env={"TORCHMPI_AS_TORCHRUN": "0"})  # a variable that is read at import
    assert result.returncode != 0 and "KeyError: 'MASTER_ADDR'" in result.stderr, result.output
    assert "does not set MASTER_ADDR, as torchrun does. `torchmpi run -n 2 PROGRAM` sets it" in result.stderr


@any_mpi
def test_importing_torch_loads_only_the_registration():
    code = """
import sys, torch
import torch.distributed as dist
print(*sorted(sys.modules))
print("known", hasattr(dist.Backend, "TORCHMPI"))
"""
    with_us, without = cold(code), cold(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "known True" in with_us.stdout, with_us.stderr
    assert "known False" in without.stdout, without.stderr
    new = set(with_us.stdout.split()) - set(without.stdout.split()) - {"True"}
    foreign = {name for name in new if not name.startswith("torchmpi")}
    # Modules of the standard library for entry points are allowed.
    assert not {name.split(".")[0] for name in foreign} & {"mpi4py", "numba", "llvmlite", "numpy", "torch"}, foreign
    ours = new - foreign
    assert len(ours) <= 8 and not any("backends" in name or "kernels" in name for name in ours), ours


@any_mpi
def test_a_failed_registration_does_not_break_importing_torch():
    code = """
import sys
sys.modules["torchmpi.distributed.torch_names"] = None  # as if another torch had none of the private names
import torch
print("torch works:", torch.ones(2).sum().item())
"""
    result = cold(code)
    assert result.returncode == 0 and "torch works: 2.0" in result.stdout, result.stderr
    assert "torchmpi cannot be used as a torch.distributed backend here" in result.stderr, result.stderr


FOR_TORCHMPI = """
import torch
import torch.distributed as dist
for _ in range(2):
    dist.init_process_group("torchmpi")
    tensor = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    work = dist.all_reduce(torch.ones(300000), async_op=True)
    message = torch.empty(1000)
    sent = dist.isend(torch.full((1000,), float(dist.get_rank())), 1 - dist.get_rank())
    dist.recv(message)
    sent.wait(), work.wait()
    # In one write, since torchrun mixes the output of the ranks.
    sys.stdout.write(f"sum {tensor.tolist()} message {message[0].item() == 1 - dist.get_rank()}\\n")
    dist.destroy_process_group()

import torchmpi as mpi
for _ in range(2):
    mpi.start()
    sys.stdout.write(f"rank {mpi.rank()} of {mpi.size()} sum {mpi.allreduce(mpi.rank() + 1)}\\n")
    mpi.stop()
sys.stdout.write(f"mpi4py loaded: {'mpi4py' in sys.modules}\\n")
"""


@pytest.mark.quick
@any_mpi
@pytest.mark.skipif(
    importlib.util.find_spec("torchmpi.launch.launcherless") is None,
    reason="torchmpi.launch.launcherless is not there",
)
def test_torchrun_without_mpi(tmp_path, warm_python):
    """The ranks connect through torchrun's store: a program of torch, one of torchmpi, and one that names gloo."""
    script = tmp_path / "job.py"
    script.write_text(f"LATE = False\nimport sys\n{FOR_TORCHMPI}{FOR_GLOO}")
    command = [*warm_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        ["timeout", "-k", "5", "90", *command],
        capture_output=True, text=True, env=job_environment({"TORCHMPI_AS_GLOO": "1"}),
    )  # fmt: skip
    said_gloo(done)
    assert done.stdout.count("sum [3.0, 3.0, 3.0] message True") == 4, done.stdout + done.stderr
    assert done.stdout.count("rank 0 of 2 sum 3") == done.stdout.count("rank 1 of 2 sum 3") == 2, done.stdout
    assert done.stdout.count("mpi4py loaded: False") == 2, done.stdout + done.stderr
