"""Checks of GPUs: visibility, NCCL, peer access, CUDA IPC and the Multi-Process Service."""

from __future__ import annotations

from collections import Counter

from ...backends.gpus import ipc_groups
from ..facts import Facts, Finding, Findings, ProcessFacts
from ..formatting import counted, shortened


def check_cuda(facts: Facts) -> Findings:
    """Check that each rank can use a GPU of its own, if there are GPUs."""
    name = "CUDA"
    if hidden := [finding for process in facts.processes if (finding := _hidden_gpus(process)) is not None]:
        return hidden
    without = [str(rank) for rank, process in enumerate(facts.processes) if not process.cuda_available]
    if len(without) == len(facts.processes):
        return Finding(name, "ok", "torch finds no GPU: devices are CPUs")
    if without:
        remedy = "Give all ranks hosts with GPUs, or start on the CPU: mpi.start(with_cuda=False)."
        return Finding(name, "problem", f"rank {shortened(without)} sees no GPU, the others do", remedy)
    shared = []
    for ranks in facts.by_machine().values() if facts.in_job else ():
        used, most = _ranks_on_gpus(ranks), _most_on_one_gpu(ranks)
        if most > 1:
            gpus = counted(len(used), "GPU")
            found = f"{len(ranks)} ranks on {ranks[0].host} share {gpus}, {most} on one of them"
            remedy = "Start one rank per GPU, each with its own (srun --gpus-per-task=1, scripts/wrap.sh --gpu)."
            shared.append(Finding(name, "warning", found, remedy))
    first = facts.processes[0]
    found = f"{counted(len(first.gpus), 'GPU')} visible to a rank, torch built for CUDA {first.cuda_built}"
    return shared or Finding(name, "ok", found)


def _hidden_gpus(process: ProcessFacts) -> Finding | None:
    if process.cuda_available or not process.has_nvidia_driver:
        return None
    visible = process.environment.get("CUDA_VISIBLE_DEVICES")
    if process.cuda_built is None:
        torch_version = process.versions["torch"]
        found = f"{process.host} has an NVIDIA driver, but torch {torch_version} was built without CUDA"
        return Finding("CUDA", "warning", found, "Install a torch wheel for CUDA, unless you want to use the CPU.")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        found = f"CUDA_VISIBLE_DEVICES={visible!r} hides all GPUs on {process.host}"
        return Finding("CUDA", "warning", found, "Unset it, unless you want to use the CPU.")
    return Finding(
        "CUDA",
        "problem",
        f"{process.host} has an NVIDIA driver, but torch (CUDA {process.cuda_built}) can use no GPU"
        + (f"; CUDA_VISIBLE_DEVICES={visible}" if visible else ""),
        'Run `nvidia-smi` and `python -c "import torch; torch.cuda.init()"`: the driver may be too old for this '
        "torch, CUDA_VISIBLE_DEVICES may name a GPU that is not there, or the container lacks --gpus all.",
    )


def check_nccl(facts: Facts) -> Findings:
    """Check that NCCL can be loaded, in the same version on all ranks."""
    findings = []
    for process in facts.processes:
        if process.cuda_available and process.nccl_error is not None:
            found = f"backend nccl is not available on {process.host}: {process.nccl_error}"
            remedy = "Without it, GPUs of several hosts go through host memory."
            findings.append(Finding("NCCL", "warning", found, remedy))
    versions = dict.fromkeys(process.nccl for process in facts.processes if process.nccl is not None)
    if len(versions) > 1:
        found = f"the ranks have different versions: {shortened(versions)}"
        findings.append(Finding("NCCL", "problem", found, "Start the same Python environment on all hosts."))
    return findings or (Finding("NCCL", "ok", f"version {next(iter(versions))}") if versions else None)


def check_peers(facts: Facts) -> Findings:
    """Check that the GPUs of a host can access each other's memory."""
    findings = []
    for process in facts.processes:
        numbers = ipc_groups(process.peer_access)
        groups: dict[int, list[str]] = {}
        for index, number in enumerate(numbers):
            groups.setdefault(number, []).append(str(index))
        if len(groups) > 1:
            found = (
                f"the {len(numbers)} GPUs that a rank sees on {process.host} form groups that can access each other: "
                f"{shortened(('+'.join(group) for group in groups.values()), separator=' | ')}"
            )
            remedy = (
                "See `nvidia-smi topo -m`. On some boards this is normal; an IOMMU, PCIe ACS or a virtual machine can "
                "also disable peer access. Backend ipc works inside the groups, nccl everywhere."
            )
            findings.append(Finding("peer access", "warning", found, remedy))
    most = max((len(process.peer_access) for process in facts.processes), default=0)
    return findings or (Finding("peer access", "ok", f"all {most} GPUs can access each other") if most > 1 else None)


def check_ipc(facts: Facts) -> Finding | None:
    """Report whether processes can open each other's memory on a GPU."""
    test = facts.self_test
    if test is None or test.gpu_memory is None:
        return None
    if not test.gpu_memory:
        return Finding("CUDA IPC", "ok", "ranks can open each other's memory on the GPU")
    remedy = (
        "Start all ranks of a host in one container, or their containers with --ipc=host --pid=host; virtual GPUs and "
        "WSL may not support CUDA IPC. Until then backend='ipc' does not work."
    )
    return Finding("CUDA IPC", "problem", f"ranks cannot open each other's memory: {test.gpu_memory}", remedy)


def check_mps(facts: Facts) -> Findings:
    """Check that the Multi-Process Service runs where ranks share a GPU."""
    findings, working = [], None
    for ranks in facts.by_machine().values():
        first, pipe = ranks[0], ranks[0].environment.get("CUDA_MPS_PIPE_DIRECTORY")
        if first.mps is None and pipe is not None:
            found = f"CUDA_MPS_PIPE_DIRECTORY={pipe} on {first.host}, but no daemon listens there"
            remedy = "Start it with nvidia-cuda-mps-control -d, or unset the variable."
            findings.append(Finding("MPS", "warning", found, remedy))
        elif not facts.in_job or _most_on_one_gpu(ranks) < 2:
            continue
        elif first.mps is None:
            found = f"ranks on {first.host} share a GPU, and only one of them at a time can compute on it"
            remedy = "Start the daemon before the job: nvidia-cuda-mps-control -d. Ranks then compute concurrently."
            findings.append(Finding("MPS", "warning", found, remedy))
        else:
            working = Finding("MPS", "ok", f"a daemon at {first.mps} lets the ranks on {first.host} share their GPU")
    return findings or working


def _most_on_one_gpu(ranks: list[ProcessFacts]) -> int:
    return max(_ranks_on_gpus(ranks).values(), default=0)


def _ranks_on_gpus(ranks: list[ProcessFacts]) -> Counter[str]:
    return Counter(rank.gpus[index % len(rank.gpus)] for index, rank in enumerate(ranks) if rank.gpus)
