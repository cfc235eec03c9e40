"""To a user of scripts/: common.sh chooses the right tools, wrap.sh the right cores, and ompirun.sh starts jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
WRAP = SCRIPTS / "wrap.sh"
OMPIRUN = SCRIPTS / "ompirun.sh"
NUM_CORES = len(os.sched_getaffinity(0))

# All variables by which launchers describe the rank of a process; removed before each test.
PLACES = ("OMPI_", "PMI", "MPI_LOCAL", "MV2_", "SLURM_", "PALS_", "FLUX_", "PRTE_", "HYDI_")


def place(**variables: str) -> dict[str, str]:
    """An environment in which a launcher has set just these variables."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(PLACES)}
    keep.pop("CUDA_VISIBLE_DEVICES", None)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return keep | root | variables


def run(
    command: Sequence[str | Path], env: Mapping[str, str] | None = None, *, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    limited = ["timeout", "--foreground", "-k", "5", str(timeout), *map(str, command)]
    return subprocess.run(
        limited, capture_output=True, text=True, env=dict(env or place()), stdin=subprocess.DEVNULL, check=False
    )


@pytest.fixture
def path(mpirun: list[str]) -> str:
    """PATH with the launcher and the Python of this environment in front."""
    front = [str(Path(program).parent) for program in (mpirun[0], sys.executable)]
    return os.pathsep.join([*front, os.environ["PATH"]])


def common(code: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Bash code after sourcing common.sh, with the private environments under tmp_path."""
    environment = place(VENV_DIR=str(tmp_path / "environments"), PYTHON=sys.executable, **variables)
    return run(["bash", "-c", f"set -euo pipefail; . {SCRIPTS}/common.sh; {code}"], environment)


def program(folder: Path, name: str, text: str) -> Path:
    """An executable that prints text."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / name
    made.write_text(f"#!/bin/sh\ncat <<'TEXT'\n{text}\nTEXT\n")
    made.chmod(0o755)
    return made


# ---- every script ----


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda script: script.name)
def test_script_parses(script: Path) -> None:
    assert run(["bash", "-n", script]).stderr == ""


@pytest.mark.parametrize("name", ["quickstart.sh", "test_cpu.sh", "test_gpu.sh", "wrap.sh", "ompirun.sh"])
def test_help_needs_nothing(name: str, tmp_path: Path) -> None:
    done = run([SCRIPTS / name, "--help"], place(VENV_DIR=str(tmp_path / "environments")))
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ") and name in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["quickstart.sh", "--rank", "4"], "unknown option '--rank'"),
        (["quickstart.sh", "-n", "many"], "-n needs a number of ranks, not 'many'"),
        (["quickstart.sh", "-n"], "an option lacks its value"),
        (["quickstart.sh", "--mpi", "lam"], "unknown MPI 'lam'"),
        (["test_cpu.sh", "--fast"], "unknown option '--fast'"),
        (["test_cpu.sh", "--mpi", "lam"], "unknown MPI 'lam'"),
        (["wrap.sh", "--bin", "true"], "unrecognized arguments: --bin"),
        (["wrap.sh", "--gpu"], "no command to run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_refused(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    done = run([SCRIPTS / arguments[0], *arguments[1:]], place(VENV_DIR=str(tmp_path / "environments")))
    assert done.returncode not in (0, 124)
    assert complaint in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---- common.sh: Python and environments ----


def test_a_python_that_is_too_old_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = common(f"PYTHON={old} find_python", tmp_path)
    assert done.returncode == 1
    assert "no Python 3.10 or newer found" in done.stderr and str(old) in done.stderr


def test_an_environment_is_ready_until_its_python_or_extras_change(tmp_path: Path) -> None:
    done = common(
        """
        find_python
        home=$environments/openmpi
        environment_ready openmpi examples && echo "ready before it exists"
        mkdir -p "$home/bin"
        ln -s "$python" "$home/bin/python"
        { fingerprint openmpi; printf '%s\\n' examples openmpi; } >"$home/installed"
        environment_ready openmpi examples && echo ready
        environment_ready openmpi dev || echo "not with dev"
        checkout=$environments
        mkdir -p "$checkout" && touch "$checkout"/{setup.cfg,pyproject.toml,constraints.txt}
        environment_ready openmpi examples || echo "not for another checkout"
        """,
        tmp_path,
    )
    assert done.stdout.splitlines() == ["ready", "not with dev", "not for another checkout"], done.stderr


# ---- common.sh: which MPI ----

VERSIONS = {
    "mpirun (Open MPI) 4.1.4": "openmpi",
    "mpirun (Open MPI) 5.0.11": "openmpi",
    "HYDRA build details:\n    Version:      5.0.2": "mpich",
    "Intel(R) MPI Library for Linux* OS, Version 2021.13": "mpich",
    "LAM 7.1.4": "unknown",
}


@pytest.mark.parametrize(("version", "kind"), VERSIONS.items())
def test_kind_of_a_launcher(version: str, kind: str, tmp_path: Path) -> None:
    launcher = program(tmp_path, "mpirun", version)
    assert common(f"mpi_kind {launcher}", tmp_path).stdout.strip() == kind


def test_the_system_launcher_is_not_that_of_a_virtual_environment(tmp_path: Path) -> None:
    ours = program(tmp_path / "environments" / "mpich" / "bin", "mpirun", "HYDRA build details:")
    strange = program(tmp_path / "strange", "mpirun", "LAM 7.1.4")
    system = program(tmp_path / "system", "mpiexec", "mpiexec (Open MPI) 4.1.4")
    folders = [*(str(found.parent) for found in (ours, strange, system)), os.environ["PATH"]]
    done = common('find_system_launcher && echo "$system_launcher"', tmp_path, PATH=os.pathsep.join(folders))
    assert done.stdout.strip() == str(system)


def test_a_library_of_another_name_is_linked_under_the_name_that_mpi4py_loads(tmp_path: Path) -> None:
    launcher = program(tmp_path / "prefix" / "bin", "mpirun", "HYDRA build details:")
    wrapper = tmp_path / "environments" / "system" / "bin" / "mpirun"
    wrapper.parent.mkdir(parents=True)
    common(f"system_launcher={launcher}; adopt_launcher /usr/lib/libmpich.so.12", tmp_path)
    link = tmp_path / "environments" / "system" / "lib" / "mpi" / "libmpi.so.12"
    assert os.readlink(link) == "/usr/lib/libmpich.so.12"
    # The wrapper starts the system's launcher, which sees the link.
    launcher.write_text('#!/bin/sh\necho "$MPI4PY_LIBMPI $LD_LIBRARY_PATH $*"\n')
    done = run([wrapper, "-n", "2", "two words"], place(LD_LIBRARY_PATH="/elsewhere"))
    assert done.stdout.strip() == f"{link} {link.parent}:/elsewhere -n 2 two words"


# ---- wrap.sh ----

LAUNCHERS = {
    "Open MPI": "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
    "MPICH": "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
    "MVAPICH": "MV2_COMM_WORLD_RANK=5 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2",
    "srun": "SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_STEP_NUM_TASKS=10 SLURM_STEP_TASKS_PER_NODE=4(x2),2",
    # The variables of the batch script are still there when mpirun starts the ranks.
    "Open MPI in a batch job": "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=1",
}
SHOW_CORES = "import os; print('cores', *sorted(os.sched_getaffinity(0)), flush=True)"


@pytest.mark.skipif(NUM_CORES < 2, reason="needs two cores")
@pytest.mark.parametrize("variables", LAUNCHERS.values(), ids=LAUNCHERS)
def test_log_gpu_and_cores_follow_from_the_variables_of_the_launcher(variables: str, tmp_path: Path) -> None:
    environment = place(**dict(variable.split("=") for variable in variables.split()), CUDA_VISIBLE_DEVICES="4,7")
    show = f"{SHOW_CORES}; print('gpu', os.environ['CUDA_VISIBLE_DEVICES'])"
    done = run([WRAP, "--gpu", "--log-dir", tmp_path, sys.executable, "-c", show], environment)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    cores, gpu = (tmp_path / "rank5.log").read_text().splitlines()
    assert len(cores.split()) - 1 == NUM_CORES - NUM_CORES // 2
    assert gpu == "gpu 7"


def test_alone_it_is_rank_0_of_1(tmp_path: Path) -> None:
    done = run([WRAP, "--log-dir", tmp_path, "echo", "two words"])
    assert done.stdout == (tmp_path / "rank0.log").read_text() == "two words\n", done.stderr


def test_without_a_local_rank_nothing_is_guessed() -> None:
    unknown = place(PMI_RANK="1", PMI_SIZE="2")
    done = run([WRAP, sys.executable, "-c", SHOW_CORES], unknown)
    assert len(done.stdout.split()) - 1 == NUM_CORES
    done = run([WRAP, "--gpu", "true"], unknown)
    assert done.returncode != 0
    assert "the launcher does not tell the rank within the host" in done.stderr


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"), [("4,7", 0, "4"), ("4,7", 1, "7"), ("4,7", 2, "4"), ("GPU-8a", 3, "GPU-8a")]
)
def test_gpus_are_assigned_round_robin_by_local_rank(visible: str, local_rank: int, expected: str) -> None:
    numbers = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank)}
    environment = place(CUDA_VISIBLE_DEVICES=visible, **numbers)
    done = run([WRAP, "--no-bind", "--gpu", "printenv", "CUDA_VISIBLE_DEVICES"], environment)
    assert done.stdout.strip() == expected


