"""Checks of GPUs: whether ranks see them, and by which ways they reach each other."""

from __future__ import annotations

from collections import Counter

from ..backends.devices import ipc_groups
from .facts import Facts, ProcessFacts
from .finding import Finding
from .layout import counted, shortened


def check_cuda(facts: Facts) -> Finding | None:
    """Do the ranks see the GPUs that are there, each its own?"""
    name = "CUDA"
    for process in facts.processes:
        trouble = _hidden_gpus(process)
        if trouble is not None:
            return trouble
    without = [str(rank) for rank, process in enumerate(facts.processes) if not process.cuda_available]
    if len(without) == len(facts.processes):
        return Finding(name, "ok", "no GPU here, nor one that torch could use: devices are CPUs")
    if without:
        remedy = "Give all ranks hosts with GPUs, or start on the CPU: mpi.start(with_cuda=False)."
        return Finding(name, "problem", f"rank {shortened(without)} sees no GPU, the others do", remedy)
    for ranks in facts.by_machine().values() if facts.in_job else ():
        used, most = _ranks_on_gpus(ranks), _most_on_one_gpu(ranks)
        if most > 1:
            gpus = counted(len(used), "GPU")
            found = f"{len(ranks)} ranks on {ranks[0].host} share {gpus}, {most} on one of them"
            remedy = "Start one rank per GPU, each with its own (srun --gpus-per-task=1, scripts/wrap.sh --gpu)."
            return Finding(name, "warning", found, remedy)
    first = facts.processes[0]
    found = f"{counted(len(first.gpus), 'GPU')} in sight of a rank, torch built for CUDA {first.cuda_built}"
    return Finding(name, "ok", found)


def _hidden_gpus(process: ProcessFacts) -> Finding | None:
    """Why torch sees no GPU on a host that has one."""
    if process.cuda_available or not process.has_nvidia_driver:
        return None
    visible = process.environment.get("CUDA_VISIBLE_DEVICES")
    if process.cuda_built is None:
        torch_version = process.versions["torch"]
        found = f"{process.host} has an NVIDIA driver, but torch {torch_version} was built without CUDA"
        return Finding("CUDA", "warning", found, "Install a torch wheel for CUDA, unless the CPU is what you want.")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        found = f"CUDA_VISIBLE_DEVICES={visible!r} hides all GPUs on {process.host}"
        return Finding("CUDA", "warning", found, "Unset it, unless the CPU is what you want.")
    return Finding(
        "CUDA",
        "problem",
        f"{process.host} has an NVIDIA driver, but torch (CUDA {process.cuda_built}) can use no GPU"
        + (f"; CUDA_VISIBLE_DEVICES={visible}" if visible else ""),
        'Run `nvidia-smi` and `python -c "import torch; torch.cuda.init()"`: the driver may be too old for this '
        "torch, CUDA_VISIBLE_DEVICES may name a GPU that is not there, or the container lacks --gpus all.",
    )


def check_nccl(facts: Facts) -> Finding | None:
    """Is there an NCCL to load?"""
    for process in facts.processes:
        if process.cuda_available and process.nccl_error is not None:
            found = f"backend nccl cannot be had on {process.host}: {process.nccl_error}"
            return Finding("NCCL", "warning", found, "Without it, GPUs of several hosts go through host memory.")
    versions = dict.fromkeys(process.nccl for process in facts.processes if process.nccl is not None)
    if len(versions) > 1:
        found = f"the ranks have different versions: {shortened(versions)}"
        return Finding("NCCL", "problem", found, "Start the same Python environment on all hosts.")
    return Finding("NCCL", "ok", f"version {next(iter(versions))}") if versions else None


def check_peers(facts: Facts) -> Finding | None:
    """Can the GPUs of a host read each other's memory?"""
    for process in facts.processes:
        numbers = ipc_groups(process.peer_access)
        groups: dict[int, list[str]] = {}
        for index, number in enumerate(numbers):
            groups.setdefault(number, []).append(str(index))
        if len(groups) > 1:
            found = (
                f"the {len(numbers)} GPUs that a rank sees on {process.host} fall into groups that reach each other: "
                f"{shortened(('+'.join(group) for group in groups.values()), separator=' | ')}"
            )
            remedy = (
                "See `nvidia-smi topo -m`. On some boards this is how it is; an IOMMU, PCIe ACS or a virtual machine "
                "may switch it off too. Backend ipc works inside the groups, nccl everywhere."
            )
            return Finding("peer access", "warning", found, remedy)
    most = max((len(process.peer_access) for process in facts.processes), default=0)
    return Finding("peer access", "ok", f"all {most} GPUs reach each other") if most > 1 else None


def check_ipc(facts: Facts) -> Finding | None:
    """May processes open each other's memory on a GPU?"""
    test = facts.self_test
    if test is None or test.gpu_memory is None:
        return None
    if not test.gpu_memory:
        return Finding("CUDA IPC", "ok", "ranks can open each other's memory on the GPU")
    remedy = (
        "Start all ranks of a host in one container, or their containers with --ipc=host --pid=host; virtual GPUs and "
        "WSL may have no CUDA IPC at all. backend='ipc' will not work until then."
    )
    return Finding("CUDA IPC", "problem", f"ranks cannot open each other's memory: {test.gpu_memory}", remedy)


def check_mps(facts: Facts) -> Finding | None:
    """Where ranks share a GPU: does the Multi-Process Service let them use it at the same time?"""
    for ranks in facts.by_machine().values():
        first, pipe = ranks[0], ranks[0].environment.get("CUDA_MPS_PIPE_DIRECTORY")
        if first.mps is None and pipe is not None:
            found = f"CUDA_MPS_PIPE_DIRECTORY={pipe} on {first.host}, but no daemon answers there"
            return Finding("MPS", "warning", found, "Start it with nvidia-cuda-mps-control -d, or unset the variable.")
        if not facts.in_job or _most_on_one_gpu(ranks) < 2:
            continue
        if first.mps is None:
            found = f"ranks on {first.host} share a GPU and take turns on it: one waits while another computes"
            remedy = "Start the daemon before the job, nvidia-cuda-mps-control -d: then they compute at the same time."
            return Finding("MPS", "warning", found, remedy)
        return Finding("MPS", "ok", f"a daemon at {first.mps} lets the ranks on {first.host} share their GPU")
    return None


def _most_on_one_gpu(ranks: list[ProcessFacts]) -> int:
    return max(_ranks_on_gpus(ranks).values(), default=0)


def _ranks_on_gpus(ranks: list[ProcessFacts]) -> Counter[str]:
    """How many ranks of a host start() puts on each GPU."""
    return Counter(rank.gpus[index % len(rank.gpus)] for index, rank in enumerate(ranks) if rank.gpus)
