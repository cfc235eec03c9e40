"""Checks of the machine: cores, binding, CPU quota, shared memory."""

from __future__ import annotations

from collections import Counter

from ..facts import THREAD_VARIABLES, Facts, Finding, Findings, ProcessFacts
from ..formatting import core_list, counted, shortened

_MIB = 1 << 20
_SHM_SMALL_BYTES = 256 * _MIB  # Docker gives 64 MiB
# Per rank: MPICH's segments take about 3 MiB, those of Open MPI and of DataLoader workers more.
_SHM_NEEDED_BYTES = 16 * _MIB


def check_cores(facts: Facts) -> Findings:
    """Check that there are at least as many cores as ranks."""
    if not facts.in_job:
        return _check_cores_alone(facts)
    if not facts.ranks:
        return None
    placed, crowded = [], []
    for ranks in facts.by_machine().values():
        host, num_cores = ranks[0].host, ranks[0].num_cpus
        if len(ranks) > num_cores:
            found = f"{len(ranks)} ranks share {counted(num_cores, 'core')} on {host}, which is slow"
            remedy = f"Start at most {counted(num_cores, 'rank')} there, except for tests."
            crowded.append(Finding("cores", "warning", found, remedy))
        placed.append(f"{counted(len(ranks), 'rank')} on {host} ({counted(num_cores, 'core')})")
    return crowded or Finding("cores", "ok", shortened(placed))


def _check_cores_alone(facts: Facts) -> Finding:
    here, cores, physical = facts.here, len(facts.here.cores), facts.here.num_physical_cores
    threads = f" with {cores} hardware threads" if physical < cores else ""
    found = f"{counted(physical, 'core')}{threads} for this process, of {here.num_cpus} in the machine"
    if cores == 1 < here.num_cpus:
        remedy = "Start from a shell that is not bound (taskset, cgroup), or give the container more cores."
        return Finding("cores", "warning", found, remedy)
    if physical == 1:
        remedy = "Ranks will share it; Open MPI needs --oversubscribe for more than one."
        return Finding("cores", "warning", found, remedy)
    more = "; for more ranks, Open MPI needs --oversubscribe" if facts.uses_open_mpi else ""
    return Finding("cores", "ok", found + more)


def check_binding(facts: Facts) -> Findings:
    """Check that ranks do not share cores while others are free."""
    if not facts.ranks:
        return None
    findings = [_check_binding_of(ranks) for ranks in facts.by_machine().values()]
    return [finding for finding in findings if finding.verdict != "ok"] or findings[0]


def _check_binding_of(ranks: list[ProcessFacts]) -> Finding:
    first, name = ranks[0], "binding"
    union = {core for rank in ranks for core in rank.cores}
    sharing = max(Counter(core for rank in ranks for core in rank.cores).values())
    masks = shortened((core_list(rank.cores) for rank in ranks), separator=" | ")
    where = f"on {first.host}"
    if sharing == 1:
        return Finding(name, "ok", f"each rank has its own cores: {masks}")
    if len(union) == 1 < first.num_cpus:
        found = f"all {len(ranks)} ranks {where} are bound to core {min(union)}, of {first.num_cpus}"
        remedy = (
            "Start mpirun from a process that is not bound itself, and without binding: `mpirun --bind-to none` "
            "(Open MPI), `mpiexec -bind-to none` (MPICH), `srun --cpu-bind=none`. torchmpi then gives each rank "
            "its own cores."
        )
        return Finding(name, "problem", found, remedy)
    if len(union) < len(ranks):
        if len(union) == first.num_cpus:
            return Finding(name, "ok", f"nothing to bind {where}: {counted(len(union), 'core')} for all ranks")
        found = f"{len(ranks)} ranks {where} may use only cores {core_list(union)} of {first.num_cpus}"
        remedy = "Start fewer ranks there, or allow them more cores (container, cgroup, --cpus-per-task)."
        return Finding(name, "warning", found, remedy)
    if any(list(rank.cores) != list(first.cores) for rank in ranks):
        found = f"up to {sharing} ranks {where} share a core: {masks}"
        remedy = "Let the launcher bind each rank to its own cores, or bind none (--bind-to none): torchmpi then binds."
        return Finding(name, "warning", found, remedy)
    if first.settings["bind"] == "none":
        found = f"{len(ranks)} ranks {where} share cores {core_list(union)}, because of TORCHMPI_BIND=none"
        remedy = "Unset it, or let the launcher bind: ranks that share a core are several times slower."
        return Finding(name, "warning", found, remedy)
    return Finding(name, "ok", f"bound by torchmpi, which gives each rank {where} its own of cores {core_list(union)}")