@pytest.mark.parametrize("options", [[], ["--no-bind"]], ids=["too many ranks", "not wanted"])
def test_ranks_are_left_unbound(options: list[str]) -> None:
    size = 1 if options else NUM_CORES + 1
    numbers = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": str(size)}
    done = run([WRAP, *options, sys.executable, "-c", SHOW_CORES], place(**numbers))
    assert len(done.stdout.split()) - 1 == NUM_CORES, done.stderr


def test_variables_for_the_wrapper(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a\nb\n")
    done = run([WRAP, "printenv", "MPI_MY_NODE", "MPI_NODES"], place(HOSTFILE=str(hosts)))
    assert done.stdout.splitlines() == [os.uname().nodename, "a", "b"]
    for variable, remedy in (("NVPROF", "nsys profile"), ("LOG_TO_FILE", "--log-dir")):
        done = run([WRAP, "true"], place(**{variable: "1"}))
        assert done.returncode == 2 and remedy in done.stderr


# ---- wrap.sh and ompirun.sh around jobs ----


@pytest.mark.skipif(NUM_CORES < 2, reason="needs two cores")
def test_ranks_get_cores_of_their_own_and_a_log_each(path: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    command = [OMPIRUN, "-n", "2", WRAP, "--log-dir", logs, sys.executable, "-c", SHOW_CORES]
    done = run(command, place(PATH=path))
    assert done.returncode == 0, done.stderr
    shares = [set((logs / f"rank{rank}.log").read_text().split()[1:]) for rank in range(2)]
    assert shares[0] and shares[1] and not shares[0] & shares[1]
    assert shares[0] | shares[1] == {str(core) for core in os.sched_getaffinity(0)}
    # Only the output of rank 0 also appears on the terminal.
    assert done.stdout.count("cores") == 1


def test_the_status_of_a_rank_is_that_of_the_job(path: str, tmp_path: Path) -> None:
    command = [OMPIRUN, "-n", "2", WRAP, "--log-dir", tmp_path, sys.executable, "-c", "raise SystemExit(3)"]
    assert run(command, place(PATH=path)).returncode == 3


def test_variables_for_the_launcher(path: str, mpirun: list[str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a:2\nb:2\n")
    command = [OMPIRUN, "--dry-run", "-n", "3", "--timeout", "9", "echo", "a b"]
    done = run(command, place(PATH=path, HOSTFILE=str(hosts), OMPI_OPTIONS="--map-by core"))
    assert done.stdout.startswith(mpirun[0]) and done.stdout.endswith("-- echo 'a b'\n"), done.stderr
    assert " a:2,b:1 " in done.stdout and " --map-by core -n 3 " in done.stdout
    missing = run(command, place(PATH=path, HOSTFILE="/no/hosts"))
    assert missing.returncode == 1 and "--hostfile /no/hosts: there is no such file" in missing.stderr


def test_a_time_limit_ends_the_job(path: str) -> None:
    done = run([OMPIRUN, "-n", "2", "--timeout", "2", "sleep", "50"], place(PATH=path))
    assert done.returncode == 124


def test_sigterm_reaches_the_ranks(path: str, tmp_path: Path) -> None:
    code = "import os, pathlib, sys, time\npathlib.Path(sys.argv[1], str(os.getpid())).touch()\ntime.sleep(50)\n"
    # After two consecutive SIGTERMs Open MPI 4.1 ends without its ranks, hence --foreground here and in the script.
    command = ["timeout", "--foreground", "-k", "5", "60", OMPIRUN, "-n", "2", sys.executable, "-c", code, tmp_path]
    job = subprocess.Popen(command, env=place(PATH=path), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=400) != 0
    pids = [int(found.name) for found in tmp_path.iterdir()]
    assert len(pids) == 2
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline + 10:
        time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