def check_sessions(facts: Facts) -> Findings:
    """Check that the ranks of a host do not get the share of one program of its cores."""
    if not facts.in_job:
        return None
    sharing = []
    for ranks in facts.by_machine().values():
        sessions = {rank.session for rank in ranks}
        # Ranks that share cores have to yield them to each other, which works within a session only.
        if len(sessions) < len(ranks) <= ranks[0].num_cpus and None not in sessions:
            found = (
                f"the {len(ranks)} ranks on {ranks[0].host} are in {counted(len(sessions), 'session')}, and Linux "
                "divides the cores between sessions: while other programs run, the ranks get the share of one"
            )
            remedy = (
                "Start with torchmpi run, which gives each rank a session of its own, or as root: "
                "sysctl kernel.sched_autogroup_enabled=0."
            )
            sharing.append(Finding("sessions", "warning", found, remedy))
    return sharing or None


def check_threads(facts: Facts) -> Findings:
    """Check that variables for the number of threads are numbers, and no more than the CPUs of the machine."""
    findings, given = [], False
    for process in facts.processes:
        values = {name: process.environment[name] for name in THREAD_VARIABLES if name in process.environment}
        if threads := process.settings.get("threads"):
            values["TORCHMPI_THREADS"] = str(threads)
        for name, value in values.items():
            given = True
            # OpenMP accepts a list, one number for each level of nested regions.
            counts = value.replace(" ", "").split(",")
            if not all(count.isdigit() and int(count) > 0 for count in counts):
                found = f"{name}={value!r} on {process.host} is no number of threads"
                remedy = f"Set it to a number of at least 1, or unset {name}."
                findings.append(Finding("threads", "problem", found, remedy))
            elif int(counts[0]) > process.num_cpus:
                found = f"{name}={value} on {process.host}, which has {counted(process.num_cpus, 'CPU')}"
                remedy = f"Unset {name}: start() gives torch one thread for each core of the rank, and more are slower."
                findings.append(Finding("threads", "warning", found, remedy))
    return findings or (Finding("threads", "ok", "the variables for threads are plausible") if given else None)


def check_quota(facts: Facts) -> Findings:
    """Check that the CPU quota of the container is not below its number of cores."""
    low = []
    for ranks in facts.by_machine().values():
        quota, num_cores = ranks[0].cpu_quota, len({core for rank in ranks for core in rank.cores})
        if quota is not None and quota < num_cores:
            fitting = counted(max(1, int(quota)), "rank")
            found = (
                f"the container on {ranks[0].host} has a quota of {quota:g} CPUs for "
                f"{counted(num_cores, 'core')}: when it is used up, all processes are suspended until the next period"
            )
            remedy = f"Raise the limit (docker run --cpus), or start at most {fitting} there."
            low.append(Finding("CPU quota", "warning", found, remedy))
    return low or Finding("CPU quota", "ok", "no limit below the number of cores")


def check_shared_memory(facts: Facts) -> Findings:
    """Check that /dev/shm exists, is writable and large enough."""
    machines = sorted(facts.by_machine().values(), key=lambda ranks: ranks[0].shm_free_bytes)
    findings = [_check_shared_memory_of(ranks) for ranks in machines]
    return [finding for finding in findings if finding.verdict != "ok"] or findings[0]


def _check_shared_memory_of(ranks: list[ProcessFacts]) -> Finding:
    first, name, needed = ranks[0], "shared memory", _SHM_NEEDED_BYTES * max(2, len(ranks))
    if first.shm_total_bytes is None or not first.shm_is_writable:
        state = "not there" if first.shm_total_bytes is None else "not writable"
        remedy = "Mount it: mount -t tmpfs -o mode=1777 tmpfs /dev/shm (docker run --shm-size=1g)."
        found = f"/dev/shm is {state} on {first.host}: Open MPI uses slower transports there, and MPICH does not start"
        return Finding(name, "warning", found, remedy)
    total, free = first.shm_total_bytes // _MIB, first.shm_free_bytes // _MIB
    found = f"/dev/shm on {first.host}: {free} of {total} MiB free"
    if first.shm_free_bytes < needed:
        remedy = f"MPI needs about {needed // _MIB} MiB: delete files of ended jobs, or docker run --shm-size=1g."
        return Finding(name, "problem", found, remedy)
    if first.shm_total_bytes < _SHM_SMALL_BYTES:
        remedy = "In a container, 64 MiB is the default: docker run --shm-size=1g, or --ipc=host."
        found += ", which DataLoader workers and large messages use up"
        return Finding(name, "warning", found, remedy)
    return Finding(name, "ok", found)


def check_leftovers(facts: Facts) -> Findings:
    """Check that ended jobs have not left files in /dev/shm."""
    left = []
    for ranks in facts.by_machine().values():
        files = ranks[0].leftovers
        if files:
            found = f"{counted(len(files), 'file')} of ended jobs on {ranks[0].host}: {shortened(files, most=3)}"
            remedy = "Delete them, unless a container that shares this /dev/shm runs one of your jobs."
            left.append(Finding("leftovers", "warning", found, remedy))
    return left or Finding("leftovers", "ok", "no files of ended jobs in /dev/shm")
